package sim

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/session"
)

// Media in the order of writing: the private ones first, when there are some.
var writeOrder = []base.Medium{base.MediumCPU, base.MediumCXL}

// begin counts an operation that a close waits for.
func (c *clientActor) begin() (end func()) {
	c.busy++
	return func() { c.busy-- }
}

// store writes an object in two halves and publishes it.
func (c *clientActor) store(key int) {
	if c.current() == nil || c.closing {
		return
	}
	end := c.begin()
	ref, _, ok := c.core.Alloc(writeOrder)
	if !ok {
		c.grow(func(again bool) {
			if again && !c.closing {
				ref, _, ok = c.core.Alloc(writeOrder)
			}
			if !ok {
				end()
				return
			}
			c.write(ref, key, end)
		})
		return
	}
	c.write(ref, key, end)
}

func (c *clientActor) write(ref session.PageRef, key int, end func()) {
	w := c.w
	w.truth.serial++
	t := tag{key: key, serial: w.truth.serial}
	page := c.cell(ref.Region, ref.Index)
	if page == nil {
		w.fail("D1", "%s allocated page %d of region %d, which it does not map", c.process.name, ref.Index, ref.Region)
		return
	}
	w.note("%s writes %v to page %d of region %d", c.process.name, t, ref.Index, ref.Region)
	w.write(page, 0, t)
	second := func() { w.write(page, 1, t) }
	wait := w.between(100*time.Microsecond, 20*time.Millisecond)
	if w.trouble(5) {
		wait = w.between(0, 5*time.Second)
	}
	if w.planted(PublishBeforeWrite) && w.chance(20) {
		w.at(c.process, wait+w.between(0, 50*time.Millisecond), second)
		w.at(c.process, wait, func() { c.commit(ref, t, end) })
		return
	}
	w.at(c.process, wait, func() {
		second()
		c.commit(ref, t, end)
	})
}

func (c *clientActor) commit(ref session.PageRef, t tag, end func()) {
	w, l := c.w, c.current()
	rows := make([]hot.CommitRow, 1)
	item := session.Commit{Key: w.key(t.key), Region: ref.Region, Index: ref.Index, Length: pageBytes, Checksum: t.serial}
	seq, err := c.core.BeginCommit([]session.Commit{item}, rows)
	if err != nil {
		if err := c.core.FreePage(ref.Region, ref.Index); err != nil {
			w.fail("R3", "%s: a page that was not committed is not free: %v", c.process.name, err)
		}
		c.kick()
		end()
		return
	}
	if l == nil {
		c.core.RefuseCommit(seq)
		end()
		return
	}
	w.result.Stores++
	req := &hot.CommitRequest{Namespace: l.namespace, Rows: hot.AppendCommitRow(nil, &rows[0])}
	req.Sequence, req.Watermark = seq, c.core.Watermark()
	call(w, c.process, l.process, "Commit", mayRepeat, func(answer func([]byte, error)) {
		out, err := l.srv.commit(l.who, req)
		if err == nil && hot.CommitResults(out).At(0).Code == base.CodeOK && w.trouble(w.rough/60) {
			w.ambush(c, t.key)
			return
		}
		answer(out, err)
	}, func(out []byte, err error, f fate) {
		defer end()
		switch {
		case err == nil:
			refs := append([]session.PageRef(nil), c.core.Refs(seq)...)
			if c.core.EndCommit(seq, hot.CommitResults(out)) {
				if w.planted(MarkWithoutAsking) {
					w.at(c.process, w.between(0, 300*time.Millisecond), func() { c.forceMark(refs, hot.CommitResults(out)) })
				} else {
					c.mark(refs, l)
				}
			}
			c.kick()
			return
		case f == answered && session.Refused(err), f == notSent, w.planted(TimeoutIsAbort):
			c.core.RefuseCommit(seq)
		default:
			w.result.Unknown++
			c.core.LoseCommit(seq)
			c.kick()
		}
		c.failed(l, err)
	})
}

// forceMark plants MarkWithoutAsking.
func (c *clientActor) forceMark(refs []session.PageRef, results hot.CommitResults) {
	for i, ref := range refs {
		if m := c.maps[ref.Region]; m != nil && results.At(i).Code == base.CodeOK {
			c.w.setMark(m.at, ref.Index, results.At(i).Order)
		}
	}
}

