package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/xcena-dev/maru/internal/base"
)

const (
	roleEnv   = "MARU_TEST_CHILD"
	socketEnv = "MARU_TEST_SOCKET"
)

func init() {
	// Only here is the main goroutine sure to be on the first thread.
	if os.Getenv(roleEnv) == "zombie-leader" {
		runtime.LockOSThread()
	}
}

// childMain is what the test binary does when it is started again as a child.
func childMain(role string) {
	conn := io.Closer(io.NopCloser(nil))
	if s := os.Getenv(socketEnv); s != "" {
		c, err := net.Dial("unix", s)
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		conn = c
	}
	switch role {
	case "wait":
		fmt.Println("ready")
	case "watch":
		watchMain()
	case "zombie-leader":
		// The first thread exits, the rest of the process lives on.
		if unix.Gettid() != unix.Getpid() {
			fmt.Println("error: not the first thread")
			os.Exit(1)
		}
		fmt.Println("ready")
		go func() {
			runtime.LockOSThread()
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(0)
		}()
		time.Sleep(50 * time.Millisecond)
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = conn.Close()
}

// watchMain is a daemon in a pid namespace of its own: it says what it knows of a peer.
func watchMain() {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: os.Getenv("MARU_TEST_LISTEN"), Net: "unix"})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("ready")
	conn, err := l.AcceptUnix()
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	v, err := newView()
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	blind := v.blind
	// With a /proc of its own namespace the daemon would see, and not see the peer.
	v.blind = ""
	var p, q *Peer
	var errOld error
	raw, _ := conn.SyscallConn()
	_ = raw.Control(func(fd uintptr) {
		p, err = v.fromSocket(int(fd), peerPidfd)
		q, errOld = v.fromSocket(int(fd), noPeerPidfd)
	})
	if err != nil || q != nil {
		fmt.Println("error", err, q)
		os.Exit(1)
	}
	w, _ := NewWatcher(0)
	ended := make(chan string, 1)
	watchErr := w.Watch(Key{1}, p, func(proof string) { ended <- proof })
	fmt.Printf("blind %q\npid %d\nunprovable %q\nwithout pidfd %v\nwatch %v\n", blind, p.Process.PID, p.Unprovable, errOld, watchErr)
	fmt.Printf("ended %q\n", <-ended)
}

type child struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

func start(t *testing.T, role, socket string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), roleEnv+"="+role, socketEnv+"="+socket)
	var err error
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Fatalf("child said %q, %v", line, err)
	}
	return c
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
	_ = c.stdin.Close()
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// process names a child without a socket.
func process(t *testing.T, pid int) Process {
	t.Helper()
	p, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	p.PID = pid
	if p.StartTicks, err = startTicks(pid); err != nil {
		t.Fatal(err)
	}
	return p
}

func listen(t *testing.T) *net.UnixListener {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.(*net.UnixListener)
}

func watcher(t *testing.T) *Watcher {
	t.Helper()
	w, err := NewWatcher(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// noPeerPidfd is a kernel before 6.5.
func noPeerPidfd(int) (int, error) { return -1, unix.ENOPROTOOPT }

func fromConn(t *testing.T, c *net.UnixConn, pidfdOf func(int) (int, error)) (*Peer, error) {
	t.Helper()
	v, err := newView()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var p *Peer
	if ctl := raw.Control(func(fd uintptr) { p, err = v.fromSocket(int(fd), pidfdOf) }); ctl != nil {
		t.Fatal(ctl)
	}
	return p, err
}

func TestFromConnAndWatch(t *testing.T) {
	for name, ask := range map[string]func(int) (int, error){"peerpidfd": peerPidfd, "peercred": noPeerPidfd} {
		t.Run(name, func(t *testing.T) {
			l := listen(t)
			ch := start(t, "wait", l.Addr().String())
			conn, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close() //nolint:errcheck // test
			p, err := fromConn(t, conn, ask)
			if err != nil {
				t.Fatal(err)
			}
			if p.Process != process(t, ch.pid()) || p.UID != uint32(os.Getuid()) || !p.Provable() {
				t.Errorf("peer %+v (%s), child %d", p, p.Unprovable, ch.pid())
			}
			// No descriptor goes to a child: it would keep nothing alive, but leak.
			second, err := p.dup()
			if err != nil {
				t.Fatal(err)
			}
			for _, fd := range []int{p.mu.fd, second} {
				if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
					t.Errorf("descriptor %d is inherited: %d, %v", fd, fl, err)
				}
			}
			_ = unix.Close(second)
			w := watcher(t)
			got := make(chan string, 1)
			if err := w.Watch(Key{1}, p, func(proof string) { got <- proof }); err != nil {
				t.Fatal(err)
			}
			p.Close()
			p.Close()
			if _, err := p.Ended(); !errors.Is(err, base.ErrClosed) {
				t.Errorf("closed peer: %v", err)
			}
			// Neither a lost connection nor a stopped process is a proof.
			_ = ch.cmd.Process.Signal(syscall.SIGSTOP)
			_ = conn.Close()
			select {
			case proof := <-got:
				t.Fatalf("proof of a stopped process: %s", proof)
			case <-time.After(100 * time.Millisecond):
			}
			ch.kill()
			select {
			case proof := <-got:
				if !strings.Contains(proof, strconv.Itoa(ch.pid())) {
					t.Errorf("proof %q", proof)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("no proof of a killed process")
			}
			if w.Count() != 0 {
				t.Errorf("%d watched", w.Count())
			}
		})
	}
}

func TestFromConnOfTheDead(t *testing.T) {
	for name, ask := range map[string]func(int) (int, error){"peerpidfd": peerPidfd, "peercred": noPeerPidfd} {
		l := listen(t)
		ch := start(t, "wait", l.Addr().String())
		ch.kill()
		conn, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		if p, err := fromConn(t, conn, ask); !errors.Is(err, base.ErrClosed) {
			t.Errorf("%s: %v, %v", name, p, err)
		}
		_ = conn.Close()
	}
}

// TestZombieLeader: /proc shows Z, but the process still runs and could write.
func TestZombieLeader(t *testing.T) {
	l := listen(t)
	ch := start(t, "zombie-leader", l.Addr().String())
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // test
	p, err := FromConn(conn)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", ch.pid()))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), ") Z ") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("leader did not become a zombie: %s", b)
		}
	}
	if over, err := p.Ended(); err != nil || over {
		t.Errorf("a zombie leader with live threads counts as ended (%v)", err)
	}
	if q, gone, err := Reopen(p.Process); err != nil || gone {
		t.Errorf("reopen: gone %v, %v", gone, err)
	} else {
		q.Close()
	}
	w := watcher(t)
	got := make(chan string, 1)
	if err := w.Watch(Key{1}, p, func(s string) { got <- s }); err != nil {
		t.Fatal(err)
	}
	select {
	case s := <-got:
		t.Fatalf("proof too early: %s", s)
	case <-time.After(100 * time.Millisecond):
	}
	_ = ch.stdin.Close()
	select {
	case <-got:
	case <-time.After(10 * time.Second):
		t.Fatal("no proof at the end")
	}
}

