package server

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

func (s *Server) usage() directory.Usage {
	var u directory.Usage
	_ = s.look(func(d *directory.Directory, now time.Duration) error {
		u = d.Usage(now)
		return nil
	})
	return u
}

// Usage reports capacity and counts. It needs no session.
func (c *control) Usage(_ context.Context, _ *maruv1.UsageRequest) (*maruv1.UsageResponse, error) {
	s := c.server
	u := s.usage()
	reason, degraded := s.degraded()
	answer := &maruv1.UsageResponse{
		Objects: u.Objects, Namespaces: uint64(max(u.Namespaces, 0)), //nolint:gosec // a count
		Counters: counterMap(&u), Degraded: degraded, Reason: reason,
	}
	media := &maruv1.MediumUsage{}
	for i := range u.Pools {
		media.Pools = append(media.Pools, s.poolUsage(&u.Pools[i]))
	}
	// RPC-06: a cpu-only server says cpu_storage, one with both media l1_storage.
	if s.cfg.CPUOnly {
		answer.CpuStorage = media
	} else {
		answer.L1Storage = media
	}
	for i := range u.Sessions {
		x := &u.Sessions[i]
		answer.Sessions = append(answer.Sessions, &maruv1.SessionUsage{
			SessionId: x.Session[:], EngineId: x.EngineID, InstanceId: x.Instance, Role: maruv1.Role(x.Role), State: x.State.String(),
			Epoch: uint32(x.Epoch), NamespaceId: x.Namespace[:], Leases: uint64(max(x.Leases, 0)), Regions: uint64(max(x.Regions, 0)), //nolint:gosec // counts
			Provable: x.Provable,
		})
	}
	return answer, nil
}

func (s *Server) poolUsage(p *directory.PoolUsage) *maruv1.PoolUsage {
	out := &maruv1.PoolUsage{
		Pool: s.describePool(&p.Grant.Pool, p.Grant.Private), CapacityBytes: p.CapacityBytes, ReservedBytes: p.ReservedBytes,
		AllocatedBytes: p.AllocatedBytes, WritingBytes: p.WritingBytes, ReadyBytes: p.ReadyBytes, ReadyAllocatedBytes: p.ReadyAllocatedBytes,
		RetiringBytes: p.RetiringBytes, QuarantinedBytes: p.QuarantinedBytes, PinnedBytes: p.PinnedBytes, GrantedBytes: p.GrantedBytes,
		Objects: p.Objects, Leases: p.Leases, KeptBytes: p.KeptBytes,
	}
	if p.Session != (base.SessionID{}) {
		out.SessionId = p.Session[:]
	}
	return out
}

func counterMap(u *directory.Usage) map[string]uint64 {
	c := &u.Counters
	return map[string]uint64{
		"commits": c.Commits, "commits_present": c.CommitsPresent, "commits_refused": c.CommitsRefused,
		"hits": c.Hits, "misses": c.Misses, "replicas_retired": c.ReplicasRetired, "pages_reclaimed": c.PagesReclaimed,
		"keys_deleted": c.KeysDeleted, "regions_freed": c.RegionsFreed, "regions_evicted": c.RegionsEvicted,
		"sessions_expired": c.SessionsExpired, "sessions_fenced": c.SessionsFenced, "sessions_gone": c.SessionsGone,
		"requests_dropped": c.RequestsDropped, "requests_expired": c.RequestsExpired, "events_dropped": c.EventsDropped,
		"relist_kept": c.RelistKept, "relist_refused": c.RelistRefused, "uses_refused": c.UsesRefused, "uses_over_granted": c.UsesOverGranted,
	}
}

// usageCollector shows the directory in /metrics: by medium and state, never by
// session or object (OBS-03).
type usageCollector struct {
	server   *Server
	bytes    *prometheus.Desc
	objects  *prometheus.Desc
	sessions *prometheus.Desc
	events   *prometheus.Desc
	table    *prometheus.Desc
	waiting  *prometheus.Desc
	degraded *prometheus.Desc
}

func newUsageCollector(s *Server) *usageCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("maru_server_"+name, help, labels, nil)
	}
	return &usageCollector{
		server:   s,
		bytes:    desc("pool_bytes", "Bytes of all pools of a medium, by what they are.", "medium", "state"),
		objects:  desc("objects", "Objects in the directory."),
		sessions: desc("sessions", "Sessions, by state.", "state"),
		events:   desc("directory_total", "What the directory has done, by kind.", "kind"),
		table:    desc("table_bytes", "Memory that the directory's table has committed."),
		waiting:  desc("recovered_regions_waiting", "Regions of before the restart that wait for their holders."),
		degraded: desc("degraded", "1 while the resource manager is away."),
	}
}

// Describe implements prometheus.Collector.
func (c *usageCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.bytes, c.objects, c.sessions, c.events, c.table, c.waiting, c.degraded} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *usageCollector) Collect(ch chan<- prometheus.Metric) {
	u := c.server.usage()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	type key struct{ medium, state string }
	sums := make(map[key]uint64)
	for i := range u.Pools {
		p := &u.Pools[i]
		m := p.Grant.Pool.Medium.String()
		for state, v := range map[string]uint64{
			"capacity": p.CapacityBytes, "reserved": p.ReservedBytes, "granted": p.GrantedBytes, "writing": p.WritingBytes,
			"ready": p.ReadyBytes, "ready_allocated": p.ReadyAllocatedBytes, "retiring": p.RetiringBytes,
			"quarantined": p.QuarantinedBytes, "pinned": p.PinnedBytes, "kept": p.KeptBytes,
		} {
			sums[key{m, state}] += v
		}
	}
	for k, v := range sums {
		gauge(c.bytes, float64(v), k.medium, k.state)
	}
	states := make(map[string]int)
	for i := range u.Sessions {
		states[u.Sessions[i].State.String()]++
	}
	for st := directory.StateLive; st <= directory.StateAwaited; st++ {
		gauge(c.sessions, float64(states[st.String()]), st.String())
	}
	for kind, v := range counterMap(&u) {
		ch <- prometheus.MustNewConstMetric(c.events, prometheus.CounterValue, float64(v), kind)
	}
	gauge(c.objects, float64(u.Objects))
	gauge(c.table, float64(u.TableBytes))
	gauge(c.waiting, float64(u.Waiting))
	_, away := c.server.degraded()
	value := 0.0
	if away {
		value = 1
	}
	gauge(c.degraded, value)
}
