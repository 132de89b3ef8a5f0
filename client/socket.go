package client

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// socket is a connected stream socket that is read and written by blocking system
// calls. A call through libmaru runs on a thread that is bound to its goroutine, and
// the Go runtime's poller would hand each wait from that thread to another and back:
// two wake-ups of a thread a call, more than the call itself. There are at most
// HotConnections of them.
//
// Concurrency: one goroutine reads and writes; Close may come from any, at any time,
// and ends what is under way.
type socket struct {
	mu struct {
		sync.Mutex
		users  int // calls inside the kernel
		closed bool
	}
	fd       int
	deadline time.Time
	// receive and send are the socket's time-outs, as the kernel has them.
	receive, send time.Duration
}

// timeoutStep is how coarse the kernel's time-outs are set: they are only renewed when
// they change by more, so that calls of the same limit cost no system call. The
// deadline itself is checked by the clock.
const timeoutStep = 10 * time.Millisecond

// newSocket takes a connection over; conn is closed in any case.
// Errors: ErrUnavailable, ErrInternal.
func newSocket(conn net.Conn) (*socket, error) {
	defer func() { _ = conn.Close() }()
	c, ok := conn.(interface{ File() (*os.File, error) })
	if !ok {
		return nil, fmt.Errorf("%w: a connection of type %T has no descriptor", base.ErrInternal, conn)
	}
	f, err := c.File()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrUnavailable, err)
	}
	defer func() { _ = f.Close() }()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrUnavailable, err)
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", base.ErrUnavailable, err), unix.Close(fd))
	}
	return &socket{fd: fd}, nil
}

// setDeadline bounds the reads and writes that follow.
func (s *socket) setDeadline(t time.Time) { s.deadline = t }

// enter makes sure that the descriptor stays open until leave.
func (s *socket) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return net.ErrClosed
	}
	s.mu.users++
	return nil
}

func (s *socket) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.users--; s.mu.users == 0 && s.mu.closed {
		_ = unix.Close(s.fd)
	}
}

// Close ends the connection and wakes who waits for it. Calling it again is harmless.
func (s *socket) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return
	}
	s.mu.closed = true
	if s.mu.users > 0 {
		// The number must not be given to another file while a call uses it.
		_ = unix.Shutdown(s.fd, unix.SHUT_RDWR)
		return
	}
	_ = unix.Close(s.fd)
}

// arm sets the kernel's time-out to what is left until the deadline.
func (s *socket) arm(option int, have *time.Duration) error {
	left := time.Until(s.deadline)
	if left <= 0 {
		return os.ErrDeadlineExceeded
	}
	want := (left + timeoutStep - 1) / timeoutStep * timeoutStep
	if want == *have {
		return nil
	}
	tv := unix.NsecToTimeval(int64(want))
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, option, &tv); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	*have = want
	return nil
}

// Read implements io.Reader. Errors: os.ErrDeadlineExceeded, net.ErrClosed, io.EOF.
func (s *socket) Read(b []byte) (int, error) {
	if err := s.enter(); err != nil {
		return 0, err
	}
	defer s.leave()
	for {
		if err := s.arm(unix.SO_RCVTIMEO, &s.receive); err != nil {
			return 0, err
		}
		n, err := unix.Read(s.fd, b)
		switch {
		case err == nil && n == 0 && len(b) > 0:
			return 0, io.EOF
		case err == nil:
			return n, nil
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			// Interrupted, or the time-out: the deadline decides.
		default:
			return 0, os.NewSyscallError("read", err)
		}
	}
}

// Write implements io.Writer: it writes all of b. Errors: as Read.
func (s *socket) Write(b []byte) (int, error) {
	if err := s.enter(); err != nil {
		return 0, err
	}
	defer s.leave()
	done := 0
	for done < len(b) {
		if err := s.arm(unix.SO_SNDTIMEO, &s.send); err != nil {
			return done, err
		}
		// Not write(2): a peer that is gone must be an error, not a signal.
		n, err := unix.SendmsgN(s.fd, b[done:], nil, nil, unix.MSG_NOSIGNAL)
		switch {
		case err == nil:
			done += n
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
		default:
			return done, os.NewSyscallError("send", err)
		}
	}
	return done, nil
}
