package server

import (
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
)

// FuzzDispatch gives a proved session's connection any operation with any payload.
// The answer is always a whole frame of that operation, or the connection ends; the
// directory stays whole.
func FuzzDispatch(f *testing.F) {
	cfg := testConfig(f)
	cfg.TTL = time.Hour
	s := startServer(f, cfg)
	c := newClient(f, s.ControlAddress(), func(m *maruv1.OpenRequest) { m.Views = true })
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 16, 4096)
	keys := hot.AppendKeys(nil, testKeyRange(0, 4))
	ns := base.NamespaceNumber(c.open.GetNamespaceNumber())
	op := hot.Operation{Sequence: 100, Watermark: 50}
	sizes := hot.AppendManifestSize(hot.AppendManifestSize(nil, 1), 3)
	row := hot.AppendCommitRow(nil, &hot.CommitRow{
		Key: testKey(1), Pool: r.GetPoolNumber(), Region: base.RegionID(r.GetHandle().GetRegionId()), Length: 9, Generation: base.MakeGeneration(1, 1),
	})
	for kind, frame := range map[hot.Op][]byte{
		hot.OpProbe:   hot.AppendProbe(nil, 1, &hot.ProbeRequest{Operation: op, RequestID: 4, Namespace: ns, Targets: c.id[:], Keys: keys}),
		hot.OpAcquire: hot.AppendAcquire(nil, 1, &hot.AcquireRequest{Operation: op, Namespace: ns, Kind: base.LeaseView, ManifestSizes: sizes, Keys: keys}),
		hot.OpRelease: hot.AppendRelease(nil, 1, &hot.ReleaseRequest{Operation: op, Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: 100, Count: hot.ReleaseAll})}),
		hot.OpCommit:  hot.AppendCommit(nil, 1, &hot.CommitRequest{Operation: op, Namespace: ns, Rows: row}),
		hot.OpResolve: hot.AppendResolve(nil, 1, &hot.ResolveRequest{Operation: op, TargetServerEpoch: s.Epoch(), TargetEpoch: 1, Target: 100}),
		hot.OpRelist: hot.AppendRelist(nil, 1, &hot.RelistRequest{
			Operation: op, Last: true, Pages: hot.AppendRelistPage(nil, &hot.RelistPage{State: hot.RelistReady}),
			Leases: hot.AppendRelistLease(nil, &hot.RelistLease{Kind: base.LeaseCopy, Acquire: 1}),
		}),
		hot.OpRequests: hot.AppendRequests(nil, 1, &hot.RequestsRequest{Operation: op, Action: hot.RequestsEnd, IDs: make([]byte, 8)}),
	} {
		f.Add(uint8(kind), frame[hot.HeaderBytes:])
	}
	conn := &hotConn{server: s, session: s.sessions.get(c.id)}
	round := uint64(0)
	f.Fuzz(func(t *testing.T, kind uint8, payload []byte) {
		// The watermark rises, so that the ledger of what inputs left does not fill up.
		round++
		_ = s.step(func(d *directory.Directory, now time.Duration) error {
			_, err := d.Heartbeat(now, conn.session.caller(), &directory.HeartbeatRequest{Sequence: round, Watermark: base.Sequence(round)})
			return err
		})
		h := hot.Header{PayloadBytes: uint32(len(payload)), Op: hot.Op(kind), RequestID: 7}
		out, err := conn.dispatch(nil, h, payload)
		if err == nil {
			got, err := hot.DecodeHeader(out)
			if err != nil || got.Op != h.Op || got.RequestID != 7 || got.Flags != hot.FlagAnswer || int(got.PayloadBytes)+hot.HeaderBytes != len(out) {
				t.Fatalf("operation %d: answer %+v of %d bytes: %v", kind, got, len(out), err)
			}
		}
		err = s.look(func(d *directory.Directory, now time.Duration) error { return d.CheckInvariants(now) })
		if err != nil {
			t.Fatalf("operation %d: %v", kind, err)
		}
	})
}
