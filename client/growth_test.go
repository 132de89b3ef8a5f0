package client

import (
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Nothing grows with what was served: objects come and go through a real client and a
// real server, and memory, goroutines and descriptors are the same in the end as when a
// fifth was done. MARU_SOAK_OPERATIONS is how many single operations (a key stored,
// probed, viewed, given back or deleted is one); `make soak` does 10 million.
func TestRealNothingGrows(t *testing.T) {
	operations := 100_000
	if text := os.Getenv("MARU_SOAK_OPERATIONS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			t.Fatalf("MARU_SOAK_OPERATIONS is %q, allowed: a count", text)
		}
		operations = n
	}
	const batch, perKey = 1024, 5
	l := startLab(t, 64<<20)
	cfg := l.config()
	cfg.PageBytes, cfg.RegionBytes, cfg.CXLBytes, cfg.AutoExpand = 256, 2*batch*256, 2*batch*256, Off
	cfg.RPCTimeout = 10 * time.Second
	c, reader := open(t, cfg), open(t, cfg)
	pages, items := make([]Page, batch), make([]CommitItem, batch)
	codes, verdicts, views, ids := make([]base.Code, batch), make([]byte, batch), make([]View, batch), make([]uint64, batch)
	next := 0
	round := func() {
		keys := make(hot.Keys, 0, batch*base.KeyBytes)
		n, err := c.Alloc(t.Context(), batch, pages)
		if err != nil || n != batch {
			t.Fatal(n, err)
		}
		for i := range items {
			next++
			packed := keysOf(next)
			keys = append(keys, packed...)
			items[i] = CommitItem{Key: packed.At(0), Region: pages[i].Region, Index: pages[i].Index, Length: 100}
		}
		if err := c.CommitPages(t.Context(), items, codes); err != nil {
			t.Fatal(err)
		}
		want(t, "commit", codes[batch-1], base.CodeOK)
		if hits, err := reader.Probe(t.Context(), ProbeQuery{Keys: keys}, verdicts); err != nil || hits != batch {
			t.Fatal(hits, err)
		}
		if err := reader.Retrieve(t.Context(), keys, hot.ModeEach, views); err != nil {
			t.Fatal(err)
		}
		for i := range views {
			if ids[i] = views[i].ID; ids[i] == 0 {
				t.Fatalf("no view of key %d of %d", i, batch)
			}
		}
		reader.ReleaseViews(ids)
		eventually(t, "the deletes", func() bool {
			if err := reader.Delete(t.Context(), keys, codes); err != nil {
				t.Fatal(err)
			}
			for _, code := range codes {
				if code == base.CodePinned { // its release is still on the way
					return false
				}
			}
			return true
		})
		eventually(t, "the pages", func() bool { return c.Stats().PagesFree == 2*batch })
	}
	type level struct{ heap, goroutines, files uint64 }
	measure := func() (out level) {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // what finalizers and pools held
		runtime.ReadMemStats(&m)
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return level{m.HeapAlloc, uint64(runtime.NumGoroutine()), uint64(len(files))} //nolint:gosec // counts
	}
	rounds := max(operations/(batch*perKey), 5)
	for range rounds / 5 {
		round()
	}
	before := measure()
	for range rounds - rounds/5 {
		round()
	}
	after := measure()
	t.Logf("%d operations: %+v after a fifth, %+v at the end", rounds*batch*perKey, before, after)
	// Half a byte an operation at 10 million; below that the noise of a heap.
	if allowed := before.heap + 4<<20; after.heap > allowed {
		t.Errorf("the heap grew from %d to %d bytes", before.heap, after.heap)
	}
	if after.goroutines > before.goroutines+8 || after.files > before.files+8 {
		t.Errorf("goroutines %d, then %d; descriptors %d, then %d", before.goroutines, after.goroutines, before.files, after.files)
	}
	select {
	case err := <-l.srv.Failed():
		t.Error(err)
	default:
	}
}

// The first delivery of an Expand is carried out and its answer lost; the second comes when
// the epoch is over. Stale is no refusal then: the region is granted, and nobody would use
// it while the session lives.
func TestStaleSecondExpand(t *testing.T) {
	for _, medium := range []base.Medium{base.MediumCXL, base.MediumCPU} {
		t.Run(medium.String(), func(t *testing.T) {
			f := startFake(t)
			cfg := cxlConfig(f)
			cfg.RegionBytes, cfg.CXLBytes, cfg.ExpandBytes = testPage, 4*testPage, testPage
			if medium == base.MediumCPU {
				cfg.CPUBytes, cfg.Overcommit = 3*testPage, On
				cfg.WriteOrder = []base.Medium{medium}
			}
			f.expandEnds.Store(true)
			c := open(t, cfg)
			eventually(t, "the region", func() bool { return len(c.OwnedRegions()) == 1 })
			want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
			f.mu.Lock()
			shared, private := f.mu.lastRegion, f.mu.lastPrivate
			f.mu.Unlock()
			if shared+private != 1 {
				t.Fatalf("%d regions were granted, one is used", shared+private)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if _, lost := c.mu.core.LostExpand(medium); lost {
				t.Fatal("it is open still")
			}
		})
	}
}

// A region that could not be held goes back, however often the call is lost.
func TestLostReturn(t *testing.T) {
	f := startFake(t)
	f.refuseHolds.Store(true)
	f.loseReturns.Store(3)
	c := open(t, cxlConfig(f))
	eventually(t, "the calls", func() bool { return f.loseReturns.Load() < 0 })
	f.refuseHolds.Store(false)
	eventually(t, "the region", func() bool { return len(c.OwnedRegions()) == 1 })
	eventually(t, "the others given back", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		back := map[uint32]bool{}
		for _, r := range f.mu.returned {
			back[r.GetRegionId()] = true
		}
		for id := range f.mu.regions {
			if id != c.OwnedRegions()[0] && !back[uint32(id)] {
				return false
			}
		}
		return true
	})
}
