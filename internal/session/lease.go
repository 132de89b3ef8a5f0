package session

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/invariants"
)

// Batch is the leases of one Acquire. Ownership: the caller's, who may use it for
// another Acquire once every lease of it has been released.
type Batch struct {
	Sequence    base.Sequence
	Epoch       base.Epoch
	ServerEpoch base.ServerEpoch
	Kind        base.LeaseKind
	Rows        []LeaseRow
	live        int
}

// LeaseRow is one lease, named by its place in the batch.
type LeaseRow struct {
	Region     base.RegionID // 0: no lease, a miss
	Pool       uint32
	Offset     uint64
	Generation base.Generation
	// unlisted: the session was opened again before the region was mapped, and listed what it
	// held without this lease. A server that had no hold of ours on its list would not have
	// recorded it, and did not wait for us before it let pages of the region go.
	unlisted bool
}

// Live returns how many leases of the batch are out.
func (b *Batch) Live() int { return b.live }

// Release is leases that the server is to be told of.
type Release struct {
	Acquire base.Sequence
	First   uint32
	Count   uint32
	// Closes: the Acquire had no answer and its operation ends with this release.
	Closes bool
}

type viewRef struct {
	batch *Batch
	row   int
	owner *pin
}

type pin struct {
	count int
	view  uint64
}

// BeginAcquire numbers an Acquire of n keys. Errors: ErrUnavailable, ErrLimit when the
// session's leases would be passed (max_leases).
func (c *Core) BeginAcquire(b *Batch, kind base.LeaseKind, n int) error {
	if c.phase != Live && c.phase != Relisting {
		return fmt.Errorf("%w: the session is %s", base.ErrUnavailable, c.phase)
	}
	if c.leases+n > c.cfg.MaxLeases {
		return fmt.Errorf("%w: %d leases are out and %d more are asked for; max_leases is %d", base.ErrLimit, c.leases, n, c.cfg.MaxLeases)
	}
	seq, err := c.ledger.begin()
	if err != nil {
		return err
	}
	*b = Batch{Sequence: seq, Epoch: c.epoch, ServerEpoch: c.serverEpoch, Kind: kind, Rows: b.Rows[:0]}
	c.leases += n // charged until the answer says how many
	b.live = n
	return nil
}

// EndAcquire takes the answer. It returns false for one of an older epoch, which is
// thrown away as a whole: everything is a miss. Regions that are not mapped yet get a
// place, so that no drain passes between lease and mapping.
func (c *Core) EndAcquire(b *Batch, rows hot.AcquireRows) bool {
	c.leases -= b.live
	b.live = 0
	if b.Epoch != c.epoch || b.ServerEpoch != c.serverEpoch {
		// Opening again ended its leases or, at the same server, they are released by name.
		c.forgetAcquire(b)
		return false
	}
	for i := range rows.Len() {
		row := rows.At(i)
		lr := LeaseRow{}
		if row.Verdict.Status() == hot.Hit {
			lr = LeaseRow{Region: row.Region, Pool: row.Pool, Offset: row.Offset, Generation: row.Generation}
			r := c.regions[row.Region]
			if r == nil {
				r = &region{RegionInfo: RegionInfo{ID: row.Region, PoolNumber: row.Pool}, own: Foreign}
				c.regions[row.Region] = r
			}
			if r.mode == going {
				// Its mapping is on its way out: give the lease back, it is a miss.
				c.releases = append(c.releases, Release{Acquire: b.Sequence, First: uint32(i), Count: 1}) //nolint:gosec // a row
				lr = LeaseRow{}
			} else {
				c.use(r)
				if b.Kind == base.LeaseView {
					r.views++
				}
				b.live++
			}
		}
		b.Rows = append(b.Rows, lr)
	}
	c.leases += b.live
	c.ledger.end(b.Sequence)
	if b.live > 0 {
		c.book[b.Sequence] = b
	}
	return true
}

// Mapper is how the server knows that a session's process has ended.
type Mapper uint8

// Mappers.
const (
	Unwatched Mapper = iota // by what the resource manager says of its holds
	Watched                 // the server watches it itself
)

