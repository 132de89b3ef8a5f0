package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Waits of an Expand. A victim whose mappers do not let go for drainPatience no
// longer keeps the next one from going.
const (
	expandTimeout  = 30 * time.Second
	drainPatience  = 5 * time.Second
	allocateRetry  = 50 * time.Millisecond
	allocateMaxGap = time.Second
)

// flightKey names an Expand that is at the resource manager.
type flightKey struct {
	session   base.SessionID
	operation base.Sequence
}

// flights are the allocations at the resource manager. Each has one goroutine that
// goes on until the outcome is known, whoever waits for it: an allocation that
// nobody remembers would be lost room.
type flights struct {
	mu struct {
		sync.Mutex
		byKey map[flightKey]*flight
		// draining are the victims that the RM has not freed yet: their mappers unmap.
		draining map[regionAt]time.Time
		freed    chan struct{} // closed and replaced when a region is free at the RM
		count    uint64        // of regions that went free
	}
}

type flight struct{ done chan struct{} }

type regionAt struct {
	pool   base.PoolID
	region base.RegionID
}

func (f *flights) init() {
	f.mu.byKey = make(map[flightKey]*flight)
	f.mu.draining = make(map[regionAt]time.Time)
	f.mu.freed = make(chan struct{})
}

func (f *flights) get(k flightKey) *flight {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.byKey[k]
}

// drains records that the RM has a region of ours on its way back.
func (f *flights) drains(r regionAt) {
	f.mu.Lock()
	f.mu.draining[r] = time.Now()
	f.mu.Unlock()
}

// wentFree wakes who waits for room.
func (f *flights) wentFree(r regionAt) { f.answered(r, true, false) }

// answered wakes who waits for room when the RM has taken a region back; draining, it
// is not free there yet.
func (f *flights) answered(r regionAt, taken, draining bool) {
	if !taken {
		return
	}
	f.mu.Lock()
	if !draining {
		delete(f.mu.draining, r)
	}
	f.mu.count++
	close(f.mu.freed)
	f.mu.freed = make(chan struct{})
	f.mu.Unlock()
}

// freedCount is how many regions went free so far.
func (f *flights) freedCount() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.count
}

// coming returns a channel for the next region that goes free behind the first
// `seen`, and whether one may come soon without another victim.
func (f *flights) coming(seen uint64) (<-chan struct{}, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.count != seen {
		now := make(chan struct{})
		close(now)
		return now, true
	}
	soon := false
	for r, since := range f.mu.draining {
		switch age := time.Since(since); {
		case age < drainPatience:
			soon = true
		case age > time.Hour:
			delete(f.mu.draining, r) // its event was lost with a connection
		}
	}
	return f.mu.freed, soon
}

// Expand grants one more region.
func (c *control) Expand(ctx context.Context, m *maruv1.ExpandRequest) (*maruv1.ExpandResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	ctx, cancel := context.WithTimeout(ctx, expandTimeout)
	defer cancel()
	req := &directory.ExpandRequest{
		Operation: base.Sequence(m.GetOperation()), Medium: base.Medium(min(max(m.GetMedium(), 0), 255)), //nolint:gosec // bounded
		Bytes: m.GetBytes(), PageBytes: m.GetPageSize(), PieceBytes: m.GetPieceSize(),
	}
	grant, err := s.expand(ctx, sess, req)
	outcome := "ok"
	if err != nil {
		outcome = base.CodeOf(err).String()
	}
	s.metrics.expands.WithLabelValues(req.Medium.String(), outcome).Inc()
	if err != nil {
		return nil, err
	}
	return &maruv1.ExpandResponse{
		PoolNumber: grant.Pool, Handle: handleOf(grant.PoolID, grant.Region, grant.Incarnation, grant.Write), Place: placeOf(&grant.Place),
	}, nil
}

func handleOf(pool base.PoolID, region base.RegionID, incarnation base.Incarnation, token []byte) *maruv1.RegionHandle {
	h := &maruv1.RegionHandle{RegionId: uint32(region), Incarnation: uint32(incarnation), Token: token}
	if pool != (base.PoolID{}) {
		h.PoolId = pool[:]
	}
	return h
}

