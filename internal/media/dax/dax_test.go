package dax

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

func TestMain(m *testing.M) { leak.Check(m) }

// shm makes a directory on tmpfs, which is what an emulated pool lies on.
func shm(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "maru-test-*")
	if err != nil {
		t.Skip("needs a tmpfs at /dev/shm: ", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func open(t *testing.T, path string, k Kind, o OpenOptions) *File {
	t.Helper()
	f, err := Open(path, k, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestMakeMapTruncate(t *testing.T) {
	for name, dir := range map[string]string{"tmpfs": shm(t), "disk": t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "pool")
			f := open(t, path, KindAuto, OpenOptions{Create: true, SizeBytes: 8 << 20, Lock: LockExclusive})
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil || st.Size != 8<<20 || st.Blocks*512 < 8<<20 || st.Mode&0o777 != 0o600 {
				t.Errorf("size %d, blocks %d, mode %o, %v", st.Size, st.Blocks, st.Mode, err)
			}
			if f.Kind() != KindFile || f.SizeBytes() != 8<<20 {
				t.Errorf("%v of %d bytes", f.Kind(), f.SizeBytes())
			}
			m, err := f.Map(2<<20, 4<<20, mapping.ReadWrite)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Unmap() //nolint:errcheck // test
			if err := m.Populate(context.Background(), 2); err != nil {
				t.Error(err)
			}
			if err := m.Guard(func() { copy(m.Bytes(), "value") }); err != nil {
				t.Error(err)
			}
			r := open(t, path, KindFile, OpenOptions{ReadOnly: true})
			rm, err := r.Map(2<<20, 4096, mapping.ReadOnly)
			if err != nil {
				t.Fatal(err)
			}
			defer rm.Unmap() //nolint:errcheck // test
			_ = r.Close()
			if string(rm.Bytes()[:5]) != "value" {
				t.Errorf("read %q", rm.Bytes()[:5])
			}
			if err := os.Truncate(path, 4096); err != nil {
				t.Fatal(err)
			}
			if err := m.Guard(func() { m.Bytes()[1<<20] = 1 }); !errors.Is(err, base.ErrFault) {
				t.Errorf("after truncation: %v", err)
			}
			if _, err := f.Map(0, 8<<20, mapping.ReadOnly); !errors.Is(err, base.ErrMismatch) {
				t.Errorf("mapping what was truncated: %v", err)
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pool")
	open(t, path, KindAuto, OpenOptions{Create: true, SizeBytes: 1 << 20})
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		path string
		kind Kind
		o    OpenOptions
		want error
		text string
	}{
		{"missing", filepath.Join(dir, "none"), KindAuto, OpenOptions{}, base.ErrNotFound, "none"},
		{"relative", "pool", KindAuto, OpenOptions{}, base.ErrInvalid, "absolute"},
		{"other size", path, KindAuto, OpenOptions{Create: true, SizeBytes: 2 << 20}, base.ErrMismatch, "1048576"},
		{"other size, not made", path, KindAuto, OpenOptions{SizeBytes: 2 << 20}, base.ErrMismatch, "1048576"},
		{"other kind", path, KindFsdax, OpenOptions{}, base.ErrMismatch, "fsdax"},
		{"file as devdax", path, KindDevdax, OpenOptions{}, base.ErrMismatch, "devdax"},
		{"directory", dir, KindAuto, OpenOptions{ReadOnly: true}, base.ErrInvalid, "neither"},
		{"fifo", fifo, KindAuto, OpenOptions{}, base.ErrInvalid, "neither"},
		{"not dax", "/dev/zero", KindAuto, OpenOptions{}, base.ErrInvalid, "no dax device"},
		{"made read-only", filepath.Join(dir, "x"), KindAuto, OpenOptions{Create: true, SizeBytes: 4096, ReadOnly: true}, base.ErrInvalid, "write access"},
		{"made without size", filepath.Join(dir, "x"), KindAuto, OpenOptions{Create: true}, base.ErrInvalid, "size"},
		{"made unaligned", filepath.Join(dir, "x"), KindAuto, OpenOptions{Create: true, SizeBytes: 4097}, base.ErrInvalid, "4097"},
		{"made nowhere", filepath.Join(dir, "no/x"), KindAuto, OpenOptions{Create: true, SizeBytes: 4096}, base.ErrNotFound, "no/x"},
		{"disk full", filepath.Join(dir, "x"), KindAuto, OpenOptions{Create: true, SizeBytes: 1 << 50}, base.ErrFull, "1024.00 TiB"},
	}
	for _, c := range cases {
		f, err := Open(c.path, c.kind, c.o)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.name, err)
		}
		if f != nil {
			_ = f.Close()
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestShmIsFull(t *testing.T) {
	dir := shm(t)
	path := filepath.Join(dir, "pool")
	_, err := Open(path, KindAuto, OpenOptions{Create: true, SizeBytes: 1 << 50, Overcommit: true})
	if !errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "remount") || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v", err)
	}
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "proc/meminfo"), []byte("MemAvailable: 1024 kB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := OpenOptions{Create: true, SizeBytes: 2 << 20, ProcRoot: root}
	if _, err := Open(path, KindAuto, o); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "overcommit") {
		t.Errorf("more than memory: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a refused pool was left: %v", err)
	}
	o.Overcommit = true
	open(t, path, KindAuto, o)
}

func TestNamedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	if _, err := makeNamedFile(path, OpenOptions{SizeBytes: 1 << 50}); !errors.Is(err, base.ErrFull) {
		t.Errorf("full: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
	f, err := makeNamedFile(path, OpenOptions{SizeBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if _, err := makeNamedFile(path, OpenOptions{SizeBytes: 1 << 20}); !errors.Is(err, os.ErrExist) {
		t.Errorf("twice: %v", err)
	}
}

func TestSparseFileIsFilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	if err := os.WriteFile(path, []byte("header"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 4<<20); err != nil {
		t.Fatal(err)
	}
	open(t, path, KindAuto, OpenOptions{Lock: LockExclusive})
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Size != 4<<20 || st.Blocks*512 < 4<<20 {
		t.Errorf("size %d, blocks %d, %v", st.Size, st.Blocks, err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b[:6]) != "header" {
		t.Errorf("the bytes changed: %q, %v", b[:6], err)
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	a := open(t, path, KindAuto, OpenOptions{Create: true, SizeBytes: 1 << 20, Lock: LockExclusive})
	if _, err := Open(path, KindAuto, OpenOptions{Lock: LockExclusive}); !errors.Is(err, base.ErrBusy) || !errors.Is(err, unix.EBUSY) {
		t.Errorf("second owner: %v", err)
	}
	open(t, path, KindAuto, OpenOptions{}) // a mapper takes no lock
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := a.Map(0, 4096, mapping.ReadOnly); !errors.Is(err, base.ErrClosed) {
		t.Errorf("mapping after close: %v", err)
	}
	open(t, path, KindAuto, OpenOptions{Lock: LockExclusive})
}

func TestMapRefuses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	f := open(t, path, KindAuto, OpenOptions{Create: true, SizeBytes: 1 << 20})
	for _, c := range []struct{ offset, length uint64 }{
		{0, 0}, {1, 4096}, {0, 4095}, {1 << 20, 4096}, {0, 2 << 20}, {1 << 40, 4096}, {^uint64(0) - 4095, 8192},
	} {
		if m, err := f.Map(c.offset, c.length, mapping.ReadOnly); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%+v: %v, %v", c, m, err)
		}
	}
	r := open(t, path, KindAuto, OpenOptions{ReadOnly: true})
	if _, err := r.Map(0, 4096, mapping.ReadWrite); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("write access: %v", err)
	}
}

// sysfs makes /sys with dax devices.
func sysfs(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	put := func(path, text string) {
		p := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i, driver := range []string{"device_dax", "kmem", "", "odd"} {
		dir := fmt.Sprintf("bus/dax/devices/dax%d.0", i)
		put(dir+"/size", fmt.Sprint(uint64(i+1)<<30)+"\n")
		put(dir+"/align", "2097152\n")
		put(dir+"/target_node", fmt.Sprint(i+1))
		put(dir+"/numa_node", "-1")
		if driver != "" {
			if err := os.Symlink("../../drivers/"+driver, filepath.Join(root, dir, "driver")); err != nil {
				t.Fatal(err)
			}
		}
	}
	put("bus/dax/devices/dax9.0/size", "not a number")
	return root
}

func TestDiscover(t *testing.T) {
	got, err := Discover(sysfs(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 {
		t.Fatalf("%+v", got)
	}
	want := Device{Name: "dax0.0", Path: "/dev/dax0.0", SizeBytes: 1 << 30, AlignBytes: 2 << 20, TargetNode: 1, NUMANode: -1, Driver: DriverDevice}
	if got[0] != want {
		t.Errorf("%+v", got[0])
	}
	for i, d := range []Driver{DriverDevice, DriverKmem, DriverNone, DriverOther} {
		if got[i].Driver != d {
			t.Errorf("%s: %v", got[i].Name, got[i].Driver)
		}
	}
	if got, err := Discover(t.TempDir()); err != nil || len(got) != 0 {
		t.Errorf("a machine without dax: %v, %v", got, err)
	}
}

// TestInspectDevice takes /dev/zero for a dax device, by a sysfs that says so: the way from
// device number to size and alignment is the same.
func TestInspectDevice(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "dev/char/1:5")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../../../bus/dax", filepath.Join(dir, "subsystem")); err != nil {
		t.Fatal(err)
	}
	o := OpenOptions{SysfsRoot: root, Lock: LockExclusive}
	if _, err := Open("/dev/zero", KindAuto, o); !errors.Is(err, base.ErrOffline) {
		t.Errorf("without size: %v", err)
	}
	for name, text := range map[string]string{"size": "1073741824", "align": "2097152"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := open(t, "/dev/zero", KindDevdax, o)
	if f.Kind() != KindDevdax || f.SizeBytes() != 1<<30 || f.AlignBytes() != 2<<20 {
		t.Errorf("%v, %d, %d", f.Kind(), f.SizeBytes(), f.AlignBytes())
	}
	if _, err := f.Map(4096, 2<<20, mapping.ReadOnly); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("unaligned: %v", err)
	}
	o.SizeBytes = 2 << 30
	o.Lock = LockNone
	if _, err := Open("/dev/zero", KindAuto, o); !errors.Is(err, base.ErrMismatch) {
		t.Errorf("too small: %v", err)
	}
}

func TestParseKind(t *testing.T) {
	for _, k := range []Kind{KindAuto, KindDevdax, KindFsdax, KindFile} {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("%v: %v, %v", k, got, err)
		}
	}
	if _, err := ParseKind("disk"); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("%v", err)
	}
}
