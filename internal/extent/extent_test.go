package extent

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
)

const unit = 2 << 20

// model is deliberately dumb: one byte a unit.
type model struct {
	used []int // 0 free, else the number of its extent
	next int
}

func (m *model) allocate(units int) (int, bool) {
	for i := 0; i+units <= len(m.used); i++ {
		if m.isFree(i, units) {
			m.mark(i, units)
			return i, true
		}
	}
	return 0, false
}

func (m *model) isFree(at, units int) bool {
	for _, u := range m.used[at : at+units] {
		if u != 0 {
			return false
		}
	}
	return true
}

func (m *model) mark(at, units int) {
	m.next++
	for i := range units {
		m.used[at+i] = m.next
	}
}

func (m *model) freeCount() (sum, largest int) {
	run := 0
	for _, u := range m.used {
		if u == 0 {
			sum, run = sum+1, run+1
		} else {
			run = 0
		}
		largest = max(largest, run)
	}
	return sum, largest
}

func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		units := rapid.IntRange(0, 40).Draw(t, "units")
		start := rapid.Uint64Range(0, 3).Draw(t, "start") * unit
		a, err := New(start, start+uint64(units)*unit, unit)
		if err != nil {
			t.Fatal(err)
		}
		m := &model{used: make([]int, units)}
		var live []base.Extent
		t.Repeat(map[string]func(*rapid.T){
			"allocate": func(t *rapid.T) {
				n := rapid.IntRange(1, 8).Draw(t, "n")
				at, ok := m.allocate(n)
				e, err := a.Allocate(uint64(n) * unit)
				if ok != (err == nil) || !ok && !errors.Is(err, base.ErrFull) {
					t.Fatalf("allocate %d: %s, %v; model %d, %v", n, e, err, at, ok)
				}
				if ok {
					if e.Offset != start+uint64(at)*unit || e.Length != uint64(n)*unit {
						t.Fatalf("first fit is %d, got %s", at, e)
					}
					live = append(live, e)
				}
			},
			"reserve": func(t *rapid.T) {
				if units == 0 {
					t.Skip()
				}
				at := rapid.IntRange(0, units-1).Draw(t, "at")
				n := rapid.IntRange(1, units-at).Draw(t, "n")
				e := base.Extent{Offset: start + uint64(at)*unit, Length: uint64(n) * unit}
				ok := m.isFree(at, n)
				err := a.Reserve(e)
				if ok != (err == nil) || !ok && !errors.Is(err, base.ErrExists) {
					t.Fatalf("reserve %s: %v", e, err)
				}
				if ok {
					m.mark(at, n)
					live = append(live, e)
				}
			},
			"free": func(t *rapid.T) {
				if len(live) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(live)-1).Draw(t, "i")
				e := live[i]
				live = append(live[:i], live[i+1:]...)
				if err := a.Free(e); err != nil {
					t.Fatal(err)
				}
				if err := a.Free(e); !errors.Is(err, base.ErrNotFound) {
					t.Fatalf("freed twice: %v", err)
				}
				for k := range e.Length / unit {
					m.used[(e.Offset-start)/unit+k] = 0
				}
			},
			"": func(t *rapid.T) {
				a.Check()
				sum, largest := m.freeCount()
				if a.FreeBytes() != uint64(sum)*unit || a.LargestFreeBytes() != uint64(largest)*unit || a.AllocatedCount() != len(live) ||
					a.AllocatedBytes() != uint64(units-sum)*unit {
					t.Fatalf("free %d, largest %d, count %d; model %d, %d, %d", a.FreeBytes()/unit, a.LargestFreeBytes()/unit, a.AllocatedCount(), sum, largest, len(live))
				}
			},
		})
	})
}

func TestBadInput(t *testing.T) {
	for _, c := range [][3]uint64{{0, unit, 0}, {0, unit, 3}, {1, unit, unit}, {0, unit + 1, unit}, {2 * unit, unit, unit}} {
		if _, err := New(c[0], c[1], c[2]); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("New%v: %v", c, err)
		}
	}
	a, _ := New(unit, 5*unit, unit)
	for _, n := range []uint64{0, 1, unit + 1} {
		if _, err := a.Allocate(n); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("Allocate(%d): %v", n, err)
		}
	}
	if _, err := a.Allocate(^uint64(0) &^ (unit - 1)); !errors.Is(err, base.ErrFull) {
		t.Errorf("huge: %v", err)
	}
	for _, e := range []base.Extent{
		{}, {Offset: 0, Length: unit}, {Offset: unit, Length: 5 * unit}, {Offset: 5 * unit, Length: unit},
		{Offset: unit, Length: ^uint64(0) &^ (unit - 1)}, {Offset: unit + 1, Length: unit},
	} {
		if err := a.Reserve(e); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("Reserve(%s): %v", e, err)
		}
	}
	if a.FreeBytes() != 4*unit {
		t.Errorf("a refused call changed something: %d", a.FreeBytes())
	}
}

// The worst case of first fit: 10 000 regions, every second one free and too
// short, so each search passes all holes.
func BenchmarkAllocate(b *testing.B) {
	const regions = 10_000
	a, err := New(0, (2*regions+4)*unit, unit)
	if err != nil {
		b.Fatal(err)
	}
	var all []base.Extent
	for range 2 * regions {
		e, err := a.Allocate(unit)
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, e)
	}
	for i := 0; i < len(all); i += 2 {
		if err := a.Free(all[i]); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		e, err := a.Allocate(2 * unit)
		if err != nil {
			b.Fatal(err)
		}
		if err := a.Free(e); err != nil {
			b.Fatal(err)
		}
	}
}
