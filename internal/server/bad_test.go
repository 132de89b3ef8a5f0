package server

import (
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
)

// cutOff reports whether the server closes the connection after b.
func cutOff(t *testing.T, address string, b []byte) {
	t.Helper()
	c, err := dialHot(address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	_, _ = c.conn.Write(b)
	_ = c.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	rest, err := io.ReadAll(c.conn)
	if err != nil && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("%d bytes: the connection was not cut: %v (read %d)", len(b), err, len(rest))
	}
}

// Whatever a stranger sends ends its connection and nothing else.
func TestBadPeers(t *testing.T) {
	cfg := testConfig(t)
	cfg.HelloTimeout, cfg.FrameTimeout = 300*time.Millisecond, 300*time.Millisecond
	s := startServer(t, cfg)
	c := newClient(t, s.ControlAddress(), nil)
	garbage := make([]byte, 4096)
	_, _ = rand.Read(garbage)
	garbage[4] = 77 // never a version
	hello := hot.AppendHello(nil, 1, &hot.Hello{Session: c.id, Epoch: 1})
	version := append([]byte(nil), hello...)
	version[4] = 9
	huge := append([]byte(nil), hello...)
	huge[2] = 0x0f // a megabyte before the proof
	answer := append([]byte(nil), hello...)
	answer[6] = 1
	probe := hot.AppendProbe(nil, 1, &hot.ProbeRequest{Namespace: 1, Keys: hot.AppendKeys(nil, testKeyRange(0, 1))})
	for name, b := range map[string][]byte{
		"garbage": garbage, "http": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "version": version, "huge": huge,
		"answer flag": answer, "no hello": probe, "truncated": hello[:40], "silent": nil, "wrong mac": hello,
	} {
		t.Run(name, func(t *testing.T) {
			cutOff(t, s.HotAddress(), b)
			cutOff(t, s.HotUnixPath(), b)
		})
	}
	// After the proof, too.
	for name, frame := range map[string]func() []byte{
		"malformed probe": func() []byte { b := append([]byte(nil), probe...); b[len(b)-40] = 0xff; return b[:len(b)-1] },
		"hello again":     func() []byte { return hello },
		"challenge":       func() []byte { return hot.AppendChallenge(nil, &hot.Challenge{}) },
	} {
		t.Run("proved "+name, func(t *testing.T) {
			h := c.connect("")
			b := frame()
			if name == "malformed probe" {
				b[0]-- // the length says what is there, the payload does not decode
			}
			_, _ = h.conn.Write(b)
			_ = h.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := h.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && (err == nil || !strings.Contains(err.Error(), "reset")) {
				t.Errorf("not cut: %v", err)
			}
		})
	}
	t.Run("slow frame", func(t *testing.T) {
		h := c.connect("")
		_, _ = h.conn.Write(probe[:20])
		_ = h.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := h.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("half a frame was waited for: %v", err)
		}
	})
	t.Run("idle is allowed", func(t *testing.T) {
		h := c.connect("")
		time.Sleep(700 * time.Millisecond)
		if n := c.probeHits(testKeyRange(0, 1)); n != 0 {
			t.Error(n)
		}
		_ = h
	})
	if _, err := c.heartbeat(); err != nil {
		t.Fatalf("the server suffered: %v", err)
	}
	waitFor(t, "all bad connections are gone", func() bool {
		s.hot.mu.Lock()
		defer s.hot.mu.Unlock()
		return len(s.hot.mu.conns) <= 1
	})
}

// The proof of a hot connection: each part of it counts, and none works twice.
func TestHelloProof(t *testing.T) {
	s := startServer(t, testConfig(t))
	c := newClient(t, s.ControlAddress(), nil)
	for name, x := range map[string]struct {
		change func(*hot.Hello)
		want   error
	}{
		"mac":          {func(h *hot.Hello) { h.MAC[0]++ }, base.ErrDenied},
		"nonce":        {func(h *hot.Hello) { h.Nonce[0]++ }, base.ErrDenied},
		"session":      {func(h *hot.Hello) { h.Session[0]++ }, base.ErrStale},
		"epoch":        {func(h *hot.Hello) { h.Epoch++ }, base.ErrStale},
		"server epoch": {func(h *hot.Hello) { h.ServerEpoch++ }, base.ErrStale},
	} {
		h, err := dialHot(s.HotAddress())
		if err != nil {
			t.Fatal(err)
		}
		if err := h.prove(c.id, base.Epoch(c.open.GetEpoch()), c.open.GetSecret(), x.change); !errors.Is(err, x.want) {
			t.Errorf("%s: %v, want %v", name, err, x.want)
		}
		h.close()
	}
	good := c.connect("")
	replay, err := dialHot(s.HotAddress())
	if err != nil {
		t.Fatal(err)
	}
	defer replay.close()
	if err := replay.prove(c.id, base.Epoch(c.open.GetEpoch()), c.open.GetSecret(), func(h *hot.Hello) { *h = good.hello }); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a recorded hello: %v", err)
	}
}

