package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/session"
)

// acquireLimit is how many leases one Acquire takes: many threads at once stay below the
// session's bound.
const acquireLimit = 256

// limitTries are the attempts to get leases past the session's bound: those that other
// threads have are given back within moments, and the server hears of it later than we do.
const limitTries = 8

// acquired is the answer to one Acquire.
type acquired struct {
	batch *session.Batch
	rows  []hot.AcquireRow
	sizes []byte // packed manifest sizes
	ids   []base.RegionID
}

// acquire leases keys, one manifest each, and maps what they need. Rows whose lease is
// not held are misses: batch.Rows[i].Region is 0. The error says why all are.
func (c *Client) acquire(ctx context.Context, l *link, a *acquired, kind base.LeaseKind, mode hot.Mode, keys hot.Keys) error {
	for try := 0; ; try++ {
		err := c.acquireOnce(ctx, l, a, kind, mode, keys)
		if err == nil || try == limitTries || !errors.Is(err, base.ErrLimit) {
			return err
		}
		c.mu.Lock()
		coming := c.mu.core.LeasesComeBack()
		c.mu.Unlock()
		if !coming && try > 0 {
			return err // all are views': only their owners end them
		}
		c.flushReleases(ctx, l)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Millisecond << try):
		}
	}
}

// notLeased counts keys that are misses because no lease was had, and says why if it is
// not known already.
func (c *Client) notLeased(kind base.LeaseKind, keys int, err error) {
	count := uint64(keys) //nolint:gosec // positive
	if away(err) || epochOver(err) {
		c.count.missesAway.Add(count)
		return
	}
	c.count.missesRefused.Add(count)
	c.limited.warn(c.log, "leases were refused; their keys are misses", "kind", kind, "error", err)
}

func (c *Client) acquireOnce(ctx context.Context, l *link, a *acquired, kind base.LeaseKind, mode hot.Mode, keys hot.Keys) error {
	n := keys.Len()
	a.rows, a.sizes, a.ids = a.rows[:0], a.sizes[:0], a.ids[:0]
	for range n {
		a.sizes = hot.AppendManifestSize(a.sizes, 1)
	}
	req := hot.AcquireRequest{Namespace: l.namespace, Kind: kind, Mode: mode, ManifestSizes: a.sizes, Keys: keys}
	before := *c.maps.Load()
	c.mu.Lock()
	err := c.mu.core.BeginAcquire(a.batch, kind, n)
	req.Sequence, req.Watermark = a.batch.Sequence, c.mu.core.Watermark()
	c.mu.Unlock()
	if err != nil {
		return err
	}
	d, err := l.hot.call(ctx, hot.OpAcquire, c.cfg.RPCTimeout,
		func(dst []byte, id uint64) []byte { return hot.AppendAcquire(dst, id, &req) },
		func(payload []byte) error {
			var answer hot.AcquireAnswer
			if err := hot.DecodeAcquireAnswer(payload, &answer); err != nil {
				return err
			}
			if answer.Rows.Len() > n {
				return fmt.Errorf("%w: %d rows for %d keys", base.ErrInvalid, answer.Rows.Len(), n)
			}
			c.mu.Lock()
			current := c.mu.core.EndAcquire(a.batch, answer.Rows)
			c.mu.Unlock()
			if !current {
				return nil
			}
			for i := range answer.Rows.Len() {
				a.rows = append(a.rows, answer.Rows.At(i))
			}
			return nil
		})
	if err != nil {
		c.mu.Lock()
		if d == notSent || d == answered && session.Refused(err) {
			c.mu.core.RefuseAcquire(a.batch)
		} else {
			c.mu.core.LoseAcquire(a.batch)
		}
		c.mu.Unlock()
		c.kick()
		c.failed(l, err)
		return err
	}
	for i := range a.rows {
		if i >= len(a.batch.Rows) || a.batch.Rows[i].Region == 0 {
			continue // no lease: a miss, or its region is on its way out
		}
		if id := a.rows[i].Region; c.region(id) == nil {
			known := false
			for _, have := range a.ids {
				known = known || have == id
			}
			if !known {
				a.ids = append(a.ids, id)
			}
		}
	}
	if len(a.ids) > 0 {
		c.ensureMapped(ctx, l, a.ids)
	}
	if err := c.confirmMapped(ctx, l, kind, a, before); err != nil {
		c.mu.Lock()
		c.mu.core.ReleaseBatch(a.batch)
		c.mu.Unlock()
		a.rows = a.rows[:0]
		c.kick()
		c.failed(l, err)
		return err
	}
	return nil
}

