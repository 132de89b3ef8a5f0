package agent

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/obs/obstest"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
)

// lab is a resource manager that believes to be on another machine (its boot id is
// another one), and the place of an agent on this one.
type lab struct {
	t     *testing.T
	rmCfg rm.Config
	rm    *rm.Server
	cfg   Config
	api   maruv1.ResourceManagerClient // over TCP
	ops   maruv1.ResourceManagerClient // the operator's
	owner []byte
	inc   uint32
	token []byte
	op    uint64
	log   *obstest.Text
}

func shortDir(t *testing.T) string { // it holds sockets
	t.Helper()
	dir, err := os.MkdirTemp("", "maru-agent-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// otherMachine is a root with a boot id and a node id of its own.
func otherMachine(t *testing.T) node.Options {
	t.Helper()
	root := shortDir(t)
	path := filepath.Join(root, "proc/sys/kernel/random/boot_id")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(base.BootID(base.NewID()).String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return node.Options{Root: root}
}

func newLab(t *testing.T) *lab {
	t.Helper()
	dir := shortDir(t)
	l := &lab{t: t, log: &obstest.Text{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.log.String())
		}
	})
	log := slog.New(slog.NewTextHandler(l.log, nil))
	l.rmCfg = rm.Config{
		Port: rm.AnyPort, HTTPPort: rm.NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "rm"),
		Pools:     []rm.PoolSpec{{Kind: dax.KindFile, Path: filepath.Join(dir, "pool"), SizeBytes: 64 << 20, Name: "p"}},
		Discovery: rm.DiscoverNone, Node: otherMachine(t), Overcommit: true, Logger: log,
	}
	l.startRM()
	l.owner = newID()
	secret := sha256.Sum256(l.owner)
	o, err := l.ops.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: l.owner, Name: "engine", OwnerSecret: secret[:]})
	if err != nil {
		t.Fatal(err)
	}
	l.inc, l.token = o.GetIncarnation(), o.GetOwnerToken()
	l.cfg = Config{
		RMAddress: l.rm.Address(), UnixPath: filepath.Join(dir, "agent.sock"), StateDir: filepath.Join(dir, "agent"), HTTPPort: NoPort,
		Node: node.Options{Dir: dir}, Name: "here", ReportInterval: 100 * time.Millisecond, CallTimeout: 5 * time.Second, Logger: log, Version: "test",
	}
	return l
}

func newID() []byte { id := base.NewID(); return id[:] }

func secretOf(id []byte) []byte { s := sha256.Sum256(append([]byte("secret of "), id...)); return s[:] }

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func (l *lab) startRM() {
	l.t.Helper()
	s, err := rm.Start(l.t.Context(), l.rmCfg)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = s.Close() })
	l.rm = s
	l.rmCfg.Port = portOf(l.t, s.Address()) // it is found there again
	l.api, l.ops = dialRM(l.t, s.Address()), dialRM(l.t, "unix:"+s.UnixPath())
}

func portOf(t *testing.T, address string) int {
	t.Helper()
	var n int
	for _, c := range address[strings.LastIndexByte(address, ':')+1:] {
		n = 10*n + int(c-'0')
	}
	return n
}

func dialRM(t *testing.T, address string) maruv1.ResourceManagerClient {
	t.Helper()
	c, err := rpc.NewClient(address, rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return maruv1.NewResourceManagerClient(c)
}

func (l *lab) start() *Agent {
	l.t.Helper()
	a, err := Start(l.t.Context(), l.cfg)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = a.Close() })
	return a
}

// connected waits until an agent is at work.
func (l *lab) connected(a *Agent) {
	l.t.Helper()
	l.eventually("the agent's first report", func() bool { r, _ := a.Ready(); return r.String() == "ok" })
}

func (l *lab) eventually(what string, ok func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			l.t.Fatalf("%s does not happen", what)
		}
	}
}

func (l *lab) allocate() *maruv1.RegionHandle {
	l.t.Helper()
	l.op++
	r, err := l.ops.Allocate(ctxOf(l.t), &maruv1.AllocateRequest{
		OwnerId: l.owner, Incarnation: l.inc, OwnerToken: l.token, Operation: l.op, PageCount: 16, PageSize: 65536, PieceSize: 65536,
		NamespaceDigest: make([]byte, 32), WriterSession: l.owner,
	})
	if err != nil {
		l.t.Fatal(err)
	}
	return r.GetHandle()
}

