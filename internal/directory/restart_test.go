package directory

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// recovered is a region of session w from before the restart.
func recovered(id base.RegionID, w byte, holders ...Holder) RecoveredRegion {
	return RecoveredRegion{
		Pool: poolA, Region: id, Incarnation: base.Incarnation(id), Namespace: nsA, Writer: sid(w), Holders: holders,
		Place: Place{ExtentBytes: extentBytes(testPage, 8), PageBytes: testPage, PageCount: 8, PieceBytes: testPiece},
	}
}

// reopen opens a session of the old epoch over the Unix socket.
func (r *rig) reopen(n byte) Caller {
	r.t.Helper()
	req := openReq(n)
	req.Proof, req.PreviousEpoch, req.PreviousServerEpoch = ProofProcess, 4, 5
	who, res := r.open(req)
	if !res.Relist || res.Epoch != 5 {
		r.t.Fatalf("%+v", res)
	}
	if err := r.d.ProveDomains(r.now, who, []base.PoolID{poolA}); err != nil {
		r.t.Fatal(err)
	}
	return who
}

func oldPage(id base.RegionID, page uint64, counter uint32, key base.Key, state hot.RelistState) hot.RelistPage {
	order, _ := base.MakeCommitOrder(2, uint64(counter)+page)
	return hot.RelistPage{
		CommitRow: hot.CommitRow{
			Key: key, Pool: 1, Region: id, Offset: page * testPage, Length: 100, Generation: base.MakeGeneration(uint32(id), counter),
		}, Order: order, State: state,
	}
}

type lister struct {
	pages  []hot.RelistPage
	leases []hot.RelistLease
	last   bool
}

