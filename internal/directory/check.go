package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// poolSums is what CheckInvariants counts of a pool from nothing.
type poolSums struct {
	pool *pool
	poolCounts
}

type poolCounts struct {
	ready, readyPages, retiring, quarantined, objects, leases, granted, backing, kept, requests uint64
}

// leaseCount is how many leases name a replica.
type leaseCount struct{ copies, views uint32 }

// charge is what an Expand that is under way has charged to its session.
type charge struct {
	session *session
	bytes   uint64
}

// Checker is the room that a check counts in, for who checks often: the next check
// begins with what the one before has allocated. The zero value is ready.
// Ownership: one goroutine.
type Checker struct {
	sums           []poolSums
	objects, extra []leaseCount // by number; all zero between two checks
	named          int          // replicas that a lease names and no page was seen to have yet
	kept           []*region    // that have no writer
	charges        []charge
	hosts          map[base.NodeID]uint64
	claims         []uint64
}

// CheckInvariants checks the whole state against the numbered invariants of
// docs/PROTOCOL.md and returns what is broken, nil when nothing is. It walks every
// page, object and lease: it is for tests and the simulator.
// Concurrency: read lock.
func (d *Directory) CheckInvariants(now time.Duration) error {
	var c Checker
	return c.Check(d, now)
}

// Check is [Directory.CheckInvariants] without its garbage. Concurrency: read lock.
func (c *Checker) Check(d *Directory, now time.Duration) error {
	if err := c.check(d, now); err != nil {
		*c = Checker{} // it stopped in the middle
		return err
	}
	return nil
}

func (c *Checker) check(d *Directory, now time.Duration) error {
	if err := d.store.check(); err != nil {
		return fmt.Errorf("R3: %w", err)
	}
	c.begin(d)
	if err := c.checkSessions(d); err != nil {
		return err
	}
	var replicas, pages uint64
	regions, waiting := 0, 0
	for slot, g := range d.regions {
		if g == nil {
			continue
		}
		regions++
		pages += g.place.PageCount
		n, err := c.checkRegion(d, uint32(slot), g) //nolint:gosec // bounded
		if err != nil {
			return err
		}
		replicas += n
		if g.recovered != nil && !g.recovered.accounted {
			waiting++
		}
	}
	if c.named != 0 {
		return c.strayLease()
	}
	if regions != d.regionCount || pages != d.pageCount || waiting != d.restart.regions {
		return fmt.Errorf("R5: %d regions of %d pages, %d waiting; counted %d, %d, %d", regions, pages, waiting, d.regionCount, d.pageCount, d.restart.regions)
	}
	if err := d.checkReplicaCount(replicas); err != nil {
		return err
	}
	for _, op := range d.flights {
		sum := c.sumsOf(d.pools[op.expand.ticket.Pool])
		if sum == nil {
			return fmt.Errorf("R5: an allocation is under way in pool %d, which is not there", op.expand.ticket.Pool)
		}
		sum.backing += op.expand.charged
	}
	if err := c.checkPools(); err != nil {
		return err
	}
	return c.checkClaims(d, now)
}

// begin takes down what several sessions or regions are compared with.
func (c *Checker) begin(d *Directory) {
	if c.hosts == nil {
		c.hosts = map[base.NodeID]uint64{}
	}
	clear(c.hosts)
	c.sums, c.kept, c.charges = c.sums[:0], c.kept[:0], c.charges[:0]
	for _, p := range d.pools {
		c.sums = append(c.sums, poolSums{pool: p})
	}
	for _, g := range d.regions {
		if g != nil && g.writer == nil {
			c.kept = append(c.kept, g)
		}
	}
	for _, op := range d.flights {
		c.charges = append(c.charges, charge{op.session, op.expand.charged})
	}
	c.objects = zeroed(c.objects, d.store.objectHigh)
	c.extra = zeroed(c.extra, d.store.extraHigh)
}

