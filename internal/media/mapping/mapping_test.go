package mapping

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

// file makes a file of size bytes.
func file(t testing.TB, size int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "pool"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return f
}

func mapFile(t testing.TB, f *os.File, length uint64, a Access) *Mapping {
	t.Helper()
	m, err := Map(int(f.Fd()), 0, length, Options{Access: a, Name: "pool"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Unmap() })
	return m
}

func TestRoundTrip(t *testing.T) {
	f := file(t, 1<<20)
	w, r := mapFile(t, f, 1<<20, ReadWrite), mapFile(t, f, 1<<20, ReadOnly)
	if err := w.Guard(func() { copy(w.Bytes()[4096:], "bytes") }); err != nil {
		t.Fatal(err)
	}
	var got []byte
	if err := r.Guard(func() { got = bytes.Clone(r.Bytes()[4096:4101]) }); err != nil || string(got) != "bytes" {
		t.Errorf("%q, %v", got, err)
	}
	if LiveCount() != 2 {
		t.Errorf("%d live", LiveCount())
	}
}

func TestTruncatedFileIsAnError(t *testing.T) {
	f := file(t, 1<<20)
	m := mapFile(t, f, 1<<20, ReadWrite)
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	err := m.Guard(func() { m.Bytes()[8192] = 1 })
	if !errors.Is(err, base.ErrFault) || !strings.Contains(err.Error(), "pool") {
		t.Errorf("store: %v", err)
	}
	dst := make([]byte, 1<<20)
	if err := m.Guard(func() { copy(dst, m.Bytes()) }); !errors.Is(err, base.ErrFault) {
		t.Errorf("copy: %v", err)
	}
	if err := m.Populate(context.Background(), 1); !errors.Is(err, base.ErrFault) {
		t.Errorf("populate: %v", err)
	}
	// A copy between two mappings may fault in either, whoever guards.
	good := mapFile(t, file(t, 1<<20), 1<<20, ReadWrite)
	if err := good.Guard(func() { copy(good.Bytes(), m.Bytes()) }); !errors.Is(err, base.ErrFault) {
		t.Errorf("copy out: %v", err)
	}
	if err := good.Guard(func() { good.Bytes()[0] = 1 }); err != nil {
		t.Errorf("a fault elsewhere broke a good mapping: %v", err)
	}
}

