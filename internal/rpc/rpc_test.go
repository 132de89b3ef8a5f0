package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/xcena-dev/maru/internal/base"
)

// allCodes are the codes that have a sentinel, found by asking.
func allCodes() []base.Code {
	var out []base.Code
	for c := base.CodeInvalid; c < 200; c++ {
		if errors.Is(base.ErrorOf(c), base.ErrInternal) && c != base.CodeInternal {
			continue
		}
		out = append(out, c)
	}
	return out
}

func TestErrorsCrossTheWire(t *testing.T) {
	for _, c := range allCodes() {
		if _, ok := statusCodes[c]; !ok {
			t.Errorf("code %d (%s) has no gRPC code", c, c)
		}
		in := fmt.Errorf("allocate 4 pages in pool p: %w: 3 are free", base.ErrorOf(c))
		out := FromStatus(ToStatus(in))
		if !errors.Is(out, base.ErrorOf(c)) || base.CodeOf(out) != c {
			t.Errorf("code %d came back as %v", c, out)
		}
		if out.Error() != in.Error() {
			t.Errorf("text %q became %q", in, out)
		}
		want := c == base.CodeUnknown || c == base.CodeTimeout || c == base.CodeInternal
		if OutcomeUnknown(out) != want {
			t.Errorf("OutcomeUnknown(%v) = %v", out, !want)
		}
	}
	if ToStatus(nil) != nil || FromStatus(nil) != nil || OutcomeUnknown(nil) {
		t.Error("nil did not stay nil")
	}
}

func TestErrorsWithoutProblem(t *testing.T) {
	cases := []struct {
		err     error
		want    error
		unknown bool
	}{
		{status.Error(codes.Unavailable, "connection refused"), base.ErrUnavailable, true},
		{status.Error(codes.DeadlineExceeded, "x"), base.ErrTimeout, true},
		{status.Error(codes.DeadlineExceeded, "x"), context.DeadlineExceeded, true},
		{status.Error(codes.Canceled, "x"), base.ErrTimeout, true},
		{status.Error(codes.Canceled, "x"), context.Canceled, true},
		{status.Error(codes.Unimplemented, "x"), base.ErrUnsupported, false},
		{status.Error(codes.ResourceExhausted, "received message larger than max"), base.ErrLimit, true},
		{status.Error(codes.Internal, "x"), base.ErrUnknown, true},
		{context.DeadlineExceeded, base.ErrTimeout, true},
		{context.Canceled, base.ErrTimeout, true},
	}
	for _, c := range cases {
		got := FromStatus(c.err)
		if !errors.Is(got, c.want) || OutcomeUnknown(got) != c.unknown {
			t.Errorf("FromStatus(%v) = %v (unknown %v), want %v (%v)", c.err, got, OutcomeUnknown(got), c.want, c.unknown)
		}
	}
	// A handler whose caller went away must not claim that nothing was changed.
	if got := FromStatus(ToStatus(context.Canceled)); base.CodeOf(got) != base.CodeTimeout {
		t.Errorf("cancelled handler: %v", got)
	}
	// The error of one server is not the status of the next.
	if got := status.Code(ToStatus(FromStatus(status.Error(codes.Unauthenticated, "x")))); got != codes.PermissionDenied {
		t.Errorf("handed on as %v", got)
	}
	// A status that a handler made itself stays.
	if got := status.Code(ToStatus(status.Error(codes.Unauthenticated, "x"))); got != codes.Unauthenticated {
		t.Errorf("a status became %v", got)
	}
	long := ToStatus(fmt.Errorf("%w: %s\xff", base.ErrInvalid, strings.Repeat("a", 1<<20)))
	if got := FromStatus(long); len(got.Error()) > 2*maxTextBytes || !errors.Is(got, base.ErrInvalid) {
		t.Errorf("long text: %d bytes", len(got.Error()))
	}
}

// healthServer stands for a service; the name of the service asked for says what it does.
type healthServer struct {
	grpc_health_v1.UnimplementedHealthServer
}

