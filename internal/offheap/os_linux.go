package offheap

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// hugePageBytes is the size of a transparent huge page on amd64 and on arm64
// with 4 KiB base pages; on other page sizes the advice below is only less exact.
const hugePageBytes = 2 << 20

// OS is an Allocator on anonymous mappings.
type OS struct{}

// Reserve implements Allocator. The range is PROT_NONE and MAP_NORESERVE: it
// costs address space only and counts against no commit limit.
func (OS) Reserve(maxBytes uint64) (Slab, error) {
	maxBytes = roundUp(max(maxBytes, 1), uint64(unix.Getpagesize())) //nolint:gosec // positive
	// One huge page more, so that the slab can start at the border of one.
	mapped := maxBytes
	if maxBytes >= hugePageBytes {
		mapped += hugePageBytes
	}
	m, err := unix.Mmap(-1, 0, int(mapped), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE) //nolint:gosec // below 2^47
	if err != nil {
		return nil, fmt.Errorf("offheap: reserve %d bytes of address space: %w: %w", mapped, base.ErrFull, err)
	}
	start := uint64(0)
	if maxBytes >= hugePageBytes {
		start = -addressOf(m) & (hugePageBytes - 1)
	}
	return &osSlab{mapping: m, data: m[start : start+maxBytes : start+maxBytes]}, nil
}

type osSlab struct {
	mapping   []byte // as mmap returned it, for munmap
	data      []byte // the aligned part
	committed uint64
}

// Grow implements Slab.
func (s *osSlab) Grow(sizeBytes uint64) ([]byte, error) {
	if sizeBytes > uint64(len(s.data)) {
		return nil, limitError(sizeBytes, uint64(len(s.data)))
	}
	step := uint64(unix.Getpagesize()) //nolint:gosec // positive
	if sizeBytes >= hugePageBytes {
		step = hugePageBytes
	}
	target := min(roundUp(sizeBytes, step), uint64(len(s.data)))
	if target > s.committed {
		part := s.data[s.committed:target]
		if err := unix.Mprotect(part, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return nil, fmt.Errorf("offheap: commit %d bytes: %w: %w", len(part), base.ErrFull, err)
		}
		if target >= hugePageBytes {
			// Advice only: a kernel without huge pages serves small ones.
			_ = unix.Madvise(s.data[:target], unix.MADV_HUGEPAGE)
		}
		s.committed = target
	}
	return s.data[:s.committed:s.committed], nil
}

// CommittedBytes implements Slab.
func (s *osSlab) CommittedBytes() uint64 { return s.committed }

// Free implements Slab.
func (s *osSlab) Free() error {
	if s.mapping == nil {
		return nil
	}
	err := unix.Munmap(s.mapping)
	s.mapping, s.data, s.committed = nil, nil, 0
	if err != nil {
		return fmt.Errorf("offheap: unmap: %w", err)
	}
	return nil
}

func roundUp(n, step uint64) uint64 { return (n + step - 1) / step * step }
