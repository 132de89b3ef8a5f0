package flush

import (
	"runtime"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTouches: the instructions go to every line of the range and to none after it;
// a missing page is a panic of the goroutine that can be recovered.
func TestTouches(t *testing.T) {
	withMethods(t, func(t *testing.T) {
		page := unix.Getpagesize()
		b, err := unix.Mmap(-1, 0, 4*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(b) }()
		for i := range b {
			b[i] = 1
		}
		if err := unix.Mprotect(b[3*page:], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
		for _, f := range []func(...[]byte) error{WriteBack, Invalidate} {
			if fault(f, b[:3*page]) || fault(f, b[3*page-1:3*page]) {
				t.Error("a line after the range was touched")
			}
			// Emulators take DC CVAC for nothing, so only x86 shows this.
			if runtime.GOARCH == "amd64" && (!fault(f, b[:3*page+1]) || !fault(f, b[3*page:3*page+1])) {
				t.Error("the last line was not touched")
			}
		}
	})
}

func fault(f func(...[]byte) error, b []byte) (fell bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			_, fell = r.(runtime.Error)
		}
	}()
	return f(b) != nil
}