func (l *lab) job(session []byte, h *maruv1.RegionHandle) mapperJob {
	l.t.Helper()
	n, err := node.Read(l.cfg.Node)
	if err != nil {
		l.t.Fatal(err)
	}
	bind, err := proto.Marshal(&maruv1.BindSessionRequest{SessionId: session, SessionSecret: secretOf(session), ServerId: l.owner})
	if err != nil {
		l.t.Fatal(err)
	}
	j := mapperJob{Agent: l.cfg.UnixPath, RM: l.rm.Address(), Bind: bind}
	if h != nil {
		if j.Hold, err = proto.Marshal(&maruv1.HoldRequest{
			SessionId: session, ServerId: l.owner, OwnerIncarnation: l.inc, Sequence: 1, Handles: []*maruv1.RegionHandle{h},
			NodeId: n.Node[:], BootId: n.Boot[:], SessionSecret: secretOf(session), Vouched: true,
		}); err != nil {
			l.t.Fatal(err)
		}
	}
	return j
}

// child is the test binary in another role.
type child struct {
	cmd *exec.Cmd
	log *strings.Builder
}

func spawn(t *testing.T, env string, job any, attr *syscall.SysProcAttr) *child {
	t.Helper()
	c, line := trySpawn(t, env, job, attr)
	if line != "serving\n" {
		c.kill()
		t.Fatalf("the child says %q, %s", line, c.log)
	}
	return c
}

// under is what the next child is run by, such as unshare(1).
var under []string

func trySpawn(t *testing.T, env string, job any, attr *syscall.SysProcAttr) (*child, string) {
	t.Helper()
	raw, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	args := append(append([]string(nil), under...), os.Args[0])
	c := &child{cmd: exec.Command(args[0], args[1:]...), log: &strings.Builder{}} //nolint:gosec // the test binary itself
	c.cmd.Env, c.cmd.Stderr, c.cmd.SysProcAttr = append(os.Environ(), env+"="+string(raw)), c.log, attr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		if attr != nil {
			t.Skip("needs the right to make namespaces: ", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil && line == "" {
		line = err.Error()
	}
	return c, line
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill() // SIGKILL
		_ = c.cmd.Wait()
	}
}

func (l *lab) mapper(session []byte, h *maruv1.RegionHandle) *child {
	l.t.Helper()
	return spawn(l.t, mapperEnv, l.job(session, h), nil)
}

// holds returns what the resource manager lists of a session.
func (l *lab) holds(session []byte) []*maruv1.HoldInfo {
	l.t.Helper()
	r, err := l.api.ListHolds(ctxOf(l.t), &maruv1.ListHoldsRequest{SessionId: session})
	if err != nil {
		l.t.Fatal(err)
	}
	return r.GetHolds()
}

func (l *lab) heldNot(session []byte) {
	l.t.Helper()
	l.eventually("the end of the holds of session "+base.SessionID(session).String(), func() bool { return len(l.holds(session)) == 0 })
}

// events watches the owner's events in the background.
func (l *lab) gone() <-chan *maruv1.SessionGone {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	l.t.Cleanup(cancel)
	stream, err := l.ops.WatchOwner(ctx, &maruv1.WatchOwnerRequest{OwnerId: l.owner, Incarnation: l.inc, OwnerToken: l.token})
	if err != nil {
		l.t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil { // the snapshot
		l.t.Fatal(err)
	}
	ch := make(chan *maruv1.SessionGone, 16)
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			e, err := stream.Recv()
			if err != nil {
				return
			}
			if g := e.GetSessionGone(); g != nil {
				ch <- g
			}
		}
	})
	l.t.Cleanup(func() { cancel(); ended.Wait() })
	return ch
}

func (l *lab) wantGone(ch <-chan *maruv1.SessionGone, session []byte, proof string) {
	l.t.Helper()
	select {
	case g := <-ch:
		if !bytes.Equal(g.GetSessionId(), session) || g.GetProof() != proof {
			l.t.Fatalf("gone: %v, want session %x by %s", g, session, proof)
		}
	case <-time.After(15 * time.Second):
		l.t.Fatal("no word of the mapper's end")
	}
}