func (r *rig) relist(who Caller, l lister) []hot.RelistResult {
	r.t.Helper()
	req := hot.RelistRequest{Last: l.last}
	for i := range l.pages {
		req.Pages = hot.AppendRelistPage(req.Pages, &l.pages[i])
	}
	for i := range l.leases {
		req.Leases = hot.AppendRelistLease(req.Leases, &l.leases[i])
	}
	out, err := r.d.Relist(r.now, who, &req, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	var res []hot.RelistResult
	for _, b := range out {
		res = append(res, hot.RelistResult(b))
	}
	return res
}

// pageEvents returns the session's page events of a kind, by page.
func (r *rig) pageEvents(who Caller, kind EventKind) []uint64 {
	r.t.Helper()
	list, err := r.d.PendingEvents(r.now, who, 0, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	var out []uint64
	for _, e := range list {
		if e.Kind == kind {
			out = append(out, e.Offset/testPage)
		}
	}
	slices.Sort(out)
	return out
}

func TestServerRestart(t *testing.T) {
	r := newRig(t, nil)
	err := r.d.RecoverRegions(r.now, []RecoveredRegion{
		recovered(50, 1, Holder{sid(1), true}, Holder{sid(2), true}), recovered(51, 9, Holder{sid(9), true}),
	})
	if err != nil {
		t.Fatal(err)
	}
	r.check()
	if !r.d.RelistIncomplete() || !r.d.KnowsRegion(poolA, 50) || r.d.KnowsRegion(poolA, 52) {
		t.Fatal("recovered regions are not known")
	}
	if u := r.d.Usage(r.now); u.Pools[0].ReservedBytes != 2*extentBytes(testPage, 8) || u.Waiting != 2 {
		t.Fatalf("recovered regions are not charged: %+v", u)
	}
	// Nobody else can take the place of a session of the list.
	req := openReq(1)
	req.PreviousSecret = Secret{1, 1}
	_, err = r.d.Open(r.now, req)
	wantErr(t, err, base.ErrDenied)

	w := r.reopen(1)
	early := r.next()
	_, err = r.commitSeq(w, early)
	wantErr(t, err, base.ErrBusy)
	k := testKey
	first := lister{pages: []hot.RelistPage{
		oldPage(50, 0, 3, k(0), hot.RelistReady), oldPage(50, 1, 3, k(1), hot.RelistRetiring), oldPage(50, 2, 3, k(2), hot.RelistUncertain),
		oldPage(51, 0, 3, k(3), hot.RelistReady), oldPage(50, 8, 3, k(3), hot.RelistReady),
	}}
	want := []hot.RelistResult{hot.RelistKept, hot.RelistRetire, hot.RelistQuarantined, hot.RelistRefused, hot.RelistRefused}
	for range 2 { // a frame whose answer was lost is sent again
		if res := r.relist(w, first); !slices.Equal(res, want) {
			t.Fatalf("%v", res)
		}
		r.check()
	}
	r.relist(w, lister{last: true})
	// The writer has taken BUSY for a refusal: the same frame, late, publishes nothing.
	_, err = r.commitSeq(w, early)
	wantErr(t, err, base.ErrAborted)
	// What the writer listed as READY is a hit again; what was retiring or uncertain is none.
	if v := r.probe(w, k(0), k(1), k(2)); v[0] == hot.Miss || v[1] != hot.Miss || v[2] != hot.Miss {
		t.Fatalf("%v", v)
	}
	// Pages that were free at the writer stay usable, also for the key of an uncertain page.
	g := RegionGrant{Pool: 1, Region: 50, Incarnation: 50, Place: Place{PageBytes: testPage}}
	c := r.commit(w, rowOf(g, 5, 9, k(2)), rowOf(g, 0, 9, k(7)), rowOf(g, 7, 9, k(0)))
	if c[0].Code != base.CodeOK || c[1].Code != base.CodeStale || c[2].Code != base.CodeAlreadyStored {
		t.Fatalf("%+v: a listed page was written, or a free one not, or a key twice", c)
	}
	r.check()
	// The retiring page's mark is cleared, but it is not free: session 2 has not listed.
	ref1 := PageRef{1, 50, testPage, base.MakeGeneration(50, 3)}
	if err := r.d.Acknowledge(r.now, w, []PageRef{ref1}, nil); err != nil {
		t.Fatal(err)
	}
	if ev := r.pageEvents(w, EventReclaim); len(ev) != 0 {
		t.Fatalf("reclaim of %v before the rule holds (R6)", ev)
	}
	o := r.reopen(2)
	r.relist(o, lister{last: true, leases: []hot.RelistLease{
		{Pool: 1, Region: 50, Offset: 0, Generation: base.MakeGeneration(50, 3), Kind: base.LeaseView, Acquire: 7, Index: 2},
		{Pool: 1, Region: 50, Offset: 6 * testPage, Generation: base.MakeGeneration(50, 2), Kind: base.LeaseCopy, Acquire: 8, Index: 0},
	}})
	r.check()
	// Now the rule holds for region 50: the pages go their way, but the one with a view.
	if ev := r.pageEvents(w, EventRetire); !slices.Equal(ev, []uint64{2}) {
		t.Fatalf("retire %v", ev)
	}
	if ev := r.pageEvents(w, EventReclaim); !slices.Equal(ev, []uint64{1}) {
		t.Fatalf("reclaim %v", ev)
	}
	// A page that only a lease names is quarantined until it ends (page 6).
	if c := r.commit(w, rowOf(g, 6, 9, k(8))); c[0].Code != base.CodeStale {
		t.Fatalf("%+v", c)
	}
	if held := r.release(o, hot.ReleaseRow{Acquire: 7, First: 2, Count: 1}, hot.ReleaseRow{Acquire: 8, Count: 1}); !bytes.Equal(held, []byte{1, 1}) {
		t.Fatalf("held %v", held)
	}
	if ev := r.pageEvents(w, EventRetire); !slices.Equal(ev, []uint64{2}) {
		t.Fatalf("retire %v: the end of a view retires nothing", ev)
	}
	if v := r.probe(o, k(0)); v[0] == hot.Miss {
		t.Fatal("the key is no hit any more")
	}
	if c := r.commit(w, rowOf(g, 6, 9, k(8))); c[0].Code != base.CodeOK {
		t.Fatalf("%+v", c)
	}
	r.check()
	// The writer of region 51 never came; when it is proved gone, its region goes back.
	if r.count(EffectFreeRegion) != 0 || !r.d.RelistIncomplete() {
		t.Fatal("region 51 went back before its writer is proved gone")
	}
	r.d.SessionGone(r.now, sid(9), GonePidfd)
	if r.count(EffectFreeRegion) != 1 || !r.d.RelistIncomplete() {
		t.Fatal("region 51 does not go back, or relisting is complete before it did")
	}
	r.d.RegionFreed(r.now, 1, 51, base.ErrUnavailable)
	if !r.d.RelistIncomplete() {
		t.Fatal("relisting is complete though the resource manager was not reached")
	}
	r.now += 2 * time.Second
	r.d.Tick(r.now)
	if r.count(EffectFreeRegion) != 1 {
		t.Fatal("it is not asked again")
	}
	r.d.RegionFreed(r.now, 1, 51, nil)
	if r.d.RelistIncomplete() {
		t.Fatal("region 51 is back and relisting is not complete")
	}
	r.check()
}

func TestRestartRuleByTime(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true}, Holder{sid(2), false})}); err != nil {
		t.Fatal(err)
	}
	w := r.reopen(1)
	r.relist(w, lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 1, testKey(0), hot.RelistUncertain)}})
	step := func(d time.Duration) {
		r.now += d
		r.beat(w)
		r.d.Tick(r.now)
		r.check()
	}
	for range 10 {
		step(9 * time.Second)
	}
	if !r.d.RelistIncomplete() {
		t.Fatal("time alone satisfied the rule, without proof that the older processes ended")
	}
	r.d.PredecessorsEnded(r.now)
	step(9 * time.Second)
	if !r.d.RelistIncomplete() {
		t.Fatal("less than a TTL satisfied the rule")
	}
	if next := r.d.Tick(r.now); next != r.now+time.Second {
		t.Fatalf("next tick is due in %v", next-r.now)
	}
	step(time.Second)
	if r.d.RelistIncomplete() || len(r.pageEvents(w, EventRetire)) != 1 {
		t.Fatal("a full TTL does not satisfy a hold without views")
	}
}

