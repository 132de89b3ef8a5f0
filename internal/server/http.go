package server

import (
	"context"
	"net"
	"net/http"

	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/rpc"
)

// httpServer serves metrics, health and the status page.
type httpServer struct {
	server   *Server
	http     *obs.HTTP
	listener *net.TCPListener
}

func newHTTPServer(s *Server) (*httpServer, error) {
	l, err := rpc.ListenTCP(s.cfg.Host, max(s.cfg.HTTPPort, 0), s.cfg.Insecure)
	if err != nil {
		return nil, err
	}
	return &httpServer{server: s, listener: l, http: obs.NewHTTP(obs.HTTPOptions{
		Registry: s.metrics.registry, Ready: s.readiness, Log: s.log,
		Pages: map[string]http.Handler{"GET /{$}": http.HandlerFunc(s.serveStatus)},
	})}, nil
}

func (h *httpServer) serve() {
	if err := h.http.Serve(h.listener); err != nil && h.server.ctx.Err() == nil {
		h.server.log.Error("metrics and health are not served any more", "error", err)
	}
}

func (h *httpServer) close(ctx context.Context) {
	h.http.Shutdown(ctx)
	_ = h.listener.Close()
}

func (h *httpServer) address() string { return h.listener.Addr().String() }

// readiness: a server without its resource manager is ready, and says degraded.
func (s *Server) readiness() (obs.Readiness, string) {
	degraded, err := s.Ready()
	switch {
	case err != nil:
		return obs.NotReady, err.Error()
	case degraded != "":
		return obs.Degraded, degraded
	}
	return obs.Ready, ""
}