// A mapper on a node without a resource manager is killed: its hold ends by proof, its
// server hears of it, and a draining region comes back. One that lives keeps its own.
func TestKilledMapper(t *testing.T) {
	l := newLab(t)
	l.connected(l.start())
	gone := l.gone()
	x, y := newID(), newID()
	h := l.allocate()
	mx := l.mapper(x, h)
	l.mapper(y, l.allocate())
	if hold := l.holds(x)[0]; !hold.GetProvable() || hold.GetProof() != "agent here" || hold.GetProcess().GetPid() != int64(mx.cmd.Process.Pid) || hold.GetReason() != "in use by server engine" {
		t.Errorf("%v", hold)
	}
	if _, err := l.ops.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: l.owner, Incarnation: l.inc, OwnerToken: l.token, Handle: h}); err != nil {
		t.Fatal(err)
	}
	if hold := l.holds(x)[0]; !hold.GetDraining() || !strings.Contains(hold.GetReason(), "drains") || !strings.Contains(hold.GetCure(), "comes back when pid") {
		t.Errorf("%v", hold)
	}
	mx.kill()
	l.wantGone(gone, x, "pidfd")
	l.heldNot(x)
	if len(l.holds(y)) != 1 {
		t.Error("the living mapper's hold ended")
	}
	if r, err := l.ops.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{}); err != nil || len(r.GetRegions()) != 1 {
		t.Errorf("%v, %v", r, err)
	}
}

// The agent dies, its mapper dies, and the agent comes back: it finds out. A mapper that
// lives is watched on; so is one whose end came while the resource manager was away too.
func TestAgentRestart(t *testing.T) {
	l := newLab(t)
	child := spawn(t, agentEnv, l.asChild(), nil)
	gone := l.gone()
	x, y, z := newID(), newID(), newID()
	l.eventually("the agent", func() bool { return l.agents() == 1 })
	var mx *agentMapper
	l.eventually("a bound mapper", func() bool { mx = l.tryMapper(x, l.allocate()); return mx != nil })
	my, mz := l.mapper(y, l.allocate()), l.mapper(z, l.allocate())
	child.kill()
	mx.kill()
	time.Sleep(50 * time.Millisecond)
	if len(l.holds(x)) != 1 {
		t.Fatal("a hold ended without proof")
	}
	a := l.start()
	l.connected(a)
	l.wantGone(gone, x, "pidfd")
	if len(l.holds(y)) != 1 || len(l.holds(z)) != 1 {
		t.Fatal("a living mapper's hold ended")
	}
	my.kill()
	l.wantGone(gone, y, "pidfd")

	// The resource manager is away while the last one ends, and the agent restarts.
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	mz.kill()
	l.eventually("word of the end", func() bool { return a.counts().gone == 1 })
	l.eventually("the loss", func() bool { r, why := a.Ready(); return r.String() == "degraded" && strings.Contains(why, "away") })
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	a = l.start()
	l.eventually("word of the end, again", func() bool { return a.counts().gone == 1 })
	l.startRM()
	l.heldNot(z)
	l.eventually("an empty record", func() bool { return a.counts().sessions == 0 })
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if a = l.start(); a.counts().sessions != 0 {
		t.Error("what was acknowledged is on record after a restart")
	}
}

type agentMapper = child

func (l *lab) asChild() Config {
	cfg := l.cfg
	cfg.Logger = nil
	return cfg
}

func (l *lab) tryMapper(session []byte, h *maruv1.RegionHandle) *child {
	l.t.Helper()
	c, line := trySpawn(l.t, mapperEnv, l.job(session, h), nil)
	if line != "serving\n" {
		c.kill()
		return nil
	}
	return c
}

func (l *lab) agents() int {
	l.t.Helper()
	r, err := l.api.ListAgents(ctxOf(l.t), &maruv1.ListAgentsRequest{})
	if err != nil {
		l.t.Fatal(err)
	}
	return len(r.GetAgents())
}

