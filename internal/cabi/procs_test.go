package cabi_test

import (
	"runtime"
	"testing"

	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/cabi/cabitest"
)

// TestGoMaxProcs: the highest request counts, and none is undone by a later client.
func TestGoMaxProcs(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	l := cabi.NewLibrary(cabitest.NewStore().Open)
	for _, c := range []struct{ ask, want int }{{0, before}, {3, 3}, {2, 3}, {0, 3}, {5, 5}} {
		if c.ask == 0 && before > 8 && c.want == before {
			continue // a machine with many CPUs gets the library's own default
		}
		h, err := l.Open(opaqueConfig(map[string]any{"go_max_procs": c.ask}))
		if err != nil {
			t.Fatal(err)
		}
		if got := runtime.GOMAXPROCS(0); got != c.want {
			t.Errorf("asked for %d: %d threads, want %d", c.ask, got, c.want)
		}
		if err := l.Close(h, 0); err != nil {
			t.Error(err)
		}
	}
}

// TestHotCallsAllocateLittle: a probe of a batch allocates nothing of its size.
func TestHotCallsAllocateLittle(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	ks := make([]byte, 512*32)
	verdicts := make([]byte, 512)
	views := make([]cabi.View, 512)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := l.Probe(h, ks, 0, nil, 0, verdicts, 0); err != nil {
			t.Fatal(err)
		}
	}); n > 2 {
		t.Errorf("%v allocations a probe of 512 keys", n)
	}
	if n := testing.AllocsPerRun(100, func() {
		if err := l.Retrieve(h, ks, 0, views, 0); err != nil {
			t.Fatal(err)
		}
	}); n > 4 {
		t.Errorf("%v allocations a retrieve of 512 keys", n)
	}
}
