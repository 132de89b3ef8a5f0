package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rpc"
)

// NoAgent as Config.AgentSocket: no agent is looked for.
const NoAgent = "none"

const (
	// agentSocketName is where an agent listens, in each of the usual directories.
	agentSocketName = "agent.sock"
	// vouchAgain is how long after a failure this node's agent is asked again: a client
	// that came up before it must become provable by itself.
	vouchAgain = 5 * time.Second
	// sessionSecretBytes is the size of a session's secret.
	sessionSecretBytes = 32
)

func newSessionSecret() []byte {
	b := make([]byte, sessionSecretBytes)
	_, _ = rand.Read(b) // crypto/rand.Read never fails since Go 1.24
	return b
}

// nodeAgent is the agent of this node: it vouches for this process at a resource manager
// on another node, which cannot see it (docs/rfcs/0009-node-watcher.md). Nothing waits
// for it: without it a hold is not provable, which the resource manager says.
// Concurrency: safe. Locks: a leaf, but for asking, which is held over one call.
type nodeAgent struct {
	asking sync.Mutex // one call at a time
	mu     struct {
		sync.Mutex
		remote  bool   // the resource manager is on another node
		store   []byte // its store
		vouched bool
		not     time.Time // before it the agent is not asked
		problem string
		looking bool // a goroutine asks again
	}
}

// manager takes what the resource manager said of itself. Another store knows nothing of
// this process.
func (a *nodeAgent) manager(d *maruv1.DescribeResponse, local bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if string(a.mu.store) != string(d.GetStoreId()) {
		a.mu.vouched = false
	}
	a.mu.remote, a.mu.store = !local, d.GetStoreId()
}

// again makes the next hold ask the agent anew.
func (a *nodeAgent) again() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.vouched, a.mu.not = false, time.Time{}
}

// due reports whether the agent is to be asked now, and whether it has vouched.
func (a *nodeAgent) due() (ask, vouched bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.remote && !a.mu.vouched && !time.Now().Before(a.mu.not), a.mu.vouched
}

// vouch has the agent vouch for this process where that is needed, and reports whether it
// has.
func (m *manager) vouch(ctx context.Context, l *link) bool {
	a := &m.agent
	if m.client.cfg.AgentSocket == NoAgent {
		return false
	}
	if ask, vouched := a.due(); !ask {
		return vouched
	}
	a.asking.Lock()
	defer a.asking.Unlock()
	if ask, vouched := a.due(); !ask { // another call was first
		return vouched
	}
	ctx, cancel := context.WithTimeout(ctx, m.client.cfg.RPCTimeout)
	defer cancel()
	err := m.bind(ctx, l)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.vouched, a.mu.problem = err == nil, ""
	if err != nil {
		a.mu.problem, a.mu.not = err.Error(), time.Now().Add(vouchAgain)
	}
	return err == nil
}

// bind makes one call to the agent, over a connection that shows this process.
func (m *manager) bind(ctx context.Context, l *link) error {
	c := m.client
	path, trust := c.cfg.AgentSocket, anyUser
	if path == "" {
		var err error
		if path, err = findAgent(); err != nil {
			return err
		}
		trust = rootOrOwn
	}
	conn, err := rpc.Dial(ctx, "unix:"+path, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return dialAgent(ctx, path, trust)
	}))
	if err != nil {
		return fmt.Errorf("agent at %s: %w", path, err)
	}
	defer func() { _ = conn.Close() }()
	m.agent.mu.Lock()
	store := m.agent.mu.store
	m.agent.mu.Unlock()
	resp, err := maruv1.NewNodeWatcherClient(conn).BindSession(ctx, &maruv1.BindSessionRequest{
		Version:   &maruv1.ProtocolVersion{Min: minVersion, Max: maxVersion},
		SessionId: c.sessionID(), SessionSecret: m.secret, StoreId: store, ServerId: l.resp.GetServerId(),
	})
	switch {
	case err != nil:
		return fmt.Errorf("agent at %s: %w", path, err)
	case !resp.GetProvable():
		return fmt.Errorf("%w: agent at %s: %s", base.ErrUnsupported, path, resp.GetReason())
	}
	return nil
}

// trust says who may be an agent. It learns the session's secret, so that a stranger who
// made a socket in the right place could give this session's holds back.
type trust uint8

const (
	rootOrOwn trust = iota
	anyUser         // the path was configured
)

func dialAgent(ctx context.Context, path string, who trust) (net.Conn, error) {
	conn, err := rpc.DialNet(ctx, rpc.Address{Network: "unix", Target: path})
	if err != nil || who == anyUser {
		return conn, err
	}
	uid, err := ownerOf(conn)
	if err == nil && uid != 0 && int(uid) != os.Geteuid() {
		err = fmt.Errorf("%w: socket %s is served by user %d, neither root nor this one: set AgentSocket if that is right", base.ErrDenied, path, uid)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// ownerOf asks the kernel for the user who listens at the other end.
func ownerOf(conn net.Conn) (uint32, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return 0, fmt.Errorf("%w: a connection of type %T", base.ErrInternal, conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(ctlErr, err); err != nil {
		return 0, fmt.Errorf("%w: asking who serves a socket: %w", base.ErrUnavailable, err)
	}
	return cred.Uid, nil
}

// findAgent looks for the agent's socket in its usual places. Errors: ErrNotFound.
func findAgent() (string, error) {
	dirs := []string{"/run/maru"}
	if d := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		dirs = append(dirs, filepath.Join(d, "maru"))
	}
	for _, dir := range dirs {
		path := filepath.Join(dir, agentSocketName)
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: no agent: %s is in none of %s", base.ErrNotFound, agentSocketName, strings.Join(dirs, ", "))
}

// notProvable says so, once, and on another node than the resource manager's asks the
// agent again until it vouches.
func (m *manager) notProvable(l *link, reason string) {
	c, a := m.client, &m.agent
	a.mu.Lock()
	remote, problem := a.mu.remote && c.cfg.AgentSocket != NoAgent, a.mu.problem
	look := remote && !a.mu.looking
	if look {
		a.mu.looking, a.mu.vouched = true, false
	}
	a.mu.Unlock()
	c.notProvable.Do(func() {
		args := []any{"reason", reason}
		if remote {
			args = append(args, "agent", problem, "cure", "run maru-remote-cxl-agent --watch-only on this node; it is asked again by itself")
		}
		c.log.Warn("the resource manager cannot prove the end of this process: what it holds comes back only by a clean close, an operator or a reboot", args...)
	})
	if look {
		c.wg.Go(func() { m.lookForAgent(l) })
	}
}

// lookForAgent ends when the agent has vouched, or with the client.
func (m *manager) lookForAgent(l *link) {
	c := m.client
	t := time.NewTicker(vouchAgain)
	defer t.Stop()
	for done := false; !done; {
		select {
		case <-c.ctx.Done():
			done = true
		case <-t.C:
			if now := c.current(); now != nil {
				l = now
			}
			if done = m.vouch(c.ctx, l); done {
				c.log.Info("this node's agent vouches for this process now: its holds come back when it ends")
			}
		}
	}
	m.agent.mu.Lock()
	m.agent.mu.looking = false
	m.agent.mu.Unlock()
}
