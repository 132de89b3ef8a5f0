package directory

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// engine opens two workers and a scheduler and stores the given shards of keys 0..n.
func engine(t *testing.T, r *rig, keys int) (sched, w0, w1 Caller) {
	t.Helper()
	var g [2]RegionGrant
	who := [2]Caller{}
	for rank := range who {
		who[rank], _ = r.open(engineReq(byte(rank+1), "e", uint32(rank), 2))
		if err := r.d.ProveDomains(r.now, who[rank], []base.PoolID{poolA}); err != nil {
			t.Fatal(err)
		}
		_, ticket, err := r.d.ExpandBegin(r.now, who[rank], &ExpandRequest{
			Operation: r.next(), Medium: base.MediumCXL, Bytes: uint64(keys) * testPage, PageBytes: testPage, PieceBytes: 512,
		})
		if err != nil {
			t.Fatal(err)
		}
		nextRegion++
		g[rank], err = r.d.ExpandFinish(r.now, ticket, &RegionGrant{
			Region: nextRegion, Incarnation: base.Incarnation(nextRegion),
			Place: Place{ExtentBytes: extentBytes(testPage, uint64(keys)), PageBytes: testPage, PageCount: uint64(keys), PieceBytes: 512},
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	for rank := range who {
		for k := range keys {
			if rank == 1 && k == keys-1 {
				continue // the last key lacks one shard
			}
			if c := r.commit(who[rank], rowOf(g[rank], uint64(k), 1, testKey(uint64(k)).WithShard(uint16(rank)))); c[0].Code != base.CodeOK {
				t.Fatal(c)
			}
		}
	}
	s := engineReq(9, "e", 0, 2)
	s.Role, s.Views, s.ValueBytes, s.PieceBytes = base.RoleScheduler, false, 0, 0
	sched, _ = r.open(s)
	return sched, who[0], who[1]
}

func shardProbe(sched Caller, mode hot.Mode, keys int, targets ...Caller) *hot.ProbeRequest {
	_ = sched
	req := &hot.ProbeRequest{Namespace: 1, Mode: mode}
	for _, w := range targets {
		req.Targets = append(req.Targets, w.Session[:]...)
	}
	for k := range keys {
		key := testKey(uint64(k))
		req.Keys = append(req.Keys, key[:]...)
	}
	return req
}

func TestProbeShards(t *testing.T) {
	for _, keys := range []int{3, 100} {
		r := newRig(t, nil)
		sched, w0, w1 := engine(t, r, keys)
		out, leading, err := r.d.Probe(r.now, sched, shardProbe(sched, hot.ModePrefix, keys, w0, w1), nil)
		if err != nil || int(leading) != keys-1 || hot.Verdict(out[keys-1]) != hot.Miss || hot.Verdict(out[0]) != hot.MakeHit(base.MediumCXL) {
			t.Fatalf("%d keys: %v leading %d, %v", keys, out, leading, err)
		}
		// The targets in the wrong order: shard 0 judged with worker 1 is as readable, since
		// the pool is shared.
		_, leading, _ = r.d.Probe(r.now, sched, shardProbe(sched, hot.ModeEach, keys, w1, w0), nil)
		if int(leading) != keys-1 {
			t.Fatalf("leading %d", leading)
		}
		// FE-12: worker 1 cannot map worker 0's region; what that shard needs is a miss.
		s0 := r.d.regions[r.d.sessions[w0.Session].regions[0]]
		if err := r.d.ReportUnreachable(r.now, w0, s0.pool.number, s0.id); err != nil {
			t.Fatal(err)
		}
		out, leading, _ = r.d.Probe(r.now, sched, shardProbe(sched, hot.ModePrefix, keys, w0, w1), nil)
		if leading != 0 || hot.Verdict(out[0]) != hot.Miss || hot.Verdict(out[1]) != hot.NotTried || len(out) != keys {
			t.Fatalf("%v leading %d", out, leading)
		}
		if err := r.d.ProveDomains(r.now, w0, []base.PoolID{poolA}); err != nil {
			t.Fatal(err)
		}
		// A target that is not live is a miss, and so is what it stored (R6).
		r.now += 6 * time.Second
		r.beat(sched)
		r.beat(w0)
		r.now += 5 * time.Second
		if _, leading, err = r.d.Probe(r.now, sched, shardProbe(sched, hot.ModePrefix, keys, w0, w1), nil); err != nil || leading != 0 {
			t.Fatalf("leading %d, %v", leading, err)
		}
		if _, leading, _ = r.d.Probe(r.now, sched, shardProbe(sched, hot.ModePrefix, keys, w1), nil); leading != 0 {
			t.Fatal("a target whose time is up reads what a live session stored")
		}
		if _, leading, _ = r.d.Probe(r.now, sched, shardProbe(sched, hot.ModePrefix, keys, w0), nil); int(leading) != keys {
			t.Fatalf("leading %d of worker 0 alone", leading)
		}
		r.check()
	}
}

func TestProbeManyShards(t *testing.T) {
	r := newRig(t, nil)
	sched, w0, _ := engine(t, r, 2)
	targets := make([]Caller, 70) // more than a block holds
	for i := range targets {
		targets[i] = w0
	}
	out, leading, err := r.d.Probe(r.now, sched, shardProbe(sched, hot.ModeEach, 2, targets...), nil)
	if err != nil || leading != 0 || len(out) != 2 {
		t.Fatal(out, leading, err)
	}
}

func TestSchedulerHasNothing(t *testing.T) {
	r := newRig(t, nil)
	sched, w0, _ := engine(t, r, 2)
	_, _, err := r.acquireSeq(sched, r.next(), base.LeaseCopy, hot.ModeEach, []int{1}, testKey(0))
	wantErr(t, err, base.ErrDenied)
	_, err = r.commitSeq(sched, r.next())
	wantErr(t, err, base.ErrDenied)
	_, _, err = r.d.ExpandBegin(r.now, sched, &ExpandRequest{Operation: r.next(), Medium: base.MediumCXL, Bytes: 1, PageBytes: 4096, PieceBytes: 512})
	wantErr(t, err, base.ErrDenied)
	wantErr(t, r.d.ProveDomains(r.now, sched, nil), base.ErrDenied)
	_, _, err = r.d.Probe(r.now, w0, &hot.ProbeRequest{Namespace: 2}, nil)
	wantErr(t, err, base.ErrMismatch)
}

// TestProbesTogether runs probes under a read lock beside a writer: the race detector
// finds any write of theirs.
func TestProbesTogether(t *testing.T) {
	r := newRig(t, nil)
	sched, w0, w1 := engine(t, r, 50)
	req := shardProbe(sched, hot.ModePrefix, 50, w0, w1)
	var mu sync.RWMutex
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var out []byte
			for range 200 {
				mu.RLock()
				out, _, _ = r.d.Probe(r.now, sched, req, out[:0])
				_, _ = r.d.PendingEvents(r.now, w0, 0, nil)
				_, _ = r.d.DescribeRegions(r.now, w0, nil, true, nil)
				_, _, _ = r.d.Secret(r.now, w0)
				mu.RUnlock()
			}
		}()
	}
	for i := range uint64(50) {
		mu.Lock()
		r.beat(w0)
		_, _, _ = r.acquireSeq(w0, r.next(), base.LeaseCopy, hot.ModeEach, []int{1}, testKey(i).WithShard(0))
		mu.Unlock()
	}
	wg.Wait()
	r.check()
}

func TestRequestLeases(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxRequestLeases, c.Limits.MaxRequests = 8, 3 })
	sched, w0, w1 := engine(t, r, 4)
	s := r.d.sessions[sched.Session]
	keep := func(id uint64, keys int) {
		t.Helper()
		req := shardProbe(sched, hot.ModePrefix, keys, w0, w1)
		req.RequestID = id
		if _, leading, err := r.d.ProbeKeep(r.now, sched, req, nil); err != nil || int(leading) != min(keys, 3) {
			t.Fatal(leading, err)
		}
		r.check()
	}
	keep(1, 1)
	keep(2, 2)
	if s.requests.rows != 6 {
		t.Fatalf("%d rows", s.requests.rows)
	}
	keep(1, 1) // again: renewed, not doubled
	if s.requests.rows != 6 || s.requests.first.id != 2 {
		t.Fatalf("%d rows, oldest %d", s.requests.rows, s.requests.first.id)
	}
	keep(3, 2) // 10 rows: the oldest goes
	if s.requests.rows != 6 || s.requests.byID[2] != nil {
		t.Fatalf("%d rows", s.requests.rows)
	}
	keep(4, 1)
	if len(s.requests.byID) != 3 {
		t.Fatalf("%d requests", len(s.requests.byID))
	}
	keep(5, 1)
	if len(s.requests.byID) != 3 || s.requests.byID[1] != nil {
		t.Fatal("max-requests does not hold")
	}
	ids := le.AppendUint64(le.AppendUint64(nil, 3), 99)
	known, err := r.d.Requests(r.now, sched, &hot.RequestsRequest{Action: hot.RequestsEnd, IDs: ids})
	if err != nil || known != 1 || s.requests.byID[3] != nil {
		t.Fatal(known, err)
	}
	// Refreshed ones stay, the other ends with its time.
	for range 10 {
		r.now += 8 * time.Second
		for _, w := range []Caller{sched, w0, w1} {
			r.beat(w)
		}
		if _, err := r.d.Requests(r.now, sched, &hot.RequestsRequest{Action: hot.RequestsRefresh, IDs: le.AppendUint64(nil, 5)}); err != nil {
			t.Fatal(err)
		}
		r.d.Tick(r.now)
	}
	if len(s.requests.byID) != 1 || s.requests.byID[5] == nil {
		t.Fatalf("%d requests", len(s.requests.byID))
	}
	// A lost replica is an expected miss, and no count goes below zero.
	id, err := r.d.Delete(r.now, w0, r.next(), []base.Key{testKey(0).WithShard(0)})
	if err != nil || id == 0 {
		t.Fatal(err)
	}
	r.check()
	r.now += 11 * time.Second
	r.d.Tick(r.now)
	if s.requests.rows != 0 {
		t.Fatal("request leases outlive their session's epoch")
	}
	r.check()
}

