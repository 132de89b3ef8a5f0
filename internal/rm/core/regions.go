package core

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// Region is what the shell needs to know of a region.
type Region struct {
	Pool        base.PoolID
	ID          base.RegionID
	Incarnation base.Incarnation
	Extent      base.Extent
	Plan        poolfmt.Plan
	Owner       base.OwnerID
	Writer      base.SessionID
	Namespace   base.NamespaceID
}

// Line is the region's line on the device.
func (r Region) Line() poolfmt.Region {
	return poolfmt.Region{
		Region: r.ID, Incarnation: r.Incarnation, PieceBytes: r.Plan.PieceBytes, PageBytes: r.Plan.PageBytes,
		PageCount: r.Plan.PageCount, Owner: r.Owner, Writer: r.Writer, Namespace: r.Namespace,
	}
}

func (r *region) view() Region {
	return Region{
		Pool: r.row.Pool, ID: r.row.ID, Incarnation: r.row.Incarnation, Extent: r.row.extent(), Plan: r.plan,
		Owner: r.row.Owner, Writer: r.row.Writer, Namespace: r.row.Namespace,
	}
}

// Allocate asks for a region.
type Allocate struct {
	Claim
	Operation  uint64
	PageCount  uint64
	PageBytes  uint64
	PieceBytes uint32
	Namespace  base.NamespaceID
	Writer     base.SessionID
	Pool       base.PoolID // zero: any online pool with room
}

// Allocated is the answer. When Prepare is set, the shell writes the region line
// and the zeroed table after the commit and before the answer.
type Allocated struct {
	Handle  Handle
	Region  Region
	Prepare bool
}

// Allocate gives a region to an owner's current incarnation. Repeating an
// operation gives the same region; its table is written again only while nobody
// ever held it, since from the first hold on it belongs to the mappers.
// Errors: ErrInvalid, ErrFenced, ErrUnproven, ErrMismatch (the operation was asked with other
// values), ErrStale (its region was freed), ErrLimit, ErrPermanent (larger than
// every pool), ErrFull, ErrOffline, ErrNotFound (no such pool), ErrExhausted.
func (c *Core) Allocate(b *Batch, now int64, req Allocate) (Allocated, error) {
	if req.Operation == 0 {
		return Allocated{}, fmt.Errorf("%w: operation is 0", base.ErrInvalid)
	}
	if _, err := poolfmt.PlanRegion(req.PageBytes, req.PageCount, req.PieceBytes); err != nil {
		return Allocated{}, err
	}
	o, err := c.owned(req.Claim)
	if err != nil {
		return Allocated{}, err
	}
	op := operationKey{req.Owner, req.Incarnation, req.Operation}
	if r, ok := c.byOp[op]; ok {
		return c.allocatedBefore(r, req)
	}
	if o.closed.contains(req.Operation) {
		return Allocated{}, fmt.Errorf("%w: operation %d was answered with a region that was freed since", base.ErrStale, req.Operation)
	}
	switch {
	case len(c.regions) >= c.limits.MaxRegionCount:
		return Allocated{}, fmt.Errorf("%w: %d regions are allocated, the setting max_region_count allows no more", base.ErrLimit, len(c.regions))
	case len(o.closed) >= c.limits.MaxSpanCount:
		return Allocated{}, fmt.Errorf("%w: the ledger of closed operations of owner %s has %d spans, the setting max_span_count allows no more; count operations without gaps, or start the server again", base.ErrLimit, req.Owner, len(o.closed))
	case c.counters.NextRegion >= base.FirstPrivateRegion:
		return Allocated{}, fmt.Errorf("%w: all %d region ids were given", base.ErrExhausted, base.FirstPrivateRegion-1)
	}
	p, plan, err := c.choosePool(req)
	if err != nil {
		return Allocated{}, err
	}
	if p.row.NextIncarnation > base.MaxIncarnation {
		return Allocated{}, fmt.Errorf("%w: all %d region incarnations of pool %s were given", base.ErrExhausted, base.MaxIncarnation, p.row.Name)
	}
	e, err := p.extents.Allocate(plan.ExtentBytes)
	if err != nil {
		return Allocated{}, fmt.Errorf("pool %s: %w", p.row.Name, err)
	}

	r := &region{
		row: regionRow{
			Pool: p.row.ID, ID: c.counters.NextRegion, Incarnation: p.row.NextIncarnation,
			Owner: req.Owner, OwnerIncarnation: req.Incarnation, Operation: req.Operation,
			PageBytes: plan.PageBytes, AskedPageBytes: req.PageBytes, PageCount: plan.PageCount, PieceBytes: plan.PieceBytes,
			Namespace: req.Namespace, Writer: req.Writer, Offset: e.Offset, Length: e.Length, AllocatedMS: now,
		},
		plan: plan, pool: p, rows: map[base.SessionID]*holdRow{},
	}
	c.counters.NextRegion++
	p.row.NextRegion = c.counters.NextRegion
	p.row.NextIncarnation++
	c.insert(r)
	c.putRegion(b, r)
	c.putCounters(b)
	b.touch(p)
	return Allocated{Handle: c.writeHandle(r), Region: r.view(), Prepare: true}, nil
}

