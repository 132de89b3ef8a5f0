package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/media/cpu"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/session"
)

// Version is what this build calls itself, from the module's build information.
var Version = func() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "devel"
}()

// Client is one session and what it holds.
// Concurrency: all methods are safe for concurrent use.
type Client struct {
	cfg       Config
	log       *slog.Logger
	clock     func() time.Duration           // CLOCK_BOOTTIME
	id        atomic.Pointer[base.SessionID] // drawn anew until an Open was answered
	node      node.Identity
	namespace base.NamespaceID
	conn      *grpc.ClientConn // control, to the configured address
	door      door

	ctx    context.Context // ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	reopen chan struct{}
	kicked chan struct{}

	link atomic.Pointer[link]
	// Of the loop that opens.
	unixPath string               // the server's control socket
	lastOpen *maruv1.OpenResponse // the last that was answered, also when it could not be used
	manager  manager
	known    known
	limited  limiter

	mu struct {
		sync.Mutex
		core  *session.Core
		beats uint64
		pools map[uint32]pool
		// unprepared: memory that this configuration wants is not there yet.
		unprepared    bool
		prepareNot    time.Time       // before it the background does not ask for it again
		unproved      bool            // pools came since the domains were proved
		segmentRegion []base.RegionID // per cpu segment; 0: none
		corrupt       []base.Key      // to be deleted
		workers       []Worker
		unholds       []*maruv1.RegionHandle // to be given back, each region once; changed under mapMu
		unmaps        []*mapped              // whose memory could not be unmapped; changed under mapMu
		unmapNot      time.Time              // before it that is not tried again
		touch         []*mapped              // to be touched ahead; [0] is at work
		layouts       map[LayoutID]*layout
		lastLayout    LayoutID
	}

	maps   atomic.Pointer[map[base.RegionID]*mapped]
	mapsMu sync.Mutex // replaces maps
	mapMu  sync.Mutex // one Describe and Hold at a time

	// growMu is held over all growth, and guards growNot.
	growMu  sync.Mutex
	growNot time.Time

	// events is held while events are applied, so that they are in their order.
	events sync.Mutex

	unmapMemory func(*mapping.Mapping) error // is Unmap, but in tests

	// Of the background worker alone.
	scratchGone []base.RegionID

	device   atomic.Pointer[device]
	deviceMu sync.Mutex // one opening at a time

	cpu         *cpu.Pool
	transfers   transfers
	lookups     lookups
	count       counters
	notProvable sync.Once

	// closing counts the calls that run, so that Close waits for them. No call waits for
	// another, so that a callback (OnRegion) can call the client.
	closing struct {
		sync.Mutex
		state closeState
		calls int
		idle  chan struct{} // closed when calls is 0 after Close has begun
		done  chan struct{} // closed when Close has ended
	}
}

type closeState uint8

const (
	isOpen closeState = iota
	isClosing
)

// Open registers a session. Errors: ErrInvalid, ErrMismatch, ErrLimit and the like for a
// configuration that this machine or the server refuses; ErrUnavailable when the server
// is away.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	return openWith(ctx, cfg, node.BootTime)
}

func openWith(ctx context.Context, cfg Config, clock func() time.Duration) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c := &Client{
		cfg: cfg, clock: clock,
		reopen: make(chan struct{}, 1), kicked: make(chan struct{}, 1), unmapMemory: (*mapping.Mapping).Unmap,
	}
	id := base.SessionID(base.NewID())
	c.id.Store(&id)
	c.resolve()
	c.log = c.cfg.Logger.With("session", id.String(), "instance", c.cfg.InstanceID)
	c.closing.idle, c.closing.done = make(chan struct{}), make(chan struct{})
	c.lookups.init(c)
	c.manager.client, c.manager.secret = c, newSessionSecret()
	c.mu.core = session.New(session.Config{Session: id, MaxIdleMappings: cfg.IdleMappings})
	c.mu.layouts = map[LayoutID]*layout{}
	c.mu.pools = map[uint32]pool{}
	c.maps.Store(&map[base.RegionID]*mapped{})
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := c.start(ctx); err != nil {
		c.abandon()
		return nil, err
	}
	return c, nil
}