// confirmMapped shows that the session lives, with its leases, now that the holds of their
// regions are on record (session.MustConfirm); before is what was mapped when the Acquire
// was sent.
func (c *Client) confirmMapped(ctx context.Context, l *link, kind base.LeaseKind, a *acquired, before map[base.RegionID]*mapped) error {
	mapper := session.Unwatched
	if l.provable.Load() {
		mapper = session.Watched
	}
	if !session.MustConfirm(kind, mapper) || !slices.ContainsFunc(a.rows, func(row hot.AcquireRow) bool {
		return row.Verdict.Status() == hot.Hit && row.Region < base.FirstPrivateRegion && c.region(row.Region) != before[row.Region]
	}) {
		return nil
	}
	if err := c.heartbeat(ctx, l, l.api, c.heartbeatEvery(l)); err != nil {
		return fmt.Errorf("leases are not confirmed after the hold of their regions: %w", err)
	}
	return nil
}

// leased returns the memory of row i, nil for a miss: no lease, or no mapping. Bounds
// are checked against the region (DM-14).
func (c *Client) leased(a *acquired, i int) (*mapped, []byte, base.Code) {
	if i >= len(a.rows) || i >= len(a.batch.Rows) || a.batch.Rows[i].Region == 0 {
		return nil, nil, base.CodeMiss
	}
	row := &a.rows[i]
	m := c.region(row.Region)
	if m == nil {
		return nil, nil, base.CodeDenied
	}
	if row.Length == 0 || row.Offset%m.info.PageBytes != 0 || row.Length > m.info.PageBytes || row.Offset >= uint64(len(m.data)) {
		return nil, nil, base.CodeInvalid
	}
	return m, m.page(base.PageIndex(row.Offset / m.info.PageBytes)), base.CodeOK //nolint:gosec // inside data
}

// Retrieve fills out with one view a key; ID 0 is a miss. Errors: ErrInvalid,
// ErrClosed, ErrUnsupported for a client without views.
func (c *Client) Retrieve(ctx context.Context, keys hot.Keys, mode hot.Mode, out []View) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if err := c.checkViews(keys, mode, len(out)); err != nil {
		return err
	}
	n := keys.Len()
	clear(out[:n])
	return c.eachView(ctx, keys, mode, func(first int, a *acquired, i int) bool {
		m, page, code := c.leased(a, i)
		if code == base.CodeOK {
			code = c.verifyView(m, page, &a.rows[i], keys.At(first+i))
		}
		if code != base.CodeOK {
			c.countMiss(code, keys.At(first+i))
			return false
		}
		row := &a.rows[i]
		c.mu.Lock()
		id := c.mu.core.AddView(a.batch, i)
		c.mu.Unlock()
		if id == 0 {
			c.countMiss(base.CodeMiss, keys.At(first+i))
			return false
		}
		out[first+i] = View{
			ID: id, Bytes: page[:row.Length:row.Length], Region: row.Region,
			Index: base.PageIndex(row.Offset / m.info.PageBytes), //nolint:gosec // inside the region
		}
		return true
	})
}

func (c *Client) checkViews(keys hot.Keys, mode hot.Mode, room int) error {
	switch {
	case len(keys)%base.KeyBytes != 0:
		return fmt.Errorf("%w: %d bytes of keys; a key has %d", base.ErrInvalid, len(keys), base.KeyBytes)
	case room < keys.Len():
		return fmt.Errorf("%w: %d keys, room for %d answers", base.ErrInvalid, keys.Len(), room)
	case mode > hot.ModePrefix:
		return fmt.Errorf("%w: mode %d; allowed: each, prefix", base.ErrInvalid, mode)
	case c.cfg.Views != On:
		return fmt.Errorf("%w: this client was opened without views", base.ErrUnsupported)
	}
	return nil
}

