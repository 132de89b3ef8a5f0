package client

import (
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/internal/session"
)

type counter = atomic.Uint64

// counters only rise.
type counters struct {
	stores, storeBytes, storesAlready, storesFull, storesFailed counter
	loads, loadBytes                                            counter
	storeNanos, loadNanos                                       atomic.Int64
	misses, missesAway, missesRefused                           counter
	missesExpired, missesUnmapped                               counter
	corrupt, faults, reconnects, outages, unknown, resolved     counter
}

// Stats returns the counters.
func (c *Client) Stats() Stats {
	n := &c.count
	s := Stats{
		Stores: n.stores.Load(), StoreBytes: n.storeBytes.Load(), StoreSeconds: time.Duration(n.storeNanos.Load()).Seconds(),
		StoresAlready: n.storesAlready.Load(), StoresFull: n.storesFull.Load(), StoresFailed: n.storesFailed.Load(),
		Loads: n.loads.Load(), LoadBytes: n.loadBytes.Load(), LoadSeconds: time.Duration(n.loadNanos.Load()).Seconds(),
		Misses: n.misses.Load(), MissesAway: n.missesAway.Load(), MissesRefused: n.missesRefused.Load(),
		MissesExpired:  n.missesExpired.Load(),
		MissesUnmapped: n.missesUnmapped.Load(), Corrupt: n.corrupt.Load(), Faults: n.faults.Load(),
		Reconnects: n.reconnects.Load(), Outages: n.outages.Load(), Unknown: n.unknown.Load(), Resolved: n.resolved.Load(),
		Jobs: uint64(max(c.transfers.out.Load(), 0)),
	}
	c.mu.Lock()
	core := c.mu.core
	pages := core.Count()
	views, pins := core.Views()
	s.Views, s.Pins, s.Leases = uint64(views), uint64(pins), uint64(core.Leases()) //nolint:gosec // counts
	c.mu.Unlock()
	s.Regions, s.PagesFree, s.PagesWriting = pages.Regions, pages.Free, pages.Writing+pages.Committing
	s.PagesReady, s.PagesRetiring, s.PagesQuarantined = pages.Ready, pages.Retiring, pages.Quarantined
	s.BytesGranted = pages.Bytes
	for _, m := range *c.maps.Load() {
		if m.own == session.Foreign {
			s.RegionsMapped++
		}
	}
	return s
}