// resolve fills the defaults in.
func (c *Client) resolve() {
	cfg := &c.cfg
	if len(cfg.Namespace) == 0 {
		cfg.Namespace = keys.OpaqueNamespace()
	}
	c.namespace = base.NamespaceOf(cfg.Namespace)
	orSize := func(v *uint64, byDefault uint64) {
		if *v == 0 {
			*v = byDefault
		}
	}
	orInt := func(v *int, byDefault int) {
		if *v == 0 {
			*v = byDefault
		}
	}
	if cfg.InstanceID == "" {
		cfg.InstanceID = c.Session().String()
	}
	if cfg.Role == base.RoleNone {
		cfg.Role = base.RoleWorker
	}
	cfg.WorldSize = max(cfg.WorldSize, 1)
	if cfg.PieceBytes == 0 {
		cfg.PieceBytes = checksum.OpaquePieceBytes
	}
	cfg.PageBytes = cfg.pageBytes()
	if cfg.wantsCXL() {
		orSize(&cfg.RegionBytes, max(min(defaultRegionBytes, cfg.CXLBytes), cfg.PageBytes))
		orSize(&cfg.ExpandBytes, cfg.RegionBytes)
	}
	orSize(&cfg.SegmentBytes, max(defaultSegment, 8*cfg.PageBytes))
	cfg.SegmentBytes = (cfg.SegmentBytes + cpu.AlignBytes - 1) &^ (cpu.AlignBytes - 1)
	if cfg.WriteOrder == nil {
		if cfg.CPUBytes != 0 {
			cfg.WriteOrder = append(cfg.WriteOrder, base.MediumCPU)
		}
		if cfg.wantsCXL() {
			cfg.WriteOrder = append(cfg.WriteOrder, base.MediumCXL)
		}
	}
	if cfg.ReadOrder == nil {
		cfg.ReadOrder = []base.Medium{base.MediumCPU, base.MediumCXL}
	}
	orInt(&cfg.CopyThreads, min(max(runtime.GOMAXPROCS(0)/2, 1), 8))
	orInt(&cfg.QueueJobs, 1024)
	orInt(&cfg.HotConnections, 4)
	if cfg.Views == Default {
		cfg.Views = Off
		if cfg.Opaque {
			cfg.Views = On
		}
	}
	if cfg.RPCTimeout == 0 {
		cfg.RPCTimeout = 2 * time.Second
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
}

func (c *Client) start(ctx context.Context) (err error) {
	if c.node, err = node.Read(node.Options{}); err != nil {
		return fmt.Errorf("who this machine is: %w", err)
	}
	if err := c.makeCPU(); err != nil {
		return err
	}
	if err := c.transfers.start(c); err != nil {
		return err
	}
	c.conn, err = rpc.NewClient(c.cfg.ServerAddress, rpc.Retry{ConnectTimeout: c.cfg.ConnectTimeout}, grpc.WithContextDialer(c.door.dial(c.cfg.ServerAddress)))
	if err != nil {
		return err
	}
	err = c.openSession(ctx)
	if err != nil && c.cfg.ConnectLater != On && rpc.OutcomeUnknown(err) && ctx.Err() == nil {
		err = c.openSession(ctx) // its answer may be lost; nobody else tries again
	}
	if err != nil {
		if c.cfg.ConnectLater != On || !away(err) {
			return fmt.Errorf("opening a session at %s: %w", c.cfg.ServerAddress, err)
		}
		c.log.Warn("the server is away: everything is a miss until it comes", "server", c.cfg.ServerAddress, "error", err)
		c.count.outages.Add(1)
	} else if err := c.prepare(ctx); err != nil && !transient(err) {
		return err
	}
	c.wg.Go(c.run)
	c.wg.Go(c.work)
	return nil
}

// transient reports whether what is missing now may come later: the session is of use
// without it (CXL-03, POL-07).
func transient(err error) bool {
	return away(err) || errors.Is(err, base.ErrFull) || errors.Is(err, base.ErrBusy) || errors.Is(err, base.ErrStale) ||
		errors.Is(err, base.ErrOffline) || errors.Is(err, base.ErrUnknown) || errors.Is(err, base.ErrFenced)
}

// abandon undoes a half-made client.
func (c *Client) abandon() {
	c.cancel()
	if l := c.link.Load(); l != nil {
		_, _ = c.leaveMemory()
		_ = c.say(context.Background(), l, &maruv1.CloseRequest{Drained: true})
		l.close()
	}
	c.transfers.stop()
	c.wg.Wait()
	c.manager.close()
	if c.conn != nil {
		_ = c.conn.Close()
	}
	if c.cpu != nil {
		_ = c.cpu.Close()
	}
}

// say ends the session at the server, as far as it can be reached.
func (c *Client) say(ctx context.Context, l *link, req *maruv1.CloseRequest) error {
	ctx, cancel := context.WithTimeout(l.authorize(ctx), c.cfg.RPCTimeout)
	defer cancel()
	_, err := l.api.Close(ctx, req)
	return err
}

// leaveMemory unmaps every region and gives the holds back. It returns false, and leaves
// everything where it is, while something is in use (D1). The error says that the
// resource manager has not heard of it.
func (c *Client) leaveMemory() (bool, error) {
	c.mu.Lock()
	gone, ok := c.mu.core.Close(nil)
	c.mu.Unlock()
	if !ok {
		return false, nil
	}
	for _, id := range gone {
		if h := c.unmap(id); h != nil {
			c.queueUnholds([]*maruv1.RegionHandle{h})
		}
	}
	c.unmapAgain()
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.RPCTimeout)
	defer cancel()
	if list, err := c.manager.unhold(ctx, c.takeUnholds()); err != nil {
		c.mu.Lock()
		c.mu.unholds = list
		c.mu.Unlock()
		c.log.Warn("the resource manager did not take the holds back", "regions", len(list), "error", err)
		return true, fmt.Errorf("giving %d holds back: %w", len(list), err)
	}
	return true, nil
}

