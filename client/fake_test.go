package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rpc"
)

const fakePoolBytes = 128 << 20

// fake is a server and a resource manager in one, as little of each as a client sees:
// one cxl pool on a file, one private cpu pool a session, no domains but the proof.
type fake struct {
	maruv1.UnimplementedMetadataServerServer
	maruv1.UnimplementedResourceManagerServer
	t       *testing.T
	path    string
	pool    base.PoolID
	address string
	boot    []byte
	ttl     atomic.Int64 // ms

	grpc  *grpc.Server
	hotLn net.Listener

	// drop: the next call of this op is done, and its answer is not sent.
	drop [16]atomic.Int32

	mu struct {
		sync.Mutex
		serverEpoch uint64
		sessions    map[base.SessionID]*fakeSession
		objects     map[base.Key]*fakeObject
		regions     map[base.RegionID]*fakeRegion
		conns       map[net.Conn]struct{}
		lastRegion  uint32
		lastPrivate uint32
		nextOffset  uint64
		order       uint64
		nonces      map[uint32]poolfmt.Nonce
		proved      map[base.SessionID]bool
		holds       map[string]bool // session/region
		unreachable []uint32
		closes      []*maruv1.CloseRequest
		calls       map[string]int
		relisted    []hot.RelistPage
		relistLease []hot.RelistLease
		relistReply hot.RelistResult
		heartbeats  int
		muteBeats   bool
	}
}

type fakeSession struct {
	id       base.SessionID
	epoch    uint32
	secret   []byte
	ns       []byte
	events   []*maruv1.Event
	notify   chan struct{}
	results  map[base.Sequence][]hot.CommitResult
	closed   map[base.Sequence]bool // resolved as aborted
	acquires map[base.Sequence][]*fakeObject
	answers  map[base.Sequence]*hot.AcquireAnswer
	acked    []*maruv1.AcknowledgeRequest
	ended    bool
}

type fakeObject struct {
	row    hot.CommitRow
	order  base.CommitOrder
	owner  base.SessionID
	leases int
}

type fakeRegion struct {
	place  *maruv1.RegionPlace
	writer base.SessionID
	id     uint32
}

func startFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{t: t, pool: base.NewID(), path: filepath.Join(t.TempDir(), "pool")}
	x, err := dax.Open(f.path, dax.KindFile, dax.OpenOptions{Create: true, SizeBytes: fakePoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	_ = x.Close()
	who, err := node.Read(node.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f.boot = who.Boot[:]
	f.ttl.Store(10000)
	f.mu.regions = map[base.RegionID]*fakeRegion{}
	f.mu.holds = map[string]bool{}
	f.mu.nonces = map[uint32]poolfmt.Nonce{}
	f.mu.proved = map[base.SessionID]bool{}
	f.mu.calls = map[string]int{}
	f.mu.conns = map[net.Conn]struct{}{}
	f.mu.nextOffset = poolfmt.DataOffset
	f.mu.relistReply = hot.RelistQuarantined
	f.begin()
	f.listen("127.0.0.1:0", "127.0.0.1:0")
	t.Cleanup(f.stop)
	return f
}

// begin starts a new server epoch.
func (f *fake) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.serverEpoch = uint64(time.Now().UnixNano())
	f.mu.sessions = map[base.SessionID]*fakeSession{}
	f.mu.objects = map[base.Key]*fakeObject{}
}

func (f *fake) listen(control, hotAddress string) {
	ln, err := net.Listen("tcp", control)
	if err != nil {
		f.t.Fatal(err)
	}
	f.address = ln.Addr().String()
	if f.hotLn, err = net.Listen("tcp", hotAddress); err != nil {
		f.t.Fatal(err)
	}
	srv := rpc.NewServer(rpc.Limits{})
	f.grpc = srv
	maruv1.RegisterMetadataServerServer(srv, f)
	maruv1.RegisterResourceManagerServer(srv, f)
	go func() { _ = srv.Serve(ln) }()
	go f.serveHot(f.hotLn)
}

func (f *fake) stop() {
	f.grpc.Stop()
	_ = f.hotLn.Close()
	f.mu.Lock()
	for c := range f.mu.conns {
		_ = c.Close()
	}
	f.mu.Unlock()
}

// restart is a crash: a new epoch at the old addresses.
func (f *fake) restart(away time.Duration) {
	control, hotAddress := f.address, f.hotLn.Addr().String()
	f.stop()
	time.Sleep(away)
	f.begin()
	f.listen(control, hotAddress)
}

func (f *fake) session(ctx context.Context) (*fakeSession, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	get := func(k string) string {
		if v := md.Get(k); len(v) == 1 {
			return v[0]
		}
		return ""
	}
	var id base.SessionID
	copy(id[:], get("maru-session-bin"))
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.mu.sessions[id]
	epoch, _ := strconv.Atoi(get("maru-epoch"))
	if s == nil || s.ended || int(s.epoch) != epoch || get("maru-secret-bin") != string(s.secret) {
		return nil, fmt.Errorf("%w: session", base.ErrStale)
	}
	return s, nil
}

func (f *fake) called(name string) {
	f.mu.Lock()
	f.mu.calls[name]++
	f.mu.Unlock()
}

func (f *fake) callCount(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.calls[name]
}

func (f *fake) Open(_ context.Context, r *maruv1.OpenRequest) (*maruv1.OpenResponse, error) {
	f.called("open")
	id, err := base.IDFromBytes("session_id", r.GetSessionId())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &fakeSession{
		id: id, epoch: 1, ns: r.GetNamespaceCbor(), secret: make([]byte, 16), notify: make(chan struct{}, 1),
		results: map[base.Sequence][]hot.CommitResult{}, closed: map[base.Sequence]bool{},
		acquires: map[base.Sequence][]*fakeObject{}, answers: map[base.Sequence]*hot.AcquireAnswer{},
	}
	_, _ = rand.Read(s.secret)
	if old := f.mu.sessions[id]; old != nil {
		if !bytes.Equal(old.secret, r.GetPreviousSecret()) {
			return nil, fmt.Errorf("%w: previous secret", base.ErrDenied)
		}
		s.epoch = old.epoch + 1
		s.results, s.closed, s.acquires = old.results, old.closed, old.acquires
		old.ended = true
		close(old.notify)
	} else if r.GetPreviousEpoch() != 0 {
		s.epoch = r.GetPreviousEpoch() + 1
	}
	f.mu.sessions[id] = s
	ns := base.NamespaceOf(r.GetNamespaceCbor())
	resp := &maruv1.OpenResponse{
		Version: 1, Epoch: s.epoch, Secret: s.secret, ServerId: make([]byte, 16), OwnerIncarnation: 1, ServerEpoch: f.mu.serverEpoch,
		NodeId: make([]byte, 16), BootId: f.boot, NamespaceNumber: 7, NamespaceId: ns[:],
		ControlAddress: f.address, HotAddress: f.hotLn.Addr().String(), RmAddresses: []string{f.address},
		TtlMs: uint32(f.ttl.Load()), HeartbeatMs: 50, MarginMs: 10, Limits: &maruv1.Limits{MaxLeases: 4096, MaxOperations: 1 << 16},
		Pools: []*maruv1.PoolRef{
			{Number: 1, Info: &maruv1.PoolInfo{PoolId: f.pool[:], Medium: maruv1.Medium_MEDIUM_CXL, Scope: maruv1.Scope_SCOPE_DOMAIN, Coherence: maruv1.Coherence_COHERENCE_HARDWARE}},
			{Number: 2, Info: &maruv1.PoolInfo{PoolId: id[:], Medium: maruv1.Medium_MEDIUM_CPU, Scope: maruv1.Scope_SCOPE_PROCESS, Coherence: maruv1.Coherence_COHERENCE_HARDWARE}},
		},
		Relist: r.GetPreviousServerEpoch() != 0 && r.GetPreviousServerEpoch() != f.mu.serverEpoch,
	}
	return resp, nil
}

func (f *fake) Heartbeat(ctx context.Context, r *maruv1.HeartbeatRequest) (*maruv1.HeartbeatResponse, error) {
	s, err := f.session(ctx)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.muteBeats {
		return nil, fmt.Errorf("%w: muted", base.ErrUnavailable)
	}
	f.mu.heartbeats++
	resp := &maruv1.HeartbeatResponse{Epoch: s.epoch, ServerEpoch: f.mu.serverEpoch, TtlMs: uint32(f.ttl.Load()), Events: &maruv1.EventBatch{}}
	for _, e := range s.events {
		if e.GetNumber() > r.GetLastEvent() {
			resp.Events.Events = append(resp.Events.Events, e)
		}
	}
	return resp, nil
}

func (f *fake) Events(r *maruv1.EventsRequest, stream maruv1.MetadataServer_EventsServer) error {
	s, err := f.session(stream.Context())
	if err != nil {
		return err
	}
	sent := r.GetAfter()
	for {
		f.mu.Lock()
		batch := &maruv1.EventBatch{}
		for _, e := range s.events {
			if e.GetNumber() > sent {
				batch.Events = append(batch.Events, e)
			}
		}
		ended := s.ended
		f.mu.Unlock()
		if ended {
			return fmt.Errorf("%w: epoch over", base.ErrStale)
		}
		if n := len(batch.GetEvents()); n > 0 {
			sent = batch.Events[n-1].Number
			if err := stream.Send(batch); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.notify:
		}
	}
}

// tell queues an event. Called under mu.
func (s *fakeSession) tell(e *maruv1.Event) {
	e.Number = uint64(len(s.events) + 1)
	s.events = append(s.events, e)
	if !s.ended {
		select {
		case s.notify <- struct{}{}:
		default:
		}
	}
}

func (f *fake) Acknowledge(ctx context.Context, r *maruv1.AcknowledgeRequest) (*maruv1.AcknowledgeResponse, error) {
	s, err := f.session(ctx)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.acked = append(s.acked, r)
	for _, p := range r.GetMarksCleared() {
		s.tell(&maruv1.Event{Event: &maruv1.Event_Reclaim{Reclaim: p}})
	}
	return &maruv1.AcknowledgeResponse{}, nil
}

func (f *fake) Expand(ctx context.Context, r *maruv1.ExpandRequest) (*maruv1.ExpandResponse, error) {
	s, err := f.session(ctx)
	if err != nil {
		return nil, err
	}
	f.called("expand")
	pages := (r.GetBytes() + r.GetPageSize() - 1) / r.GetPageSize()
	plan, err := poolfmt.PlanRegion(r.GetPageSize(), pages, r.GetPieceSize())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	place := &maruv1.RegionPlace{
		ExtentLength: plan.ExtentBytes, Length: plan.DataBytes, PageSize: plan.PageBytes, PageCount: plan.PageCount,
		PieceSize: plan.PieceBytes, TableOffset: plan.TableOffset,
	}
	if r.GetMedium() == maruv1.Medium_MEDIUM_CPU {
		f.mu.lastPrivate++
		id := uint32(base.FirstPrivateRegion) + f.mu.lastPrivate
		return &maruv1.ExpandResponse{PoolNumber: 2, Handle: &maruv1.RegionHandle{RegionId: id}, Place: place}, nil
	}
	if f.mu.nextOffset+plan.ExtentBytes > fakePoolBytes {
		return nil, fmt.Errorf("%w: pool", base.ErrFull)
	}
	place.Offset = f.mu.nextOffset
	f.mu.nextOffset += plan.ExtentBytes
	f.mu.lastRegion++
	id := f.mu.lastRegion
	f.mu.regions[base.RegionID(id)] = &fakeRegion{place: place, writer: s.id, id: id}
	return &maruv1.ExpandResponse{PoolNumber: 1, Handle: f.handle(id), Place: place}, nil
}

func (f *fake) handle(id uint32) *maruv1.RegionHandle {
	return &maruv1.RegionHandle{PoolId: f.pool[:], RegionId: id, Incarnation: id + 100, Token: []byte("token")}
}

func (f *fake) Return(ctx context.Context, r *maruv1.ReturnRequest) (*maruv1.ReturnResponse, error) {
	_, err := f.session(ctx)
	f.called("return")
	return &maruv1.ReturnResponse{}, err
}

func (f *fake) DescribeRegions(ctx context.Context, r *maruv1.DescribeRegionsRequest) (*maruv1.DescribeRegionsResponse, error) {
	if _, err := f.session(ctx); err != nil {
		return nil, err
	}
	f.called("describe")
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &maruv1.DescribeRegionsResponse{}
	ids := r.GetRegionIds()
	if r.GetAllOfNamespace() {
		for id := range f.mu.regions {
			ids = append(ids, uint32(id))
		}
	}
	for _, id := range ids {
		g := f.mu.regions[base.RegionID(id)]
		sr := &maruv1.SharedRegion{PoolNumber: 1, Handle: f.handle(id)}
		if g == nil {
			sr.Problem = &maruv1.Problem{Code: uint32(base.CodeNotFound), Text: "no such region"}
		} else {
			sr.Place, sr.WriterSession = g.place, g.writer[:]
		}
		resp.Regions = append(resp.Regions, sr)
	}
	return resp, nil
}

func (f *fake) ProveDomains(ctx context.Context, _ *maruv1.ProveDomainsRequest) (*maruv1.ProveDomainsResponse, error) {
	s, err := f.session(ctx)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.mu.proved[s.id] {
		return &maruv1.ProveDomainsResponse{}, nil
	}
	return &maruv1.ProveDomainsResponse{ProvedPoolIds: [][]byte{f.pool[:]}}, nil
}

func (f *fake) ReportUnreachable(ctx context.Context, r *maruv1.ReportUnreachableRequest) (*maruv1.ReportUnreachableResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.unreachable = append(f.mu.unreachable, r.GetRegionId())
	return &maruv1.ReportUnreachableResponse{}, nil
}

func (f *fake) Delete(ctx context.Context, r *maruv1.DeleteRequest) (*maruv1.DeleteResponse, error) {
	if _, err := f.session(ctx); err != nil {
		return nil, err
	}
	f.called("delete")
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &maruv1.DeleteResponse{}
	for _, k := range r.GetKeys() {
		code := base.CodeNotFound
		if o := f.mu.objects[base.Key(k)]; o != nil {
			code = base.CodeOK
			if o.leases > 0 {
				code = base.CodePinned
			} else {
				f.retire(o)
			}
		}
		resp.Results = append(resp.Results, &maruv1.Problem{Code: uint32(code)})
	}
	return resp, nil
}

// retire hides an object and tells its writer. Called under mu.
func (f *fake) retire(o *fakeObject) {
	delete(f.mu.objects, o.row.Key)
	if s := f.mu.sessions[o.owner]; s != nil {
		s.tell(&maruv1.Event{Event: &maruv1.Event_Retire{Retire: &maruv1.PageEvent{
			PoolNumber: o.row.Pool, RegionId: uint32(o.row.Region), Offset: o.row.Offset, Generation: uint64(o.row.Generation), CommitOrder: uint64(o.order),
		}}})
	}
}

func (f *fake) Close(ctx context.Context, r *maruv1.CloseRequest) (*maruv1.CloseResponse, error) {
	s, err := f.session(ctx)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.closes = append(f.mu.closes, r)
	s.ended = true
	close(s.notify)
	return &maruv1.CloseResponse{}, nil
}

func (f *fake) Usage(context.Context, *maruv1.UsageRequest) (*maruv1.UsageResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &maruv1.UsageResponse{Objects: uint64(len(f.mu.objects))}, nil
}

// Resource manager.

func (f *fake) Describe(context.Context, *maruv1.DescribeRequest) (*maruv1.DescribeResponse, error) {
	return &maruv1.DescribeResponse{Version: 1, BootId: f.boot}, nil
}

func (f *fake) StartDomainProof(_ context.Context, r *maruv1.StartDomainProofRequest) (*maruv1.StartDomainProofResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	slot := uint32(len(f.mu.nonces) % poolfmt.NonceSlotCount)
	n := poolfmt.Nonce{Session: base.SessionID(r.GetSessionId())}
	_, _ = rand.Read(n.Value[:])
	f.mu.nonces[slot] = n
	line := poolfmt.EncodeNonce(f.pool, n)
	x, err := os.OpenFile(f.path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	if _, err := x.WriteAt(line[:], int64(poolfmt.NonceOffset(slot))); err != nil {
		return nil, err
	}
	return &maruv1.StartDomainProofResponse{
		Slot: slot, Path: f.path, DeviceKind: maruv1.DeviceKind_DEVICE_KIND_FILE, MapBytes: poolfmt.DataOffset, Coherence: maruv1.Coherence_COHERENCE_HARDWARE,
	}, nil
}

func (f *fake) FinishDomainProof(_ context.Context, r *maruv1.FinishDomainProofRequest) (*maruv1.FinishDomainProofResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.mu.nonces[r.GetSlot()]
	if !bytes.Equal(n.Value[:], r.GetNonce()) {
		return nil, fmt.Errorf("%w: nonce", base.ErrDenied)
	}
	f.mu.proved[base.SessionID(r.GetSessionId())] = true
	return &maruv1.FinishDomainProofResponse{}, nil
}

func holdKey(s []byte, region uint32) string { return fmt.Sprintf("%x/%d", s, region) }

func (f *fake) Hold(_ context.Context, r *maruv1.HoldRequest) (*maruv1.HoldResponse, error) {
	f.called("hold")
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &maruv1.HoldResponse{HoldToken: []byte("hold"), Provable: true}
	for _, h := range r.GetHandles() {
		g := f.mu.regions[base.RegionID(h.GetRegionId())]
		if g == nil {
			return nil, fmt.Errorf("%w: region %d", base.ErrDraining, h.GetRegionId())
		}
		f.mu.holds[holdKey(r.GetSessionId(), h.GetRegionId())] = true
		resp.Regions = append(resp.Regions, &maruv1.RegionAccess{
			Handle: h, Place: g.place, Path: f.path, DeviceKind: maruv1.DeviceKind_DEVICE_KIND_FILE, Coherence: maruv1.Coherence_COHERENCE_HARDWARE,
		})
	}
	return resp, nil
}

func (f *fake) Unhold(_ context.Context, r *maruv1.UnholdRequest) (*maruv1.UnholdResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range r.GetHandles() {
		delete(f.mu.holds, holdKey(r.GetSessionId(), h.GetRegionId()))
	}
	return &maruv1.UnholdResponse{}, nil
}

func (f *fake) WatchSession(_ *maruv1.WatchSessionRequest, s maruv1.ResourceManager_WatchSessionServer) error {
	<-s.Context().Done()
	return s.Context().Err()
}

func (f *fake) holdCount() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.mu.holds)
}

