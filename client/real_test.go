package client

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/session"
)

// lab is a resource manager with one file pool, and a server on it, in this process.
type lab struct {
	t     *testing.T
	rmCfg rm.Config
	cfg   server.Config
	rm    *rm.Server
	srv   *server.Server
	log   *slog.Logger
	path  string
}

func startLab(t *testing.T, poolBytes uint64) *lab {
	t.Helper()
	dir, err := os.MkdirTemp("", "maru-client-") // short: it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l := &lab{t: t, log: quiet, path: filepath.Join(dir, "pool")}
	if os.Getenv("MARU_TEST_LOG") != "" {
		l.log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	l.rmCfg = rm.Config{
		Port: rm.AnyPort, HTTPPort: rm.NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "rm"),
		Pools:     []rm.PoolSpec{{Kind: dax.KindFile, Path: l.path, SizeBytes: poolBytes, Name: "p"}},
		Discovery: rm.DiscoverNone, Node: node.Options{Dir: dir}, Overcommit: true, Logger: l.log,
	}
	l.cfg = server.Config{
		Port: server.AnyPort, HTTPPort: server.NoPort, StateDir: filepath.Join(dir, "state"),
		UnixPath: filepath.Join(dir, "c.sock"), HotUnixPath: filepath.Join(dir, "h.sock"), RMAddress: "unix:" + l.rmCfg.UnixPath,
		Node: node.Options{Dir: dir}, CPUBudgetBytes: 1 << 30, Log: l.log, Version: "test", Heartbeat: 50 * time.Millisecond,
	}
	if poolBytes > 0 {
		if l.rm, err = rm.Start(t.Context(), l.rmCfg); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.rm.Close() })
	} else {
		l.cfg.CPUOnly, l.cfg.RMAddress = true, ""
	}
	l.start()
	t.Cleanup(l.stop)
	return l
}

func (l *lab) start() {
	l.t.Helper()
	var err error
	if l.srv, err = server.Start(context.Background(), l.cfg); err != nil {
		l.t.Fatal(err)
	}
	eventually(l.t, "the server", func() bool { d, err := l.srv.Ready(); return err == nil && d == "" })
}

func (l *lab) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = l.srv.Close(ctx)
}

func (l *lab) config() Config {
	return Config{
		ServerAddress: l.srv.ControlAddress(), Opaque: true, PageBytes: testPage,
		RegionBytes: 16 * testPage, CXLBytes: 64 * testPage, Logger: l.log,
	}
}

func TestRealRoundTrip(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			l := startLab(t, 256<<20)
			cfg := l.config()
			if network == "unix" {
				cfg.ServerAddress = "unix:" + l.srv.UnixPath()
			}
			a, b := open(t, cfg), open(t, cfg)
			if !a.Connected() || len(a.OwnedRegions()) != 1 {
				t.Fatal("no region")
			}
			if l := a.current(); l.unix == nil || !l.provable.Load() {
				t.Fatal("the session was not proved on the Unix socket")
			}
			for i := range 10 {
				v := value(i, 1000+20000*i)
				want(t, "store", storeOne(t, a, i, v), base.CodeOK)
				dst := make([]byte, len(v))
				want(t, "load elsewhere", loadOne(t, b, i, dst), base.CodeOK)
				if !bytes.Equal(dst, v) {
					t.Fatal("bytes differ")
				}
				want(t, "duplicate", storeOne(t, b, i, v), base.CodeAlreadyStored)
			}
			views := make([]View, 2)
			if err := b.Retrieve(t.Context(), keysOf(3, 77), hot.ModeEach, views); err != nil || views[0].ID == 0 || views[1].ID != 0 {
				t.Fatal(err, views)
			}
			if !bytes.Equal(views[0].Bytes, value(3, 61000)) {
				t.Fatal("view differs")
			}
			codes := make([]base.Code, 2)
			if err := a.Delete(t.Context(), keysOf(3, 4), codes); err != nil {
				t.Fatal(err)
			}
			want(t, "delete under a view", codes[0], base.CodePinned)
			want(t, "delete", codes[1], base.CodeOK)
			b.ReleaseViews([]uint64{views[0].ID})
			eventually(t, "the page", func() bool { return a.Stats().PagesReady == 9 && a.Stats().PagesFree == 7 })
			eventually(t, "the delete", func() bool {
				return a.Delete(t.Context(), keysOf(3), codes) == nil && codes[0] == base.CodeOK
			})
			// The values of a client that has closed stay readable.
			if err := a.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			want(t, "load after the writer's close", loadOne(t, b, 9, make([]byte, 181000)), base.CodeOK)
			late := open(t, cfg)
			dst := make([]byte, 181000)
			want(t, "load by a late client", loadOne(t, late, 9, dst), base.CodeOK)
			if !bytes.Equal(dst, value(9, 181000)) {
				t.Fatal("bytes differ")
			}
		})
	}
}