func placeOf(p *directory.Place) *maruv1.RegionPlace {
	return &maruv1.RegionPlace{
		Offset: p.Offset, ExtentLength: p.ExtentBytes, Length: p.PageBytes * p.PageCount, PageSize: p.PageBytes,
		PageCount: p.PageCount, PieceSize: p.PieceBytes, TableOffset: p.TableOffset,
	}
}

func (s *Server) expand(ctx context.Context, sess *session, req *directory.ExpandRequest) (*directory.RegionGrant, error) {
	key := flightKey{sess.id, req.Operation}
	for {
		// A region that goes free between the RM's "full" and the search for a victim is
		// room enough: without this count a second victim would go for nothing.
		seen := s.flights.freedCount()
		var grant *directory.RegionGrant
		var ticket *directory.ExpandTicket
		err := s.step(func(d *directory.Directory, now time.Duration) error {
			var err error
			grant, ticket, err = d.ExpandBegin(now, sess.caller(), req)
			return err
		})
		switch {
		case err == nil && grant != nil:
			return grant, nil
		case err == nil:
			grant, err = s.fly(ctx, key, ticket)
		case errors.Is(err, base.ErrPending):
			// The same operation was asked again while the first is at the RM.
			if err = s.join(ctx, key); err == nil {
				continue
			}
		}
		switch {
		case err == nil:
			return grant, nil
		case !errors.Is(err, base.ErrFull) || req.Medium == base.MediumCPU:
			return nil, s.refuseExpand(ctx, sess, req, err)
		}
		if permanent := s.neverFits(req); permanent != nil {
			return nil, s.refuseExpand(ctx, sess, req, permanent)
		}
		if again := s.makeRoom(ctx, seen); !again || ctx.Err() != nil {
			return nil, s.refuseExpand(ctx, sess, req, err)
		}
	}
}

// refuseExpand returns what to answer when an Expand was not carried out. Nobody hears a
// refusal whose caller has gone: it asks again.
func (s *Server) refuseExpand(ctx context.Context, sess *session, req *directory.ExpandRequest, why error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: expand: %w; ask again with the same operation", base.ErrUnknown, why)
	}
	if err := s.step(func(d *directory.Directory, now time.Duration) error {
		return d.RefuseExpand(now, sess.caller(), req.Operation, why)
	}); !errors.Is(err, base.ErrClosed) {
		return err
	}
	return why
}

// neverFits says why no pool can ever hold a region: its tables count, which the
// usable bytes do not show (RPC-21).
func (s *Server) neverFits(req *directory.ExpandRequest) error {
	plan, err := poolfmt.PlanRegion(req.PageBytes, (req.Bytes-1)/req.PageBytes+1, req.PieceBytes)
	if err != nil {
		return fmt.Errorf("expand: %w", err)
	}
	largest := s.rm.largestPool(req.Medium)
	if largest == 0 || plan.ExtentBytes <= largest {
		return nil
	}
	return fmt.Errorf("%w: expand: %d usable bytes take %d with their tables, the largest %v pool has %d; ask for less, or add a larger pool",
		base.ErrPermanent, plan.DataBytes, plan.ExtentBytes, req.Medium, largest)
}

// join waits for a flight that somebody else started.
func (s *Server) join(ctx context.Context, key flightKey) error {
	f := s.flights.get(key)
	if f == nil {
		return nil
	}
	select {
	case <-f.done:
		return nil
	case <-ctx.Done():
		return unknownExpand(ctx)
	case <-s.ctx.Done():
		return fmt.Errorf("%w: expand: the server stops", base.ErrClosed)
	}
}

func unknownExpand(ctx context.Context) error {
	return fmt.Errorf("%w: expand: the resource manager has not answered yet (%w); ask again with the same operation", base.ErrUnknown, ctx.Err())
}

// fly starts the goroutine of a ticket and waits for it as long as the caller does.
func (s *Server) fly(ctx context.Context, key flightKey, ticket *directory.ExpandTicket) (*directory.RegionGrant, error) {
	f := &flight{done: make(chan struct{})}
	s.flights.mu.Lock()
	s.flights.mu.byKey[key] = f
	s.flights.mu.Unlock()
	var grant directory.RegionGrant
	var failure error
	s.start(func() {
		defer close(f.done)
		defer func() {
			s.flights.mu.Lock()
			delete(s.flights.mu.byKey, key)
			s.flights.mu.Unlock()
		}()
		grant, failure = s.allocate(ticket)
	})
	select {
	case <-f.done:
		if failure != nil {
			return nil, failure
		}
		return &grant, nil
	case <-ctx.Done():
		return nil, unknownExpand(ctx)
	}
}

