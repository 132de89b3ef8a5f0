package directory

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func TestExpandRefusals(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxRegionPages = 1000 })
	w := r.worker(1)
	bare, _ := r.open(openReq(2))
	ok := ExpandRequest{Medium: base.MediumCXL, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece}
	for name, c := range map[string]struct {
		who    Caller
		change func(*ExpandRequest)
		want   error
		text   string
	}{
		"medium":      {w, func(q *ExpandRequest) { q.Medium = base.MediumSSD }, base.ErrInvalid, "medium"},
		"no cpu":      {w, func(q *ExpandRequest) { q.Medium = base.MediumCPU }, base.ErrDenied, "cpu_bytes"},
		"zero":        {w, func(q *ExpandRequest) { q.Bytes = 0 }, base.ErrInvalid, "bytes"},
		"page":        {w, func(q *ExpandRequest) { q.PageBytes = 0 }, base.ErrInvalid, "page_size"},
		"piece":       {w, func(q *ExpandRequest) { q.PieceBytes = 1 }, base.ErrMismatch, "piece_size"},
		"huge":        {w, func(q *ExpandRequest) { q.Bytes = 1 << 40 }, base.ErrPermanent, "largest"},
		"overflow":    {w, func(q *ExpandRequest) { q.Bytes = ^uint64(0); q.PageBytes = 3 }, base.ErrPermanent, "largest"},
		"pages":       {w, func(q *ExpandRequest) { q.Bytes = 2000 * testPage }, base.ErrLimit, "max-region-pages"},
		"unproved":    {bare, func(*ExpandRequest) {}, base.ErrDenied, "prove"},
		"no sequence": {w, func(q *ExpandRequest) { q.Operation = 0 }, base.ErrInvalid, "sequence"},
	} {
		q := ok
		q.Operation = r.next()
		c.change(&q)
		_, _, err := r.d.ExpandBegin(r.now, c.who, &q)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v naming %q", name, err, c.want, c.text)
		}
	}
	// An engine's page holds the value and its leaf hashes.
	e, _ := r.open(engineReq(3, "e", 0, 1))
	_, _, err := r.d.ExpandBegin(r.now, e, &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: 1 << 20, PageBytes: 1008, PieceBytes: 512})
	wantErr(t, err, base.ErrInvalid)
	r.check()
	if err := r.d.SetPools(r.now, []Pool{{ID: base.PoolID{2}, Medium: base.MediumCPU, Coherence: base.CoherenceHardware}}); !errors.Is(err, base.ErrUnsupported) {
		t.Fatal(err)
	}
	if err := r.d.SetPools(r.now, []Pool{{ID: base.PoolID{2}, Medium: base.MediumCXL}}); !errors.Is(err, base.ErrInvalid) {
		t.Fatal("a pool of unknown coherence was taken (D6)")
	}
}

func TestExpandWhenSessionEnds(t *testing.T) {
	r := newRig(t, nil)
	w := r.worker(1)
	_, ticket, err := r.d.ExpandBegin(r.now, w, &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece})
	if err != nil {
		t.Fatal(err)
	}
	if !r.d.AllocationInFlight() {
		t.Fatal("no allocation is in flight")
	}
	r.d.SessionGone(r.now, w.Session, GonePidfd)
	r.check()
	answer := &RegionGrant{Region: 9, Incarnation: 9, Place: Place{ExtentBytes: 2 << 20, PageBytes: testPage, PageCount: 1, PieceBytes: testPiece}}
	if _, err := r.d.ExpandFinish(r.now, ticket, answer, nil); !errors.Is(err, base.ErrStale) {
		t.Fatal(err)
	}
	if r.count(EffectFreeRegion) != 1 || r.d.AllocationInFlight() {
		t.Fatal("the region of a session that ended does not go back")
	}
	// Twice the same answer changes nothing (S1).
	if _, err := r.d.ExpandFinish(r.now, ticket, answer, nil); !errors.Is(err, base.ErrStale) {
		t.Fatal(err)
	}
	r.check()
}

