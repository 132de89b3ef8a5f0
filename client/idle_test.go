package client

import (
	"bytes"
	"testing"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
)

// A reader keeps few regions of others mapped and held when nothing of them is read, and
// reads from all of them all the same.
func TestRealIdleMappings(t *testing.T) {
	l := startLab(t, 256<<20)
	cfg := l.config()
	const pages, regions = 2, 6
	cfg.RegionBytes, cfg.ExpandBytes, cfg.CXLBytes = pages*testPage, pages*testPage, pages*regions*testPage
	writer := open(t, cfg)
	for i := range pages * regions {
		want(t, "store", storeOne(t, writer, i, value(i, 5000)), base.CodeOK)
	}
	if n := len(writer.OwnedRegions()); n != regions {
		t.Fatalf("%d regions were written, want %d", n, regions)
	}
	cfg.IdleMappings = 2
	reader := open(t, cfg)
	own := len(reader.OwnedRegions())
	for range 3 {
		for i := range pages * regions {
			dst := make([]byte, 5000)
			// A region on its way out is an expected miss.
			eventually(t, "a load", func() bool { return loadOne(t, reader, i, dst) == base.CodeOK })
			if !bytes.Equal(dst, value(i, 5000)) {
				t.Fatalf("value %d differs", i)
			}
		}
	}
	eventually(t, "mappings given back", func() bool { return reader.Stats().RegionsMapped == 2 })
	eventually(t, "holds given back", func() bool { return l.holds(reader.Session()) == own+2 })
}

// holds counts what a session holds at the resource manager.
func (l *lab) holds(id base.SessionID) int {
	l.t.Helper()
	conn, err := rpc.Dial(l.t.Context(), "unix:"+l.rm.UnixPath())
	if err != nil {
		l.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	r, err := maruv1.NewResourceManagerClient(conn).ListHolds(l.t.Context(), &maruv1.ListHoldsRequest{Limit: 1000})
	if err != nil {
		l.t.Fatal(err)
	}
	n := 0
	for _, h := range r.GetHolds() {
		if bytes.Equal(h.GetSessionId(), id[:]) {
			n++
		}
	}
	return n
}

// A reader is stopped between the answer to its Acquire and its first hold, for so long that
// the server has taken it for one that let go of everything. What it maps then may hold
// another object: no view of it is handed out.
func TestViewIsConfirmed(t *testing.T) {
	f := startFake(t)
	writer := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, writer, 1, value(1, 1000)), base.CodeOK)
	cfg := cxlConfig(f)
	cfg.AutoExpand, cfg.WriteOrder, cfg.CPUBytes = Off, []base.Medium{base.MediumCPU}, 2*testPage
	cfg.Overcommit = On
	reader := open(t, cfg)
	f.holdEnds.Store(true)
	views := make([]View, 1)
	if err := reader.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID != 0 {
		t.Fatal(err, views[0].ID)
	}
	if f.holdEnds.Load() {
		t.Fatal("nothing was held")
	}
	eventually(t, "a view in the next epoch", func() bool {
		if err := reader.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil {
			t.Fatal(err)
		}
		return views[0].ID != 0
	})
	reader.ReleaseViews([]uint64{views[0].ID})
	eventually(t, "the leases given back", func() bool {
		reader.mu.Lock()
		defer reader.mu.Unlock()
		return reader.mu.core.Leases() == 0 && reader.mu.core.Pending() == 0
	})
}
