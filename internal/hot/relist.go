package hot

import "github.com/xcena-dev/maru/internal/base"

// RelistState is what a client says of one of its pages after a server restart.
type RelistState uint8

// States of a relisted page.
const (
	RelistReady     RelistState = 1
	RelistRetiring  RelistState = 2
	RelistUncertain RelistState = 3 // its commit's outcome is unknown: never published again
)

// RelistPage is a page of the client's snapshot.
type RelistPage struct {
	CommitRow
	Order base.CommitOrder
	State RelistState
}

const relistPageBytes = CommitRowBytes + 16

// RelistPages is a packed array of RelistPage.
type RelistPages []byte

// Len returns the count of pages.
func (r RelistPages) Len() int { return len(r) / relistPageBytes }

// At copies page i out.
func (r RelistPages) At(i int) RelistPage {
	b := r[i*relistPageBytes : (i+1)*relistPageBytes]
	return RelistPage{
		CommitRow: CommitRows(b[:CommitRowBytes]).At(0),
		Order:     base.CommitOrder(le.Uint64(b[CommitRowBytes:])), State: RelistState(b[CommitRowBytes+8]),
	}
}

// AppendRelistPage packs one page.
func AppendRelistPage(dst []byte, p *RelistPage) []byte {
	dst = AppendCommitRow(dst, &p.CommitRow)
	dst = le.AppendUint64(dst, uint64(p.Order))
	return append(dst, byte(p.State), 0, 0, 0, 0, 0, 0, 0)
}

// RelistLease is a lease of the client's snapshot, on a page of anybody.
type RelistLease struct {
	Pool       uint32
	Region     base.RegionID
	Offset     uint64
	Generation base.Generation
	Kind       base.LeaseKind
	// Acquire and Index name the lease for a later Release.
	Acquire base.Sequence
	Index   uint32
}

const relistLeaseBytes = 40

// RelistLeases is a packed array of RelistLease.
type RelistLeases []byte

// Len returns the count of leases.
func (r RelistLeases) Len() int { return len(r) / relistLeaseBytes }

// At copies lease i out.
func (r RelistLeases) At(i int) RelistLease {
	b := r[i*relistLeaseBytes : (i+1)*relistLeaseBytes]
	return RelistLease{
		Pool: le.Uint32(b), Region: base.RegionID(le.Uint32(b[4:])), Offset: le.Uint64(b[8:]),
		Generation: base.Generation(le.Uint64(b[16:])), Acquire: base.Sequence(le.Uint64(b[24:])),
		Index: le.Uint32(b[32:]), Kind: base.LeaseKind(b[36]),
	}
}

// AppendRelistLease packs one lease.
func AppendRelistLease(dst []byte, l *RelistLease) []byte {
	dst = le.AppendUint32(dst, l.Pool)
	dst = le.AppendUint32(dst, uint32(l.Region))
	dst = le.AppendUint64(dst, l.Offset)
	dst = le.AppendUint64(dst, uint64(l.Generation))
	dst = le.AppendUint64(dst, uint64(l.Acquire))
	dst = le.AppendUint32(dst, l.Index)
	return append(dst, byte(l.Kind), 0, 0, 0)
}

// RelistRequest is one frame of a snapshot: pages and leases; Last ends it.
type RelistRequest struct {
	Operation
	Last   bool
	Pages  RelistPages
	Leases RelistLeases
}

// AppendRelist appends the whole frame.
func AppendRelist(dst []byte, id uint64, m *RelistRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpRelist, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint32(dst, uint32(m.Pages.Len()))  //nolint:gosec // the decoder bounds it
	dst = le.AppendUint32(dst, uint32(m.Leases.Len())) //nolint:gosec // the decoder bounds it
	var last uint64
	if m.Last {
		last = 1
	}
	dst = le.AppendUint64(dst, last)
	dst = append(dst, m.Pages...)
	dst = append(dst, m.Leases...)
	return finish(dst, start)
}

// DecodeRelist decodes a request.
func DecodeRelist(payload []byte, m *RelistRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	pages, leases := c.u32(), c.u32()
	last := c.u64()
	m.Last = last == 1
	m.Pages = c.rows(pages, relistPageBytes, MaxKeys)
	m.Leases = c.rows(leases, relistLeaseBytes, MaxKeys)
	c.bad = c.bad || last > 1
	c.reserved(m.Pages, relistPageBytes, 60, 64)
	c.reserved(m.Pages, relistPageBytes, CommitRowBytes+9, relistPageBytes)
	c.reserved(m.Leases, relistLeaseBytes, 37, relistLeaseBytes)
	for i := range m.Pages.Len() {
		if s := m.Pages.At(i).State; s < RelistReady || s > RelistUncertain {
			c.bad = true
		}
	}
	for i := range m.Leases.Len() {
		if k := m.Leases.At(i).Kind; k != base.LeaseCopy && k != base.LeaseView {
			c.bad = true
		}
	}
	return c.end(OpRelist, "request")
}

// RelistResult says what became of a listed page.
type RelistResult uint8

// Results of relisting.
const (
	RelistKept        RelistResult = 1 // READY again
	RelistRetire      RelistResult = 2 // lost to a higher order, or deleted: clear its mark
	RelistQuarantined RelistResult = 3 // neither visible nor free until the rule "Server restart" says
	RelistRefused     RelistResult = 4 // no such region or page
)

// RelistAnswer has a byte a page.
type RelistAnswer struct{ Results []byte }

// AppendRelistAnswer appends the whole frame.
func AppendRelistAnswer(dst []byte, id uint64, m *RelistAnswer) []byte {
	start := len(dst)
	dst = appendOK(dst, OpRelist, id)
	dst = le.AppendUint32(dst, uint32(len(m.Results))) //nolint:gosec // at most MaxKeys
	dst = append(dst, zeros[:4]...)
	dst = append(dst, m.Results...)
	dst = appendPad(dst, start+HeaderBytes)
	return finish(dst, start)
}

// DecodeRelistAnswer decodes an answer, or the error in it.
func DecodeRelistAnswer(payload []byte, m *RelistAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpRelist); err != nil {
		return err
	}
	n := c.u32()
	c.zero(4)
	m.Results = c.rows(n, 1, MaxKeys)
	c.atMost(m.Results, byte(RelistRefused))
	return c.end(OpRelist, "answer")
}
