package client

import (
	"context"
	"fmt"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/cpu"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/session"
)

// makeCPU reserves the private pool: address space and descriptors, no memory yet.
func (c *Client) makeCPU() error {
	if c.cfg.CPUBytes == 0 {
		return nil
	}
	o := cpu.Options{SizeBytes: c.cpuBytes(), SegmentBytes: c.cfg.SegmentBytes, HugePages: c.cfg.CPUHugePages, NUMANode: c.cfg.CPUNUMANode}
	if c.cfg.Overcommit == On {
		o.Overcommit = cpu.OvercommitAllow
	}
	pool, err := cpu.New(o)
	if err != nil {
		return err
	}
	c.cpu = pool
	c.mu.segmentRegion = make([]base.RegionID, len(pool.Segments()))
	return nil
}

// cpuBytes is CPUBytes up to the next page of what the pool is made of.
func (c *Client) cpuBytes() uint64 {
	granule := max(pageAlignBytes, c.cfg.CPUHugePages.GranuleBytes())
	return (c.cfg.CPUBytes + granule - 1) / granule * granule
}

// cpuGrant is what is asked of the server's budget: whole pages of all segments.
func (c *Client) cpuGrant() uint64 {
	if c.cpu == nil {
		return 0
	}
	var n uint64
	for _, s := range c.cpu.Segments() {
		n += s.SizeBytes() / c.cfg.PageBytes * c.cfg.PageBytes
	}
	return n
}

// cxlGrant is what is asked of the server's budget. The configured sizes are usable
// bytes; the server counts extents, with their tables and alignment.
func (c *Client) cxlGrant() uint64 {
	if c.cfg.CXLBytes == 0 {
		return 0
	}
	extent := func(bytes uint64) uint64 {
		plan, err := poolfmt.PlanRegion(c.cfg.PageBytes, (bytes+c.cfg.PageBytes-1)/c.cfg.PageBytes, c.cfg.PieceBytes)
		if err != nil {
			return bytes
		}
		return plan.ExtentBytes
	}
	first := min(c.cfg.RegionBytes, c.cfg.CXLBytes)
	rest := c.cfg.CXLBytes - first
	grant := extent(first) + rest/c.cfg.ExpandBytes*extent(c.cfg.ExpandBytes)
	if last := rest % c.cfg.ExpandBytes; last >= c.cfg.PageBytes {
		grant += extent(last)
	}
	return grant
}

// prepare gets what the configuration wants and is not there: the proof of the domains,
// a private region for each cpu segment, the first cxl region. What cannot be had now is
// tried again; the first error is returned.
func (c *Client) prepare(ctx context.Context) error {
	l := c.current()
	if l == nil {
		return fmt.Errorf("%w: no session is open", base.ErrUnavailable)
	}
	if c.cfg.Role == base.RoleScheduler {
		c.mu.Lock()
		c.mu.unprepared = false
		c.mu.Unlock()
		return nil
	}
	added, err := c.prepareMemory(ctx)
	for _, m := range added {
		c.announce(m)
	}
	if err != nil {
		// What was refused is refused again for a while, and asking is not free: an Expand
		// whose region cannot be held makes events, which wake this again.
		c.mu.Lock()
		c.mu.unprepared, c.mu.prepareNot = true, time.Now().Add(c.heartbeatEvery(l))
		c.mu.Unlock()
	}
	return err
}

func (c *Client) prepareMemory(ctx context.Context) (added []*mapped, first error) {
	c.growMu.Lock()
	defer c.growMu.Unlock()
	l := c.current() // under the lock: whoever had it may have waited for the next epoch
	if l == nil {
		return nil, fmt.Errorf("%w: no session is open", base.ErrUnavailable)
	}
	c.mu.Lock()
	c.mu.unprepared = false
	if c.mu.unproved {
		c.mu.unproved, l.proved = false, false
	}
	pools := make([]pool, 0, len(c.mu.pools))
	for _, p := range c.mu.pools {
		pools = append(pools, p)
	}
	cxl := c.mu.core.CountMedium(base.MediumCXL)
	c.mu.Unlock()
	keep := func(err error) {
		if err != nil && first == nil {
			first = err
		}
	}
	keep(c.proveDomains(ctx, l, pools))
	for i := range c.cpuSegments() {
		m, err := c.grantSegment(ctx, l, i)
		keep(err)
		if err != nil {
			break
		}
		if m != nil {
			added = append(added, m)
		}
	}
	if c.cfg.wantsCXL() && c.writes(base.MediumCXL) && cxl.Regions == 0 {
		m, err := c.expandCXL(ctx, l, c.cfg.RegionBytes)
		if err != nil {
			keep(fmt.Errorf("the first cxl region of %d bytes: %w", c.cfg.RegionBytes, err))
			c.growNot = time.Now().Add(growAgain)
			c.limited.warn(c.log, "no cxl region; it is asked for again", "bytes", c.cfg.RegionBytes, "error", err)
		} else {
			added = append(added, m)
		}
	}
	if c.cfg.EagerMap == On {
		c.mapMu.Lock()
		c.describeAndMap(ctx, l, &maruv1.DescribeRegionsRequest{AllOfNamespace: true})
		c.mapMu.Unlock()
	}
	return added, first
}

