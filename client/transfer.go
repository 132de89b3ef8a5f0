package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/session"
)

var storeWorks = sync.Pool{New: func() any { return new(storeWork) }}
var loadWorks = sync.Pool{New: func() any { return new(loadWork) }}

// Store copies objects into pages and publishes them. codes has one an item: OK,
// AlreadyStored, Full (skipped), Unknown, Unavailable, Fault, Invalid. Errors: ErrInvalid
// when codes is too short, ErrClosed.
func (c *Client) Store(ctx context.Context, items []StoreItem, codes []base.Code) error {
	return c.StoreAfter(ctx, items, codes, 0)
}

// StoreAfter is Store of blocks that the engine writes in stream s: they are read behind
// what is in it now. Errors: also ErrUnsupported for a stream that is being captured.
func (c *Client) StoreAfter(ctx context.Context, items []StoreItem, codes []base.Code, s Stream) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if len(codes) < len(items) {
		return fmt.Errorf("%w: %d items, %d codes", base.ErrInvalid, len(items), len(codes))
	}
	a, err := c.order(s, func(i int) LayoutID { return items[i].Layout }, len(items))
	if err != nil {
		return err
	}
	defer a.forget()
	c.store(ctx, items, codes, &a, nil)
	return nil
}

// largest is the most bytes that one object of this client has.
func (c *Client) largest() uint64 {
	if c.cfg.Opaque {
		return c.cfg.PageBytes
	}
	return c.cfg.ValueBytes
}

// measure returns the bytes of an item's memory, and its layout, which the caller gives
// back. Errors: ErrInvalid, ErrNotFound.
func (c *Client) measure(runs [][]byte, id LayoutID, blocks []uint32) (size uint64, l *layout, err error) {
	if id == 0 {
		for _, r := range runs {
			size += uint64(len(r))
		}
		return size, nil, nil
	}
	if len(runs) > 0 {
		return 0, nil, fmt.Errorf("%w: an item has runs and layout %d", base.ErrInvalid, id)
	}
	if l = c.useLayout(id); l == nil {
		return 0, nil, fmt.Errorf("%w: layout %d", base.ErrNotFound, id)
	}
	if size, err = l.sizeOf(blocks); err != nil {
		l.users.Done()
		return 0, nil, err
	}
	return size, l, nil
}

// store stores the items. copied, which may be nil, is called once nothing reads their
// memory any more: what comes then is the server's.
func (c *Client) store(ctx context.Context, items []StoreItem, codes []base.Code, a *after, copied func()) {
	began := time.Now()
	s := storeWorks.Get().(*storeWork)
	s.c, s.items, s.tasks, s.keys = c, items, s.tasks[:0], s.keys[:0]
	defer func() {
		for i := range s.tasks {
			if s.tasks[i].layout != nil {
				s.tasks[i].layout.users.Done()
			}
		}
		s.items = nil
		storeWorks.Put(s)
	}()
	for i := range items {
		size, l, err := c.measure(items[i].Runs, items[i].Layout, items[i].Blocks)
		if err == nil && (size == 0 || size > c.largest() || items[i].Key.IsZero()) {
			err = fmt.Errorf("%w: key %s with %d bytes", base.ErrInvalid, items[i].Key, size)
			if l != nil {
				l.users.Done()
			}
		}
		if err == nil {
			if err = l.takes(a); err != nil {
				c.count.storesFailed.Add(1)
				l.users.Done()
			}
		}
		if err != nil {
			codes[i] = base.CodeOf(err)
			continue
		}
		s.tasks = append(s.tasks, storeTask{item: i, length: size, layout: l})
		s.keys = append(s.keys, items[i].Key[:]...)
	}
	c.skipStored(ctx, s, codes)
	c.placePages(ctx, s, codes)
	c.transfers.each(s, len(s.tasks))
	c.saveOnDevice(s, a)
	if copied != nil {
		copied()
	}

	b := commits.Get().(*commitBatch)
	defer b.put()
	for i := range s.tasks {
		t := &s.tasks[i]
		if t.code != base.CodeOK {
			codes[t.item] = c.failedCopy(t)
			continue
		}
		it := &items[t.item]
		b.add(t.item, session.Commit{
			Key: it.Key, Parent: it.Parent, Region: t.ref.Region, Index: t.ref.Index, Length: t.length, Checksum: t.sum,
		})
	}
	c.commit(ctx, b, codes)
	for i := range s.tasks {
		t := &s.tasks[i]
		switch codes[t.item] {
		case base.CodeOK, base.CodeRetired:
			c.count.stores.Add(1)
			c.count.storeBytes.Add(t.length)
		case base.CodeAlreadyStored:
			c.count.storesAlready.Add(1)
		default:
			c.count.storesFailed.Add(1)
		}
	}
	c.count.storeNanos.Add(int64(time.Since(began)))
}

