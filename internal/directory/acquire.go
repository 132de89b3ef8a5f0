package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/invariants"
)

// leaseRecord is the leases of one Acquire. A row is the replica that is leased, or
// below firstObject the verdict of a key that is not; a released row is rowReleased.
type leaseRecord struct {
	seq       base.Sequence
	kind      base.LeaseKind
	manifests uint32
	left      int // leases in force
	rows      []uint32
	listed    bool // from a relist: there is no answer to give again
}

const rowReleased uint32 = 15

// Acquire leases replicas and appends a packed hot.AcquireRow a key to dst, up to
// and with the manifest at which a prefix stops. A manifest is leased whole or not
// at all (RPC-09): in one that is not, keys without a readable replica are Miss and
// the others NotTried. It returns the count of leased manifests before the first
// that is none. A repeated operation gives the same answer and leases nothing.
//
// Errors, with nothing leased: base.ErrStale; base.ErrMismatch for another
// namespace; base.ErrLimit when the batch would pass the session's lease limit
// (RPC-23) or the ledger is full; base.ErrAborted when the operation was refused, or
// released before it was seen, or since; base.ErrDenied for a scheduler, or for a view in a
// session opened without views; base.ErrInvalid.
func (d *Directory) Acquire(now time.Duration, who Caller, req *hot.AcquireRequest, dst []byte) ([]byte, uint32, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return dst, 0, err
	}
	d.raiseWatermark(s, req.Watermark)
	if op := s.operation(req.Sequence); op != nil {
		switch {
		case op.kind == opTombstone || (op.kind == opAcquire && op.record == nil):
			return dst, 0, fmt.Errorf("%w: acquire: operation %d was refused or released", base.ErrAborted, req.Sequence)
		case op.kind != opAcquire:
			return dst, 0, fmt.Errorf("%w: operation %d was used for another call", base.ErrInvalid, req.Sequence)
		}
		return d.repeatAcquire(dst, op.record)
	}
	if err := d.checkAcquire(s, req); err != nil {
		d.refused(s, req.Sequence)
		return dst, 0, err
	}
	rec := &leaseRecord{seq: req.Sequence, kind: req.Kind, rows: d.rowBuffer()}
	wanted := d.selectRows(now, s, req, rec)
	if s.leases+wanted > d.cfg.Limits.MaxLeases {
		d.recycleRows(rec)
		d.refused(s, req.Sequence)
		return dst, 0, limitErr("max-leases", d.cfg.Limits.MaxLeases, fmt.Sprintf("acquire: the session has %d leases and asks for %d more", s.leases, wanted))
	}
	dst = slices.Grow(dst, len(rec.rows)*hot.AcquireRowBytes)
	for i := 0; i < len(rec.rows); {
		if ref := rec.rows[i]; ref < firstObject {
			dst = hot.AppendAcquireRow(dst, &hot.AcquireRow{Verdict: hot.Verdict(ref)}) //nolint:gosec // a verdict
			d.counters.Misses++
			i++
			continue
		}
		dst, i = d.leaseRun(now, s, rec, i, dst)
	}
	rec.left = wanted
	if wanted > 0 {
		s.addRecord(rec)
	}
	// Also an answer without a lease is kept: the same frame, late on a connection
	// that the client gave up, must not lease what nobody would release.
	s.addOperation(&operation{seq: req.Sequence, kind: opAcquire, rows: len(rec.rows), epoch: s.epoch, session: s, record: rec})
	return dst, rec.manifests, nil
}

// refused remembers a refusal where the ledger has room: the client counts nothing as
// leased or published, and the same frame, late, must not lease what nobody would
// release, nor publish a page that is free.
func (d *Directory) refused(s *session, seq base.Sequence) {
	if d.admitOperation(s, seq, 0) == nil {
		s.addOperation(&operation{seq: seq, kind: opTombstone, epoch: s.epoch, session: s})
	}
}

// leaseRun leases the rows from first on that lie in one region, appends their
// answers and returns the index behind them. The counts of the region and of the
// session rise once for all.
func (d *Directory) leaseRun(now time.Duration, s *session, rec *leaseRecord, first int, dst []byte) ([]byte, int) {
	slot := d.store.replica(rec.rows[first]).region
	g := d.regions[slot]
	i := first
	for ; i < len(rec.rows) && rec.rows[i] >= firstObject; i++ {
		r := d.store.replica(rec.rows[i])
		if r.region != slot {
			break
		}
		r.lease(rec.kind)
		dst = d.appendRow(dst, g, r)
	}
	leased := i - first
	d.countLeases(s, g, rec.kind, leased)
	g.lastRead = now
	d.counters.Hits += uint64(leased) //nolint:gosec // positive
	return dst, i
}