func TestHotConnectionLimits(t *testing.T) {
	cfg := testConfig(t)
	cfg.MaxSessionConnectionCount, cfg.MaxHotConnectionCount = 2, 3
	s := startServer(t, cfg)
	c := newClient(t, s.ControlAddress(), nil)
	first := c.connect("")
	c.connect("")
	h, err := dialHot(s.HotAddress())
	if err != nil {
		t.Fatal(err)
	}
	if err := h.prove(c.id, base.Epoch(c.open.GetEpoch()), c.open.GetSecret(), nil); !errors.Is(err, base.ErrLimit) {
		t.Errorf("third connection of a session: %v", err)
	}
	h.close()
	other := newClient(t, s.ControlAddress(), nil)
	waitFor(t, "the refused connection is gone", func() bool {
		h, err := dialHot(s.HotAddress())
		if err != nil {
			return false
		}
		defer h.close()
		return h.prove(other.id, base.Epoch(other.open.GetEpoch()), other.open.GetSecret(), nil) == nil
	})
	waitFor(t, "only two are left", func() bool { s.hot.mu.Lock(); defer s.hot.mu.Unlock(); return len(s.hot.mu.conns) == 2 })
	other.connect("")
	if h, err := dialHot(s.HotAddress()); err == nil {
		t.Errorf("a fourth connection got a challenge: %v", h)
		h.close()
	}
	first.close()
	waitFor(t, "a closed connection makes room", func() bool {
		h, err := dialHot(s.HotAddress())
		if err == nil {
			h.close()
		}
		return err == nil
	})
}

func TestControlConnectionLimit(t *testing.T) {
	cfg := testConfig(t)
	cfg.MaxControlConnectionCount = 2
	s := startServer(t, cfg)
	describe := &maruv1.DescribeServerRequest{Version: &maruv1.ProtocolVersion{Min: 1, Max: 1}}
	first := dialControl(t, s.ControlAddress())
	dialControl(t, s.UnixPath())
	if conn, err := rpc.Dial(testContext(t), s.ControlAddress()); err == nil {
		_, err = maruv1.NewMetadataServerClient(conn).DescribeServer(testContext(t), describe)
		_ = conn.Close()
		if err == nil {
			t.Error("a third connection works")
		}
	}
	_ = first.Close()
	waitFor(t, "a closed connection makes room", func() bool {
		conn, err := rpc.Dial(testContext(t), s.ControlAddress())
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close() }()
		_, err = maruv1.NewMetadataServerClient(conn).DescribeServer(testContext(t), describe)
		return err == nil
	})
}