// enter begins a call; leave ends it. Errors: ErrClosed, and the context's.
func (c *Client) enter(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	c.closing.Lock()
	defer c.closing.Unlock()
	if c.closing.state != isOpen {
		return fmt.Errorf("%w: the client", base.ErrClosed)
	}
	c.closing.calls++
	return nil
}

func (c *Client) leave() {
	c.closing.Lock()
	defer c.closing.Unlock()
	c.closing.calls--
	if c.closing.calls == 0 && c.closing.state != isOpen {
		close(c.closing.idle)
	}
}

// beginClose refuses new calls and waits for those that run, with a device at most until
// ctx ends: idle is false then. It returns first false when another Close was first; that
// one has ended then.
func (c *Client) beginClose(ctx context.Context) (first, idle bool) {
	c.closing.Lock()
	if c.closing.state != isOpen {
		c.closing.Unlock()
		<-c.closing.done
		return false, true
	}
	c.closing.state = isClosing
	running := c.closing.calls > 0
	c.closing.Unlock()
	if !running {
		return true, true
	}
	var bound <-chan struct{}
	if c.device.Load() != nil { // it may wait for a stream of the engine, which nobody bounds
		bound = ctx.Done()
	}
	select {
	case <-c.closing.idle:
		return true, true
	case <-bound:
		return true, false
	}
}

// Close ends the session: drained, or LEFT while views are out; then the mappings of
// the exported views stay to the end of the process. Calls in flight and submitted jobs
// are finished first. It is idempotent; ctx bounds how long jobs are waited for and how
// long the server is told. The session has ended here also when it returns an error: then
// server or resource manager have not heard of it. Of a drained session they are told in the
// background (Config.Farewell); what it had comes back when they hear it, or with the end of
// this process.
func (c *Client) Close(ctx context.Context) error {
	first, idle := c.beginClose(ctx)
	if !first {
		return nil
	}
	defer close(c.closing.done)
	if drained := c.transfers.drain(ctx); c.device.Load() != nil && !(idle && drained) {
		return c.leaveDevice(ctx)
	}
	c.mu.Lock()
	c.mu.core.UnpinAll()
	views, _ := c.mu.core.Views()
	c.mu.Unlock()
	exported := c.exported()
	if l := c.awaitOpen(ctx); l != nil {
		c.awaitListed(ctx, l)
		c.flushReleases(ctx, l)
	}
	// The loops end before the mappings do: nothing writes a mark any more.
	c.cancel()
	c.transfers.stop()
	c.wg.Wait()

	// Before the mappings go, also those that stay because views are out.
	reachable := !c.closeDevice()
	var err error
	left := views > 0 || exported > 0 || reachable
	if !left {
		var gone bool
		gone, err = c.leaveMemory()
		left = !gone
	}
	if left {
		c.mu.Lock()
		c.mu.core.Leave()
		c.mu.Unlock()
	}
	// The loop that opens has ended: no newer epoch comes.
	var told error
	l := c.link.Load()
	if l != nil {
		told = fmt.Errorf("%w: the epoch is over, and the server opens no other one", base.ErrUnavailable)
		if !l.over.Load() {
			told = c.say(ctx, l, &maruv1.CloseRequest{Drained: !left, Left: left})
		}
		if told != nil {
			err = errors.Join(err, fmt.Errorf("telling the server: %w", told))
			c.log.Warn("the server was not told that this session ends", "error", told)
		}
		l.close()
	}
	c.manager.close()
	_ = c.conn.Close()
	if c.cpu != nil && !left {
		err = errors.Join(err, c.cpu.Close())
	}
	c.mu.Lock()
	unheard := told != nil || len(c.mu.unholds) > 0
	c.mu.Unlock()
	if l != nil && unheard && (left || !c.sayLater(told == nil)) {
		c.log.Warn("what this session had stays until this process ends")
	}
	return err
}

