package poolfmt

import (
	"bytes"
	"fmt"
	"math/bits"

	"github.com/xcena-dev/maru/internal/base"
)

var magicRegion = [8]byte{'M', 'A', 'R', 'U', 'R', 'G', 'N', 0}

// Limits of a region's geometry.
const (
	// MaxPageCount keeps a page index in 32 bits with room for "none".
	MaxPageCount uint64 = 1<<31 - 1
	// MaxExtentBytes bounds what one region can take: far above any device, and
	// low enough that sums of extents never overflow.
	MaxExtentBytes uint64 = 1 << 48
	// MinPieceBytes and PieceAlignment are what a GPU needs to compute leaves
	// beside its copy.
	MinPieceBytes  = 256
	PieceAlignment = 64
)

// Plan is the geometry of a region. All values are bytes unless they say
// otherwise; offsets count from the start of the extent.
type Plan struct {
	PageBytes    uint64
	PageCount    uint64
	PieceBytes   uint32
	DataBytes    uint64 // PageBytes x PageCount: what users asked for
	TableOffset  uint64 // of the region line
	RecordOffset uint64 // of the first record
	TableBytes   uint64 // region line and records
	ExtentBytes  uint64 // the whole, aligned
}

// PlanRegion lays a region out. Errors: ErrInvalid names the field, its value
// and what is allowed.
func PlanRegion(pageBytes, pageCount uint64, pieceBytes uint32) (Plan, error) {
	switch {
	case pageBytes == 0 || pageBytes > base.MaxObjectBytes:
		return Plan{}, fmt.Errorf("%w: page_size %d, allowed: 1 to %d", base.ErrInvalid, pageBytes, base.MaxObjectBytes)
	case pageCount == 0 || pageCount > MaxPageCount:
		return Plan{}, fmt.Errorf("%w: page_count %d, allowed: 1 to %d", base.ErrInvalid, pageCount, MaxPageCount)
	case pieceBytes < MinPieceBytes || pieceBytes%PieceAlignment != 0:
		return Plan{}, fmt.Errorf("%w: piece_size %d, allowed: multiples of %d from %d", base.ErrInvalid, pieceBytes, PieceAlignment, MinPieceBytes)
	}
	high, data := bits.Mul64(pageBytes, pageCount)
	if high != 0 || data > MaxExtentBytes {
		return Plan{}, fmt.Errorf("%w: page_size %d x page_count %d is more than %d bytes", base.ErrInvalid, pageBytes, pageCount, MaxExtentBytes)
	}
	p := Plan{PageBytes: pageBytes, PageCount: pageCount, PieceBytes: pieceBytes, DataBytes: data}
	p.TableOffset = roundUp(data, TableAlignment)
	p.RecordOffset = p.TableOffset + RegionLineBytes
	p.TableBytes = RegionLineBytes + RecordBytes*pageCount
	p.ExtentBytes = roundUp(p.TableOffset+p.TableBytes, Alignment)
	if p.ExtentBytes > MaxExtentBytes {
		return Plan{}, fmt.Errorf("%w: page_size %d x page_count %d with its table is more than %d bytes", base.ErrInvalid, pageBytes, pageCount, MaxExtentBytes)
	}
	return p, nil
}

// Record returns the offset of a page's record.
func (p Plan) Record(page base.PageIndex) uint64 {
	return p.RecordOffset + RecordBytes*uint64(page)
}

// Page returns the offset of a page.
func (p Plan) Page(page base.PageIndex) uint64 { return p.PageBytes * uint64(page) }

// UsableBytes returns the data bytes of a pool of this many bytes: those behind
// the first 2 MiB, in whole units of 2 MiB.
func UsableBytes(deviceBytes uint64) uint64 {
	if deviceBytes < DataOffset {
		return 0
	}
	return (deviceBytes - DataOffset) / Alignment * Alignment
}

func roundUp(v, to uint64) uint64 { return (v + to - 1) / to * to }

// Region is what a region line says.
type Region struct {
	Flags       uint16 // none is defined
	Region      base.RegionID
	Incarnation base.Incarnation
	PieceBytes  uint32
	PageBytes   uint64
	PageCount   uint64
	Owner       base.OwnerID
	Writer      base.SessionID
	Namespace   base.NamespaceID
}

// EncodeRegion gives a region line.
func EncodeRegion(pool base.PoolID, r Region) [RegionLineBytes]byte {
	var b [RegionLineBytes]byte
	copy(b[0:8], magicRegion[:])
	le.PutUint16(b[8:], RegionVersion)
	le.PutUint16(b[10:], r.Flags)
	le.PutUint32(b[12:], uint32(r.Region))
	le.PutUint32(b[16:], uint32(r.Incarnation))
	le.PutUint32(b[20:], r.PieceBytes)
	le.PutUint64(b[24:], r.PageBytes)
	le.PutUint64(b[32:], r.PageCount)
	copy(b[40:56], r.Owner[:])
	copy(b[56:72], r.Writer[:])
	copy(b[72:104], r.Namespace[:])
	le.PutUint64(b[120:], check8(seedRegion, b[:120], pool[:]))
	return b
}

// DecodeRegion reads a region line. Errors: ErrNotFound for a blank or foreign
// one, ErrUnsupported for another version or an unknown flag, ErrCorrupt,
// ErrInvalid for a short buffer.
func DecodeRegion(b []byte, pool base.PoolID) (Region, error) {
	if len(b) < RegionLineBytes {
		return Region{}, fmt.Errorf("%w: region line needs %d bytes, has %d", base.ErrInvalid, RegionLineBytes, len(b))
	}
	b = b[:RegionLineBytes]
	if !bytes.Equal(b[:8], magicRegion[:]) {
		return Region{}, fmt.Errorf("%w: no region line", base.ErrNotFound)
	}
	if v := le.Uint16(b[8:]); v != RegionVersion {
		return Region{}, fmt.Errorf("%w: region line of version %d, this program has version %d", base.ErrUnsupported, v, RegionVersion)
	}
	if got, want := le.Uint64(b[120:]), check8(seedRegion, b[:120], pool[:]); got != want {
		return Region{}, fmt.Errorf("%w: region line: check is %#x, must be %#x", base.ErrCorrupt, got, want)
	}
	r := Region{
		Flags:       le.Uint16(b[10:]),
		Region:      base.RegionID(le.Uint32(b[12:])),
		Incarnation: base.Incarnation(le.Uint32(b[16:])),
		PieceBytes:  le.Uint32(b[20:]),
		PageBytes:   le.Uint64(b[24:]),
		PageCount:   le.Uint64(b[32:]),
	}
	copy(r.Owner[:], b[40:56])
	copy(r.Writer[:], b[56:72])
	copy(r.Namespace[:], b[72:104])
	if r.Flags != 0 {
		return Region{}, fmt.Errorf("%w: region line: flags %#x", base.ErrUnsupported, r.Flags)
	}
	if !isZero(b[104:120]) {
		return Region{}, fmt.Errorf("%w: region line: reserved bytes are not zero", base.ErrCorrupt)
	}
	if r.Region == 0 || r.Region >= base.FirstPrivateRegion || r.Incarnation == 0 || r.Incarnation > base.MaxIncarnation {
		return Region{}, fmt.Errorf("%w: region line: region %d incarnation %d", base.ErrCorrupt, r.Region, r.Incarnation)
	}
	if _, err := PlanRegion(r.PageBytes, r.PageCount, r.PieceBytes); err != nil {
		return Region{}, fmt.Errorf("%w: region line: %w", base.ErrCorrupt, err)
	}
	return r, nil
}
