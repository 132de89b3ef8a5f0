package rm

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

func (o owner) hold(session []byte, sequence uint64, handles ...*maruv1.RegionHandle) *maruv1.HoldRequest {
	return &maruv1.HoldRequest{SessionId: session, ServerId: o.id, OwnerIncarnation: o.inc, Sequence: sequence, Handles: handles}
}

// next gets an event within a deadline.
func next[E any](t *testing.T, recv func() (E, error)) E {
	t.Helper()
	type result struct {
		e   E
		err error
	}
	ch := make(chan result, 1)
	go func() { e, err := recv(); ch <- result{e, err} }()
	select {
	case r := <-ch:
		if r.err != nil {
			t.Fatal(r.err)
		}
		return r.e
	case <-time.After(10 * time.Second):
		t.Fatal("no event")
		panic("unreachable")
	}
}

// A killed mapper is proved gone by its pidfd: what it held and drains is free,
// and the owner hears of it.
func TestMapperIsKilled(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a, b := o.allocate(t, c, 1), o.allocate(t, c, 2)
	session := newID()
	m := startMapper(t, s, o.hold(session, 1, a.GetHandle(), b.GetHandle()))
	events, err := c.WatchOwner(ctxOf(t), &maruv1.WatchOwnerRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
	if err != nil {
		t.Fatal(err)
	}
	if snap := next(t, events.Recv).GetSnapshot(); snap == nil || len(snap.GetSessions()) != 1 {
		t.Fatalf("snapshot: %v", snap)
	}
	if _, err := c.Unhold(ctxOf(t), &maruv1.UnholdRequest{SessionId: session, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}}); !errors.Is(err, base.ErrDenied) {
		t.Errorf("another process unholds: %v", err)
	}
	if r, err := c.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{SessionId: session}); err != nil || len(r.GetHolds()) != 2 {
		t.Errorf("holds of the session: %v, %v", r, err)
	}
	if r, err := c.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{SessionId: newID()}); err != nil || len(r.GetHolds()) != 0 {
		t.Errorf("holds of another session: %v, %v", r, err)
	}
	if r, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()}); err != nil || !r.GetDraining() {
		t.Fatalf("%v, %v", r, err)
	}
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, a.GetHandle())); !errors.Is(err, base.ErrDraining) {
		t.Errorf("hold of a draining region: %v", err)
	}
	m.kill()
	gone := next(t, events.Recv).GetSessionGone()
	if gone == nil || string(gone.GetSessionId()) != string(session) || gone.GetProof() != "pidfd" {
		t.Fatalf("%v", gone)
	}
	if freed := next(t, events.Recv).GetRegionFreed(); freed == nil || freed.GetRegionId() != a.GetHandle().GetRegionId() {
		t.Fatalf("%v", freed)
	}
	if holds, err := c.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{}); err != nil || len(holds.GetHolds()) != 0 {
		t.Errorf("%v, %v", holds, err)
	}
	// A newer incarnation fences: the stream says so and ends.
	o2 := startOwner(t, c, o.id)
	if e := next(t, events.Recv).GetFenced(); e == nil || e.GetIncarnation() != o2.inc {
		t.Fatalf("%v", e)
	}
	if _, err := events.Recv(); !errors.Is(err, base.ErrFenced) && !errors.Is(err, io.EOF) {
		t.Errorf("after the fence: %v", err)
	}
	if _, err := c.Allocate(ctxOf(t), o.request(9)); !errors.Is(err, base.ErrFenced) {
		t.Errorf("the older incarnation allocates: %v", err)
	}
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, b.GetHandle())); !errors.Is(err, base.ErrFenced) {
		t.Errorf("a hold for the older incarnation: %v", err)
	}
}

