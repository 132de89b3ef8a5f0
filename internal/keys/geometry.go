package keys

import (
	"fmt"
	"math"

	"github.com/xcena-dev/maru/internal/base"
)

// Sizes of pages and pieces.
const (
	// PageAlignBytes is what engine pages are aligned to.
	PageAlignBytes = 4096
	// OpaquePieceBytes is the piece of opaque values; their last may be shorter.
	OpaquePieceBytes uint32 = 64 << 10
	// MinPieceBytes and PieceAlignBytes let a GPU hash a piece with one warp.
	MinPieceBytes   = 256
	PieceAlignBytes = 64
	// TargetPieceBytes fits the first-level cache with room for the copy: a piece is
	// hashed there and streamed out at 0.80 to 0.83 of a plain copy, measured.
	TargetPieceBytes = 16 << 10
	maxPieceBytes    = 1 << 20
	leafBytes        = 8
)

// PieceBytes chooses the piece of engine objects whose blocks consist of runs of
// these lengths: the largest whole divisor of all of them up to TargetPieceBytes
// that is aligned and not too small; where there is none, the smallest such
// multiple. So no piece lies across the border of a run in part, and a GPU can
// hash a piece where it copies it.
//
// Errors: base.ErrInvalid (no runs, a run of zero bytes), base.ErrUnsupported (no
// piece up to 1 MiB serves these lengths).
func PieceBytes(runs ...uint64) (uint32, error) {
	if len(runs) == 0 {
		return 0, fmt.Errorf("%w: no run lengths", base.ErrInvalid)
	}
	divisor, multiple := uint64(0), uint64(PieceAlignBytes)
	for _, r := range runs {
		if r == 0 || r > base.MaxObjectBytes {
			return 0, fmt.Errorf("%w: run of %d bytes, 1 to %d are allowed", base.ErrInvalid, r, base.MaxObjectBytes)
		}
		divisor = gcd(divisor, r)
		if multiple <= maxPieceBytes {
			multiple = multiple / gcd(multiple, r) * r
		}
	}
	if divisor%PieceAlignBytes == 0 && divisor >= MinPieceBytes {
		units := divisor / PieceAlignBytes
		for p := uint64(TargetPieceBytes / PieceAlignBytes); p >= MinPieceBytes/PieceAlignBytes; p-- {
			if units%p == 0 {
				return uint32(p * PieceAlignBytes), nil //nolint:gosec // at most TargetPieceBytes
			}
		}
		if divisor <= maxPieceBytes {
			return uint32(divisor), nil
		}
		// Only a piece below the minimum divides a run of more than a MiB.
		return 0, fmt.Errorf("%w: no piece of %d bytes to 1 MiB divides runs of %v bytes", base.ErrUnsupported, MinPieceBytes, runs)
	}
	for p := multiple; p <= maxPieceBytes; p += multiple {
		if p >= MinPieceBytes {
			return uint32(p), nil //nolint:gosec // at most 1 MiB
		}
	}
	return 0, fmt.Errorf("%w: no piece up to 1 MiB is a multiple of runs of %v bytes and of %d", base.ErrUnsupported, runs, PieceAlignBytes)
}

// EnginePageBytes returns the page of an engine object: the value, the leaf hash
// of every piece behind it, aligned to 4096.
//
// Errors: base.ErrInvalid for sizes of zero or beyond the format.
func EnginePageBytes(valueBytes uint64, pieceBytes uint32) (uint64, error) {
	if valueBytes == 0 || valueBytes > base.MaxObjectBytes {
		return 0, fmt.Errorf("%w: value of %d bytes, 1 to %d are allowed", base.ErrInvalid, valueBytes, base.MaxObjectBytes)
	}
	if pieceBytes < MinPieceBytes || pieceBytes%PieceAlignBytes != 0 {
		return 0, fmt.Errorf("%w: piece of %d bytes, must be a multiple of %d and at least %d",
			base.ErrInvalid, pieceBytes, PieceAlignBytes, MinPieceBytes)
	}
	pieces := (valueBytes + uint64(pieceBytes) - 1) / uint64(pieceBytes)
	// The list begins on a border of 8, so that its hashes can be read in place.
	total := (valueBytes+7)&^7 + pieces*leafBytes
	if total > math.MaxUint64-PageAlignBytes {
		return 0, fmt.Errorf("%w: page of %d bytes", base.ErrInvalid, total)
	}
	return (total + PageAlignBytes - 1) &^ (PageAlignBytes - 1), nil
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
