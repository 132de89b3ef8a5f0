package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/agent"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/server"
)

// farChild makes the test binary a client of its own, to be killed: the addresses of
// server and agent.
const farChild = "MARU_TEST_CLIENT_FAR"

func init() {
	raw := os.Getenv(farChild)
	if raw == "" {
		return
	}
	address, socket, _ := strings.Cut(raw, " ")
	c, err := Open(context.Background(), farConfig(address, socket, slog.New(slog.NewTextHandler(os.Stderr, nil))))
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println(c.Session())
	select {}
}

func farConfig(address, socket string, log *slog.Logger) Config {
	return Config{
		ServerAddress: address, Opaque: true, PageBytes: testPage, RegionBytes: 16 * testPage, CXLBytes: 64 * testPage, AgentSocket: socket, Logger: log,
	}
}

// farLab is a lab whose resource manager and server believe to be on another machine:
// their boot ids are others.
type farLab struct {
	*lab
	agent agent.Config
	api   maruv1.ResourceManagerClient
	text  *logLines
}

type logLines struct {
	mu struct {
		sync.Mutex
		strings.Builder
	}
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.Builder.Write(b)
}

func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.Builder.String()
}

func startFarLab(t *testing.T) *farLab {
	t.Helper()
	dir, err := os.MkdirTemp("", "maru-client-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	machine := filepath.Join(dir, "machine")
	boot := filepath.Join(machine, "proc/sys/kernel/random/boot_id")
	if err := os.MkdirAll(filepath.Dir(boot), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(boot, []byte(base.BootID(base.NewID()).String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &farLab{lab: &lab{t: t, path: filepath.Join(dir, "pool")}, text: &logLines{}}
	f.log = slog.New(slog.NewTextHandler(f.text, nil))
	f.rmCfg = rm.Config{
		Port: rm.AnyPort, HTTPPort: rm.NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "rm"),
		Pools:     []rm.PoolSpec{{Kind: dax.KindFile, Path: f.path, SizeBytes: 256 << 20, Name: "p"}},
		Discovery: rm.DiscoverNone, Node: node.Options{Root: machine}, Overcommit: true, Logger: f.log,
	}
	if f.rm, err = rm.Start(t.Context(), f.rmCfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.rm.Close() })
	f.cfg = server.Config{
		Port: server.AnyPort, HTTPPort: server.NoPort, StateDir: filepath.Join(dir, "state"), UnixPath: filepath.Join(dir, "c.sock"),
		HotUnixPath: filepath.Join(dir, "h.sock"), RMAddress: f.rm.Address(), Node: node.Options{Root: machine}, CPUBudgetBytes: 1 << 30, Log: f.log,
		Version: "test", Heartbeat: 50 * time.Millisecond,
	}
	f.start()
	t.Cleanup(f.stop)
	f.agent = agent.Config{
		RMAddress: f.rm.Address(), UnixPath: filepath.Join(dir, "agent.sock"), StateDir: filepath.Join(dir, "agent"), HTTPPort: agent.NoPort,
		Name: "here", ReportInterval: 100 * time.Millisecond, Logger: f.log,
	}
	conn, err := rpc.NewClient(f.rm.Address(), rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	f.api = maruv1.NewResourceManagerClient(conn)
	return f
}

func (f *farLab) startAgent() *agent.Agent {
	f.t.Helper()
	a, err := agent.Start(f.t.Context(), f.agent)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = a.Close() })
	eventually(f.t, "the agent", func() bool { r, _ := a.Ready(); return r.String() == "ok" })
	return a
}

func (f *farLab) holds(session base.SessionID) []*maruv1.HoldInfo {
	f.t.Helper()
	r, err := f.api.ListHolds(f.t.Context(), &maruv1.ListHoldsRequest{SessionId: session[:]})
	if err != nil {
		f.t.Fatal(err)
	}
	return r.GetHolds()
}

// A client on another node than the resource manager finds its node's agent: its holds are
// provable from the first on, end with it by proof, and its server hears of it.
func TestFarClientIsProvable(t *testing.T) {
	f := startFarLab(t)
	f.startAgent()
	c := open(t, farConfig(f.srv.ControlAddress(), f.agent.UnixPath, f.log))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	if h := f.holds(c.Session()); len(h) != 1 || !h[0].GetProvable() || h[0].GetProcess().GetPid() != int64(os.Getpid()) || h[0].GetProof() != "agent here" {
		t.Fatalf("%v", h)
	}

	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), farChild+"="+f.srv.ControlAddress()+" "+f.agent.UnixPath), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	line, _ := bufio.NewReader(out).ReadString('\n')
	id, err := base.ParseID(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the child says %q", line)
	}
	if h := f.holds(id); len(h) != 1 || !h[0].GetProvable() {
		t.Fatalf("%v", h)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually(t, "the end of its holds", func() bool { return len(f.holds(id)) == 0 })
	if len(f.holds(c.Session())) != 1 {
		t.Error("the living client's holds ended")
	}
	// Its own holds go with a clean close.
	session := c.Session()
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the unhold", func() bool { return len(f.holds(session)) == 0 })
}

