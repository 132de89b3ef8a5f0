package sim

import (
	"errors"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/session"
)

// lockMap runs f when nobody else maps or unmaps; unlockMap must follow.
func (c *clientActor) lockMap(f func()) {
	if c.mapping {
		c.mapQueue = append(c.mapQueue, f)
		return
	}
	c.mapping = true
	f()
}

func (c *clientActor) unlockMap() {
	if len(c.mapQueue) == 0 {
		c.mapping = false
		return
	}
	f := c.mapQueue[0]
	c.mapQueue = c.mapQueue[1:]
	c.w.at(c.process, 0, f)
}

func (c *clientActor) unmap(id base.RegionID) {
	if id == c.segmentOf {
		c.segmentOf, c.unprepared = 0, true
	}
	if m := c.maps[id]; m != nil {
		c.w.unmapRegion(m)
		delete(c.maps, id)
		c.queueUnholds([]core.Handle{c.handles[id]})
		delete(c.handles, id)
	}
	c.core.RemoveRegion(id)
}

// dropGone unmaps what the core gave up, then gives the holds back.
func (c *clientActor) dropGone(next func()) {
	gone := c.core.TakeGone(nil)
	if len(gone) == 0 && len(c.unholds) == 0 {
		next()
		return
	}
	c.lockMap(func() {
		early := c.w.planted(UnholdBeforeUnmap)
		for _, id := range gone {
			if early && c.maps[id] != nil {
				c.unholds = append(c.unholds, c.handles[id])
				continue
			}
			c.unmap(id)
		}
		kept := c.unholds[:0]
		for _, h := range c.unholds {
			again := slices.ContainsFunc(kept, func(k core.Handle) bool { return k.Region == h.Region })
			if !again && (c.maps[h.Region] == nil || early) {
				kept = append(kept, h) // else it was mapped again since, and needs its hold
			}
		}
		c.unholds = kept
		c.unhold(func() {
			if early {
				for _, id := range gone {
					c.unmap(id)
				}
			}
			c.unlockMap()
			next()
		})
	})
}

// unhold gives the queued holds back; what has no answer stays queued.
func (c *clientActor) unhold(next func()) {
	w := c.w
	list := c.unholds
	c.unholds = nil
	if len(list) == 0 {
		next()
		return
	}
	c.holdSequence++
	req := core.Unhold{Session: c.id, Sequence: c.holdSequence, Handles: list, Token: c.holdToken, Peer: c.peer()}
	call(w, c.process, w.manager.process, "Unhold", mayRepeat, w.manager.unhold(req), func(_ struct{}, err error, f fate) {
		if err != nil {
			w.note("%s: Unhold: %v", c.process.name, err)
		}
		if f == notSent || unknownOutcome(f, err) || errors.Is(err, base.ErrDenied) && len(c.holdToken) == 0 {
			c.queueUnholds(list)
		}
		next()
	})
}

// hold takes holds on regions, all or none.
func (c *clientActor) hold(l *link, handles []core.Handle, done func([]core.Place, error)) {
	w := c.w
	if w.planted(UnholdDropped) {
		c.unholds = slices.DeleteFunc(c.unholds, func(u core.Handle) bool {
			return slices.ContainsFunc(handles, func(h core.Handle) bool { return h.Region == u.Region })
		})
	}
	c.holdSequence++
	req := core.Hold{
		Session: c.id, Server: l.srv.id, Incarnation: l.incarnation, Views: c.viewer, Sequence: c.holdSequence, Handles: handles,
		Peer: c.peer(),
	}
	lost := false
	var try func()
	try = func() {
		// Once: gRPC delivers a call at most once, and the client's own repetition is try.
		call(w, c.process, w.manager.process, "Hold", once, w.manager.hold(req), func(out core.Held, err error, f fate) {
			if unknownOutcome(f, err) && !lost {
				lost = true // repeating a recorded sequence succeeds
				try()
				return
			}
			if err != nil {
				if lost && !w.planted(UnholdDropped) {
					// It may be on record: a later sequence takes it back.
					c.queueUnholds(handles)
					c.kick()
				}
				if req.Vouched && errors.Is(err, base.ErrStale) {
					c.vouched, c.vouchNot = false, 0 // an operator may have dropped the session there
				}
				done(nil, err)
				return
			}
			if !out.Provable {
				c.lookForAgent()
			}
			c.holdToken = append([]byte(nil), out.Token[:]...)
			if c.watching == nil {
				c.watchManager()
			}
			done(out.Places, nil)
		})
	}
	c.vouch(l, func(vouched bool) {
		if req.Vouched = vouched; vouched {
			c.ambushed("holds")
		}
		try()
	})
}

// queueUnholds queues holds to be given back, each region once.
func (c *clientActor) queueUnholds(list []core.Handle) {
	for _, h := range list {
		c.unholds = append(slices.DeleteFunc(c.unholds, func(q core.Handle) bool { return q.Region == h.Region }), h)
	}
}

