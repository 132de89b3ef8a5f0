package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/child"
)

// Fault says which call fails, and how. The zero value fails none and counts.
type Fault struct {
	Call    int // the first is 1
	Variant int // of that call's; the last one when it has fewer
	// Sticky: from then on every call that writes fails in that way.
	Sticky bool
}

// Options of a subject's process.
type Options struct {
	Subject string
	Options any      // as JSON
	Under   []string // files at or under them count
	Fault   Fault
}

// Process is a subject that runs.
type Process struct {
	*child.Process
	o        Options
	listener int
	pidfd    int
	done     chan struct{}
	log      logText
	mu       struct {
		sync.Mutex
		count int
		calls []string
		hit   string // what was failed, and how
		left  int    // variants of that call behind this one
		how   Variant
	}
}

// logText keeps a log whole.
type logText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logText) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Start starts a subject. Errors: ErrUnsupported where the kernel or a container does not
// let a process filter its calls.
func Start(o Options) (*Process, error) {
	options, err := json.Marshal(o.Options)
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(pair[0]) }()
	theirs := os.NewFile(uintptr(pair[1]), "listener") //nolint:gosec // a descriptor
	p := &Process{o: o, listener: -1, pidfd: -1, done: make(chan struct{})}
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program) //nolint:gosec // this program itself
	cmd.ExtraFiles = []*os.File{theirs}
	// A thread that is told to make way for another one would make its call again.
	cmd.Env = append(os.Environ(), "GODEBUG=asyncpreemptoff=1", variable+"=arm:"+o.Subject+":"+string(options))
	p.Process, err = child.Start(o.Subject, cmd, &p.log)
	_ = theirs.Close()
	if err != nil {
		return nil, err
	}
	if p.listener, err = receiveListener(pair[0]); err == nil {
		p.pidfd, err = unix.PidfdOpen(p.PID(), 0)
	}
	if err != nil {
		p.End()
		return nil, fmt.Errorf("%w: filtering the calls of a process: %w: %s", base.ErrUnsupported, err, p.Log())
	}
	go p.supervise()
	return p, nil
}

func receiveListener(socket int) (int, error) {
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(socket, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		return -1, errors.Join(err, errors.New("the process sent no listener"))
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return -1, errors.Join(err, errors.New("the process sent no descriptor"))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}

// supervise answers calls until the process has ended.
func (p *Process) supervise() {
	defer close(p.done)
	poll := []unix.PollFd{{Fd: int32(p.listener), Events: unix.POLLIN}, {Fd: int32(p.pidfd), Events: unix.POLLIN}} //nolint:gosec // descriptors
	for {
		if _, err := unix.Poll(poll, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			return
		}
		n, err := receive(p.listener)
		if err != nil {
			continue // its thread was killed
		}
		_ = respond(p.listener, p.decide(&n)) // as above
	}
}

// decide counts a call and says what becomes of it.
func (p *Process) decide(n *notification) response {
	goOn := response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	nr := uint32(n.nr) //nolint:gosec // never negative
	c, known := calls[nr]
	if !known {
		return goOn
	}
	path, counts := p.about(n, c)
	if !counts {
		return goOn
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.count++
	what := fmt.Sprintf("%s %s", c.name, path)
	p.mu.calls = append(p.mu.calls, what)
	v := p.mu.how
	switch {
	case p.mu.count == p.o.Fault.Call:
		at := min(p.o.Fault.Variant, len(c.variants)-1)
		v = c.variants[at]
		p.mu.hit, p.mu.left, p.mu.how = fmt.Sprintf("call %d, %s: %s", p.mu.count, what, v), len(c.variants)-1-at, v
	case p.mu.hit == "" || !p.o.Fault.Sticky || !writes(nr):
		return goOn
	}
	if v.Short {
		if written, ok := p.writeHalf(n); ok {
			return response{id: n.id, val: written}
		}
		return goOn
	}
	return response{id: n.id, errno: -int32(v.Errno)} //nolint:gosec // small numbers
}

// about is the file that a call is about, and whether it counts.
func (p *Process) about(n *notification, c call) (string, bool) {
	switch c.kind {
	case byNobody:
		return "", true
	case byFD:
		return p.counted(p.fdPath(n, n.args[0]))
	case byMap:
		return p.counted(p.fdPath(n, n.args[4]))
	case byPath:
		return p.counted(p.text(n, n.args[0]))
	case byTwoAt:
		if path, ok := p.counted(p.atPath(n, n.args[2], n.args[3])); ok {
			return path, true
		}
	}
	return p.counted(p.atPath(n, n.args[0], n.args[1]))
}

func (p *Process) atPath(n *notification, dir, at uint64) string {
	path := p.text(n, at)
	if filepath.IsAbs(path) || int32(dir) == unix.AT_FDCWD { //nolint:gosec // as the kernel reads it
		return path
	}
	return filepath.Join(p.fdPath(n, dir), path)
}

func (p *Process) fdPath(n *notification, fd uint64) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", n.pid, int32(fd))) //nolint:gosec // as the kernel reads it
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(path, " (deleted)")
}

func (p *Process) counted(path string) (string, bool) {
	for _, root := range p.o.Under {
		if path == root || strings.HasPrefix(path, strings.TrimSuffix(root, "/")+"/") || strings.HasPrefix(root, "/memfd:") && strings.HasPrefix(path, root) {
			return path, true
		}
	}
	return path, false
}

// memory reads the subject's memory.
func (p *Process) memory(n *notification, at uint64, size int) []byte {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", n.pid))
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, size)
	got, _ := f.ReadAt(b, int64(at)) //nolint:gosec // an address
	return b[:got]
}