func (c *Core) allocatedBefore(r *region, req Allocate) (Allocated, error) {
	if r.row.Draining {
		return Allocated{}, fmt.Errorf("%w: operation %d was answered with region %d, which was freed since", base.ErrStale, req.Operation, r.row.ID)
	}
	same := r.row.AskedPageBytes == req.PageBytes && r.row.PageCount == req.PageCount && r.row.PieceBytes == req.PieceBytes &&
		r.row.Namespace == req.Namespace && r.row.Writer == req.Writer && (req.Pool == base.PoolID{} || req.Pool == r.row.Pool)
	if !same {
		return Allocated{}, fmt.Errorf("%w: operation %d was asked with other values and answered with region %d", base.ErrMismatch, req.Operation, r.row.ID)
	}
	if err := r.pool.usable(); err != nil {
		return Allocated{}, err
	}
	return Allocated{Handle: c.writeHandle(r), Region: r.view(), Prepare: !r.row.Mapped}, nil
}

// choosePool takes the asked pool, or the first online one with room.
func (c *Core) choosePool(req Allocate) (*pool, poolfmt.Plan, error) {
	var candidates []*pool
	if req.Pool != (base.PoolID{}) {
		p, ok := c.pools[req.Pool]
		if !ok {
			return nil, poolfmt.Plan{}, fmt.Errorf("%w: pool %s", base.ErrNotFound, req.Pool)
		}
		if err := p.usable(); err != nil {
			return nil, poolfmt.Plan{}, err
		}
		candidates = []*pool{p}
	} else {
		for _, p := range c.poolsInOrder() {
			if p.online() {
				candidates = append(candidates, p)
			}
		}
		if len(candidates) == 0 {
			return nil, poolfmt.Plan{}, fmt.Errorf("%w: no pool is online%s", base.ErrUnavailable, c.offlineReasons())
		}
	}
	var largestPool, largestFree, need uint64
	var planErr error
	for _, p := range candidates {
		pageBytes := req.PageBytes
		if p.row.Coherence == base.CoherenceSoftware {
			// A page must not share a cache line, nor a flush, with another writer's.
			pageBytes = (pageBytes + poolfmt.TableAlignment - 1) / poolfmt.TableAlignment * poolfmt.TableAlignment
		}
		plan, err := poolfmt.PlanRegion(pageBytes, req.PageCount, req.PieceBytes)
		if err != nil {
			planErr = err
			continue
		}
		need = plan.ExtentBytes
		free := p.extents.LargestFreeBytes()
		if free >= need {
			return p, plan, nil
		}
		largestPool, largestFree = max(largestPool, p.extents.TotalBytes()), max(largestFree, free)
	}
	if need == 0 {
		return nil, poolfmt.Plan{}, planErr
	}
	if need > largestPool {
		return nil, poolfmt.Plan{}, fmt.Errorf("%w: a region of %d bytes (with its table) is larger than the largest eligible pool, which has %d", base.ErrPermanent, need, largestPool)
	}
	return nil, poolfmt.Plan{}, fmt.Errorf("%w: no pool has %d bytes in one piece; the largest free piece has %d", base.ErrFull, need, largestFree)
}

