package session

import (
	"github.com/xcena-dev/maru/internal/base"
)

// EventKind says what an event asks for.
type EventKind uint8

// Events that concern pages and regions; fences and pools are the shell's.
const (
	RetireEvent EventKind = iota + 1
	ReclaimEvent
	DrainEvent
	OtherEvent // only its number counts here
)

// Event is one event of the server's stream.
type Event struct {
	Number     uint64
	Kind       EventKind
	PoolNumber uint32
	Region     base.RegionID
	Offset     uint64
	Generation base.Generation
}

// LastEvent is the highest event up to which all have been received.
func (c *Core) LastEvent() uint64 { return c.lastEvent }

// Receive takes the next event. It returns false for one that was received before or
// that is not the next: the heartbeat brings what is missing. clear is the page whose
// mark the shell must clear, under the region's lock, and then report with Cleared.
func (c *Core) Receive(e Event) (accepted bool, clear PageRef) {
	if e.Number != c.lastEvent+1 || (c.phase != Live && c.phase != Relisting) {
		return false, PageRef{}
	}
	c.lastEvent = e.Number
	switch e.Kind {
	case RetireEvent:
		return true, c.retire(e)
	case ReclaimEvent:
		return true, c.reclaimPage(e)
	case DrainEvent:
		c.Drain(e.Region)
	case OtherEvent:
	}
	return true, PageRef{}
}

// held finds the page that an event means. What is not ours any more, or is another
// generation, has no mark of that generation: the server is told so.
func (c *Core) held(e Event) (*region, base.PageIndex, *page) {
	r := c.regions[e.Region]
	if r == nil {
		return nil, 0, nil
	}
	i, p := r.pageAt(e.Offset)
	if p == nil || p.gen != e.Generation || p.gen == 0 {
		return r, i, nil
	}
	switch p.state {
	case Committing, Ready, Retiring, Quarantined:
		return r, i, p
	case Free, Writing, Left, stateCount:
	}
	return r, i, nil
}

// echo acknowledges what is not here any more in the event's own words.
func echo(e Event) Ack {
	return Ack{PageRef: PageRef{Region: e.Region, Generation: e.Generation}, PoolNumber: e.PoolNumber, Offset: e.Offset}
}

func (c *Core) retire(e Event) PageRef {
	r, i, p := c.held(e)
	if p == nil {
		c.cleared = append(c.cleared, echo(e))
		return PageRef{}
	}
	if p.state != Retiring {
		p.flags &^= uncertain
		r.set(p, Retiring)
		c.settle(r)
	}
	return c.clear(r, i, p)
}

// clear asks the shell to clear a mark, or acknowledges at once where there is none to
// clear: private pages have no records.
func (c *Core) clear(r *region, i base.PageIndex, p *page) PageRef {
	ref := PageRef{Region: r.ID, Index: i, Generation: p.gen}
	if r.Private() || !r.mapped || r.mode == going {
		c.Cleared(ref, true)
		return PageRef{}
	}
	r.startClear(p)
	return ref
}

func (c *Core) reclaimPage(e Event) PageRef {
	r, i, p := c.held(e)
	if p == nil {
		c.reclaimed = append(c.reclaimed, echo(e))
		return PageRef{}
	}
	p.flags |= reclaim
	if p.state == Retiring && p.flags&(marked|clearing) == 0 {
		c.tryFree(r, i, p)
		return PageRef{}
	}
	// Its mark must be cleared before the page is free.
	p.flags &^= uncertain
	if p.state != Retiring {
		r.set(p, Retiring)
		c.settle(r)
	}
	if p.flags&clearing != 0 {
		return PageRef{} // the shell is at it
	}
	return c.clear(r, i, p)
}

// Cleared says that a mark was cleared and flushed; the shell says it of each page that
// Receive or Relisted gave it. With done false it could not be (the memory faults):
// nothing is acknowledged and the page stays where it is, so that the server, which
// waits, names it.
func (c *Core) Cleared(ref PageRef, done bool) {
	r := c.regions[ref.Region]
	if r == nil {
		return
	}
	p := r.page(ref.Index)
	if p == nil || p.gen != ref.Generation {
		return
	}
	r.endClear(p)
	if done {
		p.flags &^= marked
		if p.state == Retiring {
			c.cleared = append(c.cleared, c.ack(ref))
			c.tryFree(r, ref.Index, p)
		}
	}
	c.settle(r)
}

// tryFree acknowledges a page that was reclaimed and whose mark is cleared. It is free
// when the server has taken the acknowledgement: until then it would refuse another
// object there. A server that reclaims under a view of ours is not believed: the page
// waits for the view (R3).
func (c *Core) tryFree(r *region, i base.PageIndex, p *page) {
	if p.flags&reclaim == 0 || p.flags&(marked|clearing|acking) != 0 || p.state != Retiring || r.views > 0 && c.viewed(r, i, p.gen) {
		return
	}
	p.flags |= acking
	c.reclaimed = append(c.reclaimed, c.ack(PageRef{Region: r.ID, Index: i, Generation: p.gen}))
}

// Ack is a page event that the server is to be told is done.
type Ack struct {
	PageRef
	PoolNumber uint32
	Offset     uint64
}

// TakeAcks moves the acknowledgements that wait to the two lists.
func (c *Core) TakeAcks(cleared, reclaimed []Ack) (a, b []Ack) {
	cleared = append(cleared, c.cleared...)
	reclaimed = append(reclaimed, c.reclaimed...)
	c.cleared, c.reclaimed = c.cleared[:0], c.reclaimed[:0]
	return cleared, reclaimed
}

func (c *Core) ack(ref PageRef) Ack {
	a := Ack{PageRef: ref}
	if r := c.regions[ref.Region]; r != nil {
		a.PoolNumber, a.Offset = r.PoolNumber, uint64(ref.Index)*r.PageBytes
	}
	return a
}

// AcksTaken says that the server has taken what TakeAcks gave: reclaimed pages are free.
func (c *Core) AcksTaken(reclaimed []Ack, server base.ServerEpoch) {
	if server != c.serverEpoch {
		return
	}
	for _, a := range reclaimed {
		r := c.regions[a.Region]
		if r == nil {
			continue
		}
		if p := r.page(a.Index); p != nil && p.gen == a.Generation && p.state == Retiring && p.flags&acking != 0 {
			c.freePage(r, a.Index)
		}
	}
}

// ReturnAcks puts acknowledgements back that were not delivered, unless the server that
// asked for them is gone.
func (c *Core) ReturnAcks(cleared, reclaimed []Ack, server base.ServerEpoch) {
	if server != c.serverEpoch {
		return
	}
	c.cleared = append(c.cleared, cleared...)
	c.reclaimed = append(c.reclaimed, reclaimed...)
}
