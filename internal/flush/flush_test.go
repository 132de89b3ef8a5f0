package flush

import (
	"bytes"
	"errors"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// A test on one coherent host cannot see whether bytes reached memory: that is for
// the VM lab and for hosts that share a device. Here: which lines, which instructions,
// no byte changed, and refusal.

// methodsHere lists what this processor can run.
func methodsHere(t *testing.T) []Method {
	t.Helper()
	switch host.writeBack {
	case Clwb:
		return []Method{Clwb, ClflushOpt, Clflush}
	case ClflushOpt:
		return []Method{ClflushOpt, Clflush}
	case None:
		t.Skip("this processor has no cache line instructions")
	}
	return []Method{host.writeBack}
}

func withMethods(t *testing.T, f func(t *testing.T)) {
	was := host
	defer func() { host = was }()
	for _, m := range methodsHere(t) {
		host.writeBack = m
		host.invalidate = m
		if m == Clwb {
			host.invalidate = was.invalidate
		}
		t.Run(m.String(), f)
	}
}

func TestNoByteChanges(t *testing.T) {
	withMethods(t, func(t *testing.T) {
		b := make([]byte, 70_000)
		for i := range b {
			b[i] = byte(i * 7)
		}
		want := bytes.Clone(b)
		for _, r := range [][2]int{{0, 0}, {0, 1}, {63, 65}, {1, 69_999}, {64, 128}, {100, 100}} {
			if err := WriteBack(b[r[0]:r[1]]); err != nil {
				t.Fatal(err)
			}
			if err := Invalidate(b[r[0]:r[1]]); err != nil {
				t.Fatal(err)
			}
		}
		if err := WriteBack(nil, b[:100], b[200:4000], nil); err != nil {
			t.Fatal(err)
		}
		if err := WriteBack(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, want) {
			t.Error("bytes changed")
		}
	})
}

// TestLines compares with a count byte by byte (F1).
func TestLines(t *testing.T) {
	b := make([]byte, 1024)
	for _, size := range []uintptr{16, 64, 128} {
		p := processor{Clwb, ClflushOpt, size}
		for at := range 130 {
			for n := range 300 {
				seen := map[uintptr]bool{}
				for i := at; i < at+n; i++ {
					seen[address(b[i:])/size] = true
				}
				if _, got := p.lines(b[at : at+n]); int(got) != len(seen) {
					t.Fatalf("lines of %d bytes, range %d+%d: %d, want %d", size, at, n, got, len(seen))
				}
			}
		}
	}
}

func TestRefused(t *testing.T) {
	was := host
	defer func() { host = was }()
	host = processor{}
	b := []byte{1}
	if Supported() || How() != "none" {
		t.Errorf("supported %v, how %q", Supported(), How())
	}
	for _, err := range []error{WriteBack(b), Invalidate(b), WriteBack()} {
		if !errors.Is(err, base.ErrUnsupported) {
			t.Errorf("error %v", err)
		}
	}
}

func TestNoAllocation(t *testing.T) {
	if !Supported() {
		t.Skip("this processor has no cache line instructions")
	}
	b := make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		_ = WriteBack(b, b[:64])
		_ = Invalidate(b)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	t.Log(How())
}

func BenchmarkWriteBack(b *testing.B) {
	if !Supported() {
		b.Skip("this processor has no cache line instructions")
	}
	page := make([]byte, 2<<20)
	for _, state := range []string{"dirty", "clean"} {
		b.Run(state, func(b *testing.B) {
			b.SetBytes(int64(len(page)))
			for b.Loop() {
				if state == "dirty" {
					b.StopTimer()
					for i := 0; i < len(page); i += 64 {
						page[i]++
					}
					b.StartTimer()
				}
				if err := WriteBack(page); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkInvalidate(b *testing.B) {
	if !Supported() {
		b.Skip("this processor has no cache line instructions")
	}
	page := make([]byte, 2<<20)
	b.SetBytes(int64(len(page)))
	for b.Loop() {
		if err := Invalidate(page); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRecord is one record with its fence.
func BenchmarkRecord(b *testing.B) {
	if !Supported() {
		b.Skip("this processor has no cache line instructions")
	}
	page := make([]byte, 1<<20)
	at := 0
	for b.Loop() {
		page[at]++
		if err := WriteBack(page[at : at+64]); err != nil {
			b.Fatal(err)
		}
		at = (at + 64) % (len(page) - 64)
	}
}
