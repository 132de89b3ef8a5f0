package session

import (
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// Free pages of a region that goes are free, and nobody gets them: who waits for a page
// must not be told that there are some.
func TestPagesOfARegionThatGoesAreNotAvailable(t *testing.T) {
	c := New(Config{Session: base.SessionID(base.NewID())})
	c.Opened(Opening{Epoch: 1, ServerEpoch: 1})
	for id := base.RegionID(1); id <= 2; id++ {
		if err := c.AddRegion(RegionInfo{ID: id, Medium: base.MediumCXL, PageBytes: 4096, PageCount: 4}, Own); err != nil {
			t.Fatal(err)
		}
	}
	for gone, want := range []uint64{8, 4, 0} {
		if gone > 0 {
			c.Drain(base.RegionID(gone)) //nolint:gosec // 1 and 2
		}
		if n := c.CountMedium(base.MediumCXL); n.Free != 8 || n.Available != want {
			t.Errorf("%d free and %d available, want 8 and %d", n.Free, n.Available, want)
		}
	}
	if _, _, ok := c.Alloc([]base.Medium{base.MediumCXL}); ok {
		t.Error("a page of a region that goes")
	}
}