// A mapper that dies while the resource manager is away is found dead at its
// start; one that lives is watched again.
func TestMapperOverRestart(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a, b := o.allocate(t, c, 1), o.allocate(t, c, 2)
	dead, alive := newID(), newID()
	md := startMapper(t, s, o.hold(dead, 1, a.GetHandle()))
	ma := startMapper(t, s, o.hold(alive, 1, b.GetHandle()))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	md.kill()
	s = f.start()
	c = client(t, over(s))
	waitHolds := func(want int) []*maruv1.HoldInfo {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			holds, err := c.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if len(holds.GetHolds()) == want {
				return holds.GetHolds()
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d holds, want %d", len(holds.GetHolds()), want)
			}
		}
	}
	if h := waitHolds(1); string(h[0].GetSessionId()) != string(alive) || !h[0].GetProvable() {
		t.Fatalf("%v", h)
	}
	ma.kill()
	waitHolds(0)
}

func TestSessionIsToldToDrain(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a, b := o.allocate(t, c, 1), o.allocate(t, c, 2)
	session := newID()
	if _, err := c.Hold(ctxOf(t), o.hold(session, 1, a.GetHandle(), b.GetHandle())); err != nil {
		t.Fatal(err)
	}
	free := func(h *maruv1.RegionHandle) {
		t.Helper()
		if _, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: h}); err != nil {
			t.Fatal(err)
		}
	}
	free(a.GetHandle())
	w, err := c.WatchSession(ctxOf(t), &maruv1.WatchSessionRequest{SessionId: session})
	if err != nil {
		t.Fatal(err)
	}
	if e := next(t, w.Recv); e.GetRegionId() != a.GetHandle().GetRegionId() || !e.GetDraining() {
		t.Errorf("before the watch: %v", e)
	}
	free(b.GetHandle())
	if e := next(t, w.Recv); e.GetRegionId() != b.GetHandle().GetRegionId() {
		t.Errorf("%v", e)
	}
}