// sumsOf is what is counted of a pool, nil when the directory has no such one.
func (c *Checker) sumsOf(p *pool) *poolSums {
	for i := range c.sums {
		if c.sums[i].pool == p {
			return &c.sums[i]
		}
	}
	return nil
}

// zeroed lengthens counts that are all zero.
func zeroed(counts []leaseCount, need uint32) []leaseCount {
	if uint64(len(counts)) < uint64(need) {
		return make([]leaseCount, max(2*len(counts), int(need)))
	}
	return counts
}

// leases is the count of a replica, nil when no such one was ever made.
func (c *Checker) leases(ref replicaRef) *leaseCount {
	list, n := c.objects, ref
	if ref&extraBit != 0 {
		list, n = c.extra, ref&^extraBit
	}
	if uint64(n) >= uint64(len(list)) {
		return nil
	}
	return &list[n]
}

// strayLease names a replica that leases name and no page has.
func (c *Checker) strayLease() error {
	for i, list := range [...][]leaseCount{c.objects, c.extra} {
		for n, count := range list {
			if count != (leaseCount{}) {
				ref := uint32(n) | uint32(i)*extraBit //nolint:gosec // bounded
				return fmt.Errorf("R4: %d copy and %d view leases name replica %#x, which no page has", count.copies, count.views, ref)
			}
		}
	}
	return fmt.Errorf("R4: leases name %d replicas that no page has", c.named)
}

// checkReplicaCount finds replicas that no page names.
func (d *Directory) checkReplicaCount(inPages uint64) error {
	var n uint64
	for i := uint32(firstObject); i < d.store.objectHigh; i++ {
		if d.store.objects[i].first.state() != replicaFree {
			n++
		}
	}
	for i := uint32(1); i < d.store.extraHigh; i++ {
		if d.store.extra[i].state() != replicaFree {
			n++
		}
	}
	if n != inPages {
		return fmt.Errorf("R3: %d replicas, %d of them in pages", n, inPages)
	}
	return nil
}

func (c *Checker) checkSessions(d *Directory) error {
	if len(d.sessions) != len(d.sessionList) {
		return fmt.Errorf("S1: %d sessions, %d in the list", len(d.sessions), len(d.sessionList))
	}
	for _, s := range d.sessionList {
		leases := 0
		for i, rec := range s.records {
			if i > 0 && s.records[i-1].seq >= rec.seq {
				return fmt.Errorf("S1: lease records of session %v are out of order", s.id)
			}
			if rec.kind == base.LeaseCopy && s.state != StateLive {
				return fmt.Errorf("R4: session %v is %v and has copy leases", s.id, s.state)
			}
			left := 0
			for _, ref := range rec.rows {
				if ref < firstObject {
					continue
				}
				left++
				n := c.leases(ref)
				if n == nil {
					return fmt.Errorf("R4: operation %d of session %v leases replica %#x, which was never made", rec.seq, s.id, ref)
				}
				if *n == (leaseCount{}) {
					c.named++
				}
				if rec.kind == base.LeaseView {
					n.views++
				} else {
					n.copies++
				}
			}
			if left != rec.left || left == 0 {
				return fmt.Errorf("R4: operation %d of session %v has %d leases, counted %d", rec.seq, s.id, left, rec.left)
			}
			leases += left
		}
		switch {
		case leases != s.leases:
			return fmt.Errorf("R4: session %v has %d leases, counted %d", s.id, leases, s.leases)
		case leases > d.cfg.Limits.MaxLeases:
			return fmt.Errorf("R4: session %v has %d leases", s.id, leases)
		case s.state == StateKept && (leases != 0 || s.cpu != nil || len(s.regions) != 0):
			return fmt.Errorf("R4: session %v is gone and holds something", s.id)
		case len(s.ops) > d.cfg.Limits.MaxOperations || len(s.window) > d.cfg.Limits.MaxEvents:
			return fmt.Errorf("S1: session %v has %d operations, %d events", s.id, len(s.ops), len(s.window))
		}
		kept := 0
		for _, g := range c.kept {
			if g.writerID == s.id {
				kept++
			}
		}
		if kept != s.keptRegions || (s.state == StateKept && kept == 0) {
			return fmt.Errorf("R5: session %v is %v and left %d regions, counted %d", s.id, s.state, kept, s.keptRegions)
		}
		rows := 0
		for i, op := range s.ops {
			if (i > 0 && s.ops[i-1].seq >= op.seq) || op.seq < s.watermark {
				return fmt.Errorf("S1: ledger of session %v at operation %d", s.id, op.seq)
			}
			rows += op.rows
		}
		if rows != s.opRows {
			return fmt.Errorf("S1: session %v has %d operation rows, counted %d", s.id, rows, s.opRows)
		}
		if s.cpu != nil {
			c.hosts[s.cpuNode] += s.cpu.grantBytes
		}
		var cxl uint64
		for _, slot := range s.regions {
			g := d.regions[slot]
			if g == nil || g.writer != s || g.writerID != s.id {
				return fmt.Errorf("R5: session %v lists region slot %d", s.id, slot)
			}
			if !g.private() {
				cxl += g.place.ExtentBytes
			}
		}
		for _, x := range c.charges {
			if x.session == s {
				cxl += x.bytes
			}
		}
		if cxl != s.cxlUsed && s.state != StateKept {
			return fmt.Errorf("R5: session %v uses %d cxl bytes, counted %d", s.id, cxl, s.cxlUsed)
		}
	}
	for node, n := range c.hosts {
		if n > d.cfg.CPUBudgetBytes || n != d.hosts[node] {
			return fmt.Errorf("R5: node %v has %d cpu bytes granted, counted %d, budget %d", node, n, d.hosts[node], d.cfg.CPUBudgetBytes)
		}
	}
	if len(c.hosts) != len(d.hosts) {
		return fmt.Errorf("R5: %d hosts with grants, counted %d", len(c.hosts), len(d.hosts))
	}
	return nil
}