func TestRequestLeasesTakeHalfAPool(t *testing.T) {
	r := newRig(t, nil)
	sched, w0, w1 := engine(t, r, 9)
	r.d.shared[0].info.CapacityBytes = 8 * testPage // room for four pages
	for id := uint64(1); id <= 3; id++ {
		req := shardProbe(sched, hot.ModePrefix, 1, w0, w1)
		req.RequestID = id
		if _, _, err := r.d.ProbeKeep(r.now, sched, req, nil); err != nil {
			t.Fatal(err)
		}
	}
	if s := r.d.sessions[sched.Session]; len(s.requests.byID) != 2 || s.requests.byID[1] != nil || r.d.shared[0].requestBytes != 4*testPage {
		t.Fatalf("%d requests keep %d bytes", len(s.requests.byID), r.d.shared[0].requestBytes)
	}
}

func TestLeaseLimit(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxLeases = 3 })
	w := r.worker(1)
	g := r.expand(w, 4)
	for i := range uint64(4) {
		r.commit(w, rowOf(g, i, 1, testKey(i)))
	}
	if _, _, err := r.acquireSeq(w, r.next(), base.LeaseView, hot.ModeEach, []int{2}, testKey(0), testKey(0)); err != nil {
		t.Fatal(err)
	}
	rows, _, err := r.acquireSeq(w, r.next(), base.LeaseCopy, hot.ModeEach, []int{1, 1}, testKey(1), testKey(2))
	wantErr(t, err, base.ErrLimit)
	if !strings.Contains(err.Error(), "max-leases") || len(rows) != 0 || r.d.sessions[w.Session].leases != 2 {
		t.Fatalf("%v, %d rows, %d leases", err, len(rows), r.d.sessions[w.Session].leases)
	}
	// Misses take no lease.
	refused := r.seq
	if _, _, err := r.acquireSeq(w, r.next(), base.LeaseCopy, hot.ModeEach, []int{1, 1}, testKey(1), testKey(77)); err != nil {
		t.Fatal(err)
	}
	r.check()
	// The refused frame again, late: its client counts no lease, and would give none back.
	r.d.cfg.Limits.MaxLeases = 100
	_, _, err = r.acquireSeq(w, refused, base.LeaseCopy, hot.ModeEach, []int{1, 1}, testKey(1), testKey(2))
	wantErr(t, err, base.ErrAborted)
	if n := r.d.sessions[w.Session].leases; n != 3 {
		t.Fatalf("%d leases", n)
	}
	r.check()
}

