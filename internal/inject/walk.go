package inject

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// Everything is the variable that makes Walk try every variant of every call; without it
// each call fails in one way, which changes from run to run.
const Everything = "MARU_INJECT_ALL"

// Round is one run of a scenario in which one call fails.
type Round struct {
	Fault Fault
	// Process is set by the scenario as soon as it has one.
	Process *Process
	// Surfaced is set when the fault was seen: a start or a call that failed.
	Surfaced bool
}

// See notes that a call failed and how; nil is no failure.
func (r *Round) See(err error) error {
	if err != nil {
		r.Surfaced = true
	}
	return err
}

// Walk plays a scenario with the first call failing, then the second, and so on until a
// run is not hit any more; then again with calls that go on failing, at a few places.
// The scenario starts its subject with the round's fault, and checks that nothing was
// lost; Walk checks that the fault was seen. ignored says why a call's failure may go
// unseen; "" when it may not.
func Walk(t *testing.T, ignored func(what string) string, scenario func(t *testing.T, r *Round)) {
	t.Helper()
	seed := rand.Uint64()
	all := os.Getenv(Everything) != ""
	rounds, hit := 0, 0
	play := func(f Fault) (more, reached bool) {
		r := &Round{Fault: f}
		rounds++
		name := fmt.Sprintf("call %d variant %d", f.Call, f.Variant)
		ok := t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			scenario(t, r)
			if r.Process == nil {
				return
			}
			what, _ := r.Process.Hit()
			if what == "" || r.Surfaced || r.Process.Harmless() || logged(r.Process.Log()) {
				return
			}
			if ignored(what) == "" {
				t.Errorf("%s: nobody saw it", what)
			}
		})
		if !ok {
			t.Logf("log of the subject:\n%s", r.Process.logOrNothing())
		}
		what, m := r.Process.hitOrNothing()
		if what != "" {
			hit++
			if !ok || testing.Verbose() {
				t.Logf("%s", what)
			}
		}
		return m, what != ""
	}
	for call := 1; ; call++ {
		variant := int((seed + uint64(call)) % 3) //nolint:gosec // below 3
		if all {
			variant = 0
		}
		more, reached := play(Fault{Call: call, Variant: variant})
		if !reached {
			break
		}
		for all && more {
			variant++
			more, _ = play(Fault{Call: call, Variant: variant})
		}
	}
	for at := 1; at < hit; at += 1 + hit/8 {
		play(Fault{Call: at, Sticky: true})
	}
	t.Logf("%d calls were failed in %d rounds", hit, rounds)
	if hit < 3 {
		t.Errorf("only %d calls were failed: this test tests nothing", hit)
	}
}

func (p *Process) logOrNothing() string {
	if p == nil {
		return ""
	}
	return p.Log()
}

func (p *Process) hitOrNothing() (string, bool) {
	if p == nil {
		return "", false
	}
	return p.Hit()
}

// logged reports whether a log has a warning or an error.
func logged(log string) bool {
	return strings.Contains(log, "level=WARN") || strings.Contains(log, "level=ERROR")
}

// StartOrSkip starts a subject; the test is skipped where the kernel does not allow it.
func StartOrSkip(t *testing.T, o Options) *Process {
	t.Helper()
	p, err := Start(o)
	if errors.Is(err, base.ErrUnsupported) {
		t.Skip("needs seccomp with user notifications: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Release)
	return p
}
