package client

import (
	"testing"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
)

func (c *Client) knows(id base.RegionID) bool {
	return len(c.known.find(c.current(), []uint32{uint32(id)})) == 1
}

// The first read of a region costs one call, the hold: what regions there are the session
// has learned before, those that came after its opening too.
func TestFirstReadCostsOneHold(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.RegionBytes, cfg.ExpandBytes = testPage, testPage
	w := open(t, cfg)
	want(t, "store", storeOne(t, w, 1, value(1, 1000)), base.CodeOK)
	first := w.OwnedRegions()[0]
	reader := open(t, cfg)
	eventually(t, "the region is known", func() bool { return reader.knows(first) })
	want(t, "store in a second region", storeOne(t, w, 2, value(2, 1000)), base.CodeOK)
	second := w.OwnedRegions()[1]
	eventually(t, "the second region is known", func() bool { return reader.knows(second) })
	holds, describes := f.callCount("hold"), f.callCount("describe")
	for i := 1; i <= 2; i++ {
		dst := make([]byte, 1000)
		want(t, "load", loadOne(t, reader, i, dst), base.CodeOK)
		if string(dst) != string(value(i, 1000)) {
			t.Errorf("value %d differs", i)
		}
	}
	if h, d := f.callCount("hold")-holds, f.callCount("describe")-describes; h != 2 || d != 0 {
		t.Errorf("%d holds and %d descriptions for two regions, want 2 and 0", h, d)
	}
	asked := f.callCount("describe all")
	eventually(t, "some heartbeats", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.mu.heartbeats > 40 })
	if n := f.callCount("describe all"); n != asked {
		t.Errorf("with nothing new the server was asked %d times", n-asked)
	}
}

// A description may be of a region that is gone, or be none: the hold is refused, and the
// server has the last word. Its description is what counts from then on.
func TestKnownRegionIsRefused(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	w := open(t, cfg)
	want(t, "store", storeOne(t, w, 1, value(1, 1000)), base.CodeOK)
	id := w.OwnedRegions()[0]
	reader := open(t, cfg)
	eventually(t, "the region is known", func() bool { return reader.knows(id) })
	wrong := &maruv1.SharedRegion{PoolNumber: 1, Handle: &maruv1.RegionHandle{PoolId: f.pool[:], RegionId: uint32(id) + 1000}}
	reader.known.mu.Lock()
	reader.known.mu.byID[id] = wrong // the fake has no such region
	reader.known.mu.Unlock()
	describes := f.callCount("describe")
	want(t, "load", loadOne(t, reader, 1, make([]byte, 1000)), base.CodeOK)
	if n := f.callCount("describe") - describes; n != 1 {
		t.Errorf("the server was asked %d times, want 1", n)
	}
	if got := reader.known.find(reader.current(), []uint32{uint32(id)}); len(got) != 1 || got[0] == wrong {
		t.Errorf("known is still %v", got)
	}
	// The region goes: what the server says of it is kept too.
	reader.known.keep(reader.current(), []*maruv1.SharedRegion{{
		Handle: f.handle(uint32(id)), Problem: &maruv1.Problem{Code: uint32(base.CodeNotFound)},
	}})
	if reader.knows(id) {
		t.Error("a region that is gone is still known")
	}
}

// An older server does not say what is new: a region of which the session has not heard is
// described when it is read.
func TestFirstReadAtAnOlderServer(t *testing.T) {
	f := startFake(t)
	f.oldServer.Store(true)
	cfg := cxlConfig(f)
	w := open(t, cfg)
	reader := open(t, cfg)
	eventually(t, "what there is", func() bool { return f.callCount("describe all") > 0 && reader.knows(w.OwnedRegions()[0]) })
	want(t, "store", storeOne(t, w, 1, value(1, 1000)), base.CodeOK)
	later := open(t, cfg)
	want(t, "store", storeOne(t, later, 2, value(2, 1000)), base.CodeOK)
	describes := f.callCount("describe")
	for i := 1; i <= 2; i++ {
		want(t, "load", loadOne(t, reader, i, make([]byte, 1000)), base.CodeOK)
	}
	if n := f.callCount("describe") - describes; n != 1 {
		t.Errorf("%d descriptions, want 1: that of the region that came later", n)
	}
}

// What is known is bounded, the newest regions stay, and nothing outlives its link.
func TestKnownIsBounded(t *testing.T) {
	var k known
	one, two := &link{}, &link{}
	described := func(first, last uint32) (out []*maruv1.SharedRegion) {
		for id := first; id <= last; id++ {
			out = append(out, &maruv1.SharedRegion{Handle: &maruv1.RegionHandle{RegionId: id}})
		}
		return out
	}
	k.keep(one, described(1, 5))
	if k.newest(one, 5) || k.find(one, []uint32{1}) != nil {
		t.Error("something is known before the domains are proved")
	}
	k.begin(one)
	if _, _, ask := k.want(one); !ask {
		t.Error("a new link asks for nothing")
	}
	k.newest(one, knownCount+9)
	k.learned(one, described(1, knownCount+5), knownCount+9)
	if n := len(k.mu.byID); n != knownCount {
		t.Errorf("%d are known, want %d", n, knownCount)
	}
	if k.find(one, []uint32{5, 6}) != nil || len(k.find(one, []uint32{6, knownCount + 5})) != 2 {
		t.Error("the oldest stayed, or others went")
	}
	if after, _, ask := k.want(one); ask || after != knownCount+9 {
		t.Errorf("asks for what is behind %d: %v", after, ask)
	}
	if !k.newest(one, knownCount+10) {
		t.Error("a newer region is not asked for")
	}
	k.begin(two)
	k.learned(one, described(1, 5), 5)
	if k.find(one, []uint32{6}) != nil || k.find(two, []uint32{1}) != nil {
		t.Error("what another link knew is known")
	}
}
