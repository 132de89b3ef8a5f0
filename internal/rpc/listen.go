package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// ListenTCP opens a port. A host that others can reach is refused without insecure:
// there is no transport security yet, and whoever reaches the port can use it.
// Port 0 takes any free port. Errors: ErrInvalid, ErrBusy (port in use), ErrDenied.
func ListenTCP(host string, port int, insecure bool) (*net.TCPListener, error) {
	if port < 0 || port > 65535 {
		return nil, fmt.Errorf("%w: --port %d is not between 0 and 65535", base.ErrInvalid, port)
	}
	loopback, err := isLoopback(host)
	if err != nil {
		return nil, err
	}
	if !loopback && !insecure {
		return nil, fmt.Errorf("%w: host %q can be reached from other machines and connections are not encrypted yet; "+
			"use 127.0.0.1, or accept that with --insecure", base.ErrInvalid, host)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	switch {
	case err == nil:
		return l.(*net.TCPListener), nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w: port %d of %s is in use by another process; stop it (ss -ltnp 'sport = :%d' names it) "+
			"or choose another one (--port, --hot-port, --http-port; `maru up`: --listen 127.0.0.1:0 takes free ones)", base.ErrBusy, port, host, port)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w: port %d of %s needs privileges; choose one above 1023 with --port: %w",
			base.ErrDenied, port, host, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w: --host %q is no address of this machine: %w", base.ErrInvalid, host, err)
	}
	return nil, fmt.Errorf("%w: listening on %s port %d: %w", base.ErrUnavailable, host, port, err)
}

// isLoopback resolves names: a name is loopback only if all its addresses are.
func isLoopback(host string) (bool, error) {
	if host == "" {
		return false, nil
	}
	if ip := net.ParseIP(host); ip != nil {
		return ip.IsLoopback(), nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	if err != nil {
		return false, fmt.Errorf("%w: --host %q is neither an address nor a name that resolves: %w", base.ErrInvalid, host, err)
	}
	for _, ip := range ips {
		if !ip.IP.IsLoopback() {
			return false, nil
		}
	}
	return len(ips) > 0, nil
}

// UnixListener is a Unix socket with the lock that says that its owner lives.
type UnixListener struct {
	*net.UnixListener
	path string
	lock *os.File
	once sync.Once
	err  error
}

// UnixOption changes how a Unix socket is made.
type UnixOption func(*unixConfig)

type unixConfig struct{ mode fs.FileMode }

// WithMode sets the socket's mode; the default 0600 lets its owner and root connect.
func WithMode(m fs.FileMode) UnixOption { return func(c *unixConfig) { c.mode = m.Perm() } }

// ListenUnix opens the socket at path, which has mode 0600 from its first moment,
// and makes its directory where it is missing. It replaces what a dead process left
// there and refuses what a live one serves. Close removes socket and lock. Errors:
// ErrInvalid, ErrBusy (a live owner), ErrForeign (something else lies there), ErrDenied.
func ListenUnix(path string, opts ...UnixOption) (*UnixListener, error) {
	c := unixConfig{mode: 0o600}
	for _, o := range opts {
		o(&c)
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("%w: socket path %q is not absolute", base.ErrInvalid, path)
	}
	if err := checkUnixPath(path); err != nil {
		return nil, err
	}
	if err := makeSocketDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	lock, err := lockFile(path + ".lock")
	if err != nil {
		return nil, err
	}
	l, err := listenLocked(path, c)
	if err != nil {
		_ = os.Remove(lock.Name())
		_ = lock.Close()
		return nil, err
	}
	return &UnixListener{UnixListener: l, path: path, lock: lock}, nil
}

func listenLocked(path string, c unixConfig) (*net.UnixListener, error) {
	if err := removeStale(path); err != nil {
		return nil, err
	}
	l, err := bindUnix(path, c)
	if err != nil {
		return nil, err
	}
	// The umask may have taken bits away from a wider mode.
	if err := os.Chmod(path, c.mode); err != nil {
		_ = l.Close()
		return nil, pathError("setting the mode of socket "+path, err)
	}
	return l, nil
}

// bindUnix makes the socket with its mode. On Linux bind gives the file the mode of the
// socket's own inode, so that there is no moment in which somebody else can connect.
func bindUnix(path string, c unixConfig) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) error {
		var modeErr error
		if err := rc.Control(func(fd uintptr) { modeErr = unix.Fchmod(int(fd), uint32(c.mode)) }); err != nil {
			return err
		}
		return modeErr
	}}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	l, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, pathError("listening on socket "+path, err)
	}
	return l.(*net.UnixListener), nil
}

func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return pathError("looking at socket "+path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%w: %s is there and is no socket; remove it or choose another path", base.ErrForeign, path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		who := peerOf(conn)
		_ = conn.Close()
		return fmt.Errorf("%w: %s serves socket %s; stop it or choose another path", base.ErrBusy, who, path)
	case errors.Is(err, syscall.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return pathError("removing the socket of a dead process "+path, err)
		}
		return nil
	}
	// A full backlog or a missing right: somebody may live there.
	return fmt.Errorf("%w: socket %s may be served by another process: %w", base.ErrBusy, path, err)
}

// lockFile takes the lock of a socket. The owner removes the file while it holds
// the lock, so that a lock taken on a removed file is tried again on its successor.
func lockFile(path string) (*os.File, error) {
	for range 16 {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, pathError("opening "+path, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			who := ownerIn(f)
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%w: %s holds %s and serves its socket; stop it or choose another path",
					base.ErrBusy, who, path)
			}
			return nil, pathError("locking "+path, err)
		}
		mine, err1 := f.Stat()
		there, err2 := os.Lstat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			// For the message to whoever comes next; the lock itself is what counts.
			if err := f.Truncate(0); err == nil {
				_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
			}
			return f, nil
		}
		_ = f.Close()
	}
	return nil, fmt.Errorf("%w: %s is taken and given up again and again", base.ErrBusy, path)
}

// ownerIn names who wrote its pid into a lock file.
func ownerIn(f *os.File) string {
	var b [16]byte
	n, _ := f.ReadAt(b[:], 0)
	return processName(strings.TrimSpace(string(b[:n])))
}

// peerOf names the process that listens at the other end of a connection.
func peerOf(c net.Conn) string {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return processName("")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return processName("")
	}
	pid := ""
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = strconv.Itoa(int(cred.Pid))
		}
	})
	return processName(pid)
}

func processName(pid string) string {
	if n, err := strconv.Atoi(pid); err != nil || n <= 0 {
		return "another process"
	}
	return "process " + pid
}

// Path returns where the socket lies.
func (l *UnixListener) Path() string { return l.path }

// Close removes the socket, then its lock. It may be called more than once.
func (l *UnixListener) Close() error {
	l.once.Do(func() {
		l.err = l.UnixListener.Close()
		_ = os.Remove(l.lock.Name())
		_ = l.lock.Close()
	})
	return l.err
}

func pathError(doing string, err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %s: %w", base.ErrDenied, doing, err)
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w: %s: %w", base.ErrFull, doing, err)
	}
	return fmt.Errorf("%w: %s: %w", base.ErrUnavailable, doing, err)
}