func TestReopen(t *testing.T) {
	ch := start(t, "wait", "")
	p := process(t, ch.pid())
	q, gone, err := Reopen(p)
	if err != nil || gone {
		t.Fatalf("alive: gone %v, %v", gone, err)
	}
	defer q.Close()

	reused := p
	reused.StartTicks++
	if _, gone, err := Reopen(reused); err != nil || !gone {
		t.Errorf("pid of a later process: gone %v, %v", gone, err)
	}
	booted := p
	booted.BootID[0] ^= 1
	if _, gone, err := Reopen(booted); err != nil || !gone {
		t.Errorf("other boot: gone %v, %v", gone, err)
	}
	elsewhere := p
	elsewhere.PIDNamespace++
	if _, gone, err := Reopen(elsewhere); !errors.Is(err, base.ErrUnknown) || gone {
		t.Errorf("other pid namespace: gone %v, %v", gone, err)
	}
	for _, bad := range []Process{{}, {PID: 1}, {PID: -1, PIDNamespace: 1, StartTicks: 1, BootID: p.BootID}} {
		if _, gone, err := Reopen(bad); !errors.Is(err, base.ErrInvalid) || gone {
			t.Errorf("%+v: gone %v, %v", bad, gone, err)
		}
	}
	blind := view{pidNamespace: p.PIDNamespace, boot: p.BootID, blind: "test"}
	if _, gone, err := blind.reopen(p); !errors.Is(err, base.ErrUnknown) || gone {
		t.Errorf("blind: gone %v, %v", gone, err)
	}

	// Ended but not reaped, then reaped.
	_ = ch.cmd.Process.Kill()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if over, err := q.Ended(); err != nil {
			t.Fatal(err)
		} else if over {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a killed process does not end")
		}
	}
	if _, gone, err := Reopen(p); err != nil || !gone {
		t.Errorf("not reaped: gone %v, %v", gone, err)
	}
	_ = ch.cmd.Wait()
	if _, gone, err := Reopen(p); err != nil || !gone {
		t.Errorf("reaped: gone %v, %v", gone, err)
	}
	w := watcher(t)
	if gone, err := w.WatchProcess(Key{}, p, func(string) { t.Error("called") }); err != nil || !gone {
		t.Errorf("watching the dead: gone %v, %v", gone, err)
	}
}

// TestReopenThreadNumber: the number of the dead belongs to a thread of another process.
func TestReopenThreadNumber(t *testing.T) {
	tid, stop := make(chan int), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		tid <- unix.Gettid()
		<-stop
	}()
	n := <-tid
	defer close(stop)
	if n == os.Getpid() {
		t.Skip("the goroutine got the first thread")
	}
	p := process(t, n)
	if _, gone, err := Reopen(p); err != nil || !gone {
		t.Errorf("gone %v, %v", gone, err)
	}
}

