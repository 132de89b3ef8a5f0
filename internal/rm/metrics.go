package rm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/rpc"
)

// glance is a picture of the state for lists, metrics and readiness. It may show
// what is not durable yet, so it never carries a capability.
type glance struct {
	pools                                      []core.Pool
	regions, sessions, holds, owners, unproved int
	commitErr                                  error
}

func (s *Server) takeGlance(commitErr error) *glance {
	return &glance{
		pools: s.core.Pools(), regions: s.core.RegionCount(), sessions: s.core.SessionCount(), holds: s.core.HoldCount(),
		owners: s.core.OwnerCount(), unproved: s.core.UnprovedCount(), commitErr: commitErr,
	}
}

// metrics is how the program is seen from outside. Label values are pool names
// only, whose number the operator sets (OBS-03).
type metrics struct {
	s        *Server
	registry *obs.Registry
	rpc      *obs.RPC
	commits  *prometheus.HistogramVec
	failures prometheus.Counter
	batch    prometheus.Histogram
	unproven *prometheus.CounterVec
	http     *obs.HTTP
	listener net.Listener
}

func newMetrics(s *Server) *metrics {
	m := &metrics{s: s, registry: obs.NewRegistry("maru-resource-manager", s.cfg.Version)}
	m.rpc = obs.NewRPC(m.registry)
	m.commits = m.registry.Histogram("maru_rm_commit_seconds", "Time of one commit to the store.")
	m.failures = m.registry.Make.NewCounter(prometheus.CounterOpts{Name: "maru_rm_commit_failures_total", Help: "Commits that failed and were tried again."})
	m.batch = m.registry.Make.NewHistogram(prometheus.HistogramOpts{
		Name: "maru_rm_batch_requests", Help: "Requests that shared one commit.", Buckets: prometheus.ExponentialBuckets(1, 2, 10),
	})
	m.unproven = m.registry.Make.NewCounterVec(prometheus.CounterOpts{
		Name: "maru_rm_owner_refusals_total", Help: "Calls refused because the caller did not prove that it is the owner it named.",
	}, []string{"method"})
	m.registry.MustRegister(&collector{s})
	return m
}

func (m *metrics) commit(took time.Duration, requests int, err error) {
	m.commits.WithLabelValues().Observe(took.Seconds())
	m.batch.Observe(float64(requests))
	if err != nil {
		m.failures.Inc()
	}
}

// listen opens the HTTP port.
func (m *metrics) listen() error {
	port := m.s.cfg.HTTPPort
	if port == NoPort {
		return nil
	}
	l, err := rpc.ListenTCP(m.s.cfg.Host, max(port, 0), m.s.cfg.Insecure)
	if err != nil {
		return fmt.Errorf("http_port: %w", err)
	}
	m.listener = l
	m.http = obs.NewHTTP(obs.HTTPOptions{Registry: m.registry, Ready: m.ready, Log: m.s.log})
	m.s.serving.Go(func() {
		if err := m.http.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) {
			m.s.log.Error("serving metrics ended", "error", err)
		}
	})
	return nil
}

