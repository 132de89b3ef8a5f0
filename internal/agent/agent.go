package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/store"
)

// Agent serves until Close. Ownership: who started it closes it. Concurrency: safe for
// concurrent use.
type Agent struct {
	cfg      Config
	log      *slog.Logger
	limited  *obs.LimitedLogger
	identity node.Identity
	state    *state
	ends     *peer.Ends
	metrics  *metrics
	grpc     *grpc.Server
	unix     *rpc.UnixListener

	ctx     context.Context // ends at Close
	cancel  context.CancelFunc
	serving sync.WaitGroup
	kick    chan struct{} // something is to be reported

	writing sync.Mutex // of the store

	mu struct {
		sync.Mutex
		sessions  map[base.SessionID]peer.Process
		processes map[peer.Process]*process
		binding   map[base.SessionID]struct{} // calls under way

		api       maruv1.ResourceManagerClient // nil while the resource manager is away
		manager   base.StoreID
		epoch     uint32
		token     []byte
		sequence  uint64 // of the last call of this start
		reason    string // why it is away
		unproven  bool   // it does not take this for the node's agent
		reported  bool   // everything of before this connection was told
		lastHeard time.Time
	}

	failed chan error
	once   sync.Once
	closed error
}

// process is one with sessions on record.
type process struct {
	sessions map[base.SessionID]struct{}
	state    processState
	proof    peer.Proof // isGone
	lost     string     // isLost: why it cannot be found
	// writtenBack are regions whose lines were written back since its end.
	writtenBack map[base.RegionID]*maruv1.RegionHandle
}

type processState uint8

const (
	isWatched processState = iota
	isGone                 // proved, and not acknowledged by the resource manager yet
	isLost                 // nobody can know any more
)

// shutdownTimeout bounds how long calls in flight are waited for.
const shutdownTimeout = 3 * time.Second

// limitInterval is how often the same trouble is logged.
const limitInterval = 10 * time.Second

// Start opens the state directory, takes the processes on record up again, and serves
// until Close. The resource manager may be away: it is looked for all the time. ctx
// bounds the start only. Errors: ErrInvalid (settings), ErrBusy (state directory or
// socket in use: a second agent), ErrForeign, ErrCorrupt, ErrNotFound, ErrDenied,
// ErrUnsupported, ErrUnavailable.
func Start(ctx context.Context, cfg Config) (_ *Agent, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Agent{cfg: cfg, log: cfg.Logger, limited: obs.Limited(cfg.Logger, limitInterval), kick: make(chan struct{}, 1), failed: make(chan error, 4)}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.mu.sessions, a.mu.processes = map[base.SessionID]peer.Process{}, map[peer.Process]*process{}
	a.mu.binding = map[base.SessionID]struct{}{}
	a.mu.reason = "the resource manager at " + cfg.RMAddress + " has not answered yet"
	defer func() {
		if err != nil {
			err = errors.Join(err, a.release())
		}
	}()
	if a.identity, err = node.Read(cfg.Node); err != nil {
		return nil, err
	}
	if a.state, err = openState(cfg.StateDir, a.identity.Node, cfg.LockTimeout); err != nil {
		return nil, err
	}
	if a.ends, err = peer.NewEnds(peer.EndsOptions{MaxCount: cfg.MaxSessionCount, Ended: a.processEnded, Lost: a.processLost}); err != nil {
		return nil, err
	}
	a.metrics = newMetrics(a)
	a.takeUp()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := a.listen(); err != nil {
		return nil, err
	}
	a.serving.Go(a.run)
	a.log.Info("serving", "agent", a.state.agent, "node", a.identity.Node, "unix", a.UnixPath(), "rm", cfg.RMAddress, "state_dir", cfg.StateDir,
		"sessions", len(a.state.sessions))
	return a, nil
}

// takeUp looks for the processes on record again, at start.
func (a *Agent) takeUp() {
	if p, err := peer.Self(); err != nil || !p.HostNamespace() {
		a.log.Warn("this agent does not run in the host's pid namespace: after its restart in another one the end of mappers that are there now cannot be proved",
			"cure", "run it in the host's pid namespace (--pid=host, hostPID: true)", "error", err)
	}
	a.mu.manager = a.state.manager
	for _, r := range a.state.sessions {
		a.addLocked(r.Session, r.process())
	}
	list := make([]peer.Process, 0, len(a.mu.processes))
	for p := range a.mu.processes {
		list = append(list, p)
	}
	for _, p := range list {
		_ = a.ends.Reopen(p) // Ended or Lost has been told
	}
}

