package hot

import (
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// AcquireRequest asks for leases. A manifest is all the keys of one chunk that
// this worker needs: it is leased whole or not at all (RPC-09). Manifests are
// ordered; in ModePrefix the answer stops at the first that is no hit.
type AcquireRequest struct {
	Operation
	Namespace     base.NamespaceNumber
	Kind          base.LeaseKind
	Mode          Mode
	ManifestSizes []byte // packed u32: keys of each manifest; their sum is Keys.Len()
	Keys          Keys
}

// ManifestCount returns the count of manifests.
func (m *AcquireRequest) ManifestCount() int { return len(m.ManifestSizes) / 4 }

// ManifestSize returns the count of keys of manifest i.
func (m *AcquireRequest) ManifestSize(i int) int { return int(le.Uint32(m.ManifestSizes[4*i:])) }

// AppendManifestSize packs the size of one more manifest.
func AppendManifestSize(dst []byte, n int) []byte {
	return le.AppendUint32(dst, uint32(n)) //nolint:gosec // the decoder bounds it
}

// AppendAcquire appends the whole frame.
func AppendAcquire(dst []byte, id uint64, m *AcquireRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpAcquire, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint32(dst, uint32(m.Namespace))
	dst = le.AppendUint32(dst, uint32(m.Keys.Len()))      //nolint:gosec // the decoder bounds it
	dst = le.AppendUint32(dst, uint32(m.ManifestCount())) //nolint:gosec // the decoder bounds it
	dst = append(dst, byte(m.Kind), byte(m.Mode), 0, 0)
	dst = append(dst, m.ManifestSizes...)
	dst = appendPad(dst, start+HeaderBytes)
	dst = append(dst, m.Keys...)
	return finish(dst, start)
}

// DecodeAcquire decodes a request. Keys and ManifestSizes are views of payload.
func DecodeAcquire(payload []byte, m *AcquireRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	m.Namespace = base.NamespaceNumber(c.u32())
	keys, manifests := c.u32(), c.u32()
	m.Kind, m.Mode = base.LeaseKind(c.u8()), Mode(c.u8())
	c.zero(2)
	m.ManifestSizes = c.rows(manifests, 4, MaxKeys)
	m.Keys = c.rows(keys, base.KeyBytes, MaxKeys)
	var sum uint64
	for i := range m.ManifestCount() {
		n := m.ManifestSize(i)
		sum += uint64(n) //nolint:gosec // u32
		c.bad = c.bad || n == 0
	}
	if sum != uint64(m.Keys.Len()) || m.Mode > ModePrefix || //nolint:gosec // a length
		(m.Kind != base.LeaseCopy && m.Kind != base.LeaseView) {
		c.bad = true
	}
	return c.end(OpAcquire, "request")
}

// AcquireRow is one leased replica, or why there is none.
type AcquireRow struct {
	Verdict    Verdict
	Pool       uint32 // pool number of this server epoch
	Region     base.RegionID
	Offset     uint64
	Length     uint64
	Generation base.Generation
	Checksum   uint64
	Order      base.CommitOrder
}

// Location returns where the replica lies.
func (r *AcquireRow) Location() base.Location {
	return base.Location{Region: r.Region, Offset: r.Offset, Length: r.Length, Generation: r.Generation}
}

// AcquireRowBytes is the size of a packed AcquireRow.
const AcquireRowBytes = 56

// AcquireRows is a packed array of AcquireRow.
type AcquireRows []byte

// Len returns the count of rows.
func (r AcquireRows) Len() int { return len(r) / AcquireRowBytes }

// At copies row i out.
func (r AcquireRows) At(i int) AcquireRow {
	b := r[i*AcquireRowBytes : (i+1)*AcquireRowBytes]
	return AcquireRow{
		Verdict: Verdict(b[0]), Pool: le.Uint32(b[4:]), Region: base.RegionID(le.Uint32(b[8:])),
		Offset: le.Uint64(b[16:]), Length: le.Uint64(b[24:]), Generation: base.Generation(le.Uint64(b[32:])),
		Checksum: le.Uint64(b[40:]), Order: base.CommitOrder(le.Uint64(b[48:])),
	}
}

// AppendAcquireRow packs one row.
func AppendAcquireRow(dst []byte, r *AcquireRow) []byte {
	// Grown once: a batch has thousands of rows, and this runs under the server's lock.
	n := len(dst)
	dst = slices.Grow(dst, AcquireRowBytes)[:n+AcquireRowBytes]
	b := (*[AcquireRowBytes]byte)(dst[n:])
	le.PutUint32(b[0:], uint32(r.Verdict))
	le.PutUint32(b[4:], r.Pool)
	le.PutUint64(b[8:], uint64(r.Region)) // and four reserved bytes
	le.PutUint64(b[16:], r.Offset)
	le.PutUint64(b[24:], r.Length)
	le.PutUint64(b[32:], uint64(r.Generation))
	le.PutUint64(b[40:], r.Checksum)
	le.PutUint64(b[48:], uint64(r.Order))
	return dst
}

// AcquireAnswer has a row for each key up to the stop. A lease is named by the
// request's sequence and the row's index.
type AcquireAnswer struct {
	Manifests uint32 // leased manifests before the first that is none
	Rows      AcquireRows
}

// AppendAcquireAnswer appends the whole frame.
func AppendAcquireAnswer(dst []byte, id uint64, m *AcquireAnswer) []byte {
	start := len(dst)
	dst = append(BeginAcquireAnswer(dst, id), m.Rows...)
	return FinishAcquireAnswer(dst, start, m.Manifests)
}

// BeginAcquireAnswer starts an answer whose rows the caller appends in place;
// FinishAcquireAnswer, given the length of dst before, completes it. The frame is
// that of AppendAcquireAnswer, less one copy of the rows.
func BeginAcquireAnswer(dst []byte, id uint64) []byte {
	return append(appendOK(dst, OpAcquire, id), zeros[:]...)
}

// FinishAcquireAnswer fills in what is known only now.
func FinishAcquireAnswer(dst []byte, start int, manifests uint32) []byte {
	const at = HeaderBytes + 8
	le.PutUint32(dst[start+at:], manifests)
	le.PutUint32(dst[start+at+4:], uint32((len(dst)-start-at-8)/AcquireRowBytes)) //nolint:gosec // at most MaxKeys
	return finish(dst, start)
}

// DecodeAcquireAnswer decodes an answer, or the error in it.
func DecodeAcquireAnswer(payload []byte, m *AcquireAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpAcquire); err != nil {
		return err
	}
	m.Manifests = c.u32()
	m.Rows = c.rows(c.u32(), AcquireRowBytes, MaxKeys)
	// The first word of a row is its verdict alone, the third is reserved: a row with
	// something there comes from a peer that means more than this side understands.
	var wrong uint32
	for b := m.Rows; len(b) >= AcquireRowBytes; b = b[AcquireRowBytes:] {
		wrong |= le.Uint32(b)&^uint32(maxVerdict) | le.Uint32(b[12:])
	}
	c.bad = c.bad || wrong != 0
	c.bad = c.bad || uint64(m.Manifests) > MaxKeys
	return c.end(OpAcquire, "answer")
}