// Hot plane.

func (f *fake) serveHot(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.mu.conns[conn] = struct{}{}
		f.mu.Unlock()
		go func() {
			f.serveConn(conn)
			_ = conn.Close()
			f.mu.Lock()
			delete(f.mu.conns, conn)
			f.mu.Unlock()
		}()
	}
}

func (f *fake) serveConn(conn net.Conn) {
	f.mu.Lock()
	ch := hot.Challenge{ServerEpoch: base.ServerEpoch(f.mu.serverEpoch)}
	f.mu.Unlock()
	_, _ = rand.Read(ch.Nonce[:])
	if _, err := conn.Write(hot.AppendChallenge(nil, &ch)); err != nil {
		return
	}
	r := hot.NewReader(conn)
	h, payload, err := r.Next()
	if err != nil || h.Op != hot.OpHello {
		return
	}
	var hello hot.Hello
	if hot.DecodeHello(payload, &hello) != nil {
		return
	}
	f.mu.Lock()
	s := f.mu.sessions[hello.Session]
	f.mu.Unlock()
	if s == nil || s.epoch != uint32(hello.Epoch) || hot.HelloMAC(s.secret, &ch, &hello) != hello.MAC {
		_, _ = conn.Write(hot.AppendError(nil, hot.OpHello, h.RequestID, fmt.Errorf("%w: hello", base.ErrStale)))
		return
	}
	w := hot.Welcome{Namespace: 7, MAC: hot.WelcomeMAC(s.secret, &ch, &hello)}
	if _, err := conn.Write(hot.AppendWelcome(nil, h.RequestID, &w)); err != nil {
		return
	}
	for {
		h, payload, err := r.Next()
		if err != nil {
			return
		}
		out, err := f.answer(s, h, payload)
		if err != nil {
			out = hot.AppendError(nil, h.Op, h.RequestID, err)
		}
		if f.drop[h.Op].Load() > 0 && f.drop[h.Op].Add(-1) >= 0 {
			return
		}
		if _, err := conn.Write(out); err != nil {
			return
		}
	}
}

