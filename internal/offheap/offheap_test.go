package offheap

import (
	"errors"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

func TestSlabs(t *testing.T) {
	for name, mem := range map[string]Allocator{"os": OS{}, "heap": Heap{}} {
		t.Run(name, func(t *testing.T) {
			s, err := mem.Reserve(64 << 20)
			if err != nil {
				t.Fatal(err)
			}
			b, err := s.Grow(100)
			if err != nil {
				t.Fatal(err)
			}
			v := View[uint64](b)
			if len(v) < 12 {
				t.Fatalf("%d words of 100 bytes", len(v))
			}
			for i := range v {
				if v[i] != 0 {
					t.Fatal("fresh memory is not zero")
				}
				v[i] = uint64(i) ^ 0x5555 //nolint:gosec // positive
			}
			have := len(v)
			for _, size := range []uint64{200, 1 << 20, 3 << 20, 2 << 20, 64 << 20} {
				if b, err = s.Grow(size); err != nil {
					t.Fatal(err)
				}
				if uint64(len(b)) < size {
					t.Fatalf("grew to %d bytes, wanted %d", len(b), size)
				}
				v = View[uint64](b)
				for i := range have {
					if v[i] != uint64(i)^0x5555 { //nolint:gosec // positive
						t.Fatalf("word %d is lost in growing to %d", i, size)
					}
				}
				if len(v) > have && v[len(v)-1] != 0 {
					t.Fatal("new memory is not zero")
				}
			}
			if s.CommittedBytes() < 64<<20 {
				t.Fatalf("%d bytes committed", s.CommittedBytes())
			}
			if _, err := s.Grow(64<<20 + 1); !errors.Is(err, base.ErrLimit) {
				t.Fatalf("growing beyond the reservation: %v", err)
			}
			if err := s.Free(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestReserveCostsNothing: address space is not memory.
func TestReserveCostsNothing(t *testing.T) {
	s, err := OS{}.Reserve(1 << 40)
	if err != nil {
		t.Fatal(err)
	}
	if s.CommittedBytes() != 0 {
		t.Fatal("a reservation commits memory")
	}
	if err := s.Free(); err != nil {
		t.Fatal(err)
	}
	if err := s.Free(); err != nil {
		t.Fatalf("a second Free: %v", err)
	}
	if _, err := (OS{}).Reserve(1 << 50); !errors.Is(err, base.ErrFull) {
		t.Fatalf("more than the address space: %v", err)
	}
}

func TestView(t *testing.T) {
	type pair struct{ a, b uint32 }
	words := []uint64{1, 2<<32 | 3}
	v := View[pair](Bytes(words))
	if len(v) != 2 || v[1] != (pair{3, 2}) {
		t.Fatalf("%v", v)
	}
	if View[pair](Bytes(words)[:4]) != nil || Bytes(nil) != nil || View[struct{}](Bytes(words)) != nil {
		t.Fatal("a view of nothing")
	}
}
