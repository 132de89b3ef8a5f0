package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/session"
)

// mapped is a region's memory in this process. It lives until the core gives the region
// up (D1); whoever uses its bytes has a lease, a hold or a page of it.
type mapped struct {
	info      session.RegionInfo
	own       session.Ownership
	mapping   *mapping.Mapping
	data      []byte // the pages
	records   []byte // own shared regions: one record a page
	coherence base.Coherence
	handle    *maruv1.RegionHandle // nil: private
	segment   int                  // of the cpu pool
	exported  atomic.Int64         // RegionViews that are out
	faults    atomic.Uint32

	// registration is how the GPU reaches it; nil: through a bounce buffer.
	registration atomic.Pointer[engine.Registration]
	stuck        atomic.Bool // a lost GPU may still write to it
	stray        bool        // it was never made known to the core; under mapMu

	// marks is the page lock of the region: marks are written and cleared under it.
	marks sync.Mutex
}

func (m *mapped) page(i base.PageIndex) []byte {
	at := uint64(i) * m.info.PageBytes
	return m.data[at : at+m.info.PageBytes : at+m.info.PageBytes]
}

func (m *mapped) record(i base.PageIndex) []byte {
	at := uint64(i) * poolfmt.RecordBytes
	return m.records[at : at+poolfmt.RecordBytes : at+poolfmt.RecordBytes]
}

func (m *mapped) software() bool { return m.coherence == base.CoherenceSoftware }

// invalidate drops cached lines before bytes of another host are read.
func invalidate(b []byte) {
	// Pools that need it are refused at Open where it is not supported.
	_ = flush.Invalidate(b)
}

// region finds a mapping without a lock: the table is replaced, never changed.
func (c *Client) region(id base.RegionID) *mapped {
	return (*c.maps.Load())[id]
}

func (c *Client) setRegion(id base.RegionID, m *mapped) {
	c.mapsMu.Lock()
	defer c.mapsMu.Unlock()
	old := *c.maps.Load()
	next := make(map[base.RegionID]*mapped, len(old)+1)
	for k, v := range old {
		next[k] = v
	}
	if m == nil {
		delete(next, id)
	} else {
		next[id] = m
	}
	c.maps.Store(&next)
}

// checkPlace refuses a region whose sizes do not fit together.
func checkPlace(p *maruv1.RegionPlace) (poolfmt.Plan, error) {
	plan, err := poolfmt.PlanRegion(p.GetPageSize(), p.GetPageCount(), p.GetPieceSize())
	if err != nil {
		return plan, fmt.Errorf("place of a region: %w", err)
	}
	if plan.DataBytes != p.GetLength() || plan.TableOffset != p.GetTableOffset() || plan.ExtentBytes != p.GetExtentLength() {
		return plan, fmt.Errorf("%w: place of a region: length %d, table at %d, extent %d; %d pages of %d bytes give %d, %d, %d",
			base.ErrInvalid, p.GetLength(), p.GetTableOffset(), p.GetExtentLength(), p.GetPageCount(), p.GetPageSize(),
			plan.DataBytes, plan.TableOffset, plan.ExtentBytes)
	}
	return plan, nil
}

