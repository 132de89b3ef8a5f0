package directory

import (
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// FuzzHotCalls gives whatever decodes to a directory with a worker, a region, objects,
// leases and a recovered region: nothing may panic, and every invariant holds after.
func FuzzHotCalls(f *testing.F) {
	row := hot.CommitRow{Key: testKey(5), Pool: 1, Region: 60, Offset: testPage, Length: 10, Generation: base.MakeGeneration(60, 1)}
	k := testKey(0)
	payload := func(frame []byte) []byte { return frame[hot.HeaderBytes:] }
	op := hot.Operation{Sequence: 20, Watermark: 2}
	f.Add(uint8(hot.OpCommit), payload(hot.AppendCommit(nil, 1, &hot.CommitRequest{Operation: op, Namespace: 1, Rows: hot.AppendCommitRow(nil, &row)})))
	f.Add(uint8(hot.OpProbe), payload(hot.AppendProbe(nil, 1, &hot.ProbeRequest{Operation: op, RequestID: 3, Namespace: 1, Targets: make([]byte, 32), Keys: k[:]})))
	f.Add(uint8(hot.OpAcquire), payload(hot.AppendAcquire(nil, 1, &hot.AcquireRequest{
		Operation: op, Namespace: 1, Kind: base.LeaseView, Mode: hot.ModePrefix, ManifestSizes: hot.AppendManifestSize(nil, 1), Keys: k[:],
	})))
	f.Add(uint8(hot.OpRelease), payload(hot.AppendRelease(nil, 1, &hot.ReleaseRequest{Operation: op, Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: 11, First: 0, Count: hot.ReleaseAll})})))
	f.Add(uint8(hot.OpResolve), payload(hot.AppendResolve(nil, 1, &hot.ResolveRequest{Operation: op, TargetServerEpoch: 77, TargetEpoch: 1, Target: 10})))
	f.Add(uint8(hot.OpRequests), payload(hot.AppendRequests(nil, 1, &hot.RequestsRequest{Operation: op, Action: hot.RequestsEnd, IDs: make([]byte, 8)})))
	page := oldPage(50, 0, 3, k, hot.RelistReady)
	lease := hot.RelistLease{Pool: 1, Region: 50, Offset: testPage, Generation: base.MakeGeneration(50, 1), Kind: base.LeaseView, Acquire: 9, Index: 1}
	f.Add(uint8(hot.OpRelist), payload(hot.AppendRelist(nil, 1, &hot.RelistRequest{Operation: op, Last: true, Pages: hot.AppendRelistPage(nil, &page), Leases: hot.AppendRelistLease(nil, &lease)})))

	f.Fuzz(func(t *testing.T, op uint8, data []byte) {
		r := newRig(t, nil)
		if err := r.d.RecoverRegions(r.now, []RecoveredRegion{recovered(50, 2, Holder{sid(2), true}, Holder{sid(3), true})}); err != nil {
			t.Fatal(err)
		}
		w, lister := r.worker(1), r.reopen(2)
		nextRegion = 59
		g := r.expand(w, 4)
		r.seq = 9
		r.commit(w, rowOf(g, 0, 1, testKey(0)))
		if _, _, err := r.acquireSeq(w, r.next(), base.LeaseCopy, hot.ModeEach, []int{1}, testKey(0)); err != nil {
			t.Fatal(err)
		}
		for _, who := range []Caller{w, lister} {
			fuzzCall(r, who, hot.Op(op), data)
			fuzzCall(r, who, hot.Op(op), data)
			r.check()
		}
		r.now += 11 * time.Second
		r.d.Tick(r.now)
		for n := byte(1); n <= 3; n++ {
			r.d.SessionGone(r.now, sid(n), GonePidfd)
		}
		r.check()
		if r.count(EffectFreeRegion) > 0 {
			r.d.RegionFreed(r.now, 1, 50, nil)
		}
		if r.d.RelistIncomplete() {
			t.Fatal("everybody is gone and the rule does not hold (L1)")
		}
	})
}

func fuzzCall(r *rig, who Caller, op hot.Op, data []byte) {
	switch op {
	case hot.OpProbe:
		var m hot.ProbeRequest
		if hot.DecodeProbe(data, &m) == nil {
			_, _, _ = r.d.ProbeKeep(r.now, who, &m, nil)
		}
	case hot.OpAcquire:
		var m hot.AcquireRequest
		if hot.DecodeAcquire(data, &m) == nil {
			_, _, _ = r.d.Acquire(r.now, who, &m, nil)
		}
	case hot.OpRelease:
		var m hot.ReleaseRequest
		if hot.DecodeRelease(data, &m) == nil {
			_, _ = r.d.Release(r.now, who, &m, nil)
		}
	case hot.OpCommit:
		var m hot.CommitRequest
		if hot.DecodeCommit(data, &m) == nil {
			_, _ = r.d.Commit(r.now, who, &m, nil)
		}
	case hot.OpResolve:
		var m hot.ResolveRequest
		if hot.DecodeResolve(data, &m) == nil {
			_, _, _ = r.d.Resolve(r.now, who, &m, nil)
		}
	case hot.OpRelist:
		var m hot.RelistRequest
		if hot.DecodeRelist(data, &m) == nil {
			_, _ = r.d.Relist(r.now, who, &m, nil)
		}
	case hot.OpRequests:
		var m hot.RequestsRequest
		if hot.DecodeRequests(data, &m) == nil {
			_, _ = r.d.Requests(r.now, who, &m)
		}
	}
}