// acquire leases keys, one manifest each, and maps what they need.
func (c *clientActor) acquire(kind base.LeaseKind, keys []int, got func(l *link, b *session.Batch, rows []hot.AcquireRow)) {
	w, l := c.w, c.current()
	b := &session.Batch{}
	if l == nil {
		got(nil, b, nil)
		return
	}
	if err := c.core.BeginAcquire(b, kind, len(keys)); err != nil {
		got(l, b, nil)
		return
	}
	req := &hot.AcquireRequest{Namespace: l.namespace, Kind: kind, Mode: hot.ModeEach}
	if w.planted(ViewExpires) {
		req.Kind = base.LeaseCopy
	}
	for _, k := range keys {
		req.ManifestSizes = hot.AppendManifestSize(req.ManifestSizes, 1)
		key := w.key(k)
		req.Keys = append(req.Keys, key[:]...)
	}
	req.Sequence, req.Watermark = b.Sequence, c.core.Watermark()
	before := maps.Clone(c.maps)
	call(w, c.process, l.process, "Acquire", mayRepeat, func(answer func([]byte, error)) {
		out, err := l.srv.acquire(l.who, req)
		answer(out, err)
	}, func(out []byte, err error, f fate) {
		if err != nil {
			if f == notSent || f == answered && session.Refused(err) {
				c.core.RefuseAcquire(b)
			} else {
				c.core.LoseAcquire(b)
			}
			c.kick()
			c.failed(l, err)
			got(l, b, nil)
			return
		}
		if !c.core.EndAcquire(b, hot.AcquireRows(out)) {
			c.kick()
			got(l, b, nil)
			return
		}
		var rows []hot.AcquireRow
		var ids []base.RegionID
		for i := range hot.AcquireRows(out).Len() {
			row := hot.AcquireRows(out).At(i)
			rows = append(rows, row)
			if row.Verdict.Status() == hot.Hit {
				ids = append(ids, row.Region)
			}
		}
		if kind == base.LeaseView && len(ids) > 0 && c.remote && len(c.handles) == 0 && w.trouble(w.rough) {
			w.stopBeforeHold(c, keys)
		}
		mapper := session.Watched
		if c.remote {
			mapper = session.Unwatched
		}
		confirm := session.MustConfirm(kind, mapper) && !w.planted(ViewUnconfirmed)
		c.ensureMapped(l, ids, func() {
			if !confirm || !slices.ContainsFunc(ids, func(id base.RegionID) bool { return c.maps[id] != before[id] }) {
				got(l, b, rows)
				return
			}
			c.beatThen(l, func(err error) {
				if err != nil {
					c.core.ReleaseBatch(b)
					c.kick()
					rows = nil
				}
				got(l, b, rows)
			})
		})
	})
}

// leased is the memory of row i, nil for a miss.
func (c *clientActor) leased(b *session.Batch, rows []hot.AcquireRow, i int) *cell {
	if i >= len(rows) || i >= len(b.Rows) || b.Rows[i].Region == 0 {
		return nil
	}
	return c.cell(rows[i].Region, base.PageIndex(rows[i].Offset/pageBytes)) //nolint:gosec // a page
}

// load copies objects out, a half after the other, and throws away what it read after
// its session had ended.
func (c *clientActor) load(keys []int) { c.copyFor(keys, 0) }

// copyFor is a load that takes so long; 0: as long as chance wants.
func (c *clientActor) copyFor(keys []int, long time.Duration) {
	w := c.w
	if c.current() == nil || c.closing || !c.core.Valid(c.now()) {
		return
	}
	end := c.begin()
	c.acquire(base.LeaseCopy, keys, func(l *link, b *session.Batch, rows []hot.AcquireRow) {
		var list []copied
		for i := range rows {
			if page := c.leased(b, rows, i); page != nil {
				list = append(list, copied{cell: page, want: tag{keys[i], rows[i].Checksum}, first: page.half[0], row: rows[i], index: i})
			}
		}
		if len(list) == 0 {
			c.core.ReleaseBatch(b)
			c.kick()
			end()
			return
		}
		wait := w.between(100*time.Microsecond, 30*time.Millisecond)
		if w.trouble(10) {
			wait = w.between(0, 4*time.Second)
		}
		if long > 0 {
			wait = long
		} else if w.trouble(w.rough / 15) {
			w.at(nil, wait/2, func() { w.hunt(c, keys) })
		}
		if w.planted(ReleaseBeforeCopied) {
			c.core.ReleaseBatch(b)
			c.kick()
		}
		w.at(c.process, wait, func() {
			for i := range list {
				list[i].second = list[i].cell.half[1]
			}
			valid := c.core.Valid(c.now()) && c.core.Epoch() == b.Epoch && c.core.ServerEpoch() == b.ServerEpoch
			if w.planted(ReadIgnoresExpiry) {
				valid = true
			}
			if c.confirm && valid && !w.planted(RemoteClockTrusted) {
				c.confirmed(l, b, list, func(list []copied, ok bool) { c.loaded(list, ok); end() })
				return
			}
			c.loaded(list, valid)
			c.core.ReleaseBatch(b)
			c.kick()
			end()
		})
	})
}

