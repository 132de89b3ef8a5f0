package directory

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Commit publishes pages and appends a packed hot.CommitResult a row to dst. Each
// row stands for itself: one that is refused changes nothing. A row gets CodeOK
// with its commit order; CodeAlreadyStored when the key has a READY replica in the
// page's domain (DM-07): the first value stays and the page comes back; or why it
// was refused: CodeInvalid (bounds, alignment, length, medium: DM-14),
// CodeNotFound (region), CodeDenied (another writer's region), CodeStale
// (generation), CodeFull or CodeLimit (the table), CodeExhausted (order).
//
// A repeated operation changes nothing and gives its results again, CodeRetired
// for a replica that was retired since.
//
// Errors, with nothing changed: base.ErrStale; base.ErrMismatch for another
// namespace; base.ErrAborted when the operation was closed by Resolve;
// base.ErrLimit for a full ledger; base.ErrBusy before relisting; base.ErrDenied
// for a scheduler.
func (d *Directory) Commit(now time.Duration, who Caller, req *hot.CommitRequest, dst []byte) ([]byte, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return dst, err
	}
	d.raiseWatermark(s, req.Watermark)
	rows := req.Rows.Len()
	if op := s.operation(req.Sequence); op != nil {
		switch {
		case op.kind == opTombstone:
			return dst, fmt.Errorf("%w: commit: operation %d was resolved before it was seen", base.ErrAborted, req.Sequence)
		case op.kind != opCommit || len(op.commit) != rows:
			return dst, fmt.Errorf("%w: operation %d was used for another call", base.ErrInvalid, req.Sequence)
		}
		return d.appendCommitResults(dst, op), nil
	}
	if err := d.checkCommit(s, req); err != nil {
		d.refused(s, req.Sequence)
		return dst, err
	}
	op := &operation{seq: req.Sequence, kind: opCommit, rows: rows, epoch: s.epoch, session: s, commit: d.commitBuffer()}
	ns := uint32(s.ns.number)
	var b block
	for from := 0; from < rows; from += blockKeys {
		b.n = min(blockKeys, rows-from)
		for i := range b.n {
			b.key[i] = keyWords(req.Rows[(from+i)*hot.CommitRowBytes:])
		}
		d.store.lookup(ns, &b, toLease)
		for i := range b.n {
			row := req.Rows.At(from + i)
			op.commit = append(op.commit, d.commitRow(now, s, &row, ns, &b.key[i], b.object[i]))
		}
	}
	s.addOperation(op)
	for i := range op.commit {
		c := &op.commit[i]
		dst = hot.AppendCommitResult(dst, hot.CommitResult{Code: c.code, Order: c.order})
	}
	return dst, nil
}

// checkCommit reports why a whole Commit is refused.
func (d *Directory) checkCommit(s *session, req *hot.CommitRequest) error {
	rows := req.Rows.Len()
	switch {
	case s.role != base.RoleWorker:
		return fmt.Errorf("%w: commit: a scheduler stores nothing", base.ErrDenied)
	case req.Namespace != s.ns.number:
		return fmt.Errorf("%w: commit: namespace number %d, the session has %d", base.ErrMismatch, req.Namespace, s.ns.number)
	case s.relist == relistWaiting:
		return fmt.Errorf("%w: commit: list what the session holds first", base.ErrBusy)
	case rows > hot.MaxKeys:
		return fmt.Errorf("%w: commit: %d rows; at most %d", base.ErrLimit, rows, hot.MaxKeys)
	}
	return d.admitOperation(s, req.Sequence, rows)
}

