package session

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Commit is one page that is to be published.
type Commit struct {
	Key      base.Key
	Parent   base.Digest
	Region   base.RegionID
	Index    base.PageIndex
	Length   uint64
	Checksum uint64
}

// commitOp is a Commit whose answer is not settled.
type commitOp struct {
	epoch       base.Epoch
	serverEpoch base.ServerEpoch
	refs        []PageRef
	lost        bool
}

// Generation returns the generation that a page in writing will be published under.
func (c *Core) generation(r *region, p *page) base.Generation {
	if r.Private() {
		return base.MakeGeneration(uint32(c.epoch), p.counter)
	}
	return base.MakeGeneration(uint32(r.Incarnation), p.counter)
}

// GenerationOf returns the generation of a page in writing, for its record.
func (c *Core) GenerationOf(id base.RegionID, i base.PageIndex) (base.Generation, bool) {
	r := c.regions[id]
	if r == nil {
		return 0, false
	}
	p := r.page(i)
	if p == nil || p.state != Writing {
		return 0, false
	}
	return c.generation(r, p), true
}

// CheckWriting reports why a page cannot be committed. Errors: ErrNotFound, ErrInvalid.
func (c *Core) CheckWriting(id base.RegionID, i base.PageIndex, length uint64) error {
	r := c.regions[id]
	if r == nil || r.own != Own {
		return fmt.Errorf("%w: region %d is not ours", base.ErrNotFound, id)
	}
	p := r.page(i)
	switch {
	case p == nil:
		return fmt.Errorf("%w: page %d of region %d; it has %d pages", base.ErrInvalid, i, id, r.PageCount)
	case p.state != Writing:
		return fmt.Errorf("%w: page %d of region %d is %s, not being written", base.ErrInvalid, i, id, p.state)
	case length == 0 || length > r.PageBytes:
		return fmt.Errorf("%w: length %d; allowed: 1 to the page's %d bytes", base.ErrInvalid, length, r.PageBytes)
	}
	return nil
}

// BeginCommit numbers a Commit and puts its pages into COMMITTING. rows is filled with
// what goes on the wire, a row an item. All items are checked first; with an error
// nothing has changed. Errors: ErrUnavailable while the session is not live, ErrLimit,
// and those of CheckWriting.
func (c *Core) BeginCommit(items []Commit, rows []hot.CommitRow) (base.Sequence, error) {
	if c.phase != Live {
		return 0, fmt.Errorf("%w: the session is %s", base.ErrUnavailable, c.phase)
	}
	for i := range items {
		if err := c.CheckWriting(items[i].Region, items[i].Index, items[i].Length); err != nil {
			return 0, err
		}
	}
	seq, err := c.ledger.begin()
	if err != nil {
		return 0, err
	}
	op := c.newOp()
	op.epoch, op.serverEpoch, op.lost = c.epoch, c.serverEpoch, false
	for i := range items {
		it := &items[i]
		r := c.regions[it.Region]
		p := &r.pages[it.Index]
		if p.state != Writing { // the same page twice in one batch
			for _, ref := range op.refs {
				back := c.regions[ref.Region]
				back.set(&back.pages[ref.Index], Writing)
			}
			c.ledger.end(seq)
			c.spare = append(c.spare, op)
			return 0, fmt.Errorf("%w: page %d of region %d is twice in the batch", base.ErrInvalid, it.Index, it.Region)
		}
		p.gen = c.generation(r, p)
		p.op, p.key, p.parent = seq, it.Key, it.Parent
		p.length, p.checksum, p.order, p.flags = it.Length, it.Checksum, 0, 0
		r.set(p, Committing)
		op.refs = append(op.refs, PageRef{Region: it.Region, Index: it.Index, Generation: p.gen})
		rows[i] = hot.CommitRow{
			Key: it.Key, Parent: it.Parent, Pool: r.PoolNumber, Region: it.Region,
			Offset: uint64(it.Index) * r.PageBytes, Length: it.Length, Generation: p.gen, Checksum: it.Checksum,
		}
	}
	c.commits[seq] = op
	return seq, nil
}

func (c *Core) newOp() *commitOp {
	if n := len(c.spare); n > 0 {
		op := c.spare[n-1]
		c.spare = c.spare[:n-1]
		op.refs = op.refs[:0]
		return op
	}
	return &commitOp{}
}

// Refs returns the pages of a Commit that is not settled, nil when it is. They are
// valid until the next call that settles it.
func (c *Core) Refs(seq base.Sequence) []PageRef {
	if op := c.commits[seq]; op != nil {
		return op.refs
	}
	return nil
}