func TestRealMixed(t *testing.T) {
	for _, order := range [][]base.Medium{{base.MediumCPU, base.MediumCXL}, {base.MediumCXL, base.MediumCPU}} {
		t.Run(order[0].String(), func(t *testing.T) {
			l := startLab(t, 64<<20)
			cfg := l.config()
			cfg.CPUBytes, cfg.CXLBytes, cfg.RegionBytes = 3*testPage, 3*testPage, 3*testPage
			cfg.WriteOrder, cfg.Overcommit = order, On
			cfg.Namespace, cfg.Opaque, cfg.PageBytes, cfg.ValueBytes, cfg.PieceBytes = engineNamespace, false, 0, testPage-4096, 16<<10
			c, other := open(t, cfg), open(t, cfg)
			for i := range 6 {
				want(t, "store", storeOne(t, c, i, value(i, testPage-4096)), base.CodeOK)
			}
			want(t, "both full", storeOne(t, c, 6, value(6, 10)), base.CodeFull)
			verdicts := make([]byte, 7)
			if n, err := c.Probe(t.Context(), ProbeQuery{Keys: keysOf(0, 1, 2, 3, 4, 5, 6), Mode: hot.ModePrefix}, verdicts); n != 6 || err != nil {
				t.Fatal(n, err)
			}
			for i := range 6 {
				medium := order[i/3]
				if m := hot.Verdict(verdicts[i]).Medium(); m != medium {
					t.Errorf("object %d is in %s, not %s", i, m, medium)
				}
				dst := make([]byte, testPage-4096)
				want(t, "load", loadOne(t, c, i, dst), base.CodeOK)
				if !bytes.Equal(dst, value(i, testPage-4096)) {
					t.Fatalf("object %d differs", i)
				}
				// Another worker reaches the shared half only (CPU-05).
				code := base.CodeMiss
				if medium == base.MediumCXL {
					code = base.CodeOK
				}
				want(t, "load elsewhere", loadOne(t, other, i, dst), code)
			}
		})
	}
}

func TestRealCPUOnly(t *testing.T) {
	l := startLab(t, 0)
	cfg := l.config()
	cfg.CXLBytes, cfg.RegionBytes, cfg.CPUBytes, cfg.Overcommit = 0, 0, 16*testPage, On
	c := open(t, cfg)
	for i := range 16 {
		want(t, "store", storeOne(t, c, i, value(i, 100000)), base.CodeOK)
	}
	want(t, "full", storeOne(t, c, 16, value(16, 100000)), base.CodeFull)
	dst := make([]byte, 100000)
	want(t, "load", loadOne(t, c, 15, dst), base.CodeOK)
	if !bytes.Equal(dst, value(15, 100000)) {
		t.Fatal("bytes differ")
	}
}

