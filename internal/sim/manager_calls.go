package sim

import (
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// request runs a change of the core for a caller and answers what it gave.
func request[T any](a *managerActor, run func(b *core.Batch) (T, error), device func(T) error) func(answer func(T, error)) {
	return func(answer func(T, error)) {
		var out T
		j := &job{
			run:  func(b *core.Batch) (err error) { out, err = run(b); return err },
			done: func(err error) { answer(out, err) },
		}
		if device != nil {
			j.device = func() error { return device(out) }
		}
		a.do(j)
	}
}

func (a *managerActor) nowMS() int64 { return a.w.now.Milliseconds() }

func (a *managerActor) startOwner(req core.StartOwner) func(func(core.Started, error)) {
	return request(a, func(b *core.Batch) (core.Started, error) {
		out, err := a.core.StartOwner(b, a.nowMS(), req)
		if err == nil {
			a.watch(req.Process)
		}
		return out, err
	}, func(out core.Started) error {
		if out.Incarnation > a.w.newest {
			a.w.newest, a.w.newestToken = out.Incarnation, out.Token
		}
		return nil
	})
}

func (a *managerActor) allocate(req core.Allocate) func(func(core.Allocated, error)) {
	return request(a, func(b *core.Batch) (core.Allocated, error) {
		req.Claim = a.claimed(req.Claim)
		out, err := a.core.Allocate(b, a.nowMS(), req)
		if err == nil {
			at := regionAt{out.Region.Extent, out.Region.Plan}
			if old, ok := a.w.extents[out.Region.ID]; ok && (old.extent != at.extent || old.plan != at.plan) && a.w.acked[out.Region.ID].Length > 0 {
				a.w.fail("W1", "region %d was at %v and is at %v", out.Region.ID, old.extent, at.extent)
			}
			a.w.extents[out.Region.ID] = at
		}
		return out, err
	}, func(out core.Allocated) error {
		if out.Prepare {
			return a.prepare(out.Region)
		}
		return nil
	})
}

func (a *managerActor) free(who core.Claim, h core.Handle) func(func(bool, error)) {
	return request(a, func(b *core.Batch) (bool, error) {
		if a.w.planted(FreeIgnoresHolds) {
			a.dropHoldsOf(b, h)
		}
		return a.core.Free(b, a.claimed(who), h)
	}, nil)
}

// dropHoldsOf plants FreeIgnoresHolds: every hold of a region ends as if by its mapper.
func (a *managerActor) dropHoldsOf(b *core.Batch, h core.Handle) {
	holds, _ := a.core.AppendHolds(nil, base.SessionID{}, base.SessionID{}, 0, 0)
	for _, x := range holds {
		if x.Region == h.Region {
			_, _ = a.core.Unhold(b, a.nowMS(), core.Unhold{
				Session: x.Session, Sequence: x.Sequence + 1, Handles: []core.Handle{h},
				Peer: core.Peer{Process: x.Process, Node: x.Node, Boot: a.cfg.Boot},
			})
		}
	}
}

func (a *managerActor) clear(who core.Claim, id base.RegionID, pages []base.PageIndex, left bool) func(func(struct{}, error)) {
	return request(a, func(*core.Batch) (struct{}, error) {
		r, blank, err := a.core.Records(a.claimed(who), a.pool(), id, left)
		if err != nil || blank {
			return struct{}{}, err
		}
		for _, p := range pages {
			a.w.setMark(regionAt{r.Extent, r.Plan}, p, 0)
		}
		return struct{}{}, nil
	}, nil)
}

func (a *managerActor) hold(req core.Hold) func(func(core.Held, error)) {
	req.Nonce = a.w.id()
	vouched := req.Vouched
	return request(a, func(b *core.Batch) (core.Held, error) {
		if a.w.planted(HoldOutlivesProcess) {
			req.Vouched = false
		}
		known := a.core.KnowsSession(req.Session, req.Peer.Secret)
		if a.w.planted(FencedGoesOn) {
			req.Incarnation = a.w.newest
		}
		out, err := a.core.Hold(b, a.nowMS(), req)
		if err == nil {
			a.watch(req.Peer.Process)
			if !known && !vouched {
				a.unbound(req.Session)
			}
		}
		return out, err
	}, func(out core.Held) error {
		for _, r := range out.Prepare {
			if err := a.prepare(r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *managerActor) unhold(req core.Unhold) func(func(struct{}, error)) {
	return request(a, func(b *core.Batch) (struct{}, error) {
		_, err := a.core.Unhold(b, a.nowMS(), req)
		if err == nil {
			a.watch(req.Peer.Process) // it may have bound the session
		}
		return struct{}{}, err
	}, nil)
}

// claimed plants FencedGoesOn: any incarnation passes for the newest.
func (a *managerActor) claimed(who core.Claim) core.Claim {
	if a.w.planted(FencedGoesOn) && who.Incarnation != 0 {
		who.Incarnation, who.Token = a.w.newest, a.w.newestToken[:]
	}
	return who
}

// operatorDrops is maru rm drop-holds of one session.
func (a *managerActor) operatorDrops(id base.SessionID) {
	if !a.alive() || a.process.paused {
		a.w.at(nil, time.Second, func() { a.operatorDrops(id) })
		return
	}
	a.w.result.Remote++
	a.w.at(a.process, a.w.latency(), func() {
		request(a, func(b *core.Batch) (int, error) { return a.core.DropHolds(b, base.NodeID{}, id) }, nil)(func(_ int, err error) {
			if err != nil {
				a.operatorDrops(id)
			}
		})
	})
}

type ownerList struct {
	regions []core.RegionInfo
	holds   []core.HoldInfo
	pools   []core.Pool
	ended   bool // predecessors
}

// list answers all that a server asks of its regions.
func (a *managerActor) list(who core.Claim) func(func(ownerList, error)) {
	return request(a, func(*core.Batch) (out ownerList, err error) {
		out.pools = a.core.Pools()
		who = a.claimed(who)
		if who.Incarnation == 0 {
			return out, nil
		}
		if out.regions, _, err = a.core.ListRegions(core.ListRegions{Claim: who, Pool: a.pool()}); err != nil {
			return out, err
		}
		out.holds, _ = a.core.AppendHolds(nil, base.SessionID{}, base.SessionID{}, 0, 0)
		for _, o := range a.core.ListOwners() {
			if o.ID == who.Owner && o.Incarnation == who.Incarnation {
				out.ended = o.PredecessorsEnded
			}
		}
		return out, nil
	}, nil)
}

// watchOwner opens the event stream of an owner; its first event is the list of holders.
func (a *managerActor) watchOwner(to *serverActor, who core.Claim, snapshot func(*stream, []base.SessionID)) func(func(*stream, error)) {
	s := a.w.newStream(a.process, to.process)
	var holders []base.SessionID
	return request(a, func(*core.Batch) (*stream, error) {
		if err := a.core.Claim(a.claimed(who)); err != nil {
			return nil, err
		}
		a.owners = slices.DeleteFunc(a.owners, func(o *ownerStream) bool { return o.to.ended || o.to == to.process })
		a.owners = append(a.owners, &ownerStream{stream: s, server: to})
		holders = a.core.OwnerSessions(who.Owner)
		return s, nil
	}, func(*stream) error {
		s.send(func() { snapshot(s, holders) })
		return nil
	})
}

func (a *managerActor) watchSession(to *process, id base.SessionID, take func(base.RegionID)) *stream {
	s := a.w.newStream(a.process, to)
	kept := a.sessions[:0]
	for _, old := range a.sessions {
		if old.session != id && !old.to.ended {
			kept = append(kept, old)
		}
	}
	a.sessions = append(kept, &sessionStream{stream: s, session: id, take: take})
	for _, r := range a.core.SessionDraining(id) {
		s.send(func() { take(r.ID) })
	}
	return s
}

// check: E1, E2, and that nothing is given out over a live mapping.
func (a *managerActor) check(regions []core.RegionInfo) {
	w := a.w
	var sum uint64
	for i := range regions {
		r := &regions[i]
		sum += r.Extent.Length
		if r.Extent.Offset%poolfmt.Alignment != 0 || r.Extent.Offset < poolfmt.DataOffset || r.Extent.End() > deviceBytes {
			w.fail("E1", "region %d lies at %v", r.ID, r.Extent)
		}
		for j := range i {
			if o := &regions[j]; o.Extent.Overlaps(r.Extent) {
				w.fail("E1", "region %d at %v overlaps region %d at %v", r.ID, r.Extent, o.ID, o.Extent)
			}
		}
		for _, m := range w.mappings {
			if m.region != r.ID && m.at.extent.Overlaps(r.Extent) {
				w.fail("R3", "region %d at %v was given out while %s maps region %d at %v", r.ID, r.Extent, m.process.name, m.region, m.at.extent)
			}
		}
	}
	a.pools = a.core.AppendPools(a.pools[:0])
	for i := range a.pools {
		p := &a.pools[i]
		if p.AllocatedBytes != sum || p.AllocatedBytes > p.CapacityBytes || p.RegionCount != len(regions) {
			w.fail("E2", "%d regions have %d bytes, the pool says %d regions and %d of %d bytes", len(regions), sum, p.RegionCount, p.AllocatedBytes, p.CapacityBytes)
		}
	}
	for _, m := range w.mappings {
		if r := find(regions, m.region); r == nil || !slices.Contains(r.Holders, m.session) {
			w.fail("R3", "%s maps region %d and no hold of it is on record", m.process.name, m.region)
		}
	}
	a.checkVouched()
	lost := base.RegionID(0) // the first of them
	for id, extent := range w.acked {
		if r := find(regions, id); (r == nil || r.Extent != extent) && (lost == 0 || id < lost) {
			lost = id
		}
	}
	if lost != 0 {
		w.fail("W1", "region %d was acknowledged at %v and is not on the list", lost, w.acked[lost])
	}
}

// find looks up a region in a list in order of id.
func find(regions []core.RegionInfo, id base.RegionID) *core.RegionInfo {
	for i := range regions {
		if regions[i].ID == id {
			return &regions[i]
		}
	}
	return nil
}
