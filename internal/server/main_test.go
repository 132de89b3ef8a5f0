package server

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/node"
)

// TestMain also runs this binary as other programs of a test: a client process that
// is killed, and the server itself.
func TestMain(m *testing.M) {
	switch os.Getenv("MARU_TEST_CHILD") {
	case "client":
		childClient()
		return
	case "server":
		childServer()
		return
	}
	inject.Main(map[string]inject.Subject{"server": serverSubject})
	goleak.VerifyTestMain(m)
}

// testConfig is a cpu-only server on free ports with its sockets in a short
// directory of its own (socket paths are bounded).
func testConfig(t testing.TB) Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "maru-server-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return Config{
		Port: AnyPort, HTTPPort: AnyPort, CPUOnly: true, StateDir: filepath.Join(dir, "state"),
		UnixPath: filepath.Join(dir, "c.sock"), HotUnixPath: filepath.Join(dir, "h.sock"),
		Node: node.Options{Dir: dir}, CPUBudgetBytes: 1 << 30, Log: testLog(), Version: "test",
	}
}

func startServer(t testing.TB, cfg Config) *Server {
	t.Helper()
	s, err := Start(context.Background(), cfg)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	t.Cleanup(func() { stopServer(t, s) })
	return s
}

func stopServer(t testing.TB, s *Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
}

func opaqueNamespace() []byte { return keys.OpaqueNamespace() }

// testLog shows log lines when asked by MARU_TEST_LOG.
func testLog() *slog.Logger {
	if os.Getenv("MARU_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.NewTextHandler(io.Discard, nil))
}
