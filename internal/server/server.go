package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/invariants"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/offheap"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Server is a running maru-server.
// Ownership: whoever started it closes it. Concurrency: all methods from any goroutine.
type Server struct {
	cfg     Config
	log     *slog.Logger
	node    node.Identity
	state   *stateDir
	epoch   base.ServerEpoch
	metrics *metrics

	// dir is the directory and its lock. Effects are taken before the lock is given
	// up and carried out after it. Nothing is ever done under it that can wait.
	dir struct {
		sync.RWMutex
		*directory.Directory
		closed atomic.Bool // its memory is given back, or a bug broke it
	}

	sessions sessionTable
	bound    boundTable
	watcher  *peer.Watcher
	rm       *rmLink // nil with --cpu-only
	rmWork   *workQueue
	deletes  deleteWaiters
	flights  flights
	tokens   readTokens
	newest   newestRegion
	sweepNow chan struct{}

	hot     *hotPlane
	grpc    *grpc.Server
	control struct {
		tcp  *net.TCPListener
		unix *rpc.UnixListener
	}
	hotTCP  *net.TCPListener
	hotUnix *rpc.UnixListener
	http    *httpServer

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once

	served    bool // Start succeeded
	stoppedBy atomic.Pointer[error]
	failed    chan error // what ends the server by itself: a fence, a broken listener
}

// Start runs a server until Close. It returns when every socket accepts; the
// resource manager may come later (cpu pools are served without it).
// Errors: ErrInvalid (settings), ErrBusy (port, socket or state directory in use),
// ErrDenied, ErrFull, ErrCorrupt (state directory).
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: cfg.Log.With("program", "maru-server"), metrics: newMetrics(cfg.Version), failed: make(chan error, 1)}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.sessions.init()
	s.bound.init()
	s.deletes.init()
	s.flights.init()
	s.tokens.init()
	s.sweepNow = make(chan struct{}, 1)
	s.rmWork = newWorkQueue()
	defer func() {
		if err != nil {
			closeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = s.Close(closeCtx)
		}
	}()
	if s.node, err = node.Read(cfg.Node); err != nil {
		return nil, err
	}
	if s.state, err = openStateDir(cfg.StateDir, cfg.ServerID); err != nil {
		return nil, err
	}
	for s.epoch == 0 {
		s.epoch = base.ServerEpoch(randomUint64())
	}
	manager := directory.ManagerExpected
	if cfg.CPUOnly {
		manager = directory.ManagerNone
	}
	s.dir.Directory, err = directory.New(directory.Config{
		ServerEpoch: s.epoch, Manager: manager, Limits: cfg.Limits, TTL: cfg.TTL,
		CPUBudgetBytes: cfg.CPUBudgetBytes, CXLBytes: cfg.CXLBudgetBytes, HashSeed: randomUint64(), Memory: offheap.OS{},
	})
	if err != nil {
		return nil, err
	}
	if s.watcher, err = peer.NewWatcher(0); err != nil {
		return nil, err
	}
	s.metrics.registry.MustRegister(newUsageCollector(s))
	if err := s.listen(); err != nil {
		return nil, err
	}
	s.run(ctx)
	s.served = true
	s.log.Info("serving", "control", s.ControlAddress(), "hot", s.HotAddress(), "unix", s.UnixPath(), "hot_unix", s.HotUnixPath(),
		"server_id", s.state.server.String(), "name", s.state.name, "server_epoch", fmt.Sprintf("%016x", uint64(s.epoch)),
		"state_dir", s.state.path, "cpu_budget_bytes", cfg.CPUBudgetBytes, "rm", rmName(cfg))
	return s, nil
}

func rmName(cfg Config) string {
	if cfg.CPUOnly {
		return "none (--cpu-only)"
	}
	return cfg.RMAddress
}

func randomUint64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:])
}

// listen opens every socket, so that a busy one is an error of Start.
func (s *Server) listen() error {
	var err error
	if s.control.tcp, err = rpc.ListenTCP(s.cfg.Host, max(s.cfg.Port, 0), s.cfg.Insecure); err != nil {
		return err
	}
	port := s.control.tcp.Addr().(*net.TCPAddr).Port
	if s.hotTCP, err = rpc.ListenTCP(s.cfg.Host, max(s.cfg.HotPort, 0), s.cfg.Insecure); err != nil {
		return fmt.Errorf("hot plane: %w (--hot-port chooses another one)", err)
	}
	if s.control.unix, err = listenUnix(s.cfg.UnixPath, "server-"+strconv.Itoa(port)+".sock"); err != nil {
		return err
	}
	if s.hotUnix, err = listenUnix(s.cfg.HotUnixPath, "server-"+strconv.Itoa(port)+"-hot.sock"); err != nil {
		return err
	}
	if s.cfg.HTTPPort != NoPort {
		if s.http, err = newHTTPServer(s); err != nil {
			return err
		}
	}
	return nil
}