// The resource manager restarts under a living agent: nothing ends, and what ends later
// is reported with the same token.
func TestManagerRestart(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	x := newID()
	m := l.mapper(x, l.allocate())
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	l.eventually("the loss", func() bool { r, _ := a.Ready(); return r.String() == "degraded" })
	c, line := trySpawn(t, mapperEnv, l.job(newID(), nil), nil)
	if !strings.Contains(line, "unavailable") {
		t.Errorf("a bind without a resource manager: %q", line)
	}
	c.kill()
	l.startRM()
	l.connected(a)
	if h := l.holds(x); len(h) != 1 || !h[0].GetProvable() {
		t.Fatalf("%v", h)
	}
	m.kill()
	l.heldNot(x)
}

// This machine was booted again since the agent recorded its mappers: what it recorded is
// of another boot id, and gone; the resource manager hears it with the start already.
func TestReboot(t *testing.T) {
	l := newLab(t)
	other := base.BootID{9}
	a := l.start()
	l.connected(a)
	id := a.ID()
	x := newID()
	l.mapper(x, l.allocate())
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	// As if all of that had been under an older boot, in the agent's record; at the
	// resource manager the next start says so.
	s, err := openState(l.cfg.StateDir, a.identity.Node, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	row := s.sessions[0]
	row.Boot = other
	if err := errors.Join(s.store.Commit(changes(putSession(row))), s.close()); err != nil {
		t.Fatal(err)
	}
	a = l.start()
	if a.ID() != id {
		t.Error("the agent has another id")
	}
	l.connected(a)
	l.eventually("the end by a reboot", func() bool { return a.counts().sessions == 0 })
	// The resource manager knows it under the true boot: that report was not of its process.
	if len(l.holds(x)) != 1 {
		t.Error("a hold ended by the report of another process")
	}
	// A start under another boot ends it.
	if _, err := l.api.StartAgent(ctxOf(t), &maruv1.StartAgentRequest{AgentId: id[:], NodeId: a.identity.Node[:], BootId: other[:], AgentSecret: a.state.secret.Bytes()}); err != nil {
		t.Fatal(err)
	}
	if len(l.holds(x)) != 0 {
		t.Error("a hold outlived a reboot")
	}
	select {
	case err := <-a.Failed():
		if !errors.Is(err, base.ErrFenced) {
			t.Error(err)
		}
	case <-time.After(15 * time.Second):
		t.Error("the older start goes on")
	}
}

func TestSecondAgentIsRefused(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	second := l.cfg
	second.UnixPath += "2"
	if _, err := Start(t.Context(), second); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("the same state directory: %v", err)
	}
	second = l.cfg
	second.StateDir = filepath.Join(shortDir(t), "s")
	if _, err := Start(t.Context(), second); !errors.Is(err, base.ErrBusy) {
		t.Errorf("the same socket: %v", err)
	}
	second.UnixPath += "2"
	b, err := Start(t.Context(), second)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	l.eventually("the refusal", func() bool {
		r, why := b.Ready()
		return r.String() == "not ready" && strings.Contains(why, "drop-agent "+a.ID().String())
	})
	if n := l.agents(); n != 1 {
		t.Errorf("%d agents", n)
	}
}

