package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// DefaultMaxWatchCount bounds the processes of one watcher; each costs a file descriptor.
const DefaultMaxWatchCount = 65536

// Key names who is watched: a session id as a rule.
type Key = [16]byte

// Watcher tells when processes have ended. One goroutine waits for all of them; it is
// stopped by Close. Concurrency: safe for concurrent use.
type Watcher struct {
	epoll int
	wake  int
	done  chan struct{}
	max   int

	mu struct {
		sync.Mutex
		closed bool
		nextID uint64
		byKey  map[Key]*watch
		byID   map[uint64]*watch
	}
}

type watch struct {
	key     Key
	id      uint64
	process Process
	fd      int
	fn      func(proof string)
}

// wakeID is the epoll number of the wake-up descriptor; watches count from 1.
const wakeID = 0

// NewWatcher starts a watcher for at most maxCount processes (0: [DefaultMaxWatchCount]).
// Errors: ErrLimit.
func NewWatcher(maxCount int) (*Watcher, error) {
	if maxCount <= 0 {
		maxCount = DefaultMaxWatchCount
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fdError("starting a process watcher", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		_ = unix.Close(ep)
		return nil, fdError("starting a process watcher", err)
	}
	w := &Watcher{epoll: ep, wake: wake, done: make(chan struct{}), max: maxCount}
	w.mu.byKey, w.mu.byID = map[Key]*watch{}, map[uint64]*watch{}
	if err := w.add(wake, wakeID); err != nil {
		_ = unix.Close(wake)
		_ = unix.Close(ep)
		return nil, err
	}
	go w.run()
	return w, nil
}

func (w *Watcher) add(fd int, id uint64) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN}
	ev.Fd, ev.Pad = int32(uint32(id)), int32(uint32(id>>32))
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fdError("watching a process", err)
	}
	return nil
}

// Watch calls fn once when the process of p is proved gone; proof says how that is
// known. fn runs in the watcher's goroutine: it must not block and must not call Close;
// it may call Watch and Unwatch. Watching a key again replaces fn if it is the same
// process. The watcher keeps a pidfd of its own: p may be closed afterwards.
//
// Errors: ErrExists (the key is watched for another process), ErrLimit, ErrClosed.
func (w *Watcher) Watch(key Key, p *Peer, fn func(proof string)) error {
	fd, err := p.dup()
	if errors.Is(err, base.ErrClosed) && p.Provable() {
		// The connection went away under its handler; the process is found by its name.
		gone, err := w.WatchProcess(key, p.Process, fn)
		if gone {
			return fmt.Errorf("%w: %s has ended", base.ErrClosed, p)
		}
		return err
	}
	if err != nil {
		return err
	}
	return w.watch(key, p.Process, fd, fn)
}

// WatchProcess is Watch for a process known from before a restart. If it is gone
// already nothing is watched, fn is not called, and gone is true. Errors: those of
// Watch and [Reopen].
func (w *Watcher) WatchProcess(key Key, p Process, fn func(proof string)) (gone bool, err error) {
	pr, gone, err := Reopen(p)
	if err != nil || gone {
		return gone, err
	}
	defer pr.Close()
	return false, w.Watch(key, pr, fn)
}

// watch owns fd, on errors too.
func (w *Watcher) watch(key Key, p Process, fd int, fn func(string)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.watchLocked(key, p, fd, fn)
	if err != nil {
		_ = unix.Close(fd)
	}
	return err
}

func (w *Watcher) watchLocked(key Key, p Process, fd int, fn func(string)) error {
	if w.mu.closed {
		return fmt.Errorf("%w: process watcher", base.ErrClosed)
	}
	if old := w.mu.byKey[key]; old != nil {
		if old.process != p || p.StartTicks == 0 && !sameProcess(old.fd, fd) {
			return fmt.Errorf("%w: %x is watched for %s, not for %s", base.ErrExists, key, old.process, p)
		}
		old.fn = fn
		_ = unix.Close(fd)
		return nil
	}
	if len(w.mu.byKey) >= w.max {
		return fmt.Errorf("%w: %d processes are watched, the most that this watcher may", base.ErrLimit, w.max)
	}
	w.mu.nextID++
	x := &watch{key: key, id: w.mu.nextID, process: p, fd: fd, fn: fn}
	if err := w.add(fd, x.id); err != nil {
		return err
	}
	w.mu.byKey[key], w.mu.byID[x.id] = x, x
	return nil
}

// sameProcess compares two pidfds where there is no name to compare: on pidfs (Linux 6.9)
// each process has an inode of its own. Elsewhere they count as different.
func sameProcess(a, b int) bool {
	var x, y unix.Stat_t
	var fs unix.Statfs_t
	const pidfsMagic = 0x50494446
	if unix.Fstatfs(a, &fs) != nil || fs.Type != pidfsMagic || unix.Fstat(a, &x) != nil || unix.Fstat(b, &y) != nil {
		return false
	}
	return x.Dev == y.Dev && x.Ino == y.Ino
}

// Unwatch forgets a key; its callback will not be called, unless it is running now.
// It reports whether the key was watched.
func (w *Watcher) Unwatch(key Key) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.mu.byKey[key]
	if x == nil {
		return false
	}
	w.dropLocked(x)
	return true
}

func (w *Watcher) dropLocked(x *watch) {
	delete(w.mu.byKey, x.key)
	delete(w.mu.byID, x.id)
	_ = unix.EpollCtl(w.epoll, unix.EPOLL_CTL_DEL, x.fd, nil)
	_ = unix.Close(x.fd)
}

// Count returns how many processes are watched.
func (w *Watcher) Count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.mu.byKey)
}

// Close stops the watcher and waits for a callback that runs. It may be called more
// than once, never from a callback.
func (w *Watcher) Close() {
	w.mu.Lock()
	if !w.mu.closed {
		w.mu.closed = true
		var one [8]byte
		binary.NativeEndian.PutUint64(one[:], 1)
		_, _ = unix.Write(w.wake, one[:])
	}
	w.mu.Unlock()
	<-w.done
}

func (w *Watcher) run() {
	defer close(w.done)
	defer w.cleanUp()
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(w.epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			invariants.Failf("R6", "waiting for processes: %v", err)
			return
		}
		for i := range max(n, 0) {
			ev := &events[i]
			id := uint64(uint32(ev.Fd)) | uint64(uint32(ev.Pad))<<32
			if id != wakeID && ev.Events&unix.EPOLLIN == 0 {
				continue
			}
			fn, proof, stop := w.take(id)
			if stop {
				return
			}
			if fn != nil {
				fn(proof)
			}
		}
	}
}

// take removes the watch of a process that has ended.
func (w *Watcher) take(id uint64) (fn func(string), proof string, stop bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.closed {
		return nil, "", true
	}
	x := w.mu.byID[id]
	if x == nil {
		return nil, "", false
	}
	w.dropLocked(x)
	return x.fn, "pidfd readable: " + x.process.String() + " has ended", false
}

func (w *Watcher) cleanUp() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.closed = true
	for _, x := range w.mu.byID {
		w.dropLocked(x)
	}
	_ = unix.Close(w.wake)
	_ = unix.Close(w.epoll)
}