func TestDeleteWhileRelisting(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	o := r.worker(3)
	id, err := r.d.Delete(r.now, o, r.next(), []base.Key{testKey(0), testKey(1)})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, done := r.d.DeleteStatus(id, nil); done {
		t.Fatal("a delete was acknowledged before relisting is complete")
	}
	ns, err := r.d.DeleteNamespace(r.now, o, r.next(), nsA)
	if err != nil {
		t.Fatal(err)
	}
	w := r.reopen(1)
	res := r.relist(w, lister{last: true, pages: []hot.RelistPage{
		oldPage(50, 0, 1, testKey(0), hot.RelistReady), oldPage(50, 1, 1, testKey(5), hot.RelistReady),
	}})
	if !slices.Equal(res, []hot.RelistResult{hot.RelistRetire, hot.RelistRetire}) {
		t.Fatalf("%v: a deleted key came back (R7)", res)
	}
	r.check()
	for i, page := range []uint64{0, 1} {
		for _, x := range []DeleteID{id, ns} {
			if _, _, done := r.d.DeleteStatus(x, nil); done != (x == id && i == 1) {
				t.Fatalf("delete %d done %v after %d marks", x, done, i)
			}
		}
		ref := PageRef{1, 50, page * testPage, base.MakeGeneration(50, 1)}
		if err := r.d.Acknowledge(r.now, w, []PageRef{ref}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, done := r.d.DeleteStatus(ns, nil); !done {
		t.Fatal("every mark is cleared and the delete is not done")
	}
	if n := r.count(EffectDeleteDone); n != 2 {
		t.Fatalf("%d deletes done", n)
	}
	r.check()
}

// TestRecoverLate: a server that had no RM at its start meets sessions that are open.
func TestRecoverLate(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	req.PreviousEpoch, req.PreviousServerEpoch = 4, 5
	w, _ := r.open(req)
	r.relist(w, lister{last: true})
	r.effects()
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	fenced := false
	for _, e := range r.effects() {
		fenced = fenced || (e.Kind == EffectSendEvent && e.Event.Kind == EventFence)
	}
	if !fenced || !r.d.RelistIncomplete() {
		t.Fatal("the session keeps its epoch though it has not listed the region")
	}
	_, err := r.commitSeq(w, r.next())
	wantErr(t, err, base.ErrStale)
	req.PreviousSecret = req.Secret
	w, res := r.open(req)
	if !res.Relist {
		t.Fatal("no new list is asked for")
	}
	r.relist(w, lister{last: true})
	if r.d.RelistIncomplete() {
		t.Fatal("the rule does not hold")
	}
	r.check()
}

func TestRecoverRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*RecoveredRegion)
		want   error
	}{
		"pool":    {func(g *RecoveredRegion) { g.Pool = base.PoolID{9} }, base.ErrNotFound},
		"id":      {func(g *RecoveredRegion) { g.Region = base.FirstPrivateRegion }, base.ErrInvalid},
		"place":   {func(g *RecoveredRegion) { g.Place.ExtentBytes = 1 }, base.ErrInvalid},
		"writer":  {func(g *RecoveredRegion) { g.Writer = base.SessionID{} }, base.ErrInvalid},
		"holders": {func(g *RecoveredRegion) { g.Holders = make([]Holder, 5000) }, base.ErrLimit},
		"extent":  {func(g *RecoveredRegion) { g.Place.PageCount = 1 << 40 }, base.ErrInvalid},
		"pages":   {func(g *RecoveredRegion) { g.Place.PageCount, g.Place.ExtentBytes = 1<<40, 1<<60 }, base.ErrLimit},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			bad := recovered(51, 1)
			c.change(&bad)
			wantErr(t, r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1), bad}), c.want)
			if r.d.regionCount != 0 || len(r.d.sessions) != 0 {
				t.Fatal("half of a list was taken over")
			}
		})
	}
}