func TestExpandLost(t *testing.T) {
	r := newRig(t, nil)
	w := r.worker(1)
	req := &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece}
	_, ticket, err := r.d.ExpandBegin(r.now, w, req)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = r.d.ExpandBegin(r.now, w, req)
	wantErr(t, err, base.ErrPending)
	_, err = r.d.ExpandFinish(r.now, ticket, nil, base.ErrTimeout)
	wantErr(t, err, base.ErrTimeout)
	if r.d.shared[0].reserved == 0 {
		t.Fatal("bytes of an allocation of unknown outcome came back (X1)")
	}
	// The client gives the operation up: the reservation ends with its watermark.
	if _, err := r.d.Heartbeat(r.now, w, &HeartbeatRequest{Sequence: 1, Watermark: r.next() + 1}); err != nil {
		t.Fatal(err)
	}
	if r.d.shared[0].reserved != 0 || r.d.AllocationInFlight() {
		t.Fatal("an allocation that nobody asks for stays reserved (L1)")
	}
	_, _, err = r.d.ExpandBegin(r.now, w, req)
	wantErr(t, err, base.ErrStale)
	r.check()
	// An answer that is not what was asked for is refused.
	r.seq = 100
	_, ticket, err = r.d.ExpandBegin(r.now, w, &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece})
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.d.ExpandFinish(r.now, ticket, &RegionGrant{Region: 9, Incarnation: 9, Place: Place{PageBytes: testPage, PageCount: 7}}, nil)
	wantErr(t, err, base.ErrInternal)
	r.check()
}

// An Expand that was refused makes no region any more, whichever delivery of it comes: its
// client has ended the operation.
func TestExpandRefused(t *testing.T) {
	r := newRig(t, nil)
	w := r.worker(1)
	req := &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece}
	why := fmt.Errorf("%w: a test's", base.ErrFull)
	wantErr(t, r.d.RefuseExpand(r.now, w, req.Operation, why), base.ErrFull)
	for range 2 {
		_, _, err := r.d.ExpandBegin(r.now, w, req)
		wantErr(t, err, base.ErrAborted)
		wantErr(t, r.d.RefuseExpand(r.now, w, req.Operation, err), base.ErrAborted)
	}
	// Another delivery is at the resource manager already: that is no refusal.
	req.Operation = r.next()
	_, ticket, err := r.d.ExpandBegin(r.now, w, req)
	if err != nil {
		t.Fatal(err)
	}
	wantErr(t, r.d.RefuseExpand(r.now, w, req.Operation, why), base.ErrPending)
	if _, err := r.d.ExpandFinish(r.now, ticket, nil, base.ErrOffline); !errors.Is(err, base.ErrOffline) {
		t.Fatal(err)
	}
	wantErr(t, r.d.RefuseExpand(r.now, w, req.Operation, why), base.ErrFull)
	stale := w
	stale.Epoch++
	wantErr(t, r.d.RefuseExpand(r.now, stale, r.next(), why), base.ErrFull)
	r.check()
}

func TestSessionBoundAndPoolCapacity(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	req.CXLBytes = 4 << 20
	w, _ := r.open(req)
	if err := r.d.ProveDomains(r.now, w, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	r.expand(w, 1)
	r.expand(w, 1)
	ask := func(who Caller, bytes uint64) error {
		_, _, err := r.d.ExpandBegin(r.now, who, &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: bytes, PageBytes: testPage, PieceBytes: testPiece})
		return err
	}
	wantErr(t, ask(w, testPage), base.ErrLimit) // not full: no victim would help
	wantErr(t, ask(w, 8<<20), base.ErrPermanent)
	o := r.worker(2)
	wantErr(t, ask(o, 250<<20), base.ErrFull)
	wantErr(t, ask(o, 254<<20), base.ErrPermanent) // its tables do not fit beside it
	if err := ask(o, 128<<20); err != nil {
		t.Fatal(err)
	}
	wantErr(t, ask(o, 128<<20), base.ErrFull) // the first is in flight and counts (CAP-07)
	r.check()
}

