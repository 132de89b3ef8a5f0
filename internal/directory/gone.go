package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Close ends a session. Drained: every mapping is gone and every lease released; it
// is the mapper's own proof that it is gone, and its memory comes back. Left: exports
// are out; its replicas stay visible, views stay, and nothing is reused until the end
// of the process is proved.
// Errors: base.ErrPinned when a drained close finds views out, base.ErrBusy when it
// finds copy leases out (SES-05), both with nothing changed; base.ErrInvalid;
// base.ErrStale.
func (d *Directory) Close(now time.Duration, who Caller, kind CloseKind) error {
	s, err := d.begin(now, who)
	if err != nil {
		return err
	}
	switch kind {
	case CloseDrained:
		views := 0
		for _, rec := range s.records {
			if rec.kind == base.LeaseView {
				views += rec.left
			}
		}
		if views > 0 {
			return fmt.Errorf("%w: close: %d views are out; release them, or close with exports out", base.ErrPinned, views)
		}
		if s.leases > 0 {
			return fmt.Errorf("%w: close: %d copy leases are out; release them first", base.ErrBusy, s.leases)
		}
		d.gone(now, s, "the session was closed")
		return nil
	case CloseLeft:
		if s.relist == relistWaiting {
			return fmt.Errorf("%w: close: list what the session holds first", base.ErrBusy)
		}
		d.leave(now, s)
		return nil
	}
	return fmt.Errorf("%w: close: kind %d", base.ErrInvalid, kind)
}

// leave makes a session LEFT.
func (d *Directory) leave(now time.Duration, s *session) {
	s.state = StateLeft
	d.closeConnections(s, "the session was closed")
	d.endLeases(now, s, leasesCopy)
	d.endRequests(s)
	d.dropOperations(s)
	s.window, s.backlog, s.backlogHead = nil, nil, 0
	for _, slot := range slices.Clone(s.regions) {
		if g := d.regions[slot]; g != nil && !g.private() {
			d.keep(now, g, false)
		}
	}
}

// SessionGone says that a session's process is proved gone: leases and views end,
// private memory is free, regions with keys become KEPT and those without go back
// (R3, L1). It reports whether the session was known and not gone already.
func (d *Directory) SessionGone(now time.Duration, id base.SessionID, proof GoneProof) bool {
	d.expireDue(now)
	s := d.sessions[id]
	if s == nil || s.state == StateKept {
		return false
	}
	d.gone(now, s, "its process is proved gone: "+proof.String())
	return true
}

// Silent appends the sessions that do not live here: of them only their holds at the
// resource manager say that something is mapped. One that holds nothing there has let go
// of all it had, if it was silent in the same epoch before the holds were asked for: else
// it may have leased something here and taken its first hold since. Private memory is no
// matter of the resource manager, so that sessions with some are not among them.
// Concurrency: read lock.
func (d *Directory) Silent(now time.Duration, dst []Caller) []Caller {
	for _, s := range d.sessionList {
		silent := false
		switch s.state {
		case StateLive:
			silent = s.deadline <= now
		case StateSuspect, StateLeft, StateAwaited:
			silent = true
		case StateKept:
		}
		if silent && s.cpu == nil {
			dst = append(dst, Caller{Session: s.id, Epoch: s.epoch})
		}
	}
	return dst
}

func (d *Directory) gone(now time.Duration, s *session, reason string) {
	wasHidden := s.state == StateSuspect
	if s.state == StateLive {
		d.closeConnections(s, reason)
	}
	d.counters.SessionsGone++
	s.state, s.deadline = StateKept, 0
	d.endLeases(now, s, leasesAll)
	d.endRequests(s)
	d.dropOperations(s)
	s.window, s.backlog, s.backlogHead = nil, nil, 0
	s.proved, s.unreachable = 0, nil
	regions := s.regions
	s.regions = nil
	s.keptRegions = len(regions)
	for _, slot := range regions {
		g := d.regions[slot]
		if g == nil {
			continue
		}
		if g.private() {
			g.pool.keptBytes += g.capacityBytes() // dropRegion takes it out again
			g.writer = nil
			d.dropRegion(g)
			continue
		}
		g.writer = nil
		g.pool.keptBytes += g.capacityBytes()
		s.cxlUsed -= min(s.cxlUsed, g.place.ExtentBytes)
	}
	for _, slot := range regions {
		switch g := d.regions[slot]; {
		case g == nil || g.writerID != s.id || g.private():
		case g.state == regionGoing:
			d.settleGoing(now, g)
		case g.state < regionGoing:
			d.keep(now, g, wasHidden)
		}
	}
	if p := s.cpu; p != nil {
		delete(d.pools, p.number)
		d.hosts[s.cpuNode] -= p.grantBytes
		if d.hosts[s.cpuNode] == 0 {
			delete(d.hosts, s.cpuNode)
		}
		s.cpu = nil
		d.effect(Effect{Kind: EffectCapacityReturned, Session: s.id, Node: s.cpuNode, Bytes: p.grantBytes})
	}
	d.forgetKept(s.id)
	d.checkRestart(now)
}