func (d *Directory) checkAcquire(s *session, req *hot.AcquireRequest) error {
	sum := 0
	for i := range req.ManifestCount() {
		sum += req.ManifestSize(i)
	}
	switch {
	case s.role != base.RoleWorker:
		return fmt.Errorf("%w: acquire: a scheduler reads nothing", base.ErrDenied)
	case req.Kind != base.LeaseCopy && req.Kind != base.LeaseView:
		return fmt.Errorf("%w: acquire: lease kind %v", base.ErrInvalid, req.Kind)
	case req.Kind == base.LeaseView && !s.views:
		return fmt.Errorf("%w: acquire: the session was opened without views", base.ErrDenied)
	case req.Namespace != s.ns.number:
		return fmt.Errorf("%w: acquire: namespace number %d, the session has %d", base.ErrMismatch, req.Namespace, s.ns.number)
	case sum != req.Keys.Len() || sum > hot.MaxKeys:
		return fmt.Errorf("%w: acquire: manifests of %d keys, %d keys; at most %d", base.ErrInvalid, sum, req.Keys.Len(), hot.MaxKeys)
	case s.relist == relistWaiting:
		return fmt.Errorf("%w: acquire: list what the session holds first", base.ErrBusy)
	}
	return d.admitOperation(s, req.Sequence, sum)
}

// selectRows fills a record's rows without leasing anything and returns how many
// leases they are.
func (d *Directory) selectRows(now time.Duration, s *session, req *hot.AcquireRequest, rec *leaseRecord) int {
	ns := uint32(s.ns.number)
	keys := req.Keys.Len()
	var b block
	from := d.reader(now, s)
	wanted, manifest, inManifest, whole, run := 0, 0, 0, true, true
	left := 0
	if req.ManifestCount() > 0 {
		left = req.ManifestSize(0)
	}
	for at := 0; at < keys; at += blockKeys {
		b.expand(req.Keys[at*base.KeyBytes:], min(blockKeys, keys-at), 0)
		d.store.lookup(ns, &b, toLease)
		for i := range b.n {
			ref, _ := from.pick(b.object[i])
			if ref == 0 {
				ref, whole = uint32(hot.Miss), false
			}
			rec.rows = append(rec.rows, ref)
			inManifest++
			if left--; left > 0 {
				continue
			}
			if whole {
				wanted += inManifest
				if run {
					rec.manifests++
				}
			} else {
				tail := rec.rows[len(rec.rows)-inManifest:]
				for j := range tail {
					if tail[j] >= firstObject {
						tail[j] = uint32(hot.NotTried)
					}
				}
				run = false
				if req.Mode == hot.ModePrefix {
					return wanted
				}
			}
			inManifest, whole = 0, true
			if manifest++; manifest < req.ManifestCount() {
				left = req.ManifestSize(manifest)
			}
		}
	}
	return wanted
}

func (d *Directory) appendRow(dst []byte, g *region, r *replica) []byte {
	return hot.AppendAcquireRow(dst, &hot.AcquireRow{
		Verdict: hot.MakeHit(g.pool.info.Medium), Pool: g.pool.number, Region: g.id, Offset: g.offsetOf(r.page),
		Length: r.length(), Generation: r.generation, Checksum: r.checksum, Order: r.order,
	})
}

// repeatAcquire gives an answer again. It can while every lease is in force: content
// and place of a leased replica do not change (R2).
func (d *Directory) repeatAcquire(dst []byte, rec *leaseRecord) ([]byte, uint32, error) {
	start := len(dst)
	for _, ref := range rec.rows {
		switch {
		case ref == rowReleased || rec.listed:
			return dst[:start], 0, fmt.Errorf("%w: acquire: operation %d was released in part", base.ErrAborted, rec.seq)
		case ref < firstObject:
			dst = hot.AppendAcquireRow(dst, &hot.AcquireRow{Verdict: hot.Verdict(ref)}) //nolint:gosec // a verdict
		default:
			r := d.store.replica(ref)
			dst = d.appendRow(dst, d.regions[r.region], r)
		}
	}
	return dst, rec.manifests, nil
}

// lease counts one lease of a replica in (R4); countLeases counts it in the sums.
func (r *replica) lease(kind base.LeaseKind) {
	if kind == base.LeaseView {
		r.views++
	} else {
		r.copies++
	}
}

func (d *Directory) countLeases(s *session, g *region, kind base.LeaseKind, count int) {
	if kind == base.LeaseView {
		g.views += count
	}
	g.leases += count
	g.pool.leases += uint64(count) //nolint:gosec // positive
	s.leases += count
}

// unlease counts one lease out.
func (d *Directory) unlease(now time.Duration, s *session, ref replicaRef, kind base.LeaseKind) {
	r := d.store.replica(ref)
	g := d.regions[r.region]
	if kind == base.LeaseView {
		invariants.Check(r.views > 0 && g.views > 0, "R4", "view leases of replica %#x", ref)
		r.views--
		g.views--
	} else {
		invariants.Check(r.copies > 0, "R4", "copy leases of replica %#x", ref)
		r.copies--
	}
	invariants.Check(g.leases > 0 && s.leases > 0, "R4", "leases of region %d and of session %v", g.id, s.id)
	g.leases--
	g.pool.leases--
	s.leases--
	if r.leases() == 0 {
		d.drained(now, g, ref)
	}
}

// drained goes on with a replica whose last lease ended.
func (d *Directory) drained(now time.Duration, g *region, ref replicaRef) {
	r := d.store.replica(ref)
	if r.state() == replicaQuarantined {
		d.releaseQuarantine(now, g, ref)
		d.settleGoing(now, g)
		return
	}
	d.advance(now, g, ref)
}