// ReleaseAll as a row's count means every lease from First on.
const ReleaseAll = ^uint32(0)

// ReleaseRow ends the leases First..First+Count-1 of one Acquire.
type ReleaseRow struct {
	Acquire base.Sequence
	First   uint32
	Count   uint32
}

const releaseRowBytes = 16

// ReleaseRows is a packed array of ReleaseRow.
type ReleaseRows []byte

// Len returns the count of rows.
func (r ReleaseRows) Len() int { return len(r) / releaseRowBytes }

// At copies row i out.
func (r ReleaseRows) At(i int) ReleaseRow {
	b := r[i*releaseRowBytes : (i+1)*releaseRowBytes]
	return ReleaseRow{Acquire: base.Sequence(le.Uint64(b)), First: le.Uint32(b[8:]), Count: le.Uint32(b[12:])}
}

// AppendReleaseRow packs one row.
func AppendReleaseRow(dst []byte, r ReleaseRow) []byte {
	dst = le.AppendUint64(dst, uint64(r.Acquire))
	dst = le.AppendUint32(dst, r.First)
	return le.AppendUint32(dst, r.Count)
}

// ReleaseRequest ends leases. Of an Acquire not yet seen it leaves a tombstone,
// so that a lost answer leaks no lease.
type ReleaseRequest struct {
	Operation
	Rows ReleaseRows
}

// AppendRelease appends the whole frame.
func AppendRelease(dst []byte, id uint64, m *ReleaseRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpRelease, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint32(dst, uint32(m.Rows.Len())) //nolint:gosec // the decoder bounds it
	dst = append(dst, zeros[:4]...)
	dst = append(dst, m.Rows...)
	return finish(dst, start)
}

// DecodeRelease decodes a request.
func DecodeRelease(payload []byte, m *ReleaseRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	n := c.u32()
	c.zero(4)
	m.Rows = c.rows(n, releaseRowBytes, MaxKeys)
	return c.end(OpRelease, "request")
}

// ReleaseAnswer has a byte a row: 1 when every lease of the row was still in
// force, which confirms what was copied under them; 0 when one was not.
type ReleaseAnswer struct{ Held []byte }

// AppendReleaseAnswer appends the whole frame.
func AppendReleaseAnswer(dst []byte, id uint64, m *ReleaseAnswer) []byte {
	start := len(dst)
	dst = appendOK(dst, OpRelease, id)
	dst = le.AppendUint32(dst, uint32(len(m.Held))) //nolint:gosec // at most MaxKeys
	dst = append(dst, zeros[:4]...)
	dst = append(dst, m.Held...)
	dst = appendPad(dst, start+HeaderBytes)
	return finish(dst, start)
}

// DecodeReleaseAnswer decodes an answer, or the error in it.
func DecodeReleaseAnswer(payload []byte, m *ReleaseAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpRelease); err != nil {
		return err
	}
	n := c.u32()
	c.zero(4)
	m.Held = c.rows(n, 1, MaxKeys)
	c.atMost(m.Held, 1)
	return c.end(OpRelease, "answer")
}
