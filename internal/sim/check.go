package sim

import (
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// committed takes the results of a Commit: R1, a published page is whole.
func (w *world) committed(by *serverActor, id base.SessionID, rows hot.CommitRows, results hot.CommitResults) {
	for i := range rows.Len() {
		row := rows.At(i)
		res := results.At(i)
		if res.Code != base.CodeOK {
			continue
		}
		t := tag{w.numberOf(row.Key), row.Checksum}
		if old := w.truth.bySerial[row.Checksum]; old != nil {
			if old.order != res.Order {
				w.fail("S1", "%v was committed with order %d and with %d", t, old.order, res.Order)
			}
			continue // the same operation again
		}
		page := base.PageIndex(row.Offset / pageBytes) //nolint:gosec // a page
		s := &stored{tag: t, region: row.Region, page: page, gen: row.Generation, order: res.Order, session: id, server: by.epoch}
		w.truth.add(s)
		w.note("%v of %s is published with order %d", t, w.nameOf(id), res.Order)
		if row.Region >= base.FirstPrivateRegion {
			continue
		}
		// A Commit that was late can reach a server that was fenced and cannot hear of it, when
		// the next one has given the page back: nobody but its writer could ever map it.
		if c := w.memory.page(w.extents[row.Region], page); !c.shows(t) && by.incarnation >= w.newest {
			w.fail("R1", "%v is published and its page shows %v", t, c)
		}
		// Commits of a server that is being fenced may come after those of the next one.
		if last := w.lastOrders[by.incarnation]; last >= res.Order {
			w.fail("S1", "order %d after %d of incarnation %d", res.Order, last, by.incarnation)
		}
		w.lastOrders[by.incarnation] = res.Order
	}
}

// hidden: a server hides a page for good, and tells its writer to retire it.
func (w *world) hidden(by *serverActor, region base.RegionID, page base.PageIndex, gen base.Generation, id base.SessionID) {
	if s := w.truth.byUse[useOf(region, page, gen, id)]; s != nil {
		s.hidden = by.epoch
	}
}

// retired: the writer was told so.
func (w *world) retired(region base.RegionID, page base.PageIndex, gen base.Generation, id base.SessionID) {
	if s := w.truth.byUse[useOf(region, page, gen, id)]; s != nil {
		s.retired = true
	}
}

// found takes a hit: R7, nothing that was retired or deleted is found again. A server that
// a newer one has fenced, and that cannot hear of it, goes on finding what it had: bytes of
// that stay right (R3), for the newer one frees nothing that its readers hold.
func (w *world) found(by *serverActor, key base.Key, serial uint64) {
	s := w.truth.bySerial[serial]
	switch {
	case s == nil || s.tag.key != w.numberOf(key):
		w.fail("R1", "key %d is found as store %d, which was never committed", w.numberOf(key), serial)
	case by.incarnation < w.newest:
	case s.deleted:
		w.fail("R7", "%v is found; its delete was acknowledged", s.tag)
	case s.retired, s.hidden == by.epoch:
		w.fail("R7", "%v is found; its writer was told to retire it", s.tag)
	}
}

// probed takes a hit of a probe.
func (w *world) probed(by *serverActor, key int) {
	if by.incarnation < w.newest {
		return // a hit may be of a region that nobody can map any more
	}
	for _, s := range w.truth.byKey[key] {
		if !s.deleted && !s.retired && s.hidden != by.epoch {
			return
		}
	}
	w.fail("R7", "key %d is a hit of a probe, and all of its replicas were retired or deleted", key)
}

// meantBy lists what a delete of a key at a server is about to hide: of private pools what
// was committed to this very server, since no other one ever knows them, and of shared ones
// everything. A server that a newer one has fenced, and that has not heard of it, knows
// nothing of what was committed there.
func (w *world) meantBy(by *serverActor, key base.Key) []*stored {
	var out []*stored
	for _, s := range w.truth.byKey[w.numberOf(key)] {
		private := s.region >= base.FirstPrivateRegion
		if private && s.server == by.epoch || !private && (by.incarnation >= w.newest || s.order.Owner() <= by.incarnation || s.server == by.epoch) {
			out = append(out, s)
		}
	}
	return out
}

// deleted: a delete of these is acknowledged.
func (w *world) deleted(list []*stored) {
	for _, s := range list {
		s.deleted = true
	}
	w.dirty.marks = true
}

// dirty is what an event may have changed, and so what is checked after it.
type dirty struct {
	manager bool           // the RM's core, a mapping, what it acknowledged
	marks   bool           // a mark, what is deleted
	clients []*clientActor // whose process ran
	events  int            // since everything was checked
}

// fullCheckEvents is how often everything is checked, whatever seems to have changed.
const fullCheckEvents = 64

// touch has a client checked after this event.
func (w *world) touch(c *clientActor) {
	if !c.touched {
		c.touched = true
		w.dirty.clients = append(w.dirty.clients, c)
	}
}

// check is run after every event. What it says of a part depends on that part's state
// alone, and all changes of a part go through the calls that make it dirty: directories
// through serverActor.step, the RM's core through its committer, mappings, marks and
// pages through the functions of memory.go, a client's core through events of its process
// and through actions. Time alone makes nothing wrong: it only hides replicas.
func (w *world) check() {
	d := &w.dirty
	if d.events++; d.events >= fullCheckEvents {
		w.checkAll()
		return
	}
	if d.manager {
		d.manager, d.marks = false, false
		w.checkManager()
	} else if d.marks {
		d.marks = false
		w.checkMarks(w.manager.listed)
	}
	if w.server.dirty {
		w.server.check()
	}
	for _, s := range w.older {
		if s.dirty {
			s.check()
		}
	}
	for _, c := range d.clients {
		c.touched = false
		c.check()
	}
	d.clients = d.clients[:0]
}

func (w *world) checkAll() {
	for _, c := range w.dirty.clients {
		c.touched = false
	}
	w.dirty = dirty{clients: w.dirty.clients[:0]}
	w.checkManager()
	w.server.check()
	for _, s := range w.older {
		s.check()
	}
	for _, c := range w.clients {
		if !c.alive() {
			continue
		}
		c.check()
		for _, v := range c.views {
			c.checkView(v)
		}
	}
}

func (w *world) checkManager() {
	if w.manager.alive() {
		list := w.manager.listNow()
		w.manager.check(list)
		w.checkMarks(list)
	}
}

// checkMarks: R7, a rebuild would find no mark of what was deleted with acknowledgement.
// While the resource manager is down, what it listed last is what it will have.
func (w *world) checkMarks(regions []core.RegionInfo) {
	for i := range regions {
		r := &regions[i]
		if r.State == core.RegionDraining {
			continue // it is on its way back, durably: no rebuild reads it
		}
		at := regionAt{r.Extent, r.Plan}
		for p := range r.Plan.PageCount {
			order := w.memory.marks[at.cell(base.PageIndex(p))] //nolint:gosec // a page
			if order == 0 {
				continue
			}
			if s := w.truth.byOrder[order]; s != nil && s.deleted && s.region == r.ID {
				w.fail("R7", "%v was deleted with acknowledgement and its mark is in region %d, page %d", s.tag, r.ID, p)
			}
		}
	}
}
