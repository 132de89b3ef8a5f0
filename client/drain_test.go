package client

import (
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Regions drain at the resource manager. A reader's idle mapping goes with that event, on a
// client that no agent vouches for as on one that has it, over TCP as over the Unix socket;
// a mapping whose bytes are out in a view stays until the view is released, and is named
// meanwhile with what it waits for.
func TestDrainDropsIdleMappings(t *testing.T) {
	for name, socket := range map[string]string{"no agent": NoAgent, "an agent": ""} {
		t.Run(name, func(t *testing.T) {
			f := startFarLab(t)
			if socket == "" {
				f.startAgent()
				socket = f.agent.UnixPath
			}
			address := f.srv.ControlAddress()
			writer := open(t, farConfig(address, NoAgent, f.log))
			want(t, "store", storeOne(t, writer, 1, value(1, 1000)), base.CodeOK)
			idle, viewer := open(t, farConfig(address, socket, f.log)), open(t, farConfig(address, socket, f.log))
			for _, c := range []*Client{idle, viewer} {
				want(t, "load", loadOne(t, c, 1, make([]byte, 1000)), base.CodeOK)
			}
			region := uint32(writer.OwnedRegions()[0])
			views := make([]View, 1)
			if err := viewer.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID == 0 {
				t.Fatal(err, views)
			}
			holdOf := func(c *Client) *maruv1.HoldInfo {
				for _, h := range f.holds(c.Session()) {
					if h.GetRegionId() == region {
						return h
					}
				}
				return nil
			}
			if h := holdOf(idle); h == nil || !h.GetReadOnly() || !h.GetViews() {
				t.Fatalf("the reader's hold: %v", h)
			}
			conn, err := rpc.NewClient("unix:"+f.rm.UnixPath(), rpc.Retry{})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			id := f.srv.ServerID()
			if _, err := maruv1.NewResourceManagerClient(conn).DropOwner(t.Context(), &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true}); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			eventually(t, "the unhold of the idle reader", func() bool { return holdOf(idle) == nil })
			t.Logf("the idle mapping went within %v", time.Since(began).Round(time.Millisecond))
			h := holdOf(viewer)
			if h == nil || !h.GetDraining() || h.GetCure() == "" {
				t.Fatalf("the hold under a view: %v", h)
			}
			if string(views[0].Bytes) != string(value(1, 1000)) {
				t.Error("the bytes of a view changed")
			}
			viewer.ReleaseViews([]uint64{views[0].ID})
			eventually(t, "the unhold after the view", func() bool { return holdOf(viewer) == nil })
		})
	}
}