// Release ends leases and appends a byte a row to dst: 1 when every lease of the row
// was in force until now, which confirms what was copied under it. An Acquire that
// was not seen yet becomes a tombstone: should it arrive later, it leases nothing.
// Repeating a Release is harmless and says 0.
// Errors, with nothing released: base.ErrStale; base.ErrLimit for a full ledger.
func (d *Directory) Release(now time.Duration, who Caller, req *hot.ReleaseRequest, dst []byte) ([]byte, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return dst, err
	}
	// Room for the tombstones is checked before anything ends.
	unseen := 0
	for i := range req.Rows.Len() {
		seq := req.Rows.At(i).Acquire
		if seq >= s.watermark && seq != 0 && s.record(seq) == nil && s.operation(seq) == nil {
			unseen++
		}
	}
	if unseen > 0 && len(s.ops)+unseen > d.cfg.Limits.MaxOperations {
		d.raiseWatermark(s, req.Watermark)
		if len(s.ops)+unseen > d.cfg.Limits.MaxOperations {
			return dst, limitErr("max-operations", d.cfg.Limits.MaxOperations, "release: no room for tombstones of operations not seen")
		}
	}
	for i := range req.Rows.Len() {
		row := req.Rows.At(i)
		held := byte(0)
		if rec := s.record(row.Acquire); rec != nil {
			held = d.releaseRow(now, s, rec, row)
		} else if row.Acquire >= s.watermark && row.Acquire != 0 && s.operation(row.Acquire) == nil {
			s.addOperation(&operation{seq: row.Acquire, kind: opTombstone, epoch: s.epoch, session: s})
		}
		dst = append(dst, held)
	}
	d.raiseWatermark(s, req.Watermark)
	return dst, nil
}

func (d *Directory) releaseRow(now time.Duration, s *session, rec *leaseRecord, row hot.ReleaseRow) byte {
	count := uint64(len(rec.rows))
	first, end := uint64(row.First), uint64(row.First)+uint64(row.Count)
	held := byte(1)
	if row.Count == hot.ReleaseAll {
		end = max(count, first)
	}
	if end > count || first == end {
		held = 0
		first, end = min(first, count), min(end, count)
	}
	for i := first; i < end; i++ {
		ref := rec.rows[i]
		if ref < firstObject {
			// A key that was never leased confirms nothing, unless all of the batch is meant.
			if ref == rowReleased || row.Count != hot.ReleaseAll {
				held = 0
			}
			continue
		}
		rec.rows[i] = rowReleased
		rec.left--
		d.unlease(now, s, ref, rec.kind)
	}
	if rec.left == 0 {
		d.dropRecord(s, rec)
	}
	return held
}

// record finds the leases of an Acquire.
func (s *session) record(seq base.Sequence) *leaseRecord {
	if i, ok := s.findRecord(seq); ok {
		return s.records[i]
	}
	return nil
}

func (s *session) findRecord(seq base.Sequence) (int, bool) {
	i := len(s.records)
	if i == 0 || s.records[i-1].seq < seq {
		return i, false
	}
	return slices.BinarySearchFunc(s.records, seq, func(r *leaseRecord, seq base.Sequence) int {
		switch {
		case r.seq < seq:
			return -1
		case r.seq > seq:
			return 1
		}
		return 0
	})
}

func (s *session) addRecord(rec *leaseRecord) {
	i, _ := s.findRecord(rec.seq)
	s.records = slices.Insert(s.records, i, rec)
}

func (d *Directory) dropRecord(s *session, rec *leaseRecord) {
	if i, ok := s.findRecord(rec.seq); ok && s.records[i] == rec {
		s.records = slices.Delete(s.records, i, i+1)
	}
	if op := s.operation(rec.seq); op != nil && op.record == rec {
		op.record = nil
	}
	d.recycleRows(rec)
}

// leaseSet says which leases end.
type leaseSet uint8

const (
	leasesCopy leaseSet = iota + 1 // expiry: views stay until the proof of the mapper's end
	leasesAll                      // the mapper is gone
)

// endLeases ends leases of a session without its word.
func (d *Directory) endLeases(now time.Duration, s *session, set leaseSet) {
	for _, rec := range slices.Clone(s.records) {
		if set == leasesCopy && rec.kind != base.LeaseCopy {
			continue
		}
		for i, ref := range rec.rows {
			if ref >= firstObject {
				rec.rows[i] = rowReleased
				rec.left--
				d.unlease(now, s, ref, rec.kind)
			}
		}
		d.dropRecord(s, rec)
	}
}

func (d *Directory) rowBuffer() []uint32 {
	if n := len(d.freeRows); n > 0 {
		b := d.freeRows[n-1]
		d.freeRows = d.freeRows[:n-1]
		return b
	}
	return nil
}

func (d *Directory) recycleRows(rec *leaseRecord) {
	if rec.rows != nil && len(d.freeRows) < 256 {
		d.freeRows = append(d.freeRows, rec.rows[:0])
	}
	rec.rows = nil
}
