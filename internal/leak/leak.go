// Package leak fails a package's tests when they leave something behind:
// goroutines, file descriptors, or shared mappings (memfd segments, pool files,
// stores). It is for TestMain only and nothing imports it but tests:
//
//	func TestMain(m *testing.M) { leak.Check(m) }
//
// What was open before the first test does not count, and what closes within a
// moment after the last one neither; nothing is left to finalizers. (io.Copy from one
// socket to another leaves the runtime's own pipe to one: a test that echoes hides
// the types of its sockets from it.)
package leak

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// settle is how long descriptors and mappings may take to close after the last test.
const settle = 2 * time.Second

// Check runs the tests and ends the process: with their status, or with 1 when all
// passed but something was left. Options are goleak's.
func Check(m *testing.M, opts ...goleak.Option) {
	os.Exit(run(m.Run, os.Stderr.WriteString, settle, opts...))
}

func run(tests func() int, say func(string) (int, error), wait time.Duration, opts ...goleak.Option) int {
	before, err := snapshot()
	if err != nil {
		_, _ = say("leak: " + err.Error() + "\n")
		return 1
	}
	code := tests()
	if code != 0 {
		// A failed test may have left anything; its own message is the one to read.
		return code
	}
	if err := goleak.Find(opts...); err != nil {
		_, _ = say("leak: goroutines: " + err.Error() + "\n")
		code = 1
	}
	var left []string
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		now, err := snapshot()
		if err != nil {
			left = []string{err.Error()}
		} else {
			left = now.without(before)
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, l := range left {
		_, _ = say("leak: " + l + "\n")
		code = 1
	}
	return code
}

// Snapshot is what a process has open at a time.
type Snapshot struct{ open open }

// Take looks at this process.
func Take() (Snapshot, error) {
	o, err := snapshot()
	return Snapshot{o}, err
}

// Left returns what is open more often than at the snapshot, and goroutines that run,
// after waiting up to wait for it to close.
func (s Snapshot) Left(wait time.Duration, opts ...goleak.Option) []string {
	var left []string
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		now, err := snapshot()
		if err != nil {
			left = []string{err.Error()}
		} else {
			left = now.without(s.open)
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	if err := goleak.Find(opts...); err != nil {
		left = append(left, err.Error())
	}
	return left
}

// open counts what a process has open, by description.
type open map[string]int

// without returns what is open more often than before.
func (o open) without(before open) []string {
	var left []string
	for what, n := range o {
		if extra := n - before[what]; extra > 0 {
			left = append(left, fmt.Sprintf("%d more of %s", extra, what))
		}
	}
	slices.Sort(left)
	return left
}

func snapshot() (open, error) {
	if runtime.GOOS != "linux" {
		return open{}, nil
	}
	// The runtime opens its poller with the first pipe or socket and never closes it.
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, _ = r.Close(), w.Close()
	o := open{}
	if err := o.addDescriptors(); err != nil {
		return nil, err
	}
	return o, o.addMappings()
}

func (o open) addDescriptors() error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // the directory's own descriptor, closed by now
		}
		// Numbers of pipes and sockets tell instances apart; the kind says what leaked, and a
		// test that replaced one descriptor by another of its kind has not leaked.
		if kind, _, ok := strings.Cut(target, ":["); ok && (kind == "pipe" || kind == "socket") {
			target = kind
		}
		o["file descriptor "+target]++
	}
	return nil
}

func (o open) addMappings() error {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		if len(f) < 6 || len(f[1]) != 4 || f[1][3] != 's' {
			continue
		}
		o["shared mapping of "+strings.Join(f[5:], " ")]++
	}
	return nil
}