// filter keeps the tasks that keep wants, in their order.
func (s *storeWork) filter(keep func(i int, t *storeTask) bool) {
	kept := 0
	for i := range s.tasks {
		t := &s.tasks[i]
		if keep(i, t) {
			s.tasks[kept] = *t
			kept++
		} else if t.layout != nil {
			t.layout.users.Done()
		}
	}
	s.tasks = s.tasks[:kept]
}

// skipStored asks which keys can be read already: those are not stored again.
func (c *Client) skipStored(ctx context.Context, s *storeWork, codes []base.Code) {
	if len(s.tasks) == 0 {
		return
	}
	n := len(s.tasks)
	if cap(s.probe) < n {
		s.probe = make([]byte, n)
	}
	s.probe = s.probe[:n]
	l := c.current()
	code := base.CodeUnavailable
	for first := 0; l != nil && first < n; first += hot.MaxKeys {
		last := min(first+hot.MaxKeys, n)
		q := ProbeQuery{Keys: s.keys[first*base.KeyBytes : last*base.KeyBytes]}
		if _, err := c.probeOnce(ctx, l, q, nil, s.probe[first:last]); err != nil {
			l, code = nil, base.CodeOf(err)
			if epochOver(err) {
				code = base.CodeUnavailable
			}
		}
	}
	s.filter(func(i int, t *storeTask) bool {
		switch {
		case l == nil:
			codes[t.item] = code
			c.count.storesFailed.Add(1)
			return false
		case hot.Verdict(s.probe[i]).Status() == hot.Hit:
			codes[t.item] = base.CodeAlreadyStored
			c.count.storesAlready.Add(1)
			return false
		}
		return true
	})
}

// placePages gives every task a page by write order. Those without are skipped: the hits
// stay (POL-07).
func (c *Client) placePages(ctx context.Context, s *storeWork, codes []base.Code) {
	placed := c.place(ctx, len(s.tasks), func(i int, ref session.PageRef) { s.tasks[i].ref = ref })
	s.filter(func(i int, t *storeTask) bool {
		if i < placed {
			return true
		}
		codes[t.item] = base.CodeFull
		c.count.storesFull.Add(1)
		return false
	})
}

// Load copies objects, or parts, out of the store and verifies them. codes has one an
// item: OK, Miss, Corrupt, Fault, Invalid. Except with OK the destination's content is
// undefined; for a Miss that was known before the copy it is untouched. Errors:
// ErrInvalid when codes is too short, ErrClosed.
func (c *Client) Load(ctx context.Context, items []LoadItem, codes []base.Code) error {
	return c.LoadAfter(ctx, items, codes, 0)
}

// LoadAfter is Load into blocks that the engine may still read or write in stream s: they
// are written behind what is in it now. Errors: also ErrUnsupported for a stream that is
// being captured.
func (c *Client) LoadAfter(ctx context.Context, items []LoadItem, codes []base.Code, s Stream) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if len(codes) < len(items) {
		return fmt.Errorf("%w: %d items, %d codes", base.ErrInvalid, len(items), len(codes))
	}
	a, err := c.order(s, func(i int) LayoutID { return items[i].Layout }, len(items))
	if err != nil {
		return err
	}
	defer a.forget()
	c.load(ctx, items, codes, &a)
	return nil
}

func (c *Client) load(ctx context.Context, items []LoadItem, codes []base.Code, a *after) {
	began := time.Now()
	s := loadWorks.Get().(*loadWork)
	s.c, s.items = c, items
	for next := 0; next < len(items); {
		s.tasks, s.keys = s.tasks[:0], s.keys[:0]
		for ; next < len(items) && len(s.tasks) < acquireLimit; next++ {
			it := &items[next]
			size, l, err := c.measure(it.Runs, it.Layout, it.Blocks)
			if err == nil && (size == 0 || it.Key.IsZero()) {
				err = fmt.Errorf("%w: key %s with %d bytes", base.ErrInvalid, it.Key, size)
				if l != nil {
					l.users.Done()
				}
			}
			if err == nil {
				if err = l.takes(a); err != nil {
					l.users.Done()
				}
			}
			if err != nil {
				codes[next] = base.CodeOf(err)
				if errors.Is(err, base.ErrFault) {
					codes[next] = base.CodeMiss // the store is well, the device is not
				}
				continue
			}
			s.tasks = append(s.tasks, loadTask{item: next, size: size, layout: l, code: base.CodeMiss})
			s.keys = append(s.keys, it.Key[:]...)
		}
		if len(s.tasks) > 0 {
			c.loadLeased(ctx, s, a)
		}
		for i := range s.tasks {
			t := &s.tasks[i]
			if t.layout != nil {
				t.layout.users.Done()
			}
			codes[t.item] = t.code
			if t.code == base.CodeOK {
				c.count.loads.Add(1)
				c.count.loadBytes.Add(t.size)
			}
		}
	}
	s.items = nil
	loadWorks.Put(s)
	c.count.loadNanos.Add(int64(time.Since(began)))
}

