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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

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
	// hang: hot calls are not answered.
	hang       atomic.Bool
	hangCommit atomic.Bool // of Commit alone
	// loseOpens: the answers of that many Open calls are lost. denyOpens: that many are denied.
	loseOpens atomic.Int32
	denyOpens atomic.Int32
	// loseHolds: the answers of that many Hold calls are lost. refuseHolds: all are refused.
	loseHolds   atomic.Int32
	refuseHolds atomic.Bool
	// wrongRegion: a hold is answered with another region's number.
	wrongRegion atomic.Bool
	// holdEnds: the session is over at the server when its next hold comes.
	holdEnds atomic.Bool
	// oldServer: heartbeats do not say which region is the newest.
	oldServer atomic.Bool
	// unholdCount is the most regions of an Unhold; 0: any.
	unholdCount atomic.Int32
	// coherence of the pool.
	coherence maruv1.Coherence

	grpc  *grpc.Server
	hotLn net.Listener

	// drop: the next call of this op is done, and its answer is not sent.
	drop [16]atomic.Int32
	// endOnDrop: the session ends with an answer that is dropped.
	endOnDrop atomic.Bool
	// loseExpands: so many answers to Expand are lost. expandEnds: the next one is carried
	// out, its answer is lost, and the session's epoch is over.
	loseExpands atomic.Int32
	expandEnds  atomic.Bool
	// loseReturns: so many calls of Return are lost on their way.
	loseReturns atomic.Int32

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
		returned    []*maruv1.ReturnRequest
		calls       map[string]int
		relisted    []hot.RelistPage
		relistLease []hot.RelistLease
		relistReply hot.RelistResult
		heartbeats  int
		muteBeats   bool
		workers     []*maruv1.EngineWorker
		hides       map[base.SessionID]map[base.Key]bool // what a worker cannot read
		asked       []string                             // probes and actions on request leases
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
	granted  map[uint64]*maruv1.ExpandResponse
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
	f.coherence = maruv1.Coherence_COHERENCE_HARDWARE
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

func (f *fake) Open(ctx context.Context, r *maruv1.OpenRequest) (*maruv1.OpenResponse, error) {
	if f.denyOpens.Add(-1) >= 0 {
		return nil, fmt.Errorf("%w: the session is open", base.ErrDenied)
	}
	resp, err := f.open(r)
	if err == nil && f.loseOpens.Add(-1) >= 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return resp, err
}

func (f *fake) open(r *maruv1.OpenRequest) (*maruv1.OpenResponse, error) {
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
		granted: map[uint64]*maruv1.ExpandResponse{},
	}
	_, _ = rand.Read(s.secret)
	if old := f.mu.sessions[id]; old != nil {
		if !bytes.Equal(old.secret, r.GetPreviousSecret()) {
			return nil, fmt.Errorf("%w: previous secret", base.ErrDenied)
		}
		s.epoch = old.epoch + 1
		s.results, s.closed, s.acquires, s.granted = old.results, old.closed, old.acquires, old.granted
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
			{Number: 1, Info: &maruv1.PoolInfo{PoolId: f.pool[:], Medium: maruv1.Medium_MEDIUM_CXL, Scope: maruv1.Scope_SCOPE_DOMAIN, Coherence: f.coherence}},
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
	resp := &maruv1.HeartbeatResponse{Epoch: s.epoch, ServerEpoch: f.mu.serverEpoch, TtlMs: uint32(f.ttl.Load()), Events: &maruv1.EventBatch{}, Workers: f.mu.workers}
	if !f.oldServer.Load() {
		resp.NewestRegionId = f.mu.lastRegion
	}
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
	if f.loseExpands.Add(-1) >= 0 {
		return nil, status.Error(codes.Unavailable, "the answer was lost")
	}
	f.loseExpands.Store(0)
	f.mu.Lock()
	resp := s.granted[r.GetOperation()]
	f.mu.Unlock()
	if resp == nil {
		if resp, err = f.grant(s, r); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.granted[r.GetOperation()] = resp
	if f.expandEnds.CompareAndSwap(true, false) {
		s.ended = true
		return nil, status.Error(codes.Unavailable, "the answer was lost")
	}
	return resp, nil
}

// grant makes a region.
func (f *fake) grant(s *fakeSession, r *maruv1.ExpandRequest) (*maruv1.ExpandResponse, error) {
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
	if f.loseReturns.Add(-1) >= 0 {
		return nil, status.Error(codes.Unavailable, "the call was lost")
	}
	s, err := f.session(ctx)
	f.called("return")
	if err == nil {
		f.mu.Lock()
		f.mu.returned = append(f.mu.returned, r)
		f.mu.Unlock()
	}
	if err == nil && f.refuseHolds.Load() {
		f.mu.Lock()
		s.tell(&maruv1.Event{Event: &maruv1.Event_Drain{Drain: &maruv1.DrainEvent{PoolId: f.pool[:], RegionId: r.GetRegionId()}}})
		f.mu.Unlock()
	}
	return &maruv1.ReturnResponse{}, err
}

func (f *fake) DescribeRegions(ctx context.Context, r *maruv1.DescribeRegionsRequest) (*maruv1.DescribeRegionsResponse, error) {
	if _, err := f.session(ctx); err != nil {
		return nil, err
	}
	if r.GetAllOfNamespace() {
		f.called("describe all")
	} else {
		f.called("describe")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	resp := &maruv1.DescribeRegionsResponse{}
	ids := r.GetRegionIds()
	if r.GetAllOfNamespace() {
		for id := range f.mu.regions {
			if uint32(id) > r.GetAfterRegionId() {
				ids = append(ids, uint32(id))
			}
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
	f.called("prove")
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
