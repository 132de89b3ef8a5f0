package peer

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// unknownID is the user or group of a peer that was reopened: only a connection tells them.
const unknownID = ^uint32(0)

// Peer is the process behind a Unix socket with a pidfd on it. A Peer always can be
// watched now; whether it can be found again after a restart, Provable says.
//
// Ownership: whoever got it closes it; a [Watcher] keeps a pidfd of its own.
// Concurrency: safe for concurrent use.
type Peer struct {
	// Process is complete if Provable, else what could be found out.
	Process Process
	UID     uint32
	GID     uint32
	// Unprovable says why the process cannot be named beyond this connection.
	Unprovable string

	mu struct {
		sync.Mutex
		fd int // -1 once closed
	}
}

// Provable reports whether the process can be found again after a restart of its watcher.
func (p *Peer) Provable() bool { return p.Unprovable == "" }

// String names the peer for a log line.
func (p *Peer) String() string {
	if p.UID == unknownID {
		return p.Process.String()
	}
	return fmt.Sprintf("%s of user %d", p.Process, p.UID)
}

// Close gives the pidfd back. It may be called more than once.
func (p *Peer) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.fd >= 0 {
		_ = unix.Close(p.mu.fd)
		p.mu.fd = -1
	}
}

// Ended reports whether the process is proved gone. Errors: ErrClosed.
func (p *Peer) Ended() (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.fd < 0 {
		return false, fmt.Errorf("%w: pidfd of %s", base.ErrClosed, p.Process)
	}
	return ended(p.mu.fd)
}

// dup gives a second pidfd on the same process.
func (p *Peer) dup() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.fd < 0 {
		return -1, fmt.Errorf("%w: pidfd of %s", base.ErrClosed, p.Process)
	}
	fd, err := unix.FcntlInt(uintptr(p.mu.fd), unix.F_DUPFD_CLOEXEC, 0)
	return fd, fdError("keeping a pidfd of "+p.Process.String(), err)
}

func fdError(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: %s: %w; raise the number of open files (ulimit -n, LimitNOFILE)", base.ErrLimit, doing, err)
	}
	return fmt.Errorf("%w: %s: %w", base.ErrUnavailable, doing, err)
}

// FromConn finds the process that connected. Ownership: the caller closes the Peer;
// the connection stays its own. Errors: ErrClosed (the process has ended),
// ErrLimit (no file descriptor left), ErrUnsupported.
func FromConn(c *net.UnixConn) (*Peer, error) {
	v, err := newView()
	if err != nil {
		return nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrClosed, err)
	}
	var p *Peer
	ctlErr := raw.Control(func(fd uintptr) { p, err = v.fromSocket(int(fd), peerPidfd) })
	if ctlErr != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrClosed, ctlErr)
	}
	return p, err
}

// peerPidfd asks the kernel for the pidfd of a socket's peer.
func peerPidfd(socket int) (int, error) {
	return unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
}

func (v view) fromSocket(socket int, pidfdOf func(int) (int, error)) (*Peer, error) {
	cred, err := unix.GetsockoptUcred(socket, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return nil, fmt.Errorf("%w: asking for the peer of a socket: %w", base.ErrUnsupported, err)
	}
	p := &Peer{
		Process: Process{PID: int(cred.Pid), PIDNamespace: v.pidNamespace, BootID: v.boot},
		UID:     cred.Uid, GID: cred.Gid,
	}
	fd, err := pidfdOf(socket)
	fromKernel := err == nil
	switch {
	case fromKernel:
	case errors.Is(err, unix.ENOPROTOOPT):
		fd, err = v.openByPID(socket, int(cred.Pid))
		if err != nil {
			return nil, err
		}
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENODATA):
		return nil, fmt.Errorf("%w: the process that connected has ended (pid %d)", base.ErrClosed, cred.Pid)
	default:
		return nil, fdError("asking for the pidfd of a peer", err)
	}
	p.mu.fd = fd
	if err := v.name(p, fd, fromKernel); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// openByPID is for kernels before 6.5.
func (v view) openByPID(socket, pid int) (int, error) {
	if pid <= 0 {
		return -1, fmt.Errorf("%w: the peer is not visible in this daemon's pid namespace and this kernel has no SO_PEERPIDFD; "+
			"run the daemon in the host's pid namespace", base.ErrUnsupported)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return -1, fmt.Errorf("%w: the process that connected has ended (pid %d)", base.ErrClosed, pid)
	}
	if err != nil {
		return -1, fdError(fmt.Sprintf("opening a pidfd of pid %d", pid), err)
	}
	// A hang-up means that the peer's end may have closed because it ended, and its number
	// may be another's by now. An open end was opened before the pidfd was.
	pfd := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLRDHUP}}
	if _, err := unix.Poll(pfd, 0); err != nil || pfd[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR) != 0 {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("%w: the peer (pid %d) closed its connection", base.ErrClosed, pid)
	}
	return fd, nil
}

// name fills in what finds the process again.
func (v view) name(p *Peer, fd int, fromKernel bool) error {
	if v.blind != "" {
		p.Unprovable = v.blind
		return nil
	}
	pid := p.Process.PID
	if fromKernel {
		var err error
		if pid, err = pidOf(fd); err != nil {
			p.Unprovable = "the pid behind a pidfd cannot be read: " + err.Error()
			return nil //nolint:nilerr // it can be watched all the same
		}
	}
	// 0 in either view: the socket's (this daemon's namespace) or that of the mounted /proc.
	if pid == 0 || p.Process.PID == 0 {
		p.Process.PID = 0
		p.Unprovable = "the process runs in a pid namespace that this daemon cannot see; run the daemon in the host's"
		return nil
	}
	var ticks uint64
	var statErr error
	if pid > 0 {
		ticks, statErr = startTicks(pid)
	}
	over, err := ended(fd)
	if err != nil {
		return err
	}
	if over || pid < 0 {
		return fmt.Errorf("%w: the process that connected has ended (pid %d)", base.ErrClosed, p.Process.PID)
	}
	if statErr != nil {
		p.Unprovable = "the start time of the process cannot be read: " + statErr.Error()
		return nil //nolint:nilerr // it can be watched all the same
	}
	p.Process.PID, p.Process.StartTicks = pid, ticks
	return nil
}