// watchManager follows the regions that drain, and comes back after a loss.
func (c *clientActor) watchManager() {
	if c.closed {
		return
	}
	w := c.w
	c.watching = &stream{broken: true}
	call(w, c.process, w.manager.process, "WatchSession", once, func(answer func(*stream, error)) {
		answer(w.manager.watchSession(c.process, c.id, func(id base.RegionID) {
			w.note("%s: region %d drains", c.process.name, id)
			c.core.Drain(id)
			c.kick()
		}), nil)
	}, func(s *stream, err error, _ fate) {
		if err != nil {
			w.at(c.process, time.Second, c.watchManager)
			return
		}
		c.watching = s
	})
}

func infoOf(p core.Place, number uint32) session.RegionInfo {
	r := p.Region
	return session.RegionInfo{
		ID: r.ID, Pool: r.Pool, PoolNumber: number, Medium: base.MediumCXL, Incarnation: r.Incarnation,
		PageBytes: r.Plan.PageBytes, PageCount: r.Plan.PageCount,
	}
}

// add maps a held region and makes it known.
func (c *clientActor) add(p core.Place, number uint32, own session.Ownership) error {
	m := &mapping{
		process: c.process, session: c.id, region: p.Region.ID, at: regionAt{p.Region.Extent, p.Region.Plan}, own: own == session.Own,
	}
	c.w.mapRegion(m)
	if err := c.core.AddRegion(infoOf(p, number), own); err != nil {
		c.w.unmapRegion(m)
		c.queueUnholds([]core.Handle{p.Handle})
		return err
	}
	c.maps[m.region] = m
	c.handles[m.region] = p.Handle
	return nil
}

// ensureMapped maps the foreign regions of leased rows.
func (c *clientActor) ensureMapped(l *link, ids []base.RegionID, next func()) {
	missing := func() (out []base.RegionID) {
		for _, id := range ids {
			if c.maps[id] == nil && id < base.FirstPrivateRegion {
				out = append(out, id)
			}
		}
		return out
	}
	if len(missing()) == 0 {
		next()
		return
	}
	w := c.w
	c.lockMap(func() {
		end := func() { c.unlockMap(); next() }
		want := missing()
		if len(want) == 0 {
			end()
			return
		}
		call(w, c.process, l.process, "DescribeRegions", mayRepeat, func(answer func([]described, error)) {
			out, err := l.srv.describe(l.who, want)
			answer(out, err)
		}, func(list []described, err error, _ fate) {
			if err != nil {
				c.failed(l, err)
				end()
				return
			}
			c.holdEach(l, list, end)
		})
	})
}

// holdEach holds and maps what could be described, all with one hold, and one by one
// when that is refused: one that drains must not hide the others.
func (c *clientActor) holdEach(l *link, list []described, next func()) {
	var found []described
	for _, d := range list {
		if d.err != nil {
			c.unreachable(l, d.pool, d.region)
		} else if c.maps[d.region] == nil {
			found = append(found, d)
		}
	}
	if len(found) == 0 {
		next()
		return
	}
	handles := make([]core.Handle, len(found))
	for i, d := range found {
		handles[i] = d.handle
	}
	if c.w.planted(ReadersTakeNoHold) {
		for _, d := range found {
			at := c.w.extents[d.region]
			p := core.Place{Region: core.Region{ID: d.region, Pool: d.handle.Pool, Incarnation: d.handle.Incarnation, Extent: at.extent, Plan: at.plan}, Handle: d.handle}
			if err := c.add(p, d.pool, session.Foreign); err != nil {
				c.unreachable(l, d.pool, d.region)
			}
		}
		next()
		return
	}
	c.hold(l, handles, func(places []core.Place, err error) {
		switch {
		case err == nil:
			for i, p := range places {
				if err := c.add(p, found[i].pool, session.Foreign); err != nil {
					c.unreachable(l, found[i].pool, p.Region.ID)
				}
			}
			next()
		case len(found) > 1:
			c.holdEach(l, found[:1], func() { c.holdEach(l, found[1:], next) })
		default:
			c.unreachable(l, found[0].pool, found[0].region)
			next()
		}
	})
}

// unreachable tells the server that a region cannot be read here.
func (c *clientActor) unreachable(l *link, pool uint32, id base.RegionID) {
	w := c.w
	w.note("%s cannot use region %d", c.process.name, id)
	call(w, c.process, l.process, "ReportUnreachable", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error { return d.ReportUnreachable(l.srv.now(), l.who, pool, id) }))
	}, func(_ struct{}, err error, _ fate) {
		if err != nil {
			c.failed(l, err)
		}
	})
}

// expand makes one Expand call; one without answer is repeated, now and by the next.
func (c *clientActor) expand(l *link, medium base.Medium, bytes uint64, done func(*directory.RegionGrant, error)) {
	w := c.w
	e, err := c.core.BeginExpand(medium, bytes, l.server)
	if err != nil {
		done(nil, err)
		return
	}
	req := &directory.ExpandRequest{Operation: e.Sequence, Medium: medium, Bytes: e.Bytes, PageBytes: pageBytes, PieceBytes: pieceBytes}
	tries := 0
	var try func()
	try = func() {
		tries++
		call(w, c.process, l.process, "Expand", mayRepeat, func(answer func(*directory.RegionGrant, error)) {
			l.srv.expand(l.who, req, w.now+callTimeout, answer)
		}, func(g *directory.RegionGrant, err error, f fate) {
			unknown := f == notSent || unknownOutcome(f, err) // its connection broke: as good as no answer
			if unknown && f != notSent && tries < 2 {
				try()
				return
			}
			failure := err
			err = c.core.EndExpand(e, unknown && err != nil, err)
			if failure != nil {
				c.failed(l, failure)
			}
			done(g, err)
		})
	}
	try()
}

