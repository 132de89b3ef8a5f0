package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func keyBytes(keys []base.Key) [][]byte {
	out := make([][]byte, len(keys))
	for i := range keys {
		out[i] = keys[i][:]
	}
	return out
}

func codesOf(r *maruv1.DeleteResponse) []base.Code {
	out := make([]base.Code, len(r.GetResults()))
	for i, p := range r.GetResults() {
		out[i] = base.Code(p.GetCode())
	}
	return out
}

// withDeadline keeps the session's metadata and bounds the call.
func withDeadline(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	md, _ := metadata.FromOutgoingContext(ctx)
	out, cancel := context.WithTimeout(metadata.NewOutgoingContext(context.Background(), md), d)
	return out, cancel
}

// Delete hides at once, is acknowledged when the writer has cleared its marks, and is
// UNKNOWN when the caller's time is up before that; the key stays hidden.
func TestDelete(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	writer := newClient(t, s.ControlAddress(), cxlRequest)
	writer.connect("")
	l.prove(writer)
	r := writer.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	keys := testKeyRange(0, 16)
	writer.commitKeys(r, r.GetHandle().GetIncarnation(), keys)
	reader := newClient(t, s.ControlAddress(), cxlRequest)
	reader.connect("")
	l.prove(reader)
	_, view := reader.acquireAll(base.LeaseView, keys[3:4])
	stream, err := writer.api.Events(writer.ctx(), &maruv1.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := withDeadline(reader.ctx(), 400*time.Millisecond)
	defer cancel()
	op := uint64(reader.next().Sequence)
	m := &maruv1.DeleteRequest{Operation: op, Keys: keyBytes([]base.Key{keys[0], keys[3], testKey(999)})}
	answer, err := reader.api.Delete(ctx, m)
	if err != nil {
		t.Fatalf("delete: %v", err)
	}
	if c := codesOf(answer); c[0] != base.CodeUnknown || c[1] != base.CodePinned || c[2] != base.CodeNotFound {
		t.Fatalf("codes %v", c)
	}
	if n := reader.probeHits(keys); n != 15 {
		t.Errorf("%d hits, want 15: the deleted key is hidden, the pinned one stays", n)
	}
	// The writer gets the retire event, clears its mark and says so: the repeated delete is done.
	result := make(chan error, 1)
	go func() {
		answer, err := reader.api.Delete(reader.ctx(), m)
		if err == nil && codesOf(answer)[0] != base.CodeOK {
			err = errors.New(answer.GetResults()[0].GetText())
		}
		result <- err
	}()
	var retire *maruv1.PageEvent
	for retire == nil {
		batch, err := stream.Recv()
		if err != nil {
			t.Fatalf("events: %v", err)
		}
		for _, e := range batch.GetEvents() {
			if e.GetRetire() != nil {
				retire = e.GetRetire()
			}
		}
	}
	if retire.GetRegionId() != r.GetHandle().GetRegionId() || retire.GetOffset() != 0 {
		t.Fatalf("retire event: %v", retire)
	}
	select {
	case err := <-result:
		t.Fatalf("the delete was acknowledged before the mark was cleared: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if _, err := writer.api.Acknowledge(writer.ctx(), &maruv1.AcknowledgeRequest{MarksCleared: []*maruv1.PageEvent{retire}}); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Fatalf("delete after the mark was cleared: %v", err)
	}
	drain(t, writer, 1)
	// A view keeps the namespace, too.
	if _, err := reader.api.DeleteNamespace(reader.ctx(), &maruv1.DeleteNamespaceRequest{
		Operation: uint64(reader.next().Sequence), NamespaceId: reader.open.GetNamespaceId(),
	}); !errors.Is(err, base.ErrPinned) {
		t.Errorf("namespace with a view out: %v", err)
	}
	if _, err := reader.hot.release(&hot.ReleaseRequest{
		Operation: reader.next(), Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: view, Count: hot.ReleaseAll}),
	}); err != nil {
		t.Fatal(err)
	}
	go func() {
		m := &maruv1.DeleteNamespaceRequest{Operation: uint64(reader.next().Sequence), NamespaceId: reader.open.GetNamespaceId()}
		answer, err := reader.api.DeleteNamespace(reader.ctx(), m)
		if err == nil && answer.GetObjects() != 15 {
			err = errors.New(answer.String())
		}
		result <- err
	}()
	drain(t, writer, 15)
	if err := <-result; err != nil {
		t.Errorf("delete namespace: %v", err)
	}
	if u := s.usage(); u.Objects != 0 {
		t.Errorf("%d objects are left", u.Objects)
	}
}

// Deleting from a region whose writer is gone goes through the resource manager.
func TestDeleteInKeptRegion(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	writer := newClient(t, s.ControlAddress(), cxlRequest)
	writer.connect("")
	l.prove(writer)
	r := writer.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	keys := testKeyRange(0, 4)
	writer.commitKeys(r, r.GetHandle().GetIncarnation(), keys)
	if _, err := writer.api.Close(writer.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
		t.Fatal(err)
	}
	reader := newClient(t, s.ControlAddress(), cxlRequest)
	reader.connect("")
	l.prove(reader)
	for i, k := range keys {
		answer, err := reader.api.Delete(reader.ctx(), &maruv1.DeleteRequest{Operation: uint64(reader.next().Sequence), Keys: keyBytes([]base.Key{k})})
		if err != nil || codesOf(answer)[0] != base.CodeOK {
			t.Fatalf("delete %d: %v %v", i, answer, err)
		}
	}
	// Without keys the region is of no use to anybody.
	waitFor(t, "the region goes back", func() bool { return s.usage().Regions == 0 })
}