// MustConfirm reports whether leases of a kind count only once a heartbeat that was sent
// after the hold of their regions was given has been acknowledged in the Acquire's epoch. A
// server that does not watch the process takes a session that is silent and holds nothing
// for one that has let go of everything; a process that was stopped between the Acquire
// and its first hold can be that session, and its clock need not tell (R3, R4). Copies are
// judged when their last byte was read.
func MustConfirm(kind base.LeaseKind, m Mapper) bool { return kind == base.LeaseView && m == Unwatched }

// LoseAcquire says that an Acquire has no answer, or has one that cannot be used: what
// it may have leased is released by name, and until then its operation stays open.
func (c *Core) LoseAcquire(b *Batch) {
	c.leases -= b.live
	b.live = 0
	c.forgetAcquire(b)
}

func (c *Core) forgetAcquire(b *Batch) {
	if b.ServerEpoch != c.serverEpoch {
		c.ledger.end(b.Sequence) // that server is gone, and its leases with it
		return
	}
	c.releases = append(c.releases, Release{Acquire: b.Sequence, Count: hot.ReleaseAll, Closes: true})
}

// RefuseAcquire says that an Acquire was refused whole: nothing is leased.
func (c *Core) RefuseAcquire(b *Batch) {
	c.leases -= b.live
	b.live = 0
	c.ledger.end(b.Sequence)
}

// ReleaseRow ends lease i of a batch here and queues it for the server. A row without a
// lease, or one that was released, changes nothing.
func (c *Core) ReleaseRow(b *Batch, i int) {
	if i >= len(b.Rows) || b.Rows[i].Region == 0 || b.live == 0 {
		return
	}
	c.dropRow(b, i)
	if n := len(c.releases); n > 0 {
		if last := &c.releases[n-1]; last.Acquire == b.Sequence && !last.Closes && last.First+last.Count == uint32(i) { //nolint:gosec // a row
			last.Count++
			return
		}
	}
	c.releases = append(c.releases, Release{Acquire: b.Sequence, First: uint32(i), Count: 1}) //nolint:gosec // a row
}

// ConfirmRow ends lease i here after the server has confirmed its release. When the
// session was opened again since the Acquire, the snapshot of that may have listed the
// lease after the release was done, or at another server: it is released again.
func (c *Core) ConfirmRow(b *Batch, i int) {
	if b.Epoch != c.epoch || b.ServerEpoch != c.serverEpoch {
		c.ReleaseRow(b, i)
		return
	}
	if i < len(b.Rows) && b.Rows[i].Region != 0 && b.live > 0 {
		c.dropRow(b, i)
	}
}

func (c *Core) dropRow(b *Batch, i int) {
	r, row := c.regions[b.Rows[i].Region], b.Rows[i]
	b.Rows[i].Region = 0
	b.live--
	c.leases--
	invariants.Check(c.leases >= 0 && b.live >= 0, "R4", "leases %d, of the batch %d", c.leases, b.live)
	if b.live == 0 {
		delete(c.book, b.Sequence)
	}
	if r == nil {
		return
	}
	if b.Kind == base.LeaseView {
		r.views--
		invariants.Check(r.views >= 0, "R4", "region %d: %d views", r.ID, r.views)
		if i, p := r.pageAt(row.Offset); p != nil && p.gen == row.Generation {
			c.tryFree(r, i, p)
		}
	}
	c.unuse(r)
}

// ReleaseBatch ends every lease of a batch.
func (c *Core) ReleaseBatch(b *Batch) {
	for i := range b.Rows {
		c.ReleaseRow(b, i)
	}
}

// TakeReleases moves up to most queued releases to dst. There are none while the
// snapshot is on its way: a release that overtakes it would find no lease, which the list
// then records, and nobody would ever end. RelistDone is when to ask again.
func (c *Core) TakeReleases(dst []Release, most int) []Release {
	if c.phase == Relisting {
		return dst
	}
	n := min(most, len(c.releases))
	dst = append(dst, c.releases[:n]...)
	c.releases = c.releases[:copy(c.releases, c.releases[n:])]
	return dst
}