// awaitOpen returns the link. When the server has ended the epoch (it was started again),
// the session is being opened anew: that is waited for, because a server that has not
// heard of a session's end keeps its regions until the process is gone. A heartbeat says
// whether it has; while the connection is broken, which a restart does too, it is asked
// again for a quarter of RPCTimeout.
func (c *Client) awaitOpen(ctx context.Context) *link {
	if c.link.Load() == nil {
		return nil // never opened: nobody has to hear
	}
	again := time.Now().Add(c.cfg.RPCTimeout / 4)
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if l := c.current(); l != nil && !l.over.Load() {
			if l.hung.Load() {
				return l // it is told, and not waited for
			}
			switch err := c.heartbeat(ctx, l, l.api, c.heartbeatEvery(l)); {
			case epochOver(err):
				c.lose(l)
			case errors.Is(err, base.ErrUnavailable) && time.Now().Before(again):
				c.conn.ResetConnectBackoff()
			default:
				return l
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// awaitListed waits until a restarted server has the session's list: before that nothing
// is released, and the server refuses both kinds of close.
func (c *Client) awaitListed(ctx context.Context, l *link) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		c.mu.Lock()
		listing := c.mu.core.Phase() == session.Relisting
		c.mu.Unlock()
		if !listing {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-l.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// exported counts RegionViews that are out.
func (c *Client) exported() int64 {
	var n int64
	for _, m := range *c.maps.Load() {
		n += m.exported.Load()
	}
	return n
}

// current returns the link of the epoch that is open, nil while there is none.
func (c *Client) current() *link {
	l := c.link.Load()
	if l == nil || l.ctx.Err() != nil {
		return nil
	}
	return l
}

// Connected reports whether the session is valid now.
func (c *Client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.core.Valid(c.clock())
}

// Session returns the session's id, which is no secret.
func (c *Client) Session() base.SessionID { return *c.id.Load() }

// Epoch returns the session's epoch, 0 before the first Open has succeeded.
func (c *Client) Epoch() base.Epoch {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.core.Epoch()
}

// ServerOpen returns the server's answer to the last Open, nil before it: its epoch,
// addresses, limits and pools. It must not be changed.
func (c *Client) ServerOpen() *maruv1.OpenResponse {
	if l := c.link.Load(); l != nil {
		return l.resp
	}
	return nil
}

// Worker is a live worker of this client's engine, as the server told a scheduler.
type Worker struct {
	Rank, WorldSize uint32
	Session         base.SessionID
	Namespace       base.NamespaceID
}

// Workers returns the live workers of a scheduler's engine by rank, as of the last
// heartbeat.
func (c *Client) Workers() []Worker {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Worker(nil), c.mu.workers...)
}

// Targets returns the sessions to name in a scheduler's ProbeQuery: shard s is the
// worker of rank s. A rank without a live worker is the zero session, whose shards are
// misses. Errors: ErrUnavailable while no worker is known.
func (c *Client) Targets(context.Context) ([]base.SessionID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var world uint32
	for _, w := range c.mu.workers {
		world = max(world, w.WorldSize, w.Rank+1)
	}
	if world == 0 || world > hot.MaxShards {
		return nil, fmt.Errorf("%w: engine %q has no live worker", base.ErrUnavailable, c.cfg.EngineID)
	}
	out := make([]base.SessionID, world)
	for _, w := range c.mu.workers {
		out[w.Rank] = w.Session
	}
	return out, nil
}

func workersOf(list []*maruv1.EngineWorker) []Worker {
	out := make([]Worker, 0, len(list))
	for _, w := range list {
		x := Worker{Rank: w.GetRank(), WorldSize: w.GetWorldSize()}
		if w.GetRank() >= hot.MaxShards || len(w.GetSessionId()) != base.IDBytes {
			continue
		}
		copy(x.Session[:], w.GetSessionId())
		copy(x.Namespace[:], w.GetNamespaceId())
		out = append(out, x)
	}
	return out
}

// Usage asks the server for capacity and counts.
func (c *Client) Usage(ctx context.Context) (*maruv1.UsageResponse, error) {
	if err := c.enter(ctx); err != nil {
		return nil, err
	}
	defer c.leave()
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
	defer cancel()
	if l := c.current(); l != nil {
		return l.api.Usage(l.authorize(ctx), &maruv1.UsageRequest{})
	}
	return maruv1.NewMetadataServerClient(c.conn).Usage(ctx, &maruv1.UsageRequest{})
}

// Ping makes one round trip to the server.
func (c *Client) Ping(ctx context.Context) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	l := c.current()
	if l == nil {
		return fmt.Errorf("%w: no session is open at %s", base.ErrUnavailable, c.cfg.ServerAddress)
	}
	_, err := c.probeOnce(ctx, l, ProbeQuery{}, nil, nil)
	return err
}
