package directory

import (
	"slices"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// A delete after a restart is acknowledged only when no mark of its key is left on the
// device, wherever an older incarnation put it (R7).

func (r *rig) remove(who Caller, keys ...base.Key) DeleteID {
	r.t.Helper()
	id, err := r.d.Delete(r.now, who, r.next(), keys)
	if err != nil {
		r.t.Fatal(err)
	}
	return id
}

func (r *rig) wantDone(id DeleteID, want bool, when string) {
	r.t.Helper()
	if _, _, done := r.d.DeleteStatus(id, nil); done != want {
		r.t.Fatalf("delete done: %v, %s", done, when)
	}
	r.check()
}

func (r *rig) cleared(who Caller, region base.RegionID, page uint64, counter uint32) {
	r.t.Helper()
	ref := PageRef{1, region, page * testPage, base.MakeGeneration(uint32(region), counter)}
	if err := r.d.Acknowledge(r.now, who, []PageRef{ref}, nil); err != nil {
		r.t.Fatal(err)
	}
}

// A server that is no owner yet does not know what there is: it neither acknowledges a
// delete nor refuses a list, and asks for it again when it knows.
func TestDeleteBeforeOwner(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Owner, c.Manager = 0, ManagerExpected })
	req := openReq(1)
	req.PreviousEpoch, req.PreviousServerEpoch = 4, 5
	w, _ := r.open(req)
	list := lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady), oldPage(50, 1, 3, testKey(1), hot.RelistReady)}}
	if res := r.relist(w, list); !slices.Equal(res, []hot.RelistResult{hot.RelistKept, hot.RelistKept}) {
		t.Fatalf("%v: pages were judged before the server knows its regions", res)
	}
	id := r.remove(w, testKey(0))
	r.wantDone(id, false, "while there is no owner")
	if codes, _, _ := r.d.DeleteStatus(id, nil); codes[0] != base.CodeUnknown {
		t.Fatalf("%v", codes)
	}
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	if err := r.d.SetOwner(r.now, 3); err != nil {
		t.Fatal(err)
	}
	r.wantDone(id, false, "before the list")
	req.PreviousSecret = req.Secret
	w, res := r.open(req)
	if !res.Relist {
		t.Fatal("the list is not asked for again")
	}
	if res := r.relist(w, list); !slices.Equal(res, []hot.RelistResult{hot.RelistRetire, hot.RelistKept}) {
		t.Fatalf("%v", res)
	}
	r.wantDone(id, false, "before the mark is cleared")
	r.cleared(w, 50, 0, 3)
	if codes, _, _ := r.d.DeleteStatus(id, nil); codes[0] != base.CodeOK {
		t.Fatalf("%v: a replica was deleted", codes)
	}
	r.wantDone(id, true, "when it is")
}

// With nothing left of older incarnations the owner's start ends the wait; a session whose
// list was not judged lists again all the same.
func TestOwnerWithoutRegions(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Owner, c.Manager = 0, ManagerExpected })
	req := openReq(1)
	req.PreviousEpoch, req.PreviousServerEpoch = 4, 5
	w, _ := r.open(req)
	page := lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady)}}
	r.relist(w, page)
	id := r.remove(w, testKey(0))
	if err := r.d.RecoverRegions(r.now, nil); err != nil {
		t.Fatal(err)
	}
	r.wantDone(id, false, "before SetOwner")
	if err := r.d.SetOwner(r.now, 3); err != nil {
		t.Fatal(err)
	}
	r.wantDone(id, true, "when there is nothing")
	req.PreviousSecret = req.Secret
	w, res := r.open(req)
	if !res.Relist {
		t.Fatal("the list is not asked for again")
	}
	if res := r.relist(w, page); res[0] != hot.RelistRefused {
		t.Fatalf("%v: a page of an unknown region", res)
	}
}