func TestWatchKeys(t *testing.T) {
	a, b := start(t, "wait", ""), start(t, "wait", "")
	pa, pb := process(t, a.pid()), process(t, b.pid())
	w, err := NewWatcher(2)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	got := make(chan string, 8)
	say := func(s string) func(string) { return func(string) { got <- s } }
	watch := func(k byte, p Process, s string) error {
		_, err := w.WatchProcess(Key{k}, p, say(s))
		return err
	}
	if err := watch(1, pa, "first"); err != nil {
		t.Fatal(err)
	}
	if err := watch(1, pa, "second"); err != nil {
		t.Fatal(err)
	}
	if err := watch(1, pb, "other"); !errors.Is(err, base.ErrExists) {
		t.Errorf("other process under one key: %v", err)
	}
	if err := watch(2, pa, "also a"); err != nil {
		t.Fatal(err)
	}
	if err := watch(3, pb, "b"); !errors.Is(err, base.ErrLimit) {
		t.Errorf("over the bound: %v", err)
	}
	if !w.Unwatch(Key{2}) || w.Unwatch(Key{2}) {
		t.Error("unwatch")
	}
	// A callback may use the watcher.
	if err := watch(2, pb, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := w.WatchProcess(Key{2}, pb, func(string) {
		w.Unwatch(Key{1})
		got <- "b ended"
	}); err != nil {
		t.Fatal(err)
	}
	a.kill()
	if s := <-got; s != "second" {
		t.Errorf("called %q", s)
	}
	b.kill()
	if s := <-got; s != "b ended" {
		t.Errorf("called %q", s)
	}
	w.Close()
	if err := watch(4, process(t, os.Getpid()), "x"); !errors.Is(err, base.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	select {
	case s := <-got:
		t.Errorf("called %q once more", s)
	default:
	}
}

// TestOtherPIDNamespace: a daemon in a container whose engine runs elsewhere can watch it
// now, but could not find it again, and on an old kernel not even that.
func TestOtherPIDNamespace(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=watch", socketEnv+"=", "MARU_TEST_LISTEN="+socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Skip("needs the right to make a pid namespace: ", err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatalf("the daemon said %q", lines.Text())
	}
	engine := start(t, "wait", socket)
	expect := func(prefix, part string) {
		t.Helper()
		if !lines.Scan() || !strings.HasPrefix(lines.Text(), prefix) || !strings.Contains(lines.Text(), part) {
			t.Fatalf("the daemon said %q, expected %s ... %s", lines.Text(), prefix, part)
		}
	}
	expect("blind ", "/proc belongs to another pid namespace")
	expect("pid ", "0")
	expect("unprovable ", "cannot see; run the daemon in the host's")
	expect("without pidfd ", "run the daemon in the host's pid namespace")
	expect("watch ", "<nil>")
	engine.kill()
	expect("ended ", "pidfd readable")
}

func TestParseStartTicks(t *testing.T) {
	tail := strings.Repeat("0 ", 18)
	good := "7 (a) b) (c) S " + tail + "4711 0 0"
	if n, err := parseStartTicks([]byte(good)); err != nil || n != 4711 {
		t.Errorf("%d, %v", n, err)
	}
	for _, bad := range []string{"", "7", "7 (a) S 1 2", "7 (a) S " + tail + "x", "7 (a) S " + tail + "-1", "7 (a) S " + tail + "0"} {
		if n, err := parseStartTicks([]byte(bad)); err == nil {
			t.Errorf("%q: %d", bad, n)
		}
	}
}

func FuzzParseStartTicks(f *testing.F) {
	f.Add([]byte("7 (a) S " + strings.Repeat("0 ", 18) + "1 2"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := parseStartTicks(b); err == nil && n == 0 {
			t.Fatal("start time 0")
		}
	})
}

type whoServer struct {
	grpc_health_v1.UnimplementedHealthServer
	seen chan *Peer
}

func (s whoServer) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	s.seen <- FromContext(ctx)
	return &grpc_health_v1.HealthCheckResponse{}, nil
}

func TestCredentials(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ux := listen(t)
	who := whoServer{seen: make(chan *Peer, 1)}
	s := grpc.NewServer(grpc.Creds(ServerCredentials()))
	grpc_health_v1.RegisterHealthServer(s, who)
	done := make(chan struct{}, 2)
	for _, l := range []net.Listener{tcp, ux} {
		go func() { _ = s.Serve(l); done <- struct{}{} }()
	}
	for target, local := range map[string]bool{"unix:" + ux.Addr().String(): true, tcp.Addr().String(): false} {
		conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if _, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{}); err != nil {
			t.Fatal(err)
		}
		cancel()
		p := <-who.seen
		if local != (p != nil) {
			t.Errorf("%s: peer %v", target, p)
		}
		if p != nil && p.Process != process(t, os.Getpid()) {
			t.Errorf("%s: peer %v", target, p)
		}
		_ = conn.Close()
		if p == nil {
			continue
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			if _, err := p.Ended(); errors.Is(err, base.ErrClosed) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("the pidfd outlives its connection")
			}
		}
		// A handler that comes late still can watch.
		w := watcher(t)
		if err := w.Watch(Key{1}, p, func(string) {}); err != nil {
			t.Error(err)
		}
	}
	s.Stop()
	<-done
	<-done
	if FromContext(context.Background()) != nil {
		t.Error("a peer from nowhere")
	}
}
