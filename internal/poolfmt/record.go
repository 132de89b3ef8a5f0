package poolfmt

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// Places inside a record.
const (
	// MarkOffset is where the commit order lies: the record's first 8 bytes,
	// aligned, so that one store sets or clears it.
	MarkOffset = 0
	// BodyOffset is where everything else begins; it is written and flushed
	// before the commit.
	BodyOffset = 8
	checkPlace = 61
)

// Record says what a page holds. Order is the mark: 0 means that the page holds
// nothing, whatever the body says.
type Record struct {
	Order       base.CommitOrder
	Key         base.Key
	Checksum    uint64
	Incarnation base.Incarnation // of the region
	Counter     uint32           // page counter: with Incarnation, the generation
	Length      uint64           // bytes of the object, below 2^40
}

// Place binds a record to where it lies, so that a copy elsewhere is not believed.
type Place struct {
	Pool   base.PoolID
	Region base.RegionID
	Page   base.PageIndex
}

// Generation returns the page generation of a record.
func (r Record) Generation() base.Generation {
	return base.MakeGeneration(uint32(r.Incarnation), r.Counter)
}

func recordCheck(b []byte, at Place) uint32 {
	var bound [24]byte
	copy(bound[:], at.Pool[:])
	le.PutUint32(bound[16:], uint32(at.Region))
	le.PutUint32(bound[20:], uint32(at.Page))
	return uint32(check8(seedRecord, b[BodyOffset:checkPlace], bound[:])) & 0xffffff
}

// EncodeRecord writes a record into 64 bytes, its mark included. A writer that
// follows the order of writes encodes with Order 0, stores the body
// (b[BodyOffset:]), and sets the mark after its commit.
// Errors: ErrInvalid for a short buffer or a length of 2^40 and above.
func EncodeRecord(b []byte, at Place, r Record) error {
	if len(b) < RecordBytes {
		return fmt.Errorf("%w: record needs %d bytes, has %d", base.ErrInvalid, RecordBytes, len(b))
	}
	if r.Length > base.MaxObjectBytes {
		return fmt.Errorf("%w: record length %d, allowed: up to %d", base.ErrInvalid, r.Length, base.MaxObjectBytes)
	}
	le.PutUint64(b[MarkOffset:], uint64(r.Order))
	copy(b[8:40], r.Key[:])
	le.PutUint64(b[40:], r.Checksum)
	le.PutUint32(b[48:], uint32(r.Incarnation))
	le.PutUint32(b[52:], r.Counter)
	le.PutUint32(b[56:], uint32(r.Length))
	b[60] = byte(r.Length >> 32)
	c := recordCheck(b, at)
	b[61], b[62], b[63] = byte(c), byte(c>>8), byte(c>>16)
	return nil
}

// DecodeRecord reads a record. found is false when the mark is 0: the page holds
// nothing, and its body is not looked at. Errors: ErrCorrupt for a marked record
// whose body is not whole or lies elsewhere than it was made for; ErrInvalid for
// a short buffer. The caller compares Incarnation with the region's.
func DecodeRecord(b []byte, at Place) (r Record, found bool, err error) {
	if len(b) < RecordBytes {
		return Record{}, false, fmt.Errorf("%w: record needs %d bytes, has %d", base.ErrInvalid, RecordBytes, len(b))
	}
	order := base.CommitOrder(le.Uint64(b[MarkOffset:]))
	if order == 0 {
		return Record{}, false, nil
	}
	got := uint32(b[61]) | uint32(b[62])<<8 | uint32(b[63])<<16
	if want := recordCheck(b, at); got != want {
		return Record{}, false, fmt.Errorf("%w: record of region %d page %d: check is %#x, must be %#x", base.ErrCorrupt, at.Region, at.Page, got, want)
	}
	r = Record{
		Order:       order,
		Checksum:    le.Uint64(b[40:]),
		Incarnation: base.Incarnation(le.Uint32(b[48:])),
		Counter:     le.Uint32(b[52:]),
		Length:      uint64(le.Uint32(b[56:])) | uint64(b[60])<<32,
	}
	copy(r.Key[:], b[8:40])
	if r.Incarnation == 0 || r.Incarnation > base.MaxIncarnation || r.Key.IsZero() {
		return Record{}, false, fmt.Errorf("%w: record of region %d page %d: incarnation %d, key %s", base.ErrCorrupt, at.Region, at.Page, r.Incarnation, r.Key)
	}
	return r, true, nil
}