func TestRealScheduler(t *testing.T) {
	l := startLab(t, 64<<20)
	cfg := l.config()
	cfg.EngineID = "e"
	cfg.Namespace, cfg.Opaque, cfg.PageBytes, cfg.ValueBytes = engineNamespace, false, 0, 100000
	w := open(t, cfg)
	want(t, "store", storeOne(t, w, 1, value(1, 100000)), base.CodeOK)
	s := open(t, Config{
		ServerAddress: cfg.ServerAddress, Namespace: cfg.Namespace, EngineID: "e", Role: base.RoleScheduler, Logger: quiet,
	})
	eventually(t, "the worker", func() bool {
		ts, err := s.Targets(t.Context())
		return err == nil && len(ts) == 1 && ts[0] == w.Session()
	})
	targets, _ := s.Targets(t.Context())
	verdicts := make([]byte, 2)
	n, err := s.Probe(t.Context(), ProbeQuery{Keys: keysOf(1, 2), Mode: hot.ModePrefix, Targets: targets, RequestID: 5}, verdicts)
	if n != 1 || err != nil {
		t.Fatal(n, err, verdicts)
	}
	got := lookUp(t, s, Lookup{Keys: keysOf(1, 2, 1), Workers: 1, Replicas: 1, RequestID: 6})
	if got[0] != base.Code(verdicts[0]) || hot.Verdict(got[1]).Status() != hot.Miss || hot.Verdict(got[2]).Status() != hot.NotTried {
		t.Fatal(got)
	}
	if err := s.RefreshRequests(t.Context(), []uint64{5}); err != nil {
		t.Fatal(err)
	}
	if err := s.EndRequests(t.Context(), []uint64{5, 6}); err != nil {
		t.Fatal(err)
	}
	if len(s.OwnedRegions()) != 0 {
		t.Fatal("a scheduler owns memory")
	}
}

func TestRealCorruptAndFault(t *testing.T) {
	l := startLab(t, 64<<20)
	a, b := open(t, l.config()), open(t, l.config())
	v := value(1, 100000)
	want(t, "store", storeOne(t, a, 1, v), base.CodeOK)
	want(t, "store", storeOne(t, a, 2, v), base.CodeOK)
	views := make([]View, 1)
	if err := a.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID == 0 {
		t.Fatal(err)
	}
	views[0].Bytes[50000] ^= 0xff
	a.ReleaseViews([]uint64{views[0].ID})
	want(t, "corrupt", loadOne(t, b, 1, make([]byte, len(v))), base.CodeCorrupt)
	eventually(t, "the delete", func() bool { return loadOne(t, b, 1, make([]byte, len(v))) == base.CodeMiss })
	want(t, "the other", loadOne(t, b, 2, make([]byte, len(v))), base.CodeOK)
	if err := os.Truncate(l.path, 2<<20); err != nil {
		t.Fatal(err)
	}
	want(t, "truncated", loadOne(t, b, 2, make([]byte, len(v))), base.CodeFault)
	want(t, "store into it", storeOne(t, a, 3, v), base.CodeFault)
	if s := a.Stats(); s.PagesQuarantined != 1 || s.Faults == 0 {
		t.Fatalf("%+v", s)
	}
}

func TestRealServerRestart(t *testing.T) {
	l := startLab(t, 64<<20)
	cfg := l.config()
	c, other := open(t, cfg), open(t, cfg)
	v := value(1, 100000)
	want(t, "store", storeOne(t, c, 1, v), base.CodeOK)
	dst := make([]byte, len(v))
	want(t, "load", loadOne(t, other, 1, dst), base.CodeOK)
	before := l.srv.Epoch()
	// The same addresses again.
	control, hotAddress := l.srv.ControlAddress(), l.srv.HotAddress()
	l.stop()
	want(t, "away", loadOne(t, other, 1, dst), base.CodeMiss)
	l.cfg.Port, l.cfg.HotPort = portOf(t, control), portOf(t, hotAddress)
	l.start()
	if l.srv.Epoch() == before {
		t.Fatal("the epoch is the same")
	}
	eventually(t, "the sessions", func() bool {
		return c.Connected() && other.Connected() && c.current() != nil && c.current().serverEpoch == l.srv.Epoch() &&
			other.current() != nil && other.current().serverEpoch == l.srv.Epoch()
	})
	// Live sessions keep their hits.
	eventually(t, "a load of before", func() bool { return loadOne(t, c, 1, dst) == base.CodeOK })
	eventually(t, "a load of before elsewhere", func() bool { return loadOne(t, other, 1, dst) == base.CodeOK })
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes of before differ")
	}
	eventually(t, "a store", func() bool { return storeOne(t, c, 2, v) == base.CodeOK })
	eventually(t, "a load elsewhere", func() bool { return loadOne(t, other, 2, dst) == base.CodeOK })
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes differ")
	}
	// What was listed comes back when the rule "Server restart" is met (L1).
	eventually(t, "the listed page", func() bool { return c.Stats().PagesQuarantined == 0 })
}

