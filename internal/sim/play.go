package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/session"
)

const (
	workerCount = 3
	keyCount    = 12
)

func slicesSort(ids []base.RegionID) { slices.Sort(ids) }

func (w *world) namespace() base.NamespaceID { return base.NamespaceOf([]byte("sim")) }

// key is the object key of a number.
func (w *world) key(n int) base.Key {
	var d base.Digest
	d[0], d[1] = byte(n+1), 0x5a
	return base.MakeKey(d, 0, base.PartAllLayers)
}

func (w *world) numberOf(k base.Key) int { return int(k[0]) - 1 }

func (w *world) nameOf(id base.SessionID) string {
	for _, c := range w.clients {
		if c.id == id {
			return c.process.name
		}
	}
	return id.String()
}

// committed takes the results of a Commit: R1, a published page is whole.
func (w *world) committed(id base.SessionID, rows hot.CommitRows, results hot.CommitResults) {
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
		s := &stored{tag: t, region: row.Region, page: page, gen: row.Generation, order: res.Order, session: id, server: w.server.epoch}
		w.truth.bySerial[row.Checksum] = s
		w.truth.list = append(w.truth.list, s)
		w.note("%v of %s is published with order %d", t, w.nameOf(id), res.Order)
		if row.Region >= base.FirstPrivateRegion {
			continue
		}
		if c := w.memory.page(w.extents[row.Region], page); !c.shows(t) {
			w.fail("R1", "%v is published and its page shows %v", t, c)
		}
		if w.lastOrder >= res.Order {
			w.fail("S1", "order %d after %d", res.Order, w.lastOrder)
		}
		w.lastOrder = res.Order
	}
}

// hidden: a server retires a page: it does not find it again.
func (w *world) hidden(region base.RegionID, page base.PageIndex, gen base.Generation, id base.SessionID) {
	if s := w.truth.find(region, page, gen, id); s != nil {
		s.hidden = w.server.epoch
	}
}

// retired: the writer is told that a page is hidden for good: no server finds it again.
func (w *world) retired(region base.RegionID, page base.PageIndex, gen base.Generation, id base.SessionID) {
	if s := w.truth.find(region, page, gen, id); s != nil {
		s.retired = true
	}
}

// found takes a hit: R7, nothing that was retired or deleted is found again.
func (w *world) found(key base.Key, serial uint64) {
	s := w.truth.bySerial[serial]
	switch {
	case s == nil || s.tag.key != w.numberOf(key):
		w.fail("R1", "key %d is found as store %d, which was never committed", w.numberOf(key), serial)
	case s.deleted:
		w.fail("R7", "%v is found; its delete was acknowledged", s.tag)
	case s.retired:
		w.fail("R7", "%v is found; its writer was told to retire it", s.tag)
	case s.hidden == w.server.epoch:
		w.fail("R7", "%v is found by the server that retired it", s.tag)
	}
}

// probed takes a hit of a probe.
func (w *world) probed(key int) {
	for _, s := range w.truth.list {
		if s.tag.key == key && !s.deleted && !s.retired && s.hidden != w.server.epoch {
			return
		}
	}
	w.fail("R7", "key %d is a hit of a probe, and all of its replicas were retired or deleted", key)
}

