package server

import (
	"context"
	"fmt"
	"slices"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/peer"
)

// ownerStarted takes over what older incarnations left at the resource manager, and
// only then says which incarnation this server has: from then on it allocates.
func (s *Server) ownerStarted(ctx context.Context, client maruv1.ResourceManagerClient, owner ownership, ended bool) error {
	regions, err := s.rm.listRegions(ctx, client, owner)
	if err != nil {
		return err
	}
	holds, err := s.rm.listHolds(ctx, client)
	if err != nil {
		return err
	}
	recovered, err := recoveredRegions(regions, holds, owner.incarnation)
	if err != nil {
		return err
	}
	if len(recovered) > 0 {
		s.log.Info("regions of older incarnations are taken over: nothing of them is reused before every holder has opened here or is proved gone",
			"regions", len(recovered), "predecessors_ended", ended)
	}
	return s.step(func(d *directory.Directory, now time.Duration) error {
		if err := d.RecoverRegions(now, recovered); err != nil {
			return err
		}
		if ended {
			d.PredecessorsEnded(now)
		}
		return d.SetOwner(now, owner.incarnation)
	})
}

// recoveredRegions puts the RM's two lists together. What nobody holds is in the list too:
// deletes wait until its marks are gone.
func recoveredRegions(regions []*maruv1.RegionInfo, holds []*maruv1.HoldInfo, incarnation base.Incarnation,
) (out []directory.RecoveredRegion, _ error) {
	holders := make(map[regionAt][]directory.Holder)
	for _, h := range holds {
		session, err := base.IDFromBytes("session_id", h.GetSessionId())
		if err != nil {
			return nil, err
		}
		pool, err := base.IDFromBytes("pool_id", h.GetPoolId())
		if err != nil {
			return nil, err
		}
		at := regionAt{pool, base.RegionID(h.GetRegionId())}
		holders[at] = append(holders[at], directory.Holder{Session: session, Views: h.GetViews()})
	}
	for _, r := range regions {
		if base.Incarnation(r.GetOwnerIncarnation()) == incarnation || r.GetState() == maruv1.RegionState_REGION_STATE_DRAINING {
			continue // ours of now, or on its way back already
		}
		region, err := recoveredRegion(r)
		if err != nil {
			return nil, err
		}
		region.Holders = holders[regionAt{region.Pool, region.Region}]
		out = append(out, region)
	}
	return out, nil
}

func recoveredRegion(r *maruv1.RegionInfo) (directory.RecoveredRegion, error) {
	pool, err := base.IDFromBytes("pool_id", r.GetPoolId())
	if err != nil {
		return directory.RecoveredRegion{}, err
	}
	writer, err := base.IDFromBytes("writer_session", r.GetWriterSession())
	if err != nil {
		return directory.RecoveredRegion{}, err
	}
	if len(r.GetNamespaceDigest()) != base.NamespaceBytes {
		return directory.RecoveredRegion{}, fmt.Errorf("%w: namespace_digest of region %d has %d bytes", base.ErrInvalid,
			r.GetRegionId(), len(r.GetNamespaceDigest()))
	}
	return directory.RecoveredRegion{
		Pool: pool, Region: base.RegionID(r.GetRegionId()), Incarnation: base.Incarnation(r.GetIncarnation()), Place: placeFrom(r.GetPlace()),
		Namespace: base.NamespaceID(r.GetNamespaceDigest()), Writer: writer, Write: r.GetHandle().GetToken(),
	}, nil
}

// silent are the sessions that may turn out to hold nothing (directory.Silent); to be asked
// before their holds are.
func (s *Server) silent() (list []directory.Caller) {
	_ = s.look(func(d *directory.Directory, now time.Duration) error {
		list = d.Silent(now, nil)
		return nil
	})
	return list
}