// Calls of the control plane need the session's proof.
func TestControlProof(t *testing.T) {
	s := startServer(t, testConfig(t))
	c := newClient(t, s.ControlAddress(), nil)
	secret := string(c.open.GetSecret())
	forged := string([]byte{secret[0] ^ 1}) + secret[1:] // not that of a drawn one
	for name, x := range map[string]struct {
		md   []string
		want error
	}{
		"none":         {nil, base.ErrDenied},
		"secret":       {[]string{sessionKey, string(c.id[:]), epochKey, "1", secretKey, forged}, base.ErrDenied},
		"short secret": {[]string{sessionKey, string(c.id[:]), epochKey, "1", secretKey, "x"}, base.ErrDenied},
		"epoch":        {[]string{sessionKey, string(c.id[:]), epochKey, "2", secretKey, secret}, base.ErrStale},
		"epoch text":   {[]string{sessionKey, string(c.id[:]), epochKey, "one", secretKey, secret}, base.ErrInvalid},
		"session":      {[]string{sessionKey, strings.Repeat("y", 16), epochKey, "1", secretKey, secret}, base.ErrStale},
		"short id":     {[]string{sessionKey, "y", epochKey, "1", secretKey, secret}, base.ErrInvalid},
		"twice":        {[]string{sessionKey, string(c.id[:]), sessionKey, "y", epochKey, "1", secretKey, secret}, base.ErrDenied},
	} {
		ctx := metadata.AppendToOutgoingContext(testContext(t), x.md...)
		if _, err := c.api.Heartbeat(ctx, &maruv1.HeartbeatRequest{Sequence: 1}); !errors.Is(err, x.want) {
			t.Errorf("%s: %v, want %v", name, err, x.want)
		}
	}
	if _, err := c.api.Usage(testContext(t), &maruv1.UsageRequest{}); err != nil {
		t.Errorf("usage needs no session: %v", err)
	}
	if _, err := c.api.DeleteNamespace(testContext(t), &maruv1.DeleteNamespaceRequest{NamespaceId: c.open.GetNamespaceId()}); !errors.Is(err, base.ErrDenied) {
		t.Errorf("an operator's delete over TCP: %v", err)
	}
	local := maruv1.NewMetadataServerClient(dialControl(t, s.UnixPath()))
	if _, err := local.DeleteNamespace(testContext(t), &maruv1.DeleteNamespaceRequest{NamespaceId: c.open.GetNamespaceId()}); err != nil {
		t.Errorf("an operator's delete over the Unix socket: %v", err)
	}
}

// Bad Opens name the field, the value and what is allowed, and change nothing.
func TestBadOpens(t *testing.T) {
	cfg := testConfig(t)
	cfg.Limits.MaxSessions = 2
	s := startServer(t, cfg)
	api := maruv1.NewMetadataServerClient(dialControl(t, s.ControlAddress()))
	for name, x := range map[string]struct {
		change func(*maruv1.OpenRequest)
		want   error
		text   string
	}{
		"version 0":      {func(m *maruv1.OpenRequest) { m.Version = nil }, base.ErrInvalid, "version"},
		"version 2":      {func(m *maruv1.OpenRequest) { m.Version = &maruv1.ProtocolVersion{Min: 2, Max: 3} }, base.ErrUnsupported, "2 to 3"},
		"cxl":            {func(m *maruv1.OpenRequest) { m.Capabilities = []string{"cxl_storage_v1"} }, base.ErrUnsupported, "cxl_storage_v1"},
		"capability":     {func(m *maruv1.OpenRequest) { m.Capabilities = []string{"warp_v9"} }, base.ErrUnsupported, "warp_v9"},
		"session id":     {func(m *maruv1.OpenRequest) { m.SessionId = []byte{1} }, base.ErrInvalid, "session_id"},
		"zero session":   {func(m *maruv1.OpenRequest) { m.SessionId = make([]byte, 16) }, base.ErrInvalid, "session_id"},
		"role":           {func(m *maruv1.OpenRequest) { m.Role = 77 }, base.ErrInvalid, "role"},
		"namespace":      {func(m *maruv1.OpenRequest) { m.NamespaceCbor = []byte{0xff} }, base.ErrInvalid, "namespace"},
		"opaque":         {func(m *maruv1.OpenRequest) { m.Opaque = false }, base.ErrMismatch, "opaque"},
		"rank":           {func(m *maruv1.OpenRequest) { m.Rank = 4 }, base.ErrInvalid, "rank"},
		"medium":         {func(m *maruv1.OpenRequest) { m.WriteOrder = []maruv1.Medium{9} }, base.ErrInvalid, "write_order"},
		"medium twice":   {func(m *maruv1.OpenRequest) { m.ReadOrder = []maruv1.Medium{1, 1} }, base.ErrInvalid, "read_order"},
		"negative media": {func(m *maruv1.OpenRequest) { m.ReadOrder = []maruv1.Medium{-1} }, base.ErrInvalid, "read_order"},
		"budget":         {func(m *maruv1.OpenRequest) { m.CpuBytes = 2 << 30 }, base.ErrPermanent, "cpu-budget"},
		"node id":        {func(m *maruv1.OpenRequest) { m.NodeId = nil }, base.ErrInvalid, "node_id"},
		"secret":         {func(m *maruv1.OpenRequest) { m.PreviousSecret = []byte{1} }, base.ErrInvalid, "previous_secret"},
		"long text":      {func(m *maruv1.OpenRequest) { m.EngineId = strings.Repeat("x", 1000) }, base.ErrLimit, "engine_id"},
	} {
		m := workerRequest(base.NewID())
		x.change(m)
		if _, err := api.Open(testContext(t), m); !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.text) {
			t.Errorf("%s: %v, want %v with %q", name, err, x.want, x.text)
		}
	}
	if u := s.usage(); len(u.Sessions) != 0 {
		t.Fatalf("refused opens left sessions: %+v", u.Sessions)
	}
	newClient(t, s.ControlAddress(), nil)
	second := newClient(t, s.ControlAddress(), nil)
	if _, err := api.Open(testContext(t), workerRequest(base.NewID())); !errors.Is(err, base.ErrLimit) || !strings.Contains(err.Error(), "max-sessions") {
		t.Errorf("a third session: %v", err)
	}
	if _, err := second.api.Close(second.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
		t.Fatal(err)
	}
	newClient(t, s.ControlAddress(), nil)
}

