package sim

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// gcPercent: a run keeps little for long, and a collector that comes rarely makes it a
// third cheaper.
const gcPercent = 800

// Sweep plays count seeds from first on, as many at once as there are processors, each in
// one thread. It calls each with every outcome, one at a time and in no order, until that
// says no.
func Sweep(o Options, count int, each func(Result, error) bool) {
	var mu sync.Mutex
	stopped := false
	onAll(count, func(n int) bool {
		one := o
		one.Seed += uint64(n) //nolint:gosec // a count
		r, err := Run(one)
		mu.Lock()
		defer mu.Unlock()
		if !stopped {
			stopped = !each(r, err)
		}
		return !stopped
	})
}

// onAll calls f with the numbers below count, in order, as many at once as there are
// processors, until one says no; those that run then are waited for.
func onAll(count int, f func(n int) bool) {
	defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	var next atomic.Int64
	var stopped atomic.Bool
	var wait sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wait.Go(func() {
			for !stopped.Load() {
				n := int(next.Add(1)) - 1
				if n >= count {
					return
				}
				if !f(n) {
					stopped.Store(true)
				}
			}
		})
	}
	wait.Wait()
}

// FaultHunt is how the search for a planted fault went.
type FaultHunt struct {
	Fault     string  `json:"fault"`
	Rule      string  `json:"rule"`
	Found     bool    `json:"found"`
	Seeds     int     `json:"seeds"` // it took, or were played
	Seed      uint64  `json:"seed"`  // that found it
	Invariant string  `json:"invariant,omitempty"`
	Text      string  `json:"text,omitempty"`
	Seconds   float64 `json:"seconds"`
}

func (h FaultHunt) String() string {
	if !h.Found {
		return fmt.Sprintf("%-22s NOT found in %d seeds: %s", h.Fault, h.Seeds, h.Rule)
	}
	return fmt.Sprintf("%-22s found after %d seeds: %s; %s: %s", h.Fault, h.Seeds, h.Rule, h.Invariant, h.Text)
}

// Hunt plants a fault and plays seeds until one breaks something that holds without it,
// most at most, as many at once as there are processors: the first such one counts.
func Hunt(f Fault, o Options, most int) FaultHunt {
	begin := time.Now()
	h := FaultHunt{Fault: f.String(), Rule: f.Rule(), Seeds: most}
	var mu sync.Mutex
	onAll(most, func(n int) bool {
		seed := o.Seed + uint64(n) //nolint:gosec // a count
		failure := broken(Generate(seed, o.Steps, f))
		if failure == nil || broken(Generate(seed, o.Steps, NoFault)) != nil {
			return true
		}
		mu.Lock()
		defer mu.Unlock()
		if !h.Found || seed < h.Seed {
			h.Found, h.Seeds, h.Seed, h.Invariant = true, n+1, seed, failure.Invariant
			h.Text, _, _ = strings.Cut(failure.Text, "\n")
		}
		return false
	})
	h.Seconds = time.Since(begin).Seconds()
	return h
}
