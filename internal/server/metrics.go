package server

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/obs"
)

// metrics are the server's own; every label has a closed set of values (OBS-03).
type metrics struct {
	registry       *obs.Registry
	rpc            *obs.RPC
	hotConnections prometheus.Gauge
	hotRejects     *prometheus.CounterVec
	hotRequests    [hot.OpRequests + 1]prometheus.Counter
	hotKeys        [hot.OpRequests + 1]prometheus.Counter
	hotErrors      *prometheus.CounterVec
	openRefused    *prometheus.CounterVec
	sessionEvents  *prometheus.CounterVec
	rmEffects      *prometheus.CounterVec
	panics         prometheus.Counter
	expands        *prometheus.CounterVec
}

func newMetrics(version string) *metrics {
	r := obs.NewRegistry("maru-server", version)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "maru_server_" + name, Help: help}, labels)
		r.MustRegister(c)
		return c
	}
	m := &metrics{
		registry:       r,
		rpc:            obs.NewRPC(r),
		hotConnections: prometheus.NewGauge(prometheus.GaugeOpts{Name: "maru_server_hot_connections", Help: "Open connections of the hot plane."}),
		hotRejects:     counter("hot_rejects_total", "Hot connections that the server cut, by reason.", "reason"),
		hotErrors:      counter("hot_errors_total", "Requests of the hot plane answered with an error, by code.", "code"),
		openRefused:    counter("open_refused_total", "Opens that were refused, by code.", "code"),
		sessionEvents:  counter("session_changes_total", "Changes of sessions, by kind.", "kind"),
		rmEffects:      counter("rm_calls_total", "Background calls to the resource manager, by kind and outcome.", "kind", "outcome"),
		expands:        counter("expands_total", "Regions asked for, by medium and outcome.", "medium", "outcome"),
		panics:         prometheus.NewCounter(prometheus.CounterOpts{Name: "maru_server_panics_total", Help: "Recovered panics; each is a bug."}),
	}
	r.MustRegister(m.hotConnections, m.panics)
	requests := counter("hot_requests_total", "Requests of the hot plane, by operation.", "op")
	keys := counter("hot_keys_total", "Keys and rows in requests of the hot plane, by operation.", "op")
	for op := hot.OpProbe; op <= hot.OpRequests; op++ {
		m.hotRequests[op] = requests.WithLabelValues(op.String())
		m.hotKeys[op] = keys.WithLabelValues(op.String())
	}
	return m
}
