package client

import (
	"context"
	"fmt"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/session"
)

// Alloc fills dst with n pages that are the caller's to write. It is local unless a
// region is missing. It returns how many it got. Errors: ErrFull with fewer than n,
// ErrInvalid when dst is shorter than n.
func (c *Client) Alloc(ctx context.Context, n int, dst []Page) (int, error) {
	if err := c.enter(ctx); err != nil {
		return 0, err
	}
	defer c.leave()
	if n < 0 || n > len(dst) {
		return 0, fmt.Errorf("%w: %d pages for a list of %d", base.ErrInvalid, n, len(dst))
	}
	got := c.place(ctx, n, func(i int, ref session.PageRef) {
		dst[i] = Page{Region: ref.Region, Index: ref.Index, Bytes: c.region(ref.Region).page(ref.Index)}
	})
	if got < n {
		return got, fmt.Errorf("%w: %d of %d pages; %s", base.ErrFull, got, n, c.whyFull())
	}
	return got, nil
}

// place takes n pages by write order and hands them to use, under mu. A medium that can
// grow is grown before the next one is tried. It returns how many there were.
func (c *Client) place(ctx context.Context, n int, use func(i int, ref session.PageRef)) int {
	first, all := c.cfg.WriteOrder, c.cfg.WriteOrder
	for i, m := range all {
		if m == base.MediumCXL && c.cfg.AutoExpand != Off {
			first = all[:i+1]
		}
	}
	got := 0
	take := func(order []base.Medium) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for got < n {
			ref, _, ok := c.mu.core.Alloc(order)
			if !ok {
				return false
			}
			use(got, ref)
			got++
		}
		return true
	}
	for !take(first) {
		if !c.grow(ctx) {
			take(all)
			break
		}
	}
	return got
}

func (c *Client) whyFull() string {
	c.mu.Lock()
	n := c.mu.core.Count()
	c.mu.Unlock()
	return fmt.Sprintf("%d pages in %d regions: %d ready, %d written, %d retiring, %d quarantined",
		n.Pages, n.Regions, n.Ready, n.Writing+n.Committing, n.Retiring, n.Quarantined)
}

// FreePage gives a page back that Alloc gave out. Errors: ErrInvalid for a page that is
// not being written (a double free, or a stored page: Delete its key), ErrNotFound for
// a region that is not ours.
func (c *Client) FreePage(region base.RegionID, index base.PageIndex) error {
	if err := c.enter(context.Background()); err != nil {
		return err
	}
	defer c.leave()
	c.mu.Lock()
	err := c.mu.core.FreePage(region, index)
	c.mu.Unlock()
	c.kick()
	return err
}

// CommitPages publishes pages that were written in place. codes has one an item: OK;
// AlreadyStored (the first value stays, the page is free); Unknown (no answer, the page
// is quarantined until there is one); Fault (the page is quarantined); anything else:
// refused, the page is free. Only with Invalid and NotFound, which name a page that
// Alloc did not give out, nothing changes. Errors: ErrInvalid when codes is too short,
// ErrClosed, and that of a context that has ended before the call; with one nothing has
// changed, and the pages are the caller's still.
func (c *Client) CommitPages(ctx context.Context, items []CommitItem, codes []base.Code) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if len(codes) < len(items) {
		return fmt.Errorf("%w: %d items, %d codes", base.ErrInvalid, len(items), len(codes))
	}
	b := commits.Get().(*commitBatch)
	defer b.put()
	seen := make(map[session.PageRef]struct{}, len(items))
	for i := range items {
		it := &items[i]
		ref := session.PageRef{Region: it.Region, Index: it.Index}
		c.mu.Lock()
		err := c.mu.core.CheckWriting(it.Region, it.Index, it.Length)
		c.mu.Unlock()
		if _, twice := seen[ref]; err == nil && twice {
			err = fmt.Errorf("%w: page %d of region %d is twice in the batch", base.ErrInvalid, it.Index, it.Region)
		}
		if err == nil && !c.cfg.Opaque && leafListAt(it.Length)+checksum.LeafBytes*uint64(checksum.PieceCount(it.Length, int(c.cfg.PieceBytes))) > c.cfg.PageBytes {
			err = fmt.Errorf("%w: length %d leaves no room for the leaf list in a page of %d", base.ErrInvalid, it.Length, c.cfg.PageBytes)
		}
		if err != nil {
			codes[i] = base.CodeOf(err)
			continue
		}
		seen[ref] = struct{}{}
		sum, err := c.sumPage(it)
		if err != nil {
			codes[i] = c.faulted(it.Region, it.Index)
			continue
		}
		b.add(i, session.Commit{Key: it.Key, Parent: it.Parent, Region: it.Region, Index: it.Index, Length: it.Length, Checksum: sum})
	}
	c.commit(ctx, b, codes)
	return nil
}