// addLocked makes a session known. At start there is nobody else yet.
func (a *Agent) addLocked(id base.SessionID, p peer.Process) {
	a.mu.sessions[id] = p
	x := a.mu.processes[p]
	if x == nil {
		x = &process{sessions: map[base.SessionID]struct{}{}}
		a.mu.processes[p] = x
	}
	x.sessions[id] = struct{}{}
}

// removeLocked forgets a session; last tells that its process has no other.
func (a *Agent) removeLocked(id base.SessionID) (p peer.Process, last bool) {
	p, ok := a.mu.sessions[id]
	if !ok {
		return p, false
	}
	delete(a.mu.sessions, id)
	x := a.mu.processes[p]
	delete(x.sessions, id)
	if len(x.sessions) == 0 {
		delete(a.mu.processes, p)
		return p, true
	}
	return p, false
}

// commit writes to the store. Errors: ErrUnavailable.
func (a *Agent) commit(changes ...store.Change) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	return a.state.store.Commit(changes)
}

// processEnded leaves word of an end; the watcher calls it and must not wait.
func (a *Agent) processEnded(p peer.Process, proof peer.Proof) {
	a.mu.Lock()
	if x := a.mu.processes[p]; x != nil {
		x.state, x.proof = isGone, proof
	}
	a.mu.Unlock()
	a.wake()
}

func (a *Agent) processLost(p peer.Process, why error) {
	a.mu.Lock()
	if x := a.mu.processes[p]; x != nil {
		x.state, x.lost = isLost, why.Error()
	}
	a.mu.Unlock()
	a.log.Warn("a mapper cannot be found any more; its holds end when it says so, by a reboot of this node, or by maru rm drop-holds", "process", p, "error", why)
	a.wake()
}

func (a *Agent) wake() {
	select {
	case a.kick <- struct{}{}:
	default:
	}
}

func (a *Agent) listen() error {
	path := a.cfg.UnixPath
	if path == "" {
		var err error
		if path, err = rpc.SocketPath(SocketName); err != nil {
			return err
		}
	}
	l, err := rpc.ListenUnix(path, rpc.WithMode(a.cfg.SocketMode))
	if err != nil {
		return err
	}
	a.unix = l
	if err := a.metrics.listen(); err != nil {
		return err
	}
	a.grpc = rpc.NewServer(rpc.Limits{}, rpc.WithCredentials(peer.ServerCredentials()), rpc.WithLogger(a.log),
		rpc.WithUnary(a.metrics.rpc.Unary), rpc.WithStream(a.metrics.rpc.Stream), rpc.WithPanicMetric(a.metrics.rpc.Panic))
	maruv1.RegisterNodeWatcherServer(a.grpc, &service{Agent: a})
	a.serving.Go(func() {
		if err := a.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			a.fail(fmt.Errorf("%w: serving %s: %w", base.ErrUnavailable, path, err))
		}
	})
	return nil
}

func (a *Agent) fail(err error) {
	select {
	case a.failed <- err:
	default:
	}
}

// UnixPath returns the socket's path.
func (a *Agent) UnixPath() string { return a.unix.Path() }

// ID returns the agent's id.
func (a *Agent) ID() base.AgentID { return a.state.agent }

// HTTPAddress returns where metrics are served, empty without.
func (a *Agent) HTTPAddress() string { return a.metrics.address() }

// Failed gives an error when the agent stops serving by itself: another start of it was
// made at the resource manager, or its listener ended.
func (a *Agent) Failed() <-chan error { return a.failed }

// Close ends everything. What was acknowledged is durable already. It may be called more
// than once.
func (a *Agent) Close() error {
	a.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
		defer cancel()
		a.cancel()
		rpc.Shutdown(ctx, a.grpc)
		a.closed = a.release()
	})
	return a.closed
}

// release gives back what was taken, also after half a start.
func (a *Agent) release() error {
	a.cancel()
	if a.ends != nil {
		a.ends.Close()
	}
	if a.metrics != nil {
		a.metrics.close()
	}
	a.serving.Wait()
	var all error
	if a.unix != nil {
		if err := a.unix.Close(); !errors.Is(err, net.ErrClosed) {
			all = errors.Join(all, err)
		}
	}
	if a.state != nil {
		all = errors.Join(all, a.state.close())
	}
	return all
}
