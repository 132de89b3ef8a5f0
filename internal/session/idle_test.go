package session

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// lease gives a core one lease of one region, as the answer of an Acquire does.
func lease(t testing.TB, c *Core, id base.RegionID, kind base.LeaseKind) *Batch {
	t.Helper()
	b := &Batch{}
	if err := c.BeginAcquire(b, kind, 1); err != nil {
		t.Fatal(err)
	}
	c.EndAcquire(b, hot.AppendAcquireRow(nil, &hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Region: id}))
	return b
}

// Mappings of other writers' regions that nobody reads are bounded; the one read longest
// ago goes first, and none goes under a lease (D1).
func TestIdleMappings(t *testing.T) {
	c := New(Config{MaxOperations: 64, MaxLeases: 32, MaxIdleMappings: 2})
	open(c, 1, 100)
	add(t, c, shared(9, 4)) // own regions are none of it
	read := func(id base.RegionID) {
		b := lease(t, c, id, base.LeaseCopy)
		if err := c.AddRegion(shared(id, 4), Foreign); err != nil && !c.Mapped(id) {
			t.Fatal(err)
		}
		c.ReleaseBatch(b)
	}
	read(1)
	read(2)
	read(1)
	if gone := c.TakeGone(nil); len(gone) != 0 || c.IdleMappings() != 2 {
		t.Fatalf("%v went, %d are idle", gone, c.IdleMappings())
	}
	read(3)
	if gone := c.TakeGone(nil); !slices.Equal(gone, []base.RegionID{2}) {
		t.Fatalf("%v went, want region 2: it was read longest ago", gone)
	}
	c.RemoveRegion(2)
	one, view := lease(t, c, 1, base.LeaseCopy), lease(t, c, 3, base.LeaseView)
	for id := base.RegionID(4); id < 8; id++ {
		read(id)
	}
	if gone := c.TakeGone(nil); !slices.Equal(gone, []base.RegionID{4, 5}) || !c.Mapped(1) || !c.Mapped(3) {
		t.Fatalf("%v went, want 4 and 5: 1 and 3 have leases", gone)
	}
	c.RemoveRegion(4)
	c.RemoveRegion(5)
	c.Drain(6) // a drain takes an idle one at once
	if gone := c.TakeGone(nil); !slices.Equal(gone, []base.RegionID{6}) || c.IdleMappings() != 1 {
		t.Fatalf("%v went, %d are idle", gone, c.IdleMappings())
	}
	c.RemoveRegion(6)
	c.ReleaseBatch(one)
	c.ReleaseBatch(view)
	if gone := c.TakeGone(nil); !slices.Equal(gone, []base.RegionID{7}) {
		t.Fatalf("%v went, want 7", gone)
	}
	c.RemoveRegion(7)
	if !c.Hold(1) || c.IdleMappings() != 1 {
		t.Fatal("a hold leaves its region idle")
	}
	c.Unhold(1)
	if c.IdleMappings() != 2 {
		t.Fatalf("%d are idle", c.IdleMappings())
	}
}

// The list against a slice that is searched.
func TestIdleMappingsModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 4).Draw(t, "most")
		c := New(Config{MaxOperations: 1 << 12, MaxLeases: 1 << 10, MaxIdleMappings: most})
		open(c, 1, 100)
		var idle []base.RegionID // read longest ago first
		leases := map[base.RegionID][]*Batch{}
		away := func(id base.RegionID) { idle = slices.DeleteFunc(idle, func(i base.RegionID) bool { return i == id }) }
		rest := func(id base.RegionID) []base.RegionID {
			var gone []base.RegionID
			for idle = append(idle, id); len(idle) > most; idle = idle[1:] {
				gone = append(gone, idle[0])
			}
			return gone
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := base.RegionID(rapid.IntRange(1, 8).Draw(t, "region")) //nolint:gosec // small
			var want []base.RegionID
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0, 1:
				b := &Batch{}
				if err := c.BeginAcquire(b, base.LeaseCopy, 1); err != nil {
					t.Fatal(err)
				}
				c.EndAcquire(b, hot.AppendAcquireRow(nil, &hot.AcquireRow{Verdict: hot.MakeHit(base.MediumCXL), Region: id}))
				if !c.Mapped(id) {
					if err := c.AddRegion(shared(id, 1), Foreign); err != nil {
						t.Fatal(err)
					}
				}
				away(id)
				leases[id] = append(leases[id], b)
			case 2:
				if n := len(leases[id]); n > 0 {
					c.ReleaseBatch(leases[id][0])
					if leases[id] = leases[id][1:]; n == 1 {
						want = rest(id)
					}
				}
			case 3:
				if slices.Contains(idle, id) {
					c.Drain(id)
					away(id)
					want = []base.RegionID{id}
				}
			}
			gone := c.TakeGone(nil)
			if !slices.Equal(gone, want) || c.IdleMappings() != len(idle) {
				t.Fatalf("%v went, want %v; %d are idle, want %v", gone, want, c.IdleMappings(), idle)
			}
			for _, g := range gone {
				c.RemoveRegion(g)
			}
		}
	})
}