func listenUnix(path, name string) (*rpc.UnixListener, error) {
	if path == "" {
		var err error
		if path, err = rpc.SocketPath(name); err != nil {
			return nil, err
		}
	}
	return rpc.ListenUnix(path)
}

// run starts the goroutines. Each ends with s.ctx or with its listener.
func (s *Server) run(ctx context.Context) {
	s.grpc = rpc.NewServer(rpc.Limits{MaxReceiveBytes: s.cfg.MaxControlMessageBytes}, rpc.WithLogger(s.log),
		rpc.WithCredentials(newBoundedCredentials(peer.ServerCredentials(), s.cfg.MaxControlConnectionCount)),
		rpc.WithPanicMetric(s.metrics.rpc.Panic),
		rpc.WithUnary(s.metrics.rpc.Unary, s.authorizeUnary), rpc.WithStream(s.metrics.rpc.Stream, s.authorizeStream),
		// Without it Stop leaves handlers running, on a directory whose memory is gone.
		rpc.WithGRPC(grpc.WaitForHandlers(true)))
	if !s.cfg.CPUOnly {
		s.rm = newRMLink(s)
	}
	maruv1.RegisterMetadataServerServer(s.grpc, &control{server: s})
	if s.rm != nil {
		s.start(func() { s.rm.run(s.ctx) })
		s.start(s.sweep)
		// A session that opens before the first answer of the resource manager would be
		// told that there is none. Peers wait in the backlog meanwhile.
		s.rm.waitFirst(ctx, min(s.cfg.RMCallTimeout, firstRMWait))
	}
	for range rmWorkerCount {
		s.start(s.rmWorker)
	}
	s.hot = newHotPlane(s, s.hotTCP, s.hotUnix)
	s.hot.start()
	for _, l := range []net.Listener{s.control.tcp, s.control.unix} {
		s.start(func() {
			if err := s.grpc.Serve(l); err != nil && s.ctx.Err() == nil && !errors.Is(err, grpc.ErrServerStopped) {
				s.fail(fmt.Errorf("%w: control plane at %s: %w", base.ErrUnavailable, l.Addr(), err))
			}
		})
	}
	if s.http != nil {
		s.start(s.http.serve)
	}
	s.start(s.tick)
}

// firstRMWait bounds how long a start waits for a resource manager that accepts
// connections but does not answer; one that is not there at all costs no wait.
const firstRMWait = 3 * time.Second

func (s *Server) start(f func()) {
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		f()
	}()
}

// Close ends the server: no new calls, calls in flight until ctx is done, then
// everything else. It may be called more than once.
func (s *Server) Close(ctx context.Context) error {
	s.once.Do(func() { s.close(ctx) })
	return nil
}

func (s *Server) close(ctx context.Context) {
	s.cancel()
	for _, sess := range s.sessions.all() {
		sess.end("the server stops")
	}
	if s.hot != nil {
		s.hot.close()
	}
	if s.grpc != nil {
		rpc.Shutdown(ctx, s.grpc)
	}
	if s.http != nil {
		s.http.close(ctx)
	}
	s.rmWork.close()
	s.wg.Wait()
	if s.watcher != nil {
		s.watcher.Close()
	}
	for _, l := range []interface{ Close() error }{s.control.unix, s.hotUnix, s.control.tcp, s.hotTCP} {
		if !isNil(l) {
			_ = l.Close()
		}
	}
	if s.dir.Directory != nil {
		// A scrape that outlived its server's shutdown may still look.
		s.dir.Lock()
		s.dir.closed.Store(true)
		_ = s.dir.Free()
		s.dir.Unlock()
	}
	if s.state != nil {
		_ = s.state.Close()
	}
	if s.served {
		s.log.Info("stopped")
	}
}

// isNil tells a nil pointer in an interface: Start may fail between two listeners.
func isNil(l interface{ Close() error }) bool {
	switch l := l.(type) {
	case *net.TCPListener:
		return l == nil
	case *rpc.UnixListener:
		return l == nil
	}
	return l == nil
}

