package session

import (
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// PoolNumber is what a pool is called during one server epoch.
type PoolNumber struct {
	ID     base.PoolID
	Medium base.Medium
	Number uint32
}

// Opening is an answered Open.
type Opening struct {
	Epoch       base.Epoch
	ServerEpoch base.ServerEpoch
	Sent        time.Duration // when it was asked, CLOCK_BOOTTIME
	TTL, Margin time.Duration
	Relist      bool // the server asks for a list
	Pools       []PoolNumber
}

// Snapshot is what a session holds, taken at one instant.
type Snapshot struct {
	Epoch       base.Epoch
	ServerEpoch base.ServerEpoch
	Pages       []hot.RelistPage
	Leases      []hot.RelistLease
	refs        []PageRef
}

// Opened takes an answered Open. At the same server epoch everything is kept: the
// server knows it. After a restart of the server, or when it asks, the snapshot of
// READY, RETIRING and uncertain pages and of the leases is returned, which the shell
// sends as Relist frames; until it is acknowledged nothing is committed. Commits to
// another server without an answer are uncertain then, for good: their operations end
// here, and a late answer changes nothing. Private cpu regions of a server that is gone
// are given up: the new one knows none of them.
func (c *Core) Opened(o Opening) *Snapshot {
	if c.phase == HasLeft || c.phase == Closed {
		return nil
	}
	restarted := c.serverEpoch != 0 && c.serverEpoch != o.ServerEpoch
	c.epoch, c.serverEpoch = o.Epoch, o.ServerEpoch
	c.ttl, c.margin = o.TTL, o.Margin
	c.validUntil = o.Sent + o.TTL - o.Margin
	c.lastEvent = 0
	c.phase = Live
	if !restarted && !o.Relist {
		c.renumber(o.Pools)
		return nil
	}
	c.phase = Relisting
	c.giveAgain()
	c.renumber(o.Pools)
	for seq, op := range c.commits {
		if op.serverEpoch == o.ServerEpoch {
			continue // this server can still resolve it
		}
		for _, ref := range op.refs {
			c.quarantine(seq, ref)
		}
		c.closeOp(seq, op)
	}
	if restarted {
		c.dropExpands()
		for _, r := range c.releases {
			if r.Closes {
				c.ledger.end(r.Acquire)
			}
		}
		c.releases = c.releases[:0]
		c.cleared, c.reclaimed = c.cleared[:0], c.reclaimed[:0]
		for _, r := range append([]*region(nil), c.own...) {
			if r.Private() {
				c.Drain(r.ID)
			}
		}
	}
	return c.snapshot(restarted)
}

func (c *Core) renumber(pools []PoolNumber) {
	for i := range c.returns {
		c.returns[i].PoolNumber = 0 // of a pool that this server does not name
		for _, p := range pools {
			if p.ID == c.returns[i].Pool {
				c.returns[i].PoolNumber = p.Number
			}
		}
	}
	for _, r := range c.regions {
		for _, p := range pools {
			if p.ID == r.Pool || r.Private() && p.Medium == base.MediumCPU {
				r.PoolNumber = p.Number
			}
		}
	}
}

// Renumber takes the pools that the server named since.
func (c *Core) Renumber(pools []PoolNumber) { c.renumber(pools) }

func (c *Core) snapshot(restarted bool) *Snapshot {
	s := &Snapshot{Epoch: c.epoch, ServerEpoch: c.serverEpoch}
	for _, r := range c.own {
		if r.Private() || r.mode == going {
			continue // a server knows its private regions, and no other does
		}
		for i := range r.pages[:r.fresh] {
			p := &r.pages[i]
			var state hot.RelistState
			switch {
			case p.state == Ready:
				state = hot.RelistReady
			case p.state == Retiring:
				state = hot.RelistRetiring
			case p.state == Quarantined && p.flags&uncertain != 0 && c.commits[p.op] == nil:
				state = hot.RelistUncertain
			default:
				continue
			}
			if restarted {
				p.flags &^= reclaim | acking // what the old server said of it is void
			}
			ref := PageRef{Region: r.ID, Index: base.PageIndex(i), Generation: p.gen} //nolint:gosec // a page
			s.refs = append(s.refs, ref)
			s.Pages = append(s.Pages, hot.RelistPage{
				CommitRow: hot.CommitRow{
					Key: p.key, Parent: p.parent, Pool: r.PoolNumber, Region: r.ID,
					Offset: uint64(i) * r.PageBytes, Length: p.length, Generation: p.gen, Checksum: p.checksum, //nolint:gosec // a page
				},
				Order: p.order, State: state,
			})
		}
	}
	for _, b := range c.book {
		for i, row := range b.Rows {
			r := c.regions[row.Region]
			if row.Region == 0 || r == nil || r.Private() {
				continue
			}
			if !r.mapped {
				b.Rows[i].unlisted = true
				continue
			}
			s.Leases = append(s.Leases, hot.RelistLease{
				Pool: r.PoolNumber, Region: row.Region, Offset: row.Offset, Generation: row.Generation,
				Kind: b.Kind, Acquire: b.Sequence, Index: uint32(i), //nolint:gosec // a row
			})
		}
	}
	return s
}

// Relisted takes the results of the snapshot's pages from first on. It appends the
// pages whose marks are to be cleared to clear, as Receive does.
func (c *Core) Relisted(s *Snapshot, first int, results []byte, clear []PageRef) []PageRef {
	if s.Epoch != c.epoch || s.ServerEpoch != c.serverEpoch {
		return clear
	}
	for k, res := range results {
		if first+k >= len(s.refs) {
			break
		}
		ref := s.refs[first+k]
		r := c.regions[ref.Region]
		if r == nil {
			continue
		}
		p := r.page(ref.Index)
		if p == nil || p.gen != ref.Generation || p.state != Ready && p.state != Retiring && p.state != Quarantined {
			continue // an event of the new epoch came first
		}
		switch hot.RelistResult(res) {
		case hot.RelistKept:
			// The server cannot judge yet, and will ask for the list again.
		case hot.RelistRetire:
			if p.state != Retiring {
				p.flags &^= uncertain
				r.set(p, Retiring)
				c.settle(r)
			}
			if out := c.clear(r, ref.Index, p); out != (PageRef{}) {
				clear = append(clear, out)
			}
		case hot.RelistQuarantined:
			c.doubt(r, p)
		case hot.RelistRefused:
			// The region is not ours there: it takes no new pages and goes when idle, and no
			// mark stays behind in it.
			clear = c.disown(r, clear)
		}
	}
	return clear
}

// disown gives up a region that the server does not know as ours.
func (c *Core) disown(r *region, clear []PageRef) []PageRef {
	for i := range r.pages[:r.fresh] {
		p := &r.pages[i]
		c.doubt(r, p)
		if p.flags&marked == 0 || p.flags&clearing != 0 {
			continue
		}
		if ref := c.clear(r, base.PageIndex(i), p); ref != (PageRef{}) { //nolint:gosec // a page
			clear = append(clear, ref)
		}
	}
	c.Drain(r.ID)
	return clear
}

// doubt quarantines a page that the server does not show any more. The next server is
// told of it too: its mark may be on the device.
func (c *Core) doubt(r *region, p *page) {
	if p.state == Ready {
		p.flags |= uncertain
		r.set(p, Quarantined)
	}
}

// RelistDone says that the last frame of a snapshot was acknowledged.
func (c *Core) RelistDone(s *Snapshot) bool {
	if s.Epoch != c.epoch || s.ServerEpoch != c.serverEpoch || c.phase != Relisting {
		return false
	}
	c.phase = Live
	return true
}

// Unmarked appends READY pages of shared regions that have no mark: their epoch changed
// between Commit and mark.
func (c *Core) Unmarked(dst []PageRef) []PageRef {
	for _, r := range c.own {
		if r.Private() || r.mode == going {
			continue
		}
		for i := range r.pages[:r.fresh] {
			if p := &r.pages[i]; p.state == Ready && p.flags&(marked|clearing) == 0 {
				dst = append(dst, PageRef{Region: r.ID, Index: base.PageIndex(i), Generation: p.gen}) //nolint:gosec // a page
			}
		}
	}
	return dst
}

// Leave ends the session with exports out: no page is used again, none is free, no mark
// is written; leases of views stay.
func (c *Core) Leave() {
	c.phase, c.validUntil = HasLeft, 0
	for _, r := range c.own {
		for i := range r.pages[:r.fresh] {
			if p := &r.pages[i]; p.state != Left {
				r.endClear(p)
				p.flags = 0
				r.set(p, Left)
			}
		}
	}
}

// Close ends a session that holds nothing any more: pages in writing are given up and
// every region goes. It appends the regions to unmap. With a lease out nothing changes
// and ok is false (D1).
func (c *Core) Close(dst []base.RegionID) (gone []base.RegionID, ok bool) {
	for _, r := range c.regions {
		if r.leases > 0 {
			return dst, false
		}
	}
	c.phase, c.validUntil = Closed, 0
	c.gone = c.gone[:0]
	for id, r := range c.regions {
		r.mode = going
		dst = append(dst, id)
	}
	return dst, true
}
