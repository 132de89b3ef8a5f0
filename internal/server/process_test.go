package server

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/killtest"
	"github.com/xcena-dev/maru/internal/node"
)

// child is this test binary run as another program.
type child struct {
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

func startChild(t testing.TB, kind string, env ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(append(os.Environ(), "MARU_TEST_CHILD="+kind), env...)
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.lines = bufio.NewScanner(out)
	t.Cleanup(c.kill)
	return c
}

func (c *child) line(t testing.TB) string {
	t.Helper()
	if !c.lines.Scan() {
		t.Fatalf("the child said nothing: %v", c.lines.Err())
	}
	return c.lines.Text()
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// childT makes the helpers of tests usable in a child.
type childT struct{ testing.TB }

func (childT) Helper()                   {}
func (childT) Cleanup(func())            {}
func (childT) Fatal(a ...any)            { fmt.Fprintln(os.Stderr, a...); os.Exit(3) }
func (childT) Fatalf(f string, a ...any) { fmt.Fprintf(os.Stderr, f+"\n", a...); os.Exit(3) }

// childClient opens a session over the Unix socket, stores, says so, and waits for its end.
func childClient() {
	t := childT{}
	c := newClient(t, os.Getenv("MARU_TEST_CONTROL"), nil)
	c.connect(os.Getenv("MARU_TEST_HOT"))
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 16, 4096)
	c.commitKeys(r, c.open.GetEpoch(), testKeyRange(0, 16))
	fmt.Println(hex.EncodeToString(c.id[:]), hex.EncodeToString(c.open.GetSecret()), c.hot.welcome.Provable)
	select {}
}

// The end of a process gives its memory back, without its word and without a timer;
// nobody else can be its session.
func TestProcessEnds(t *testing.T) {
	cfg := testConfig(t)
	cfg.TTL = time.Hour // no timer
	cfg.CPUBudgetBytes = 64 << 20
	s := startServer(t, cfg)
	c := startChild(t, "client", "MARU_TEST_CONTROL="+s.UnixPath(), "MARU_TEST_HOT="+s.HotUnixPath())
	fields := strings.Fields(c.line(t))
	id, _ := hex.DecodeString(fields[0])
	secret, _ := hex.DecodeString(fields[1])
	if len(id) != 16 || fields[2] != "true" {
		t.Fatalf("child: %v", fields)
	}
	u := s.usage()
	if len(u.Sessions) != 1 || !u.Sessions[0].Provable || u.Objects != 16 {
		t.Fatalf("usage: %+v", u)
	}
	// This process has the secret, and still is another one.
	h, err := dialHot(s.HotUnixPath())
	if err != nil {
		t.Fatal(err)
	}
	if err := h.prove(base.SessionID(id), 1, secret, nil); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a second process on the session: %v", err)
	}
	h.close()
	local := maruv1.NewMetadataServerClient(dialControl(t, s.UnixPath()))
	again := workerRequest(base.SessionID(id))
	again.PreviousSecret = secret
	if _, err := local.Open(testContext(t), again); !errors.Is(err, base.ErrDenied) {
		t.Errorf("opened again by another process: %v", err)
	}
	if _, err := local.Open(testContext(t), workerRequest(base.NewID())); !errors.Is(err, base.ErrFull) {
		t.Errorf("budget of a live process: %v", err)
	}
	c.kill()
	waitFor(t, "the memory comes back", func() bool { u := s.usage(); return len(u.Pools) == 0 && u.Objects == 0 })
	if _, err := local.Open(testContext(t), workerRequest(base.NewID())); err != nil {
		t.Errorf("the budget is free: %v", err)
	}
	if n := s.watcher.Count(); n != 1 { // this process's own session
		t.Errorf("%d processes are watched", n)
	}
}