func TestKeptRegions(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	a, b, empty := r.expand(w, 2), r.expand(w, 2), r.expand(w, 2)
	r.commit(w, rowOf(a, 0, 1, testKey(1)), rowOf(a, 1, 1, testKey(3)), rowOf(b, 0, 1, testKey(2)))
	r.d.SessionGone(r.now, w.Session, GonePidfd)
	freed := r.effects()
	if n := len(freed); n == 0 || freed[n-1].Kind != EffectFreeRegion && r.d.regionOf(1, empty.Region).state != regionFreeing {
		t.Fatal("a region without keys does not go back at once")
	}
	r.d.RegionFreed(r.now, 1, empty.Region, base.ErrUnavailable)
	r.now += time.Second
	r.d.Tick(r.now)
	if r.count(EffectFreeRegion) != 1 {
		t.Fatal("a failed free is not asked for again")
	}
	r.d.RegionFreed(r.now, 1, empty.Region, nil)
	if v := r.probe(o, testKey(1), testKey(2)); v[0].Status() != hot.Hit || v[1].Status() != hot.Hit {
		t.Fatal("kept keys are not found (MS-07)")
	}
	u := r.d.Usage(r.now)
	if u.Pools[0].KeptBytes != 4*testPage || len(u.Sessions) != 2 || u.Sessions[0].State != StateKept || u.Sessions[0].Regions != 2 {
		t.Fatalf("%+v", u)
	}
	// A deleted key of a kept region: the resource manager clears the mark.
	id, err := r.d.Delete(r.now, o, r.next(), []base.Key{testKey(3)})
	if err != nil {
		t.Fatal(err)
	}
	var clearing []Effect
	for _, e := range r.effects() {
		if e.Kind == EffectClearRecords {
			clearing = append(clearing, e)
		}
	}
	if len(clearing) != 1 || len(clearing[0].Pages) != 1 || clearing[0].Pages[0] != 1 {
		t.Fatalf("%+v", clearing)
	}
	r.d.RecordsCleared(r.now, 1, a.Region, clearing[0].Pages, base.ErrUnavailable)
	if _, _, done := r.d.DeleteStatus(id, nil); done {
		t.Fatal("a delete is done whose mark was not cleared")
	}
	r.now += time.Second
	r.d.Tick(r.now)
	if r.count(EffectClearRecords) != 1 {
		t.Fatal("a failed clear is not asked for again")
	}
	r.d.RecordsCleared(r.now, 1, a.Region, clearing[0].Pages, nil)
	if _, _, done := r.d.DeleteStatus(id, nil); !done {
		t.Fatal("the mark is cleared and the delete not done")
	}
	// Room is needed: the region read longest ago goes, whole, when its leases end.
	r.now += time.Second
	acquired := r.next()
	if _, _, err := r.acquireSeq(o, acquired, base.LeaseCopy, hot.ModeEach, []int{1}, testKey(1)); err != nil {
		t.Fatal(err)
	}
	victim, ok := r.d.GiveBackVictim(r.now, 0)
	if !ok || victim.Region != b.Region {
		t.Fatalf("victim %+v, want region %d (MS-10)", victim, b.Region)
	}
	if again, ok := r.d.GiveBackVictim(r.now, 1); !ok || again != victim {
		t.Fatal("two victims at one time")
	}
	if v := r.probe(o, testKey(2)); v[0] != hot.Miss {
		t.Fatal("a victim's key is found")
	}
	r.d.RegionFreed(r.now, 1, b.Region, nil)
	if victim, ok = r.d.GiveBackVictim(r.now, 0); !ok || victim.Region != a.Region {
		t.Fatalf("victim %+v", victim)
	}
	r.effects()
	r.check()
	r.release(o, hot.ReleaseRow{Acquire: acquired, Count: 1})
	if r.count(EffectFreeRegion) != 1 {
		t.Fatal("the victim does not go back when its last lease ends")
	}
	r.d.RegionFreed(r.now, 1, a.Region, base.ErrNotFound)
	if u := r.d.Usage(r.now); u.Regions != 0 || len(u.Sessions) != 1 || u.Objects != 0 {
		t.Fatalf("%+v", u)
	}
	r.check()
}