// copied is one object of a load.
type copied struct {
	cell          *cell
	want          tag
	first, second tag
	row           hot.AcquireRow
	index         int
}

// loaded takes what was read: if it counts, it is what was committed. A remote reader
// whose clock stood still with its machine looks at the roots before it counts.
func (c *clientActor) loaded(list []copied, counts bool) {
	w := c.w
	for _, x := range list {
		right := x.first == x.want && x.second == x.want
		if !counts || c.remote && !c.confirm && !right && !w.planted(RemoteClockTrusted) {
			w.result.ReadsDiscarded++
			continue
		}
		w.result.Reads++
		if !right {
			w.fail("R3", "%s read %v|%v at %v, committed is %v, and the read counts", c.process.name, x.first, x.second, x.row.Location(), x.want)
		}
	}
	w.note("%s has read %d objects, they count: %v", c.process.name, len(list), counts)
}

// confirmed releases a batch now; what it read counts where the server says that the
// lease was in force until then.
func (c *clientActor) confirmed(l *link, b *session.Batch, list []copied, done func([]copied, bool)) {
	req := &hot.ReleaseRequest{Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: b.Sequence, First: 0, Count: uint32(len(b.Rows))})} //nolint:gosec // a few
	req.Watermark = c.core.Watermark()
	call(c.w, c.process, l.process, "Release", mayRepeat, func(answer func([]byte, error)) {
		var held []byte
		err := l.srv.step(func(d *directory.Directory) (err error) {
			held, err = d.Release(l.srv.now(), l.who, req, nil)
			return err
		})
		answer(held, err)
	}, func(held []byte, err error, _ fate) {
		if err != nil {
			c.core.ReleaseBatch(b)
			c.kick()
			c.failed(l, err)
			done(list, false)
			return
		}
		for i := range b.Rows {
			c.core.ConfirmRow(b, i)
		}
		var good []copied
		for _, x := range list {
			if x.index < len(held) && held[x.index] == 1 {
				good = append(good, x)
			}
		}
		c.w.result.ReadsDiscarded += len(list) - len(good)
		c.kick()
		done(good, true)
	})
}

// fork has a child come up with a copy of the session's state. It inherits no mapping and
// no open socket, and the handle refuses it; what it can still do is to ask for the end of
// the parent's holds, by the session's id and the regions' numbers.
func (c *clientActor) fork(life time.Duration) {
	w := c.w
	w.result.Forks++
	child := w.newProcess(c.process.name + "-child")
	var list []core.Handle
	for _, id := range sortedRegions(c.handles) {
		h := c.handles[id]
		h.Token = nil
		list = append(list, h)
	}
	w.at(nil, life, func() { w.end(child) })
	if len(list) == 0 {
		return
	}
	req := core.Unhold{Session: c.id, Sequence: c.holdSequence + 100, Handles: list, Peer: w.manager.peer(child)}
	call(w, child, w.manager.process, "Unhold", once, w.manager.unhold(req), func(_ struct{}, err error, f fate) {
		if c.alive() && f == answered && err == nil && len(c.maps) > 0 {
			w.fail("S1", "%s ended holds of %s", child.name, c.process.name)
		}
	})
}

// look exports views for a while.
func (c *clientActor) look(keys []int) {
	w := c.w
	if c.current() == nil || c.closing {
		return
	}
	if !c.viewer {
		c.load(keys)
		return
	}
	end := c.begin()
	c.acquire(base.LeaseView, keys, func(_ *link, b *session.Batch, rows []hot.AcquireRow) {
		defer end()
		for i := range rows {
			page, id := c.leased(b, rows, i), uint64(0)
			if page != nil {
				id = c.core.AddView(b, i)
			}
			if id == 0 {
				c.core.ReleaseRow(b, i)
				continue
			}
			v := &view{id: id, cell: page, want: tag{keys[i], rows[i].Checksum}, row: rows[i], acquire: b.Sequence, index: uint32(i)} //nolint:gosec // a row
			w.note("%s exports %v at %v", c.process.name, v.want, v.row.Location())
			c.views = append(c.views, v)
			c.checkView(v)
			w.result.Views++
			w.at(c.process, w.between(10*time.Millisecond, 15*time.Second), func() { c.unlook(v) })
		}
		c.kick()
	})
}

