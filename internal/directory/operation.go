package directory

import (
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// opKind is what an operation in a ledger was.
type opKind uint8

const (
	opCommit opKind = iota + 1
	opAcquire
	opExpand
	opReturn
	opDelete
	opTombstone // refused, or closed by Resolve or Release before it was seen: it changes nothing
)

// operation is one entry of a session's ledger. It stays until the session's
// watermark passes it (W1, RPC-13): whatever arrives late finds it.
type operation struct {
	seq     base.Sequence
	kind    opKind
	rows    int // counted against max-operation-rows
	epoch   base.Epoch
	session *session
	commit  []commitRecord // opCommit, a row each
	record  *leaseRecord   // opAcquire, nil when every lease has ended
	expand  *expansion
	delete  DeleteID
}

// commitRecord is the outcome of one row.
type commitRecord struct {
	order  base.CommitOrder
	region uint32
	page   uint32
	code   base.Code
}

// operation finds a ledger entry.
func (s *session) operation(seq base.Sequence) *operation {
	if i, ok := s.findOperation(seq); ok {
		return s.ops[i]
	}
	return nil
}

// findOperation searches from the end: sequences rise.
func (s *session) findOperation(seq base.Sequence) (int, bool) {
	i := len(s.ops)
	if i == 0 || s.ops[i-1].seq < seq {
		return i, false
	}
	return slices.BinarySearchFunc(s.ops, seq, func(o *operation, seq base.Sequence) int {
		switch {
		case o.seq < seq:
			return -1
		case o.seq > seq:
			return 1
		}
		return 0
	})
}

// admitOperation checks that a new operation may enter the ledger: its sequence
// is not below the watermark and there is room (RPC-13).
func (d *Directory) admitOperation(s *session, seq base.Sequence, rows int) error {
	lim := &d.cfg.Limits
	switch {
	case seq == 0:
		return fmt.Errorf("%w: an operation that changes something needs a sequence", base.ErrInvalid)
	case seq < s.watermark:
		return fmt.Errorf("%w: operation %d is below the watermark %d", base.ErrStale, seq, s.watermark)
	case len(s.ops) >= lim.MaxOperations:
		return limitErr("max-operations", lim.MaxOperations, fmt.Sprintf("the session has %d operations above its watermark", len(s.ops)))
	case s.opRows+rows > lim.MaxOperationRows:
		return limitErr("max-operation-rows", lim.MaxOperationRows, fmt.Sprintf("the session has %d rows of commits and acquires above its watermark and asks for %d more", s.opRows, rows))
	}
	return nil
}

func (s *session) addOperation(op *operation) {
	i, _ := s.findOperation(op.seq)
	s.ops = slices.Insert(s.ops, i, op)
	s.opRows += op.rows
}

func (s *session) dropOperation(op *operation) {
	if i, ok := s.findOperation(op.seq); ok && s.ops[i] == op {
		s.opRows -= op.rows
		s.ops = slices.Delete(s.ops, i, i+1)
	}
}

// raiseWatermark forgets the results below a client's watermark. Allocations in
// flight stay known through the flights.
func (d *Directory) raiseWatermark(s *session, watermark base.Sequence) {
	if watermark <= s.watermark {
		return
	}
	s.watermark = watermark
	n, _ := s.findOperation(watermark)
	for _, op := range s.ops[:n] {
		s.opRows -= op.rows
		d.recycle(op)
		d.abandon(op)
	}
	s.ops = slices.Delete(s.ops, 0, n)
}

// dropOperations forgets a whole ledger.
func (d *Directory) dropOperations(s *session) {
	for _, op := range s.ops {
		d.recycle(op)
		d.abandon(op)
	}
	s.ops, s.opRows = nil, 0
}

// abandon gives up an allocation that nobody will ask for again and that is not at
// the resource manager now. Should it have made a region after all, that region is
// on the RM's list and known to nobody: the shell's sweep frees it.
func (d *Directory) abandon(op *operation) {
	if e := op.expand; e != nil {
		e.abandoned = true
		if !e.done && !e.inFlight {
			d.endFlight(op)
		}
	}
}

// recycle keeps the buffer of a commit's results for the next one.
func (d *Directory) recycle(op *operation) {
	if op.commit != nil && len(d.freeCommit) < 64 {
		d.freeCommit = append(d.freeCommit, op.commit[:0])
	}
	op.commit = nil
	if op.record != nil && op.record.left == 0 {
		d.recycleRows(op.record)
	}
	op.record = nil
	if op.kind == opDelete {
		d.endDelete(op.delete)
	}
}

func (d *Directory) commitBuffer() []commitRecord {
	if n := len(d.freeCommit); n > 0 {
		b := d.freeCommit[n-1]
		d.freeCommit = d.freeCommit[:n-1]
		return b
	}
	return nil
}
