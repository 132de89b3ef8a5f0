package obs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

func TestNewLogger(t *testing.T) {
	var b bytes.Buffer
	l, err := NewLogger(&b, LogOptions{Format: "json", Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	l.Info("no")
	l.Warn("yes", "n", 1)
	var line map[string]any
	if err := json.Unmarshal(b.Bytes(), &line); err != nil || line["msg"] != "yes" || line["n"] != 1.0 {
		t.Errorf("%s: %v", b.String(), err)
	}
	b.Reset()
	if l, err = NewLogger(&b, LogOptions{}); err != nil {
		t.Fatal(err)
	}
	l.Debug("no")
	l.Info("yes")
	if !strings.Contains(b.String(), "msg=yes") || strings.Contains(b.String(), "no") {
		t.Errorf("%s", b.String())
	}
	for _, o := range []LogOptions{{Format: "xml"}, {Level: "loud"}} {
		if _, err := NewLogger(&b, o); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestLimited(t *testing.T) {
	var b bytes.Buffer
	now := time.Unix(1000, 0)
	l := Limited(slog.New(slog.NewTextHandler(&b, nil)), time.Second)
	l.now = func() time.Time { return now }
	for range 10 {
		l.Warn("a", "first")
	}
	l.Error("b", "other")
	l.Debug("c", "below the level")
	now = now.Add(time.Second)
	l.Warn("a", "again", "x", 1)
	now = now.Add(time.Second)
	l.Info("a", "clean")
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != 4 || !strings.Contains(lines[2], "x=1 suppressed=9") || strings.Contains(lines[3], "suppressed") {
		t.Errorf("%s", b.String())
	}
	if len(l.mu.keys) != 2 {
		t.Errorf("a line below the level takes a key: %v", l.mu.keys)
	}
}

func TestLimitedIsBounded(t *testing.T) {
	var b bytes.Buffer
	now := time.Unix(1000, 0)
	l := Limited(slog.New(slog.NewTextHandler(&b, nil)), time.Second)
	l.now = func() time.Time { return now }
	for i := range 3 * maxLimitedKeyCount {
		l.Warn(fmt.Sprint(i), "m")
	}
	if n := len(l.mu.keys); n != maxLimitedKeyCount {
		t.Errorf("%d keys", n)
	}
	if n := strings.Count(b.String(), "\n"); n != maxLimitedKeyCount+1 {
		t.Errorf("%d lines", n)
	}
	now = now.Add(time.Minute)
	b.Reset()
	l.Warn("new", "m")
	if n := len(l.mu.keys); n != 1 || b.Len() == 0 {
		t.Errorf("%d keys after a while, %q", n, b.String())
	}
}

func TestLimitedConcurrent(t *testing.T) {
	l := Limited(slog.New(slog.NewTextHandler(io.Discard, nil)), time.Microsecond)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 1000 {
				l.Warn(fmt.Sprint(i, j%300), "m", "j", j)
			}
		})
	}
	wg.Wait()
}

func TestValues(t *testing.T) {
	v := NewValues(2)
	if v.Of("a") != "a" || v.Of("b") != "b" || v.Of("c") != OtherValue || v.Of("a") != "a" {
		t.Error("the first two keep their name, others do not")
	}
	v.Forget("a")
	if v.Of("c") != "c" || v.Of("a") != OtherValue {
		t.Error("forgetting makes room")
	}
	long := NewValues(10)
	for _, s := range []string{strings.Repeat("x", 1000), strings.Repeat("é", 1000), "a" + strings.Repeat("é", 1000), "\xff\xfe", ""} {
		if got := long.Of(s); len(got) > maxLabelBytes+3 || !utf8.ValidString(got) {
			t.Errorf("%.10q became %q", s, got)
		}
	}
}

// start serves and returns the base URL and the server.
func start(t *testing.T, o HTTPOptions) (string, *HTTP) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHTTP(o)
	done := make(chan error, 1)
	go func() { done <- h.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		h.Shutdown(ctx)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String(), h
}

// get asks without keeping the connection.
func get(t *testing.T, url string) (int, string) {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	c := &http.Client{Transport: tr, Timeout: 10 * time.Second}
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close() //nolint:errcheck // test
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// TestTwoInOneProcess: two servers with the same metric names, each with its own values.
func TestTwoInOneProcess(t *testing.T) {
	var urls []string
	for i := range 2 {
		r := NewRegistry(fmt.Sprintf("program-%d", i), "1.2.3")
		r.Histogram("maru_test_seconds", "Test.", "op").WithLabelValues("x").Observe(float64(i))
		NewRPC(r)
		url, _ := start(t, HTTPOptions{Registry: r})
		urls = append(urls, url)
	}
	for i, url := range urls {
		status, text := get(t, url+"/metrics")
		for _, part := range []string{
			fmt.Sprintf(`program="program-%d"`, i), fmt.Sprintf("maru_test_seconds_sum{op=\"x\"} %d", i), "go_goroutines",
			`maru_test_seconds_bucket{op="x",le="0.00015"}`,
		} {
			if status != 200 || !strings.Contains(text, part) {
				t.Errorf("status %d, %q is missing", status, part)
			}
		}
		if strings.Contains(text, fmt.Sprintf("program-%d", 1-i)) {
			t.Error("metrics of the other server")
		}
	}
}

func TestHealthAndReadiness(t *testing.T) {
	state, reason := NotReady, "reading the store"
	url, _ := start(t, HTTPOptions{
		Registry: NewRegistry("p", "v"),
		Ready:    func() (Readiness, string) { return state, reason },
		Pages:    map[string]http.Handler{"GET /{$}": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("page")) })},
	})
	expect := func(path string, status int, text string) {
		t.Helper()
		if s, b := get(t, url+path); s != status || strings.TrimSpace(b) != text {
			t.Errorf("%s: %d %q", path, s, b)
		}
	}
	expect("/healthz", 200, "ok")
	expect("/readyz", 503, "not ready: reading the store")
	state, reason = Degraded, "no resource manager"
	expect("/readyz", 200, "degraded: no resource manager")
	state, reason = Ready, ""
	expect("/readyz", 200, "ok")
	expect("/", 200, "page")
	expect("/none", 404, "404 page not found")
	if s, _ := get(t, url+"/debug/pprof/cmdline"); s != 200 {
		t.Errorf("pprof: %d", s)
	}
}

