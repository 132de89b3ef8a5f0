package obs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/xcena-dev/maru/internal/base"
)

// Readiness says whether a process can do its work.
type Readiness uint8

// Kinds of readiness.
const (
	NotReady Readiness = iota
	Ready
	Degraded // it works, but not all of it (a server without its resource manager)
)

func (r Readiness) String() string {
	switch r {
	case NotReady:
		return "not ready"
	case Ready:
		return "ok"
	case Degraded:
		return "degraded"
	}
	return fmt.Sprintf("readiness(%d)", uint8(r))
}

// HTTPOptions of the server for operators.
type HTTPOptions struct {
	Registry *Registry
	// Ready says how the process is; reason is shown when it is not simply ready. It must
	// answer from memory. Nil: always ready.
	Ready func() (r Readiness, reason string)
	// Pages are further handlers by pattern ("GET /").
	Pages map[string]http.Handler
	Log   *slog.Logger
}

const (
	maxHTTPHeaderBytes     = 16 << 10
	maxHTTPConnectionCount = 64
	maxScrapeCount         = 4
	// httpWriteTimeout is above the longest profile that pprof takes by default (30 s).
	httpWriteTimeout = 90 * time.Second
)

// HTTP serves /metrics, /healthz, /readyz and, to this machine only, /debug/pprof.
type HTTP struct {
	server *http.Server
	log    *slog.Logger
}

// NewHTTP makes a server; Serve runs it.
func NewHTTP(o HTTPOptions) *HTTP {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(o.Registry.Registry, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn),
		MaxRequestsInFlight: maxScrapeCount,
		Timeout:             10 * time.Second,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { plain(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { ready(w, o.Ready) })
	mux.Handle("/debug/pprof/", localOnly(http.HandlerFunc(pprof.Index)))
	mux.Handle("/debug/pprof/cmdline", localOnly(http.HandlerFunc(pprof.Cmdline)))
	mux.Handle("/debug/pprof/profile", localOnly(http.HandlerFunc(pprof.Profile)))
	mux.Handle("/debug/pprof/symbol", localOnly(http.HandlerFunc(pprof.Symbol)))
	mux.Handle("/debug/pprof/trace", localOnly(http.HandlerFunc(pprof.Trace)))
	for pattern, h := range o.Pages {
		mux.Handle(pattern, h)
	}
	return &HTTP{log: o.Log, server: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      httpWriteTimeout,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    maxHTTPHeaderBytes,
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelWarn),
	}}
}

func plain(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text + "\n"))
}

func ready(w http.ResponseWriter, f func() (Readiness, string)) {
	state, reason := Ready, ""
	if f != nil {
		state, reason = f()
	}
	text := state.String()
	if reason != "" {
		text += ": " + reason
	}
	status := http.StatusOK
	if state == NotReady {
		status = http.StatusServiceUnavailable
	}
	plain(w, status, text)
}

// localOnly lets only this machine through. The Host header is looked at too: a page that a
// browser on this machine got from elsewhere must not read profiles under its own name.
func localOnly(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLocal(r.RemoteAddr) || !isLocal(r.Host) {
			plain(w, http.StatusForbidden, "/debug/pprof is served to 127.0.0.1 only")
			return
		}
		h.ServeHTTP(w, r)
	})
}

func isLocal(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = strings.Trim(address, "[]")
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// Serve answers on l until Shutdown, and closes l. Errors: ErrUnavailable.
func (h *HTTP) Serve(l net.Listener) error {
	err := h.server.Serve(limit(l, maxHTTPConnectionCount))
	if err == nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("%w: HTTP on %s: %w", base.ErrUnavailable, l.Addr(), err)
}

// Shutdown lets requests in flight end until ctx is done, then cuts them.
func (h *HTTP) Shutdown(ctx context.Context) {
	if err := h.server.Shutdown(ctx); err != nil {
		_ = h.server.Close()
	}
}