// sumPage computes the checksum of a page that was written in place, and writes the leaf
// list of an engine object behind its data.
func (c *Client) sumPage(it *CommitItem) (sum uint64, err error) {
	m := c.region(it.Region)
	page := m.page(it.Index)
	if !c.summed(m) {
		return 0, nil
	}
	seed := checksum.Seed(c.namespace, it.Key)
	err = mapping.Guard(func() {
		if c.cfg.Opaque {
			sum = checksum.Sum(page[:it.Length], int(c.cfg.PieceBytes), seed)
			return
		}
		leaves := leafLists.Get().(*[]uint64)
		*leaves = checksum.Leaves((*leaves)[:0], page[:it.Length], int(c.cfg.PieceBytes), seed)
		writeLeaves(page[leafListAt(it.Length):], *leaves)
		sum = checksum.Root(*leaves, it.Length, seed)
		leafLists.Put(leaves)
	})
	return sum, err
}

// summed reports whether what is written to a region gets a checksum.
func (c *Client) summed(m *mapped) bool { return c.cfg.Checksums != Off || m.software() }

// faulted quarantines a page whose memory faults.
func (c *Client) faulted(region base.RegionID, index base.PageIndex) base.Code {
	c.mu.Lock()
	c.mu.core.FaultPage(region, index)
	c.mu.Unlock()
	c.count.faults.Add(1)
	c.limited.warn(c.log, "memory of the pool faults; the page is quarantined until its region goes back", "region", region, "page", index)
	return base.CodeFault
}

// commitBatch is the scratch of one batch of Commits.
type commitBatch struct {
	items []session.Commit
	at    []int // [i]: the place in the caller's codes
	rows  []hot.CommitRow
	pack  hot.CommitRows
	gens  []base.Generation
	refs  []session.PageRef
}

var commits = sync.Pool{New: func() any { return new(commitBatch) }}
var leafLists = sync.Pool{New: func() any { return new([]uint64) }}

func (b *commitBatch) add(at int, it session.Commit) {
	b.items = append(b.items, it)
	b.at = append(b.at, at)
}

func (b *commitBatch) put() {
	b.items, b.at, b.refs = b.items[:0], b.at[:0], b.refs[:0]
	commits.Put(b)
}

// drop takes item i out of the batch.
func (b *commitBatch) drop(i int) {
	last := len(b.items) - 1
	b.items[i], b.at[i] = b.items[last], b.at[last]
	b.items, b.at = b.items[:last], b.at[:last]
}

// commit publishes the pages of a batch and fills in their codes: bodies of the records,
// visibility barrier, Commit, marks (docs/PROTOCOL.md section 2, order of writes).
func (c *Client) commit(ctx context.Context, b *commitBatch, codes []base.Code) {
	l := c.current()
	if l == nil {
		c.giveUp(b, codes, base.CodeUnavailable)
		return
	}
	c.writeBodies(b, codes)
	items, at := b.items, b.at
	for len(items) > 0 {
		n := min(len(items), hot.MaxKeys)
		c.commitChunk(ctx, l, b, items[:n], at[:n], codes)
		items, at = items[n:], at[n:]
	}
}

// giveUp frees the pages of a batch that was not sent.
func (c *Client) giveUp(b *commitBatch, codes []base.Code, code base.Code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range b.items {
		_ = c.mu.core.FreePage(b.items[i].Region, b.items[i].Index)
		codes[b.at[i]] = code
	}
}

