package session

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

var bothMedia = []base.Medium{base.MediumCPU, base.MediumCXL}

func newCore(t testing.TB) *Core {
	t.Helper()
	c := New(Config{MaxOperations: 64, MaxLeases: 32})
	open(c, 1, 100)
	return c
}

func open(c *Core, epoch base.Epoch, server base.ServerEpoch) *Snapshot {
	return c.Opened(Opening{
		Epoch: epoch, ServerEpoch: server, Sent: 0, TTL: 10 * time.Second, Margin: time.Second,
		Pools: []PoolNumber{{ID: base.PoolID{1}, Medium: base.MediumCXL, Number: uint32(server)}, {Medium: base.MediumCPU, Number: 9}},
	})
}

func shared(id base.RegionID, pages uint64) RegionInfo {
	return RegionInfo{ID: id, Pool: base.PoolID{1}, PoolNumber: 100, Medium: base.MediumCXL, Incarnation: base.Incarnation(id) + 50, PageBytes: 4096, PageCount: pages}
}

func private(n base.RegionID, pages uint64) RegionInfo {
	return RegionInfo{ID: base.FirstPrivateRegion + n, PoolNumber: 9, Medium: base.MediumCPU, PageBytes: 4096, PageCount: pages}
}

func add(t testing.TB, c *Core, info RegionInfo) {
	t.Helper()
	info.ServerEpoch = c.ServerEpoch()
	if err := c.AddRegion(info, Own); err != nil {
		t.Fatal(err)
	}
}

func result(code base.Code, order uint64) hot.CommitResults {
	return hot.AppendCommitResult(nil, hot.CommitResult{Code: code, Order: base.CommitOrder(order)})
}

func wantState(t testing.TB, c *Core, r base.RegionID, i base.PageIndex, want PageState) {
	t.Helper()
	if got, _ := c.PageState(r, i); got != want {
		t.Fatalf("page %d of region %d is %s, want %s", i, r, got, want)
	}
}

// begin allocates a page and begins its Commit.
func begin(t testing.TB, c *Core) (PageRef, base.Sequence) {
	t.Helper()
	ref, _, ok := c.Alloc(bothMedia)
	if !ok {
		t.Fatal("no page")
	}
	rows := make([]hot.CommitRow, 1)
	seq, err := c.BeginCommit([]Commit{{Key: base.Key{1}, Region: ref.Region, Index: ref.Index, Length: 10}}, rows)
	if err != nil {
		t.Fatal(err)
	}
	ref.Generation = rows[0].Generation
	return ref, seq
}

func event(c *Core, k EventKind, ref PageRef) Event {
	return Event{Number: c.LastEvent() + 1, Kind: k, Region: ref.Region, Offset: uint64(ref.Index) * 4096, Generation: ref.Generation}
}

func TestValidity(t *testing.T) {
	c := New(Config{})
	if c.Valid(0) {
		t.Fatal("valid before it was opened")
	}
	open(c, 1, 100)
	if !c.Valid(9*time.Second-1) || c.Valid(9*time.Second) {
		t.Fatal("the session ends TTL - margin after Open was sent")
	}
	if !c.Acknowledged(1, 100, 5*time.Second, 0) || !c.Valid(14*time.Second-1) || c.Valid(14*time.Second) {
		t.Fatal("the send time of the acknowledged heartbeat counts")
	}
	c.Acknowledged(1, 100, 3*time.Second, 0)
	if !c.Valid(14*time.Second - 1) {
		t.Fatal("an answer that was overtaken took validity back")
	}
	if c.Acknowledged(2, 100, time.Hour, 0) || c.Acknowledged(1, 101, time.Hour, 0) || c.Valid(time.Minute) {
		t.Fatal("a heartbeat of another epoch counted (S1)")
	}
	c.Fence()
	if c.Valid(0) || c.Acknowledged(1, 100, time.Hour, 0) {
		t.Fatal("valid after a fence")
	}
}

func TestLedger(t *testing.T) {
	l := newLedger(4)
	var seqs []base.Sequence
	for range 4 {
		s, err := l.begin()
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, s)
	}
	if _, err := l.begin(); base.CodeOf(err) != base.CodeLimit {
		t.Fatal(err)
	}
	l.end(seqs[1])
	l.end(seqs[1])
	if l.base != seqs[0] {
		t.Fatal("the watermark passed an open operation")
	}
	l.end(seqs[0])
	if l.base != seqs[2] {
		t.Fatal("the watermark is not at the lowest open operation")
	}
	l.end(seqs[3])
	l.end(seqs[2])
	if s, err := l.begin(); err != nil || s != l.base || s != 5 {
		t.Fatal(s, err)
	}
}