// mapRegion maps a held region: own ones whole and writable, others the pages only, for
// reading.
func (c *Client) mapRegion(a *maruv1.RegionAccess, poolNumber uint32, own session.Ownership) (*mapped, error) {
	plan, err := checkPlace(a.GetPlace())
	if err != nil {
		return nil, err
	}
	coherence := base.Coherence(a.GetCoherence()) //nolint:gosec // an enum
	switch {
	case coherence == base.CoherenceUnknown:
		return nil, fmt.Errorf("%w: the pool at %s has unknown coherence; allowed: hardware, software", base.ErrUnsupported, a.GetPath())
	case coherence == base.CoherenceSoftware && !flush.Supported():
		return nil, fmt.Errorf("%w: the pool at %s needs cache flushes, which this processor or build has not", base.ErrUnsupported, a.GetPath())
	}
	access, length := mapping.ReadOnly, plan.DataBytes
	if own == session.Own {
		access, length = mapping.ReadWrite, plan.ExtentBytes
	}
	x, err := dax.Open(a.GetPath(), dax.Kind(a.GetDeviceKind()), dax.OpenOptions{ReadOnly: own != session.Own}) //nolint:gosec // an enum
	if err != nil {
		return nil, err
	}
	defer func() { _ = x.Close() }()
	if align := x.AlignBytes(); length%align != 0 {
		length = min((length/align+1)*align, plan.ExtentBytes)
	}
	mem, err := x.Map(a.GetPlace().GetOffset(), length, access)
	if err != nil {
		return nil, err
	}
	m := &mapped{
		info: session.RegionInfo{
			ID: base.RegionID(a.GetHandle().GetRegionId()), PoolNumber: poolNumber, Medium: base.MediumCXL,
			Incarnation: base.Incarnation(a.GetHandle().GetIncarnation()), PageBytes: plan.PageBytes, PageCount: plan.PageCount,
		},
		own: own, mapping: mem, coherence: coherence, handle: a.GetHandle(), segment: -1,
	}
	copy(m.info.Pool[:], a.GetHandle().GetPoolId())
	all := mem.Bytes()
	m.data = all[:plan.DataBytes:plan.DataBytes]
	if own == session.Own {
		m.records = all[plan.RecordOffset : plan.RecordOffset+poolfmt.RecordBytes*plan.PageCount]
	}
	return m, nil
}

// ensureMapped maps the foreign regions of leased rows that are not mapped yet: one Hold
// for all of them, and one Describe before it where the session does not know one. Errors of single regions are reported to the
// server, which counts no hits there for this session from then on.
func (c *Client) ensureMapped(ctx context.Context, l *link, ids []base.RegionID) {
	missing := ids[:0]
	for _, id := range ids {
		if c.region(id) == nil && id < base.FirstPrivateRegion {
			missing = append(missing, id)
		}
	}
	if len(missing) == 0 {
		return
	}
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	req := &maruv1.DescribeRegionsRequest{}
	for _, id := range missing {
		if c.mappable(id) {
			req.RegionIds = append(req.RegionIds, uint32(id))
		}
	}
	if len(req.GetRegionIds()) == 0 || c.holdKnown(ctx, l, req.GetRegionIds()) {
		return
	}
	for ids := range slices.Chunk(req.GetRegionIds(), listCount) {
		req.RegionIds = ids
		c.describeAndMap(ctx, l, req)
	}
}

// mappable reports whether a region is neither mapped nor on its way out. One that could
// not be unmapped stays on its way: its hold is kept, and another one would end it.
func (c *Client) mappable(id base.RegionID) bool {
	if c.region(id) != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.mu.core.Going(id)
}

// describeAndMap is called under mapMu.
func (c *Client) describeAndMap(ctx context.Context, l *link, req *maruv1.DescribeRegionsRequest) {
	cctx, cancel := c.control(ctx, l)
	resp, err := l.api.DescribeRegions(cctx, req)
	cancel()
	if err != nil {
		c.failed(l, err)
		c.limited.warn(c.log, "regions of other writers cannot be described; their keys are misses", "error", err)
		return
	}
	c.known.keep(l, resp.GetRegions())
	var found []*maruv1.SharedRegion
	for _, r := range resp.GetRegions() {
		switch {
		case r.GetProblem().GetCode() != 0:
			c.unreachable(ctx, l, r.GetPoolNumber(), base.RegionID(r.GetHandle().GetRegionId()),
				base.Errorf(base.Code(r.GetProblem().GetCode()), r.GetProblem().GetText()))
		case c.mappable(base.RegionID(r.GetHandle().GetRegionId())):
			found = append(found, r)
		}
	}
	if len(found) == 0 {
		return
	}
	for some := range slices.Chunk(found, listCount) {
		c.holdAndMap(ctx, l, some)
	}
}

// holdKnown holds and maps regions that this session knows without asking the server. It
// reports false, and has done nothing, when it does not know all of them, or the resource
// manager refuses: a region may be gone, which the server says. Called under mapMu.
func (c *Client) holdKnown(ctx context.Context, l *link, ids []uint32) bool {
	found := c.known.find(l, ids)
	if len(found) == 0 {
		return false
	}
	accesses, err := c.manager.hold(ctx, l, handlesOf(found))
	if err != nil && !away(err) && !rpc.OutcomeUnknown(err) {
		return false
	}
	c.mapHeld(ctx, l, found, accesses, err)
	return true
}

