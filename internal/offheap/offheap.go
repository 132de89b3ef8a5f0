// Package offheap gives the directory memory that the garbage collector neither
// scans nor counts: slabs of zeroed bytes that grow without moving what is in
// them. It is not an allocator of small objects; a slab's owner cuts it itself
// and keeps no Go pointer in it.
//
// There are two implementations of [Allocator]. [OS] reserves address space and
// commits it as a slab grows (mmap with PROT_NONE, then mprotect), on huge pages
// where the kernel has them. [Heap] uses Go memory, for tests and for the
// simulator; its slabs move when they grow, so that owners learn to fetch the
// view again.
//
// Concurrency: none here. The owner of a slab serialises Grow and Free with all
// use of its bytes.
//
// Source: D2a (docs/ARCHITECTURE.md, "directory").
package offheap

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// Allocator hands out slabs.
type Allocator interface {
	// Reserve makes a slab that can grow to maxBytes. Nothing is committed yet.
	// Errors: base.ErrFull when the address space or memory is not there.
	Reserve(maxBytes uint64) (Slab, error)
}

// Slab is one growing range of zeroed memory, 8-byte aligned.
type Slab interface {
	// Grow commits at least sizeBytes and returns the whole slab. Bytes that were
	// there keep their values; new ones are zero. Slices returned before are
	// invalid from now on, whether or not they moved.
	// Errors: base.ErrLimit beyond the reservation, base.ErrFull without memory.
	Grow(sizeBytes uint64) ([]byte, error)
	// CommittedBytes is what the slab may have resident.
	CommittedBytes() uint64
	// Free gives everything back. The slab and its bytes are not usable after it.
	Free() error
}

// Heap is an Allocator on the Go heap.
type Heap struct{}

// Reserve implements Allocator.
func (Heap) Reserve(maxBytes uint64) (Slab, error) { return &heapSlab{maxBytes: maxBytes}, nil }

type heapSlab struct {
	words    []uint64 // words, so that the bytes are aligned
	maxBytes uint64
}

// Grow implements Slab.
func (s *heapSlab) Grow(sizeBytes uint64) ([]byte, error) {
	if sizeBytes > s.maxBytes {
		return nil, limitError(sizeBytes, s.maxBytes)
	}
	if need := (sizeBytes + 7) / 8; need > uint64(len(s.words)) {
		grown := make([]uint64, need)
		copy(grown, s.words)
		s.words = grown
	}
	return Bytes(s.words), nil
}

// CommittedBytes implements Slab.
func (s *heapSlab) CommittedBytes() uint64 { return 8 * uint64(len(s.words)) }

// Free implements Slab.
func (s *heapSlab) Free() error {
	s.words = nil
	return nil
}

func limitError(sizeBytes, maxBytes uint64) error {
	return fmt.Errorf("offheap: grow to %d bytes, reserved are %d: %w", sizeBytes, maxBytes, base.ErrLimit)
}
