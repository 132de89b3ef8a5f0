package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/session"
)

// kick wakes the background worker.
func (c *clientActor) kick() {
	c.kicked = true
	if c.working || c.closed {
		return
	}
	c.working = true
	c.w.at(c.process, 0, c.work)
}

// work does what needs no caller, one thing after the other.
func (c *clientActor) work() {
	c.kicked = false
	rest := func() {
		c.working = false
		if c.kicked && !c.closed {
			c.working = true
			c.w.at(c.process, time.Millisecond, c.work)
		}
	}
	c.dropGone(func() {
		l := c.current()
		if l == nil || c.closed {
			rest()
			return
		}
		c.flushReleases(l, func() {
			c.acknowledge(l, func() {
				c.resolveLost(l, func() {
					c.finishGrowth(l, func() {
						c.flushReturns(l, func() { c.prepare(l, rest) })
					})
				})
			})
		})
	})
}

// flushReleases tells the server of leases that have ended.
func (c *clientActor) flushReleases(l *link, next func()) {
	w := c.w
	rows := slices.DeleteFunc(c.core.TakeReleases(nil, hot.MaxKeys), func(r session.Release) bool { return slices.Contains(c.early, r) })
	server := c.core.ServerEpoch()
	if len(rows) == 0 {
		next()
		return
	}
	if l.over { // its connections are closed
		c.core.Released(rows, server, false)
		next()
		return
	}
	req := &hot.ReleaseRequest{}
	for _, r := range rows {
		req.Rows = hot.AppendReleaseRow(req.Rows, hot.ReleaseRow{Acquire: r.Acquire, First: r.First, Count: r.Count})
	}
	req.Watermark = c.core.Watermark()
	call(w, c.process, l.process, "Release", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error {
			_, err := d.Release(l.srv.now(), l.who, req, nil)
			return err
		}))
	}, func(_ struct{}, err error, _ fate) {
		w.note("%s releases %v: %v", c.process.name, rows, err)
		c.core.Released(rows, server, err == nil)
		if err != nil {
			c.failed(l, err)
			next()
			return
		}
		c.flushReleases(l, next)
	})
}

// releaseEarly is a client that does not wait for its list: the release overtakes it.
func (c *clientActor) releaseEarly(l *link, v *view) {
	w := c.w
	c.early = append(c.early, session.Release{Acquire: v.acquire, First: v.index, Count: 1})
	req := &hot.ReleaseRequest{Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: v.acquire, First: v.index, Count: 1})}
	req.Watermark = c.core.Watermark()
	call(w, c.process, l.process, "Release", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error {
			_, err := d.Release(l.srv.now(), l.who, req, nil)
			return err
		}))
	}, func(struct{}, error, fate) {})
}

// acknowledge tells which marks are cleared and which pages were reclaimed.
func (c *clientActor) acknowledge(l *link, next func()) {
	w := c.w
	cleared, reclaimed := c.core.TakeAcks(nil, nil)
	server := c.core.ServerEpoch()
	if len(cleared)+len(reclaimed) == 0 {
		next()
		return
	}
	if l.over {
		c.core.ReturnAcks(cleared, reclaimed, server)
		next()
		return
	}
	refs := func(acks []session.Ack) (out []directory.PageRef) {
		for _, a := range acks {
			out = append(out, directory.PageRef{Pool: a.PoolNumber, Region: a.Region, Offset: a.Offset, Generation: a.Generation})
		}
		return out
	}
	call(w, c.process, l.process, "Acknowledge", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error {
			return d.Acknowledge(l.srv.now(), l.who, refs(cleared), refs(reclaimed))
		}))
	}, func(_ struct{}, err error, _ fate) {
		if err == nil {
			w.note("%s has acknowledged %d marks and %d pages", c.process.name, len(cleared), len(reclaimed))
			c.core.AcksTaken(reclaimed, server)
			c.kick()
		} else {
			c.core.ReturnAcks(cleared, reclaimed, server)
			c.failed(l, err)
		}
		next()
	})
}

type resolved struct {
	outcome hot.Outcome
	results []byte
}

// resolveLost closes Commits whose answers were lost (X1).
func (c *clientActor) resolveLost(l *link, next func()) {
	w := c.w
	lost := c.core.LostCommits(nil)
	if len(lost) == 0 || l.over {
		next()
		return
	}
	op := slices.MinFunc(lost, func(a, b session.Lost) int { return cmp.Compare(a.Sequence, b.Sequence) })
	req := &hot.ResolveRequest{Target: op.Sequence, TargetEpoch: op.Epoch, TargetServerEpoch: op.ServerEpoch}
	req.Watermark = c.core.Watermark()
	call(w, c.process, l.process, "Resolve", mayRepeat, func(answer func(resolved, error)) {
		var out resolved
		err := l.srv.step(func(d *directory.Directory) (err error) {
			out.outcome, out.results, err = d.Resolve(l.srv.now(), l.who, req, nil)
			return err
		})
		answer(out, err)
	}, func(out resolved, err error, _ fate) {
		if err != nil {
			c.failed(l, err)
			next()
			return
		}
		marks := append([]session.PageRef(nil), c.core.Refs(op.Sequence)...)
		w.note("%s: operation %d is resolved: %d", c.process.name, op.Sequence, out.outcome)
		c.core.Resolved(op.Sequence, out.outcome, hot.CommitResults(out.results))
		c.mark(marks, l)
		c.resolveLost(l, next)
	})
}

// mark writes the marks of READY pages.
func (c *clientActor) mark(refs []session.PageRef, l *link) {
	if now := c.current(); now != nil {
		l = now // opened again since: the page was not READY when that epoch looked for unmarked ones
	}
	for _, ref := range refs {
		m := c.maps[ref.Region]
		if m == nil {
			continue
		}
		order, ok := c.core.MayMark(ref, l.who.Epoch, l.server)
		if ok {
			c.w.setMark(m.at, ref.Index, order)
		}
	}
}

// clearMarks clears marks, then tells the core.
func (c *clientActor) clearMarks(refs []session.PageRef) {
	for _, ref := range refs {
		if m := c.maps[ref.Region]; m != nil {
			if !c.w.planted(ClearedUnwritten) {
				c.w.setMark(m.at, ref.Index, 0)
			}
		}
		c.core.Cleared(ref, true)
	}
}

// cell is the memory of a page that this client reaches, nil when it does not.
func (c *clientActor) cell(id base.RegionID, page base.PageIndex) *cell {
	if id >= base.FirstPrivateRegion {
		if id == c.segmentOf {
			return &c.segment[page]
		}
		return nil
	}
	if m := c.maps[id]; m != nil {
		return c.w.memory.page(m.at, page)
	}
	return nil
}
