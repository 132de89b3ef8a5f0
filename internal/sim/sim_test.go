package sim

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

var (
	oneSeed   = flag.Uint64("sim.seed", 0, "play this seed alone and print its events")
	seedCount = flag.Int("sim.seeds", 0, "seeds to play; 0: 20 000, 400 with -short; under the race detector 500, 20 with -short")
	firstSeed = flag.Uint64("sim.first", 1, "the first seed")
)

func TestMain(m *testing.M) {
	flag.Parse()
	debug.SetGCPercent(gcPercent)
	os.Exit(m.Run())
}

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
	count := 20000
	switch {
	case raceDetector && testing.Short():
		count = 20
	case raceDetector:
		count = 500
	case testing.Short():
		count = 400
	}
	if *seedCount > 0 {
		count = *seedCount
	}
	var sum Result
	failures := 0
	Sweep(Options{Seed: *firstSeed}, count, func(r Result, err error) bool {
		if err != nil {
			if failures++; failures <= 5 {
				t.Error(err)
			}
			return true
		}
		sum.Add(r)
		return true
	})
	t.Logf("%d seeds, %d failures: %+v", count, failures, sum)
	for name, n := range map[string]int{
		"reads": sum.Reads, "reads discarded": sum.ReadsDiscarded, "views": sum.Views, "commits without answer": sum.Unknown,
		"restarts of the RM": sum.ManagerRestarts, "restarts of the server": sum.ServerRestarts, "sessions left": sum.Left, "pages listed": sum.Listed,
		"kept regions given back": sum.Kept, "suspects that came back": sum.Returned, "partitions": sum.Cuts, "servers fenced": sum.Fenced,
		"forks": sum.Forks, "machine pauses": sum.Machines, "store writes lost": sum.LostWrites, "slots not flushed": sum.SlotsMissed,
		"slots torn": sum.SlotsTorn, "failed commits": sum.FailedCommits, "remote mappers": sum.Remote,
		"restarts of agents": sum.AgentRestarts, "agents dropped": sum.AgentsDropped, "reboots": sum.Reboots, "ends proved by agents": sum.Vouched,
	} {
		if n == 0 && count >= 400 {
			t.Errorf("no run had any: %s", name)
		}
	}
}

// A seed replays its run, event by event.
func TestReplay(t *testing.T) {
	t.Parallel()
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

// mostSeeds is how many seeds a planted error may take.
const mostSeeds = 2000

// Each planted error is found. The log says how many seeds it took.
func TestFaultsAreFound(t *testing.T) {
	if raceDetector {
		t.Skip("a run is one goroutine: `go test` without -race plays the planted faults")
	}
	for _, f := range Faults() {
		t.Run(f.String(), func(t *testing.T) {
			most := mostSeeds
			if testing.Short() {
				most = 60
			}
			h := Hunt(f, Options{Seed: 1000}, most)
			if !h.Found && testing.Short() {
				t.Skipf("not found in %d seeds; without -short %d are played", most, mostSeeds)
			}
			if !h.Found {
				t.Error(h)
			}
			t.Log(h)
		})
	}
}

// What once broke something is played again, and so is what planted errors were found by.
// No script may break anything without its error. With it most should: a change of the
// programs' messages changes what a script does, and `maru sim --fault F --shrink` makes
// a new one.
func TestScripts(t *testing.T) {
	names, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(names) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			file, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			s, err := ParseScript(file)
			if err != nil {
				t.Fatal(err)
			}
			if s.Fault != NoFault {
				t.Logf("with %v: %v", s.Fault, broken(s) != nil)
				s.Fault = NoFault
			}
			if _, err := Play(s, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// A script is what its text says.
func TestScriptText(t *testing.T) {
	s := Generate(7, 300, ReuseAtRetire)
	s.Mild, s.Actions[3].Calm = true, true
	again, err := ParseScript(strings.NewReader("# a comment\n" + s.String()))
	if err != nil {
		t.Fatal(err)
	}
	if again.String() != s.String() {
		t.Error("it reads as another script")
	}
	a, _ := Play(s, nil)
	b, _ := Play(again, nil)
	if a != b {
		t.Errorf("it plays as %+v, then as %+v", a, b)
	}
	for text, want := range map[string]string{
		"":                                           "empty",
		"+1s store keys=1":                           "allowed: world",
		"world seed=x":                               "line 1",
		"world workers=0":                            "workers is 0",
		"world workers=17":                           "allowed: 0 to 16",
		"world workers=1 odd=1":                      "odd",
		"world workers=1 fault=x":                    "unknown",
		"world workers=3\n1s store keys=1":           "line 2",
		"world workers=3\n+1s jump":                  "jump",
		"world workers=3\n+1s store":                 "needs keys",
		"world workers=3\n+1s store keys=12":         "allowed: 0 to 11",
		"world workers=3\n+1s store keys=1 rank=3":   "allowed: 0 to 2",
		"world workers=3\n-1s store keys=1":          "+TIME",
		"world workers=3\n+1s pause for=-1s":         "0 and more",
		"world workers=3\n+1s store keys=1 colour=1": "colour",
	} {
		if _, err := ParseScript(strings.NewReader(text)); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// Taking actions out of a script does not change what the others draw: a failing run gets
// short, and goes on failing in the same way.
func TestShrink(t *testing.T) {
	t.Parallel()
	faults := []Fault{ReuseAtRetire, ForgetHolders}
	if testing.Short() {
		faults = faults[:1]
	}
	for _, f := range faults {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			shrinks(t, f)
		})
	}
	if s, failure := Shrink(Generate(1, 50, NoFault), 10); failure != nil || len(s.Actions) != 50 {
		t.Errorf("a script that does not fail shrinks to %d actions, %v", len(s.Actions), failure)
	}
}

func shrinks(t *testing.T, f Fault) {
	h := Hunt(f, Options{Seed: 1}, mostSeeds)
	if !h.Found {
		t.Fatal(h)
	}
	long := Generate(h.Seed, 0, f)
	short, failure := Shrink(long, 2000)
	if failure == nil || failure.Invariant != h.Invariant || len(short.Actions) > 40 {
		t.Fatalf("%d actions of %d are left, and %v", len(short.Actions), len(long.Actions), failure)
	}
	t.Logf("%d actions of %d are left:\n%v", len(short.Actions), len(long.Actions), short)
	again, err := ParseScript(strings.NewReader(short.String()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Play(again, nil); err == nil || err.Error() != failure.Error() {
		t.Errorf("the script plays as %v, not as %v", err, failure)
	}
}

// A slot that a crash has torn is noticed: the one before it counts, and the store is one
// ahead of it.
func TestTornSlot(t *testing.T) {
	w := newWorld(&Script{Workers: 1, Calm: true})
	w.manager = newManager(w)
	w.manager.start()
	header, err := poolfmt.DecodeHeader(w.manager.header[:])
	if err != nil {
		t.Fatal(err)
	}
	next := header.Slot
	next.Sequence++
	next.NextRegion++
	line := poolfmt.EncodeSlot(header.Pool, next)
	for words := 1; words <= 3; words++ {
		torn := w.manager.header
		copy(torn[poolfmt.SlotOffset(next.Sequence):], line[:8*words])
		got, err := poolfmt.DecodeHeader(torn[:])
		if err != nil || got.Slot != header.Slot {
			t.Errorf("%d words: %+v %v, want %+v", words, got.Slot, err, header.Slot)
		}
	}
}