// writeBodies writes the records' bodies behind the data and makes both visible in the
// domain. Pages that fault leave the batch.
func (c *Client) writeBodies(b *commitBatch, codes []base.Code) {
	b.gens = b.gens[:0]
	c.mu.Lock()
	for i := range b.items {
		g, _ := c.mu.core.GenerationOf(b.items[i].Region, b.items[i].Index)
		b.gens = append(b.gens, g)
	}
	c.mu.Unlock()
	for i := len(b.items) - 1; i >= 0; i-- {
		it := &b.items[i]
		m := c.region(it.Region)
		if m == nil || m.records == nil {
			continue
		}
		var body [poolfmt.RecordBytes]byte
		err := poolfmt.EncodeRecord(body[:], poolfmt.Place{Pool: m.info.Pool, Region: it.Region, Page: it.Index}, poolfmt.Record{
			Key: it.Key, Checksum: it.Checksum, Incarnation: m.info.Incarnation, Counter: b.gens[i].Counter(), Length: it.Length,
		})
		if err == nil {
			err = mapping.Guard(func() {
				record := m.record(it.Index)
				copy(record[poolfmt.BodyOffset:], body[poolfmt.BodyOffset:])
				if m.software() {
					end := leafListAt(it.Length)
					if !c.cfg.Opaque {
						end += checksum.LeafBytes * uint64(checksum.PieceCount(it.Length, int(c.cfg.PieceBytes))) //nolint:gosec // a piece
					}
					page := m.page(it.Index)
					_ = flush.WriteBack(page[:min(end, uint64(len(page)))], record) // supported, or mapRegion had refused
				}
			})
		}
		if err != nil {
			codes[b.at[i]] = c.faulted(it.Region, it.Index)
			b.drop(i)
		}
	}
}