// A scheduler that was here before the restart is asked for a list as everybody is: its
// list is empty.
func TestSchedulerListsNothing(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	req.Role, req.Views, req.ValueBytes, req.PieceBytes = base.RoleScheduler, false, 0, 0
	req.PreviousServerEpoch, req.PreviousEpoch, req.PreviousSecret = 99, 1, Secret{1, 1}
	res, err := r.d.Open(r.now, req)
	if err != nil || !res.Relist {
		t.Fatal(res, err)
	}
	who := Caller{Session: req.Session, Epoch: res.Epoch}
	lease := hot.RelistLease{Pool: 1, Region: 50, Kind: base.LeaseCopy, Acquire: 1}
	_, err = r.d.Relist(r.now, who, &hot.RelistRequest{Leases: hot.AppendRelistLease(nil, &lease), Last: true}, nil)
	wantErr(t, err, base.ErrDenied)
	r.relist(who, lister{last: true})
	req.Secret, req.PreviousSecret = Secret{1, 3}, req.Secret
	req.PreviousServerEpoch, req.PreviousEpoch = r.d.cfg.ServerEpoch, res.Epoch
	if res, err = r.d.Open(r.now, req); err != nil || res.Relist {
		t.Fatal("asked again", res, err)
	}
}

// Of two claims to a key in one domain the higher order stays, in whatever order the
// sessions list (R7): the loser hears it in the answer, or by an event.
func TestRelistedClaims(t *testing.T) {
	for name, late := range map[string]bool{"the higher first": true, "the lower first": false} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true}), recovered(51, 2, Holder{sid(2), true})}); err != nil {
				t.Fatal(err)
			}
			a, b := r.reopen(1), r.reopen(2)
			low, high := oldPage(50, 0, 3, testKey(0), hot.RelistReady), oldPage(51, 0, 8, testKey(0), hot.RelistReady)
			answer := func(who Caller, p hot.RelistPage) hot.RelistResult {
				res := r.relist(who, lister{last: true, pages: []hot.RelistPage{p}})
				r.check()
				return res[0]
			}
			if late {
				if res := answer(b, high); res != hot.RelistKept {
					t.Fatal(res)
				}
				if res := answer(a, low); res != hot.RelistRetire {
					t.Fatal(res)
				}
			} else {
				if res := answer(a, low); res != hot.RelistKept {
					t.Fatal(res)
				}
				if res := answer(b, high); res != hot.RelistKept {
					t.Fatal(res)
				}
				if ev := r.pageEvents(a, EventRetire); !slices.Equal(ev, []uint64{0}) {
					t.Fatalf("retire %v", ev)
				}
			}
			if rows, _, err := r.acquireSeq(b, r.next(), base.LeaseCopy, hot.ModeEach, []int{1}, testKey(0)); err != nil || rows[0].Region != 51 {
				t.Fatalf("%+v, %v", rows, err)
			}
			if ev := r.pageEvents(b, EventRetire); len(ev) != 0 {
				t.Fatalf("the higher order was retired: %v", ev)
			}
		})
	}
}