func TestDomainProof(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	pool := s.glance.Load().pools[0].ID
	session := newID()
	start := func(session []byte) *maruv1.StartDomainProofResponse {
		t.Helper()
		r, err := c.StartDomainProof(ctxOf(t), &maruv1.StartDomainProofRequest{SessionId: session, PoolId: pool[:]})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	proved := func() int {
		t.Helper()
		r, err := c.CheckDomainProof(ctxOf(t), &maruv1.CheckDomainProofRequest{SessionId: session, PoolIds: [][]byte{pool[:]}})
		if err != nil {
			t.Fatal(err)
		}
		return len(r.GetProvedPoolIds())
	}
	finish := func(slot uint32, nonce []byte) error {
		_, err := c.FinishDomainProof(ctxOf(t), &maruv1.FinishDomainProofRequest{SessionId: session, PoolId: pool[:], Slot: slot, Nonce: nonce})
		return err
	}
	d := start(session)
	if err := finish(d.GetSlot(), make([]byte, 32)); !errors.Is(err, base.ErrDenied) || proved() != 0 {
		t.Errorf("a wrong nonce: %v", err)
	}
	if err := finish(d.GetSlot(), make([]byte, 32)); !errors.Is(err, base.ErrStale) {
		t.Errorf("a second guess: %v", err)
	}
	d = start(session)
	info, err := ShowDevice(t.Context(), DeviceOptions{Path: d.GetPath()})
	if err != nil || info.Header.Pool != pool {
		t.Fatalf("%+v, %v", info, err)
	}
	b := readFile(t, d.GetPath())[poolfmt.NonceOffset(d.GetSlot()):]
	n, err := poolfmt.DecodeNonce(b, pool)
	if err != nil || string(n.Session[:]) != string(session) {
		t.Fatalf("%+v, %v", n, err)
	}
	if err := finish(d.GetSlot(), n.Value[:]); err != nil || proved() != 1 {
		t.Errorf("the right nonce: %v, proved %d", err, proved())
	}
	if err := finish(d.GetSlot(), n.Value[:]); !errors.Is(err, base.ErrStale) {
		t.Errorf("a replay: %v", err)
	}
	for range poolfmt.NonceSlotCount {
		start(newID())
	}
	if _, err := c.StartDomainProof(ctxOf(t), &maruv1.StartDomainProofRequest{SessionId: newID(), PoolId: pool[:]}); !errors.Is(err, base.ErrBusy) {
		t.Errorf("more mappers than slots: %v", err)
	}
}

// Records: the owner reads and clears them once the writer cannot write any more.
func TestRecords(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	writer := o.id // request() says so
	if _, err := c.Hold(ctxOf(t), o.hold(writer, 1, a.GetHandle())); err != nil {
		t.Fatal(err)
	}
	pool := base.PoolID(a.GetHandle().GetPoolId())
	file := f.cfg.Pools[0].Path
	at := poolfmt.Place{Pool: pool, Region: base.RegionID(a.GetHandle().GetRegionId()), Page: 3}
	p := a.GetPlace()
	line := int64(p.GetOffset() + p.GetTableOffset())
	r, err := poolfmt.DecodeRegion(readFile(t, file)[line:], pool)
	if err != nil || r.PageCount != 16 || uint32(r.Region) != a.GetHandle().GetRegionId() {
		t.Fatalf("region line: %+v, %v", r, err)
	}
	rec := make([]byte, poolfmt.RecordBytes)
	if err := poolfmt.EncodeRecord(rec, at, poolfmt.Record{Order: 7, Key: base.Key{1}, Incarnation: r.Incarnation, Length: 5}); err != nil {
		t.Fatal(err)
	}
	writeFileAt(t, file, line+poolfmt.RegionLineBytes+3*poolfmt.RecordBytes, rec)

	read := func() (*maruv1.ReadRecordsResponse, error) {
		return c.ReadRecords(ctxOf(t), &maruv1.ReadRecordsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, PoolId: pool[:], RegionId: uint32(at.Region), PageCount: 16})
	}
	clearPages := func(pages ...uint64) error {
		_, err := c.ClearRecords(ctxOf(t), &maruv1.ClearRecordsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, PoolId: pool[:], RegionId: uint32(at.Region), Pages: pages})
		return err
	}
	if _, err := read(); !errors.Is(err, base.ErrBusy) {
		t.Errorf("records of a live writer: %v", err)
	}
	if err := clearPages(3); !errors.Is(err, base.ErrBusy) {
		t.Errorf("clearing under a live writer: %v", err)
	}
	if _, err := c.Unhold(ctxOf(t), &maruv1.UnholdRequest{SessionId: writer, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}}); err != nil {
		t.Fatal(err)
	}
	got, err := read()
	if err != nil {
		t.Fatal(err)
	}
	if x, found, err := poolfmt.DecodeRecord(got.GetRecords()[3*poolfmt.RecordBytes:], at); err != nil || !found || x.Order != 7 {
		t.Fatalf("%+v, %v, %v", x, found, err)
	}
	if err := clearPages(16); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a page out of bounds: %v", err)
	}
	if err := clearPages(3); err != nil {
		t.Fatal(err)
	}
	if got, err = read(); err != nil {
		t.Fatal(err)
	}
	if _, found, err := poolfmt.DecodeRecord(got.GetRecords()[3*poolfmt.RecordBytes:], at); found || err != nil {
		t.Errorf("the mark is there after clearing: %v", err)
	}
	// An allocation that is retried after mapping does not touch the table.
	writeFileAt(t, file, line+poolfmt.RegionLineBytes+3*poolfmt.RecordBytes, rec)
	o.allocate(t, c, 1)
	if got, err = read(); err != nil || got.GetRecords()[3*poolfmt.RecordBytes] != 7 {
		t.Errorf("a retry zeroed the table of a mapped region: %v", err)
	}
}