func (c *Client) commitChunk(ctx context.Context, l *link, b *commitBatch, items []session.Commit, at []int, codes []base.Code) {
	if cap(b.rows) < len(items) {
		b.rows = make([]hot.CommitRow, len(items))
	}
	rows := b.rows[:len(items)]
	req := hot.CommitRequest{Namespace: l.namespace}
	c.mu.Lock()
	seq, err := c.mu.core.BeginCommit(items, rows)
	req.Sequence, req.Watermark = seq, c.mu.core.Watermark()
	if err == nil && c.link.Load() != l {
		// Another epoch began meanwhile; its server has not seen this.
		c.mu.core.RefuseCommit(seq)
		c.mu.Unlock()
		for i := range at {
			codes[at[i]] = base.CodeUnavailable
		}
		return
	}
	c.mu.Unlock()
	if err != nil {
		code := base.CodeOf(err)
		c.mu.Lock()
		for i := range items {
			_ = c.mu.core.FreePage(items[i].Region, items[i].Index)
			codes[at[i]] = code
		}
		c.mu.Unlock()
		return
	}
	b.pack = b.pack[:0]
	for i := range rows {
		b.pack = hot.AppendCommitRow(b.pack, &rows[i])
	}
	req.Rows = b.pack
	settled := true
	d, err := l.hot.call(ctx, hot.OpCommit, c.cfg.RPCTimeout,
		func(dst []byte, id uint64) []byte { return hot.AppendCommit(dst, id, &req) },
		func(payload []byte) error {
			results, err := hot.DecodeCommitAnswer(payload)
			if err != nil {
				return err
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			b.refs = append(b.refs[:0], c.mu.core.Refs(seq)...)
			settled = c.mu.core.EndCommit(seq, results)
			for i := range at {
				codes[at[i]] = base.CodeUnknown
				if i < results.Len() && settled {
					codes[at[i]] = results.At(i).Code
				}
			}
			return nil
		})
	switch {
	case err == nil:
		if settled {
			c.mark(b.refs, l)
		} else {
			c.count.unknown.Add(uint64(len(at)))
		}
		c.kick()
		return
	case d == answered && session.Refused(err):
		c.mu.Lock()
		c.mu.core.RefuseCommit(seq)
		c.mu.Unlock()
		for i := range at {
			codes[at[i]] = base.CodeOf(err)
		}
	case d == notSent:
		c.mu.Lock()
		c.mu.core.RefuseCommit(seq)
		c.mu.Unlock()
		for i := range at {
			codes[at[i]] = base.CodeUnavailable
		}
	default:
		c.mu.Lock()
		c.mu.core.LoseCommit(seq)
		c.mu.Unlock()
		for i := range at {
			codes[at[i]] = base.CodeUnknown
		}
		c.count.unknown.Add(uint64(len(at)))
		c.kick()
	}
	c.failed(l, err)
}

// mark writes the marks of pages that are READY, under their regions' page locks, with
// one fence a region.
func (c *Client) mark(refs []session.PageRef, l *link) {
	if now := c.current(); now != nil {
		l = now // opened again since: the page was not READY when that epoch looked for unmarked ones
	}
	for first := 0; first < len(refs); {
		n := first + 1
		for n < len(refs) && refs[n].Region == refs[first].Region {
			n++
		}
		c.markRegion(refs[first:n], l)
		first = n
	}
}

func (c *Client) markRegion(refs []session.PageRef, l *link) {
	m := c.region(refs[0].Region)
	if m == nil || m.info.Private() {
		return
	}
	m.marks.Lock()
	defer m.marks.Unlock()
	if m.records == nil {
		return
	}
	for _, ref := range refs {
		c.mu.Lock()
		order, ok := c.mu.core.MayMark(ref, l.epoch, l.serverEpoch)
		c.mu.Unlock()
		if ok {
			c.writeMark(m, ref, order)
		}
	}
}

// writeMark is called under m.marks.
func (c *Client) writeMark(m *mapped, ref session.PageRef, order base.CommitOrder) bool {
	err := mapping.Guard(func() {
		record := m.record(ref.Index)
		storeMark(record, order)
		if m.software() {
			_ = flush.WriteBack(record)
		}
	})
	if err != nil {
		c.count.faults.Add(1)
		c.limited.warn(c.log, "the mark of a page cannot be written", "region", ref.Region, "page", ref.Index, "error", err)
	}
	return err == nil
}

// clearMarks clears the marks of pages that were retired, then tells the core.
func (c *Client) clearMarks(refs []session.PageRef) {
	for _, ref := range refs {
		m := c.region(ref.Region)
		done := true
		if m != nil {
			m.marks.Lock()
			if m.records != nil {
				done = c.writeMark(m, ref, 0)
			}
			m.marks.Unlock()
		}
		c.mu.Lock()
		c.mu.core.Cleared(ref, done)
		c.mu.Unlock()
	}
}

// RegionView returns bytes of a region that is mapped: own ones are writable, others
// read-only. Ownership: valid until as many ReleaseRegionView of the region, or to the
// end of the process: a Close before leaves the session LEFT. Errors: ErrNotFound,
// ErrInvalid.
func (c *Client) RegionView(region base.RegionID, offset, size uint64) (b []byte, writable bool, err error) {
	if err := c.enter(context.Background()); err != nil {
		return nil, false, err
	}
	defer c.leave()
	c.mu.Lock()
	held := c.mu.core.Hold(region)
	c.mu.Unlock()
	m := c.region(region)
	if held && m == nil {
		c.unhold(region)
	}
	if !held || m == nil {
		return nil, false, fmt.Errorf("%w: region %d is not mapped here", base.ErrNotFound, region)
	}
	if offset > uint64(len(m.data)) || size > uint64(len(m.data))-offset {
		c.unhold(region)
		return nil, false, fmt.Errorf("%w: %d bytes at %d of region %d, which has %d", base.ErrInvalid, size, offset, region, len(m.data))
	}
	m.exported.Add(1)
	return m.data[offset : offset+size : offset+size], m.own == session.Own, nil
}

// ReleaseRegionView takes one RegionView back; its bytes are not to be used any more.
func (c *Client) ReleaseRegionView(region base.RegionID) error {
	if err := c.enter(context.Background()); err != nil {
		return err
	}
	defer c.leave()
	m := c.region(region)
	if m == nil || m.exported.Add(-1) < 0 {
		if m != nil {
			m.exported.Add(1)
		}
		return fmt.Errorf("%w: no view of region %d is out", base.ErrNotFound, region)
	}
	c.unhold(region)
	return nil
}

func (c *Client) unhold(region base.RegionID) {
	c.mu.Lock()
	c.mu.core.Unhold(region)
	c.mu.Unlock()
	c.kick()
}

// RegionPageCount returns the page count of a region that is owned or mapped. Errors:
// ErrNotFound.
func (c *Client) RegionPageCount(region base.RegionID) (uint64, error) {
	if m := c.region(region); m != nil {
		return m.info.PageCount, nil
	}
	return 0, fmt.Errorf("%w: region %d is not mapped here", base.ErrNotFound, region)
}

// RegionPageBytes returns the page size of a region that is owned or mapped. Errors:
// ErrNotFound.
func (c *Client) RegionPageBytes(region base.RegionID) (uint64, error) {
	if m := c.region(region); m != nil {
		return m.info.PageBytes, nil
	}
	return 0, fmt.Errorf("%w: region %d is not mapped here", base.ErrNotFound, region)
}

// OwnedRegions returns the regions whose pages this client allocates, oldest first.
func (c *Client) OwnedRegions() []base.RegionID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.core.OwnRegions(nil)
}