func TestDeletes(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 4)
	r.commit(w, rowOf(g, 0, 1, testKey(0)), rowOf(g, 1, 1, testKey(1)), rowOf(g, 2, 1, testKey(2)))
	viewed := r.next()
	if _, _, err := r.acquireSeq(o, viewed, base.LeaseView, hot.ModeEach, []int{1}, testKey(0)); err != nil {
		t.Fatal(err)
	}
	seq := r.next()
	id, err := r.d.Delete(r.now, o, seq, []base.Key{testKey(0), testKey(1), testKey(9)})
	if err != nil {
		t.Fatal(err)
	}
	codes, _, done := r.d.DeleteStatus(id, nil)
	if codes[0] != base.CodePinned || codes[1] != base.CodeUnknown || codes[2] != base.CodeNotFound || done {
		t.Fatalf("%v %v", codes, done)
	}
	if v := r.probe(o, testKey(0), testKey(1)); v[0].Status() != hot.Hit || v[1] != hot.Miss {
		t.Fatalf("%v", v)
	}
	if again, err := r.d.Delete(r.now, o, seq, []base.Key{testKey(0)}); again != id || err != nil {
		t.Fatal(again, err)
	}
	_, err = r.d.DeleteNamespace(r.now, o, r.next(), nsA)
	wantErr(t, err, base.ErrPinned)
	_, err = r.d.DeleteNamespace(r.now, o, r.next(), base.NamespaceID{8})
	wantErr(t, err, base.ErrDenied)
	_, err = r.d.OperatorDeleteNamespace(r.now, base.NamespaceID{8})
	wantErr(t, err, base.ErrNotFound)
	ref := PageRef{g.Pool, g.Region, testPage, base.MakeGeneration(uint32(g.Incarnation), 1)}
	wrong := ref
	wrong.Generation++
	if err := r.d.Acknowledge(r.now, w, []PageRef{wrong}, []PageRef{wrong}); err != nil {
		t.Fatal(err)
	}
	if _, _, done := r.d.DeleteStatus(id, nil); done {
		t.Fatal("a mark of another generation counted (S1)")
	}
	// A commit after the delete is new and stays.
	if c := r.commit(w, rowOf(g, 3, 1, testKey(1))); c[0].Code != base.CodeOK {
		t.Fatal(c)
	}
	if err := r.d.Acknowledge(r.now, w, []PageRef{ref}, nil); err != nil {
		t.Fatal(err)
	}
	if codes, _, done = r.d.DeleteStatus(id, nil); codes[1] != base.CodeOK || !done {
		t.Fatalf("%v %v", codes, done)
	}
	if v := r.probe(o, testKey(1)); v[0].Status() != hot.Hit {
		t.Fatal("a commit of a higher order is hidden")
	}
	r.check()
	// A whole namespace: regions of live writers stay granted.
	r.release(o, hot.ReleaseRow{Acquire: viewed, Count: 1})
	ns, err := r.d.DeleteNamespace(r.now, o, r.next(), nsA)
	if err != nil {
		t.Fatal(err)
	}
	if _, n, done := r.d.DeleteStatus(ns, nil); n != 3 || done {
		t.Fatal(n, done)
	}
	for page := range uint64(4) {
		ref.Offset = page * testPage
		if err := r.d.Acknowledge(r.now, w, []PageRef{ref}, []PageRef{ref}); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, done := r.d.DeleteStatus(ns, nil); !done || r.d.regionOf(g.Pool, g.Region) == nil || r.d.store.objectCount != 0 {
		t.Fatal("the namespace is not gone")
	}
	// The results stay for a retry until the watermark passes them.
	if len(r.d.deletes) != 2 {
		t.Fatalf("%d deletes known", len(r.d.deletes))
	}
	if _, err := r.d.Heartbeat(r.now, o, &HeartbeatRequest{Sequence: 1, Watermark: r.next()}); err != nil {
		t.Fatal(err)
	}
	if len(r.d.deletes) != 0 || len(r.d.markWaiters) != 0 {
		t.Fatal("deletes are kept for ever")
	}
	r.check()
}