// A client that comes up before its agent holds without proof, says so once with the cure,
// and becomes provable by itself.
func TestFarClientBeforeItsAgent(t *testing.T) {
	f := startFarLab(t)
	c := open(t, farConfig(f.srv.ControlAddress(), f.agent.UnixPath, f.log))
	if h := f.holds(c.Session()); len(h) != 1 || h[0].GetProvable() || !strings.Contains(h[0].GetProof(), "no agent of its node") || h[0].GetCure() == "" {
		t.Fatalf("%v", h)
	}
	eventually(t, "one line of it", func() bool {
		return strings.Count(f.text.String(), "maru-remote-cxl-agent --watch-only on this node") == 1
	})
	f.startAgent()
	for deadline := time.Now().Add(4 * vouchAgain); !f.holds(c.Session())[0].GetProvable(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not become provable")
		}
	}
	// An operator ends its session by mistake: the next holds are provable again.
	conn, err := rpc.NewClient("unix:"+f.rm.UnixPath(), rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	id := c.Session()
	if _, err := maruv1.NewResourceManagerClient(conn).DropHolds(t.Context(), &maruv1.DropHoldsRequest{SessionId: id[:], Confirm: true}); err != nil {
		t.Fatal(err)
	}
	if len(f.holds(id)) != 0 {
		t.Fatal("it holds")
	}
}

// No agent is looked for when that is said, nor one whose socket is a stranger's.
func TestAgentSocketSetting(t *testing.T) {
	f := startFarLab(t)
	f.startAgent()
	c := open(t, farConfig(f.srv.ControlAddress(), NoAgent, f.log))
	if h := f.holds(c.Session()); len(h) != 1 || h[0].GetProvable() {
		t.Fatalf("%v", h)
	}
	cfg := farConfig(f.srv.ControlAddress(), "relative", f.log)
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "AgentSocket") {
		t.Errorf("a relative path: %v", err)
	}
	dir := filepath.Dir(f.agent.UnixPath)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	if err := os.MkdirAll(filepath.Join(dir, "maru"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(f.agent.UnixPath, filepath.Join(dir, "maru", agentSocketName)); err != nil {
		t.Fatal(err)
	}
	if path, err := findAgent(); err == nil && path != "/run/maru/agent.sock" {
		t.Errorf("a link is taken for a socket: %s", path)
	}
	conn, err := dialAgent(t.Context(), f.agent.UnixPath, rootOrOwn)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
}

// A server restarts under a client on another node: no socket shows its process there, its
// session's secret does. It lists its pages and has its hits again; who knows only the id
// is refused.
func TestFarClientOverServerRestart(t *testing.T) {
	f := startFarLab(t)
	f.startAgent()
	door := newFrontDoor(t, f.srv.ControlAddress())
	c := open(t, farConfig(door.listener.Addr().String(), f.agent.UnixPath, f.log))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	epoch := c.current().resp
	thief := c.openRequest() // now: when the server is back, the client may open again at once
	f.stop()
	f.start()
	thief.PreviousServerEpoch, thief.PreviousEpoch, thief.SessionSecret = epoch.GetServerEpoch(), epoch.GetEpoch(), newSessionSecret()
	conn, err := rpc.NewClient(f.srv.ControlAddress(), rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := maruv1.NewMetadataServerClient(conn).Open(t.Context(), thief); !errors.Is(err, base.ErrDenied) {
		t.Errorf("with another secret: %v", err)
	}
	address := f.srv.ControlAddress()
	door.target.Store(&address)
	dst := make([]byte, 1000)
	eventually(t, "its hits again", func() bool { return c.Connected() && loadOne(t, c, 1, dst) == base.CodeOK })
	if h := f.holds(c.Session()); len(h) != 1 || !h[0].GetProvable() {
		t.Errorf("%v", h)
	}
}
