package cpu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/media/hugetlb/hugetlbtest"
	"github.com/xcena-dev/maru/internal/media/numa"
)

func TestMain(m *testing.M) { leak.Check(m) }

// machine fakes /proc/meminfo with so many KiB available.
func machine(t *testing.T, availableKiB string) string {
	t.Helper()
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	text := "MemTotal: 99999999 kB\nMemAvailable: " + availableKiB + " kB\n"
	if err := os.WriteFile(filepath.Join(root, "proc/meminfo"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestSegments(t *testing.T) {
	p, err := New(Options{SizeBytes: 9<<20 + 4096, SegmentBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var sizes []uint64
	var sum uint64
	for _, m := range p.Segments() {
		sizes = append(sizes, m.SizeBytes())
		sum += uint64(len(m.Bytes()))
	}
	if len(sizes) != 3 || sizes[0] != 4<<20 || sizes[1] != 4<<20 || sizes[2] != 1<<20+4096 || sum != p.SizeBytes() {
		t.Errorf("sizes %v, sum %d", sizes, sum)
	}
	for i, m := range p.Segments() {
		if err := m.Guard(func() { m.Bytes()[0] = byte(i + 1) }); err != nil {
			t.Error(err)
		}
		// Sealed: the memory cannot be cut away.
		if err := unix.Ftruncate(p.FD(i), 4096); !errors.Is(err, unix.EPERM) {
			t.Errorf("truncating segment %d: %v", i, err)
		}
		if err := unix.Ftruncate(p.FD(i), 1<<30); !errors.Is(err, unix.EPERM) {
			t.Errorf("growing segment %d: %v", i, err)
		}
		fl, err := unix.FcntlInt(uintptr(p.FD(i)), unix.F_GETFD, 0)
		if err != nil || fl&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor of segment %d is inherited: %d, %v", i, fl, err)
		}
	}
	if err := p.Populate(context.Background(), 2); err != nil {
		t.Error(err)
	}
	for i, m := range p.Segments() {
		if m.Bytes()[0] != byte(i+1) {
			t.Errorf("segment %d lost a byte", i)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := p.Close(); !errors.Is(err, base.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
	if err := p.Populate(context.Background(), 1); !errors.Is(err, base.ErrClosed) {
		t.Errorf("populate after close: %v", err)
	}
}

func TestRefuses(t *testing.T) {
	root := machine(t, "1024")
	cases := []struct {
		name string
		o    Options
		want error
		text string
	}{
		{"zero", Options{}, base.ErrInvalid, "0 bytes"},
		{"unaligned", Options{SizeBytes: 4097}, base.ErrInvalid, "4097"},
		{"segment", Options{SizeBytes: 4096, SegmentBytes: 4096}, base.ErrInvalid, "segment size"},
		{"segments", Options{SizeBytes: 1 << 40, SegmentBytes: 2 << 20}, base.ErrLimit, "larger"},
		{"astronomic", Options{SizeBytes: 1 << 60}, base.ErrInvalid, "any machine"},
		{"memory", Options{SizeBytes: 2 << 20, Root: root}, base.ErrInvalid, "overcommit"},
		{"unknown memory", Options{SizeBytes: 4096, Root: t.TempDir()}, base.ErrUnavailable, "overcommit"},
		{"huge pages, unaligned", Options{SizeBytes: 4096, HugePages: HugePages2M}, base.ErrInvalid, "2097152"},
	}
	for _, c := range cases {
		p, err := New(c.o)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", c.name, err)
		}
		if p != nil {
			_ = p.Close()
		}
	}
	p, err := New(Options{SizeBytes: 2 << 20, Root: root, Overcommit: OvercommitAllow})
	if err != nil {
		t.Fatal(err)
	}
	_ = p.Close()
}

func TestReservedHugePages(t *testing.T) {
	p, err := New(Options{SizeBytes: 4 << 20, HugePages: HugePages2M})
	if err == nil {
		err = p.Segments()[0].Guard(func() { p.Segments()[0].Bytes()[0] = 1 })
		_ = p.Close()
	}
	// Most machines reserve none: then it is a clear error, with what to do.
	if err != nil && (!errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "nr_hugepages")) {
		t.Error(err)
	}
}

// TestLargePoolCostsNothing: 64 GiB are there and usable, and take no memory until they are
// touched. How fast they are there BenchmarkNew64GiB and maru bench start say.
func TestLargePoolCostsNothing(t *testing.T) {
	p, err := New(Options{SizeBytes: 64 << 30, Overcommit: OvercommitAllow, HugePages: HugePagesNone})
	if err != nil {
		t.Fatal(err)
	}
	last := p.Segments()[63]
	if err := last.Guard(func() { last.Bytes()[1<<30-1] = 1 }); err != nil {
		t.Error(err)
	}
	var taken int64
	for i := range p.Segments() {
		var st unix.Stat_t
		if err := unix.Fstat(p.FD(i), &st); err != nil {
			t.Fatal(err)
		}
		taken += st.Blocks * 512
	}
	if taken != 4096 {
		t.Errorf("%d bytes are taken after one byte was touched", taken)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// TestPopulateStopsBeforeTheKiller: an overcommitted pool is touched as far as memory goes.
func TestPopulateStopsBeforeTheKiller(t *testing.T) {
	p, err := New(Options{SizeBytes: 64 << 20, Overcommit: OvercommitAllow, Root: machine(t, "40960")})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close() //nolint:errcheck // test
	err = p.Populate(context.Background(), 2)
	if !errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "MemAvailable") {
		t.Errorf("%v", err)
	}
	// It is a convenience: the memory can be used all the same.
	if err := p.Segments()[0].Guard(func() { p.Segments()[0].Bytes()[1<<20] = 1 }); err != nil {
		t.Error(err)
	}
}

func BenchmarkNew64GiB(b *testing.B) {
	for b.Loop() {
		p, err := New(Options{SizeBytes: 64 << 30, Overcommit: OvercommitAllow})
		if err != nil {
			b.Fatal(err)
		}
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// Memory of one node, of transparent and of reserved huge pages.
func TestNodeAndHugePages(t *testing.T) {
	zero, far := 0, 900
	if _, err := numa.Nodes(""); err != nil {
		t.Skip(err)
	}
	if _, err := New(Options{SizeBytes: 4 << 20, NUMANode: &far}); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "node 900") {
		t.Errorf("a node that is not there: %v", err)
	}
	p, err := New(Options{SizeBytes: 4 << 20, NUMANode: &zero, Name: "maru-test-node"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	if line := numaLine(t, "maru-test-node"); !strings.Contains(line, " bind:0 ") {
		t.Errorf("policy %q", line)
	}
	if err := p.Populate(t.Context(), 1); err != nil {
		t.Error(err)
	}

	hugetlbtest.Reserve(t, 4)
	if _, err := New(Options{SizeBytes: 1 << 40, SegmentBytes: 1 << 40, HugePages: HugePages2M}); !errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "nr_hugepages") {
		t.Errorf("more than is reserved: %v", err)
	}
	if _, err := New(Options{SizeBytes: 3 << 20, HugePages: HugePages2M}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("half a page: %v", err)
	}
	h, err := New(Options{SizeBytes: 8 << 20, SegmentBytes: 4 << 20, NUMANode: &zero, HugePages: HugePages2M, Name: "maru-test-huge"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = h.Close() }()
	if err := h.Populate(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if line := numaLine(t, "maru-test-huge"); !strings.Contains(line, " bind:0 ") || !strings.Contains(line, "kernelpagesize_kB=2048") {
		t.Errorf("huge pages %q", line)
	}
	// All of it is taken: the next one is told what there is.
	if _, err := New(Options{SizeBytes: 2 << 20, HugePages: HugePages2M}); !errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "0 of them are free") {
		t.Errorf("a pool beside it: %v", err)
	}
}

func numaLine(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/numa_maps")
	if err != nil {
		t.Skip("the kernel shows no policies: ", err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, name) {
			return line
		}
	}
	return ""
}
