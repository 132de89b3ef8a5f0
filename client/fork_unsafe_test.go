package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// forkChild makes the test binary a client that forks: the server's address and the path
// of the pool.
const forkChild = "MARU_TEST_CLIENT_FORK"

func init() {
	raw := os.Getenv(forkChild)
	if raw == "" {
		return
	}
	address, pool, _ := strings.Cut(raw, " ")
	if err := forkMain(address, pool); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	fmt.Println("ok")
	os.Exit(0)
}

// What a forked child finds at a page.
const (
	pageIsMapped = 10
	pageIsNot    = 11
)

// residency is where mincore answers; it must not move.
var residency [16]byte

// forked forks, without exec, and gives what the child finds at an address. The child has
// one thread and no runtime: it makes system calls and ends.
//
//go:norace
func forked(address uintptr) (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if pid == 0 {
		_, _, errno := syscall.RawSyscall(syscall.SYS_MINCORE, address, 4096, uintptr(unsafe.Pointer(&residency[0])))
		code := uintptr(pageIsMapped)
		if errno == syscall.ENOMEM {
			code = pageIsNot
		}
		for {
			_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, code, 0, 0)
		}
	}
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(int(pid), &status, 0, nil)
		if !errors.Is(err, unix.EINTR) {
			return status.ExitStatus(), err
		}
	}
}

func forkMain(address, pool string) error {
	c, err := Open(context.Background(), farConfig(address, NoAgent, slog.New(slog.NewTextHandler(os.Stderr, nil))))
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(context.Background()) }()
	m := c.region(c.OwnedRegions()[0])
	if m == nil {
		return errors.New("no region is mapped")
	}
	// First that it would be seen: memory of the runtime is there in the child.
	own := make([]byte, 3*4096)
	at := (uintptr(unsafe.Pointer(&own[0])) + 4095) &^ 4095
	for i := range own {
		own[i] = 1
	}
	for what, x := range map[string]struct {
		address uintptr
		want    int
	}{
		"the heap":              {at, pageIsMapped},
		"a region":              {uintptr(unsafe.Pointer(&m.data[0])), pageIsNot},
		"the last page of it":   {uintptr(unsafe.Pointer(&m.data[len(m.data)-4096])), pageIsNot},
		"the records of it too": {uintptr(unsafe.Pointer(&m.records[0])) &^ 4095, pageIsNot},
	} {
		got, err := forked(x.address)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if got != x.want {
			return fmt.Errorf("%s: the child ended with %d (%d: mapped, %d: not), want %d", what, got, pageIsMapped, pageIsNot, x.want)
		}
	}
	runtime.KeepAlive(own)
	// A child that executes another program gets no descriptor of the pool.
	out, err := exec.Command("ls", "-l", "/proc/self/fd").CombinedOutput()
	if err == nil && strings.Contains(string(out), pool) {
		err = fmt.Errorf("descriptors of an executed child:\n%s", out)
	}
	return err
}

// A process that forked and died leaves a child without any mapping of the pool: so the
// end of the process that held is the end of the mapping (docs/PROTOCOL.md, "Proof that a
// mapper is gone").
func TestForkedChildMapsNothing(t *testing.T) {
	l := startLab(t, 256<<20)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), forkChild+"="+l.srv.ControlAddress()+" "+l.path)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "ok\n") {
		t.Fatalf("%v\n%s", err, out)
	}
}
