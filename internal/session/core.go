package session

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// Config of a core.
type Config struct {
	Session       base.SessionID
	MaxOperations int // unresolved operations
	MaxLeases     int // copy and view leases together (RPC-23)
	// MaxIdleMappings bounds the foreign regions that stay mapped without a lease; 0:
	// DefaultMaxIdleMappings.
	MaxIdleMappings int
}

// Phase is where a session stands with its server.
type Phase uint8

// Phases.
const (
	Away      Phase = iota // never opened, expired or fenced: to be opened
	Relisting              // open; the snapshot is not acknowledged, so nothing is committed
	Live
	HasLeft // closed with exports out
	Closed
)

func (p Phase) String() string {
	names := [...]string{"away", "relisting", "live", "left", "closed"}
	if int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// Core is the state of one session.
// Concurrency: none; the caller serialises.
type Core struct {
	cfg         Config
	phase       Phase
	epoch       base.Epoch
	serverEpoch base.ServerEpoch
	ttl, margin time.Duration
	validUntil  time.Duration

	ledger  ledger
	commits map[base.Sequence]*commitOp
	spare   []*commitOp

	regions map[base.RegionID]*region
	own     []*region
	avail   [mediumCount][]*region
	idle    idleList        // foreign regions without a lease
	gone    []base.RegionID // regions to unmap, for the shell

	book     map[base.Sequence]*Batch
	leases   int
	views    map[uint64]viewRef
	lastView uint64
	releases []Release
	pins     map[base.Key]*pin

	expands map[base.Medium]*Expand // growths whose outcome is not known
	returns []back                  // regions to give back
	given   []RegionInfo            // those that were, and own regions that went; the newest

	lastEvent uint64
	cleared   []Ack // to acknowledge
	reclaimed []Ack
}

const mediumCount = int(base.MediumSSD) + 1

// New gives a core that is Away.
func New(cfg Config) *Core {
	if cfg.MaxOperations <= 0 {
		cfg.MaxOperations = 1 << 16
	}
	if cfg.MaxLeases <= 0 {
		cfg.MaxLeases = 4096
	}
	if cfg.MaxIdleMappings <= 0 {
		cfg.MaxIdleMappings = DefaultMaxIdleMappings
	}
	return &Core{
		cfg: cfg, ledger: newLedger(cfg.MaxOperations),
		commits: map[base.Sequence]*commitOp{}, regions: map[base.RegionID]*region{},
		book: map[base.Sequence]*Batch{}, views: map[uint64]viewRef{}, pins: map[base.Key]*pin{},
		expands: map[base.Medium]*Expand{},
	}
}

// Phase returns where the session stands.
func (c *Core) Phase() Phase { return c.phase }

// Epoch returns the current epoch, 0 before the first.
func (c *Core) Epoch() base.Epoch { return c.epoch }

// ServerEpoch returns the epoch of the server that the session is open at.
func (c *Core) ServerEpoch() base.ServerEpoch { return c.serverEpoch }

// SetLimits takes the bounds that the server told. A lower one counts from now on.
func (c *Core) SetLimits(maxOperations, maxLeases int) {
	if maxOperations > 0 {
		c.ledger.max = maxOperations
	}
	if maxLeases > 0 {
		c.cfg.MaxLeases = maxLeases
	}
}

// Valid reports whether the session is good at now: a load counts only if it was when
// its last byte was read.
func (c *Core) Valid(now time.Duration) bool {
	return (c.phase == Live || c.phase == Relisting) && now < c.validUntil
}

// ValidUntil is when the session ends unless a heartbeat is acknowledged.
func (c *Core) ValidUntil() time.Duration { return c.validUntil }

// Acknowledged takes an answered heartbeat that was sent at sent. It returns false for
// one of another epoch, which changes nothing (S1).
func (c *Core) Acknowledged(epoch base.Epoch, server base.ServerEpoch, sent, ttl time.Duration) bool {
	if epoch != c.epoch || server != c.serverEpoch || (c.phase != Live && c.phase != Relisting) {
		return false
	}
	if ttl > 0 {
		c.ttl = ttl
	}
	// Answers can overtake each other; the latest send time counts.
	c.validUntil = max(c.validUntil, sent+c.ttl-c.margin)
	return true
}

// Fence ends the epoch: it is to be opened again.
func (c *Core) Fence() {
	if c.phase == Live || c.phase == Relisting {
		c.phase, c.validUntil = Away, 0
	}
}

// Begin numbers an operation of the shell's own (Acquire, Expand, Delete).
// Errors: ErrLimit.
func (c *Core) Begin() (base.Sequence, error) { return c.ledger.begin() }

// End resolves it: its answer is known, or it needs none.
func (c *Core) End(s base.Sequence) { c.ledger.end(s) }

// Watermark is the lowest operation that is not resolved.
func (c *Core) Watermark() base.Sequence { return c.ledger.base }

// AddRegion makes a region known. An own one serves pages at once. Errors: ErrExists;
// ErrStale for a private one of a server that is gone.
func (c *Core) AddRegion(info RegionInfo, own Ownership) error {
	r := c.regions[info.ID]
	switch {
	case r != nil && own == Foreign && r.own == Foreign && r.mode != going:
		// A lease came first and made the place; now its data are known.
		r.RegionInfo = info
		r.mapped = true
		c.rest(r)
		return nil
	case r != nil:
		return fmt.Errorf("%w: region %d is known here", base.ErrExists, info.ID)
	case info.Private() && info.ServerEpoch != c.serverEpoch:
		return fmt.Errorf("%w: private region %d is of another server epoch", base.ErrStale, info.ID)
	case own == Own && (info.PageBytes == 0 || info.PageCount == 0 || info.PageCount >= 1<<32-1):
		return fmt.Errorf("%w: region %d with %d pages of %d bytes", base.ErrInvalid, info.ID, info.PageCount, info.PageBytes)
	}
	r = &region{RegionInfo: info, own: own, mapped: true}
	if own == Own {
		r.pages = make([]page, info.PageCount)
		r.counts[Free] = info.PageCount
		c.own = append(c.own, r)
		c.offer(r)
	}
	c.regions[info.ID] = r
	c.rest(r)
	return nil
}

// offer puts a region into its medium's list of regions with free pages.
func (c *Core) offer(r *region) {
	if !r.avail && r.own == Own && r.mode == serving && r.counts[Free] > 0 {
		r.avail = true
		c.avail[r.Medium] = append(c.avail[r.Medium], r)
	}
}

// RemoveRegion forgets a region that the shell has unmapped.
func (c *Core) RemoveRegion(id base.RegionID) {
	r := c.regions[id]
	if r == nil {
		return
	}
	invariants.Check(r.leases == 0, "D1", "region %d removed with %d leases", id, r.leases)
	r.mode = going
	c.idle.remove(r)
	delete(c.regions, id)
	if r.own == Own {
		c.gave(r.RegionInfo)
	}
	for i, o := range c.own {
		if o == r {
			c.own = append(c.own[:i], c.own[i+1:]...)
			break
		}
	}
}

// Region returns what is known of a region.
func (c *Core) Region(id base.RegionID) (RegionInfo, Ownership, bool) {
	r := c.regions[id]
	if r == nil {
		return RegionInfo{}, Foreign, false
	}
	return r.RegionInfo, r.own, true
}

// Mapped reports whether a region is known and its mapping is there.
func (c *Core) Mapped(id base.RegionID) bool {
	r := c.regions[id]
	return r != nil && r.mapped && r.mode != going
}

// Going reports whether a region is handed to the shell to unmap.
func (c *Core) Going(id base.RegionID) bool {
	r := c.regions[id]
	return r != nil && r.mode == going
}

// OwnRegions appends the ids of own regions that serve, oldest first.
func (c *Core) OwnRegions(dst []base.RegionID) []base.RegionID {
	for _, r := range c.own {
		if r.mode == serving {
			dst = append(dst, r.ID)
		}
	}
	return dst
}

// Alloc takes one page from the first medium of order that has one. ok is false when
// none has.
func (c *Core) Alloc(order []base.Medium) (ref PageRef, medium base.Medium, ok bool) {
	if c.phase == HasLeft || c.phase == Closed {
		return PageRef{}, 0, false
	}
	for _, m := range order {
		list := c.avail[m]
		for len(list) > 0 {
			r := list[0]
			if r.mode == serving {
				if i, got := r.take(); got {
					c.avail[m] = list
					return PageRef{Region: r.ID, Index: i}, m, true
				}
			}
			r.avail = false
			list = append(list[:0], list[1:]...)
		}
		c.avail[m] = list
	}
	return PageRef{}, 0, false
}

// FreePage takes back a page that is being written. Errors: ErrNotFound for a region
// that is not ours, ErrInvalid for a page in another state.
func (c *Core) FreePage(id base.RegionID, i base.PageIndex) error {
	r := c.regions[id]
	if r == nil || r.own != Own {
		return fmt.Errorf("%w: region %d is not ours", base.ErrNotFound, id)
	}
	p := r.page(i)
	if p == nil {
		return fmt.Errorf("%w: page %d of region %d; it has %d pages", base.ErrInvalid, i, id, r.PageCount)
	}
	if p.state != Writing {
		return fmt.Errorf("%w: page %d of region %d is %s, not being written%s", base.ErrInvalid, i, id, p.state, freeHint(p.state))
	}
	c.freePage(r, i)
	return nil
}

func freeHint(s PageState) string {
	switch s {
	case Free:
		return " (freed twice?)"
	case Ready, Retiring, Committing:
		return " (delete its key instead)"
	case Writing, Quarantined, Left, stateCount:
	}
	return ""
}

func (c *Core) freePage(r *region, i base.PageIndex) {
	if invariants.Enabled && r.pages[i].gen != 0 {
		invariants.Check(!c.viewed(r, i, r.pages[i].gen), "R3", "page %d of region %d is freed under a view", i, r.ID)
	}
	r.release(i)
	c.offer(r)
	c.settle(r)
}

// FaultPage quarantines a page whose memory could not be written; it comes back with
// its region.
func (c *Core) FaultPage(id base.RegionID, i base.PageIndex) {
	r := c.regions[id]
	if r == nil {
		return
	}
	if p := r.page(i); p != nil && p.state == Writing {
		r.set(p, Quarantined)
		c.settle(r)
	}
}

// settle hands an idle draining region to the shell.
func (c *Core) settle(r *region) {
	if r.mode == draining && r.idle() {
		r.mode = going
		c.idle.remove(r)
		if r.mapped {
			c.gone = append(c.gone, r.ID)
		} else {
			delete(c.regions, r.ID)
		}
	}
}

// Drain stops new use of a region; it goes when it is idle. Unknown ones are ignored.
func (c *Core) Drain(id base.RegionID) {
	r := c.regions[id]
	if r == nil || r.mode != serving {
		return
	}
	r.mode = draining
	c.settle(r)
}

// TakeGone hands out the regions whose mappings are to go now. The shell unmaps them,
// then calls RemoveRegion.
func (c *Core) TakeGone(dst []base.RegionID) []base.RegionID {
	dst = append(dst, c.gone...)
	c.gone = c.gone[:0]
	return dst
}

// Counts of one own region or of several.
type Counts struct {
	Regions, Pages                                                uint64
	Free, Writing, Committing, Ready, Retiring, Quarantined, Left uint64
	Bytes, FreeBytes, WritingBytes, QuarantinedBytes              uint64
	// Available are the free pages that Alloc hands out: those of regions that go are none.
	Available uint64
}

// Count sums all own regions.
func (c *Core) Count() Counts {
	return c.countIf(func(*region) bool { return true })
}

// CountMedium sums the own regions of a medium.
func (c *Core) CountMedium(m base.Medium) Counts {
	return c.countIf(func(r *region) bool { return r.Medium == m })
}

// CountPool sums the own regions of a pool, for the heartbeat.
func (c *Core) CountPool(number uint32) Counts {
	return c.countIf(func(r *region) bool { return r.PoolNumber == number })
}

func (c *Core) countIf(take func(*region) bool) Counts {
	var out Counts
	for _, r := range c.own {
		if !take(r) {
			continue
		}
		out.Regions++
		out.Pages += r.PageCount
		out.Free += r.counts[Free]
		if r.mode == serving {
			out.Available += r.counts[Free]
		}
		out.Writing += r.counts[Writing]
		out.Committing += r.counts[Committing]
		out.Ready += r.counts[Ready]
		out.Retiring += r.counts[Retiring]
		out.Quarantined += r.counts[Quarantined]
		out.Left += r.counts[Left]
		out.Bytes += r.PageCount * r.PageBytes
		out.FreeBytes += r.counts[Free] * r.PageBytes
		out.WritingBytes += (r.counts[Writing] + r.counts[Committing]) * r.PageBytes
		out.QuarantinedBytes += r.counts[Quarantined] * r.PageBytes
	}
	return out
}

// PageState returns the state of a page, for tests and answers to people.
func (c *Core) PageState(id base.RegionID, i base.PageIndex) (PageState, bool) {
	r := c.regions[id]
	if r == nil {
		return 0, false
	}
	p := r.page(i)
	if p == nil {
		return 0, false
	}
	return p.state, true
}
