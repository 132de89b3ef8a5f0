package directory

import (
	"slices"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// A list that is sent again, because its answer was lost or the session ended in the middle
// of it, adds nothing: bounds that it fits once it fits always.
func TestListAgainAtTheBounds(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxLeases, c.Limits.MaxObjects = 4, 6 })
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	l := lister{}
	for i := range uint64(3) {
		l.pages = append(l.pages, oldPage(50, i, 3, testKey(i), hot.RelistReady))
		l.leases = append(l.leases, hot.RelistLease{
			Pool: 1, Region: 50, Offset: i * testPage, Generation: base.MakeGeneration(50, 3), Kind: base.LeaseView, Acquire: 7, Index: uint32(i), //nolint:gosec // small
		})
	}
	w := r.reopen(1)
	r.relist(w, l)
	r.now += 11 * time.Second // expired in the middle of its list: the views stay
	r.d.Tick(r.now)
	r.check()
	req := openReq(1)
	req.Proof, req.Secret = ProofProcess, Secret{9}
	w, res := r.open(req)
	if !res.Relist {
		t.Fatalf("%+v", res)
	}
	l.last = true
	for range 2 {
		if res := r.relist(w, l); !slices.Equal(res, []hot.RelistResult{hot.RelistKept, hot.RelistKept, hot.RelistKept}) {
			t.Fatalf("%v", res)
		}
		r.check()
	}
}

// The last frame of a list can come again after its pages went their way: their writer must
// not take the region for refused.
func TestLastFrameAgain(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	w := r.reopen(1)
	l := lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady), oldPage(50, 1, 3, testKey(1), hot.RelistRetiring)}}
	r.relist(w, l)
	r.cleared(w, 50, 1, 3)
	if err := r.d.Acknowledge(r.now, w, nil, []PageRef{{1, 50, testPage, base.MakeGeneration(50, 3)}}); err != nil {
		t.Fatal(err)
	}
	r.check()
	if res := r.relist(w, l); !slices.Equal(res, []hot.RelistResult{hot.RelistKept, hot.RelistKept}) {
		t.Fatalf("%v: the writer would give the region up", res)
	}
	g := RegionGrant{Pool: 1, Region: 50, Incarnation: 50, Place: Place{PageBytes: testPage}}
	if c := r.commit(w, rowOf(g, 1, 9, testKey(5))); c[0].Code != base.CodeOK {
		t.Fatalf("%+v", c)
	}
	if res := r.relist(w, l); !slices.Equal(res, []hot.RelistResult{hot.RelistKept, hot.RelistKept}) {
		t.Fatalf("%v: the page is in use again", res)
	}
	r.check()
}

// A region that rule "Server restart" still keeps is no victim: it would not go, and no
// other region would.
func TestVictimWaitsForNobody(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{
		recovered(50, 1, Holder{sid(1), true}, Holder{sid(2), true}), recovered(51, 3, Holder{sid(3), true}),
	}); err != nil {
		t.Fatal(err)
	}
	for n, id := range map[byte]base.RegionID{1: 50, 3: 51} {
		r.relist(r.reopen(n), lister{last: true, pages: []hot.RelistPage{oldPage(id, 0, 3, testKey(uint64(n)), hot.RelistReady)}})
	}
	r.d.SessionGone(r.now, sid(1), GonePidfd)
	o := r.worker(4)
	if v, ok := r.d.GiveBackVictim(r.now, 1); ok {
		t.Fatalf("%+v is a victim: session 2 has not come back", v)
	}
	if v := r.probe(o, testKey(1)); v[0] == hot.Miss {
		t.Fatal("its hits are gone")
	}
	r.d.SessionGone(r.now, sid(3), GonePidfd)
	if v, ok := r.d.GiveBackVictim(r.now, 1); !ok || v.Region != 51 {
		t.Fatalf("%+v, %v", v, ok)
	}
	r.check()
}

// A region of half a list goes back, and takes no key from another one on its way.
func TestHalfAListClaimsNothing(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true}), recovered(51, 2, Holder{sid(2), true})}); err != nil {
		t.Fatal(err)
	}
	r.relist(r.reopen(1), lister{pages: []hot.RelistPage{oldPage(50, 0, 9, testKey(0), hot.RelistReady)}})
	r.now += 11 * time.Second
	r.d.Tick(r.now)
	b := r.reopen(2)
	if res := r.relist(b, lister{last: true, pages: []hot.RelistPage{oldPage(51, 0, 3, testKey(0), hot.RelistReady)}}); res[0] != hot.RelistKept {
		t.Fatal(res)
	}
	r.d.SessionGone(r.now, sid(1), GonePidfd)
	r.check()
	if v := r.probe(b, testKey(0)); v[0] == hot.Miss {
		t.Fatal("the key is lost with a region that went back")
	}
}
