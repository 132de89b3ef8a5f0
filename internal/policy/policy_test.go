package policy

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
)

const (
	cpu = base.MediumCPU
	cxl = base.MediumCXL
	ssd = base.MediumSSD
)

func order(t testing.TB, media ...base.Medium) Order {
	t.Helper()
	o, err := NewOrder("write_order", media)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestOrder(t *testing.T) {
	for _, bad := range [][]base.Medium{{cpu, cpu}, {9}, {base.MediumNone}, {cpu, cxl, ssd, cpu}} {
		if _, err := NewOrder("read_order", bad); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "read_order") {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if o := order(t, cxl, cpu); o.Rank(cxl) != 0 || o.Rank(cpu) != 1 || o.Rank(ssd) <= 1 || !o.Better(cxl, cpu) || o.Better(cpu, cxl) || o.Better(cpu, cpu) {
		t.Errorf("[cxl cpu] ranks wrongly")
	}
	var zero Order
	if !zero.Better(cpu, cxl) || !zero.Better(cxl, ssd) || !zero.Names(ssd) || len(zero.Media()) != 0 {
		t.Error("the zero order is not cpu, cxl, ssd")
	}
	if o := order(t, cxl); o.Names(cpu) || !o.Names(cxl) || !o.Better(cxl, cpu) || !slices.Equal(o.Media(), []base.Medium{cxl}) {
		t.Error("[cxl]")
	}
}

func TestPlace(t *testing.T) {
	pools := []Candidate{{1, cxl, true, 100}, {2, cxl, true, 300}, {3, cxl, false, 999}, {7, cpu, true, 50}}
	for _, c := range []struct {
		order Order
		size  uint64
		want  []uint32
	}{
		{order(t, cpu, cxl), 10, []uint32{7, 2, 1}},
		{order(t, cxl, cpu), 10, []uint32{2, 1, 7}},
		{order(t, cpu, cxl), 60, []uint32{2, 1}},
		{order(t, cpu), 60, nil},                 // the only named pool is full: SKIP (POL-07)
		{order(t, cpu, cxl), 1000, nil},          // nor does an ineligible one take it (POL-05)
		{order(t, cxl), 10, []uint32{2, 1}},      // a medium that is not named takes nothing
		{Order{}, 10, []uint32{7, 2, 1}},         // the default order
		{order(t, cxl, cpu), 300, []uint32{2}},   // just fits
		{order(t, cxl, cpu), 301, []uint32(nil)}, // does not
	} {
		if got := Place(nil, c.order, c.size, pools); !slices.Equal(got, c.want) {
			t.Errorf("order %v size %d: %v, want %v", c.order.Media(), c.size, got, c.want)
		}
	}
}

// TestPlaceIsEligible: whatever the pools are, nothing ineligible is chosen, nothing
// twice, and the order holds.
func TestPlaceIsEligible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o, err := NewOrder("write_order", rapid.Permutation([]base.Medium{cpu, cxl, ssd}).Draw(t, "media")[:rapid.IntRange(0, 3).Draw(t, "named")])
		if err != nil {
			t.Fatal(err)
		}
		var pools []Candidate
		for i := range rapid.IntRange(0, 8).Draw(t, "pools") {
			pools = append(pools, Candidate{
				uint32(i + 1), rapid.SampledFrom([]base.Medium{cpu, cxl, ssd}).Draw(t, "medium"), rapid.Bool().Draw(t, "eligible"),
				rapid.Uint64Range(0, 4).Draw(t, "free"),
			})
		}
		size := rapid.Uint64Range(1, 4).Draw(t, "size")
		got := Place([]uint32{99}, o, size, pools)
		if got[0] != 99 {
			t.Fatal("dst was overwritten")
		}
		want := 0
		for _, p := range pools {
			if p.Eligible && p.FreeBytes >= size && o.Names(p.Medium) {
				want++
			}
		}
		if len(got)-1 != want {
			t.Fatalf("%v of %v", got, pools)
		}
		for i, n := range got[1:] {
			p := pools[n-1]
			if !p.Eligible || p.FreeBytes < size || slices.Contains(got[1:1+i], n) {
				t.Fatalf("%v of %v", got, pools)
			}
			if i > 0 && o.Rank(pools[got[i]-1].Medium) > o.Rank(p.Medium) {
				t.Fatalf("%v breaks the order", got)
			}
		}
	})
}