func TestLeft(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 2)
	empty, returned := r.expand(w, 2), r.expand(w, 2)
	r.commit(w, rowOf(g, 0, 1, testKey(0)), rowOf(returned, 0, 1, testKey(5)))
	read := r.next()
	if _, _, err := r.acquireSeq(o, read, base.LeaseCopy, hot.ModeEach, []int{1}, testKey(5)); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Return(r.now, w, r.next(), returned.Pool, returned.Region); err != nil {
		t.Fatal(err)
	}
	viewed := r.next()
	if _, _, err := r.acquireSeq(w, viewed, base.LeaseView, hot.ModeEach, []int{1}, testKey(0)); err != nil {
		t.Fatal(err)
	}
	wantErr(t, r.d.Close(r.now, w, CloseDrained), base.ErrPinned)
	wantErr(t, r.d.Close(r.now, w, 9), base.ErrInvalid)
	if err := r.d.Close(r.now, w, CloseLeft); err != nil {
		t.Fatal(err)
	}
	_, err := r.d.Open(r.now, &OpenRequest{Session: w.Session, Secret: Secret{5}, Proof: ProofProcess, Role: base.RoleWorker, Namespace: nsA, Opaque: true, PieceBytes: testPiece})
	wantErr(t, err, base.ErrClosed)
	r.release(o, hot.ReleaseRow{Acquire: read, Count: 1})
	r.now += 6 * time.Second
	r.beat(o)
	r.now += 6 * time.Second
	r.beat(o)
	r.d.Tick(r.now)
	if v := r.probe(o, testKey(0)); v[0].Status() != hot.Hit {
		t.Fatal("a left session's replica is hidden")
	}
	if _, ok := r.d.GiveBackVictim(r.now, 0); ok || r.count(EffectFreeRegion) != 0 {
		t.Fatal("a left session's region went back before its end is proved")
	}
	r.check()
	r.d.SessionGone(r.now, w.Session, GonePidfd)
	if n := r.count(EffectFreeRegion); n != 2 || r.d.regionOf(1, empty.Region).state != regionFreeing {
		t.Fatalf("%d regions go back", n)
	}
	r.check()
}

func TestLedgers(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxOperations = 3; c.Limits.MaxOperationRows = hot.MaxKeys })
	w := r.worker(1)
	g := r.expand(w, 8)
	one := r.next()
	if _, err := r.commitSeq(w, one, rowOf(g, 0, 1, testKey(0))); err != nil {
		t.Fatal(err)
	}
	if _, err := r.commitSeq(w, r.next(), rowOf(g, 1, 1, testKey(1))); err != nil {
		t.Fatal(err)
	}
	_, err := r.commitSeq(w, r.next(), rowOf(g, 2, 1, testKey(2)))
	wantErr(t, err, base.ErrLimit)
	if !strings.Contains(err.Error(), "max-operations") {
		t.Fatal(err)
	}
	// A full ledger forgets nothing (RPC-13).
	if res, err := r.commitSeq(w, one, rowOf(g, 0, 1, testKey(0))); err != nil || res[0].Code != base.CodeOK {
		t.Fatal(res, err)
	}
	_, err = r.d.Release(r.now, w, &hot.ReleaseRequest{Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: 900, Count: 1})}, nil)
	wantErr(t, err, base.ErrLimit)
	_, _, err = r.d.Resolve(r.now, w, &hot.ResolveRequest{TargetServerEpoch: 77, TargetEpoch: 1, Target: 901}, nil)
	wantErr(t, err, base.ErrLimit)
	// The results of an older epoch of the session stay until the watermark.
	req := openReq(1)
	req.PreviousSecret, req.Secret = Secret{1, 1}, Secret{4}
	w, _ = r.open(req)
	outcome, out, err := r.d.Resolve(r.now, w, &hot.ResolveRequest{TargetServerEpoch: 77, TargetEpoch: 1, Target: one}, nil)
	if err != nil || outcome != hot.OutcomeCommitted || hot.CommitResults(out).At(0).Code != base.CodeOK {
		t.Fatal(outcome, err)
	}
	if _, err := r.d.Heartbeat(r.now, w, &HeartbeatRequest{Sequence: 1, Watermark: r.seq + 1}); err != nil {
		t.Fatal(err)
	}
	_, err = r.commitSeq(w, one, rowOf(g, 0, 1, testKey(0)))
	wantErr(t, err, base.ErrStale)
	if outcome, _, err := r.d.Resolve(r.now, w, &hot.ResolveRequest{TargetServerEpoch: 77, TargetEpoch: 1, Target: one}, nil); err != nil || outcome != hot.OutcomeUnknown {
		t.Fatal(outcome, err)
	}
	r.check()
}