// EndCommit settles a Commit by its answer, or by a Resolve that found it committed.
// The answer counts only for the epoch it was asked in (S1): false says that it came
// too late and changed nothing. results may be shorter than the batch only from a
// broken peer; what has no result stays quarantined.
func (c *Core) EndCommit(seq base.Sequence, results hot.CommitResults) bool {
	op := c.commits[seq]
	if op == nil {
		return false
	}
	for i, ref := range op.refs {
		if i >= results.Len() {
			c.quarantine(seq, ref)
			continue
		}
		c.settleRow(seq, ref, results.At(i))
	}
	c.closeOp(seq, op)
	return true
}

func (c *Core) closeOp(seq base.Sequence, op *commitOp) {
	delete(c.commits, seq)
	c.ledger.end(seq)
	if len(c.spare) < 64 {
		c.spare = append(c.spare, op)
	}
}

// committing finds a page that still waits for the result of operation seq. A retire
// or a reclaim that came first has taken it away already.
func (c *Core) committing(seq base.Sequence, ref PageRef) (*region, *page) {
	r := c.regions[ref.Region]
	if r == nil {
		return nil, nil
	}
	p := r.page(ref.Index)
	if p == nil || p.gen != ref.Generation || p.op != seq {
		return r, nil
	}
	if p.state != Committing && (p.state != Quarantined || p.flags&uncertain == 0) {
		return r, nil
	}
	return r, p
}

func (c *Core) settleRow(seq base.Sequence, ref PageRef, res hot.CommitResult) {
	r, p := c.committing(seq, ref)
	if p == nil {
		return
	}
	switch res.Code {
	case base.CodeOK:
		p.order = res.Order
		p.flags &^= uncertain
		r.set(p, Ready)
	case base.CodeRetired:
		// It was published and has been retired since: a reclaim will come.
		p.flags &^= uncertain
		r.set(p, Retiring)
	case base.CodeUnknown, base.CodePending:
		c.quarantine(seq, ref)
		return
	default:
		c.freePage(r, ref.Index)
		return
	}
	c.settle(r)
}

func (c *Core) quarantine(seq base.Sequence, ref PageRef) {
	if r, p := c.committing(seq, ref); p != nil && p.state == Committing {
		p.flags |= uncertain
		r.set(p, Quarantined)
		c.settle(r)
	}
}

// LoseCommit says that a Commit has no answer: its pages are quarantined and the
// operation stays open until it is resolved.
func (c *Core) LoseCommit(seq base.Sequence) {
	op := c.commits[seq]
	if op == nil {
		return
	}
	op.lost = true
	for _, ref := range op.refs {
		c.quarantine(seq, ref)
	}
}

// RefuseCommit says that a whole Commit was refused and changed nothing: its pages are
// free.
func (c *Core) RefuseCommit(seq base.Sequence) {
	op := c.commits[seq]
	if op == nil {
		return
	}
	for _, ref := range op.refs {
		if r, p := c.committing(seq, ref); p != nil {
			c.freePage(r, ref.Index)
		}
	}
	c.closeOp(seq, op)
}

// Lost is a Commit that is to be resolved.
type Lost struct {
	Sequence    base.Sequence
	Epoch       base.Epoch
	ServerEpoch base.ServerEpoch
}

// LostCommits appends the Commits that have no answer.
func (c *Core) LostCommits(dst []Lost) []Lost {
	for seq, op := range c.commits {
		if op.lost {
			dst = append(dst, Lost{Sequence: seq, Epoch: op.epoch, ServerEpoch: op.serverEpoch})
		}
	}
	return dst
}

// Resolved takes the answer of a Resolve. Committed settles like an answer; aborted
// frees the pages; unknown is no abort (RPC-12): the pages stay in quarantine until the
// server tells, and only the operation is closed.
func (c *Core) Resolved(seq base.Sequence, outcome hot.Outcome, results hot.CommitResults) {
	switch outcome {
	case hot.OutcomeCommitted:
		c.EndCommit(seq, results)
	case hot.OutcomeAborted:
		c.RefuseCommit(seq)
	case hot.OutcomeUnknown:
		if op := c.commits[seq]; op != nil {
			for _, ref := range op.refs {
				c.quarantine(seq, ref)
			}
			c.closeOp(seq, op)
		}
	}
}

// MayMark says whether the mark of a page may be written now, and with which order: it
// must be READY in that generation, and the session live. The caller holds the page's
// lock (the region's, in the shell), writes the mark before it lets go, and clears
// marks under the same lock only; so a retire that came first means no mark, ever (R7).
func (c *Core) MayMark(ref PageRef, epoch base.Epoch, server base.ServerEpoch) (base.CommitOrder, bool) {
	r := c.regions[ref.Region]
	if r == nil || r.Private() || c.phase != Live || epoch != c.epoch || server != c.serverEpoch {
		return 0, false
	}
	p := r.page(ref.Index)
	if p == nil || p.state != Ready || p.gen != ref.Generation || p.order == 0 || p.flags&clearing != 0 {
		return 0, false
	}
	p.flags |= marked
	return p.order, true
}
