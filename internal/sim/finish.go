package sim

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/session"
)

// finish stops the faults and sees that everything comes back (L1).
func (w *world) finish() {
	if w.failure != nil {
		return
	}
	w.note("faults stop")
	w.step++
	w.faulty = false
	w.machineGoesOn()
	for _, c := range w.clients {
		c.openCount = 0
	}
	for _, p := range w.processes {
		w.resume(p)
	}
	for _, c := range w.clients {
		if c.agent != nil && !c.alive() {
			w.operatorLooks(c, 15)
		} else if c.remote && !c.alive() {
			w.manager.operatorDrops(c.id)
			w.at(nil, 10*time.Second, func() { w.manager.operatorDrops(c.id) })
		}
	}
	w.waitFor(45*time.Second, w.unsettled)
	for _, c := range w.clients {
		if !c.alive() || c.closing {
			continue
		}
		// The draws are the process's: what else lives does not shift them.
		w.by(c.process, func() {
			if w.chance(30) && !w.script.Mild {
				w.kill(c, "is killed")
				return
			}
			life := w.between(0, 5*time.Second)
			w.at(c.process, w.between(0, time.Second), func() { c.close(life) })
		})
	}
	w.waitFor(45*time.Second, w.inhabited)
	if w.failure != nil {
		return
	}
	w.guard(func() {
		// What is left are KEPT regions with keys; an operator ends them.
		_ = w.server.step(func(d *directory.Directory) error {
			_, err := d.OperatorDeleteNamespace(w.server.now(), w.namespace())
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
		w.advance(w.now + time.Second)
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
	for _, s := range w.server.dir.Usage(w.server.now()).Sessions {
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
	for _, s := range w.older {
		return fmt.Sprintf("%s serves with incarnation %d and is fenced by %d", s.process.name, s.incarnation, w.server.incarnation)
	}
	for _, c := range w.clients {
		if !c.alive() || c.closing {
			continue
		}
		if c.current() == nil || !c.core.Valid(c.now()) {
			return fmt.Sprintf("%s is not open: phase %v", c.process.name, c.core.Phase())
		}
		if n := c.core.Count(); n.Retiring+n.Quarantined+n.Committing+n.Writing > 0 || c.core.Leases() > 0 || c.core.Pending() > 0 {
			return fmt.Sprintf("%s: %d retiring, %d quarantined, %d committing, %d written, %d leases, %d answers due%s", c.process.name,
				n.Retiring, n.Quarantined, n.Committing, n.Writing, c.core.Leases(), c.core.Pending(), c.waitingPages())
		}
	}
	for _, c := range w.clients {
		if c.alive() && !c.closing && len(c.core.Unmarked(nil)) > 0 {
			return fmt.Sprintf("%s has not marked %v", c.process.name, c.core.Unmarked(nil))
		}
	}
	u := w.server.dir.Usage(w.server.now())
	for _, x := range u.Sessions {
		// What the server has granted is what the writer knows: else nobody would ever use it.
		if c := w.server.peers[x.Session]; c != nil && c.alive() && !c.closing && x.State == directory.StateLive {
			if have := c.core.Count().Regions; uint64(x.Regions) != have { //nolint:gosec // positive
				return fmt.Sprintf("%s has %d regions, and the server has granted it %d", c.process.name, have, x.Regions)
			}
		}
	}
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
	if n := w.manager.core.SessionCount(); n > 0 {
		return fmt.Sprintf("everybody is gone and the resource manager knows %d sessions", n)
	}
	u := w.server.dir.Usage(w.server.now())
	if u.Regions > 0 || u.Objects > 0 {
		return fmt.Sprintf("everybody is gone and the server has %d regions and %d objects", u.Regions, u.Objects)
	}
	if free := w.server.dir.BudgetFreeBytes(w.manager.cfg.Node); free != cpuBudgetBytes {
		return fmt.Sprintf("everybody is gone and %d bytes of the cpu budget are free of %d", free, uint64(cpuBudgetBytes))
	}
	return ""
}