// TestRealSchedulerRestart: a scheduler holds nothing, and its session comes back all the
// same, once.
func TestRealSchedulerRestart(t *testing.T) {
	l := startLab(t, 64<<20)
	s := open(t, Config{
		ServerAddress: l.config().ServerAddress, Namespace: engineNamespace, EngineID: "e", Role: base.RoleScheduler, Logger: quiet,
	})
	control, hotAddress := l.srv.ControlAddress(), l.srv.HotAddress()
	l.stop()
	l.cfg.Port, l.cfg.HotPort = portOf(t, control), portOf(t, hotAddress)
	l.start()
	eventually(t, "the session", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.mu.core.Phase() == session.Live && s.mu.core.ServerEpoch() == l.srv.Epoch()
	})
	epoch := s.Epoch()
	time.Sleep(100 * time.Millisecond)
	if !s.Connected() || s.Epoch() != epoch {
		t.Fatalf("the session was opened again: epoch %d, then %d", epoch, s.Epoch())
	}
	if err := s.EndRequests(t.Context(), []uint64{1}); err != nil {
		t.Fatal(err)
	}
}

// TestRealExpiredSession freezes a client past its TTL, as SIGSTOP does: its replicas are
// hidden, and are there again when it has opened again.
func TestRealExpiredSession(t *testing.T) {
	l := startLab(t, 64<<20)
	l.stop()
	l.cfg.TTL, l.cfg.Margin, l.cfg.Heartbeat = 800*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond
	l.start()
	cfg := l.config()
	cfg.CPUBytes, cfg.Overcommit = 4*testPage, On
	cfg.WriteOrder = []base.Medium{base.MediumCXL, base.MediumCPU}
	cfg.RegionBytes, cfg.CXLBytes = 2*testPage, 2*testPage
	c, other := open(t, cfg), open(t, cfg)
	v := value(1, 100000)
	dst := make([]byte, len(v))
	for i := range 4 {
		want(t, "store", storeOne(t, c, i, v), base.CodeOK)
	}
	views := make([]View, 1)
	if err := c.Retrieve(t.Context(), keysOf(0), hot.ModeEach, views); err != nil || views[0].ID == 0 {
		t.Fatal(err)
	}
	before := c.Epoch()
	c.mu.Lock()
	eventually(t, "the expiry", func() bool { return loadOne(t, other, 0, dst) == base.CodeMiss })
	c.mu.Unlock()
	eventually(t, "the session", func() bool { return c.Connected() && c.Epoch() != before })
	for i := range 4 {
		eventually(t, "a load", func() bool { return loadOne(t, c, i, dst) == base.CodeOK })
		if !bytes.Equal(dst, v) {
			t.Fatal("bytes differ")
		}
	}
	eventually(t, "a load elsewhere", func() bool { return loadOne(t, other, 0, dst) == base.CodeOK })
	if !bytes.Equal(views[0].Bytes, v) {
		t.Fatal("the view changed")
	}
	codes := make([]base.Code, 1)
	if err := other.Delete(t.Context(), keysOf(0), codes); err != nil || codes[0] != base.CodePinned {
		t.Fatalf("delete under a view that outlived its epoch: %v, %v", codes[0], err)
	}
	c.ReleaseViews([]uint64{views[0].ID})
	eventually(t, "the delete", func() bool {
		return other.Delete(t.Context(), keysOf(0), codes) == nil && (codes[0] == base.CodeOK || codes[0] == base.CodeNotFound)
	})
	eventually(t, "the page", func() bool { return c.Stats().PagesReady == 3 })
	eventually(t, "a store into it", func() bool { return storeOne(t, c, 9, v) == base.CodeOK })
}

