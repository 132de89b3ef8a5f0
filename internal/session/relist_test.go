package session

import (
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// A region that the server refuses goes, and no mark stays in it: nobody else could clear
// it while its writer lives (R7).
func TestRefusedRegionLosesItsMarks(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(1, 4))
	var refs []PageRef
	for i := range uint64(2) {
		ref, seq := begin(t, c)
		if !c.EndCommit(seq, result(base.CodeOK, i+1)) {
			t.Fatal("not settled")
		}
		refs = append(refs, ref)
	}
	if _, ok := c.MayMark(refs[0], 1, 100); !ok {
		t.Fatal("no mark allowed")
	}
	if _, ok := c.MayMark(refs[1], 1, 100); !ok {
		t.Fatal("no mark allowed")
	}
	s := open(c, 2, 200)
	clear := c.Relisted(s, 0, []byte{byte(hot.RelistRefused), byte(hot.RelistRefused)}, nil)
	if len(clear) != 2 {
		t.Fatalf("%d marks are to be cleared", len(clear))
	}
	if gone := c.TakeGone(nil); len(gone) != 0 {
		t.Fatal("the region goes with its marks")
	}
	c.Cleared(clear[0], true)
	if gone := c.TakeGone(nil); len(gone) != 0 {
		t.Fatal("the region goes with a mark")
	}
	c.Cleared(clear[1], false) // its memory faults: it cannot wait for that
	if gone := c.TakeGone(nil); len(gone) != 1 {
		t.Fatal("the region stays")
	}
	if cleared, reclaimed := c.TakeAcks(nil, nil); len(cleared)+len(reclaimed) != 0 {
		t.Fatalf("%v, %v: acknowledged what nobody asked for", cleared, reclaimed)
	}
	for _, ref := range refs {
		if _, ok := c.MayMark(ref, 2, 200); ok {
			t.Fatal("a mark is allowed again")
		}
	}
}

// A server that asks for the list a second time knows the session's private regions, and
// can still resolve what was committed to it.
func TestSecondListAtOneServer(t *testing.T) {
	c := newCore(t)
	add(t, c, private(1, 4))
	add(t, c, shared(1, 4))
	kept, seq := begin(t, c)
	c.EndCommit(seq, result(base.CodeOK, 1))
	lost, lostSeq := begin(t, c)
	c.LoseCommit(lostSeq)
	running, runSeq := begin(t, c)
	s := c.Opened(Opening{
		Epoch: 2, ServerEpoch: 100, TTL: 10 * time.Second, Margin: time.Second, Relist: true,
		Pools: []PoolNumber{{ID: base.PoolID{1}, Medium: base.MediumCXL, Number: 100}, {Medium: base.MediumCPU, Number: 9}},
	})
	if s == nil || c.Phase() != Relisting {
		t.Fatal("no list")
	}
	if len(s.Pages) != 0 {
		t.Fatalf("%+v: private or open pages are listed", s.Pages)
	}
	c.RelistDone(s)
	wantState(t, c, kept.Region, kept.Index, Ready)
	if list := c.LostCommits(nil); len(list) != 1 || list[0].Sequence != lostSeq {
		t.Fatalf("%v", list)
	}
	c.Resolved(lostSeq, hot.OutcomeAborted, nil)
	wantState(t, c, lost.Region, lost.Index, Free)
	if !c.EndCommit(runSeq, result(base.CodeOK, 2)) {
		t.Fatal("an answer of the same server came too late")
	}
	wantState(t, c, running.Region, running.Index, Ready)
	if gone := c.TakeGone(nil); len(gone) != 0 {
		t.Fatal("a private region was given up")
	}
}

// A lease whose release was confirmed in an older epoch may be in the list of a newer one:
// nobody would end it there, so it is released again.
func TestConfirmedBeforeItWasListed(t *testing.T) {
	for _, opened := range []struct {
		name   string
		epoch  base.Epoch
		server base.ServerEpoch
	}{{"not again", 1, 100}, {"at the same server", 2, 100}, {"at another one", 2, 200}} {
		t.Run(opened.name, func(t *testing.T) {
			c := newCore(t)
			add(t, c, shared(1, 4))
			b := lease(t, c, 1, base.LeaseCopy)
			if opened.epoch == 1 {
				c.ConfirmRow(b, 0)
				if got := c.TakeReleases(nil, 10); len(got) != 0 || c.Leases() != 0 {
					t.Fatalf("%v is released again, %d leases", got, c.Leases())
				}
				return
			}
			s := c.Opened(Opening{
				Epoch: opened.epoch, ServerEpoch: opened.server, TTL: 10 * time.Second, Margin: time.Second, Relist: true,
				Pools: []PoolNumber{{ID: base.PoolID{1}, Medium: base.MediumCXL, Number: 100}},
			})
			if s == nil || len(s.Leases) != 1 {
				t.Fatalf("listed: %+v", s)
			}
			c.ConfirmRow(b, 0) // the answer to a Release of before it was opened again
			if got := c.TakeReleases(nil, 10); len(got) != 0 {
				t.Fatalf("%v overtakes the list", got)
			}
			c.RelistDone(s)
			if got := c.TakeReleases(nil, 10); len(got) != 1 || got[0].Acquire != b.Sequence || got[0].First != 0 || got[0].Count != 1 {
				t.Fatalf("%v: what the list says is never ended", got)
			}
		})
	}
}

// A lease on a region that is mapped only after the list was made was not in force at the
// new server from the beginning: pages of the region may have been written since (R3).
func TestLeaseMappedAfterTheList(t *testing.T) {
	c := newCore(t)
	var b Batch
	if err := c.BeginAcquire(&b, base.LeaseView, 2); err != nil {
		t.Fatal(err)
	}
	row := hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Pool: 100, Region: 9, Generation: base.MakeGeneration(9, 1)}
	if !c.EndAcquire(&b, hot.AppendAcquireRow(hot.AppendAcquireRow(nil, &row), &row)) {
		t.Fatal("not taken")
	}
	s := open(c, 2, 200)
	if len(s.Leases) != 0 {
		t.Fatalf("%+v is listed, and no mapping holds its region", s.Leases)
	}
	c.RelistDone(s)
	info := shared(9, 4)
	if err := c.AddRegion(info, Foreign); err != nil { // another Acquire has mapped it, at the new server
		t.Fatal(err)
	}
	if id := c.AddView(&b, 0); id != 0 {
		t.Fatal("a view of a page that nothing protects")
	}
	if c.Pin(base.Key{1}, &b, 1) {
		t.Fatal("a pin that nothing protects")
	}
	c.ReleaseBatch(&b)
	if views, pins := c.Views(); views+pins != 0 || c.Leases() != 0 {
		t.Fatalf("%d views, %d pins, %d leases", views, pins, c.Leases())
	}
}