func (c *Checker) checkRegion(d *Directory, slot uint32, g *region) (uint64, error) {
	sum := c.sumsOf(g.pool)
	if sum == nil || g.slot != slot || g.pool.regions[g.id] != slot {
		return 0, fmt.Errorf("R5: region slot %d is not its pool's", slot)
	}
	sum.granted += g.capacityBytes()
	sum.backing += g.backingBytes()
	if g.writer == nil {
		sum.kept += g.capacityBytes()
	}
	ready, used, held, leases, viewSum, requests := 0, 0, 0, 0, 0, 0
	for page, ref := range g.pages {
		if ref == 0 {
			continue
		}
		used++
		r := d.store.replica(ref)
		if r.region != slot || uint64(r.page) != uint64(page) || (r.generation != g.last[page] && (!r.has(flagOrphan) || r.has(flagRestartHeld))) {
			return 0, fmt.Errorf("S1: page %d of region %d: replica %#x of slot %d page %d generation %v, last %v", page, g.id, ref, r.region, r.page, r.generation, g.last[page])
		}
		n := c.leases(ref)
		if n == nil {
			return 0, fmt.Errorf("S1: page %d of region %d has replica %#x, which was never made", page, g.id, ref)
		}
		if r.copies != n.copies || r.views != n.views {
			return 0, fmt.Errorf("R4: page %d of region %d counts %d copy and %d view leases, sessions have %d and %d", page, g.id, r.copies, r.views, n.copies, n.views)
		}
		if *n != (leaseCount{}) {
			*n = leaseCount{}
			c.named--
		}
		leases += int(r.copies) + int(r.views)
		viewSum += int(r.views)
		requests += int(r.requests)
		sum.requests += uint64(r.requests) * g.place.PageBytes
		if r.has(flagRestartHeld) {
			held++
		}
		switch r.state() {
		case replicaReady:
			ready++
			sum.ready += r.length()
			sum.readyPages += g.place.PageBytes
			sum.objects++
			if g.state >= regionGoing || r.has(flagOrphan) || g.unlisted() {
				return 0, fmt.Errorf("R6: page %d of region %d is READY", page, g.id)
			}
		case replicaRetiring:
			sum.retiring += g.place.PageBytes
			if r.has(flagReclaimAsked) && g.state == regionGranted && (r.leases() != 0 || !r.has(flagMarkCleared)) {
				return 0, fmt.Errorf("R3: page %d of region %d is being reclaimed with %d leases", page, g.id, r.leases())
			}
			// L1: nothing that has all it waits for may stand still.
			if g.state == regionGranted && r.leases() == 0 && r.has(flagMarkCleared) && !r.has(flagReclaimAsked) && (!r.has(flagRestartHeld) || g.recovered.done) {
				return 0, fmt.Errorf("L1: page %d of region %d waits for nothing", page, g.id)
			}
		case replicaQuarantined:
			sum.quarantined += g.place.PageBytes
		default:
			return 0, fmt.Errorf("R3: page %d of region %d has a free replica", page, g.id)
		}
	}
	sum.leases += uint64(leases) //nolint:gosec // positive
	if ready != g.ready || used != g.used || held != g.held || leases != g.leases || viewSum != g.views || requests != g.requests {
		return 0, fmt.Errorf("R5: region %d has %d ready, %d used, %d held, %d leases, %d views, %d requests; counted %d, %d, %d, %d, %d, %d", g.id,
			ready, used, held, leases, viewSum, requests, g.ready, g.used, g.held, g.leases, g.views, g.requests)
	}
	if g.state == regionGoing && g.leases == 0 && (g.recovered == nil || g.recovered.done) && (g.writer == nil || g.writer.state != StateLeft) {
		return 0, fmt.Errorf("L1: region %d is going and waits for nothing", g.id)
	}
	if g.state == regionReturned && (g.leases == 0 || g.recovered == nil || !g.recovered.accounted) {
		return 0, fmt.Errorf("L1: region %d is returned and waits for nothing", g.id)
	}
	if g.state == regionKept && g.writer == nil && g.ready == 0 {
		return 0, fmt.Errorf("L1: kept region %d has no keys", g.id)
	}
	return uint64(used), nil //nolint:gosec // positive
}