// On a software-coherent pool pages are rounded up to 4096, and a dead mapper's
// range is written back before it is free.
func TestSoftwareCoherence(t *testing.T) {
	if !flush.Supported() {
		t.Skip("this processor or build cannot write cache lines back")
	}
	f := newFixture(t)
	f.cfg.Pools[0].Coherence = base.CoherenceSoftware
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	r := o.request(1)
	r.PageSize = 5000
	a, err := c.Allocate(ctxOf(t), r)
	if err != nil || a.GetPlace().GetPageSize() != 8192 || a.GetPlace().GetLength() != 16*8192 {
		t.Fatalf("%v, %v", a, err)
	}
	if again, err := c.Allocate(ctxOf(t), r); err != nil || again.GetHandle().GetRegionId() != a.GetHandle().GetRegionId() {
		t.Errorf("a retry with the asked page size: %v, %v", again, err)
	}
	m := startMapper(t, s, o.hold(newID(), 1, a.GetHandle()))
	if _, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()}); err != nil {
		t.Fatal(err)
	}
	events, err := c.WatchOwner(ctxOf(t), &maruv1.WatchOwnerRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
	if err != nil {
		t.Fatal(err)
	}
	next(t, events.Recv)
	m.kill()
	if e := next(t, events.Recv).GetSessionGone(); e == nil {
		t.Fatal("no proof")
	}
	if e := next(t, events.Recv).GetRegionFreed(); e == nil {
		t.Fatal("not freed")
	}
}

// A pool keeps its size, takes a new name, and may move.
func TestKnownPool(t *testing.T) {
	f := newFixture(t)
	id := func() base.PoolID {
		s := f.start()
		defer func() { _ = s.Close() }()
		p := s.glance.Load().pools
		if len(p) != 1 || p[0].OfflineReason != "" || p[0].Name != f.cfg.Pools[0].Name {
			t.Fatalf("%+v", p)
		}
		return p[0].ID
	}
	first := id()
	f.cfg.Pools[0].SizeBytes *= 2
	f.refused(t, base.ErrMismatch, "size")
	f.cfg.Pools[0].SizeBytes = 0
	f.cfg.Pools[0].Name = "renamed"
	if got := id(); got != first {
		t.Errorf("another pool %s", got)
	}
	moved := f.cfg.Pools[0].Path + "-moved"
	if err := os.Rename(f.cfg.Pools[0].Path, moved); err != nil {
		t.Fatal(err)
	}
	f.cfg.Pools[0].Path = moved
	if got := id(); got != first {
		t.Errorf("another pool %s", got)
	}
	// A copy shows the same pool; one of them is used.
	twin := moved + "-copy"
	if err := os.WriteFile(twin, readFile(t, moved), 0o600); err != nil {
		t.Fatal(err)
	}
	f.cfg.Pools = append(f.cfg.Pools, PoolSpec{Kind: dax.KindFile, Path: twin})
	f.refused(t, base.ErrBusy, "copy")
}

// A region whose table may not have been written (a crash after the commit) is
// prepared by its first hold, and reads as blank until then.
func TestFirstHoldWritesTheTable(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	table := int64(a.GetPlace().GetOffset() + a.GetPlace().GetTableOffset())
	noise := bytes.Repeat([]byte{0xee}, poolfmt.RegionLineBytes+16*poolfmt.RecordBytes)
	writeFileAt(t, f.cfg.Pools[0].Path, table, noise)
	s = f.start()
	c = client(t, over(s))
	records, err := c.ReadRecords(ctxOf(t), &maruv1.ReadRecordsRequest{
		OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, PoolId: a.GetHandle().GetPoolId(), RegionId: a.GetHandle().GetRegionId(), PageCount: 16,
	})
	if err != nil || !allZero(records.GetRecords()) {
		t.Errorf("records of a region that nobody mapped: %v", err)
	}
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, a.GetHandle())); err != nil {
		t.Fatal(err)
	}
	now := readFile(t, f.cfg.Pools[0].Path)[table:][:len(noise)]
	if _, err := poolfmt.DecodeRegion(now, base.PoolID(a.GetHandle().GetPoolId())); err != nil || !allZero(now[poolfmt.RegionLineBytes:]) {
		t.Errorf("the table was not written: %v", err)
	}
	// From then on it belongs to the mappers, also over a restart.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	writeFileAt(t, f.cfg.Pools[0].Path, table, noise)
	s = f.start()
	c = client(t, over(s))
	o.allocate(t, c, 1)
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, a.GetHandle())); err != nil {
		t.Fatal(err)
	}
	if now := readFile(t, f.cfg.Pools[0].Path)[table:][:len(noise)]; !bytes.Equal(now, noise) {
		t.Error("the table of a mapped region was written again")
	}
}
