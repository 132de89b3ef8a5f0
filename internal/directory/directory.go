package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// maxSharedPools bounds the shared pools of one server epoch: what a session has
// proved is one word, tested for every replica of every probe.
const maxSharedPools = 64

// Directory is the state of one maru-server epoch. See the package comment for
// its concurrency.
type Directory struct {
	cfg   Config
	store *store

	effects []Effect

	sessions    map[base.SessionID]*session
	sessionList []*session // in the order of their last Open: every walk is repeatable
	nextExpiry  time.Duration

	pools    map[uint32]*pool
	shared   []*pool // number = index + 1
	nextPool uint32

	regions     []*region // by slot; slot 0 is none
	freeSlots   []uint32
	regionCount int
	pageCount   uint64
	clearQueue  []uint32 // slots of regions with pages for ClearRecords

	namespaces  map[base.NamespaceID]*namespace
	nsByNumber  map[base.NamespaceNumber]*namespace
	nextNS      base.NamespaceNumber
	hosts       map[base.NodeID]uint64 // reserved cpu budget
	commitCount uint64                 // counter part of the last commit order
	rmOperation uint64
	flights     map[uint64]*operation // RM allocations by their RM operation

	deletes     map[DeleteID]*pendingDelete
	deleteList  []DeleteID
	nextDelete  DeleteID
	markWaiters map[replicaRef][]markWaiter
	tombstones  map[tombstoneKey][]markWaiter
	nsTombs     map[base.NamespaceNumber]bool

	restart restartState

	freeRows   [][]uint32
	freeCommit [][]commitRecord
	scratch    struct {
		refs []replicaRef
	}

	counters Counters
}

// namespace is what sessions agree on. Its number is valid for one server epoch.
type namespace struct {
	id       base.NamespaceID
	number   base.NamespaceNumber
	opaque   bool
	geometry map[uint32]geometry // by rank: ranks may hold unequal parts of an object
	sessions int
	regions  int
}

type geometry struct {
	valueBytes uint64
	pieceBytes uint32
}

// pool is a shared pool of the resource manager or the private cpu pool of one
// session.
type pool struct {
	number     uint32
	info       Pool
	owner      *session // private pools
	bit        uint64   // shared pools: in session.proved
	regions    map[base.RegionID]uint32
	nextID     base.RegionID // private pools
	grantBytes uint64        // private pools
	reserved   uint64        // backing of its regions and of allocations in flight
	granted    uint64        // usable bytes of its regions

	readyBytes, readyPages, retiringPages, quarantinedPages uint64
	objects, leases                                         uint64
	requestBytes                                            uint64 // pages kept by request leases
	keptBytes                                               uint64
	victim                                                  uint32 // slot of the kept region that goes back now
}

// New makes an empty directory.
// Errors: base.ErrInvalid for a bad configuration, base.ErrFull without memory.
func New(cfg Config) (*Directory, error) {
	cfg.setDefaults()
	if err := cfg.Limits.validate(); err != nil {
		return nil, err
	}
	if cfg.ServerEpoch == 0 || cfg.Owner > base.MaxIncarnation {
		return nil, fmt.Errorf("%w: server epoch %#x, owner incarnation %d", base.ErrInvalid, uint64(cfg.ServerEpoch), cfg.Owner)
	}
	for name, v := range map[string]time.Duration{
		"ttl": cfg.TTL, "request-lease-ttl": cfg.RequestLeaseTTL, "event-timeout": cfg.EventTimeout, "retry-interval": cfg.RetryInterval,
	} {
		if v <= 0 {
			return nil, fmt.Errorf("%w: %s is %v, must be positive", base.ErrInvalid, name, v)
		}
	}
	st, err := newStore(cfg.Memory, cfg.HashSeed, cfg.Limits.MaxObjects, cfg.Limits.MaxExtraReplicas)
	if err != nil {
		return nil, fmt.Errorf("directory: %w", err)
	}
	return &Directory{
		cfg: cfg, store: st,
		sessions: map[base.SessionID]*session{}, nextExpiry: never,
		pools: map[uint32]*pool{}, nextPool: maxSharedPools + 1,
		regions:    make([]*region, 1),
		namespaces: map[base.NamespaceID]*namespace{}, nsByNumber: map[base.NamespaceNumber]*namespace{},
		hosts: map[base.NodeID]uint64{}, flights: map[uint64]*operation{},
		deletes: map[DeleteID]*pendingDelete{}, markWaiters: map[replicaRef][]markWaiter{},
		tombstones: map[tombstoneKey][]markWaiter{}, nsTombs: map[base.NamespaceNumber]bool{},
	}, nil
}

// never is a time that does not come.
const never = time.Duration(1<<63 - 1)

// Free gives the table's memory back. Nothing may be called after it.
func (d *Directory) Free() error { return d.store.free() }

// ServerEpoch returns the epoch that the directory was made with.
func (d *Directory) ServerEpoch() base.ServerEpoch { return d.cfg.ServerEpoch }

// Limits returns the bounds in force, defaults filled in.
func (d *Directory) Limits() Limits { return d.cfg.Limits }

// SetOwner says which owner incarnation the resource manager gave, after
// RecoverRegions; until then only private cpu pools can be written. Sessions whose
// lists could not be judged before are fenced: they list again.
// Errors: base.ErrStale for a lower one, base.ErrInvalid beyond 24 bits.
func (d *Directory) SetOwner(now time.Duration, owner base.Incarnation) error {
	switch {
	case owner > base.MaxIncarnation || owner == 0:
		return fmt.Errorf("%w: owner incarnation %d", base.ErrInvalid, owner)
	case owner < d.cfg.Owner:
		return fmt.Errorf("%w: owner incarnation %d after %d", base.ErrStale, owner, d.cfg.Owner)
	case owner == d.cfg.Owner:
		return nil
	}
	d.cfg.Owner = owner
	for _, s := range slices.Clone(d.sessionList) {
		d.judgeAgain(now, s)
	}
	d.poolsChanged(now)
	d.relistEnded()
	return nil
}

