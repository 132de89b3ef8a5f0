package agent

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/rpc"
)

// metrics is how the program is seen from outside.
type metrics struct {
	a        *Agent
	registry *obs.Registry
	rpc      *obs.RPC
	refused  prometheus.Counter
	reported *prometheus.CounterVec
	http     *obs.HTTP
	listener net.Listener
}

func newMetrics(a *Agent) *metrics {
	m := &metrics{a: a, registry: obs.NewRegistry("maru-remote-cxl-agent", a.cfg.Version)}
	m.rpc = obs.NewRPC(m.registry)
	m.refused = m.registry.Make.NewCounter(prometheus.CounterOpts{Name: "maru_agent_bind_refusals_total", Help: "Sessions that were not bound; their end is not provable."})
	m.reported = m.registry.Make.NewCounterVec(prometheus.CounterOpts{
		Name: "maru_agent_ends_reported_total", Help: "Processes whose end the resource manager acknowledged.",
	}, []string{"proof"})
	gauge := func(name, help string, of func(c counts) int) {
		m.registry.Make.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return float64(of(a.counts())) })
	}
	gauge("maru_agent_sessions", "Sessions on record.", func(c counts) int { return c.sessions })
	gauge("maru_agent_processes", "Processes on record.", func(c counts) int { return c.processes })
	gauge("maru_agent_ends_pending", "Processes that have ended and whose end the resource manager has not acknowledged.", func(c counts) int { return c.gone })
	gauge("maru_agent_processes_lost", "Processes that cannot be found any more: their holds stay.", func(c counts) int { return c.lost })
	gauge("maru_agent_rm_connected", "1 if the resource manager is there and takes reports.", func(c counts) int { return c.connected })
	return m
}

type counts struct{ sessions, processes, gone, lost, connected int }

func (a *Agent) counts() counts {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := counts{sessions: len(a.mu.sessions), processes: len(a.mu.processes)}
	for _, x := range a.mu.processes {
		switch x.state {
		case isWatched:
		case isGone:
			c.gone++
		case isLost:
			c.lost++
		}
	}
	if a.mu.api != nil {
		c.connected = 1
	}
	return c
}

// Ready says how the agent is. Without its resource manager it does half of its work:
// it sees ends, and reports them later. One that is not taken for its node's agent does
// none.
func (a *Agent) Ready() (obs.Readiness, string) {
	c := a.counts()
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.mu.unproven:
		return obs.NotReady, a.mu.reason
	case a.mu.api == nil:
		return obs.Degraded, a.mu.reason
	case !a.mu.reported:
		return obs.Degraded, "the first report is under way"
	case c.lost > 0:
		return obs.Degraded, fmt.Sprintf("%d processes on record cannot be found any more (maru rm holds names them)", c.lost)
	}
	return obs.Ready, ""
}

// listen opens the HTTP port.
func (m *metrics) listen() error {
	if m.a.cfg.HTTPPort == NoPort {
		return nil
	}
	l, err := rpc.ListenTCP(m.a.cfg.Host, max(m.a.cfg.HTTPPort, 0), m.a.cfg.Insecure)
	if err != nil {
		return fmt.Errorf("http_port: %w", err)
	}
	m.listener = l
	m.http = obs.NewHTTP(obs.HTTPOptions{Registry: m.registry, Ready: m.a.Ready, Log: m.a.log})
	m.a.serving.Go(func() {
		if err := m.http.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
			m.a.log.Error("serving metrics ended", "error", err)
		}
	})
	return nil
}

func (m *metrics) address() string {
	if m.listener == nil {
		return ""
	}
	return m.listener.Addr().String()
}

func (m *metrics) close() {
	if m.http == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	m.http.Shutdown(ctx)
}
