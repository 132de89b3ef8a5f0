package client

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rpc"
)

// An own region goes, and its memory cannot be unmapped; then the server is started again
// and hears nothing of it, and grants it as before. When unmapping succeeds at last the
// region goes back, while its session lives on.
func TestRealUnmapAgain(t *testing.T) {
	l := startLab(t, 64<<20)
	l.stop()
	l.start()
	l.cfg.Port, l.cfg.HotPort = portOf(t, l.srv.ControlAddress()), portOf(t, l.srv.HotAddress())
	c := open(t, l.config())
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	id := c.OwnedRegions()[0]
	codes := make([]base.Code, 1)
	if err := c.Delete(t.Context(), keysOf(1), codes); err != nil || codes[0] != base.CodeOK {
		t.Fatal(err, codes)
	}
	refuse, refused := refuseUnmaps(c)
	c.mu.Lock()
	c.mu.core.Drain(id)
	c.mu.Unlock()
	c.kick()
	eventually(t, "the failure", func() bool { return refused.Load() > 0 })
	l.stop()
	l.start()
	eventually(t, "the session at the new server", func() bool { return c.Connected() && storeOne(t, c, 2, value(2, 1000)) == base.CodeOK })
	if !slices.Contains(l.regionIDs(), id) || !slices.Contains(l.heldIDs(c.Session()), id) {
		t.Fatal("a region that is mapped went back")
	}
	refuse.Store(false)
	eventually(t, "the hold given back", func() bool { return !slices.Contains(l.heldIDs(c.Session()), id) })
	eventually(t, "the region given back", func() bool { return !slices.Contains(l.regionIDs(), id) })
	want(t, "load from another region", loadOne(t, c, 2, make([]byte, 1000)), base.CodeOK)
}

// refuseUnmaps has unmapping fail while refuse is set, as it is, and counts how often it did.
func refuseUnmaps(c *Client) (refuse *atomic.Bool, refused *atomic.Int32) {
	refuse, refused = &atomic.Bool{}, &atomic.Int32{}
	refuse.Store(true)
	c.unmapMemory = func(m *mapping.Mapping) error {
		if refuse.Load() {
			refused.Add(1)
			return fmt.Errorf("%w: a test's", base.ErrInternal)
		}
		return m.Unmap()
	}
	return refuse, refused
}

// What was mapped and cannot be used has its hold until it is unmapped.
func TestDiscardedMappingKeepsItsHold(t *testing.T) {
	f := startFake(t)
	writer := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, writer, 1, value(1, 1000)), base.CodeOK)
	cfg := cxlConfig(f)
	cfg.AutoExpand, cfg.WriteOrder, cfg.CPUBytes, cfg.Overcommit = Off, []base.Medium{base.MediumCPU}, 2*testPage, On
	reader := open(t, cfg)
	refuse, refused := refuseUnmaps(reader)
	held := func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.mu.holds[holdKey(reader.sessionID(), uint32(writer.OwnedRegions()[0]))]
	}
	f.wrongRegion.Store(true)
	for range 2 { // the second one finds the first one's mapping still there
		want(t, "load", loadOne(t, reader, 1, make([]byte, 1000)), base.CodeMiss)
	}
	eventually(t, "another attempt", func() bool { return refused.Load() > 2 })
	if !held() {
		t.Fatal("the hold of a region that is mapped was given back")
	}
	refuse.Store(false)
	eventually(t, "the hold given back", func() bool { return !held() })
	f.wrongRegion.Store(false)
	eventually(t, "a load", func() bool { return loadOne(t, reader, 1, make([]byte, 1000)) == base.CodeOK })
}

// An own region that the resource manager answers under another number is none: hold and
// region go back.
func TestOwnRegionOfAnotherNumber(t *testing.T) {
	f := startFake(t)
	f.wrongRegion.Store(true)
	if _, err := openWith(t.Context(), cxlConfig(f), node.BootTime); base.CodeOf(err) != base.CodeInvalid {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.holds) != 0 || len(f.mu.returned) != 1 || f.mu.returned[0].GetRegionId() != 1 {
		t.Fatal(f.mu.holds, f.mu.returned)
	}
}

// regionIDs are the regions at the resource manager.
func (l *lab) regionIDs() (ids []base.RegionID) {
	l.ask(func(api maruv1.ResourceManagerClient) error {
		list, err := api.ListRegions(l.t.Context(), &maruv1.ListRegionsRequest{Limit: 1000})
		for _, r := range list.GetRegions() {
			ids = append(ids, base.RegionID(r.GetRegionId()))
		}
		return err
	})
	return ids
}

// heldIDs are the regions that a session holds there.
func (l *lab) heldIDs(id base.SessionID) (ids []base.RegionID) {
	l.ask(func(api maruv1.ResourceManagerClient) error {
		list, err := api.ListHolds(l.t.Context(), &maruv1.ListHoldsRequest{SessionId: id[:], Limit: 1000})
		for _, h := range list.GetHolds() {
			ids = append(ids, base.RegionID(h.GetRegionId()))
		}
		return err
	})
	return ids
}

func (l *lab) ask(call func(maruv1.ResourceManagerClient) error) {
	l.t.Helper()
	conn, err := rpc.Dial(l.t.Context(), "unix:"+l.rmCfg.UnixPath)
	if err != nil {
		l.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := call(maruv1.NewResourceManagerClient(conn)); err != nil {
		l.t.Fatal(err)
	}
}
