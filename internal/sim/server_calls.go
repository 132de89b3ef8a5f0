package sim

import (
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// commit publishes, and checks what is published (R1).
func (s *serverActor) commit(who directory.Caller, req *hot.CommitRequest) ([]byte, error) {
	var out []byte
	err := s.step(func(d *directory.Directory) (err error) {
		out, err = d.Commit(s.now(), who, req, nil)
		return err
	})
	if err == nil {
		s.w.committed(s, who.Session, req.Rows, hot.CommitResults(out))
	}
	return out, err
}

// acquire leases, and checks what is found (R7).
func (s *serverActor) acquire(who directory.Caller, req *hot.AcquireRequest) (out []byte, err error) {
	err = s.step(func(d *directory.Directory) (err error) {
		out, _, err = d.Acquire(s.now(), who, req, nil)
		return err
	})
	key := flightKey{who.Session, req.Sequence}
	if err != nil || s.acquired[key] {
		return out, err // the same operation again: what it leased may be retired since
	}
	s.acquired[key] = true
	rows := hot.AcquireRows(out)
	for i := range rows.Len() {
		if row := rows.At(i); row.Verdict.Status() == hot.Hit {
			s.w.found(s, req.Keys.At(i), row.Checksum)
		}
	}
	return out, err
}

// remove deletes a key and waits for its marks for a while.
func (s *serverActor) remove(who directory.Caller, seq base.Sequence, key base.Key, answer func(base.Code, error)) {
	w := s.w
	var id directory.DeleteID
	op := flightKey{who.Session, seq}
	meant, again := s.meant[op] // by the first of two deliveries
	if !again {
		meant = w.meantBy(s, key)
		s.meant[op] = meant
	}
	err := s.step(func(d *directory.Directory) (err error) {
		id, err = d.Delete(s.now(), who, seq, []base.Key{key})
		return err
	})
	if err != nil {
		answer(base.CodeOf(err), err)
		return
	}
	told := false
	tell := func() {
		if told {
			return
		}
		told = true
		codes, _, done := s.dir.DeleteStatus(id, nil)
		if len(codes) != 1 {
			answer(base.CodeUnknown, nil)
			return
		}
		if s.w.planted(AckDeleteAtOnce) && codes[0] == base.CodeUnknown {
			codes[0], done = base.CodeOK, true
		}
		if done && (codes[0] == base.CodeOK || codes[0] == base.CodeNotFound) {
			w.deleted(meant)
		}
		answer(codes[0], nil)
	}
	if _, _, done := s.dir.DeleteStatus(id, nil); done || w.planted(AckDeleteAtOnce) {
		tell()
		return
	}
	s.deletes[id] = append(s.deletes[id], tell)
	w.at(s.process, deleteWait, tell)
}

// describe gives places and read capabilities.
func (s *serverActor) describe(who directory.Caller, ids []base.RegionID) ([]described, error) {
	infos, err := s.dir.DescribeRegions(s.now(), who, ids, false, nil)
	if err != nil {
		return nil, err
	}
	var out []described
	for _, info := range infos {
		d := described{pool: info.Pool, region: info.Region, err: info.Err}
		if d.err == nil {
			// The resource manager derives read capabilities from write ones, without a change.
			h := s.handle(info.Region, info.Incarnation)
			h.Token = info.Write
			if s.link == nil || !s.w.manager.alive() {
				d.err = errNotSent
			} else if d.handle, d.err = s.w.manager.core.MintRead(h); d.err == nil {
				d.plan, d.err = poolfmt.PlanRegion(info.Place.PageBytes, info.Place.PageCount, info.Place.PieceBytes)
			}
		}
		out = append(out, d)
	}
	return out, nil
}

type described struct {
	pool   uint32
	region base.RegionID
	handle core.Handle
	plan   poolfmt.Plan
	err    error
}

func (s *serverActor) check() {
	s.dirty = false
	if !s.alive() {
		return
	}
	if err := s.checker.Check(s.dir, s.now()); err != nil {
		id := err.Error()
		if len(id) > 2 {
			id = id[:2]
		}
		s.w.fail(id, "%v", err)
	}
}