// watched compares who holds regions at the RM with what is known here, when the
// connection is made and with each sweep. Events of the time without a connection are
// lost, and of a session that never held anything there is none; but what they would have
// said shows: a session that is not live, that this server does not watch itself, and
// that holds nothing at the RM any more, has let go of all it had mapped. One that was
// live when the holds were asked for is judged by a sweep after its expiry.
func (s *Server) watched(before []directory.Caller, holders map[base.SessionID]struct{}) {
	for _, x := range s.silent() {
		_, holds := holders[x.Session]
		if holds || !slices.Contains(before, x) || s.bound.has(x.Session) {
			continue
		}
		s.sessionGone(x.Session, directory.GoneDeregistered, "the resource manager has no hold of it any more")
	}
}

// listHolds reads the holds of this owner's regions and remembers their processes:
// after a restart they tell who may open an old session again.
func (l *rmLink) listHolds(ctx context.Context, client maruv1.ResourceManagerClient) ([]*maruv1.HoldInfo, error) {
	const perPage = 1000
	var mine []*maruv1.HoldInfo
	processes := make(map[base.SessionID]peer.Process)
	m := &maruv1.ListHoldsRequest{Limit: perPage}
	for {
		callCtx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
		answer, err := client.ListHolds(callCtx, m)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("listing holds: %w", err)
		}
		holds := answer.GetHolds()
		for _, h := range holds {
			if string(h.GetServerId()) != string(l.server.state.server[:]) {
				continue
			}
			mine = append(mine, h)
			if p, id, ok := processOf(h); ok {
				processes[id] = p
			}
		}
		if !answer.GetMore() || len(holds) == 0 {
			break
		}
		last := holds[len(holds)-1]
		m = &maruv1.ListHoldsRequest{AfterSessionId: last.GetSessionId(), AfterRegionId: last.GetRegionId(), Limit: perPage}
	}
	l.mu.Lock()
	l.mu.processes = processes
	l.mu.Unlock()
	return mine, nil
}

func processOf(h *maruv1.HoldInfo) (peer.Process, base.SessionID, bool) {
	id, err := base.IDFromBytes("session_id", h.GetSessionId())
	if err != nil || !h.GetProvable() {
		return peer.Process{}, id, false
	}
	boot, err := base.IDFromBytes("boot_id", h.GetProcess().GetBootId())
	if err != nil {
		return peer.Process{}, id, false
	}
	p := h.GetProcess()
	return peer.Process{PID: int(p.GetPid()), PIDNamespace: p.GetPidNamespace(), StartTicks: p.GetStartTicks(), BootID: boot}, id, true
}

// wasProcess reports whether this process held regions as that session before this
// server's restart.
func (l *rmLink) wasProcess(id base.SessionID, p *peer.Peer) bool {
	if l == nil || !p.Provable() {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	have, ok := l.mu.processes[id]
	return ok && have == p.Process
}

// knowsSession asks the resource manager whether a secret is that of a session which held
// there: after a restart of this server it shows the session's process where no socket
// does, on another node. Without an answer it is no.
func (l *rmLink) knowsSession(ctx context.Context, id base.SessionID, secret []byte) bool {
	if l == nil || len(secret) == 0 {
		return false
	}
	client, _, err := l.use()
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.CheckSession(ctx, &maruv1.CheckSessionRequest{SessionId: id[:], SessionSecret: secret})
	return err == nil && answer.GetFits()
}

// setPools tells the directory which shared pools there are.
func (s *Server) setPools(pools []directory.Pool) error {
	return s.step(func(d *directory.Directory, now time.Duration) error { return d.SetPools(now, pools) })
}

// rmAvailable is called when the resource manager can be used (again).
func (s *Server) rmAvailable() {
	s.log.Info("the resource manager is there; cxl pools are served", "rm", s.cfg.RMAddress)
	select {
	case s.sweepNow <- struct{}{}:
	default:
	}
}

// regionFreed: the RM has a region of ours in nobody's hands any more.
func (s *Server) regionFreed(pool base.PoolID, region base.RegionID) {
	at := regionAt{pool, region}
	s.tokens.forget(at)
	s.flights.wentFree(at)
}

// sweep frees the regions on the RM's list that nobody needs, now and each interval
// (docs/PROTOCOL.md, "Owners"): what a lost answer or a crash left there.
func (s *Server) sweep() {
	const soon = time.Second
	timer := time.NewTimer(s.cfg.SweepInterval)
	defer timer.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-timer.C:
		case <-s.sweepNow:
		}
		next := s.cfg.SweepInterval
		if done, err := s.sweepOnce(s.ctx); err == nil && !done {
			next = min(next, soon)
		}
		timer.Reset(next)
	}
}