// TestLedgerModel compares the ledger with a map.
func TestLedgerModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLedger(20)
		open := map[base.Sequence]bool{}
		next := base.Sequence(1)
		for range rapid.IntRange(0, 300).Draw(t, "steps") {
			if rapid.Bool().Draw(t, "begin") {
				s, err := l.begin()
				if full := int(next-l.base) >= 20; full != (err != nil) {
					t.Fatalf("begin with %d in the window: %v", next-l.base, err)
				}
				if err != nil {
					continue
				}
				if s != next {
					t.Fatalf("sequence %d, want %d", s, next)
				}
				open[s] = true
				next++
			} else {
				s := base.Sequence(rapid.Uint64Range(0, uint64(next)+2).Draw(t, "end"))
				l.end(s)
				delete(open, s)
			}
			low := next
			for s := range open {
				low = min(low, s)
			}
			if l.base != low || l.open != len(open) {
				t.Fatalf("watermark %d, want %d; %d open, want %d", l.base, low, l.open, len(open))
			}
		}
	})
}

func TestRetireBeforeAnswerForbidsTheMark(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 4))
	ref, seq := begin(t, c)
	ok, clear := c.Receive(event(c, RetireEvent, ref))
	if !ok || clear != ref {
		t.Fatal(ok, clear)
	}
	wantState(t, c, 1, ref.Index, Retiring)
	c.EndCommit(seq, result(base.CodeOK, 7))
	if _, may := c.MayMark(ref, 1, 100); may {
		t.Fatal("a mark after a retire (R7)")
	}
	wantState(t, c, 1, ref.Index, Retiring)
	c.Cleared(ref, true)
	c.Receive(event(c, ReclaimEvent, ref))
	wantState(t, c, 1, ref.Index, Retiring)
	cleared, reclaimed := c.TakeAcks(nil, nil)
	if len(cleared) != 1 || len(reclaimed) != 1 || cleared[0].Offset != 0 || cleared[0].PoolNumber != 100 {
		t.Fatal(cleared, reclaimed)
	}
	c.ReturnAcks(cleared, reclaimed, 100)
	cleared, reclaimed = c.TakeAcks(nil, nil)
	c.AcksTaken(reclaimed, 99)
	wantState(t, c, 1, ref.Index, Retiring)
	c.AcksTaken(reclaimed, 100)
	wantState(t, c, 1, ref.Index, Free)
	_ = cleared
}

func TestMarkOnlyInItsEpoch(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 4))
	ref, seq := begin(t, c)
	if _, may := c.MayMark(ref, 1, 100); may {
		t.Fatal("a mark before the answer")
	}
	c.EndCommit(seq, result(base.CodeOK, 7))
	stale := ref
	stale.Generation++
	for _, bad := range []struct {
		ref    PageRef
		epoch  base.Epoch
		server base.ServerEpoch
	}{{stale, 1, 100}, {ref, 2, 100}, {ref, 1, 101}} {
		if _, may := c.MayMark(bad.ref, bad.epoch, bad.server); may {
			t.Fatalf("a mark for %+v", bad)
		}
	}
	if order, may := c.MayMark(ref, 1, 100); !may || order != 7 {
		t.Fatal(order, may)
	}
	// A reclaim of a page with a mark clears it first.
	_, clear := c.Receive(event(c, ReclaimEvent, ref))
	if clear != ref {
		t.Fatal("a marked page was freed without clearing its mark")
	}
	c.Cleared(ref, false)
	if _, reclaimed := c.TakeAcks(nil, nil); len(reclaimed) != 0 {
		t.Fatal("acknowledged although the mark could not be cleared")
	}
}

