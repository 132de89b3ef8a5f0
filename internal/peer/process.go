package peer

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/node"
)

// initTimeNamespace is the inode of the first time namespace (PROC_TIME_INIT_INO).
// Inside another one the kernel shifts the start times that /proc shows.
const initTimeNamespace = 0xEFFFFFFA

// hostPIDNamespace is the inode of the first pid namespace (PROC_PID_INIT_INO).
const hostPIDNamespace = 0xEFFFFFFC

// Process names one process for ever.
type Process struct {
	// PID in PIDNamespace, which is the watcher's.
	PID int
	// PIDNamespace is the inode of the pid namespace in which PID is meant.
	PIDNamespace uint64
	// StartTicks is the start time in clock ticks since boot.
	StartTicks uint64
	// BootID is the boot in which all of this is meant.
	BootID base.BootID
}

// IsZero reports whether nothing is known of the process.
func (p Process) IsZero() bool { return p == Process{} }

// HostNamespace reports whether the watcher that recorded it ran in the host's pid
// namespace, which is there after every restart.
func (p Process) HostNamespace() bool { return p.PIDNamespace == hostPIDNamespace }

// String names a process for a log line.
func (p Process) String() string { return fmt.Sprintf("pid %d (start %d)", p.PID, p.StartTicks) }

// view is how this process sees others. It is read once: none of it changes in a
// process that does not call unshare or setns, which Go programs cannot do for all threads.
type view struct {
	pidNamespace uint64
	boot         base.BootID
	// blind says why processes cannot be named here; empty if they can.
	blind string
}

func newView() (view, error) {
	var v view
	var err error
	if v.boot, err = node.BootID(); err != nil {
		return v, err
	}
	if v.pidNamespace, err = namespaceInode("/proc/self/ns/pid"); err != nil {
		v.blind = "the pid namespace of this daemon cannot be read: " + err.Error()
		return v, nil //nolint:nilerr // processes can be watched, not named
	}
	// A /proc of another pid namespace would show the wrong process under a right pid.
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		v.blind = "/proc belongs to another pid namespace than this daemon"
		return v, nil //nolint:nilerr // processes can be watched, not named
	}
	if ino, err := namespaceInode("/proc/self/ns/time"); err == nil && ino != initTimeNamespace {
		v.blind = "this daemon runs in a time namespace of its own, which shifts start times"
	}
	return v, nil
}

func namespaceInode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Ino, nil
}

// Self names this process.
func Self() (Process, error) {
	v, err := newView()
	if err != nil {
		return Process{}, err
	}
	if v.blind != "" {
		return Process{}, fmt.Errorf("%w: %s", base.ErrUnsupported, v.blind)
	}
	ticks, err := startTicks(os.Getpid())
	if err != nil {
		return Process{}, err
	}
	return Process{PID: os.Getpid(), PIDNamespace: v.pidNamespace, StartTicks: ticks, BootID: v.boot}, nil
}

// startTicks reads field 22 of /proc/PID/stat. The name in field 2 may hold spaces and
// parentheses, so fields are counted behind the last one.
func startTicks(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	return parseStartTicks(b)
}

func parseStartTicks(stat []byte) (uint64, error) {
	i := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[i+1:])
	const index = 22 - 3 // field 3 is the first behind the name
	if i < 0 || len(fields) <= index {
		return 0, fmt.Errorf("%w: stat of a process has %d fields behind its name", base.ErrCorrupt, len(fields))
	}
	n, err := strconv.ParseUint(string(fields[index]), 10, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%w: start time %q of a process", base.ErrCorrupt, fields[index])
	}
	return n, nil
}

// pidOf asks the kernel which pid a pidfd has here: 0 if it is not visible, -1 if it is gone.
func pidOf(fd int) (int, error) {
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Pid:"); ok {
			return strconv.Atoi(strings.TrimSpace(v))
		}
	}
	return 0, fmt.Errorf("%w: fdinfo of a pidfd has no Pid line", base.ErrUnsupported)
}

// ended reports whether a pidfd is readable: the one proof that its process is gone.
func ended(fd int) (bool, error) {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("%w: polling a pidfd: %w", base.ErrUnavailable, err)
		}
		return n == 1 && p[0].Revents&unix.POLLIN != 0, nil
	}
}

// Reopen finds a process again after a restart of its watcher. gone means that it is
// proved to have ended; then, and on an error, there is no Peer. The caller has made
// sure that p was recorded on this node: another boot id is proof only of the same machine.
//
// Ownership: the caller closes the Peer. Errors: ErrInvalid (p is not complete),
// ErrUnknown (it can be neither found nor proved gone; the text says what would help).
func Reopen(p Process) (pr *Peer, gone bool, err error) {
	v, err := newView()
	if err != nil {
		return nil, false, err
	}
	return v.reopen(p)
}

func (v view) reopen(p Process) (*Peer, bool, error) {
	if p.PID <= 0 || p.PIDNamespace == 0 || p.StartTicks == 0 || p.BootID == (base.BootID{}) {
		return nil, false, fmt.Errorf("%w: process record %+v is not complete", base.ErrInvalid, p)
	}
	if p.BootID != v.boot {
		return nil, true, nil
	}
	if v.blind != "" {
		return nil, false, fmt.Errorf("%w: %s of before the restart: %s", base.ErrUnknown, p, v.blind)
	}
	if p.PIDNamespace != v.pidNamespace {
		return nil, false, fmt.Errorf("%w: %s was recorded in pid namespace %d, this daemon runs in %d; run it in the host's, "+
			"or drop the holds by hand when the process has ended", base.ErrUnknown, p, p.PIDNamespace, v.pidNamespace)
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil, true, nil
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		// The number is now a thread of some other process: a process keeps its number until
		// its last thread is gone.
		if isThread(p.PID) {
			return nil, true, nil
		}
		return nil, false, fmt.Errorf("%w: opening %s: %w", base.ErrUnknown, p, err)
	case err != nil:
		return nil, false, fmt.Errorf("%w: opening %s: %w", base.ErrUnknown, p, err)
	}
	ticks, statErr := startTicks(p.PID)
	// In this order: if the pidfd still lives after the read, the ticks were its own.
	over, err := ended(fd)
	switch {
	case err != nil:
	case over:
		// Whoever has the number has ended: either p itself or its successor.
		_ = unix.Close(fd)
		return nil, true, nil
	case statErr != nil:
		err = fmt.Errorf("%w: start time of %s: %w", base.ErrUnknown, p, statErr)
	case ticks != p.StartTicks:
		_ = unix.Close(fd)
		return nil, true, nil
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, false, err
	}
	pr := &Peer{Process: p, UID: unknownID, GID: unknownID}
	pr.mu.fd = fd
	return pr, false, nil
}

// isThread reports whether a number is a thread that does not lead its process.
func isThread(tid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "Tgid:"); ok {
			tgid, err := strconv.Atoi(strings.TrimSpace(v))
			return err == nil && tgid > 0 && tgid != tid
		}
	}
	return false
}