// sweepOnce reports whether everything could be judged: an allocation in flight, or
// a relisting that is not complete, leaves some for the next time.
func (s *Server) sweepOnce(ctx context.Context) (bool, error) {
	client, owner, err := s.rm.use()
	if err != nil {
		return false, err
	}
	if err := s.rm.refresh(ctx); err != nil {
		return false, err
	}
	if err := s.askPredecessors(ctx, client, owner.incarnation); err != nil {
		return false, err
	}
	before := s.silent()
	regions, err := s.rm.listRegions(ctx, client, owner)
	if err != nil {
		return false, s.checkFenced(err)
	}
	holders := make(map[base.SessionID]struct{})
	for _, r := range regions {
		for _, b := range r.GetHolders() {
			id, err := base.IDFromBytes("holders", b)
			if err != nil {
				return false, err
			}
			holders[id] = struct{}{}
		}
	}
	s.watched(before, holders)
	var orphans []*maruv1.RegionInfo
	done := true
	err = s.look(func(d *directory.Directory, _ time.Duration) error {
		// The list is older than this look: what was in flight when it was made is either
		// still in flight, or known, or went back.
		inFlight, relisting := d.AllocationInFlight(), d.RelistIncomplete()
		for _, r := range regions {
			pool, err := base.IDFromBytes("pool_id", r.GetPoolId())
			if err != nil {
				return err
			}
			own := base.Incarnation(r.GetOwnerIncarnation()) == owner.incarnation
			switch {
			case r.GetState() == maruv1.RegionState_REGION_STATE_DRAINING, d.KnowsRegion(pool, base.RegionID(r.GetRegionId())):
			case own && inFlight, !own && relisting:
				done = false
			default:
				orphans = append(orphans, r)
			}
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	for _, r := range orphans {
		at := regionAt{base.PoolID(r.GetPoolId()), base.RegionID(r.GetRegionId())}
		draining, err := s.freeAtRM(at.pool, at.region, base.Incarnation(r.GetIncarnation()))
		s.countRM("sweep", err)
		if err != nil {
			return false, err
		}
		s.flights.answered(at, true, draining)
		s.log.Info("a region that nobody needs went back", "region", r.GetRegionId(), "incarnation", r.GetOwnerIncarnation())
	}
	return done, nil
}

// askPredecessors asks whether the processes of older incarnations are proved ended
// by now; at the start they may not have been.
func (s *Server) askPredecessors(ctx context.Context, client maruv1.ResourceManagerClient, incarnation base.Incarnation) error {
	waiting := false
	_ = s.look(func(d *directory.Directory, _ time.Duration) error {
		waiting = d.RelistIncomplete()
		return nil
	})
	if !waiting {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.ListOwners(ctx, &maruv1.ListOwnersRequest{})
	if err != nil {
		return err
	}
	for _, o := range answer.GetOwners() {
		if string(o.GetOwnerId()) == string(s.state.server[:]) && base.Incarnation(o.GetIncarnation()) == incarnation && o.GetPredecessorsEnded() {
			return s.step(func(d *directory.Directory, now time.Duration) error {
				d.PredecessorsEnded(now)
				return nil
			})
		}
	}
	return nil
}