// holdAndMap is called under mapMu.
func (c *Client) holdAndMap(ctx context.Context, l *link, found []*maruv1.SharedRegion) {
	accesses, err := c.manager.hold(ctx, l, handlesOf(found))
	c.mapHeld(ctx, l, found, accesses, err)
}

// mapHeld takes the answer to a hold: accesses, or why there are none.
func (c *Client) mapHeld(ctx context.Context, l *link, found []*maruv1.SharedRegion, accesses []*maruv1.RegionAccess, err error) {
	if err != nil && len(found) > 1 {
		// All or nothing: one that drains must not hide the others.
		for _, r := range found {
			if a, err := c.manager.hold(ctx, l, handlesOf([]*maruv1.SharedRegion{r})); err == nil {
				c.addForeign(ctx, l, r, a[0])
			} else {
				c.unreachable(ctx, l, r.GetPoolNumber(), base.RegionID(r.GetHandle().GetRegionId()), err)
			}
		}
		return
	}
	if err != nil {
		c.unreachable(ctx, l, found[0].GetPoolNumber(), base.RegionID(found[0].GetHandle().GetRegionId()), err)
		return
	}
	for i, r := range found {
		c.addForeign(ctx, l, r, accesses[i])
	}
}

func handlesOf(regions []*maruv1.SharedRegion) []*maruv1.RegionHandle {
	out := make([]*maruv1.RegionHandle, len(regions))
	for i, r := range regions {
		out[i] = r.GetHandle()
	}
	return out
}

func (c *Client) addForeign(ctx context.Context, l *link, r *maruv1.SharedRegion, a *maruv1.RegionAccess) {
	id := base.RegionID(r.GetHandle().GetRegionId())
	if code := a.GetProblem().GetCode(); code != 0 {
		c.unholdOne(ctx, r.GetHandle())
		c.unreachable(ctx, l, r.GetPoolNumber(), id, base.Errorf(base.Code(code), a.GetProblem().GetText()))
		return
	}
	m, err := c.mapRegion(a, r.GetPoolNumber(), session.Foreign)
	if err == nil {
		if m.info.ID != id {
			err = fmt.Errorf("%w: region %d was held, %d was asked for", base.ErrInvalid, m.info.ID, id)
		} else if err = c.addRegion(m, session.Foreign); err == nil {
			return
		}
	}
	c.discard(ctx, m, r.GetHandle())
	c.unreachable(ctx, l, r.GetPoolNumber(), id, err)
}

// unreachable tells the server that a region cannot be read here.
func (c *Client) unreachable(ctx context.Context, l *link, poolNumber uint32, id base.RegionID, why error) {
	c.limited.warn(c.log, "a region cannot be used here; its keys are misses for this session", "region", id, "error", why)
	ctx, cancel := c.control(ctx, l)
	defer cancel()
	if _, err := l.api.ReportUnreachable(ctx, &maruv1.ReportUnreachableRequest{
		PoolNumber: poolNumber, RegionId: uint32(id), Reason: why.Error(),
	}); err != nil {
		c.failed(l, err)
	}
	if away(why) || rpc.OutcomeUnknown(why) {
		// Not for good: with the domains proved again the server counts hits there again.
		c.mu.Lock()
		c.mu.unproved, c.mu.unprepared = true, true
		c.mu.prepareNot = time.Now().Add(c.heartbeatEvery(l))
		c.mu.Unlock()
	}
}

// growAgain is how long a refused growth answers for the allocations behind it.
const growAgain = time.Second

// grow asks for one more cxl region when none has a free page. It reports whether a page
// may be free now.
func (c *Client) grow(ctx context.Context) bool {
	if c.cfg.AutoExpand == Off || !c.cfg.wantsCXL() || !c.writes(base.MediumCXL) {
		return false
	}
	m, ok := c.growOne(ctx)
	if m != nil {
		c.announce(m)
	}
	return ok
}

