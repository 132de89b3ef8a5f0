package gpu

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/gpu/fake"
)

// What a wait answers decides whether the device is lost: by what cuda.h says of a code.
func TestCodesOfAWait(t *testing.T) {
	of := func(first, last int) (codes []int) {
		for c := first; c <= last; c++ {
			codes = append(codes, c)
		}
		return codes
	}
	for _, c := range []struct {
		what  string
		codes []int
		lost  bool
	}{
		{"the call's", append([]int{2, 800, 801, 909}, of(900, 908)...), false},
		{"inconsistent process", append([]int{226, 700, 702, 721, 911}, of(714, 719)...), true},
		{"context", []int{4, 201, 400, 709, 710}, true},
		{"hardware", []int{214, 220}, true},
		{"another process", of(805, 810), true},
		{"unknown", []int{1, 304, 999, 12345}, true},
	} {
		for _, code := range c.codes {
			t.Run(fmt.Sprint(c.what, " ", code), func(t *testing.T) {
				lost, moved := waits(t, 0, func(n int) error {
					if n == 1 || n == 2 && !c.lost {
						return waitFailed(code, "cuEventQuery", "NAME")
					}
					return nil
				})
				if lost != c.lost || moved == c.lost {
					t.Errorf("lost %v, moved %v", lost, moved)
				}
			})
		}
	}
}

// A question that is never answered loses the device too, after a time.
func TestNoAnswerAtAll(t *testing.T) {
	began := time.Now()
	lost, moved := waits(t, answerTimeout, func(int) error { return waitFailed(900, "cuEventQuery", "NAME") })
	if took := time.Since(began); !lost || moved || took < answerTimeout {
		t.Errorf("lost %v, moved %v, after %v", lost, moved, took)
	}
}

const answerTimeout = 50 * time.Millisecond

// waits saves a page on a device whose waits answer so, and says what came of it.
func waits(t *testing.T, patience time.Duration, answer func(n int) error) (lost, moved bool) {
	t.Helper()
	d := fake.New()
	defer d.Free()
	n := 0
	d.Faults.Wait = func() error { n++; return answer(n) }
	e, err := engine.Open(d, engine.Config{StagingBytes: 4 << 20, AnswerTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(page) }()
	if _, err := e.Register(t.Context(), page, 4096, engine.ReadWrite); err != nil {
		t.Fatal(err)
	}
	block := d.Alloc(4096)
	block[77] = 9
	save := &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{{
		Host: page, Mapped: engine.Registered, SizeBytes: 4096, PieceBytes: 4096, Blocks: []uint32{0},
		Layout: &engine.Layout{BlockCount: 1, Layers: []engine.Layer{{Base: fake.Address(block), RunBytes: 4096, Offsets: []int64{0}}}},
	}}}
	if err := e.Run(save); err != nil {
		t.Fatal(err)
	}
	lost = e.Lost() != nil
	if o := save.Objects[0]; (o.Err != nil) != lost || lost && !errors.Is(o.Err, base.ErrFault) {
		t.Errorf("lost %v, and the object says %v", lost, o.Err)
	} else {
		moved = o.Err == nil && page[77] == 9
	}
	if err := e.Close(); err != nil && !lost {
		t.Error(err)
	}
	return lost, moved
}
