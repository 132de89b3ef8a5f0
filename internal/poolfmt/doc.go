// Package poolfmt is the format of a pool on its device: the header, the nonce
// slots, the region line, the records, and where they lie. It encodes and
// decodes bytes and computes places; it opens, maps, flushes and locks nothing,
// and it knows no store: callers decide what a sequence means.
//
// # Layout of a pool
//
//	    0  header: static line (64 bytes)
//	   64  header: slot 0, sequences with parity 0
//	  128  header: slot 1, sequences with parity 1
//	 4096  64 nonce slots of 64 bytes, for the proof of access domains
//	2 MiB  data of the pool: region extents, aligned to 2 MiB
//
// # Layout of a region extent
//
//	    0  pages: offset = index x page size
//	    T  region line (128 bytes), T = data length rounded up to 4096
//	T+128  one record of 64 bytes for each page
//	       the whole rounded up to 2 MiB
//
// # Checks
//
// Every line carries a check, so that a torn or foreign one is never believed.
// A check of 8 bytes is XXH3-64 over the bytes in front of it followed by the
// pool's UUID (the static line, which holds the UUID itself, goes without); a
// check of 3 bytes is the low 24 bits of it. The seed names the kind of line
// (and a slot's number), so that a line of one kind never passes for another.
// A record's check leaves out its first 8 bytes: the mark is written later, by
// one aligned store, and stands for itself.
//
// Everything that is reserved must be zero: a line with anything else there is
// of a newer version or damaged, and is refused.
//
// All integers are little-endian. Nothing here keeps a slice of its caller.
//
// Source: docs/PROTOCOL.md, section 2; docs/rfcs/0001-device-format.md.
package poolfmt

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// Fixed sizes and places, in bytes. They are the format; none is a setting.
const (
	LineBytes       = 64 // one cache line: what a device takes whole or not at all is at most this
	HeaderBytes     = 3 * LineBytes
	HeaderVersion   = 2
	slotCount       = 2
	NonceAreaOffset = 4096
	NonceSlotBytes  = LineBytes
	NonceSlotCount  = 64
	NonceBytes      = 32

	// DataOffset is where regions begin, and Alignment what they are aligned to:
	// devdax devices map in units of 2 MiB.
	DataOffset = 2 << 20
	Alignment  = 2 << 20

	TableAlignment  = 4096
	RegionLineBytes = 128
	RegionVersion   = 1
	RecordBytes     = 64
)

// Seeds of the checks, one a kind of line.
const (
	seedStatic uint64 = 0x4d41525500000001 + iota
	seedSlot0
	seedSlot1
	seedRegion
	seedRecord
	seedNonce
)

var le = binary.LittleEndian

// check8 hashes a line's bytes and what they are bound to. The lines are small,
// so the copy costs less than a streaming hasher.
func check8(seed uint64, line []byte, bound ...[]byte) uint64 {
	var buf [192]byte
	n := copy(buf[:], line)
	for _, b := range bound {
		n += copy(buf[n:], b)
	}
	return xxh3.HashSeed(buf[:n], seed)
}

func isZero(b []byte) bool {
	var or byte
	for _, x := range b {
		or |= x
	}
	return or == 0
}
