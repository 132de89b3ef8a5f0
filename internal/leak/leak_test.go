package leak

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { Check(m) }

// check runs a body as if it were a package's tests and returns status and message.
func check(body func()) (int, string) {
	var said strings.Builder
	code := run(func() int { body(); return 0 }, said.WriteString, 50*time.Millisecond)
	return code, said.String()
}

func TestNothingLeft(t *testing.T) {
	if code, said := check(func() {}); code != 0 || said != "" {
		t.Errorf("status %d: %s", code, said)
	}
	if code := run(func() int { return 3 }, nil, 0); code != 3 {
		t.Errorf("a failed test gives %d", code)
	}
}

func TestDescriptor(t *testing.T) {
	var f *os.File
	code, said := check(func() { f, _ = os.Open(os.DevNull) })
	_ = f.Close()
	if code != 1 || !strings.Contains(said, "file descriptor /dev/null") {
		t.Errorf("status %d: %s", code, said)
	}
	var r, w *os.File
	code, said = check(func() { r, w, _ = os.Pipe() })
	_, _ = r.Close(), w.Close()
	if code != 1 || !strings.Contains(said, "2 more of file descriptor pipe") {
		t.Errorf("status %d: %s", code, said)
	}
}

func TestMapping(t *testing.T) {
	var b []byte
	code, said := check(func() {
		fd, err := unix.MemfdCreate("left", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd) //nolint:errcheck // test
		if err := unix.Ftruncate(fd, 8192); err != nil {
			t.Fatal(err)
		}
		if b, err = unix.Mmap(fd, 0, 8192, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			t.Fatal(err)
		}
	})
	if code != 1 || !strings.Contains(said, "shared mapping of /memfd:left") {
		t.Errorf("status %d: %s", code, said)
	}
	if err := unix.Munmap(b); err != nil {
		t.Error(err)
	}
}

func TestGoroutine(t *testing.T) {
	stop := make(chan struct{})
	code, said := check(func() { go func() { <-stop }() })
	close(stop)
	if code != 1 || !strings.Contains(said, "goroutines") {
		t.Errorf("status %d: %s", code, said)
	}
}
