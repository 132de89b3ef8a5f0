package client

import (
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// TestNoAllocationPerObject compares batches of two sizes: what an object costs is the
// difference. The server, which runs in this process too, counts with it.
func TestNoAllocationPerObject(t *testing.T) {
	if invariants.Enabled {
		t.Skip("assertions allocate their arguments")
	}
	l := startLab(t, 0)
	cfg := l.config()
	cfg.CXLBytes, cfg.RegionBytes, cfg.CPUBytes, cfg.Overcommit = 0, 0, 64*testPage, On
	cfg.CopyThreads = 2
	c := open(t, cfg)
	const small, large = 4, 60
	var loads []LoadItem
	var q ProbeQuery
	for i := range large {
		v := value(i, 1000)
		want(t, "store", storeOne(t, c, i, v), base.CodeOK)
		loads = append(loads, LoadItem{Key: key(i), Runs: [][]byte{v}})
		k := key(i)
		q.Keys = append(q.Keys, k[:]...)
	}
	codes, verdicts := make([]base.Code, large), make([]byte, large)
	load := func(n int) func() {
		return func() {
			if err := c.Load(t.Context(), loads[:n], codes); err != nil || codes[n-1] != base.CodeOK {
				t.Fatal(err, codes[:n])
			}
		}
	}
	probe := func(n int) func() {
		return func() {
			part := q
			part.Keys = q.Keys[:n*base.KeyBytes]
			if lead, err := c.Probe(t.Context(), part, verdicts); err != nil || lead != n {
				t.Fatal(lead, err)
			}
		}
	}
	for name, f := range map[string]func(int) func(){"load": load, "probe": probe} {
		f(large)()
		a, b := testing.AllocsPerRun(200, f(small)), testing.AllocsPerRun(200, f(large))
		if per := (b - a) / (large - small); per > 0.2 {
			t.Errorf("%s: %.1f allocations for %d objects, %.1f for %d", name, a, small, b, large)
		}
		t.Logf("%s: %.1f allocations for %d objects, %.1f for %d", name, a, small, b, large)
	}
}