// text reads a string that ends with a zero, up to the end of its page at least.
func (p *Process) text(n *notification, at uint64) string {
	const page = 4096
	var out []byte
	for len(out) < page {
		part := p.memory(n, at, int(page-at%page)) //nolint:gosec // below a page
		if len(part) == 0 {
			return ""
		}
		if end := bytes.IndexByte(part, 0); end >= 0 {
			return string(append(out, part[:end]...))
		}
		out = append(out, part...)
		at += uint64(len(part))
	}
	return string(out)
}

// writeHalf does half of a write in the subject's place.
func (p *Process) writeHalf(n *notification) (int64, bool) {
	size := int(n.args[2] / 2) //nolint:gosec // a part of a write
	b := p.memory(n, n.args[1], size)
	if size == 0 || len(b) != size {
		return 0, false
	}
	fd, err := unix.PidfdGetfd(p.pidfd, int(int32(n.args[0])), 0) //nolint:gosec // as the kernel reads it
	if err != nil {
		return 0, false
	}
	defer func() { _ = unix.Close(fd) }()
	var written int
	if n.nr == unix.SYS_PWRITE64 {
		written, err = unix.Pwrite(fd, b, int64(n.args[3])) //nolint:gosec // an offset
	} else {
		written, err = unix.Write(fd, b)
	}
	return int64(written), err == nil
}

// Count is how many calls counted so far.
func (p *Process) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.count
}

// Calls are the calls that counted so far, in order.
func (p *Process) Calls() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.mu.calls...)
}

// Hit says which call was failed, and how; empty while none was. more: it has variants
// behind this one.
func (p *Process) Hit() (what string, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.hit, p.mu.left > 0
}

// Harmless reports that what was done to the call is no failure (a write that writes less goes on).
func (p *Process) Harmless() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.how.Short
}

// Log is what the subject has logged.
func (p *Process) Log() string { return p.log.String() }

// Release ends the subject, if it still runs, and gives everything back.
func (p *Process) Release() {
	p.End()
	<-p.done
	_ = unix.Close(p.listener)
	_ = unix.Close(p.pidfd)
}

// Await reads what the subject says next.
func (p *Process) Await() (r Ready, err error) {
	err = p.Next(&r)
	if errors.Is(err, io.EOF) {
		err = p.Failure(fmt.Errorf("it ended without a word: %w", err))
	}
	return r, err
}