func TestEventWindow(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxEvents = 4; c.EventTimeout = 20 * time.Second })
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 16)
	for i := range uint64(16) {
		r.commit(w, rowOf(g, i, 1, testKey(i)))
	}
	if _, err := r.d.DeleteNamespace(r.now, o, r.next(), nsA); err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	last := uint64(0)
	for len(seen) < 16 {
		list, err := r.d.PendingEvents(r.now, w, last, nil)
		if err != nil || len(list) == 0 || len(list) > 4 {
			t.Fatalf("%d events, %v", len(list), err)
		}
		for _, e := range list {
			if e.Number != last+1 {
				t.Fatalf("event %d after %d", e.Number, last)
			}
			last = e.Number
			if e.Kind == EventRetire {
				seen[e.Offset] = true
			}
		}
		s := r.d.sessions[w.Session]
		if _, err := r.d.Heartbeat(r.now, w, &HeartbeatRequest{Sequence: s.beat + 1, LastEvent: last}); err != nil {
			t.Fatal(err)
		}
		r.check()
	}
	// A new epoch gives the unfinished ones again, from 1.
	req := openReq(1)
	req.PreviousSecret, req.Secret = Secret{1, 1}, Secret{6}
	w, _ = r.open(req)
	list, err := r.d.PendingEvents(r.now, w, 0, nil)
	if err != nil || len(list) != 4 || list[0].Number != 1 {
		t.Fatalf("%d events, %v", len(list), err)
	}
	// A session that takes nothing is fenced, not grown for ever.
	r.effects()
	for range 4 {
		r.now += 6 * time.Second
		s := r.d.sessions[w.Session]
		_, _ = r.d.Heartbeat(r.now, w, &HeartbeatRequest{Sequence: s.beat + 1})
		r.d.Tick(r.now)
	}
	fenced := false
	for _, e := range r.effects() {
		fenced = fenced || (e.Kind == EffectCloseConnections && strings.Contains(e.Event.Reason, "not acknowledged") && e.Epoch == w.Epoch)
	}
	_, err = r.d.PendingEvents(r.now, w, 0, nil)
	if !fenced || !errors.Is(err, base.ErrStale) {
		t.Fatalf("fenced %v, %v", fenced, err)
	}
	r.check()
}

func TestOrderExhausted(t *testing.T) {
	r := newRig(t, nil)
	w := r.worker(1)
	g := r.expand(w, 2)
	r.d.commitCount = base.MaxCommitCounter - 1
	res := r.commit(w, rowOf(g, 0, 1, testKey(0)), rowOf(g, 1, 1, testKey(1)))
	if res[0].Code != base.CodeOK || res[1].Code != base.CodeExhausted {
		t.Fatalf("%+v: a counter at its end is refused, never wrapped", res)
	}
	r.check()
}