// allocate has the RM carry a ticket out, with the same operation until the outcome
// is known, and records it (W1).
func (s *Server) allocate(ticket *directory.ExpandTicket) (directory.RegionGrant, error) {
	gap, sent := allocateRetry, false
	for {
		answer, tried, err := s.allocateOnce(ticket)
		sent = sent || tried
		unknown := rpc.OutcomeUnknown(err)
		switch {
		case err != nil && !sent:
			// It was never sent: nothing can have been allocated. The code must say so, since
			// the directory keeps an allocation whose outcome may be open.
			err = fmt.Errorf("%w: expand: %w", base.ErrOffline, err)
		case err != nil && (unknown || !tried):
			if s.sleep(gap) {
				gap = min(2*gap, allocateMaxGap)
				continue
			}
			err = fmt.Errorf("%w: expand: the server stops: %w", base.ErrUnknown, err)
		case errors.Is(err, base.ErrUnavailable) || errors.Is(err, base.ErrAborted):
			err = fmt.Errorf("%w: expand: %w", base.ErrOffline, err) // the RM's own answer: it did nothing
		}
		var grant directory.RegionGrant
		finish := s.step(func(d *directory.Directory, now time.Duration) error {
			var err2 error
			grant, err2 = d.ExpandFinish(now, ticket, answer, err)
			return err2
		})
		if finish == nil {
			s.newest.raise(grant.Region) // readers may ask for it from now on
		}
		return grant, finish
	}
}

// allocateOnce reports whether the request may have reached the RM.
func (s *Server) allocateOnce(t *directory.ExpandTicket) (_ *directory.RegionGrant, tried bool, _ error) {
	client, owner, err := s.rm.use()
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.Allocate(ctx, &maruv1.AllocateRequest{
		OwnerId: s.state.server[:], Incarnation: uint32(owner.incarnation), OwnerToken: owner.token, Operation: t.RMOperation,
		PageCount: t.PageCount, PageSize: t.PageBytes, PieceSize: t.PieceBytes,
		NamespaceDigest: t.Namespace[:], WriterSession: t.Caller.Session[:], PoolId: t.PoolID[:],
	})
	if err != nil {
		return nil, true, s.checkFenced(err)
	}
	grant, err := grantOf(answer)
	if err == nil {
		s.tokens.keep(answer.GetReadHandle())
	}
	return grant, true, err
}

func grantOf(m *maruv1.AllocateResponse) (*directory.RegionGrant, error) {
	pool, err := base.IDFromBytes("pool_id", m.GetHandle().GetPoolId())
	if err != nil {
		return nil, err
	}
	return &directory.RegionGrant{
		PoolID: pool, Region: base.RegionID(m.GetHandle().GetRegionId()), Incarnation: base.Incarnation(m.GetHandle().GetIncarnation()),
		Place: placeFrom(m.GetPlace()), Write: m.GetHandle().GetToken(),
	}, nil
}

func placeFrom(p *maruv1.RegionPlace) directory.Place {
	return directory.Place{
		Offset: p.GetOffset(), ExtentBytes: p.GetExtentLength(), PageBytes: p.GetPageSize(), PageCount: p.GetPageCount(),
		PieceBytes: p.GetPieceSize(), TableOffset: p.GetTableOffset(),
	}
}

// makeRoom gives one kept region back, the one read longest ago, and waits until it
// is free (MS-10), unless one went free since the first `seen`. It reports whether
// asking again makes sense.
func (s *Server) makeRoom(ctx context.Context, seen uint64) bool {
	freed, soon := s.flights.coming(seen)
	if !soon {
		var victim directory.PageRef
		found := false
		_ = s.step(func(d *directory.Directory, now time.Duration) error {
			victim, found = d.GiveBackVictim(now, 0)
			return nil
		})
		if !found {
			return false
		}
		s.log.Info("no room: the kept region read longest ago goes back", "pool", victim.Pool, "region", uint32(victim.Region))
	}
	timer := time.NewTimer(drainPatience)
	defer timer.Stop()
	select {
	case <-freed:
		return true
	case <-ctx.Done():
	case <-s.ctx.Done():
	case <-timer.C:
	}
	return false
}
