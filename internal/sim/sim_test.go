package sim

import (
	"flag"
	"fmt"
	"testing"
)

var (
	oneSeed   = flag.Uint64("sim.seed", 0, "play this seed alone and print its events")
	seedCount = flag.Int("sim.seeds", 0, "seeds to play; 0: 500, 60 with -short, 20 under the race detector")
	firstSeed = flag.Uint64("sim.first", 1, "the first seed")
)

// Every seed must end with all invariants whole and every byte back.
func TestSeeds(t *testing.T) {
	if *oneSeed != 0 {
		r, err := Run(Options{Seed: *oneSeed, Trace: func(line string) { fmt.Println(line) }})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", r)
		return
	}
	count := 500
	switch {
	case raceDetector:
		count = 20
	case testing.Short():
		count = 60
	}
	if *seedCount > 0 {
		count = *seedCount
	}
	var sum Result
	failures := 0
	for i := range count {
		r, err := Run(Options{Seed: *firstSeed + uint64(i)}) //nolint:gosec // a count
		if err != nil {
			if failures++; failures <= 5 {
				t.Error(err)
			}
			continue
		}
		sum.Add(r)
	}
	t.Logf("%d seeds, %d failures: %+v", count, failures, sum)
	if failures == 0 && (sum.Reads == 0 || sum.Views == 0 || sum.Unknown == 0 || sum.ReadsDiscarded == 0 || sum.ManagerRestarts == 0 || sum.ServerRestarts == 0 ||
		sum.Left == 0 || sum.Listed == 0 || sum.Kept == 0) {
		t.Errorf("the runs do not reach what they are for: %+v", sum)
	}
}

// A seed replays its run, event by event.
func TestReplay(t *testing.T) {
	for seed := uint64(1); seed <= 5; seed++ {
		var first []string
		a, errA := Run(Options{Seed: seed, Trace: func(l string) { first = append(first, l) }})
		i := 0
		b, errB := Run(Options{Seed: seed, Trace: func(l string) {
			if i < len(first) && first[i] != l && !t.Failed() {
				t.Errorf("seed %d, line %d: %q, then %q", seed, i, first[i], l)
			}
			i++
		}})
		if a != b || (errA == nil) != (errB == nil) {
			t.Errorf("seed %d: %+v, then %+v", seed, a, b)
		}
	}
}

// Each planted error is found. The log says how many seeds it took.
func TestFaultsAreFound(t *testing.T) {
	if raceDetector {
		t.Skip("one goroutine: `go test` without -race plays the planted faults")
	}
	most := uint64(300)
	for _, f := range Faults() {
		t.Run(f.String(), func(t *testing.T) {
			for n := uint64(1); n <= most; n++ {
				if _, err := Run(Options{Seed: 1000 + n, Fault: f}); err != nil {
					if _, without := Run(Options{Seed: 1000 + n}); without != nil {
						t.Fatalf("without the fault: %v", without)
					}
					failure := err.(*Failure) //nolint:forcetypeassert,errorlint // Run gives no other
					t.Logf("found after %d seeds: %s: %s", n, failure.Invariant, failure.Text)
					return
				}
			}
			t.Errorf("not found in %d seeds", most)
		})
	}
}
