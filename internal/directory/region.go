package directory

import (
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// regionState is the life of a region here.
type regionState uint8

const (
	regionGranted  regionState = iota + 1 // its writer allocates pages
	regionKept                            // its writer is gone or has left; never written again
	regionGoing                           // hidden; goes back when its leases have drained
	regionFreeing                         // the resource manager was asked to free it
	regionReturned                        // it has it back, and readers of before a restart are still in it
)

// region is one granted region. It holds pages of one size, one namespace and one
// writer.
type region struct {
	slot        uint32
	id          base.RegionID
	incarnation base.Incarnation // 0 for private cpu regions
	pool        *pool
	ns          *namespace
	writer      *session // nil once the writer is gone
	writerID    base.SessionID
	state       regionState
	place       Place
	write       []byte // the RM's write capability

	pages []replicaRef
	last  []base.Generation // highest generation committed of each page

	ready    int // READY replicas
	used     int // replicas in any state
	held     int // replicas with flagRestartHeld
	leases   int // copy and view leases in it
	views    int
	requests int // request leases in it

	toClear  []base.PageIndex // asked for at the next AppendEffects
	clearing bool             // in clearQueue
	clearOut int              // pages asked for and not answered
	retryAt  time.Duration    // a failed effect is asked for again then; 0: none
	lastRead time.Duration    // for "read longest ago" (MS-10)

	recovered *recovery // not nil: from before a server restart
}

func (g *region) private() bool         { return g.pool.owner != nil }
func (g *region) capacityBytes() uint64 { return g.place.PageBytes * g.place.PageCount }

// offsetOf returns where a page starts.
func (g *region) offsetOf(page uint32) uint64 { return uint64(page) * g.place.PageBytes }

// pageAt returns the page of an offset that a peer sent (DM-14).
func (g *region) pageAt(offset uint64) (uint32, bool) {
	page := offset / g.place.PageBytes
	if page*g.place.PageBytes != offset || page >= g.place.PageCount {
		return 0, false
	}
	return uint32(page), true //nolint:gosec // below the page count
}

// visible reports whether READY replicas of the region may be found at all.
func (g *region) visible(now time.Duration) bool {
	switch g.state {
	case regionKept:
		return true
	case regionGranted:
		return g.writer != nil && g.writer.state == StateLive && now < g.writer.deadline
	}
	return false
}

// readable reports whether this session reaches the region (RPC-24): the domain of
// its pool is proved, and nothing in it was reported as out of reach.
func (s *session) readable(g *region) bool {
	p := g.pool
	if p.owner != nil {
		return p.owner == s
	}
	if s.proved&^s.lostPools&p.bit == 0 || !p.info.Online {
		return false // an offline pool cannot be mapped: no hits are counted there (FE-08)
	}
	if len(s.unreachable) != 0 {
		if _, lost := s.unreachable[regionKey{p.number, g.id}]; lost {
			return false
		}
	}
	return true
}

// extentBytes is what a region takes of its pool: data, then from the next 4 KiB
// the region line and the records, the whole aligned to 2 MiB (docs/PROTOCOL.md
// section 2).
func extentBytes(pageBytes, pageCount uint64) uint64 {
	const tableAlign, extentAlign, lineBytes, recordBytes = 4096, 2 << 20, 128, 64
	table := roundUp(pageBytes*pageCount, tableAlign)
	return roundUp(table+lineBytes+recordBytes*pageCount, extentAlign)
}

func roundUp(n, step uint64) uint64 { return (n + step - 1) / step * step }

// addRegion makes the record of a region. The caller has checked the bounds.
func (d *Directory) addRegion(p *pool, ns *namespace, id base.RegionID, inc base.Incarnation, place Place, writer *session, writerID base.SessionID, write []byte) *region {
	g := &region{
		id: id, incarnation: inc, pool: p, ns: ns, writer: writer, writerID: writerID, state: regionGranted, place: place, write: write,
		pages: make([]replicaRef, place.PageCount), last: make([]base.Generation, place.PageCount),
	}
	if n := len(d.freeSlots); n > 0 {
		g.slot = d.freeSlots[n-1]
		d.freeSlots = d.freeSlots[:n-1]
		d.regions[g.slot] = g
	} else {
		g.slot = uint32(len(d.regions)) //nolint:gosec // bounded by max-regions
		d.regions = append(d.regions, g)
	}
	p.regions[id] = g.slot
	p.granted += g.capacityBytes()
	d.regionCount++
	d.pageCount += place.PageCount
	ns.regions++
	if writer != nil {
		writer.regions = append(writer.regions, g.slot)
		if !g.private() {
			writer.cxlUsed += place.ExtentBytes
		}
	}
	return g
}

func (g *region) backingBytes() uint64 {
	if g.private() {
		return g.capacityBytes()
	}
	return g.place.ExtentBytes
}

// dropRegion forgets a region and everything in it; its bytes are free from now on.
func (d *Directory) dropRegion(g *region) {
	for page, ref := range g.pages {
		if ref != 0 {
			d.freeReplica(g, uint32(page), ref) //nolint:gosec // a page index
		}
	}
	p := g.pool
	delete(p.regions, g.id)
	p.granted -= g.capacityBytes()
	p.reserved -= g.backingBytes()
	if p.victim == g.slot {
		p.victim = 0
	}
	if g.writer == nil {
		p.keptBytes -= g.capacityBytes()
	}
	d.regionCount--
	d.pageCount -= g.place.PageCount
	g.ns.regions--
	if s := g.writer; s != nil {
		if i := slices.Index(s.regions, g.slot); i >= 0 {
			s.regions = slices.Delete(s.regions, i, i+1)
		}
		if !g.private() {
			s.cxlUsed -= min(s.cxlUsed, g.place.ExtentBytes)
		}
	}
	d.regions[g.slot] = nil
	d.freeSlots = append(d.freeSlots, g.slot)
	if s := d.sessions[g.writerID]; g.writer == nil && s != nil {
		s.keptRegions--
		d.forgetKept(g.writerID)
	}
	d.accountedFor(g)
}

// forgetKept drops the record of a proved-gone session with its last region.
func (d *Directory) forgetKept(id base.SessionID) {
	if s := d.sessions[id]; s != nil && s.state == StateKept && s.keptRegions == 0 {
		d.forget(s)
	}
}

// regionOf finds a region by the numbers in a message.
func (d *Directory) regionOf(poolNumber uint32, id base.RegionID) *region {
	p := d.pools[poolNumber]
	if p == nil {
		return nil
	}
	slot, ok := p.regions[id]
	if !ok {
		return nil
	}
	return d.regions[slot]
}

// account moves the bytes of a replica's state in or out of its pool (R5).
func (d *Directory) account(g *region, r *replica, sign int) {
	p, delta := g.pool, g.place.PageBytes
	add := func(v *uint64, n uint64) {
		if sign > 0 {
			*v += n
		} else {
			invariants.Check(*v >= n, "R5", "pool %d: %d bytes less than %d", p.number, n, *v)
			*v -= n
		}
	}
	switch r.state() {
	case replicaReady:
		add(&p.readyPages, delta)
		add(&p.readyBytes, r.length())
		add(&p.objects, 1)
		g.ready += sign
	case replicaRetiring:
		add(&p.retiringPages, delta)
	case replicaQuarantined:
		add(&p.quarantinedPages, delta)
	}
}

// freeReplica takes a replica away; its page is free.
func (d *Directory) freeReplica(g *region, page uint32, ref replicaRef) {
	r := d.store.replica(ref)
	invariants.Check(r.leases() == 0, "R3", "page %d of region %d is freed with %d leases", page, g.id, r.leases())
	invariants.Check(g.private() || g.state != regionGranted || r.state() == replicaQuarantined || r.has(flagMarkCleared), "R7",
		"page %d of region %d is freed with its mark", page, g.id)
	invariants.Check(!r.has(flagRestartHeld) || g.recovered.done, "R6", "page %d of region %d is freed before rule Server restart", page, g.id)
	if r.has(flagDeleteWaiting) {
		d.markGone(ref)
	}
	if r.has(flagRestartHeld) {
		g.held--
	}
	if r.requests > 0 {
		g.requests -= int(r.requests)
		g.pool.requestBytes -= g.place.PageBytes * uint64(r.requests)
		r.requests = 0
	}
	d.account(g, r, -1)
	g.used--
	g.pages[page] = 0
	d.store.remove(ref)
}

// retire hides a replica for good (R7) and starts its way to a free page.
func (d *Directory) retire(now time.Duration, g *region, ref replicaRef) {
	r := d.store.replica(ref)
	if r.state() == replicaRetiring {
		return
	}
	d.account(g, r, -1)
	r.setState(replicaRetiring)
	d.account(g, r, +1)
	d.counters.ReplicasRetired++
	switch g.state {
	case regionGranted:
		if g.private() {
			r.setFlag(flagMarkCleared) // private pools have no marks
		}
		d.queueEvent(now, g, r, EventRetire)
	case regionKept:
		d.askClear(g, r)
	}
	d.advance(now, g, ref)
	d.settleKept(now, g) // also when leases keep the replica itself: no key is left
}

// advance takes a RETIRING replica one step on when what it waits for is there.
func (d *Directory) advance(now time.Duration, g *region, ref replicaRef) {
	r := d.store.replica(ref)
	if r.state() != replicaRetiring || r.leases() != 0 {
		return
	}
	switch g.state {
	case regionGranted:
		if !r.has(flagMarkCleared) || r.has(flagReclaimAsked) || (r.has(flagRestartHeld) && !g.recovered.done) {
			return
		}
		r.setFlag(flagReclaimAsked)
		d.queueEvent(now, g, r, EventReclaim)
	case regionKept:
		// Nothing is written here again: the replica may go as soon as no mark and no
		// reader is left. A left session's exports are leases too.
		if r.has(flagMarkCleared) && (!r.has(flagRestartHeld) || g.recovered.done) {
			d.freeReplica(g, r.page, ref)
		}
		d.settleKept(now, g)
	case regionGoing, regionReturned:
		d.settleGoing(now, g)
	}
}

// settleKept sends a kept region back when no key is left in it, or when its writer ended
// before it had listed it whole.
func (d *Directory) settleKept(now time.Duration, g *region) {
	if g.state == regionKept && g.writer == nil && (g.ready == 0 || g.unlisted()) {
		d.sendBack(now, g)
	}
}

// sendBack hides a whole region and gives it back when its leases have drained.
func (d *Directory) sendBack(now time.Duration, g *region) {
	if g.state >= regionGoing {
		return
	}
	g.state = regionGoing
	for _, ref := range g.pages {
		if ref == 0 {
			continue
		}
		if r := d.store.replica(ref); r.state() != replicaRetiring {
			d.account(g, r, -1)
			r.setState(replicaRetiring)
			d.account(g, r, +1)
		}
	}
	d.settleGoing(now, g)
}

// settleGoing frees a region that is on its way back and has no lease left. One that
// nobody listed after a restart does not wait for its leases, since deletes wait for its
// marks: the resource manager makes it DRAINING, for good, and the holds of its readers
// keep its range.
func (d *Directory) settleGoing(now time.Duration, g *region) {
	if g.state == regionReturned && g.leases == 0 {
		d.dropRegion(g)
		return
	}
	if g.state != regionGoing || (g.recovered != nil && !g.recovered.done) || (g.leases != 0 && !g.unlisted()) {
		return
	}
	if g.writer != nil && g.writer.state == StateLeft {
		return // nothing of a left session is reused before its end is proved
	}
	if g.private() {
		d.dropRegion(g)
		return
	}
	g.state = regionFreeing
	g.retryAt = 0
	d.effect(Effect{Kind: EffectFreeRegion, Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id, Incarnation: g.incarnation})
	for _, s := range d.sessionList {
		if s.state == StateLive && s.role == base.RoleWorker && s.ns == g.ns && s.proved&g.pool.bit != 0 {
			d.sendEvent(now, s, Event{Kind: EventDrain, Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id})
		}
	}
}

// RegionFreed is the answer to EffectFreeRegion. With an error the region stays
// charged and is asked for again after the retry interval; base.ErrNotFound means
// that the resource manager has it no more. A region with leases is known until they end.
func (d *Directory) RegionFreed(now time.Duration, poolNumber uint32, id base.RegionID, err error) {
	g := d.regionOf(poolNumber, id)
	if g == nil || g.state != regionFreeing {
		return
	}
	if err != nil && base.CodeOf(err) != base.CodeNotFound {
		g.retryAt = now + d.cfg.RetryInterval
		return
	}
	d.counters.RegionsFreed++
	if g.leases != 0 {
		g.state = regionReturned
		d.accountedFor(g)
		return
	}
	d.dropRegion(g)
}

// askClear queues the mark of a kept region's page for the resource manager.
func (d *Directory) askClear(g *region, r *replica) {
	if r.has(flagMarkCleared) || r.has(flagClearAsked) {
		return
	}
	r.setFlag(flagClearAsked)
	g.toClear = append(g.toClear, base.PageIndex(r.page))
	if !g.clearing {
		g.clearing = true
		d.clearQueue = append(d.clearQueue, g.slot)
	}
}

// clearPages is the most pages that one ClearRecords call takes.
const clearPages = 8192

func (d *Directory) flushClears() {
	for _, slot := range d.clearQueue {
		g := d.regions[slot]
		if g == nil || !g.clearing {
			continue
		}
		g.clearing = false
		pages := g.toClear
		g.toClear = nil
		if g.state != regionKept || g.private() {
			continue
		}
		for len(pages) > 0 {
			n := min(len(pages), clearPages)
			g.clearOut += n
			d.effect(Effect{
				Kind: EffectClearRecords, Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id, Incarnation: g.incarnation,
				Pages: pages[:n:n], WriterLeft: g.writer != nil && g.writer.state == StateLeft,
			})
			pages = pages[n:]
		}
	}
	d.clearQueue = d.clearQueue[:0]
}

// RecordsCleared is the answer to EffectClearRecords. With an error the pages are
// asked for again after the retry interval.
func (d *Directory) RecordsCleared(now time.Duration, poolNumber uint32, id base.RegionID, pages []base.PageIndex, err error) {
	g := d.regionOf(poolNumber, id)
	if g == nil {
		return
	}
	g.clearOut = max(0, g.clearOut-len(pages))
	for _, page := range pages {
		if uint64(page) >= g.place.PageCount || g.pages[page] == 0 {
			continue
		}
		ref := g.pages[page]
		r := d.store.replica(ref)
		if r.state() != replicaRetiring || !r.has(flagClearAsked) {
			continue
		}
		r.clearFlag(flagClearAsked)
		if err != nil {
			g.retryAt = now + d.cfg.RetryInterval
			continue
		}
		d.markCleared(now, g, ref)
		if d.regions[g.slot] != g {
			return
		}
	}
}

// markCleared records that a RETIRING replica has no mark on the device.
func (d *Directory) markCleared(now time.Duration, g *region, ref replicaRef) {
	r := d.store.replica(ref)
	r.setFlag(flagMarkCleared)
	if r.has(flagDeleteWaiting) {
		d.markGone(ref)
	}
	d.advance(now, g, ref)
}

// retryRegions asks again for effects that failed; it returns when the next is due.
func (d *Directory) retryRegions(now time.Duration) time.Duration {
	next := never
	for _, g := range d.regions {
		if g == nil || g.retryAt == 0 {
			continue
		}
		if g.retryAt > now {
			next = min(next, g.retryAt)
			continue
		}
		g.retryAt = 0
		switch g.state {
		case regionFreeing:
			d.effect(Effect{Kind: EffectFreeRegion, Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id, Incarnation: g.incarnation})
		case regionKept:
			for _, ref := range g.pages {
				if ref != 0 {
					if r := d.store.replica(ref); r.state() == replicaRetiring {
						d.askClear(g, r)
					}
				}
			}
		}
	}
	return next
}

// GiveBackVictim starts giving back the kept region of a pool that was read
// longest ago, whole, and returns its id; poolNumber 0 takes any shared pool. While
// one is on its way it returns that one: they go one at a time (MS-10). Regions
// with views (also those that rule "Server restart" may still bring) or of left sessions
// are no victims; those kept by leases or request
// leases come last. It returns false when there is none.
func (d *Directory) GiveBackVictim(now time.Duration, poolNumber uint32) (PageRef, bool) {
	d.expireDue(now)
	for _, p := range d.shared {
		if poolNumber != 0 && p.number != poolNumber {
			continue
		}
		if p.victim != 0 {
			return PageRef{Pool: p.number, Region: d.regions[p.victim].id}, true
		}
	}
	var best *region
	for _, g := range d.regions {
		if g == nil || g.state != regionKept || g.writer != nil || g.views > 0 || (g.recovered != nil && !g.recovered.done) || (poolNumber != 0 && g.pool.number != poolNumber) {
			continue
		}
		if best == nil || victimBefore(g, best) {
			best = g
		}
	}
	if best == nil {
		return PageRef{}, false
	}
	d.counters.RegionsEvicted++
	best.pool.victim = best.slot
	out := PageRef{Pool: best.pool.number, Region: best.id}
	d.sendBack(now, best)
	return out, true
}

func victimBefore(a, b *region) bool {
	if (a.leases > 0) != (b.leases > 0) {
		return a.leases == 0
	}
	if (a.requests > 0) != (b.requests > 0) {
		return a.requests == 0
	}
	if a.lastRead != b.lastRead {
		return a.lastRead < b.lastRead
	}
	return a.slot < b.slot
}

// keep makes a region KEPT: its writer is gone (or has left) and never writes it
// again.
func (d *Directory) keep(now time.Duration, g *region, wasHidden bool) {
	if g.state == regionGranted {
		g.state = regionKept
		g.lastRead = max(g.lastRead, now)
		for _, ref := range g.pages {
			if ref == 0 {
				continue
			}
			if r := d.store.replica(ref); r.state() == replicaRetiring {
				r.clearFlag(flagReclaimAsked)
				d.askClear(g, r)
			}
		}
	}
	if wasHidden && !g.unlisted() { // that one goes back: it takes no key from another
		d.resolveClaims(now, g)
	}
	// Those whose mark was cleared before wait only for leases.
	for _, ref := range slices.Clone(g.pages) {
		if d.regions[g.slot] != g || g.state != regionKept {
			return
		}
		if ref != 0 && d.store.replica(ref).state() == replicaRetiring {
			d.advance(now, g, ref)
		}
	}
	d.settleKept(now, g)
}

// resolveClaims settles two claims to a key in one domain after a hidden region
// became visible: the higher order stays, the other is retired (docs/PROTOCOL.md,
// Server restart).
func (d *Directory) resolveClaims(now time.Duration, g *region) {
	if g.private() {
		return
	}
	for _, ref := range slices.Clone(g.pages) {
		if ref != 0 && d.regions[g.slot] == g && d.store.replica(ref).state() == replicaReady {
			d.resolveClaim(now, g, ref)
		}
	}
}

// resolveClaim settles the claims to the key of a READY replica that has just become
// visible.
func (d *Directory) resolveClaim(now time.Duration, g *region, ref replicaRef) {
	best, bestRegion := ref, g
	for other := d.store.firstOf(d.store.replica(ref).object); other != 0; {
		o := d.store.replica(other)
		next := o.next
		if og := d.regions[o.region]; other != best && o.state() == replicaReady && og.pool == g.pool && og.visible(now) {
			loser, loserRegion := other, og
			if o.order > d.store.replica(best).order {
				loser, loserRegion = best, bestRegion
				best, bestRegion = other, og
			}
			d.retire(now, loserRegion, loser)
			if loser == ref {
				return
			}
		}
		other = next
	}
}
