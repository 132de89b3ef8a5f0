package sim

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// gcPercent: a run keeps little for long, and a collector that comes rarely makes it a
// third cheaper.
const gcPercent = 800

// Sweep plays count seeds from first on, as many at once as there are processors, each in
// one thread. It calls each with every outcome, one at a time and in no order, until that
// says no.
func Sweep(o Options, count int, each func(Result, error) bool) {
	defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	var mu struct {
		sync.Mutex
		next    int
		stopped bool
	}
	var wait sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wait.Go(func() {
			for {
				mu.Lock()
				n, stopped := mu.next, mu.stopped
				mu.next++
				mu.Unlock()
				if n >= count || stopped {
					return
				}
				one := o
				one.Seed += uint64(n) //nolint:gosec // a count
				r, err := Run(one)
				mu.Lock()
				if !mu.stopped {
					mu.stopped = !each(r, err)
				}
				mu.Unlock()
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
// most at most.
func Hunt(f Fault, o Options, most int) FaultHunt {
	begin := time.Now()
	h := FaultHunt{Fault: f.String(), Rule: f.Rule()}
	defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	for ; h.Seeds < most && !h.Found; o.Seed++ {
		h.Seeds++
		failure := broken(Generate(o.Seed, o.Steps, f))
		if failure != nil && broken(Generate(o.Seed, o.Steps, NoFault)) == nil {
			h.Found, h.Seed, h.Invariant = true, o.Seed, failure.Invariant
			h.Text, _, _ = strings.Cut(failure.Text, "\n")
		}
	}
	h.Seconds = time.Since(begin).Seconds()
	return h
}