func (f *fake) answer(s *fakeSession, h hot.Header, payload []byte) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.calls[h.Op.String()]++
	if s.ended {
		return nil, fmt.Errorf("%w: epoch over", base.ErrStale)
	}
	switch h.Op {
	case hot.OpProbe:
		var m hot.ProbeRequest
		if err := hot.DecodeProbe(payload, &m); err != nil {
			return nil, err
		}
		var a hot.ProbeAnswer
		leading := true
		for i := range m.Keys.Len() {
			v := hot.Miss
			if o := f.mu.objects[m.Keys.At(i)]; o != nil && f.visible(s, o) {
				v = hot.MakeHit(base.MediumCXL)
			}
			leading = leading && v.Status() == hot.Hit
			if leading {
				a.LeadingHits++
			}
			a.Verdicts = append(a.Verdicts, byte(v))
		}
		return hot.AppendProbeAnswer(nil, h.RequestID, &a), nil
	case hot.OpCommit:
		return f.commit(s, h, payload)
	case hot.OpResolve:
		var m hot.ResolveRequest
		if err := hot.DecodeResolve(payload, &m); err != nil {
			return nil, err
		}
		var a hot.ResolveAnswer
		switch res, ok := s.results[m.Target]; {
		case uint64(m.TargetServerEpoch) != f.mu.serverEpoch:
			a.Outcome = hot.OutcomeUnknown
		case ok:
			a.Outcome = hot.OutcomeCommitted
			for _, r := range res {
				a.Results = hot.AppendCommitResult(a.Results, r)
			}
		default:
			a.Outcome = hot.OutcomeAborted
			s.closed[m.Target] = true
		}
		return hot.AppendResolveAnswer(nil, h.RequestID, &a), nil
	case hot.OpAcquire:
		var m hot.AcquireRequest
		if err := hot.DecodeAcquire(payload, &m); err != nil {
			return nil, err
		}
		var a hot.AcquireAnswer
		if s.answers[m.Sequence] != nil { // the same operation again
			return hot.AppendAcquireAnswer(nil, h.RequestID, s.answers[m.Sequence]), nil
		}
		leased := make([]*fakeObject, m.Keys.Len())
		for i := range m.Keys.Len() {
			row := hot.AcquireRow{}
			o := f.mu.objects[m.Keys.At(i)]
			if o != nil && f.visible(s, o) {
				row = hot.AcquireRow{
					Verdict: hot.MakeHit(base.MediumCXL), Pool: o.row.Pool, Region: o.row.Region, Offset: o.row.Offset,
					Length: o.row.Length, Generation: o.row.Generation, Checksum: o.row.Checksum, Order: o.order,
				}
				o.leases++
				leased[i] = o
			}
			a.Rows = hot.AppendAcquireRow(a.Rows, &row)
			if o == nil && m.Mode == hot.ModePrefix {
				break
			}
		}
		s.acquires[m.Sequence] = leased
		s.answers[m.Sequence] = &a
		return hot.AppendAcquireAnswer(nil, h.RequestID, &a), nil
	case hot.OpRelease:
		var m hot.ReleaseRequest
		if err := hot.DecodeRelease(payload, &m); err != nil {
			return nil, err
		}
		var a hot.ReleaseAnswer
		for i := range m.Rows.Len() {
			row := m.Rows.At(i)
			held := byte(1)
			list := s.acquires[row.Acquire]
			last := uint64(row.First) + uint64(row.Count)
			if row.Count == hot.ReleaseAll {
				last = uint64(len(list))
			}
			for k := uint64(row.First); k < last; k++ {
				if k >= uint64(len(list)) || list[k] == nil {
					held = 0
					continue
				}
				list[k].leases--
				if list[k].leases < 0 {
					f.t.Error("a lease was released twice")
				}
				list[k] = nil
			}
			a.Held = append(a.Held, held)
		}
		return hot.AppendReleaseAnswer(nil, h.RequestID, &a), nil
	case hot.OpRequests:
		var m hot.RequestsRequest
		if err := hot.DecodeRequests(payload, &m); err != nil {
			return nil, err
		}
		return hot.AppendRequestsAnswer(nil, h.RequestID, &hot.RequestsAnswer{Known: uint32(m.Count())}), nil
	case hot.OpRelist:
		var m hot.RelistRequest
		if err := hot.DecodeRelist(payload, &m); err != nil {
			return nil, err
		}
		var a hot.RelistAnswer
		for i := range m.Pages.Len() {
			f.mu.relisted = append(f.mu.relisted, m.Pages.At(i))
			a.Results = append(a.Results, byte(f.mu.relistReply))
		}
		for i := range m.Leases.Len() {
			f.mu.relistLease = append(f.mu.relistLease, m.Leases.At(i))
		}
		return hot.AppendRelistAnswer(nil, h.RequestID, &a), nil
	}
	return nil, fmt.Errorf("%w: %s", base.ErrUnsupported, h.Op)
}