func TestCommitRows(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g, og := r.expand(w, 4), r.expand(o, 4)
	good := rowOf(g, 0, 1, testKey(0))
	for name, c := range map[string]struct {
		change func(*hot.CommitRow)
		want   base.Code
	}{
		"pool":        {func(q *hot.CommitRow) { q.Pool = 9 }, base.CodeNotFound},
		"region":      {func(q *hot.CommitRow) { q.Region = 1 }, base.CodeNotFound},
		"not mine":    {func(q *hot.CommitRow) { *q = rowOf(og, 0, 1, testKey(0)) }, base.CodeDenied},
		"offset":      {func(q *hot.CommitRow) { q.Offset = 1 }, base.CodeInvalid},
		"bounds":      {func(q *hot.CommitRow) { q.Offset = 4 * testPage }, base.CodeInvalid},
		"far":         {func(q *hot.CommitRow) { q.Offset = ^uint64(0) - testPage + 1 }, base.CodeInvalid},
		"empty":       {func(q *hot.CommitRow) { q.Length = 0 }, base.CodeInvalid},
		"long":        {func(q *hot.CommitRow) { q.Length = testPage + 1 }, base.CodeInvalid},
		"zero key":    {func(q *hot.CommitRow) { q.Key = base.Key{} }, base.CodeInvalid},
		"incarnation": {func(q *hot.CommitRow) { q.Generation = base.MakeGeneration(uint32(g.Incarnation)+1, 1) }, base.CodeStale},
		"counter":     {func(q *hot.CommitRow) { q.Generation = base.MakeGeneration(uint32(g.Incarnation), 0) }, base.CodeStale},
	} {
		row := good
		c.change(&row)
		if res := r.commit(w, row); res[0].Code != c.want || res[0].Order != 0 {
			t.Errorf("%s: %+v, want %v (DM-14, DM-15)", name, res[0], c.want)
		}
	}
	if res := r.commit(w, good); res[0].Code != base.CodeOK {
		t.Fatal(res)
	}
	if res := r.commit(w, rowOf(g, 0, 2, testKey(5))); res[0].Code != base.CodeStale {
		t.Fatalf("%+v: a page in use was written (R2)", res)
	}
	r.check()
}

// TestPageReuse: a page comes back only after marks, leases and the writer's word, and
// its old generation never means anything again (DM-15, R3, S1).
func TestPageReuse(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 1)
	first := rowOf(g, 0, 1, testKey(0))
	r.commit(w, first)
	acquired := r.next()
	if _, _, err := r.acquireSeq(o, acquired, base.LeaseCopy, hot.ModeEach, []int{1}, testKey(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.d.Delete(r.now, o, r.next(), []base.Key{testKey(0)}); err != nil {
		t.Fatal(err)
	}
	ref := []PageRef{{g.Pool, g.Region, 0, first.Generation}}
	reuse := func(want base.Code, counter uint32) {
		t.Helper()
		if res := r.commit(w, rowOf(g, 0, counter, testKey(1))); res[0].Code != want {
			t.Fatalf("commit of generation %d: %+v, want %v", counter, res[0], want)
		}
	}
	if err := r.d.Acknowledge(r.now, w, nil, ref); err != nil {
		t.Fatal(err)
	}
	reuse(base.CodeStale, 2) // nobody asked for it yet
	if err := r.d.Acknowledge(r.now, w, ref, ref); err != nil {
		t.Fatal(err)
	}
	reuse(base.CodeStale, 2) // a reader is left
	r.release(o, hot.ReleaseRow{Acquire: acquired, Count: 1})
	reuse(base.CodeStale, 2) // the writer has not acknowledged
	if err := r.d.Acknowledge(r.now, w, nil, ref); err != nil {
		t.Fatal(err)
	}
	reuse(base.CodeStale, 1)
	reuse(base.CodeOK, 2)
	r.check()
}