func (c *Client) cpuSegments() int {
	if c.cpu == nil {
		return 0
	}
	return len(c.cpu.Segments())
}

// grantSegment registers a segment as a private region, unless it is one.
func (c *Client) grantSegment(ctx context.Context, l *link, i int) (*mapped, error) {
	c.mu.Lock()
	taken := c.mu.segmentRegion[i] != 0
	c.mu.Unlock()
	seg := c.cpu.Segments()[i]
	pages := seg.SizeBytes() / c.cfg.PageBytes
	if taken || pages == 0 {
		return nil, nil
	}
	resp, err := c.expand(ctx, l, base.MediumCPU, pages*c.cfg.PageBytes)
	if err != nil {
		return nil, fmt.Errorf("the grant for %d bytes of cpu memory: %w", pages*c.cfg.PageBytes, err)
	}
	m := &mapped{
		info: session.RegionInfo{
			ID: base.RegionID(resp.GetHandle().GetRegionId()), PoolNumber: resp.GetPoolNumber(), Medium: base.MediumCPU,
			PageBytes: c.cfg.PageBytes, PageCount: min(pages, resp.GetPlace().GetPageCount()), ServerEpoch: l.serverEpoch,
		},
		own: session.Own, mapping: seg, data: seg.Bytes(), coherence: base.CoherenceHardware, segment: i,
	}
	if m.info.ID < base.FirstPrivateRegion || resp.GetPlace().GetPageSize() != c.cfg.PageBytes || m.info.PageCount == 0 {
		return nil, fmt.Errorf("%w: Expand of cpu memory answered region %d with %d pages of %d bytes", base.ErrInvalid,
			m.info.ID, resp.GetPlace().GetPageCount(), resp.GetPlace().GetPageSize())
	}
	c.mu.Lock()
	c.mu.segmentRegion[i] = m.info.ID
	c.mu.Unlock()
	if err := c.addRegion(m, session.Own); err != nil {
		c.mu.Lock()
		c.mu.segmentRegion[i] = 0
		c.mu.Unlock()
		return nil, err
	}
	if c.cfg.Prefault != Off {
		c.prefault(m)
	}
	return m, nil
}

// proveDomains proves the shared pools, so that this session's probes count hits there.
func (c *Client) proveDomains(ctx context.Context, l *link, pools []pool) error {
	if !c.cfg.wantsCXL() || l.proved {
		return nil
	}
	var first error
	proved := 0
	for _, p := range pools {
		if p.private || p.medium != base.MediumCXL {
			continue
		}
		if err := c.manager.prove(ctx, l, p.id); err != nil {
			c.limited.warn(c.log, "a pool cannot be reached from this process; its keys are misses", "pool", p.id, "error", err)
			if first == nil {
				first = fmt.Errorf("proving pool %s: %w", p.id, err)
			}
			continue
		}
		proved++
	}
	if proved == 0 {
		return first
	}
	cctx, cancel := c.control(ctx, l)
	defer cancel()
	if _, err := l.api.ProveDomains(cctx, &maruv1.ProveDomainsRequest{}); err != nil {
		c.failed(l, err)
		return fmt.Errorf("proving domains: %w", err)
	}
	l.proved = first == nil
	c.known.begin(l)
	c.kick()
	return first
}

// refill is prepare for the background: its errors are logged where they happen.
func (c *Client) refill() {
	c.mu.Lock()
	want := c.mu.unprepared && !time.Now().Before(c.mu.prepareNot)
	c.mu.Unlock()
	if want && c.current() != nil {
		_ = c.prepare(c.ctx)
	}
}