func (healthServer) Check(ctx context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	switch r.GetService() {
	case "panic":
		panic("boom")
	case "full":
		return nil, fmt.Errorf("%w: pool p has 3 pages", base.ErrFull)
	case "slow":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &grpc_health_v1.HealthCheckResponse{}, nil
}

func (healthServer) Watch(r *grpc_health_v1.HealthCheckRequest, s grpc_health_v1.Health_WatchServer) error {
	if r.GetService() == "panic" {
		panic("boom")
	}
	if err := s.Send(&grpc_health_v1.HealthCheckResponse{}); err != nil {
		return err
	}
	return fmt.Errorf("%w: by test", base.ErrFenced)
}

func serve(t *testing.T, l net.Listener, opts ...ServerOption) {
	t.Helper()
	s := NewServer(Limits{MaxReceiveBytes: 4096}, opts...)
	grpc_health_v1.RegisterHealthServer(s, healthServer{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		Shutdown(ctx, s)
		<-done
	})
}

func TestServer(t *testing.T) {
	ul, err := ListenUnix(filepath.Join(t.TempDir(), "s.sock"))
	if err != nil {
		t.Fatal(err)
	}
	tl, err := ListenTCP("localhost", 0, false)
	if err != nil {
		t.Fatal(err)
	}
	panics := make(chan string, 16)
	metric := WithPanicMetric(func(m string) { panics <- m })
	serve(t, ul, metric)
	serve(t, tl, metric)
	for _, addr := range []string{"unix:" + ul.Path(), tl.Addr().String(), "tcp://" + tl.Addr().String()} {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		conn, err := Dial(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		c := grpc_health_v1.NewHealthClient(conn)
		check := func(service string) error {
			_, err := c.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
			return err
		}
		if err := check(""); err != nil {
			t.Error(err)
		}
		if err := check("full"); !errors.Is(err, base.ErrFull) || OutcomeUnknown(err) {
			t.Errorf("full: %v", err)
		}
		if err := check("panic"); !errors.Is(err, base.ErrInternal) || !OutcomeUnknown(err) {
			t.Errorf("panic: %v", err)
		}
		if err := check(strings.Repeat("x", 8192)); !errors.Is(err, base.ErrLimit) {
			t.Errorf("oversized: %v", err)
		}
		short, stop := context.WithTimeout(ctx, 20*time.Millisecond)
		if _, err := c.Check(short, &grpc_health_v1.HealthCheckRequest{Service: "slow"}); !errors.Is(err, base.ErrTimeout) {
			t.Errorf("slow: %v", err)
		}
		stop()
		for service, want := range map[string]error{"": base.ErrFenced, "panic": base.ErrInternal} {
			w, err := c.Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
			for err == nil {
				_, err = w.Recv()
			}
			if !errors.Is(err, want) {
				t.Errorf("watch %q: %v", service, err)
			}
		}
		if got := <-panics; got != "/grpc.health.v1.Health/Check" {
			t.Errorf("panic of %q", got)
		}
		<-panics
		if err := conn.Invoke(ctx, "/maru.v1.None/None", &grpc_health_v1.HealthCheckRequest{}, &grpc_health_v1.HealthCheckResponse{}); !errors.Is(err, base.ErrUnsupported) || OutcomeUnknown(err) {
			t.Errorf("unknown method: %v", err)
		}
		_ = conn.Close()
		cancel()
	}
}

func TestDialRefused(t *testing.T) {
	l, err := ListenTCP("127.0.0.1", 0, false)
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := Dial(ctx, addr); !errors.Is(err, base.ErrUnavailable) || !strings.Contains(err.Error(), addr) {
		t.Errorf("tcp: %v", err)
	}
	if _, err := Dial(ctx, "unix:"+filepath.Join(t.TempDir(), "none")); !errors.Is(err, base.ErrUnavailable) {
		t.Errorf("unix: %v", err)
	}
	// A peer that accepts and says nothing must not hold the caller past its deadline.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close() //nolint:errcheck // test
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	if _, err := Dial(short, silent.Addr().String()); !errors.Is(err, base.ErrTimeout) {
		t.Errorf("silent: %v", err)
	}
}

// TestClientComesBack: a lazily connected client finds a server that starts later,
// within a heartbeat.
func TestClientComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	conn, err := NewClient("unix:"+path, Retry{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // test
	c := grpc_health_v1.NewHealthClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := c.Check(ctx, &grpc_health_v1.HealthCheckRequest{}); !errors.Is(err, base.ErrUnavailable) {
		t.Fatalf("before the server is there: %v", err)
	}
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	serve(t, l)
	if _, err := c.Check(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
}

func TestParseAddress(t *testing.T) {
	good := map[string]string{
		"127.0.0.1:5555":       "127.0.0.1:5555",
		"tcp://localhost:1":    "localhost:1",
		"[::1]:65535":          "[::1]:65535",
		"unix:/run/a.sock":     "unix:/run/a.sock",
		"unix:///run/a.sock":   "unix:/run/a.sock",
		"unix:/run//./a.sock":  "unix:/run/a.sock",
		"tcp://node-3.rack:80": "node-3.rack:80",
	}
	for in, want := range good {
		if got, err := ParseAddress(in); err != nil || got.String() != want {
			t.Errorf("ParseAddress(%q) = %v, %v", in, got, err)
		}
	}
	for _, in := range []string{
		"", "x", ":1", "x:", "x:0", "x:65536", "x:-1", "unix:", "unix:a.sock", "unix:@a", "http://x:1", "tcp://x:1/p",
		"a b:1", "unix:/" + strings.Repeat("a", 108), "unix:/a\x00b", "x:http",
	} {
		if got, err := ParseAddress(in); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("ParseAddress(%q) = %v, %v", in, got, err)
		}
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"127.0.0.1:1", "unix:/a", "tcp://x:2", "[::1]:3", "unix:///"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddress(s)
		if err != nil {
			return
		}
		b, err := ParseAddress(a.String())
		if err != nil || a != b {
			t.Fatalf("%q: %v, then %v, %v", s, a, b, err)
		}
	})
}

func TestListenTCP(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "", "::", "192.0.2.1"} {
		if _, err := ListenTCP(host, 0, false); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "--insecure") {
			t.Errorf("host %q: %v", host, err)
		}
	}
	for _, port := range []int{-1, 65536} {
		if _, err := ListenTCP("127.0.0.1", port, false); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("port %d: %v", port, err)
		}
	}
	if l, err := ListenTCP("0.0.0.0", 0, true); err != nil {
		t.Error(err)
	} else {
		_ = l.Close()
	}
	l, err := ListenTCP("127.0.0.1", 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // test
	port := l.Addr().(*net.TCPAddr).Port
	_, err = ListenTCP("127.0.0.1", port, false)
	if !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), fmt.Sprint(port)) || !strings.Contains(err.Error(), "--port") {
		t.Errorf("in use: %v", err)
	}
	if _, err := ListenTCP("192.0.2.1", 0, true); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("not ours: %v", err)
	}
}

