package core

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/extent"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// Limits bounds what peers can make the resource manager keep. Zero fields mean
// their default.
type Limits struct {
	MaxOwnerCount   int // default 1024
	MaxRegionCount  int // default 262 144
	MaxSessionCount int // default 65 536
	MaxHoldCount    int // rows of (session, region); default 1 048 576
	MaxSpanCount    int // spans of closed operations an owner; default 65 536
	MaxListCount    int // regions in one call; default 4096
}

func (l Limits) withDefaults() Limits {
	l.MaxOwnerCount = cmp.Or(l.MaxOwnerCount, 1024)
	l.MaxRegionCount = cmp.Or(l.MaxRegionCount, 1<<18)
	l.MaxSessionCount = cmp.Or(l.MaxSessionCount, 1<<16)
	l.MaxHoldCount = cmp.Or(l.MaxHoldCount, 1<<20)
	l.MaxSpanCount = cmp.Or(l.MaxSpanCount, 1<<16)
	l.MaxListCount = cmp.Or(l.MaxListCount, 4096)
	return l
}

// Config is who the resource manager is.
type Config struct {
	Store  base.StoreID
	Node   base.NodeID
	Boot   base.BootID
	Secret [SecretBytes]byte
	Limits Limits
}

// Core is the state. Concurrency: none; the shell serializes.
type Core struct {
	cfg      Config
	secret   [SecretBytes]byte
	limits   Limits
	counters countersRow
	format   uint32 // of the store's rows

	pools    map[base.PoolID]*pool
	regions  map[base.RegionID]*region
	ordered  []*region // by id; nil: to be made again
	byOp     map[operationKey]*region
	owners   map[base.OwnerID]*owner
	sessions map[base.SessionID]*session
	nodes    map[base.NodeID]*nodeRow
	agents   map[base.NodeID]*agent

	// unwatched are processes on record whose end nobody can prove any more, and why.
	unwatched map[ProcessID]string

	holdCount int
}

type operationKey struct {
	owner       base.OwnerID
	incarnation base.Incarnation
	operation   uint64
}

type pool struct {
	row          poolRow
	slotSequence uint64 // what the device says
	reason       string // why it is offline; empty: online
	extents      *extent.Allocator
	draining     uint64 // bytes
	regionCount  int
}

func (p *pool) online() bool { return p.reason == "" }

func (p *pool) usable() error {
	if !p.online() {
		return fmt.Errorf("%w: pool %s (%s): %s", base.ErrOffline, p.row.Name, p.row.Path, p.reason)
	}
	return nil
}

type region struct {
	row   regionRow
	plan  poolfmt.Plan
	pool  *pool
	rows  map[base.SessionID]*holdRow // held and unheld
	held  int
	ready bool // line and table were written since this start, or belong to mappers
}

func (r *region) heldBy(s base.SessionID) bool {
	h, ok := r.rows[s]
	return ok && h.Held
}

type owner struct {
	row    ownerRow
	closed spans
	count  int
	bytes  uint64
}

type session struct {
	row  sessionRow
	rows map[base.RegionID]*holdRow
	held int
}

// New returns an empty core, for a new store.
func New(cfg Config) *Core {
	return &Core{
		cfg: cfg, secret: cfg.Secret, limits: cfg.Limits.withDefaults(),
		counters: countersRow{NextRegion: 1, NextOwner: 1},
		format:   formatFirst,
		pools:    map[base.PoolID]*pool{},
		regions:  map[base.RegionID]*region{},
		byOp:     map[operationKey]*region{},
		owners:   map[base.OwnerID]*owner{},
		sessions: map[base.SessionID]*session{},
		nodes:    map[base.NodeID]*nodeRow{},
		agents:   map[base.NodeID]*agent{},

		unwatched: map[ProcessID]string{},
	}
}

// IsEmpty reports whether nothing was ever recorded.
func (c *Core) IsEmpty() bool {
	return len(c.pools) == 0 && len(c.agents) == 0 && len(c.owners) == 0 && len(c.sessions) == 0 && len(c.regions) == 0 &&
		c.counters == countersRow{NextRegion: 1, NextOwner: 1}
}

func (c *Core) putCounters(b *Batch) { b.put(bucketCounters, "counters", c.counters) }

func (c *Core) putRegion(b *Batch, r *region) { b.put(bucketRegions, regionKey(r.row.ID), r.row) }

// poolsInOrder is the order in which pools are filled and listed.
func (c *Core) poolsInOrder() []*pool {
	list := make([]*pool, 0, len(c.pools))
	for _, p := range c.pools {
		list = append(list, p)
	}
	slices.SortFunc(list, func(x, y *pool) int {
		return cmp.Or(cmp.Compare(x.row.Name, y.row.Name), cmp.Compare(string(x.row.ID[:]), string(y.row.ID[:])))
	})
	return list
}

// current returns the owner if this is its incarnation. Errors: ErrFenced, also
// for an owner that is not known (it was dropped, or never started here).
func (c *Core) current(id base.OwnerID, incarnation base.Incarnation) (*owner, error) {
	o, ok := c.owners[id]
	if !ok {
		return nil, fmt.Errorf("%w: owner %s is not known here: call StartOwner", base.ErrFenced, id)
	}
	if o.row.Current.Incarnation != incarnation {
		return nil, fmt.Errorf("%w: owner %s has incarnation %d now, not %d", base.ErrFenced, id, o.row.Current.Incarnation, incarnation)
	}
	return o, nil
}