func (c *Client) growOne(ctx context.Context) (*mapped, bool) {
	c.growMu.Lock()
	defer c.growMu.Unlock()
	c.mu.Lock()
	n := c.mu.core.CountMedium(base.MediumCXL)
	c.mu.Unlock()
	if n.Available > 0 {
		return nil, true // another allocation was first
	}
	if time.Now().Before(c.growNot) {
		return nil, false
	}
	l := c.current()
	if l == nil {
		return nil, false
	}
	bytes := c.cfg.ExpandBytes
	if n.Regions == 0 {
		bytes = c.cfg.RegionBytes
	}
	if limit := c.cfg.CXLBytes; limit != 0 {
		if n.Bytes >= limit || limit-n.Bytes < c.cfg.pageBytes() {
			c.growNot = time.Now().Add(growAgain)
			return nil, false
		}
		bytes = min(bytes, limit-n.Bytes)
	}
	m, err := c.expandCXL(ctx, l, bytes)
	if err != nil {
		c.growNot = time.Now().Add(growAgain)
		c.limited.warn(c.log, "no further region: stores are skipped while all pages are in use", "bytes", bytes, "error", err)
		return nil, false
	}
	return m, true
}

// finishGrowth asks again for a cxl region whose answer was lost. While nobody does, its
// operation stays open, and a session that only reads would run out of operations behind
// it: every Acquire would be refused.
func (c *Client) finishGrowth(l *link) {
	lost := func() (bytes uint64, ok bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.mu.core.LostExpand(base.MediumCXL)
	}
	if _, ok := lost(); !ok {
		return
	}
	c.growMu.Lock()
	var m *mapped
	if bytes, ok := lost(); ok && !time.Now().Before(c.growNot) {
		var err error
		if m, err = c.expandCXL(c.ctx, l, bytes); err != nil {
			c.growNot = time.Now().Add(growAgain)
		}
	}
	c.growMu.Unlock()
	if m != nil {
		c.announce(m)
	}
}

func (c *Client) writes(m base.Medium) bool {
	for _, w := range c.cfg.WriteOrder {
		if w == m {
			return true
		}
	}
	return false
}

// expand makes one Expand call. One whose outcome is open is repeated as the same
// operation, at once and by the next call of the kind, so that its region is not lost.
func (c *Client) expand(ctx context.Context, l *link, medium base.Medium, bytes uint64) (*maruv1.ExpandResponse, error) {
	c.mu.Lock()
	e, err := c.mu.core.BeginExpand(medium, bytes, l.serverEpoch)
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	req := &maruv1.ExpandRequest{
		Operation: uint64(e.Sequence), Medium: maruv1.Medium(medium), Bytes: e.Bytes, PageSize: c.cfg.pageBytes(), PieceSize: c.cfg.PieceBytes,
	}
	var resp *maruv1.ExpandResponse
	for range 2 {
		cctx, cancel := c.control(ctx, l)
		resp, err = l.api.Expand(cctx, req)
		cancel()
		if !rpc.OutcomeUnknown(err) {
			break
		}
	}
	c.mu.Lock()
	end := c.mu.core.EndExpand(e, rpc.OutcomeUnknown(err), err)
	c.mu.Unlock()
	if err != nil {
		c.failed(l, err)
	}
	return resp, end
}

// expandCXL gets, holds, maps and offers one more own region. Called under growMu.
func (c *Client) expandCXL(ctx context.Context, l *link, bytes uint64) (*mapped, error) {
	resp, err := c.expand(ctx, l, base.MediumCXL, bytes)
	if err != nil {
		return nil, err
	}
	m, err := c.mapOwn(ctx, l, resp)
	if err != nil {
		id := base.RegionID(resp.GetHandle().GetRegionId())
		c.unreachable(ctx, l, resp.GetPoolNumber(), id, err)
		c.giveBack(ctx, l, session.RegionInfo{ID: id, Pool: poolOf(resp.GetHandle()), PoolNumber: resp.GetPoolNumber(), Medium: base.MediumCXL})
		return nil, err
	}
	if c.cfg.Prefault != Off {
		c.prefault(m)
	}
	return m, nil
}