// SES-02: one active worker an engine and rank; the refusal says when a retry can succeed.
func TestSecondWorkerOfRank(t *testing.T) {
	s := startServer(t, testConfig(t))
	engine := func(rank uint32) func(*maruv1.OpenRequest) {
		return func(m *maruv1.OpenRequest) { m.EngineId, m.Rank, m.WorldSize = "engine", rank, 2 }
	}
	first := newClient(t, s.ControlAddress(), engine(0))
	if _, err := first.heartbeat(); err != nil {
		t.Fatal(err) // one that was never used keeps nobody out
	}
	newClient(t, s.ControlAddress(), engine(1))
	m := workerRequest(base.NewID())
	engine(0)(m)
	if _, err := first.api.Open(testContext(t), m); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), "retry can succeed") {
		t.Fatalf("second worker of rank 0: %v", err)
	}
	scheduler := newClient(t, s.ControlAddress(), func(m *maruv1.OpenRequest) {
		engine(0)(m)
		m.Role, m.CpuBytes = maruv1.Role_ROLE_SCHEDULER, 0
	})
	if w := scheduler.open.GetWorkers(); len(w) != 2 || w[0].GetRank() != 0 || w[1].GetRank() != 1 || base.SessionID(w[0].GetSessionId()) != first.id {
		t.Fatalf("workers: %v", w)
	}
	if _, err := first.api.Close(first.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
		t.Fatal(err)
	}
	if h, err := scheduler.heartbeat(); err != nil || len(h.GetWorkers()) != 1 {
		t.Fatalf("workers after a close: %v %v", h.GetWorkers(), err)
	}
	if _, err := scheduler.api.Open(testContext(t), m); err != nil {
		t.Errorf("after the first has closed: %v", err)
	}
}