// TestRealManagerRestart takes the resource manager away for a while: what is mapped goes
// on, new regions come when it is back, and holds are given back at the end.
func TestRealManagerRestart(t *testing.T) {
	l := startLab(t, 64<<20)
	cfg := l.config()
	cfg.RegionBytes, cfg.CXLBytes, cfg.ExpandBytes = 2*testPage, 8*testPage, 2*testPage
	c, other := open(t, cfg), open(t, cfg)
	v := value(1, 100000)
	dst := make([]byte, len(v))
	want(t, "store", storeOne(t, c, 0, v), base.CodeOK)
	want(t, "load elsewhere", loadOne(t, other, 0, dst), base.CodeOK)
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, "store without the RM", storeOne(t, c, 1, v), base.CodeOK)
	want(t, "load without the RM", loadOne(t, other, 1, dst), base.CodeOK)
	want(t, "no region without the RM", storeOne(t, c, 2, v), base.CodeFull)
	var err error
	if l.rm, err = rm.Start(t.Context(), l.rmCfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a region after the restart", func() bool { return storeOne(t, c, 2, v) == base.CodeOK })
	want(t, "load from it", loadOne(t, other, 2, dst), base.CodeOK)
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes differ")
	}
	if err := other.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	holders := map[string]bool{}
	conn, err := rpc.Dial(t.Context(), "unix:"+l.rmCfg.UnixPath)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	list, err := maruv1.NewResourceManagerClient(conn).ListHolds(t.Context(), &maruv1.ListHoldsRequest{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range list.GetHolds() {
		holders[string(h.GetSessionId())] = true
	}
	if id := other.Session(); holders[string(id[:])] {
		t.Fatal("a drained close left a hold")
	}
	if id := c.Session(); !holders[string(id[:])] {
		t.Fatal("the writer's hold is gone")
	}
}

func portOf(t *testing.T, address string) int {
	t.Helper()
	_, port, err := splitPort(address)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// TestRealManyThreads stores, loads and deletes from many threads of two clients and
// checks every byte.
func TestRealManyThreads(t *testing.T) {
	l := startLab(t, 256<<20)
	cfg := l.config()
	cfg.CopyThreads = 4
	clients := []*Client{open(t, cfg), open(t, cfg)}
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Go(func() {
			c := clients[g%2]
			dst := make([]byte, 40000)
			codes := make([]base.Code, 1)
			for i := range 60 {
				n := (g*7 + i*3) % 40
				v := value(n, 40000)
				switch code := storeOne(t, c, n, v); code {
				case base.CodeOK, base.CodeAlreadyStored, base.CodeFull, base.CodeRetired:
				default:
					t.Errorf("store: %v", code)
				}
				switch code := loadOne(t, c, n, dst); code {
				case base.CodeOK:
					if !bytes.Equal(dst, v) {
						t.Errorf("object %d differs", n)
					}
				case base.CodeMiss:
				default:
					t.Errorf("load: %v", code)
				}
				if i%5 == 0 {
					_ = c.Delete(t.Context(), keysOf(n), codes)
				}
			}
		})
	}
	wg.Wait()
	for _, c := range clients {
		eventually(t, "quiet", func() bool { s := c.Stats(); return s.Leases == 0 && s.PagesRetiring == 0 && s.PagesQuarantined == 0 })
	}
}