// Failed delivers the reason when the server cannot go on by itself: it was fenced,
// or a listener broke. Whoever runs it then closes it.
func (s *Server) Failed() <-chan error { return s.failed }

// Wait returns when ctx is done, or before with the reason why the server cannot go
// on. A fenced server stays, not ready and refusing, until ctx is done: a supervisor
// that started it again would only fence the newer one in its turn.
func (s *Server) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-s.failed:
		if errors.Is(err, base.ErrFenced) {
			<-ctx.Done()
		}
		return err
	}
}

func (s *Server) fail(err error) {
	select {
	case s.failed <- err:
	default:
	}
}

// fence stops serving: a newer incarnation of this server id exists, or an operator
// dropped it (docs/PROTOCOL.md, "Owners").
func (s *Server) fence(reason string) {
	s.stopServing(fmt.Errorf("%w: this server has stopped serving: %s", base.ErrFenced, reason),
		"stop this process; give each server its own --state-dir, and start it again where an operator dropped it")
}

// poison stops serving after a panic under the directory's lock: what it left may be
// half done, and a restart is safe (docs/PROTOCOL.md, "Server restart").
func (s *Server) poison() {
	s.dir.closed.Store(true)
	// The lock is still held here, and sessions are ended without it.
	s.start(func() {
		s.stopServing(fmt.Errorf("%w: a bug broke the directory of this server; the log has the place", base.ErrInternal),
			"report it; the server starts again with a new epoch")
	})
}

func (s *Server) stopServing(err error, cure string) {
	if !s.stoppedBy.CompareAndSwap(nil, &err) {
		return
	}
	s.log.Error("this server has stopped serving", "error", err, "server_id", s.state.server.String(), "cure", cure)
	for _, sess := range s.sessions.all() {
		sess.end(err.Error())
	}
	s.fail(err)
}

// serving refuses work of a server that has stopped serving.
func (s *Server) serving() error {
	if err := s.stoppedBy.Load(); err != nil {
		return *err
	}
	return nil
}

// degraded says what the server cannot do now, and why.
func (s *Server) degraded() (string, bool) {
	if s.rm == nil {
		return "", false
	}
	_, reason := s.rm.status()
	return reason, reason != ""
}

// Ready reports whether the server can do its work now: with a nil error it can, and
// degraded says what is missing.
func (s *Server) Ready() (degraded string, err error) {
	if err := s.serving(); err != nil {
		return "", err
	}
	if s.ctx.Err() != nil {
		return "", fmt.Errorf("%w: the server stops", base.ErrClosed)
	}
	reason, _ := s.degraded()
	return reason, nil
}

// ControlAddress is the control plane's TCP address.
func (s *Server) ControlAddress() string { return s.control.tcp.Addr().String() }

// HotAddress is the hot plane's TCP address.
func (s *Server) HotAddress() string { return s.hotTCP.Addr().String() }

// UnixPath is the control plane's socket.
func (s *Server) UnixPath() string { return s.control.unix.Path() }

// HotUnixPath is the hot plane's socket.
func (s *Server) HotUnixPath() string { return s.hotUnix.Path() }

// HTTPAddress is where /metrics, /healthz and /readyz are; empty without them.
func (s *Server) HTTPAddress() string {
	if s.http == nil {
		return ""
	}
	return s.http.address()
}

// ServerID is this server's durable identity.
func (s *Server) ServerID() base.OwnerID { return s.state.server }

// Epoch is this start's server epoch.
func (s *Server) Epoch() base.ServerEpoch { return s.epoch }

// sleep waits; it reports false when the server stops.
func (s *Server) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// recovered logs a panic of a goroutine that serves a peer. A broken invariant is
// not recovered in invariant builds: a test must see it.
func (s *Server) recovered(where string, v any) {
	if text, ok := v.(string); ok && invariants.Enabled && strings.HasPrefix(text, "maru: invariant ") {
		panic(v)
	}
	s.metrics.panics.Inc()
	s.log.Error("recovered from a bug; please report this", "where", where, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
}

// tick calls the directory when something is due there: expiry, request leases, retries.
func (s *Server) tick() {
	const shortest = 5 * time.Millisecond
	longest := min(time.Second, s.cfg.TTL/4)
	timer := time.NewTimer(shortest)
	defer timer.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-timer.C:
		}
		var wait time.Duration
		err := s.step(func(d *directory.Directory, now time.Duration) error {
			wait = d.Tick(now) - now
			return nil
		})
		if err != nil {
			return
		}
		timer.Reset(min(max(wait, shortest), longest))
	}
}