func (c *Client) mapOwn(ctx context.Context, l *link, resp *maruv1.ExpandResponse) (*mapped, error) {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	accesses, err := c.manager.hold(ctx, l, []*maruv1.RegionHandle{resp.GetHandle()})
	if err != nil {
		return nil, err
	}
	a := accesses[0]
	if code := a.GetProblem().GetCode(); code != 0 {
		err = base.Errorf(base.Code(code), a.GetProblem().GetText())
	}
	var m *mapped
	if err == nil {
		m, err = c.mapRegion(a, resp.GetPoolNumber(), session.Own)
	}
	if err == nil {
		if want := c.cfg.pageBytes(); m.info.ID != base.RegionID(resp.GetHandle().GetRegionId()) {
			err = fmt.Errorf("%w: region %d was held, %d was asked for", base.ErrInvalid, m.info.ID, resp.GetHandle().GetRegionId())
		} else if m.info.PageBytes < want {
			err = fmt.Errorf("%w: the region has pages of %d bytes, %d are needed", base.ErrInvalid, m.info.PageBytes, want)
		} else {
			err = c.addRegion(m, session.Own)
		}
	}
	if err != nil {
		c.discard(ctx, m, resp.GetHandle())
		return nil, err
	}
	return m, nil
}

// addRegion makes a mapping known. The table comes first: the core may hand out its
// pages at once.
func (c *Client) addRegion(m *mapped, own session.Ownership) error {
	c.setRegion(m.info.ID, m)
	c.mu.Lock()
	err := c.mu.core.AddRegion(m.info, own)
	c.mu.Unlock()
	if err != nil {
		c.setRegion(m.info.ID, nil)
		if m.segment >= 0 {
			err = errors.Join(err, c.unregister(m)) // a device that was opened meanwhile may have seen it
		}
		return err
	}
	c.registerLater(m)
	return nil
}

// giveBack returns a region that could not be used. The server is told until it has heard.
func (c *Client) giveBack(ctx context.Context, l *link, info session.RegionInfo) {
	c.mu.Lock()
	c.mu.core.GiveBack(info)
	c.mu.Unlock()
	c.flushReturns(ctx, l)
}

// flushReturns tells the server which of its regions are not used. What fails is said again
// with the next heartbeat.
func (c *Client) flushReturns(ctx context.Context, l *link) {
	for ctx.Err() == nil {
		c.mu.Lock()
		r, ok := c.mu.core.BeginReturn(l.epoch)
		c.mu.Unlock()
		if !ok {
			return
		}
		cctx, cancel := c.control(ctx, l)
		_, err := l.api.Return(cctx, &maruv1.ReturnRequest{Operation: uint64(r.Sequence), PoolNumber: r.PoolNumber, RegionId: uint32(r.Region)})
		cancel()
		c.mu.Lock()
		heard := c.mu.core.EndReturn(r, rpc.OutcomeUnknown(err), err)
		c.mu.Unlock()
		if !heard {
			c.limited.warn(c.log, "returning a region failed; it is tried again", "region", r.Region, "error", err)
			c.failed(l, err)
			return
		}
	}
}

func poolOf(h *maruv1.RegionHandle) (id base.PoolID) {
	copy(id[:], h.GetPoolId())
	return id
}

func (c *Client) announce(m *mapped) {
	if c.cfg.OnRegion != nil {
		c.cfg.OnRegion(m.info.ID, m.info.PageCount)
	}
}

// prefault touches a region's pages while it serves. One goroutine touches one region
// after the other.
func (c *Client) prefault(m *mapped) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.touch = append(c.mu.touch, m)
	if len(c.mu.touch) == 1 {
		c.wg.Go(c.touchAll)
	}
}

func (c *Client) touchAll() {
	for {
		c.mu.Lock()
		m := c.mu.touch[0]
		c.mu.Unlock()
		err := m.mapping.Populate(c.ctx, 1)
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, base.ErrClosed) {
			c.limited.warn(c.log, "touching memory ahead failed; its pages are touched when they are used", "region", m.info.ID, "error", err)
		}
		c.mu.Lock()
		c.mu.touch = c.mu.touch[1:]
		last := len(c.mu.touch) == 0
		c.mu.Unlock()
		if last {
			return
		}
	}
}