func TestListenUnix(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "er")
	path := filepath.Join(dir, "a.sock")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket mode %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory mode %v, %v", info.Mode(), err)
	}
	if _, err := ListenUnix(path); !errors.Is(err, base.ErrBusy) {
		t.Errorf("second listener: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if _, err := ListenUnix("rel.sock"); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("relative: %v", err)
	}
	if _, err := ListenUnix("/" + strings.Repeat("a", 108)); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("long: %v", err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(file); !errors.Is(err, base.ErrForeign) {
		t.Errorf("over a file: %v", err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file became %q, %v", b, err)
	}
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(filepath.Join(open, "s")); !errors.Is(err, base.ErrDenied) {
		t.Errorf("in a directory that all can write: %v", err)
	}
}

// TestListenUnixModeAtBirth: a wide umask must not open the socket between bind and chmod.
func TestListenUnixModeAtBirth(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "a.sock")
	l, err := bindUnix(path, unixConfig{mode: 0o600})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // test
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestListenUnixAfterDeath: a killed owner leaves socket and lock file; both are taken over.
func TestListenUnixAfterDeath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	cmd := exec.Command(os.Args[0], "-test.run=^TestChildListens$")
	cmd.Env = append(os.Environ(), "MARU_TEST_SOCKET="+path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 5)
	if _, err := out.Read(buf); err != nil || string(buf) != "ready" {
		t.Fatalf("child said %q, %v", buf, err)
	}
	if _, err := ListenUnix(path); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), fmt.Sprintf("process %d ", cmd.Process.Pid)) {
		t.Errorf("while it lives: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := os.Lstat(path); err != nil {
		t.Fatalf("the dead left no socket: %v", err)
	}
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

func TestChildListens(t *testing.T) {
	path := os.Getenv("MARU_TEST_SOCKET")
	if path == "" {
		t.Skip("runs as a child of TestListenUnixAfterDeath")
	}
	if _, err := ListenUnix(path); err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdout.WriteString("ready")
	time.Sleep(time.Minute)
}

// TestListenUnixLiveForeign: a live socket without our lock is not taken away.
func TestListenUnixLiveForeign(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // test
	if _, err := ListenUnix(path); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), fmt.Sprintf("process %d ", os.Getpid())) {
		t.Errorf("live foreign socket: %v", err)
	}
	if _, err := os.Lstat(path + ".lock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused listener left its lock: %v", err)
	}
}

func TestSocketPath(t *testing.T) {
	for _, name := range []string{"", "..", "a/b", "/a"} {
		if _, err := SocketPath(name); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("name %q: %v", name, err)
		}
		if _, err := FindSocket(name); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("find %q: %v", name, err)
		}
	}
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	for _, d := range socketDirs()[1:] {
		if err := makeSocketDir(d); err != nil {
			t.Errorf("%s: %v", d, err)
		}
	}
	t.Cleanup(func() { _ = os.Remove(socketDirs()[2]) })
	if _, err := FindSocket("maru-test-none.sock"); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("find none: %v", err)
	}
	l, err := ListenUnix(filepath.Join(dir, "maru", "maru-test.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // test
	if got, err := FindSocket("maru-test.sock"); err != nil || got != l.Path() {
		t.Errorf("found %q, %v", got, err)
	}
}