func (c *Core) offlineReasons() string {
	text := ""
	for _, p := range c.poolsInOrder() {
		if !p.online() && len(text) < 500 {
			text += fmt.Sprintf("; %s: %s", p.row.Name, p.reason)
		}
	}
	return text
}

// insert puts a region into the indexes. Its extent is taken already.
func (c *Core) insert(r *region) {
	c.regions[r.row.ID] = r
	if n := len(c.ordered); n > 0 && c.ordered[n-1].row.ID < r.row.ID {
		c.ordered = append(c.ordered, r)
	} else {
		c.ordered = nil
	}
	if o, ok := c.owners[r.row.Owner]; ok {
		o.count++
		o.bytes += r.row.Length
		if o.row.Current.Incarnation == r.row.OwnerIncarnation {
			c.byOp[operationKey{r.row.Owner, r.row.OwnerIncarnation, r.row.Operation}] = r
		}
	}
	r.pool.regionCount++
	if r.row.Draining {
		r.pool.draining += r.row.Length
	}
}

func (c *Core) writeHandle(r *region) Handle {
	t := c.writeToken(&r.row)
	return Handle{Pool: r.row.Pool, Region: r.row.ID, Incarnation: r.row.Incarnation, Token: t[:]}
}

func (c *Core) readHandle(r *region) Handle {
	t := readToken(c.writeToken(&r.row))
	return Handle{Pool: r.row.Pool, Region: r.row.ID, Incarnation: r.row.Incarnation, Token: t[:], ReadOnly: true}
}

// Prepared says that a region's line and table are on the device.
func (c *Core) Prepared(id base.RegionID) {
	if r, ok := c.regions[id]; ok {
		r.ready = true
	}
}

// Free gives a region back, by write capability or, with an empty token, by the
// owner's word for its own region. A region that is gone already is success: ids
// are never reused, so nothing else can be meant. It works on offline pools.
// Errors: ErrFenced, ErrUnproven, ErrNotFound (an id that was never given), ErrDenied, ErrStale.
func (c *Core) Free(b *Batch, who Claim, h Handle) (draining bool, err error) {
	if _, err := c.owned(who); err != nil {
		return false, err
	}
	r, ok := c.regions[h.Region]
	if !ok {
		if h.Region == 0 || h.Region >= c.counters.NextRegion {
			return false, fmt.Errorf("%w: region %d was never given", base.ErrNotFound, h.Region)
		}
		return false, nil
	}
	if r.row.Owner != who.Owner {
		return false, fmt.Errorf("%w: region %d belongs to owner %s", base.ErrDenied, h.Region, r.row.Owner)
	}
	switch {
	case len(h.Token) > 0:
		if _, err := c.resolve(h, accessWrite); err != nil {
			return false, err
		}
	case h.Pool != r.row.Pool || h.Incarnation != r.row.Incarnation:
		return false, fmt.Errorf("%w: region %d is incarnation %d in pool %s", base.ErrStale, h.Region, r.row.Incarnation, r.row.Pool)
	}
	return c.release(b, r), nil
}

// release makes a region draining when it is held, and free otherwise.
func (c *Core) release(b *Batch, r *region) (draining bool) {
	if o, ok := c.owners[r.row.Owner]; ok && !r.row.Draining && o.row.Current.Incarnation == r.row.OwnerIncarnation {
		o.addSpan(b, r.row.Operation)
	}
	if r.held == 0 {
		c.freeExtent(b, r)
		return false
	}
	if !r.row.Draining {
		r.row.Draining = true
		r.pool.draining += r.row.Length
		c.putRegion(b, r)
		b.touch(r.pool)
		b.event(Event{Kind: EventDraining, Sessions: r.holders(), Pool: r.row.Pool, Region: r.row.ID})
	}
	return true
}

func (r *region) holders() []base.SessionID { return r.appendHolders(nil) }