func (c *Checker) checkPools() error {
	for i := range c.sums {
		p, sum := c.sums[i].pool, &c.sums[i].poolCounts
		have := poolCounts{
			ready: p.readyBytes, readyPages: p.readyPages, retiring: p.retiringPages, quarantined: p.quarantinedPages,
			objects: p.objects, leases: p.leases, granted: p.granted, backing: p.reserved, kept: p.keptBytes, requests: p.requestBytes,
		}
		if have != *sum {
			return fmt.Errorf("R5: pool %d counts %+v, has %+v", p.number, have, *sum)
		}
		if sum.readyPages+sum.retiring+sum.quarantined > sum.granted {
			return fmt.Errorf("R5: pool %d has more allocated than granted", p.number)
		}
		if p.owner != nil && sum.granted > p.grantBytes {
			return fmt.Errorf("R5: private pool %d has %d bytes in regions, granted %d", p.number, sum.granted, p.grantBytes)
		}
	}
	return nil
}

// checkClaims: of the visible replicas of a key there is one a domain (DM-07).
func (c *Checker) checkClaims(d *Directory, now time.Duration) error {
	c.claims = c.claims[:0]
	for _, g := range d.regions {
		if g == nil || !g.visible(now) {
			continue
		}
		for _, ref := range g.pages {
			if ref == 0 {
				continue
			}
			if r := d.store.replica(ref); r.state() == replicaReady {
				c.claims = append(c.claims, uint64(r.object)<<32|uint64(g.pool.number))
			}
		}
	}
	slices.Sort(c.claims)
	for i := 1; i < len(c.claims); i++ {
		if x := c.claims[i]; x == c.claims[i-1] {
			return fmt.Errorf("R7: object %d has two visible replicas in pool %d", x>>32, uint32(x)) //nolint:gosec // low half
		}
	}
	return nil
}