// expandCXL gets, holds, maps and offers one more own region.
func (c *clientActor) expandCXL(l *link, done func(error)) {
	pages := uint64(3)
	if c.w.chance(40) {
		pages = 7
	}
	c.expand(l, base.MediumCXL, pages*pageBytes, func(g *directory.RegionGrant, err error) {
		if err != nil {
			done(err)
			return
		}
		h := l.srv.handle(g.Region, g.Incarnation)
		h.Token = g.Write
		c.lockMap(func() {
			c.hold(l, []core.Handle{h}, func(places []core.Place, err error) {
				if err == nil {
					err = c.add(places[0], g.Pool, session.Own)
				}
				c.unlockMap()
				if err != nil {
					c.w.note("%s cannot hold its region %d: %v", c.process.name, g.Region, err)
					c.unreachable(l, g.Pool, g.Region)
					c.core.GiveBack(session.RegionInfo{ID: g.Region, Pool: g.PoolID, PoolNumber: g.Pool, Medium: base.MediumCXL})
					c.flushReturns(l, func() { done(err) })
					return
				}
				done(err)
			})
		})
	})
}

// flushReturns tells the server of regions that could not be used.
func (c *clientActor) flushReturns(l *link, next func()) {
	w := c.w
	r, ok := c.core.BeginReturn(l.who.Epoch)
	if !ok {
		next()
		return
	}
	call(w, c.process, l.process, "Return", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error {
			return d.Return(l.srv.now(), l.who, r.Sequence, r.PoolNumber, r.Region)
		}))
	}, func(_ struct{}, err error, f fate) {
		w.note("%s gives region %d back: %v", c.process.name, r.Region, err)
		if !c.core.EndReturn(r, err != nil && (f == notSent || unknownOutcome(f, err)), err) {
			c.failed(l, err)
			next()
			return
		}
		c.flushReturns(l, next)
	})
}

// grow asks for one more region when no page is free; done says whether one may be.
func (c *clientActor) grow(done func(bool)) {
	l := c.current()
	if c.growing || l == nil || c.w.now < c.growNot || c.closing {
		done(false)
		return
	}
	c.growCXL(l, func(err error) { done(err == nil) })
}

// growCXL gets one more cxl region, and waits before the next after a failure.
func (c *clientActor) growCXL(l *link, done func(error)) {
	c.growing = true
	c.expandCXL(l, func(err error) {
		c.growing = false
		if err != nil {
			c.growNot = c.w.now + time.Second
		}
		done(err)
	})
}

// finishGrowth asks again for a cxl region whose answer was lost.
func (c *clientActor) finishGrowth(l *link, next func()) {
	if _, lost := c.core.LostExpand(base.MediumCXL); !lost || c.growing || c.closing || c.w.now < c.growNot {
		next()
		return
	}
	c.growCXL(l, func(error) { next() })
}

// prepare gets what is wanted and not there: the proof of the domains, the private
// region, the first cxl region.
func (c *clientActor) prepare(l *link, next func()) {
	w := c.w
	if !c.unprepared || w.now < c.prepareNot || c.role == base.RoleScheduler || c.closing {
		next()
		return
	}
	c.unprepared = false
	keep := func(err error) {
		if err != nil {
			c.unprepared, c.prepareNot = true, w.now+heartbeat
		}
	}
	cxl := func() {
		if c.core.CountMedium(base.MediumCXL).Regions > 0 || c.growing {
			next()
			return
		}
		c.growCXL(l, func(err error) {
			keep(err)
			next()
		})
	}
	segment := func() {
		if !c.private || c.segmentOf != 0 {
			cxl()
			return
		}
		c.expand(l, base.MediumCPU, privateBytes, func(g *directory.RegionGrant, err error) {
			keep(err)
			if err == nil {
				err = c.core.AddRegion(session.RegionInfo{
					ID: g.Region, PoolNumber: g.Pool, Medium: base.MediumCPU, PageBytes: pageBytes, PageCount: g.Place.PageCount,
					ServerEpoch: l.server,
				}, session.Own)
				keep(err)
			}
			if err == nil {
				c.segmentOf = g.Region
			}
			cxl()
		})
	}
	if l.proved {
		segment()
		return
	}
	call(w, c.process, l.process, "ProveDomains", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error {
			return d.ProveDomains(l.srv.now(), l.who, []base.PoolID{w.manager.pool()})
		}))
	}, func(_ struct{}, err error, _ fate) {
		keep(err)
		if err != nil {
			c.failed(l, err)
		} else {
			l.proved = true
		}
		segment()
	})
}