func TestPprofIsLocal(t *testing.T) {
	h := NewHTTP(HTTPOptions{Registry: NewRegistry("p", "v")}).server.Handler
	cases := []struct {
		remote, host string
		status       int
	}{
		{"127.0.0.1:1", "127.0.0.1:15555", 200},
		{"[::1]:1", "localhost:15555", 200},
		{"127.0.0.1:1", "[::1]", 200},
		{"192.0.2.1:1", "127.0.0.1", 403},
		{"127.0.0.1:1", "evil.example:15555", 403},
		{"", "", 403},
	}
	for _, c := range cases {
		r := httptest.NewRequest(http.MethodGet, "/debug/pprof/cmdline", nil)
		r.RemoteAddr, r.Host = c.remote, c.host
		r.Header.Set("X-Forwarded-For", "127.0.0.1")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("%+v: %d", c, w.Code)
		}
	}
}

func TestShutdownIsGraceful(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	url, h := start(t, HTTPOptions{Registry: NewRegistry("p", "v"), Pages: map[string]http.Handler{
		"GET /slow": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(entered)
			<-leave
			_, _ = w.Write([]byte("whole"))
		}),
	}})
	answer := make(chan string, 1)
	go func() {
		_, b := get(t, url+"/slow")
		answer <- b
	}()
	<-entered
	down := make(chan struct{})
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		h.Shutdown(ctx)
		close(down)
	}()
	select {
	case <-down:
		t.Error("did not wait for a request in flight")
	case <-time.After(50 * time.Millisecond):
	}
	close(leave)
	if b := <-answer; b != "whole" {
		t.Errorf("answer %q", b)
	}
	<-down
}

func TestConnectionsAreBounded(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := limit(inner, 2)
	accepted := make(chan net.Conn)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	c1, c2 := dial(), dial()
	s1, s2 := <-accepted, <-accepted
	c3 := dial()
	_ = c3.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c3.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a third connection: %v", err)
	}
	_ = s1.Close()
	_ = s1.Close()
	c4 := dial()
	s4 := <-accepted
	for _, c := range []io.Closer{c1, c2, c3, c4, s2, s4, inner} {
		_ = c.Close()
	}
	<-done
}

func TestRPCMetrics(t *testing.T) {
	r := NewRegistry("p", "v")
	m := NewRPC(r)
	info := &grpc.UnaryServerInfo{FullMethod: "/maru.v1.X/Y"}
	_, err := m.Unary(context.Background(), nil, info, func(context.Context, any) (any, error) { return nil, base.ErrFull })
	if !errors.Is(err, base.ErrFull) {
		t.Errorf("%v", err)
	}
	_ = m.Stream(nil, nil, &grpc.StreamServerInfo{FullMethod: "/maru.v1.X/Z"}, func(any, grpc.ServerStream) error { return nil })
	m.Panic("/maru.v1.X/Y")
	url, _ := start(t, HTTPOptions{Registry: r})
	_, text := get(t, url+"/metrics")
	for _, part := range []string{
		`maru_rpc_total{code="full",method="/maru.v1.X/Y"} 1`, `maru_rpc_total{code="internal error",method="/maru.v1.X/Y"} 1`,
		`maru_rpc_total{code="ok",method="/maru.v1.X/Z"} 1`, `maru_rpc_panics_total{method="/maru.v1.X/Y"} 1`,
		`maru_rpc_seconds_count{method="/maru.v1.X/Y"} 1`,
	} {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing", part)
		}
	}
}