// Released takes the answer of a Release that was asked at a server epoch; with
// answered false it goes into the queue again, unless that server is gone.
func (c *Core) Released(rows []Release, server base.ServerEpoch, answered bool) {
	for _, r := range rows {
		if !answered && server == c.serverEpoch {
			c.releases = append(c.releases, r)
		} else if r.Closes {
			c.ledger.end(r.Acquire)
		}
	}
}

// Pending returns how much waits for the server: releases, acknowledgements, and regions
// to give back.
func (c *Core) Pending() int {
	return len(c.releases) + len(c.cleared) + len(c.reclaimed) + len(c.returns)
}

// LeasesComeBack reports whether leases are out, or given back and not told, that end
// without the owner of a view.
func (c *Core) LeasesComeBack() bool {
	views := 0
	for _, b := range c.book {
		if b.Kind == base.LeaseView {
			views += b.live
		}
	}
	return len(c.releases) > 0 || c.leases > views
}

// Leases returns how many leases are out.
func (c *Core) Leases() int { return c.leases }

// AddView gives lease i of a view batch a name that is never used again. 0: nothing
// protects the page any more, since the session was opened again while the region was
// being mapped; the caller gives the lease back.
func (c *Core) AddView(b *Batch, i int) uint64 {
	if b.Rows[i].unlisted {
		return 0
	}
	c.lastView++
	c.views[c.lastView] = viewRef{batch: b, row: i}
	return c.lastView
}

// ReleaseView ends a view. It reports whether the name was known.
func (c *Core) ReleaseView(id uint64) bool {
	v, ok := c.views[id]
	if !ok || v.owner != nil {
		return false
	}
	delete(c.views, id)
	c.ReleaseRow(v.batch, v.row)
	return true
}

// Views returns how many views are out, and how many keys are pinned.
func (c *Core) Views() (views, pins int) { return len(c.views) - len(c.pins), len(c.pins) }

// Repin counts a pin of a key up when this client has one.
func (c *Core) Repin(key base.Key) bool {
	p := c.pins[key]
	if p == nil {
		return false
	}
	p.count++
	return true
}

// Pin makes lease i of a view batch the pin of a key. A pin that another thread took
// meanwhile is counted up and the lease given back. False: as AddView's 0.
func (c *Core) Pin(key base.Key, b *Batch, i int) bool {
	if c.Repin(key) {
		c.ReleaseRow(b, i)
		return true
	}
	id := c.AddView(b, i)
	if id == 0 {
		return false
	}
	p := &pin{count: 1, view: id}
	v := c.views[id]
	v.owner = p
	c.views[id] = v
	c.pins[key] = p
	return true
}

// Unpin counts down; the last one ends the lease. False: not pinned here.
func (c *Core) Unpin(key base.Key) bool {
	p := c.pins[key]
	if p == nil {
		return false
	}
	if p.count--; p.count > 0 {
		return true
	}
	c.dropPin(key, p)
	return true
}

func (c *Core) dropPin(key base.Key, p *pin) {
	v := c.views[p.view]
	delete(c.pins, key)
	delete(c.views, p.view)
	c.ReleaseRow(v.batch, v.row)
}

// UnpinAll ends every pin: they export nothing, so a close needs not wait for them.
func (c *Core) UnpinAll() {
	for key, p := range c.pins {
		c.dropPin(key, p)
	}
}

// Hold keeps a region from being unmapped while the shell works with its bytes; false:
// it is not there, or is going. Unhold lets go.
func (c *Core) Hold(id base.RegionID) bool {
	r := c.regions[id]
	if r == nil || !r.mapped || r.mode == going {
		return false
	}
	c.use(r)
	return true
}

// Unhold takes a Hold back.
func (c *Core) Unhold(id base.RegionID) {
	if r := c.regions[id]; r != nil {
		c.unuse(r)
	}
}

// viewed reports whether a view lease lies on a page.
func (c *Core) viewed(r *region, i base.PageIndex, gen base.Generation) bool {
	at := uint64(i) * r.PageBytes
	for _, b := range c.book {
		if b.Kind != base.LeaseView {
			continue
		}
		for _, row := range b.Rows {
			if row.Region == r.ID && row.Offset == at && row.Generation == gen {
				return true
			}
		}
	}
	return false
}