// A new epoch ends the old one: its connections are cut and its calls are stale.
func TestReopenEndsOldEpoch(t *testing.T) {
	s := startServer(t, testConfig(t))
	c := newClient(t, s.ControlAddress(), nil)
	old := c.connect("")
	oldCtx := c.ctx()
	stream, err := c.api.Events(oldCtx, &maruv1.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	other := *c
	if err := other.reopen(func(m *maruv1.OpenRequest) { m.PreviousSecret = make([]byte, 16) }); !errors.Is(err, base.ErrDenied) {
		t.Fatalf("taken over without the secret: %v", err)
	}
	if err := c.reopen(nil); err != nil {
		t.Fatal(err)
	}
	if c.open.GetEpoch() != 2 {
		t.Fatalf("epoch %d", c.open.GetEpoch())
	}
	if _, err := c.api.Heartbeat(oldCtx, &maruv1.HeartbeatRequest{Sequence: 9}); !errors.Is(err, base.ErrStale) {
		t.Errorf("a heartbeat of the old epoch: %v", err)
	}
	_ = old.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := old.conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && (err == nil || !strings.Contains(err.Error(), "reset")) {
		t.Errorf("the old epoch's connection: %v", err)
	}
	batch, err := stream.Recv()
	if err != nil || len(batch.GetEvents()) == 0 || batch.GetEvents()[len(batch.GetEvents())-1].GetFence() == nil {
		t.Errorf("the old epoch's stream: %v %v", batch, err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the old epoch's stream goes on: %v", err)
	}
	c.connect("")
	c.probeHits(testKeyRange(0, 1))
}

// A session that sends no heartbeat is hidden; it comes back with its secret.
func TestExpiry(t *testing.T) {
	cfg := testConfig(t)
	cfg.TTL, cfg.Heartbeat, cfg.Margin = 400*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond
	s := startServer(t, cfg)
	c := newClient(t, s.ControlAddress(), nil)
	c.connect("")
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 4, 4096)
	c.commitKeys(r, c.open.GetEpoch(), testKeyRange(0, 4))
	stream, err := c.api.Events(c.ctx(), &maruv1.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "expiry", func() bool {
		_, err := c.hot.probe(&hot.ProbeRequest{Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber())})
		return err != nil // STALE, or the connection was cut with its epoch
	})
	if _, err := c.heartbeat(); !errors.Is(err, base.ErrStale) {
		t.Fatalf("a heartbeat after expiry: %v", err)
	}
	for {
		batch, err := stream.Recv()
		if err != nil {
			t.Fatalf("the stream ended without a fence event: %v", err)
		}
		if e := batch.GetEvents(); len(e) > 0 && e[len(e)-1].GetFence() != nil {
			break
		}
	}
	if err := c.reopen(nil); err != nil {
		t.Fatalf("reopen: %v", err)
	}
	c.connect("")
	if n := c.probeHits(testKeyRange(0, 4)); n != 4 {
		t.Errorf("%d hits after coming back", n)
	}
}

func TestStartRefusals(t *testing.T) {
	cfg := testConfig(t)
	s := startServer(t, cfg)
	_, port, _ := net.SplitHostPort(s.ControlAddress())
	for name, x := range map[string]struct {
		change func(*Config)
		want   error
		text   string
	}{
		"state dir in use": {func(c *Config) { c.StateDir = cfg.StateDir }, base.ErrBusy, "--state-dir"},
		"port in use":      {func(c *Config) { c.Port = atoi(port) }, base.ErrBusy, port},
		"socket in use":    {func(c *Config) { c.UnixPath = cfg.UnixPath }, base.ErrBusy, cfg.UnixPath},
		"host":             {func(c *Config) { c.Host = "0.0.0.0" }, base.ErrInvalid, "--insecure"},
		"ttl":              {func(c *Config) { c.TTL = time.Millisecond }, base.ErrInvalid, "session-ttl"},
		"rm address":       {func(c *Config) { c.CPUOnly = false; c.RMAddress = "nonsense" }, base.ErrInvalid, "rm-address"},
		"contradiction":    {func(c *Config) { c.RMAddress = "10.0.0.1:1" }, base.ErrInvalid, "contradict"},
		"server id":        {func(c *Config) { c.ServerID = "../x" }, base.ErrInvalid, "server-id"},
		"state dir a file": {func(c *Config) {
			c.StateDir = filepath.Join(filepath.Dir(c.StateDir), "file")
			_ = os.WriteFile(c.StateDir, nil, 0o600)
		}, base.ErrInvalid, "state-dir"},
		"corrupt state": {func(c *Config) {
			_ = os.MkdirAll(c.StateDir, 0o700)
			_ = os.WriteFile(filepath.Join(c.StateDir, stateFile), []byte("{"), 0o600)
		}, base.ErrCorrupt, "drop-owner"},
		"state of the future": {func(c *Config) {
			_ = os.MkdirAll(c.StateDir, 0o700)
			_ = os.WriteFile(filepath.Join(c.StateDir, stateFile), []byte(`{"version":9}`), 0o600)
		}, base.ErrUnsupported, "version 9"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := testConfig(t)
			x.change(&bad)
			srv, err := Start(testContext(t), bad)
			if err == nil {
				stopServer(t, srv)
			}
			if !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.text) {
				t.Errorf("%v, want %v with %q", err, x.want, x.text)
			}
		})
	}
}

func atoi(s string) int {
	n := 0
	for _, c := range s {
		n = 10*n + int(c-'0')
	}
	return n
}