func TestUnknownOutcome(t *testing.T) {
	for _, tc := range []struct {
		name    string
		outcome hot.Outcome
		results hot.CommitResults
		want    PageState
	}{
		{"committed", hot.OutcomeCommitted, result(base.CodeOK, 3), Ready},
		{"retired since", hot.OutcomeCommitted, result(base.CodeRetired, 3), Retiring},
		{"another was first", hot.OutcomeCommitted, result(base.CodeAlreadyStored, 3), Free},
		{"aborted", hot.OutcomeAborted, nil, Free},
		{"unknown", hot.OutcomeUnknown, nil, Quarantined},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCore(t)
			add(t, c, shared(1, 4))
			ref, seq := begin(t, c)
			c.LoseCommit(seq)
			wantState(t, c, 1, ref.Index, Quarantined)
			if lost := c.LostCommits(nil); len(lost) != 1 || lost[0] != (Lost{Sequence: seq, Epoch: 1, ServerEpoch: 100}) || c.Watermark() != seq {
				t.Fatal(lost, c.Watermark())
			}
			c.Resolved(seq, tc.outcome, tc.results)
			wantState(t, c, 1, ref.Index, tc.want)
			if len(c.LostCommits(nil)) != 0 || c.Watermark() == seq {
				t.Fatal("the operation is open")
			}
			c.Resolved(seq, hot.OutcomeAborted, nil)
			wantState(t, c, 1, ref.Index, tc.want)
		})
	}
}