// commitRow validates and publishes one page. found is what the block's lookup saw;
// rows of the same block may have changed it since.
func (d *Directory) commitRow(now time.Duration, s *session, row *hot.CommitRow, ns uint32, w *words, found uint32) commitRecord {
	refuse := func(c base.Code) commitRecord {
		d.counters.CommitsRefused++
		return commitRecord{code: c}
	}
	g := d.regionOf(row.Pool, row.Region)
	if g == nil {
		return refuse(base.CodeNotFound)
	}
	if g.writer != s || g.state != regionGranted {
		return refuse(base.CodeDenied)
	}
	page, ok := g.pageAt(row.Offset)
	if !ok || row.Length == 0 || row.Length > g.place.PageBytes || row.Length > base.MaxObjectBytes ||
		(s.valueBytes != 0 && row.Length > s.valueBytes) || *w == (words{}) {
		return refuse(base.CodeInvalid)
	}
	// S1: a generation belongs to this region's incarnation, or to an epoch of this
	// session, and rises with each use of the page (DM-15).
	high := row.Generation.High()
	if g.private() {
		ok = high != 0 && high <= uint32(s.epoch)
	} else {
		ok = high == uint32(g.incarnation)
	}
	if !ok || row.Generation.Counter() == 0 || row.Generation <= g.last[page] || g.pages[page] != 0 {
		return refuse(base.CodeStale)
	}
	if found == 0 || d.store.objects[found].key != *w || d.store.objects[found].namespace != ns {
		found = d.store.find(ns, w)
	}
	if found != 0 {
		for ref := d.store.firstOf(found); ref != 0; {
			r := d.store.replica(ref)
			if r.state() == replicaReady {
				if og := d.regions[r.region]; og.pool == g.pool && og.visible(now) {
					d.counters.CommitsPresent++
					return commitRecord{code: base.CodeAlreadyStored, order: r.order}
				}
			}
			ref = r.next
		}
	}
	owner := d.cfg.Owner
	if g.private() {
		owner = 0
	}
	order, err := base.MakeCommitOrder(owner, d.commitCount+1)
	if err != nil {
		return refuse(base.CodeExhausted)
	}
	ref, err := d.store.insert(ns, w, found, &row.Parent, replica{
		generation: row.Generation, order: order, checksum: row.Checksum,
		lengthState: row.Length<<8 | uint64(replicaReady), region: g.slot, page: page,
	})
	if err != nil {
		return refuse(base.CodeOf(err))
	}
	d.commitCount++
	g.pages[page] = ref
	g.last[page] = row.Generation
	g.used++
	d.account(g, d.store.replica(ref), +1)
	d.counters.Commits++
	return commitRecord{code: base.CodeOK, order: order, region: g.slot, page: page}
}

// appendCommitResults gives a finished commit's results again.
func (d *Directory) appendCommitResults(dst []byte, op *operation) []byte {
	for i := range op.commit {
		c := op.commit[i]
		if c.code == base.CodeOK && !d.stillReady(&c) {
			c.code = base.CodeRetired
		}
		dst = hot.AppendCommitResult(dst, hot.CommitResult{Code: c.code, Order: c.order})
	}
	return dst
}

// stillReady reports whether the replica of a commit has not been retired. Its slot
// may be another region's by now; the order is nobody else's.
func (d *Directory) stillReady(c *commitRecord) bool {
	g := d.regions[c.region]
	if g == nil || uint64(c.page) >= uint64(len(g.pages)) || g.pages[c.page] == 0 {
		return false
	}
	r := d.store.replica(g.pages[c.page])
	return r.order == c.order && r.state() == replicaReady
}

// Resolve closes a commit whose answer was lost and appends its results to dst when
// it was committed: they are what a repeated Commit would give. An operation that
// was never seen becomes a tombstone and is aborted: should it arrive later, it
// changes nothing. Of another server epoch nothing is known, and unknown is no
// abort (RPC-12, X1).
// Errors: base.ErrStale; base.ErrInvalid for an operation that is no commit;
// base.ErrLimit for a full ledger.
func (d *Directory) Resolve(now time.Duration, who Caller, req *hot.ResolveRequest, dst []byte) (hot.Outcome, []byte, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return hot.OutcomeUnknown, dst, err
	}
	d.raiseWatermark(s, req.Watermark)
	if req.TargetServerEpoch != d.cfg.ServerEpoch || req.TargetEpoch == 0 || req.TargetEpoch > s.epoch {
		return hot.OutcomeUnknown, dst, nil
	}
	if op := s.operation(req.Target); op != nil {
		switch op.kind {
		case opTombstone:
			return hot.OutcomeAborted, dst, nil
		case opCommit:
			return hot.OutcomeCommitted, d.appendCommitResults(dst, op), nil
		}
		return hot.OutcomeUnknown, dst, fmt.Errorf("%w: operation %d is no commit", base.ErrInvalid, req.Target)
	}
	if req.Target < s.watermark {
		// The client said that it is resolved; its result is forgotten.
		return hot.OutcomeUnknown, dst, nil
	}
	if err := d.admitOperation(s, req.Target, 0); err != nil {
		return hot.OutcomeUnknown, dst, err
	}
	s.addOperation(&operation{seq: req.Target, kind: opTombstone, epoch: s.epoch, session: s})
	return hot.OutcomeAborted, dst, nil
}