// A reader's lease can name a page before its writer does: the key finds it all the same,
// and the lease keeps its replica.
func TestReaderNamesPageFirst(t *testing.T) {
	for name, first := range map[string]bool{"alone": false, "beside another replica": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true}, Holder{sid(2), true})}); err != nil {
				t.Fatal(err)
			}
			o := r.reopen(2)
			r.relist(o, lister{last: true, leases: []hot.RelistLease{
				{Pool: 1, Region: 50, Offset: 0, Generation: base.MakeGeneration(50, 3), Kind: base.LeaseCopy, Acquire: 7, Index: 0},
			}})
			if first {
				g := r.expand(o, 4)
				if c := r.commit(o, rowOf(g, 0, 1, testKey(0))); c[0].Code != base.CodeOK {
					t.Fatalf("%+v", c)
				}
			}
			w := r.reopen(1)
			r.relist(w, lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady)}})
			r.check()
			id := r.remove(w, testKey(0))
			r.wantDone(id, false, "with marks")
			if ev := r.pageEvents(w, EventRetire); !slices.Equal(ev, []uint64{0}) {
				t.Fatalf("retire %v", ev)
			}
			r.cleared(w, 50, 0, 3)
			r.wantDone(id, !first, "without the old mark")
			if held := r.release(o, hot.ReleaseRow{Acquire: 7, First: 0, Count: 1}); held[0] != 1 {
				t.Fatal("the lease was not in force")
			}
			if ev := r.pageEvents(w, EventReclaim); !slices.Equal(ev, []uint64{0}) {
				t.Fatalf("reclaim %v", ev)
			}
			if err := r.d.Acknowledge(r.now, w, nil, []PageRef{{1, 50, 0, base.MakeGeneration(50, 3)}}); err != nil {
				t.Fatal(err)
			}
			r.check()
		})
	}
}

// Pages that a writer is uncertain of are deleted by their key too: an earlier server may
// have published them, and two of them have no order to tell them apart.
func TestDeleteUncertain(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true}, Holder{sid(2), true})}); err != nil {
		t.Fatal(err)
	}
	w := r.reopen(1)
	page := func(n uint64) hot.RelistPage {
		p := oldPage(50, n, 3, testKey(n), hot.RelistUncertain)
		p.Order = 0
		return p
	}
	early := page(2)
	r.relist(w, lister{pages: []hot.RelistPage{page(0), page(1)}})
	r.relist(w, lister{last: true})
	r.reopen(2)
	a, b := r.remove(w, testKey(0)), r.remove(w, testKey(1))
	r.relist(Caller{sid(2), 5}, lister{last: true})
	r.wantDone(a, false, "with both marks")
	r.cleared(w, 50, 1, 3)
	r.wantDone(a, false, "with its own mark")
	r.wantDone(b, true, "without its mark")
	r.cleared(w, 50, 0, 3)
	r.wantDone(a, true, "without its mark")

	// Deleted before it is listed.
	r = newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	id := r.remove(r.worker(3), testKey(2))
	w = r.reopen(1)
	if res := r.relist(w, lister{last: true, pages: []hot.RelistPage{early}}); res[0] != hot.RelistRetire {
		t.Fatalf("%v", res)
	}
	r.wantDone(id, false, "with the mark")
	r.cleared(w, 50, 2, 3)
	r.wantDone(id, true, "without the mark")
}

// What nobody holds, or whose writer never lists it, has marks that nobody here knows of:
// deletes wait until the resource manager has the region back. Readers in it do not keep
// it from going back, only from being forgotten.
func TestDeleteWaitsForUnlisted(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{
		recovered(50, 9), recovered(51, 8, Holder{sid(8), true}, Holder{sid(2), true}), recovered(52, 9, Holder{sid(2), false}),
	}); err != nil {
		t.Fatal(err)
	}
	r.check()
	if n := r.count(EffectFreeRegion); n != 1 {
		t.Fatalf("%d regions go back: one is nobody's", n)
	}
	o := r.reopen(2)
	r.relist(o, lister{last: true, leases: []hot.RelistLease{
		{Pool: 1, Region: 51, Offset: 0, Generation: base.MakeGeneration(51, 3), Kind: base.LeaseView, Acquire: 7, Index: 0},
	}})
	if n := r.count(EffectFreeRegion); n != 1 {
		t.Fatalf("%d regions go back: the reader of the second has listed", n)
	}
	id := r.remove(o, testKey(0))
	r.d.RegionFreed(r.now, 1, 50, nil)
	r.d.RegionFreed(r.now, 1, 52, nil)
	r.wantDone(id, false, "while the third has not gone back")
	r.d.SessionGone(r.now, sid(8), GonePidfd)
	if n := r.count(EffectFreeRegion); n != 1 {
		t.Fatalf("%d regions go back: its writer is gone", n)
	}
	r.wantDone(id, false, "before the resource manager has it")
	r.d.RegionFreed(r.now, 1, 51, nil)
	r.wantDone(id, true, "when it drains there")
	if !r.d.KnowsRegion(poolA, 51) {
		t.Fatal("the region of a view is forgotten")
	}
	if held := r.release(o, hot.ReleaseRow{Acquire: 7, First: 0, Count: 1}); held[0] != 1 {
		t.Fatal("the view was not in force")
	}
	if r.d.KnowsRegion(poolA, 51) {
		t.Fatal("the region stays")
	}
	r.check()
}