func TestServerRestart(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 8))
	add(t, c, private(0, 2))
	ready, seq := begin(t, c) // private: the first of the order
	if ready.Region < base.FirstPrivateRegion || ready.Generation.High() != 1 {
		t.Fatal(ready)
	}
	c.EndCommit(seq, result(base.CodeOK, 1))
	_, _, _ = c.Alloc([]base.Medium{base.MediumCPU})
	a, seqA := begin(t, c)
	c.EndCommit(seqA, result(base.CodeOK, 2))
	b, seqB := begin(t, c)
	lost, seqL := begin(t, c)
	c.LoseCommit(seqL)
	writing, _, _ := c.Alloc([]base.Medium{base.MediumCXL})
	var batch Batch
	if err := c.BeginAcquire(&batch, base.LeaseView, 1); err != nil {
		t.Fatal(err)
	}
	rows := hot.AppendAcquireRow(nil, &hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Pool: 100, Region: 1, Offset: uint64(a.Index) * 4096, Generation: a.Generation})
	c.EndAcquire(&batch, rows)
	c.AddView(&batch, 0)

	s := open(c, 2, 200)
	if s == nil || len(s.Pages) != 3 || len(s.Leases) != 1 || c.Phase() != Relisting {
		t.Fatalf("%+v in phase %s", s, c.Phase())
	}
	states := map[uint64]hot.RelistState{}
	for _, p := range s.Pages {
		states[p.Offset/4096] = p.State
		if p.Pool != 200 {
			t.Errorf("page is listed under the old number %d of its pool", p.Pool)
		}
	}
	if states[uint64(a.Index)] != hot.RelistReady || states[uint64(b.Index)] != hot.RelistUncertain || states[uint64(lost.Index)] != hot.RelistUncertain {
		t.Fatal(states)
	}
	if c.EndCommit(seqB, result(base.CodeOK, 9)) {
		t.Fatal("an answer of the old epoch was believed")
	}
	if _, err := c.BeginCommit([]Commit{{Region: 1, Index: writing.Index, Length: 1}}, make([]hot.CommitRow, 1)); base.CodeOf(err) != base.CodeUnavailable {
		t.Fatalf("a commit before the listing was acknowledged: %v", err)
	}
	kinds := make([]byte, len(s.Pages))
	for i, p := range s.Pages {
		kinds[i] = byte(hot.RelistQuarantined)
		if p.Offset == uint64(a.Index)*4096 {
			kinds[i] = byte(hot.RelistKept)
		}
	}
	if clear := c.Relisted(s, 0, kinds, nil); len(clear) != 0 || !c.RelistDone(s) {
		t.Fatal(clear)
	}
	wantState(t, c, 1, a.Index, Ready)
	wantState(t, c, 1, b.Index, Quarantined)
	if un := c.Unmarked(nil); len(un) != 1 || un[0] != a {
		t.Fatal(un)
	}
	if _, may := c.MayMark(a, 2, 200); !may {
		t.Fatal("no mark for a page that was kept")
	}
	// The private region goes when its last page in writing is given up.
	if gone := c.TakeGone(nil); len(gone) != 0 {
		t.Fatal(gone)
	}
	if err := c.FreePage(base.FirstPrivateRegion, 1); err != nil {
		t.Fatal(err)
	}
	if gone := c.TakeGone(nil); len(gone) != 1 || gone[0] != base.FirstPrivateRegion {
		t.Fatal(gone)
	}
	// A free page stayed usable; the writer's page too.
	if _, err := c.BeginCommit([]Commit{{Region: 1, Index: writing.Index, Length: 1}}, make([]hot.CommitRow, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestDrainWaitsForLeases(t *testing.T) {
	c := newCore(t)
	var b Batch
	if err := c.BeginAcquire(&b, base.LeaseCopy, 2); err != nil {
		t.Fatal(err)
	}
	row := hot.AppendAcquireRow(nil, &hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Region: 5})
	row = hot.AppendAcquireRow(row, &hot.AcquireRow{})
	c.EndAcquire(&b, row)
	if err := c.AddRegion(shared(5, 4), Foreign); err != nil {
		t.Fatal(err)
	}
	c.Drain(5)
	if g := c.TakeGone(nil); len(g) != 0 || c.Leases() != 1 {
		t.Fatal("a region went under a lease (D1)", g, c.Leases())
	}
	c.ReleaseBatch(&b)
	c.ReleaseBatch(&b)
	if g := c.TakeGone(nil); len(g) != 1 || c.Leases() != 0 {
		t.Fatal(g, c.Leases())
	}
	// A lease on a region that is going is a miss, and is given back.
	_ = c.BeginAcquire(&b, base.LeaseCopy, 1)
	c.EndAcquire(&b, row[:hot.AcquireRowBytes])
	if b.Live() != 0 || b.Rows[0].Region != 0 {
		t.Fatal("a lease on a region that goes")
	}
	if rel := c.TakeReleases(nil, 10); len(rel) != 2 {
		t.Fatal(rel)
	}
	c.RemoveRegion(5)
}

func TestLeaseLimit(t *testing.T) {
	c := newCore(t)
	var a, b Batch
	if err := c.BeginAcquire(&a, base.LeaseCopy, 30); err != nil {
		t.Fatal(err)
	}
	if err := c.BeginAcquire(&b, base.LeaseCopy, 3); base.CodeOf(err) != base.CodeLimit {
		t.Fatal(err)
	}
	c.LoseAcquire(&a)
	if c.Leases() != 0 || c.Watermark() != a.Sequence {
		t.Fatal("a lost Acquire is closed before its release")
	}
	rel := c.TakeReleases(nil, 10)
	if len(rel) != 1 || rel[0].Count != hot.ReleaseAll || !rel[0].Closes {
		t.Fatal(rel)
	}
	c.Released(rel, 100, false)
	rel = c.TakeReleases(nil, 10)
	c.Released(rel, 100, true)
	if c.Watermark() == a.Sequence {
		t.Fatal("the operation is open after its release")
	}
}

// The list after a restart names the leases of its instant: a release that overtakes it
// would leave one there for ever.
func TestReleaseWaitsForTheList(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 4))
	var b Batch
	if err := c.BeginAcquire(&b, base.LeaseView, 1); err != nil {
		t.Fatal(err)
	}
	c.EndAcquire(&b, hot.AppendAcquireRow(nil, &hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Pool: 100, Region: 1, Generation: 1}))
	snap := open(c, 2, 101)
	if len(snap.Leases) != 1 {
		t.Fatal(snap.Leases)
	}
	c.ReleaseBatch(&b)
	if rel := c.TakeReleases(nil, 10); len(rel) != 0 || c.Pending() != 1 {
		t.Fatalf("released before the list is there: %+v", rel)
	}
	if !c.RelistDone(snap) {
		t.Fatal("the list is not done")
	}
	if rel := c.TakeReleases(nil, 10); len(rel) != 1 || rel[0].Acquire != b.Sequence {
		t.Fatal(rel)
	}
}

func TestCounterIsRefusedAtItsEnd(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 2))
	c.regions[1].pages[0].counter = ^uint32(0) - 1
	a, _, _ := c.Alloc(bothMedia)
	if err := c.FreePage(a.Region, a.Index); err != nil || a.Index != 0 {
		t.Fatal(err, a)
	}
	b, _, ok := c.Alloc(bothMedia)
	if !ok || b.Index != 1 {
		t.Fatal("a page at the end of its counter was given out", b)
	}
	wantState(t, c, 1, 0, Quarantined)
}

func TestLeave(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 2))
	ref, seq := begin(t, c)
	c.EndCommit(seq, result(base.CodeOK, 1))
	c.Leave()
	if _, may := c.MayMark(ref, 1, 100); may {
		t.Fatal("a mark after LEFT")
	}
	if _, _, ok := c.Alloc(bothMedia); ok || c.Valid(0) {
		t.Fatal("a page after LEFT")
	}
	if ok, _ := c.Receive(event(c, RetireEvent, ref)); ok {
		t.Fatal("an event after LEFT")
	}
}

func ExamplePageState() {
	fmt.Println(Free, Quarantined, PageState(99))
	// Output: free quarantined state(99)
}