// A commit of the new incarnation is before every older one (the order says so), and a page
// whose order no older incarnation can have given is not believed.
func TestRelistedAfterCommit(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	o := r.worker(3)
	g := r.expand(o, 4)
	if c := r.commit(o, rowOf(g, 0, 1, testKey(0))); c[0].Code != base.CodeOK {
		t.Fatalf("%+v", c)
	}
	forged := oldPage(50, 1, 3, testKey(1), hot.RelistReady)
	forged.Order, _ = base.MakeCommitOrder(r.d.cfg.Owner, 1)
	res := r.relist(r.reopen(1), lister{last: true, pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady), forged}})
	if !slices.Equal(res, []hot.RelistResult{hot.RelistRetire, hot.RelistQuarantined}) {
		t.Fatalf("%v", res)
	}
	r.check()
}

// A writer that ends in the middle of its list leaves marks that nobody knows of: its
// region goes back whole, and nothing of it is found.
func TestEndInTheMiddleOfAList(t *testing.T) {
	r := newRig(t, nil)
	if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 1, Holder{sid(1), true})}); err != nil {
		t.Fatal(err)
	}
	w, o := r.reopen(1), r.worker(3)
	r.relist(w, lister{pages: []hot.RelistPage{oldPage(50, 0, 3, testKey(0), hot.RelistReady)}})
	if v := r.probe(o, testKey(0)); v[0] == hot.Miss {
		t.Fatal("what was listed is no hit")
	}
	r.d.SessionGone(r.now, sid(1), GonePidfd)
	r.check()
	if v := r.probe(o, testKey(0)); v[0] != hot.Miss || r.count(EffectFreeRegion) != 1 {
		t.Fatal("the region of half a list stays")
	}
	r.d.RegionFreed(r.now, 1, 50, nil)
	r.check()
}

// The lease that an expiry ends can be the last thing that kept the record of a session
// that is long gone: it is forgotten while the sessions are walked.
func TestExpiryForgetsAnother(t *testing.T) {
	for name, expire := range map[string]func(r *rig){
		"expiry": func(r *rig) { r.now += 11 * time.Second },
		"fence":  nil, // by events that were not acknowledged
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.Limits.MaxEvents, c.EventTimeout = 1, time.Second })
			if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(51, 8, Holder{sid(8), true}, Holder{sid(2), true})}); err != nil {
				t.Fatal(err)
			}
			o := r.reopen(2)
			r.relist(o, lister{last: true, leases: []hot.RelistLease{
				{Pool: 1, Region: 51, Offset: 0, Generation: base.MakeGeneration(51, 3), Kind: base.LeaseCopy, Acquire: 7, Index: 0},
			}})
			r.d.SessionGone(r.now, sid(8), GonePidfd)
			r.d.RegionFreed(r.now, 1, 51, nil)
			if !r.d.KnowsRegion(poolA, 51) {
				t.Fatal("the region of a lease is forgotten")
			}
			r.worker(4)
			if expire != nil {
				expire(r)
			} else {
				r.d.sendEvent(r.now, r.d.sessions[sid(2)], Event{Kind: EventPools})
				r.now += 2 * time.Second
			}
			r.d.Tick(r.now)
			r.check()
			if r.d.KnowsRegion(poolA, 51) || r.d.sessions[sid(8)] != nil {
				t.Fatal("something stays")
			}
		})
	}
}
