package torture

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fork makes a child as an engine's fork without exec does: it has this process's
// descriptors and none of its pool mappings, lives on for a while, also when this
// process is killed, and never runs Go code again.
func (w *worker) fork(rng *rand.Rand) {
	life := unix.Timespec{Sec: int64(1 + rng.IntN(12))}
	// Nothing between clone and exit may allocate, take a lock or grow the stack.
	pid := rawFork(&life)
	if pid <= 0 {
		return
	}
	w.forked = append(w.forked, pid)
	w.say.say(func(c *Counts) { c.Forks++ }, 'F', uint64(pid)) //nolint:gosec // positive
	time.Sleep(time.Millisecond)
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err == nil && bytes.Contains(maps, []byte(w.opt.Pool)) {
		w.say.wrong("a forked child maps the pool: %s", line(maps, w.opt.Pool))
	}
}

// line is the first line of b that has word in it.
func line(b []byte, word string) []byte {
	for l := range bytes.Lines(b) {
		if bytes.Contains(l, []byte(word)) {
			return bytes.TrimSpace(l)
		}
	}
	return nil
}

// rawFork returns the child's pid, or 0 when the kernel refused. The child closes its
// three standard descriptors, so that nobody waits for its end, sleeps and exits.
//
//go:nosplit
//go:norace
func rawFork(life *unix.Timespec) int {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0
	}
	if pid != 0 {
		return int(pid)
	}
	sleepAndExit(life)
	return 0
}

// reapForked waits for children that have ended.
func (w *worker) reapForked() {
	kept := w.forked[:0]
	for _, pid := range w.forked {
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err != nil || got == pid {
			continue
		}
		kept = append(kept, pid)
	}
	w.forked = kept
}