// Who may say what: a process cannot bind another's session, neither by its id nor with a
// wrong secret, and nobody can over TCP.
func TestWhoMayBind(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	x := newID()
	victim := l.mapper(x, l.allocate())
	conn, err := rpc.NewClient("unix:"+a.UnixPath(), rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	w := maruv1.NewNodeWatcherClient(conn)
	for what, c := range map[string]struct {
		req  *maruv1.BindSessionRequest
		want error
	}{
		"another process's session":            {&maruv1.BindSessionRequest{SessionId: x, SessionSecret: secretOf(x)}, base.ErrDenied},
		"the same with a wrong secret":         {&maruv1.BindSessionRequest{SessionId: x, SessionSecret: secretOf(newID())}, base.ErrDenied},
		"no secret":                            {&maruv1.BindSessionRequest{SessionId: newID()}, base.ErrInvalid},
		"no session":                           {&maruv1.BindSessionRequest{SessionId: make([]byte, 16), SessionSecret: secretOf(x)}, base.ErrInvalid},
		"another resource manager's":           {&maruv1.BindSessionRequest{SessionId: newID(), SessionSecret: secretOf(x), StoreId: newID()}, base.ErrMismatch},
		"a version of the future":              {&maruv1.BindSessionRequest{SessionId: newID(), SessionSecret: secretOf(x), Version: &maruv1.ProtocolVersion{Min: 2, Max: 3}}, base.ErrUnsupported},
		"a session that holds without a proof": {&maruv1.BindSessionRequest{SessionId: l.unproven(), SessionSecret: secretOf(x)}, base.ErrDenied},
	} {
		if _, err := w.BindSession(ctxOf(t), c.req); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	// What was refused is not on record, so that nothing is ever reported of it.
	l.eventually("a clean record", func() bool { return a.counts().sessions == 1 })
	if len(l.holds(x)) != 1 {
		t.Fatal("the victim's hold ended")
	}
	victim.kill()
	l.heldNot(x)
	log := l.log.String()
	for _, s := range [][]byte{secretOf(x), a.state.secret.Bytes()} {
		if strings.Contains(log, string(s)) || strings.Contains(log, hexOf(s)) {
			t.Error("a secret is in the log")
		}
	}
}

// unproven holds over TCP with a secret of its own and gives the session.
func (l *lab) unproven() []byte {
	l.t.Helper()
	id := newID()
	if _, err := l.api.Hold(ctxOf(l.t), &maruv1.HoldRequest{
		SessionId: id, ServerId: l.owner, OwnerIncarnation: l.inc, Sequence: 1, Handles: []*maruv1.RegionHandle{l.allocate()}, SessionSecret: secretOf(id),
	}); err != nil {
		l.t.Fatal(err)
	}
	return id
}

// An operator drops an agent that runs: it starts anew by itself, and its mappers are
// bound again when they come.
func TestDroppedAgent(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	x := newID()
	h := l.allocate()
	m := l.mapper(x, h)
	id := a.ID()
	a.mu.Lock()
	a.mu.sequence += 100 // as after many calls
	before := a.mu.sequence
	a.mu.Unlock()
	if _, err := l.api.DropAgent(ctxOf(t), &maruv1.DropAgentRequest{AgentId: id[:], Confirm: true}); !errors.Is(err, base.ErrDenied) {
		t.Errorf("over TCP: %v", err)
	}
	if r, err := l.ops.DropAgent(ctxOf(t), &maruv1.DropAgentRequest{AgentId: id[:], Confirm: true}); err != nil || r.GetSessions() != 1 {
		t.Fatal(r, err)
	}
	if h := l.holds(x)[0]; h.GetProvable() || !strings.Contains(h.GetProof(), "dropped") || !strings.Contains(h.GetCure(), "drop-holds --session") {
		t.Errorf("%v", h)
	}
	l.eventually("a new start", func() bool { return l.agents() == 1 })
	// The new start may have the old token: a call of before that is under way stays below
	// everything that is said now.
	a.mu.Lock()
	after := a.mu.sequence
	a.mu.Unlock()
	if after < before {
		t.Errorf("its calls are numbered from %d on again, the last one before was %d", after, before)
	}
	m.kill()
	l.eventually("an empty record", func() bool { return a.counts().sessions == 0 })
	if len(l.holds(x)) != 1 {
		t.Error("a dropped agent's word ended a hold")
	}
	if r, err := l.ops.DropHolds(ctxOf(t), &maruv1.DropHoldsRequest{SessionId: x, Confirm: true}); err != nil || r.GetDropped() != 1 {
		t.Error(r, err)
	}
}

// Health and metrics as the other daemons have them.
func TestHealth(t *testing.T) {
	l := newLab(t)
	l.cfg.HTTPPort = AnyPort
	a := l.start()
	l.connected(a)
	x := newID()
	l.mapper(x, l.allocate())
	get := func(path string) string {
		t.Helper()
		req, err := http.NewRequestWithContext(ctxOf(t), http.MethodGet, "http://"+a.HTTPAddress()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := get("/readyz"); got != "ok\n" {
		t.Errorf("readyz: %q", got)
	}
	m := get("/metrics")
	for _, line := range []string{"maru_agent_sessions 1", "maru_agent_processes 1", "maru_agent_ends_pending 0", "maru_agent_processes_lost 0", "maru_agent_rm_connected 1", `maru_build_info{`} {
		if !strings.Contains(m, line) {
			t.Errorf("metrics lack %s", line)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
