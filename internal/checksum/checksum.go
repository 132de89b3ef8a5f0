// Package checksum computes the payload checksum of an object and the copy loops
// that are fused with it.
//
// The checksum (docs/PROTOCOL.md section 1; docs/rfcs/0004-checksum.md) is a tree of
// two levels over XXH3-64. The value is cut into pieces of the namespace's piece
// size, the last may be shorter:
//
//	seed = XXH3-64(namespace digest, 32 bytes | object key, 32 bytes; seed 0)
//	leaf = XXH3-64(piece; seed)
//	root = XXH3-64(leaf hashes as u64le | length as u64le; seed)
//
// Threads, GPUs and loads of a part compute their leaves alone; only the root needs
// all of them.
//
// It is no protection against intent: XXH3 is not a cryptographic hash. It knows
// nothing of pages, leases or faults: a bus error inside a loop is an ordinary
// run-time panic under debug.SetPanicOnFault, which is the caller's to set.
//
// There are no locks and no goroutines; a Copier or Scatterer belongs to one
// goroutine at a time.
//
// Invariants:
//
//	K1. Every kernel gives the bits of the portable code, for every length, seed and
//	    alignment.
//	K2. A copy loads each source byte once, and the hash covers the bytes that were
//	    stored. A source that changes under a reader (an expired lease, a reused page)
//	    can so never leave unverified bytes behind a matching root.
//	K3. When Copy, CopySum or a Finish returns, its stores are ordered like ordinary
//	    ones: streaming stores are fenced. What publishes ordinary stores (a lock, a
//	    channel, an atomic) then publishes these.
//	K4. Nothing is allocated but the growth of the caller's leaf list.
//
// Source: the XXH3 specification, github.com/Cyan4973/xxHash, doc/xxhash_spec.md;
// measurements in docs/rfcs/0004-checksum.md.
package checksum

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/xcena-dev/maru/internal/base"
)

// FormatVersion is the version of the checksum's definition. A namespace's format
// names it; another version is another namespace.
const FormatVersion = 1

// OpaquePieceBytes is the piece size of opaque values (docs/PROTOCOL.md section 1).
const OpaquePieceBytes = 64 << 10

// LeafBytes is what one leaf takes in a leaf list on a device.
const LeafBytes = 8

// MinEnginePieceBytes and EnginePieceAlignBytes bound the piece size of engine
// objects, so that a GPU can compute it beside the copy.
const (
	MinEnginePieceBytes   = 256
	EnginePieceAlignBytes = 64
)

// Seed returns the seed of an object's checksum. It carries the namespace and the
// key into every leaf, so that a root matches only the right value at the right key.
func Seed(ns base.NamespaceID, key base.Key) uint64 {
	var b [base.NamespaceBytes + base.KeyBytes]byte
	copy(b[:base.NamespaceBytes], ns[:])
	copy(b[base.NamespaceBytes:], key[:])
	return xxh3.HashSeed(b[:], 0)
}

// Leaf returns the hash of one piece.
func Leaf(piece []byte, seed uint64) uint64 { return xxh3.HashSeed(piece, seed) }

// Root returns the root over the leaves of a value of length bytes.
func Root(leaves []uint64, length uint64, seed uint64) uint64 {
	if (len(leaves)+1)*LeafBytes > shortBytes {
		return rootLong(leaves, length, seed)
	}
	var b [shortBytes]byte
	for i, l := range leaves {
		binary.LittleEndian.PutUint64(b[i*LeafBytes:], l)
	}
	binary.LittleEndian.PutUint64(b[len(leaves)*LeafBytes:], length)
	return xxh3.HashSeed(b[:(len(leaves)+1)*LeafBytes], seed)
}

// PieceCount returns how many pieces a value of length bytes has. It is 0 for an
// empty value, and for a piece size that is not positive (such a format has no
// pieces; the callers of formats refuse it by name).
func PieceCount(length uint64, pieceBytes int) int {
	if pieceBytes <= 0 || length == 0 {
		return 0
	}
	return int((length-1)/uint64(pieceBytes)) + 1
}

// Leaves appends the leaf of every piece of data to dst. A piece size that is not
// positive appends nothing.
func Leaves(dst []uint64, data []byte, pieceBytes int, seed uint64) []uint64 {
	if pieceBytes <= 0 {
		return dst
	}
	for len(data) > 0 {
		n := min(len(data), pieceBytes)
		dst = append(dst, Leaf(data[:n], seed))
		data = data[n:]
	}
	return dst
}

// stackLeafCount is how many leaves Sum keeps on its stack: 8 MiB of opaque pieces.
const stackLeafCount = 128

var leafLists = sync.Pool{New: func() any { return new([]uint64) }}

// Sum returns the root of data.
//
// Concurrency: safe; data must not change meanwhile.
func Sum(data []byte, pieceBytes int, seed uint64) uint64 {
	if PieceCount(uint64(len(data)), pieceBytes) <= stackLeafCount {
		var list [stackLeafCount]uint64
		return Root(Leaves(list[:0], data, pieceBytes, seed), uint64(len(data)), seed)
	}
	list := leafLists.Get().(*[]uint64)
	*list = Leaves((*list)[:0], data, pieceBytes, seed)
	root := Root(*list, uint64(len(data)), seed)
	leafLists.Put(list)
	return root
}

// VerifySum reports whether want is the root of data.
func VerifySum(data []byte, pieceBytes int, seed, want uint64) bool {
	return pieceBytes > 0 && Sum(data, pieceBytes, seed) == want
}

// CheckEnginePiece refuses a piece size that engine objects with runs of runBytes
// cannot have: pieces and runs must meet, so that a GPU hashes one beside the copy of
// the other.
//
// Errors: base.ErrInvalid.
func CheckEnginePiece(pieceBytes, runBytes int) error {
	switch {
	case runBytes <= 0:
		return fmt.Errorf("%w: run length %d: must be positive", base.ErrInvalid, runBytes)
	case pieceBytes < MinEnginePieceBytes || pieceBytes%EnginePieceAlignBytes != 0:
		return fmt.Errorf("%w: piece size %d: must be a multiple of %d and at least %d", base.ErrInvalid, pieceBytes, EnginePieceAlignBytes, MinEnginePieceBytes)
	case pieceBytes%runBytes != 0 && runBytes%pieceBytes != 0:
		return fmt.Errorf("%w: piece size %d: must be a multiple or a whole divisor of the run length %d", base.ErrInvalid, pieceBytes, runBytes)
	}
	return nil
}

// FirstDifference returns the index of the first leaf in which two lists differ, or
// -1 when they are equal; a list that ends early differs at its end.
func FirstDifference(got, want []uint64) int {
	n := min(len(got), len(want))
	for i := range n {
		if got[i] != want[i] {
			return i
		}
	}
	if len(got) != len(want) {
		return n
	}
	return -1
}