func TestExpiry(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 4)
	k := testKey(1)
	r.commit(w, rowOf(g, 0, 1, k))
	copySeq, viewSeq := r.next(), r.next()
	for seq, kind := range map[base.Sequence]base.LeaseKind{copySeq: base.LeaseCopy, viewSeq: base.LeaseView} {
		if _, _, err := r.acquireSeq(o, seq, kind, hot.ModeEach, []int{1}, k); err != nil {
			t.Fatal(err)
		}
	}
	r.now += 6 * time.Second
	r.beat(w)
	r.now += 5 * time.Second
	r.d.Tick(r.now)
	if r.count(EffectSessionExpired) != 1 {
		t.Fatal("no effect names the expired session")
	}
	ref := r.d.regions[1].pages[0]
	if x := r.d.store.replica(ref); x.copies != 0 || x.views != 1 {
		t.Fatalf("%d copies, %d views after expiry", x.copies, x.views)
	}
	// The same process comes back: its view is still there, its copy lease is not.
	req := openReq(2)
	req.PreviousSecret = Secret{2, 1}
	o, _ = r.open(req)
	if held := r.release(o, hot.ReleaseRow{Acquire: copySeq, Count: 1}, hot.ReleaseRow{Acquire: viewSeq, Count: 1}); !bytes.Equal(held, []byte{0, 1}) {
		t.Fatalf("held %v", held)
	}
	// The writer expires: hidden at once, also without a Tick; live again when it opens.
	r.now += 11 * time.Second
	o, _ = r.open(&OpenRequest{
		Session: sid(3), Secret: Secret{3}, Role: base.RoleWorker, Namespace: nsA, Opaque: true, PieceBytes: testPiece, Node: nodeA,
	})
	if err := r.d.ProveDomains(r.now, o, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	if v := r.probe(o, k); v[0] != hot.Miss {
		t.Fatal("a suspect session's page is visible (R6)")
	}
	req = openReq(1)
	req.PreviousSecret = Secret{1, 1}
	r.open(req)
	if v := r.probe(o, k); v[0].Status() != hot.Hit {
		t.Fatal("the session is live and its page hidden")
	}
	_, _, err := r.acquireSeq(o, r.next(), base.LeaseView, hot.ModeEach, []int{1}, k)
	wantErr(t, err, base.ErrDenied) // opened without views
	r.check()
}