func (r *region) appendHolders(out []base.SessionID) []base.SessionID {
	for s, h := range r.rows {
		if h.Held {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, compareSessions)
	return out
}

func compareSessions(x, y base.SessionID) int { return cmp.Compare(string(x[:]), string(y[:])) }

// freeExtent takes a region out of the world: nobody holds it.
func (c *Core) freeExtent(b *Batch, r *region) {
	invariants.Check(r.held == 0, "R3", "region %d is freed under %d holds", r.row.ID, r.held)
	for id := range r.rows {
		s := c.sessions[id]
		delete(s.rows, r.row.ID)
		c.holdCount--
		b.drop(bucketHolds, holdKey(id, r.row.ID))
		c.forgetIfIdle(b, s)
	}
	r.rows = nil
	if err := r.pool.extents.Free(r.row.extent()); err != nil {
		invariants.Failf("E1", "free region %d: %v", r.row.ID, err)
	}
	r.pool.regionCount--
	if r.row.Draining {
		r.pool.draining -= r.row.Length
	}
	if o, ok := c.owners[r.row.Owner]; ok {
		o.count--
		o.bytes -= r.row.Length
		delete(c.byOp, operationKey{r.row.Owner, r.row.OwnerIncarnation, r.row.Operation})
	}
	delete(c.regions, r.row.ID)
	c.ordered = nil
	b.drop(bucketRegions, regionKey(r.row.ID))
	b.touch(r.pool)
	b.event(Event{Kind: EventRegionFreed, Owners: []base.OwnerID{r.row.Owner}, Pool: r.row.Pool, Region: r.row.ID})
}

// MintRead turns a write capability into the read capability. Errors: as resolve.
func (c *Core) MintRead(h Handle) (Handle, error) {
	r, err := c.resolve(h, accessWrite)
	if err != nil {
		return Handle{}, err
	}
	return c.readHandle(r), nil
}

// Place is where a region lies, for who has a capability.
type Place struct {
	Handle    Handle
	Region    Region
	Path      string
	Kind      DeviceKind
	Coherence base.Coherence
}

func (r *region) place(h Handle) Place {
	return Place{Handle: h, Region: r.view(), Path: r.pool.row.Path, Kind: r.pool.row.Kind, Coherence: r.pool.row.Coherence}
}

// GetAccess resolves a capability. Errors: as resolve, ErrOffline.
func (c *Core) GetAccess(h Handle) (Place, error) {
	r, err := c.resolve(h, accessRead)
	if err != nil {
		return Place{}, err
	}
	if err := r.pool.usable(); err != nil {
		return Place{}, err
	}
	return r.place(h), nil
}

// regionsInOrder lists the regions by id. What it returns stays as it is when regions
// come and go.
func (c *Core) regionsInOrder() []*region {
	if len(c.ordered) != len(c.regions) {
		c.ordered = make([]*region, 0, len(c.regions))
		for _, r := range c.regions {
			c.ordered = append(c.ordered, r)
		}
		slices.SortFunc(c.ordered, func(x, y *region) int { return cmp.Compare(x.row.ID, y.row.ID) })
	}
	return c.ordered
}

// Records finds a region whose records its owner may read or clear: its writer
// is proved gone, holds it no more, or has left (writerLeft is the owner's word
// for a session that closed with exports out). Errors: ErrFenced, ErrUnproven, ErrNotFound,
// ErrDenied, ErrBusy (the writer may still write), ErrOffline.
func (c *Core) Records(who Claim, poolID base.PoolID, regionID base.RegionID, writerLeft bool) (Region, bool, error) {
	if _, err := c.owned(who); err != nil {
		return Region{}, false, err
	}
	r, ok := c.regions[regionID]
	if !ok || r.row.Pool != poolID {
		return Region{}, false, fmt.Errorf("%w: region %d in pool %s", base.ErrNotFound, regionID, poolID)
	}
	if r.row.Owner != who.Owner {
		return Region{}, false, fmt.Errorf("%w: region %d belongs to owner %s", base.ErrDenied, regionID, r.row.Owner)
	}
	if err := r.pool.usable(); err != nil {
		return Region{}, false, err
	}
	if !writerLeft && r.heldBy(r.row.Writer) {
		return Region{}, false, fmt.Errorf("%w: session %s, the writer of region %d, holds it and is not proved gone", base.ErrBusy, r.row.Writer, regionID)
	}
	return r.view(), !r.ready && !r.row.Mapped, nil
}