// meantBy lists what a delete of a key is about to hide.
func (w *world) meantBy(key base.Key) (out []*stored) {
	for _, s := range w.truth.list {
		if s.tag.key == w.numberOf(key) {
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
}

// check is run after every event.
func (w *world) check() {
	if w.manager.alive() {
		regions := w.manager.regions()
		w.manager.check(regions)
		w.checkMarks(regions)
	}
	w.server.check()
	for _, c := range w.clients {
		c.check()
	}
}

// checkMarks: R7, a rebuild would find no mark of what was deleted with acknowledgement.
func (w *world) checkMarks(regions []core.RegionInfo) {
	for _, r := range regions {
		if r.State == core.RegionDraining {
			continue // it is on its way back, durably: no rebuild reads it
		}
		at := regionAt{r.Extent, r.Plan}
		for p := range r.Plan.PageCount {
			order := w.memory.marks[at.record(base.PageIndex(p))] //nolint:gosec // a page
			if order == 0 {
				continue
			}
			for _, s := range w.truth.list {
				if s.order == order && s.region == r.ID && s.deleted {
					w.fail("R7", "%v was deleted with acknowledgement and its mark is in region %d, page %d", s.tag, r.ID, p)
				}
			}
		}
	}
}

func (w *world) play() {
	w.rough = []float64{10, 30, 60, 100}[w.rng.IntN(4)]
	w.manager = newManager(w)
	w.server = newServer(w)
	w.guard(w.manager.start)
	w.guard(w.server.start)
	for i := range workerCount {
		w.clients = append(w.clients, w.newClient(i, base.RoleWorker))
	}
	w.clients = append(w.clients, w.newClient(workerCount, base.RoleScheduler))
	w.advance(300*time.Millisecond, nil)
	for step := 0; step < w.opt.Steps && w.failure == nil; step++ {
		w.guard(w.action)
		w.advance(w.now+w.between(time.Millisecond, 500*time.Millisecond), nil)
	}
	w.finish()
}

func (w *world) liveClients(role base.Role) (out []*clientActor) {
	for _, c := range w.clients {
		if c.role == role && c.alive() && !c.closing {
			out = append(out, c)
		}
	}
	return out
}

func (w *world) keys(most int) []int {
	n := 1 + w.rng.IntN(most)
	out := make([]int, 0, n)
	for len(out) < n {
		if k := w.rng.IntN(keyCount); !slices.Contains(out, k) {
			out = append(out, k)
		}
	}
	return out
}

// troubleFrom is where the actions of a step begin that are none of an ordinary day.
const troubleFrom = 860

// action is one step: something that a client or the world does.
func (w *world) action() {
	workers := w.liveClients(base.RoleWorker)
	if len(workers) == 0 {
		w.replace()
		return
	}
	c := workers[w.rng.IntN(len(workers))]
	n := w.rng.IntN(1000)
	if n >= troubleFrom && !w.chance(w.rough) {
		n = w.rng.IntN(troubleFrom)
	}
	switch {
	case n < 380:
		if !c.process.paused {
			c.store(w.rng.IntN(keyCount))
		}
	case n < 610:
		if !c.process.paused {
			c.load(w.keys(4))
		}
	case n < 720:
		if !c.process.paused {
			c.look(w.keys(3))
		}
	case n < 800:
		if !c.process.paused {
			c.remove(w.rng.IntN(keyCount))
		}
	case n < troubleFrom:
		if s := w.liveClients(base.RoleScheduler); len(s) > 0 && !s[0].process.paused {
			s[0].probe(w.keys(4), c.id)
		}
	case n < 890:
		d := w.between(10*time.Millisecond, 2*time.Second)
		if w.chance(40) {
			d = w.between(8*time.Second, 15*time.Second)
		}
		w.pause(c.process, d)
	case n < 910:
		w.kill(c, "is killed")
		w.at(nil, w.between(100*time.Millisecond, 5*time.Second), w.replace)
	case n < 930:
		c.w.at(c.process, 0, func() { c.close(w.between(0, 20*time.Second)) })
		w.at(nil, w.between(100*time.Millisecond, 5*time.Second), w.replace)
	case n < 945:
		w.stopManager()
	case n < 960:
		w.stopServer()
	case n < 970:
		w.pause(w.server.process, w.between(10*time.Millisecond, 3*time.Second))
	case n < 975:
		w.pause(w.manager.process, w.between(10*time.Millisecond, 3*time.Second))
	case n < 985:
		if w.server.alive() {
			w.server.linkLost()
		}
	default:
		w.advance(w.now+w.between(time.Second, 8*time.Second), nil)
	}
}

// hunt stops a reader in the middle of a copy for longer than its session lives, and has
// what it reads deleted and its place written again.
func (w *world) hunt(c *clientActor, keys []int) {
	stop := w.between(9*time.Second, 16*time.Second)
	w.pause(c.process, stop)
	for _, other := range w.liveClients(base.RoleWorker) {
		if other == c {
			continue
		}
		for _, k := range keys {
			at := w.between(time.Second, stop)
			w.at(other.process, at, func() { other.remove(k) })
			for range 3 {
				w.at(other.process, at+w.between(100*time.Millisecond, 3*time.Second), func() { other.store(w.rng.IntN(keyCount)) })
			}
		}
	}
}

// replace starts a worker for each rank that has none.
func (w *world) replace() {
	if !w.faulty {
		return
	}
	for rank := range workerCount {
		if !slices.ContainsFunc(w.clients, func(c *clientActor) bool {
			return c.role == base.RoleWorker && int(c.rank) == rank && c.alive() && !c.closing
		}) {
			w.clients = append(w.clients, w.newClient(rank, base.RoleWorker))
		}
	}
}

// kill ends a client's process; its watchers see it.
func (w *world) kill(c *clientActor, how string) {
	if !c.alive() {
		return
	}
	w.note("%s %s", c.process.name, how)
	w.result.Kills++
	w.end(c.process)
	c.views = nil
	w.manager.watchedEnd(w.manager.processID(c.process.pid))
	if _, bound := w.server.bound[c.id]; bound {
		w.server.processEnded(c.process)
	}
}

func (w *world) stopManager() {
	m := w.manager
	if !m.alive() {
		return
	}
	w.note("%s is killed", m.process.name)
	w.result.ManagerRestarts++
	w.end(m.process)
	if w.server.alive() {
		w.at(w.server.process, w.between(time.Millisecond, 100*time.Millisecond), w.server.linkLost)
	}
	w.at(nil, w.between(time.Millisecond, 3*time.Second), func() {
		m.start()
		for _, c := range w.clients {
			if c.alive() && c.watching != nil {
				w.at(c.process, w.between(time.Millisecond, time.Second), c.watchManager)
			}
		}
	})
}

func (w *world) stopServer() {
	s := w.server
	if !s.alive() {
		return
	}
	w.note("%s is killed", s.process.name)
	w.result.ServerRestarts++
	dead := s.process
	w.end(dead)
	w.manager.watchedEnd(w.manager.processID(dead.pid))
	for _, c := range w.clients {
		if c.alive() && len(c.views) > 0 && w.trouble(w.rough/2) {
			// It lists its views last of all.
			w.pause(c.process, w.between(3*time.Second, 8*time.Second))
		}
		if l := c.link; c.alive() && l != nil && l.process == dead {
			w.at(c.process, w.between(time.Millisecond, 500*time.Millisecond), func() {
				if !l.over {
					c.lose(l)
				}
			})
		}
	}
	w.at(nil, w.between(time.Millisecond, 3*time.Second), s.start)
	if w.trouble(w.rough / 4) {
		w.stopManager()
	}
	if w.trouble(w.rough / 2) {
		w.purge()
	}
}

// purge has keys deleted while a server finds out what older ones left.
func (w *world) purge() {
	for _, c := range w.liveClients(base.RoleWorker) {
		for range 4 {
			for _, k := range w.keys(3) {
				w.at(c.process, w.between(0, 8*time.Second), func() { c.remove(k) })
			}
		}
	}
}

// finish stops the faults and sees that everything comes back (L1).
func (w *world) finish() {
	if w.failure != nil {
		return
	}
	w.note("faults stop")
	w.faulty = false
	for _, c := range w.clients {
		c.openCount = 0
	}
	for _, p := range w.processes {
		w.resume(p)
	}
	w.waitFor(45*time.Second, w.unsettled)
	for _, c := range w.clients {
		if !c.alive() || c.closing {
			continue
		}
		if w.chance(30) {
			w.kill(c, "is killed")
			continue
		}
		life := w.between(0, 5*time.Second)
		w.at(c.process, w.between(0, time.Second), func() { c.close(life) })
	}
	w.waitFor(45*time.Second, w.inhabited)
	if w.failure != nil {
		return
	}
	w.guard(func() {
		// What is left are KEPT regions with keys; an operator ends them.
		_ = w.server.step(func(d *directory.Directory) error {
			_, err := d.OperatorDeleteNamespace(w.now, w.namespace())
			if err != nil {
				w.note("deleting the namespace: %v", err)
			}
			return nil
		})
	})
	w.waitFor(45*time.Second, w.notEmpty)
}

// waitFor gives the programs time until nothing is wrong any more; what still is when
// the time is up breaks L1.
func (w *world) waitFor(most time.Duration, wrong func() string) {
	text := "nothing was looked at"
	for end := w.now + most; text != "" && w.now < end; {
		w.advance(w.now+time.Second, nil)
		if w.failure != nil {
			return
		}
		w.guard(func() { text = wrong() })
	}
	if text != "" {
		w.fail("L1", "%s", text)
	}
}

// inhabited says who has not gone.
func (w *world) inhabited() string {
	for _, c := range w.clients {
		if c.alive() {
			return c.process.name + " has not ended"
		}
	}
	for _, s := range w.server.dir.Usage(w.now).Sessions {
		if s.Leases > 0 || s.State != directory.StateKept && s.Regions > 0 {
			return fmt.Sprintf("everybody has gone, and the session of %s is %v with %d leases", w.nameOf(s.Session), s.State, s.Leases)
		}
	}
	return ""
}

// unsettled says what still waits; with the faults gone and the views released nothing
// may.
func (w *world) unsettled() string {
	if !w.manager.alive() || !w.server.alive() {
		return "a program is down"
	}
	for _, c := range w.clients {
		if !c.alive() || c.closing {
			continue
		}
		if c.current() == nil || !c.core.Valid(w.now) {
			return fmt.Sprintf("%s is not open: phase %v", c.process.name, c.core.Phase())
		}
		if n := c.core.Count(); n.Retiring+n.Quarantined+n.Committing+n.Writing > 0 || c.core.Leases() > 0 || c.core.Pending() > 0 {
			return fmt.Sprintf("%s: %d retiring, %d quarantined, %d committing, %d written, %d leases, %d answers due%s", c.process.name,
				n.Retiring, n.Quarantined, n.Committing, n.Writing, c.core.Leases(), c.core.Pending(), c.waitingPages())
		}
	}
	u := w.server.dir.Usage(w.now)
	if u.Waiting > 0 {
		return fmt.Sprintf("%d recovered regions wait", u.Waiting)
	}
	for _, p := range u.Pools {
		if p.RetiringBytes+p.QuarantinedBytes > 0 || p.Leases > 0 {
			return fmt.Sprintf("pool %d: %d bytes retiring, %d quarantined, %d leases", p.Grant.Number, p.RetiringBytes, p.QuarantinedBytes, p.Leases)
		}
	}
	for _, p := range w.manager.core.Pools() {
		if p.DrainingBytes > 0 {
			return fmt.Sprintf("%d bytes drain at the resource manager: %s", p.DrainingBytes, w.whoHolds())
		}
	}
	return ""
}

// waitingPages names the pages that wait.
func (c *clientActor) waitingPages() (text string) {
	for _, id := range sortedRegions(c.maps) {
		m := c.maps[id]
		for p := range m.at.plan.PageCount {
			state, ok := c.core.PageState(id, base.PageIndex(p)) //nolint:gosec // a page
			if ok && state != session.Free && state != session.Ready {
				text += fmt.Sprintf("; page %d of region %d is %v", p, id, state)
			}
		}
	}
	return text
}

func (w *world) whoHolds() string {
	holds, _ := w.manager.core.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
	text := ""
	for _, h := range holds {
		if h.Draining {
			text += w.nameOf(h.Session) + ": " + h.Cure + "; "
		}
	}
	return text
}

// notEmpty says what is left when everybody is gone and the keys are deleted.
func (w *world) notEmpty() string {
	for _, p := range w.manager.core.Pools() {
		if p.AllocatedBytes > 0 {
			return fmt.Sprintf("everybody is gone and %d bytes are allocated: %+v; %s", p.AllocatedBytes, w.manager.regions(), w.whoHolds())
		}
	}
	u := w.server.dir.Usage(w.now)
	if u.Regions > 0 || u.Objects > 0 {
		return fmt.Sprintf("everybody is gone and the server has %d regions and %d objects", u.Regions, u.Objects)
	}
	if free := w.server.dir.BudgetFreeBytes(w.manager.cfg.Node); free != cpuBudgetBytes {
		return fmt.Sprintf("everybody is gone and %d bytes of the cpu budget are free of %d", free, uint64(cpuBudgetBytes))
	}
	return ""
}