// TestGuardLeavesNothing: outside of Guard a fault is a crash again, as in the rest of the process.
func TestGuardLeavesNothing(t *testing.T) {
	m := mapFile(t, file(t, 4096), 4096, ReadOnly)
	for _, fn := range []func(){func() {}, func() { m.Bytes()[0] = 1 }} {
		_ = m.Guard(fn)
		if debug.SetPanicOnFault(false) {
			t.Error("faults of this goroutine stay panics")
		}
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	_ = m.Guard(func() {})
	if !debug.SetPanicOnFault(true) {
		t.Error("an outer guard was ended by an inner one")
	}
}

func TestWriteToReadOnlyIsAnError(t *testing.T) {
	m := mapFile(t, file(t, 4096), 4096, ReadOnly)
	if err := m.Guard(func() { m.Bytes()[0] = 1 }); !errors.Is(err, base.ErrFault) {
		t.Errorf("%v", err)
	}
}

func TestOtherPanicsGoOn(t *testing.T) {
	m := mapFile(t, file(t, 4096), 4096, ReadWrite)
	panics := func(fn func()) (v any) {
		defer func() { v = recover() }()
		_ = m.Guard(fn)
		return nil
	}
	if v := panics(func() { panic("mine") }); v != "mine" {
		t.Errorf("panic became %v", v)
	}
	var nothing *int
	if v := panics(func() { *nothing = 1 }); v == nil {
		t.Error("a nil pointer was taken for a fault of the pool")
	}
	i := len(m.Bytes())
	if v := panics(func() { m.Bytes()[i] = 1 }); v == nil {
		t.Error("an index out of range was taken for a fault of the pool")
	}
	// As after Unmap, but at an address that nobody else can have got meanwhile.
	ro := mapFile(t, file(t, 4096), 4096, ReadOnly)
	start := addressOf(ro.Bytes())
	removeLive(start)
	if v := panics(func() { ro.Bytes()[0] = 1 }); v == nil {
		t.Error("a use after unmap was taken for a fault of the pool")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Guard(runtime.Goexit)
		t.Error("Goexit did not exit")
	}()
	<-done
}

// A range that the kernel does not unmap is there as before, and goes when it is asked again.
func TestUnmapAgain(t *testing.T) {
	defer func() { munmap = unix.Munmap }()
	munmap = func([]byte) error { return unix.ENOMEM }
	m := mapFile(t, file(t, 4096), 4096, ReadWrite)
	start := addressOf(m.Bytes())
	if err := m.Unmap(); !errors.Is(err, base.ErrInternal) || !errors.Is(err, unix.ENOMEM) {
		t.Fatal(err)
	}
	if !isLive(start) || len(m.Bytes()) != 4096 {
		t.Fatal("a range that is mapped is not known any more")
	}
	m.Bytes()[0] = 1
	munmap = unix.Munmap
	if err := m.Unmap(); err != nil || isLive(start) || m.Bytes() != nil {
		t.Fatal(err)
	}
	if err := m.Unmap(); !errors.Is(err, base.ErrClosed) {
		t.Fatal(err)
	}
}

func TestUnmapOnce(t *testing.T) {
	m := mapFile(t, file(t, 4096), 4096, ReadWrite)
	start := addressOf(m.Bytes())
	if !isLive(start) || !isLive(start+4095) || isLive(start+4096) || isLive(start-1) {
		t.Error("what counts as inside the mapping is wrong")
	}
	if err := m.Unmap(); err != nil {
		t.Fatal(err)
	}
	if isLive(start) {
		t.Error("faults at its address still count as its own")
	}
	if err := m.Unmap(); !errors.Is(err, base.ErrClosed) {
		t.Errorf("second unmap: %v", err)
	}
	if m.Bytes() != nil || m.SizeBytes() != 4096 {
		t.Errorf("%d bytes of %d", len(m.Bytes()), m.SizeBytes())
	}
	if err := m.Populate(context.Background(), 2); !errors.Is(err, base.ErrClosed) {
		t.Errorf("populate: %v", err)
	}
}

func TestMapRefuses(t *testing.T) {
	f := file(t, 1<<20)
	for _, c := range []struct{ offset, length uint64 }{{0, 0}, {1, 4096}, {0, 1}, {0, 1 << 63}, {1 << 63, 4096}} {
		if m, err := Map(int(f.Fd()), c.offset, c.length, Options{}); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%+v: %v, %v", c, m, err)
		}
	}
	ro, err := os.Open(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close() //nolint:errcheck // test
	if _, err := Map(int(ro.Fd()), 0, 4096, Options{Access: ReadWrite}); !errors.Is(err, base.ErrDenied) {
		t.Errorf("write to a descriptor for reading: %v", err)
	}
	if _, err := Map(int(f.Fd()), 0, 1<<47, Options{}); !errors.Is(err, base.ErrFull) {
		t.Errorf("more than there is address space: %v", err)
	}
	m, err := Map(int(f.Fd()), 0, 1<<20, Options{Access: ReadWrite, Sync: SyncIfAvailable, Advice: AdviceHugePages})
	if err != nil {
		t.Fatalf("MAP_SYNC must not be required: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// residentCount counts resident pages of a mapping.
func residentCount(t *testing.T, m *Mapping) int {
	t.Helper()
	var st unix.Stat_t
	fd, err := os.Open(m.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close() //nolint:errcheck // test
	if err := unix.Fstat(int(fd.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return int(st.Blocks * 512 / 4096)
}

func TestPopulate(t *testing.T) {
	const size = 40 << 20
	fd, err := unix.MemfdCreate("populate", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "populate")
	defer f.Close() //nolint:errcheck // test
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	m, err := Map(fd, 0, size, Options{Access: ReadWrite, Name: "/proc/self/fd/" + itoa(fd)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Unmap() //nolint:errcheck // test
	m.Bytes()[5000] = 7
	done, cancel := context.WithCancel(context.Background())
	cancel()
	if err := m.Populate(done, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if n := residentCount(t, m); n > size/4096/2 {
		t.Errorf("%d pages after a cancelled populate", n)
	}
	// A writer goes on meanwhile and loses nothing.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		b := m.Bytes()
		for i := 0; ; i = (i + 4096) % size {
			select {
			case <-stop:
				return
			default:
				b[i+1] = 9
			}
		}
	})
	err = m.Populate(context.Background(), 4)
	close(stop)
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if n := residentCount(t, m); n != size/4096 {
		t.Errorf("%d of %d pages are there", n, size/4096)
	}
	if m.Bytes()[5000] != 7 || m.Bytes()[1] != 9 {
		t.Error("populate changed bytes")
	}
}

func TestTouch(t *testing.T) {
	m := mapFile(t, file(t, 8192), 8192, ReadOnly)
	if err := m.Guard(func() { touch(m.Bytes()) }); err != nil {
		t.Error(err)
	}
}

// TestUnmapWhilePopulating: Unmap ends a populate in flight; under the race detector and
// with the address reused, a step after it would be seen.
func TestUnmapWhilePopulating(t *testing.T) {
	for range 20 {
		f := file(t, 64<<20)
		m, err := Map(int(f.Fd()), 0, 64<<20, Options{Access: ReadOnly, Name: "pool"})
		if err != nil {
			t.Fatal(err)
		}
		errs := make(chan error, 1)
		go func() { errs <- m.Populate(context.Background(), 2) }()
		time.Sleep(200 * time.Microsecond)
		if err := m.Unmap(); err != nil {
			t.Fatal(err)
		}
		if err := <-errs; err != nil && !errors.Is(err, base.ErrClosed) {
			t.Fatal(err)
		}
		_ = f.Close()
	}
}

// TestNotInherited: the kernel's own record of the mapping says "dc", do not copy on fork.
func TestNotInherited(t *testing.T) {
	m := mapFile(t, file(t, 4096), 4096, ReadWrite)
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	prefix := hex(addressOf(m.Bytes())) + "-"
	found := false
	for line := range strings.Lines(string(smaps)) {
		if strings.HasPrefix(line, prefix) {
			found = true
		}
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok && found {
			if !strings.Contains(flags, " dc") {
				t.Errorf("flags %s", flags)
			}
			return
		}
	}
	t.Error("the mapping is not in smaps")
}

func BenchmarkGuard(b *testing.B) {
	m := mapFile(b, file(b, 4096), 4096, ReadWrite)
	data := m.Bytes()
	b.Run("guarded", func(b *testing.B) {
		for b.Loop() {
			_ = Guard(func() { data[0]++ })
		}
	})
	b.Run("bare", func(b *testing.B) {
		fn := func() { data[0]++ }
		for b.Loop() {
			fn()
		}
	})
}
