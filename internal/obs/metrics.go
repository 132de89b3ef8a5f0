package obs

import (
	"runtime/debug"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// LatencyBuckets are the bounds of histograms of durations, in seconds: 10 µs to 10 s, two
// and a half a decade, fine enough to tell 100 from 150 µs (docs/ARCHITECTURE.md, design points).
var LatencyBuckets = []float64{
	10e-6, 25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
	100e-3, 250e-3, 500e-3, 1, 2.5, 5, 10,
}

// SizeBuckets are the bounds of histograms of sizes, in bytes: 4 KiB to 16 GiB by fours.
var SizeBuckets = prometheus.ExponentialBuckets(4<<10, 4, 12)

// Registry holds the metrics of one program, not of the process. Names begin with "maru_".
type Registry struct {
	*prometheus.Registry
	// Make makes metrics in this registry.
	Make promauto.Factory
}

// NewRegistry makes a registry with the metrics of the Go runtime, of the process, and
// maru_build_info of the program.
func NewRegistry(program, version string) *Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	x := &Registry{Registry: r, Make: promauto.With(r)}
	goVersion := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		goVersion = info.GoVersion
	}
	x.Make.NewGaugeVec(prometheus.GaugeOpts{
		Name: "maru_build_info", Help: "1; the labels say what runs.",
	}, []string{"program", "version", "goversion"}).WithLabelValues(program, version, goVersion).Set(1)
	return x
}

// Histogram makes a histogram of durations in seconds with [LatencyBuckets].
func (r *Registry) Histogram(name, help string, labels ...string) *prometheus.HistogramVec {
	return r.Make.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: LatencyBuckets}, labels)
}

const (
	// OtherValue stands for all label values beyond a bound.
	OtherValue = "other"
	// maxLabelBytes cuts a label value that somebody chose.
	maxLabelBytes = 64
)

// Values bounds the values of a label that users or peers choose (instance ids, namespaces,
// peers): the first ones keep their name, all later ones are [OtherValue]. Concurrency:
// safe for concurrent use.
type Values struct {
	max int
	mu  struct {
		sync.RWMutex
		known map[string]string
	}
}

// NewValues bounds a label to so many values, and OtherValue.
func NewValues(maxCount int) *Values {
	v := &Values{max: maxCount}
	v.mu.known = map[string]string{}
	return v
}

// Of returns the label value for s: valid UTF-8 of at most 64 bytes.
func (v *Values) Of(s string) string {
	s = labelValue(s)
	v.mu.RLock()
	known, ok := v.mu.known[s]
	full := len(v.mu.known) >= v.max
	v.mu.RUnlock()
	switch {
	case ok:
		return known
	case full:
		return OtherValue
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if known, ok := v.mu.known[s]; ok {
		return known
	}
	if len(v.mu.known) >= v.max {
		return OtherValue
	}
	s = strings.Clone(s)
	v.mu.known[s] = s
	return s
}

// Forget makes room: the value's owner has gone and its metrics were deleted.
func (v *Values) Forget(s string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.mu.known, labelValue(s))
}

func labelValue(s string) string {
	if len(s) > maxLabelBytes {
		s = s[:maxLabelBytes]
		for len(s) > 0 && !utf8.ValidString(s[max(0, len(s)-utf8.UTFMax):]) && !utf8.RuneStart(s[len(s)-1]) {
			s = s[:len(s)-1]
		}
	}
	return strings.ToValidUTF8(s, "?")
}