func (m *metrics) ready() (obs.Readiness, string) {
	g := m.s.glance.Load()
	if g == nil {
		return obs.NotReady, "starting"
	}
	if g.commitErr != nil {
		return obs.NotReady, g.commitErr.Error()
	}
	var offline []string
	for _, p := range g.pools {
		if p.OfflineReason != "" {
			offline = append(offline, p.Name+": "+p.OfflineReason)
		}
	}
	switch {
	case len(g.pools) == 0:
		return obs.Degraded, "no pool is known: give --pool, or make a device ours with maru device init"
	case len(offline) == len(g.pools):
		return obs.NotReady, "no pool is online: " + strings.Join(offline, "; ")
	case len(offline) > 0:
		return obs.Degraded, strings.Join(offline, "; ")
	}
	return obs.Ready, ""
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

// collector shows the last glance.
type collector struct{ s *Server }

var (
	descPool = map[string]*prometheus.Desc{
		"capacity":  prometheus.NewDesc("maru_rm_pool_capacity_bytes", "Allocatable bytes of a pool.", []string{"pool"}, nil),
		"allocated": prometheus.NewDesc("maru_rm_pool_allocated_bytes", "Bytes of all regions of a pool, draining ones included.", []string{"pool"}, nil),
		"draining":  prometheus.NewDesc("maru_rm_pool_draining_bytes", "Bytes of regions that wait for their last unhold.", []string{"pool"}, nil),
		"largest":   prometheus.NewDesc("maru_rm_pool_largest_free_bytes", "Largest free piece of a pool.", []string{"pool"}, nil),
		"online":    prometheus.NewDesc("maru_rm_pool_online", "1 if the pool can be used.", []string{"pool"}, nil),
		"regions":   prometheus.NewDesc("maru_rm_pool_regions", "Regions in a pool.", []string{"pool"}, nil),
	}
	descSessions = prometheus.NewDesc("maru_rm_sessions", "Sessions on record.", nil, nil)
	descHolds    = prometheus.NewDesc("maru_rm_hold_rows", "Rows of (session, region) on record.", nil, nil)
	descOwners   = prometheus.NewDesc("maru_rm_owners", "Owners on record.", nil, nil)
	descUnproved = prometheus.NewDesc("maru_rm_owners_unproved", "Owners on record without a secret: started by an older version.", nil, nil)
	descNoProof  = prometheus.NewDesc("maru_rm_sessions_unprovable", "Sessions with holds whose end nobody can prove (maru rm holds names them).", nil, nil)
	descAgents   = prometheus.NewDesc("maru_rm_agents", "Agents of other nodes on record.", nil, nil)
	descAway     = prometheus.NewDesc("maru_rm_agents_away", "Agents that are silent: what they vouched for stays held while its end is not reported.", nil, nil)
	descStreams  = prometheus.NewDesc("maru_rm_event_streams", "Open event streams.", nil, nil)
)

// Describe is prometheus.Collector's.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range descPool {
		ch <- d
	}
	ch <- descSessions
	ch <- descHolds
	ch <- descOwners
	ch <- descUnproved
	ch <- descNoProof
	ch <- descAgents
	ch <- descAway
	ch <- descStreams
}

// Collect is prometheus.Collector's.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	g := c.s.glance.Load()
	if g == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, p := range g.pools {
		online := 1.0
		if p.OfflineReason != "" {
			online = 0
		}
		label := p.Name
		if label == "" {
			label = p.ID.String()
		}
		gauge(descPool["capacity"], float64(p.CapacityBytes), label)
		gauge(descPool["allocated"], float64(p.AllocatedBytes), label)
		gauge(descPool["draining"], float64(p.DrainingBytes), label)
		gauge(descPool["largest"], float64(p.LargestFreeBytes), label)
		gauge(descPool["online"], online, label)
		gauge(descPool["regions"], float64(p.RegionCount), label)
	}
	gauge(descSessions, float64(g.sessions))
	gauge(descHolds, float64(g.holds))
	gauge(descOwners, float64(g.owners))
	gauge(descUnproved, float64(g.unproved))
	// These go through all sessions, which is too much for every batch.
	var unprovable, agents, away int
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := c.s.do(ctx, &job{kind: jobGlance, run: func(*core.Batch) error {
		unprovable = c.s.core.UnprovableCount()
		for _, a := range c.s.core.ListAgents(nowMS()) {
			agents++
			if a.Away {
				away++
			}
		}
		return nil
	}}); err == nil {
		gauge(descNoProof, float64(unprovable))
		gauge(descAgents, float64(agents))
		gauge(descAway, float64(away))
	}
	gauge(descStreams, float64(c.s.hub.streamCount()))
}
