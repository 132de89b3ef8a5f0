package hot

import "github.com/xcena-dev/maru/internal/base"

// CommitRow publishes one page: object, parent in its chain, place, checksum.
type CommitRow struct {
	Key        base.Key
	Parent     base.Digest // zero: the chunk is the first of its chain, or has none
	Pool       uint32
	Region     base.RegionID
	Offset     uint64
	Length     uint64 // logical bytes of the object
	Generation base.Generation
	Checksum   uint64
}

// Location returns where the replica lies.
func (r *CommitRow) Location() base.Location {
	return base.Location{Region: r.Region, Offset: r.Offset, Length: r.Length, Generation: r.Generation}
}

// CommitRowBytes is the size of a packed CommitRow.
const CommitRowBytes = 104

// CommitRows is a packed array of CommitRow.
type CommitRows []byte

// Len returns the count of rows.
func (r CommitRows) Len() int { return len(r) / CommitRowBytes }

// At copies row i out.
func (r CommitRows) At(i int) CommitRow {
	b := r[i*CommitRowBytes : (i+1)*CommitRowBytes]
	return CommitRow{
		Key: base.Key(b[:32]), Parent: base.Digest(b[32:60]),
		Pool: le.Uint32(b[64:]), Region: base.RegionID(le.Uint32(b[68:])),
		Offset: le.Uint64(b[72:]), Length: le.Uint64(b[80:]),
		Generation: base.Generation(le.Uint64(b[88:])), Checksum: le.Uint64(b[96:]),
	}
}

// AppendCommitRow packs one row.
func AppendCommitRow(dst []byte, r *CommitRow) []byte {
	dst = append(dst, r.Key[:]...)
	dst = append(dst, r.Parent[:]...)
	dst = append(dst, zeros[:4]...)
	dst = le.AppendUint32(dst, r.Pool)
	dst = le.AppendUint32(dst, uint32(r.Region))
	dst = le.AppendUint64(dst, r.Offset)
	dst = le.AppendUint64(dst, r.Length)
	dst = le.AppendUint64(dst, uint64(r.Generation))
	return le.AppendUint64(dst, r.Checksum)
}

// CommitRequest publishes replicas. It is idempotent by its sequence.
type CommitRequest struct {
	Operation
	Namespace base.NamespaceNumber
	Rows      CommitRows
}

// AppendCommit appends the whole frame.
func AppendCommit(dst []byte, id uint64, m *CommitRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpCommit, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint32(dst, uint32(m.Namespace))
	dst = le.AppendUint32(dst, uint32(m.Rows.Len())) //nolint:gosec // the decoder bounds it
	dst = append(dst, m.Rows...)
	return finish(dst, start)
}

// DecodeCommit decodes a request.
func DecodeCommit(payload []byte, m *CommitRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	m.Namespace = base.NamespaceNumber(c.u32())
	m.Rows = c.rows(c.u32(), CommitRowBytes, MaxKeys)
	c.reserved(m.Rows, CommitRowBytes, 60, 64)
	return c.end(OpCommit, "request")
}

// CommitResult is the outcome of one row: CodeOK with its order; CodeAlreadyStored
// (the first value stays, the page comes back); CodeRetired (committed, retired
// since); or why it was refused, with nothing changed.
type CommitResult struct {
	Code  base.Code
	Order base.CommitOrder
}

const commitResultBytes = 16

// CommitResults is a packed array of CommitResult.
type CommitResults []byte

// Len returns the count of results.
func (r CommitResults) Len() int { return len(r) / commitResultBytes }

// At copies result i out.
func (r CommitResults) At(i int) CommitResult {
	b := r[i*commitResultBytes : (i+1)*commitResultBytes]
	return CommitResult{Code: base.Code(le.Uint32(b)), Order: base.CommitOrder(le.Uint64(b[8:]))}
}

// AppendCommitResult packs one result.
func AppendCommitResult(dst []byte, r CommitResult) []byte {
	dst = le.AppendUint32(dst, uint32(r.Code))
	dst = append(dst, zeros[:4]...)
	return le.AppendUint64(dst, uint64(r.Order))
}

// AppendCommitAnswer appends the whole frame.
func AppendCommitAnswer(dst []byte, id uint64, results CommitResults) []byte {
	start := len(dst)
	dst = appendOK(dst, OpCommit, id)
	dst = le.AppendUint32(dst, uint32(results.Len())) //nolint:gosec // at most MaxKeys
	dst = append(dst, zeros[:4]...)
	dst = append(dst, results...)
	return finish(dst, start)
}

// DecodeCommitAnswer decodes an answer, or the error in it.
func DecodeCommitAnswer(payload []byte) (CommitResults, error) {
	c := cursor{b: payload}
	if err := c.answer(OpCommit); err != nil {
		return nil, err
	}
	n := c.u32()
	c.zero(4)
	out := CommitResults(c.rows(n, commitResultBytes, MaxKeys))
	c.reserved(out, commitResultBytes, 4, 8)
	return out, c.end(OpCommit, "answer")
}

// ResolveRequest closes a Commit whose answer was lost.
type ResolveRequest struct {
	Operation
	TargetServerEpoch base.ServerEpoch
	TargetEpoch       base.Epoch
	Target            base.Sequence
}

// AppendResolve appends the whole frame.
func AppendResolve(dst []byte, id uint64, m *ResolveRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpResolve, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint64(dst, uint64(m.TargetServerEpoch))
	dst = le.AppendUint32(dst, uint32(m.TargetEpoch))
	dst = append(dst, zeros[:4]...)
	dst = le.AppendUint64(dst, uint64(m.Target))
	return finish(dst, start)
}

// DecodeResolve decodes a request.
func DecodeResolve(payload []byte, m *ResolveRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	m.TargetServerEpoch = base.ServerEpoch(c.u64())
	m.TargetEpoch = base.Epoch(c.u32())
	c.zero(4)
	m.Target = base.Sequence(c.u64())
	return c.end(OpResolve, "request")
}

// Outcome of a resolved operation.
type Outcome uint8

// Outcomes. Unknown is no abort (RPC-12).
const (
	OutcomeUnknown   Outcome = 0
	OutcomeCommitted Outcome = 1
	OutcomeAborted   Outcome = 2
)

// ResolveAnswer carries the commit's results when it was committed.
type ResolveAnswer struct {
	Outcome Outcome
	Results CommitResults
}

// AppendResolveAnswer appends the whole frame.
func AppendResolveAnswer(dst []byte, id uint64, m *ResolveAnswer) []byte {
	start := len(dst)
	dst = appendOK(dst, OpResolve, id)
	dst = append(dst, byte(m.Outcome), 0, 0, 0)
	dst = le.AppendUint32(dst, uint32(m.Results.Len())) //nolint:gosec // at most MaxKeys
	dst = append(dst, m.Results...)
	return finish(dst, start)
}

// DecodeResolveAnswer decodes an answer, or the error in it.
func DecodeResolveAnswer(payload []byte, m *ResolveAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpResolve); err != nil {
		return err
	}
	m.Outcome = Outcome(c.u8())
	c.zero(3)
	m.Results = c.rows(c.u32(), commitResultBytes, MaxKeys)
	c.reserved(m.Results, commitResultBytes, 4, 8)
	if m.Outcome > OutcomeAborted || (m.Outcome != OutcomeCommitted && len(m.Results) != 0) {
		c.bad = true
	}
	return c.end(OpResolve, "answer")
}
