package session

import (
	"fmt"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// What the answer to the last try of a growth makes of the operation.
func TestEndExpand(t *testing.T) {
	for _, x := range []struct {
		name    string
		err     error
		unknown bool
		open    bool
	}{
		{name: "granted"},
		{"no answer", base.ErrUnavailable, true, true},
		{"time-out", base.ErrTimeout, true, true},
		{"epoch over", base.ErrStale, false, true},
		{"fenced", base.ErrFenced, false, true},
		{"stopping", base.ErrClosed, false, true},
		{"carried out for another delivery", base.ErrPending, false, true},
		{"full", base.ErrFull, false, false},
		{"limit", base.ErrLimit, false, false},
		{"denied", base.ErrDenied, false, false},
		{"refused before", base.ErrAborted, false, false},
		{"no resource manager", base.ErrUnavailable, false, false},
		{"offline", base.ErrOffline, false, false},
		{"too large", base.ErrPermanent, false, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newCore(t)
			e, err := c.BeginExpand(base.MediumCXL, 4096, 100)
			if err != nil {
				t.Fatal(err)
			}
			if _, lost := c.LostExpand(base.MediumCXL); lost {
				t.Fatal("one that is under way is lost")
			}
			if x.err != nil {
				x.err = fmt.Errorf("%w: a test's", x.err)
			}
			if got := c.EndExpand(e, x.unknown, x.err); base.CodeOf(got) != base.CodeOf(x.err) {
				t.Fatal(got)
			}
			if bytes, lost := c.LostExpand(base.MediumCXL); lost != x.open || lost && bytes != 4096 {
				t.Fatalf("open: %v", lost)
			}
			if open := c.Watermark() == e.Sequence; open != x.open {
				t.Fatalf("the watermark is %d", c.Watermark())
			}
			again, err := c.BeginExpand(base.MediumCXL, 8192, 100)
			if err != nil || (again.Sequence == e.Sequence) != x.open || (again.Bytes == 4096) != x.open {
				t.Fatal(again, err)
			}
		})
	}
}

// A server that is gone takes its growths with it: a late grant of it is none.
func TestExpandOfAnotherServer(t *testing.T) {
	c := newCore(t)
	e, err := c.BeginExpand(base.MediumCXL, 4096, 100)
	if err != nil {
		t.Fatal(err)
	}
	open(c, 2, 200)
	if c.Watermark() == e.Sequence {
		t.Fatal("its operation is open")
	}
	if err := c.EndExpand(e, false, nil); base.CodeOf(err) != base.CodeStale {
		t.Fatal(err)
	}
	if _, err := c.BeginExpand(base.MediumCXL, 4096, 100); base.CodeOf(err) != base.CodeUnavailable {
		t.Fatal(err)
	}
	info := private(0, 2)
	info.ServerEpoch = 100
	if err := c.AddRegion(info, Own); base.CodeOf(err) != base.CodeStale {
		t.Fatal(err)
	}
}

// A region that is not used is given back until the server has heard it, and every later
// server is told too, under the number that it gives the pool.
func TestGiveBack(t *testing.T) {
	c := newCore(t)
	tell := func(unknown bool, err error) (r Return, heard bool) {
		t.Helper()
		r, ok := c.BeginReturn(c.epoch)
		if !ok || r.Region != 5 {
			t.Fatal(r, ok)
		}
		if _, twice := c.BeginReturn(c.epoch); twice {
			t.Fatal("two calls at a time")
		}
		return r, c.EndReturn(r, unknown, err)
	}
	c.GiveBack(shared(5, 4))
	c.GiveBack(shared(5, 4))
	for _, err := range []error{base.ErrStale, base.ErrBusy, base.ErrLimit} {
		if _, heard := tell(false, err); heard {
			t.Fatalf("%v counts as heard", err)
		}
	}
	if _, heard := tell(true, base.ErrNotFound); heard || c.Pending() != 1 {
		t.Fatal("no answer counts as heard")
	}
	first, heard := tell(false, nil)
	if !heard || c.Pending() != 0 || first.PoolNumber != 100 {
		t.Fatal(first, heard)
	}
	if c.Watermark() != first.Sequence+1 {
		t.Fatalf("the watermark is %d", c.Watermark())
	}
	for server := base.ServerEpoch(200); server <= 300; server += 100 {
		snap := open(c, 2, server)
		if _, ok := c.BeginReturn(c.epoch); ok {
			t.Fatal("told before the list")
		}
		c.RelistDone(snap)
		if r, heard := tell(false, base.ErrNotFound); !heard || r.PoolNumber != uint32(server) {
			t.Fatal(r, heard)
		}
	}
}

// An own region that went is named to the next server as well: its hold may have been on
// record when that one asked for them.
func TestGoneRegionIsNamed(t *testing.T) {
	c := newCore(t)
	add(t, c, shared(5, 4))
	add(t, c, private(1, 4))
	for _, id := range []base.RegionID{5, base.FirstPrivateRegion + 1} {
		c.Drain(id)
		c.RemoveRegion(id)
	}
	if _, ok := c.BeginReturn(c.epoch); ok {
		t.Fatal("the server that took it back is told")
	}
	c.RelistDone(open(c, 2, 200))
	if r, ok := c.BeginReturn(c.epoch); !ok || r.Region != 5 {
		t.Fatal(r, ok)
	}
	if r, ok := c.BeginReturn(c.epoch); ok {
		t.Fatal(r)
	}
	for i := range base.RegionID(2 * gaveCount) {
		c.gave(shared(10+i, 1))
	}
	if len(c.given) != gaveCount || c.given[0].ID != 10+gaveCount {
		t.Fatal(len(c.given), c.given[0].ID)
	}
}

// What the server of an older epoch hears is not heard: the next one may have the region by
// the resource manager's list.
func TestReturnToAnotherEpoch(t *testing.T) {
	c := newCore(t)
	c.GiveBack(shared(5, 4))
	late, ok := c.BeginReturn(c.epoch)
	if !ok {
		t.Fatal("nothing to give back")
	}
	c.RelistDone(open(c, 2, 200))
	if c.EndReturn(late, false, nil) {
		t.Fatal("the answer of a server that is gone counts")
	}
	if _, ok := c.BeginReturn(1); ok {
		t.Fatal("it is told to the older server")
	}
	if r, ok := c.BeginReturn(2); !ok || !c.EndReturn(r, false, nil) || c.Pending() != 0 {
		t.Fatal("the newer one is not told")
	}
}