// eachView takes view leases on keys and calls use for each row that the server
// answered; a lease that use does not want is given back.
func (c *Client) eachView(ctx context.Context, keys hot.Keys, mode hot.Mode, use func(first int, a *acquired, i int) bool) error {
	n := keys.Len()
	for first := 0; first < n; first += acquireLimit {
		l := c.current()
		if l == nil {
			c.count.missesAway.Add(uint64(n - first))
			return nil
		}
		last := min(first+acquireLimit, n)
		a := acquired{batch: &session.Batch{}} // lives as long as its views
		part := keys[first*base.KeyBytes : last*base.KeyBytes]
		if err := c.acquire(ctx, l, &a, base.LeaseView, mode, part); err != nil {
			c.notLeased(base.LeaseView, n-first, err)
			return nil
		}
		hits := 0
		for i := range part.Len() {
			stop := mode == hot.ModePrefix && hits < i
			if !stop && use(first, &a, i) {
				hits++
				continue
			}
			c.mu.Lock()
			c.mu.core.ReleaseRow(a.batch, i)
			c.mu.Unlock()
			c.kick()
		}
		if mode == hot.ModePrefix && hits < part.Len() {
			return nil
		}
	}
	return nil
}

// verifyView checks a view's bytes where that is asked for: always on software-coherent
// pools, whose lines are dropped first.
func (c *Client) verifyView(m *mapped, page []byte, row *hot.AcquireRow, key base.Key) base.Code {
	if c.cfg.ViewChecksums != On && !m.software() {
		return base.CodeOK
	}
	good := false
	err := mapping.Guard(func() {
		if m.software() && m.own != session.Own {
			_ = flush.Invalidate(page[:row.Length]) // supported, or mapRegion had refused
		}
		good = checksum.VerifySum(page[:row.Length], int(c.cfg.PieceBytes), checksum.Seed(c.namespace, key), row.Checksum)
	})
	switch {
	case err != nil:
		return base.CodeFault
	case !good:
		return base.CodeCorrupt
	}
	return base.CodeOK
}

// countMiss counts why a key was not handed out.
func (c *Client) countMiss(code base.Code, key base.Key) {
	switch code {
	case base.CodeOK:
	case base.CodeCorrupt:
		c.count.corrupt.Add(1)
		c.limited.warn(c.log, "bytes do not match their checksum; the object is deleted", "key", key)
		c.reportCorrupt(key)
	case base.CodeFault:
		c.count.faults.Add(1)
		c.limited.warn(c.log, "memory of the pool faults; the key is a miss", "key", key)
	case base.CodeDenied:
		c.count.missesUnmapped.Add(1)
	default:
		c.count.misses.Add(1)
	}
}

// ReleaseViews ends view leases. It never blocks; unknown ids are ignored.
func (c *Client) ReleaseViews(ids []uint64) {
	if len(ids) == 0 {
		return
	}
	c.mu.Lock()
	for _, id := range ids {
		c.mu.core.ReleaseView(id)
	}
	c.mu.Unlock()
	c.kick()
}

// Pin takes a view lease on each key, or counts one up that this client has. codes: OK
// or why not; in hot.ModePrefix everything behind the first miss is a Miss.
func (c *Client) Pin(ctx context.Context, keys hot.Keys, mode hot.Mode, codes []base.Code) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if err := c.checkViews(keys, mode, len(codes)); err != nil {
		return err
	}
	n := keys.Len()
	var missing hot.Keys
	var at []int
	c.mu.Lock()
	for i := range n {
		codes[i] = base.CodeMiss
		key := keys.At(i)
		if mode == hot.ModeEach && c.mu.core.Repin(key) {
			codes[i] = base.CodeOK
			continue
		}
		missing = append(missing, key[:]...)
		at = append(at, i)
	}
	c.mu.Unlock()
	return c.eachView(ctx, missing, mode, func(first int, a *acquired, i int) bool {
		if _, _, code := c.leased(a, i); code != base.CodeOK {
			c.countMiss(code, missing.At(first+i))
			return false
		}
		c.mu.Lock()
		pinned := c.mu.core.Pin(missing.At(first+i), a.batch, i)
		c.mu.Unlock()
		if !pinned {
			c.countMiss(base.CodeMiss, missing.At(first+i))
			return false
		}
		codes[at[first+i]] = base.CodeOK
		return true
	})
}

// Unpin counts down; the last one ends the lease. codes: OK, or NotFound for a key that
// this client has not pinned.
func (c *Client) Unpin(ctx context.Context, keys hot.Keys, codes []base.Code) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if len(keys)%base.KeyBytes != 0 || len(codes) < keys.Len() {
		return fmt.Errorf("%w: %d bytes of keys, %d codes", base.ErrInvalid, len(keys), len(codes))
	}
	c.mu.Lock()
	for i := range keys.Len() {
		codes[i] = base.CodeNotFound
		if c.mu.core.Unpin(keys.At(i)) {
			codes[i] = base.CodeOK
		}
	}
	c.mu.Unlock()
	c.kick()
	return nil
}