// SetPools says which shared pools there are. A pool keeps its number for the
// server epoch, also while it is not in the list; then it takes no new regions.
// Errors: base.ErrLimit beyond 64 pools, base.ErrInvalid for what is no shared
// pool or has unknown coherence.
func (d *Directory) SetPools(now time.Duration, pools []Pool) error {
	fresh := 0
	for i := range pools {
		p := &pools[i]
		switch {
		case p.ID == base.PoolID{}:
			return fmt.Errorf("%w: pool without id", base.ErrInvalid)
		case p.Medium != base.MediumCXL:
			return fmt.Errorf("%w: shared pool %v is of medium %v, allowed: cxl", base.ErrUnsupported, p.ID, p.Medium)
		case p.Coherence != base.CoherenceHardware && p.Coherence != base.CoherenceSoftware:
			return fmt.Errorf("%w: pool %v has %v coherence", base.ErrInvalid, p.ID, p.Coherence)
		}
		if d.sharedPool(p.ID) == nil {
			fresh++
		}
	}
	if len(d.shared)+fresh > maxSharedPools {
		return fmt.Errorf("%w: %d shared pools; at most %d a server", base.ErrLimit, len(d.shared)+fresh, maxSharedPools)
	}
	changed := fresh > 0
	for _, have := range d.shared {
		if i := slices.IndexFunc(pools, func(p Pool) bool { return p.ID == have.info.ID }); i < 0 {
			changed = changed || have.info.Online
			have.info.Online = false
		} else {
			changed = changed || have.info.Online != pools[i].Online || have.info.CapacityBytes != pools[i].CapacityBytes
			have.info = pools[i]
		}
	}
	for i := range pools {
		if d.sharedPool(pools[i].ID) == nil {
			n := uint32(len(d.shared) + 1) //nolint:gosec // at most 64
			p := &pool{number: n, info: pools[i], bit: 1 << (n - 1), regions: map[base.RegionID]uint32{}}
			d.shared = append(d.shared, p)
			d.pools[n] = p
		}
	}
	if changed {
		d.poolsChanged(now)
	}
	return nil
}

func (d *Directory) sharedPool(id base.PoolID) *pool {
	for _, p := range d.shared {
		if p.info.ID == id {
			return p
		}
	}
	return nil
}

// PoolNumber returns the number of a shared pool, 0 when it is not known.
// Concurrency: read lock.
func (d *Directory) PoolNumber(id base.PoolID) uint32 {
	if p := d.sharedPool(id); p != nil {
		return p.number
	}
	return 0
}

// poolsChanged tells live workers.
func (d *Directory) poolsChanged(now time.Duration) {
	for _, s := range d.sessionList {
		if s.state == StateLive && s.role == base.RoleWorker {
			s.poolsDue = true
			d.pump(now, s)
		}
	}
}

// largestPoolBytes is RPC-21's bound: a region larger than it is refused for good.
func (d *Directory) largestPoolBytes(s *session, m base.Medium) uint64 {
	var largest uint64
	for _, p := range d.shared {
		if p.info.Medium == m {
			largest = max(largest, p.info.CapacityBytes)
		}
	}
	if m == base.MediumCPU && s.cpu != nil {
		largest = s.cpu.grantBytes
	}
	return largest
}

// Tick does what is due without a call: expiry, request leases, slow sessions,
// retries, and rule "Server restart". It returns when it wants to be called next.
func (d *Directory) Tick(now time.Duration) time.Duration {
	d.expireDue(now)
	next := d.nextExpiry
	var slow []*session
	for _, s := range d.sessionList {
		next = min(next, d.expireRequests(now, s))
		if s.state == StateLive && len(s.window) >= d.cfg.Limits.MaxEvents {
			if due := s.window[0].at + d.cfg.EventTimeout; due > now {
				next = min(next, due)
			} else {
				slow = append(slow, s)
			}
		}
	}
	for _, s := range slow { // not within that loop: a fence can shorten the list
		d.fence(now, s, "its events were not acknowledged in time")
	}
	next = min(next, d.retryRegions(now))
	return min(next, d.checkRestart(now))
}

// begin finds the caller's session and checks that its epoch is current (S1). The shell
// has proved the caller by the epoch's secret, which the client has got, then.
func (d *Directory) begin(now time.Duration, who Caller) (*session, error) {
	d.expireDue(now)
	s, err := d.current(now, who)
	if err == nil && !s.shown {
		s.shown, s.spare = true, Secret{}
	}
	return s, err
}

// current is begin without a write.
func (d *Directory) current(now time.Duration, who Caller) (*session, error) {
	s := d.sessions[who.Session]
	switch {
	case s == nil || s.state == StateAwaited:
		return nil, fmt.Errorf("%w: session %v is not open here; open it again", base.ErrStale, who.Session)
	case s.epoch != who.Epoch:
		return nil, fmt.Errorf("%w: epoch %d of session %v, current is %d", base.ErrStale, who.Epoch, who.Session, s.epoch)
	case s.state != StateLive || s.deadline <= now:
		return nil, fmt.Errorf("%w: epoch %d of session %v has ended; open it again", base.ErrStale, who.Epoch, who.Session)
	}
	return s, nil
}