func TestDeleteBadInput(t *testing.T) {
	s := startServer(t, testConfig(t))
	c := newClient(t, s.ControlAddress(), nil)
	for name, x := range map[string]struct {
		m    *maruv1.DeleteRequest
		want error
	}{
		"short key":    {&maruv1.DeleteRequest{Operation: 1, Keys: [][]byte{{1}}}, base.ErrInvalid},
		"no operation": {&maruv1.DeleteRequest{Keys: keyBytes(testKeyRange(0, 1))}, base.ErrInvalid},
		"too many":     {&maruv1.DeleteRequest{Operation: 2, Keys: keyBytes(testKeyRange(0, hot.MaxKeys+1))}, base.ErrLimit},
	} {
		if _, err := c.api.Delete(c.ctx(), x.m); !errors.Is(err, x.want) {
			t.Errorf("%s: %v, want %v", name, err, x.want)
		}
	}
	if _, err := c.api.Close(c.ctx(), &maruv1.CloseRequest{}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("close of no kind: %v", err)
	}
	if _, err := c.api.DeleteNamespace(c.ctx(), &maruv1.DeleteNamespaceRequest{Operation: 3, NamespaceId: []byte{1}}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("short namespace: %v", err)
	}
}

// Request leases of a scheduler, and operations that are asked twice.
func TestHotOperations(t *testing.T) {
	s := startServer(t, testConfig(t))
	engine := func(m *maruv1.OpenRequest) { m.EngineId, m.WorldSize = "e", 1 }
	w := newClient(t, s.ControlAddress(), engine)
	w.connect("")
	sched := newClient(t, s.ControlAddress(), func(m *maruv1.OpenRequest) { engine(m); m.Role, m.CpuBytes = maruv1.Role_ROLE_SCHEDULER, 0 })
	sched.connect("")
	ns := base.NamespaceNumber(w.open.GetNamespaceNumber())
	r := w.expand(maruv1.Medium_MEDIUM_CPU, 8, 4096)
	keys := testKeyRange(0, 8)
	row := hot.AppendCommitRow(nil, &hot.CommitRow{
		Key: keys[0], Pool: r.GetPoolNumber(), Region: base.RegionID(r.GetHandle().GetRegionId()), Length: 10, Generation: base.MakeGeneration(w.open.GetEpoch(), 1),
	})
	op := w.next()
	first, err := w.hot.commit(&hot.CommitRequest{Operation: op, Namespace: ns, Rows: row})
	if err != nil {
		t.Fatal(err)
	}
	order := first.At(0).Order
	again, err := w.hot.commit(&hot.CommitRequest{Operation: op, Namespace: ns, Rows: row})
	if err != nil || again.At(0).Order != order || again.At(0).Code != base.CodeOK {
		t.Errorf("the same commit again: %v %v", again, err)
	}
	res, err := w.hot.resolve(&hot.ResolveRequest{
		Operation: hot.Operation{Watermark: op.Sequence}, TargetServerEpoch: s.Epoch(), TargetEpoch: base.Epoch(w.open.GetEpoch()), Target: op.Sequence,
	})
	if err != nil || res.Outcome != hot.OutcomeCommitted || res.Results.At(0).Order != order {
		t.Errorf("resolve: %+v %v", res, err)
	}
	later := w.seq + 5
	res, err = w.hot.resolve(&hot.ResolveRequest{
		Operation: hot.Operation{Watermark: op.Sequence}, TargetServerEpoch: s.Epoch(), TargetEpoch: base.Epoch(w.open.GetEpoch()), Target: later,
	})
	if err != nil || res.Outcome != hot.OutcomeAborted {
		t.Errorf("resolve of what was never seen: %+v %v", res, err)
	}
	if _, err := w.hot.commit(&hot.CommitRequest{Operation: hot.Operation{Sequence: later}, Namespace: ns, Rows: row}); !errors.Is(err, base.ErrAborted) {
		t.Errorf("it arrives late: %v", err)
	}
	m := &hot.ProbeRequest{RequestID: 77, Namespace: ns, Mode: hot.ModePrefix, Targets: w.id[:], Keys: hot.AppendKeys(nil, keys)}
	a, err := sched.hot.probe(m)
	if err != nil || a.LeadingHits != 1 || hot.Verdict(a.Verdicts[0]).Medium() != base.MediumCPU || hot.Verdict(a.Verdicts[2]).Status() != hot.NotTried {
		t.Fatalf("scheduler's probe: %+v %v", a, err)
	}
	if u := s.usage(); u.Sessions[1].Requests != 1 {
		t.Errorf("requests: %+v", u.Sessions)
	}
	ids := []byte{77, 0, 0, 0, 0, 0, 0, 0, 78, 0, 0, 0, 0, 0, 0, 0}
	frame := hot.AppendRequests(nil, 5, &hot.RequestsRequest{Action: hot.RequestsEnd, IDs: ids})
	payload, err := sched.hot.roundTrip(frame)
	var known hot.RequestsAnswer
	if err == nil {
		err = hot.DecodeRequestsAnswer(payload, &known)
	}
	if err != nil || known.Known != 1 {
		t.Errorf("requests: %+v %v", known, err)
	}
	if _, err := sched.hot.acquire(&hot.AcquireRequest{Operation: sched.next(), Namespace: ns, Kind: base.LeaseCopy}); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a scheduler's acquire: %v", err)
	}
	if _, err := w.hot.probe(&hot.ProbeRequest{Namespace: ns + 1}); !errors.Is(err, base.ErrMismatch) {
		t.Errorf("another namespace: %v", err)
	}
}