func (f *fake) visible(s *fakeSession, o *fakeObject) bool {
	if o.row.Region >= base.FirstPrivateRegion {
		return o.owner == s.id
	}
	return f.mu.proved[s.id]
}

func (f *fake) commit(s *fakeSession, h hot.Header, payload []byte) ([]byte, error) {
	var m hot.CommitRequest
	if err := hot.DecodeCommit(payload, &m); err != nil {
		return nil, err
	}
	res, again := s.results[m.Sequence]
	if !again && s.closed[m.Sequence] {
		return nil, fmt.Errorf("%w: resolved", base.ErrAborted)
	}
	if !again {
		for i := range m.Rows.Len() {
			row := m.Rows.At(i)
			if o := f.mu.objects[row.Key]; o != nil && f.visible(s, o) {
				res = append(res, hot.CommitResult{Code: base.CodeAlreadyStored, Order: o.order})
				continue
			}
			f.mu.order++
			order, _ := base.MakeCommitOrder(1, f.mu.order)
			f.mu.objects[row.Key] = &fakeObject{row: row, order: order, owner: s.id}
			res = append(res, hot.CommitResult{Code: base.CodeOK, Order: order})
		}
		s.results[m.Sequence] = res
	}
	var packed hot.CommitResults
	for _, r := range res {
		packed = hot.AppendCommitResult(packed, r)
	}
	return hot.AppendCommitAnswer(nil, h.RequestID, packed), nil
}

// leases sums what is out.
func (f *fake) leases() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, o := range f.mu.objects {
		n += o.leases
	}
	return n
}

// records reads the records of a region with a mark from the file.
func (f *fake) records(region base.RegionID) []poolfmt.Record {
	f.t.Helper()
	f.mu.Lock()
	g := f.mu.regions[region]
	f.mu.Unlock()
	plan, _ := poolfmt.PlanRegion(g.place.GetPageSize(), g.place.GetPageCount(), g.place.GetPieceSize())
	x, err := os.Open(f.path)
	if err != nil {
		f.t.Fatal(err)
	}
	defer x.Close()
	var out []poolfmt.Record
	for i := range plan.PageCount {
		var b [poolfmt.RecordBytes]byte
		if _, err := x.ReadAt(b[:], int64(g.place.GetOffset()+plan.Record(base.PageIndex(i)))); err != nil {
			f.t.Fatal(err)
		}
		r, found, err := poolfmt.DecodeRecord(b[:], poolfmt.Place{Pool: f.pool, Region: region, Page: base.PageIndex(i)})
		if err != nil {
			f.t.Errorf("page %d: %v", i, err)
		}
		if found {
			out = append(out, r)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Order < out[j].Order })
	return out
}
