package sim

import (
	"errors"
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// expand grants one more region; it goes on until the outcome is known. The caller waits
// until a time.
func (s *serverActor) expand(who directory.Caller, req *directory.ExpandRequest, until time.Duration, answer func(*directory.RegionGrant, error)) {
	w := s.w
	key := flightKey{who.Session, req.Operation}
	var grant *directory.RegionGrant
	var ticket *directory.ExpandTicket
	err := s.step(func(d *directory.Directory) (err error) {
		grant, ticket, err = d.ExpandBegin(s.now(), who, req)
		return err
	})
	refuse := func(why error) {
		if w.now > until {
			why = fmt.Errorf("%w: expand: %w", base.ErrUnknown, why) // its caller has gone, and asks again
		} else {
			why = s.step(func(d *directory.Directory) error { return d.RefuseExpand(s.now(), who, req.Operation, why) })
		}
		answer(nil, why)
	}
	settle := func(g *directory.RegionGrant, err error) {
		switch {
		case err == nil:
			answer(g, nil)
			return
		case !errors.Is(err, base.ErrFull) || req.Medium == base.MediumCPU:
			refuse(err)
			return
		}
		s.makeRoom(func(again bool) {
			if !again || w.now > until {
				refuse(err)
				return
			}
			s.expand(who, req, until, answer)
		})
	}
	switch {
	case err == nil && grant != nil:
		answer(grant, nil)
	case err == nil:
		s.flights[key] = nil
		s.allocate(ticket, false, func(g directory.RegionGrant, err error) {
			list := s.flights[key]
			delete(s.flights, key)
			for _, f := range list {
				w.at(s.process, 0, f)
			}
			settle(&g, err)
		})
	case errors.Is(err, base.ErrPending):
		retry := func() { s.expand(who, req, until, answer) }
		if _, flying := s.flights[key]; flying {
			s.flights[key] = append(s.flights[key], retry)
		} else {
			answer(nil, err)
		}
	default:
		settle(nil, err)
	}
}

// allocate has the resource manager carry a ticket out, until the outcome is known.
func (s *serverActor) allocate(t *directory.ExpandTicket, sent bool, done func(directory.RegionGrant, error)) {
	w := s.w
	finish := func(answer *directory.RegionGrant, err error) {
		var grant directory.RegionGrant
		failed := s.step(func(d *directory.Directory) (err2 error) {
			grant, err2 = d.ExpandFinish(s.now(), t, answer, err)
			return err2
		})
		done(grant, failed)
	}
	retry := func() {
		w.at(s.process, w.between(50*time.Millisecond, time.Second), func() { s.allocate(t, sent, done) })
	}
	if s.link == nil {
		if !sent {
			finish(nil, fmt.Errorf("%w: expand: no resource manager", base.ErrOffline))
			return
		}
		retry()
		return
	}
	call(w, s.process, w.manager.process, fmt.Sprintf("Allocate %d", t.RMOperation), mayRepeat, w.manager.allocate(core.Allocate{
		Claim: s.claim(s.incarnation), Operation: t.RMOperation, PageCount: t.PageCount, PageBytes: t.PageBytes, PieceBytes: t.PieceBytes,
		Namespace: t.Namespace, Writer: t.Caller.Session, Pool: t.PoolID,
	}), func(out core.Allocated, err error, f fate) {
		s.checkFenced(err)
		switch {
		case err == nil:
			// The answer can be late: the server that took the place of this one may have given
			// the region back already. Ids are never used again.
			if !w.freed[out.Region.ID] {
				w.acked[out.Region.ID] = out.Region.Extent
			}
			w.result.Regions++
			finish(&directory.RegionGrant{
				PoolID: out.Region.Pool, Region: out.Region.ID, Incarnation: out.Region.Incarnation, Place: placeOf(out.Region), Write: out.Handle.Token,
			}, nil)
		case f != notSent && unknownOutcome(f, err), f == notSent && sent:
			sent = true
			retry()
		case f == notSent, errors.Is(err, base.ErrUnavailable), errors.Is(err, base.ErrAborted):
			finish(nil, fmt.Errorf("%w: expand: %w", base.ErrOffline, err))
		default:
			finish(nil, err)
		}
	})
}

// makeRoom gives one kept region back and waits until it is free.
func (s *serverActor) makeRoom(done func(again bool)) {
	w := s.w
	soon := false
	for _, id := range sortedRegions(s.draining) {
		soon = soon || w.now-s.draining[id] < drainPatience
	}
	if !soon {
		found := false
		_ = s.step(func(d *directory.Directory) error { _, found = d.GiveBackVictim(s.now(), 0); return nil })
		if !found {
			done(false)
			return
		}
		w.note("%s: a kept region goes back to make room", s.process.name)
		w.result.Kept++
	}
	told := false
	tell := func(again bool) {
		if !told {
			told = true
			done(again)
		}
	}
	s.waiting = append(s.waiting, func() { tell(true) })
	w.at(s.process, drainPatience, func() { tell(false) })
}
