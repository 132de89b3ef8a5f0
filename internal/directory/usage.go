package directory

import (
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Counters count since the start of the directory.
type Counters struct {
	Commits, CommitsPresent, CommitsRefused                                uint64
	Hits, Misses                                                           uint64
	ReplicasRetired, PagesReclaimed                                        uint64
	KeysDeleted                                                            uint64
	RegionsFreed, RegionsEvicted                                           uint64
	SessionsExpired, SessionsFenced, SessionsGone                          uint64
	RequestsDropped, RequestsExpired                                       uint64
	EventsDropped, RelistKept, RelistRefused, UsesRefused, UsesOverGranted uint64
}

// PoolUsage is one pool's bytes (CAP-04). AllocatedBytes = writing + ready + retiring +
// quarantined pages (R5); WritingBytes and PinnedBytes are the clients' own counts.
type PoolUsage struct {
	Grant               PoolGrant
	Session             base.SessionID // set for private pools
	CapacityBytes       uint64
	ReservedBytes       uint64 // backing of its regions, tables and alignment included
	AllocatedBytes      uint64
	WritingBytes        uint64
	ReadyBytes          uint64 // logical bytes of READY replicas
	ReadyAllocatedBytes uint64
	RetiringBytes       uint64
	QuarantinedBytes    uint64
	PinnedBytes         uint64
	GrantedBytes        uint64
	Objects             uint64
	Leases              uint64
	KeptBytes           uint64
}

// SessionUsage is one session.
type SessionUsage struct {
	Session   base.SessionID
	EngineID  string
	Instance  string
	Role      base.Role
	State     State
	Epoch     base.Epoch
	Namespace base.NamespaceID
	Leases    int
	Requests  int
	Regions   int
	Provable  bool
	// WriteOrder and ReadOrder are what the session opened with (POL-09); empty is the
	// default order.
	WriteOrder, ReadOrder []base.Medium
}

// Usage is a report of everything.
type Usage struct {
	Pools      []PoolUsage // shared ones by number, then private ones in the order of their sessions
	Sessions   []SessionUsage
	Objects    uint64
	Namespaces int
	Regions    int
	// TableBytes is what the table has committed, resident or not.
	TableBytes uint64
	// Waiting counts recovered regions that rule "Server restart" still holds.
	Waiting  int
	Counters Counters
}

// Usage reports capacity and counts (CAP-04, MS-11).
// Concurrency: read lock.
func (d *Directory) Usage(now time.Duration) Usage {
	u := Usage{
		Objects: d.store.objectCount, Namespaces: len(d.namespaces), Regions: d.regionCount,
		TableBytes: d.store.committedBytes(), Waiting: d.restart.regions, Counters: d.counters,
	}
	for _, p := range d.shared {
		u.Pools = append(u.Pools, d.poolUsage(p))
	}
	for _, s := range d.sessionList {
		if s.cpu != nil {
			u.Pools = append(u.Pools, d.poolUsage(s.cpu))
		}
		state := s.state
		if state == StateLive && s.deadline <= now {
			state = StateSuspect
		}
		su := SessionUsage{
			Session: s.id, EngineID: s.engine, Instance: s.instance, Role: s.role, State: state, Epoch: s.epoch,
			Leases: s.leases, Requests: len(s.requests.byID), Regions: len(s.regions) + s.keptRegions, Provable: s.provable,
			WriteOrder: s.writeOrder.Media(), ReadOrder: s.readOrder.Media(),
		}
		if s.ns != nil {
			su.Namespace = s.ns.id
		}
		u.Sessions = append(u.Sessions, su)
	}
	return u
}

func (d *Directory) poolUsage(p *pool) PoolUsage {
	u := PoolUsage{
		Grant:         PoolGrant{Number: p.number, Pool: p.info, Private: p.owner != nil, GrantBytes: p.info.CapacityBytes},
		CapacityBytes: p.info.CapacityBytes, ReservedBytes: p.reserved,
		ReadyBytes: p.readyBytes, ReadyAllocatedBytes: p.readyPages, RetiringBytes: p.retiringPages, QuarantinedBytes: p.quarantinedPages,
		GrantedBytes: p.granted, Objects: p.objects, Leases: p.leases, KeptBytes: p.keptBytes,
	}
	if p.owner != nil {
		u.Session = p.owner.id
		u.Grant.GrantBytes = p.grantBytes
		// A private pool's grant is reserved whole: other sessions of the host cannot have it.
		u.ReservedBytes = p.grantBytes
	}
	room := p.granted - min(p.granted, p.readyPages+p.retiringPages+p.quarantinedPages)
	for _, s := range d.sessionList {
		for _, use := range s.uses {
			if use.Pool == p.number {
				// A report lags behind commits: the sum never passes what is granted (R5).
				w := min(use.WritingBytes, room)
				room -= w
				u.WritingBytes += w
				u.PinnedBytes += use.PinnedBytes
			}
		}
	}
	u.AllocatedBytes = u.WritingBytes + u.ReadyAllocatedBytes + u.RetiringBytes + u.QuarantinedBytes
	return u
}

// recordUses keeps a heartbeat's counts of the pools that the session may use.
func (d *Directory) recordUses(s *session, uses []PoolUse) {
	s.uses = s.uses[:0]
	for i := range uses {
		p := d.pools[uses[i].Pool]
		if p == nil || (p.owner != nil && p.owner != s) || len(s.uses) > maxSharedPools ||
			slices.ContainsFunc(s.uses, func(u PoolUse) bool { return u.Pool == uses[i].Pool }) {
			d.counters.UsesRefused++
			continue
		}
		var granted uint64
		for _, slot := range s.regions {
			if g := d.regions[slot]; g.pool == p {
				granted += g.capacityBytes()
			}
		}
		if uses[i].WritingBytes > granted {
			d.counters.UsesOverGranted++
		}
		s.uses = append(s.uses, uses[i])
	}
}

// BudgetFreeBytes returns what is left of the cpu budget of a host.
// Concurrency: read lock.
func (d *Directory) BudgetFreeBytes(node base.NodeID) uint64 {
	return d.cfg.CPUBudgetBytes - min(d.hosts[node], d.cfg.CPUBudgetBytes)
}