// loadLeased loads what one Acquire takes. Nothing of it is handed out unless the
// session was good when the last byte was read, or the server confirmed the leases; bytes
// that no root covers need the confirmation, because the clock of another machine says
// nothing about a writer there (docs/PROTOCOL.md, "Session validity").
func (c *Client) loadLeased(ctx context.Context, s *loadWork, a *after) {
	l := c.current()
	if l == nil {
		c.count.missesAway.Add(uint64(len(s.tasks)))
		return
	}
	if !c.Connected() {
		// Whatever is copied now is thrown away.
		c.count.missesExpired.Add(uint64(len(s.tasks)))
		return
	}
	s.got.batch = &s.batch
	if err := c.acquire(ctx, l, &s.got, base.LeaseCopy, hot.ModeEach, s.keys); err != nil {
		c.notLeased(base.LeaseCopy, len(s.tasks), err)
		return
	}
	c.transfers.each(s, len(s.tasks))
	c.loadOnDevice(s, a)
	now := c.clock()
	confirm := false
	for i := range s.tasks {
		t := &s.tasks[i]
		// Now: with the lease goes the region.
		t.unsure = t.code == base.CodeOK && c.needsConfirm(l, s, i)
		confirm = confirm || t.unsure || t.code == base.CodeCorrupt
	}
	c.mu.Lock()
	valid := c.mu.core.Valid(now) && c.mu.core.Epoch() == s.batch.Epoch && c.mu.core.ServerEpoch() == s.batch.ServerEpoch
	c.mu.Unlock()
	var held []byte
	if confirm && valid {
		held = c.confirmRelease(ctx, l, s)
	}
	c.mu.Lock()
	c.mu.core.ReleaseBatch(&s.batch)
	c.mu.Unlock()
	c.kick()
	for i := range s.tasks {
		t := &s.tasks[i]
		confirmed := i < len(held) && held[i] == 1
		switch {
		case t.code == base.CodeOK && !valid, t.code == base.CodeOK && t.unsure && !confirmed:
			c.count.missesExpired.Add(1)
			t.code = base.CodeMiss
		case t.code == base.CodeCorrupt && !confirmed:
			// The lease may have ended under the copy: the page may hold another object.
			c.count.missesExpired.Add(1)
			t.code = base.CodeMiss
		case t.code == base.CodeDenied:
			c.countMiss(t.code, s.keys.At(i))
			t.code = base.CodeMiss
		case t.code == base.CodeFault:
			c.countMiss(t.code, s.keys.At(i))
			c.faultIn(l, s.got.rows[i].Region)
		default:
			c.countMiss(t.code, s.keys.At(i))
		}
	}
}

// needsConfirm reports whether item i was copied without a root over it from memory that
// others write.
func (c *Client) needsConfirm(l *link, s *loadWork, i int) bool {
	if i >= len(s.got.rows) {
		return false
	}
	m := c.region(s.got.rows[i].Region)
	return m == nil || !m.info.Private() && !c.summed(m) || !l.sameBoot && !c.summed(m)
}

// confirmRelease releases every lease of a batch now and returns the server's word on
// each: 1 when it was in force. nil: no answer.
func (c *Client) confirmRelease(ctx context.Context, l *link, s *loadWork) []byte {
	s.release = s.release[:0]
	for i := range s.tasks {
		s.release = append(s.release, session.Release{Acquire: s.batch.Sequence, First: uint32(i), Count: 1}) //nolint:gosec // a row
	}
	held, err := c.release(ctx, l, s.release)
	if err != nil {
		c.failed(l, err)
		return nil
	}
	c.mu.Lock()
	for i := range s.batch.Rows {
		c.mu.core.ConfirmRow(&s.batch, i)
	}
	c.mu.Unlock()
	return held
}

// faultIn counts the faults of a region; from the third on the server is asked to count
// no hits there for this session.
func (c *Client) faultIn(l *link, id base.RegionID) {
	m := c.region(id)
	if m == nil || m.info.Private() || m.faults.Add(1) != 3 {
		return
	}
	c.unreachable(c.ctx, l, m.info.PoolNumber, id, fmt.Errorf("%w: three reads of region %d", base.ErrFault, id))
}
