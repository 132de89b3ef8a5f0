package rm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/store"
)

// Server is a resource manager that serves. Ownership: who started it closes it.
// Concurrency: safe for concurrent use.
type Server struct {
	cfg      Config
	log      *slog.Logger
	identity node.Identity
	state    *state

	// The committer's.
	core    *core.Core
	store   store.Store
	pending *core.Batch
	slots   []core.SlotWrite
	devices map[base.PoolID]*device
	proofs  *proofs

	jobs      chan *job
	kick      chan struct{}
	stopping  chan struct{}
	committed chan struct{} // closed when the committer has ended
	gone      struct {
		sync.Mutex
		list []goneProcess
	}
	glance atomic.Pointer[glance]

	hub     *hub
	watcher *peer.Ends
	metrics *metrics
	refused *obs.LimitedLogger // calls of who did not prove to be the owner
	grpc    *grpc.Server
	tcp     net.Listener
	unix    *rpc.UnixListener
	serving sync.WaitGroup

	failed chan error
	once   sync.Once
	closed error
}

// shutdownTimeout bounds how long calls in flight are waited for.
const shutdownTimeout = 3 * time.Second

// Start opens the state directory and the pools and serves until Close. ctx
// bounds the start only. Errors: ErrInvalid (settings), ErrBusy (state directory,
// device, port or socket in use), ErrForeign, ErrCorrupt, ErrNotFound, ErrDenied
// (a host that others reach, without Insecure), ErrFull, ErrUnavailable.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if cfg.StateDir == "" {
		cfg.StateDir = DefaultStateDir()
	}
	s := &Server{
		cfg: cfg, log: cfg.Logger, pending: &core.Batch{}, devices: map[base.PoolID]*device{}, proofs: newProofs(cfg.DomainProofTimeout),
		jobs: make(chan *job, cfg.MaxBatchCount), kick: make(chan struct{}, 1), stopping: make(chan struct{}), committed: make(chan struct{}),
		hub: newHub(cfg.MaxWatchStreamCount), failed: make(chan error, 4),
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.release())
		}
	}()
	// The port is taken first: it is the cheapest thing to be refused.
	if err := s.listenTCP(); err != nil {
		return nil, err
	}
	if s.identity, err = node.Read(cfg.Node); err != nil {
		return nil, err
	}
	if s.state, err = openState(cfg.StateDir, cfg.LockTimeout); err != nil {
		return nil, err
	}
	s.store = s.state.store
	if cfg.WrapStore != nil {
		s.store = cfg.WrapStore(s.store)
	}
	if s.core, err = s.state.loadCore(core.Config{Node: s.identity.Node, Boot: s.identity.Boot, Limits: cfg.Limits}); err != nil {
		return nil, err
	}
	s.metrics, s.refused = newMetrics(s), obs.Limited(s.log, unprovenInterval)
	s.log.Info("store is loaded", "path", s.state.store.Path(), "store", s.state.id, "content", s.core.Describe())
	if list := s.core.Unproved(); len(list) > 0 {
		s.log.Warn("owners of an older version have no secret on record, and anybody may act as one of them", "owners", list,
			"cure", "restart their servers with this version, which sets it")
	}
	if err := s.attachAll(); err != nil {
		return nil, err
	}
	s.core.NoteOwnBoot(s.pending)
	if s.watcher, err = s.newEnds(); err != nil {
		return nil, err
	}
	s.watchKnown()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := s.runBatch(nil); err != nil {
		return nil, err
	}
	if err := s.listenUnix(); err != nil {
		return nil, err
	}
	if err := s.metrics.listen(); err != nil {
		return nil, err
	}
	s.grpc = rpc.NewServer(rpc.Limits{}, rpc.WithCredentials(peer.ServerCredentials()), rpc.WithLogger(s.log), rpc.WithUnary(s.metrics.rpc.Unary, s.unprovenUnary), rpc.WithStream(s.metrics.rpc.Stream, s.unprovenStream), rpc.WithPanicMetric(s.metrics.rpc.Panic))
	maruv1.RegisterResourceManagerServer(s.grpc, &service{Server: s})
	s.serving.Go(s.commitLoop)
	if s.tcp != nil {
		s.serve(s.tcp)
	}
	s.serve(s.unix)
	s.log.Info("serving", "address", s.Address(), "unix", s.UnixPath(), "state_dir", cfg.StateDir)
	return s, nil
}

func (s *Server) listenTCP() error {
	if s.cfg.Port == NoPort {
		return nil
	}
	l, err := rpc.ListenTCP(s.cfg.Host, max(s.cfg.Port, 0), s.cfg.Insecure)
	if err != nil {
		return err
	}
	s.tcp = l
	return nil
}

func (s *Server) listenUnix() error {
	path := s.cfg.UnixPath
	if path == "" {
		name := s.state.id.String()[:8]
		if s.tcp != nil {
			name = strconv.Itoa(s.tcp.Addr().(*net.TCPAddr).Port) //nolint:errorlint // ListenTCP gives TCP
		}
		var err error
		if path, err = rpc.SocketPath("rm-" + name + ".sock"); err != nil {
			return err
		}
	}
	l, err := rpc.ListenUnix(path, rpc.WithMode(s.cfg.SocketMode))
	if err != nil {
		return err
	}
	s.unix = l
	return nil
}

func (s *Server) serve(l net.Listener) {
	s.serving.Go(func() {
		if err := s.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			select {
			case s.failed <- fmt.Errorf("%w: serving %s: %w", base.ErrUnavailable, l.Addr(), err):
			default:
			}
		}
	})
}

// Address returns host:port, empty without a TCP port.
func (s *Server) Address() string {
	if s.tcp == nil {
		return ""
	}
	return s.tcp.Addr().String()
}

// UnixPath returns the socket's path.
func (s *Server) UnixPath() string { return s.unix.Path() }

// HTTPAddress returns where metrics are served, empty without.
func (s *Server) HTTPAddress() string { return s.metrics.address() }

// StoreID returns the id of the store, which is in the header of every pool.
func (s *Server) StoreID() base.StoreID { return s.state.id }

// Failed gives an error when a listener stops serving by itself.
func (s *Server) Failed() <-chan error { return s.failed }

// Close ends the streams, lets calls in flight finish for a short time, and gives
// everything back. What was acknowledged is durable already. It may be called
// more than once.
func (s *Server) Close() error {
	s.once.Do(func() {
		s.hub.close()
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
		defer cancel()
		rpc.Shutdown(ctx, s.grpc)
		s.closed = s.release()
	})
	return s.closed
}

// release gives back what was taken, also after half a start.
func (s *Server) release() error {
	var all error
	if s.watcher != nil {
		s.watcher.Close()
	}
	if s.metrics != nil {
		s.metrics.close()
	}
	close(s.stopping)
	s.serving.Wait()
	if s.tcp != nil {
		if err := s.tcp.Close(); !errors.Is(err, net.ErrClosed) {
			all = errors.Join(all, err)
		}
	}
	if s.unix != nil {
		if err := s.unix.Close(); !errors.Is(err, net.ErrClosed) {
			all = errors.Join(all, err)
		}
	}
	for _, d := range s.devices {
		all = errors.Join(all, d.close())
	}
	if s.state != nil {
		all = errors.Join(all, s.state.close())
	}
	return all
}