// childServer runs a server from a configuration in the environment until it is killed.
func childServer() {
	t := childT{}
	var cfg struct {
		Port                         int
		Dir, StateDir, Unix, HotUnix string
		RM                           string
		TTL, Heartbeat, Margin       time.Duration
	}
	if err := json.Unmarshal([]byte(os.Getenv("MARU_TEST_CONFIG")), &cfg); err != nil {
		t.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	s, err := Start(ctx, Config{
		Port: AnyPort, HTTPPort: NoPort, CPUOnly: cfg.RM == "", RMAddress: cfg.RM, StateDir: cfg.StateDir, UnixPath: cfg.Unix, HotUnixPath: cfg.HotUnix,
		Node: node.Options{Dir: cfg.Dir}, CPUBudgetBytes: 1 << 30, TTL: cfg.TTL, Heartbeat: cfg.Heartbeat, Margin: cfg.Margin,
		Log: testLog(),
	})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("ready", uint64(s.Epoch()))
	_ = s.Wait(ctx)
	closeCtx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.Close(closeCtx)
}

// SIGKILL of the real server in the middle of work, again and again: it starts again
// on what it left (sockets, lock, identity), its epoch is new, the sessions of before
// are stale, and everything works from cold.
func TestKilledServer(t *testing.T) {
	if testing.Short() {
		t.Skip("30 rounds; not with -short")
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	base0 := testConfig(t)
	dir := filepath.Dir(base0.StateDir)
	raw, _ := json.Marshal(map[string]any{
		"Dir": dir, "StateDir": base0.StateDir, "Unix": base0.UnixPath, "HotUnix": base0.HotUnixPath,
		"TTL": 10 * time.Second, "Heartbeat": time.Second, "Margin": time.Second,
	})
	epochs := map[string]bool{}
	var id []byte
	var c *client
	for round := range killtest.Rounds(30) {
		srv := startChild(t, "server", "MARU_TEST_CONFIG="+string(raw))
		line := srv.line(t)
		if epochs[line] || !strings.HasPrefix(line, "ready ") {
			t.Fatalf("round %d: %q", round, line)
		}
		epochs[line] = true
		if c == nil {
			c = newClient(t, base0.UnixPath, nil)
		} else {
			oldCtx := c.ctx()
			c.conn = dialControl(t, base0.UnixPath)
			c.api = maruv1.NewMetadataServerClient(c.conn)
			if _, err := c.api.Heartbeat(oldCtx, &maruv1.HeartbeatRequest{Sequence: 1 << 40}); !errors.Is(err, base.ErrStale) {
				t.Fatalf("round %d: a heartbeat of the epoch before: %v", round, err)
			}
			if err := c.reopen(nil); err != nil {
				t.Fatalf("round %d: reopen: %v", round, err)
			}
		}
		if id == nil {
			id = c.open.GetServerId()
		} else if string(id) != string(c.open.GetServerId()) {
			t.Fatalf("round %d: the server has another id", round)
		}
		c.connect(base0.HotUnixPath)
		c.seq, c.counter = c.seq+1000, 0
		if c.open.GetRelist() {
			if _, err := c.hot.relist(&hot.RelistRequest{Operation: c.next(), Last: true}); err != nil {
				t.Fatalf("round %d: relist: %v", round, err)
			}
		}
		keys := testKeyRange(0, 64)
		if n := c.probeHits(keys); n != 0 {
			t.Fatalf("round %d: %d hits from cold", round, n)
		}
		r := c.expand(maruv1.Medium_MEDIUM_CPU, 64, 4096)
		results := c.commitKeys(r, c.open.GetEpoch(), keys)
		for i := range results.Len() {
			if results.At(i).Code != base.CodeOK {
				t.Fatalf("round %d: commit %d: %v", round, i, results.At(i).Code)
			}
		}
		// Work goes on while the server dies: no call may hang or succeed wrongly.
		stop := make(chan struct{})
		done := make(chan error, 1)
		go func() { done <- work(c, keys, stop) }()
		time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
		srv.kill()
		close(stop)
		if err := <-done; err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
}

// work acquires and releases until the connection breaks; what is answered must be right.
func work(c *client, keys []base.Key, stop <-chan struct{}) error {
	var sizes []byte
	for range keys {
		sizes = hot.AppendManifestSize(sizes, 1)
	}
	packed := hot.AppendKeys(nil, keys)
	seq := c.seq
	defer func() { c.seq = seq }()
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		seq++
		a, err := c.hot.acquire(&hot.AcquireRequest{
			Operation: hot.Operation{Sequence: seq, Watermark: seq}, Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()),
			Kind: base.LeaseCopy, ManifestSizes: sizes, Keys: packed,
		})
		if err != nil {
			return nil // the server was killed
		}
		for i := range a.Rows.Len() {
			if row := a.Rows.At(i); row.Verdict.Status() != hot.Hit || row.Checksum != uint64(i)+1 || row.Offset != uint64(i)*4096 {
				return fmt.Errorf("row %d: %+v", i, row)
			}
		}
		_, err = c.hot.release(&hot.ReleaseRequest{
			Operation: hot.Operation{Watermark: seq}, Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: seq, Count: hot.ReleaseAll}),
		})
		if err != nil {
			return nil
		}
	}
}
