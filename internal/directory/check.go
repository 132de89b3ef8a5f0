package directory

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// poolSums is what CheckInvariants counts of a pool from nothing.
type poolSums struct {
	ready, readyPages, retiring, quarantined, objects, leases, granted, backing, kept, requests uint64
}

// CheckInvariants checks the whole state against the numbered invariants of
// docs/PROTOCOL.md and returns what is broken, nil when nothing is. It walks every
// page, object and lease: it is for tests and the simulator.
// Concurrency: read lock.
func (d *Directory) CheckInvariants(now time.Duration) error {
	if err := d.store.check(); err != nil {
		return fmt.Errorf("R3: %w", err)
	}
	sums := map[*pool]*poolSums{}
	for _, p := range d.pools {
		sums[p] = &poolSums{}
	}
	copies, views := map[replicaRef]uint32{}, map[replicaRef]uint32{}
	if err := d.checkSessions(copies, views); err != nil {
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
		n, err := d.checkRegion(uint32(slot), g, sums[g.pool], copies, views) //nolint:gosec // bounded
		if err != nil {
			return err
		}
		replicas += n
		if g.recovered != nil && !g.recovered.accounted {
			waiting++
		}
	}
	for ref := range copies {
		return fmt.Errorf("R4: a copy lease names replica %#x, which no page has", ref)
	}
	for ref := range views {
		return fmt.Errorf("R4: a view lease names replica %#x, which no page has", ref)
	}
	if regions != d.regionCount || pages != d.pageCount || waiting != d.restart.regions {
		return fmt.Errorf("R5: %d regions of %d pages, %d waiting; counted %d, %d, %d", regions, pages, waiting, d.regionCount, d.pageCount, d.restart.regions)
	}
	if err := d.checkReplicaCount(replicas); err != nil {
		return err
	}
	for _, op := range d.flights {
		sums[d.pools[op.expand.ticket.Pool]].backing += op.expand.charged
	}
	if err := d.checkPools(sums); err != nil {
		return err
	}
	return d.checkClaims(now)
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

func (d *Directory) checkSessions(copies, views map[replicaRef]uint32) error {
	hosts := map[base.NodeID]uint64{}
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
				if rec.kind == base.LeaseView {
					views[ref]++
				} else {
					copies[ref]++
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
		for _, g := range d.regions {
			if g != nil && g.writer == nil && g.writerID == s.id {
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
			hosts[s.cpuNode] += s.cpu.grantBytes
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
		for _, op := range d.flights {
			if op.session == s {
				cxl += op.expand.charged
			}
		}
		if cxl != s.cxlUsed && s.state != StateKept {
			return fmt.Errorf("R5: session %v uses %d cxl bytes, counted %d", s.id, cxl, s.cxlUsed)
		}
	}
	for node, n := range hosts {
		if n > d.cfg.CPUBudgetBytes || n != d.hosts[node] {
			return fmt.Errorf("R5: node %v has %d cpu bytes granted, counted %d, budget %d", node, n, d.hosts[node], d.cfg.CPUBudgetBytes)
		}
	}
	if len(hosts) != len(d.hosts) {
		return fmt.Errorf("R5: %d hosts with grants, counted %d", len(hosts), len(d.hosts))
	}
	return nil
}

func (d *Directory) checkRegion(slot uint32, g *region, sum *poolSums, copies, views map[replicaRef]uint32) (uint64, error) {
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
		if r.copies != copies[ref] || r.views != views[ref] {
			return 0, fmt.Errorf("R4: page %d of region %d counts %d copy and %d view leases, sessions have %d and %d", page, g.id, r.copies, r.views, copies[ref], views[ref])
		}
		delete(copies, ref)
		delete(views, ref)
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

func (d *Directory) checkPools(sums map[*pool]*poolSums) error {
	for p, sum := range sums {
		have := poolSums{
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
func (d *Directory) checkClaims(now time.Duration) error {
	type claim struct {
		object uint32
		pool   uint32
	}
	seen := map[claim]bool{}
	for _, g := range d.regions {
		if g == nil || !g.visible(now) {
			continue
		}
		for _, ref := range g.pages {
			if ref == 0 || d.store.replica(ref).state() != replicaReady {
				continue
			}
			c := claim{d.store.replica(ref).object, g.pool.number}
			if seen[c] {
				return fmt.Errorf("R7: object %d has two visible replicas in pool %d", c.object, c.pool)
			}
			seen[c] = true
		}
	}
	return nil
}
