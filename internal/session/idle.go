package session

import "github.com/xcena-dev/maru/internal/invariants"

// DefaultMaxIdleMappings is how many foreign regions stay mapped without a lease on
// them. A mapping costs its page tables (2 KiB a MiB with small pages), one of the
// 65 530 maps that Linux gives a process by default, and a hold that keeps the region's
// range from being given out; mapping again costs a call of the server and one of the
// resource manager.
const DefaultMaxIdleMappings = 1024

// idleList holds the foreign regions that are mapped, serve and have no lease, the one
// used longest ago first. Regions carry their own links: nothing is allocated by a lease
// that comes and goes.
type idleList struct {
	first, last *region
	count       int
}

func (l *idleList) add(r *region) {
	invariants.Check(!r.listed, "D1", "region %d is idle twice", r.ID)
	r.listed, r.before, r.after = true, l.last, nil
	if l.last == nil {
		l.first = r
	} else {
		l.last.after = r
	}
	l.last = r
	l.count++
}

func (l *idleList) remove(r *region) {
	if !r.listed {
		return
	}
	if r.before == nil {
		l.first = r.after
	} else {
		r.before.after = r.after
	}
	if r.after == nil {
		l.last = r.before
	} else {
		r.after.before = r.before
	}
	r.listed, r.before, r.after = false, nil, nil
	l.count--
}

// use takes a lease on a region: its mapping stays until unuse.
func (c *Core) use(r *region) {
	r.leases++
	c.idle.remove(r)
}

// unuse gives one lease back. A foreign region without any waits for its next reader
// among the idle ones; the bound drops the one that waited longest (D1: it has no lease).
func (c *Core) unuse(r *region) {
	r.leases--
	invariants.Check(r.leases >= 0, "R4", "region %d: %d leases", r.ID, r.leases)
	if !r.mapped && r.leases == 0 && r.own == Foreign {
		delete(c.regions, r.ID) // its mapping never came
		return
	}
	c.settle(r)
	c.rest(r)
}

// rest lists a region that nobody uses any more.
func (c *Core) rest(r *region) {
	if r.own != Foreign || !r.mapped || r.mode != serving || r.leases > 0 || r.listed {
		return
	}
	c.idle.add(r)
	for c.idle.count > c.cfg.MaxIdleMappings {
		c.Drain(c.idle.first.ID)
	}
}

// IdleMappings returns how many foreign regions are mapped without a lease.
func (c *Core) IdleMappings() int { return c.idle.count }