func (c *clientActor) unlook(v *view) {
	for i, have := range c.views {
		if have == v {
			c.views = append(c.views[:i], c.views[i+1:]...)
			if !c.left {
				if c.w.planted(ReleaseWhileListing) && c.core.Phase() == session.Relisting && c.current() != nil {
					c.releaseEarly(c.current(), v)
				}
				c.core.ReleaseView(v.id)
				c.kick()
			}
			return
		}
	}
}

// remove deletes a key.
func (c *clientActor) remove(key int) {
	w, l := c.w, c.current()
	if l == nil || c.closing {
		return
	}
	seq, err := c.core.Begin()
	if err != nil {
		return
	}
	end := c.begin()
	w.note("%s deletes key %d", c.process.name, key)
	w.result.Deletes++
	call(w, c.process, l.process, "Delete", mayRepeat, func(answer func(base.Code, error)) {
		l.srv.remove(l.who, seq, w.key(key), answer)
	}, func(code base.Code, err error, _ fate) {
		defer end()
		c.core.End(seq)
		w.note("%s: delete of key %d is answered %v %v", c.process.name, key, code, err)
		if err != nil {
			c.failed(l, err)
		}
	})
}

// probe is a scheduler's question, with request leases, for one worker.
func (c *clientActor) probe(keys []int, target base.SessionID) {
	w, l := c.w, c.current()
	if l == nil || c.closing {
		return
	}
	req := &hot.ProbeRequest{RequestID: w.Uint64N(8), Namespace: l.namespace, Mode: hot.ModeEach, Targets: target[:]}
	for _, k := range keys {
		key := w.key(k)
		req.Keys = append(req.Keys, key[:]...)
	}
	req.Watermark = c.core.Watermark()
	call(w, c.process, l.process, "Probe", mayRepeat, func(answer func([]byte, error)) {
		var out []byte
		err := l.srv.step(func(d *directory.Directory) (err error) {
			out, _, err = d.ProbeKeep(l.srv.now(), l.who, req, nil)
			return err
		})
		for i, v := range out {
			if hot.Verdict(v).Status() == hot.Hit {
				w.probed(l.srv, keys[i])
			}
		}
		answer(out, err)
	}, func(_ []byte, err error, _ fate) {
		if err != nil {
			c.failed(l, err)
		}
	})
}

// close ends a client: drained when nothing is exported, left otherwise. Its process
// lives on for a while.
func (c *clientActor) close(lifetime time.Duration) {
	w := c.w
	if !c.closing {
		c.closing = true
		w.note("%s closes", c.process.name)
		w.result.Closes++
	}
	if c.busy > 0 || c.growing || c.working || c.mapping || c.core.Phase() == session.Relisting {
		w.at(c.process, 20*time.Millisecond, func() { c.close(lifetime) })
		return
	}
	if c.closed {
		return
	}
	l := c.current()
	finish := func() {
		// The loops end before the mappings do.
		c.closed = true
		w.at(c.process, lifetime, func() { w.kill(c, "exits") })
		if len(c.views) > 0 {
			c.left = true
			w.result.Left++
			c.core.Leave()
			c.say(l, directory.CloseLeft)
			return
		}
		gone, ok := c.core.Close(nil)
		if !ok {
			w.fail("D1", "%s cannot close: %d leases are out and no view is", c.process.name, c.core.Leases())
			return
		}
		slicesSort(gone)
		for _, id := range gone {
			c.unmap(id)
		}
		c.unhold(func() { c.say(l, directory.CloseDrained) })
	}
	if l == nil {
		finish()
		return
	}
	c.working = true
	c.flushReleases(l, func() {
		c.working = false
		if c.busy > 0 || c.mapping {
			c.close(lifetime)
			return
		}
		finish()
	})
}

// say tells the server how the session ended.
func (c *clientActor) say(l *link, kind directory.CloseKind) {
	if l == nil {
		return
	}
	w := c.w
	call(w, c.process, l.process, "Close", mayRepeat, func(answer func(struct{}, error)) {
		answer(struct{}{}, l.srv.step(func(d *directory.Directory) error { return d.Close(l.srv.now(), l.who, kind) }))
	}, func(_ struct{}, err error, _ fate) {
		if err != nil && !errors.Is(err, base.ErrTimeout) {
			w.note("%s: Close is answered %v", c.process.name, err)
		}
		l.over = true
	})
}
