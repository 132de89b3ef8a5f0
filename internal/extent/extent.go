// Package extent is a first-fit allocator of byte ranges inside a pool. It is a
// pure core: no I/O, no clock, no goroutine, no lock; it keeps no durable state
// and knows nothing of regions. What is allocated is told to it again at start
// with Reserve.
//
// Invariants: E1 free and allocated extents tile [start, end), aligned and
// disjoint, and no two free extents touch. E2 free + allocated = total.
//
// The free list and the allocated list are slices in order of offset. Pools have
// thousands of regions and each change costs a durable transaction, so a search
// over a few thousand adjacent pairs is never what is waited for
// (BenchmarkAllocate measures it); one slice each is also what a reader can
// check at a glance.
//
// Concurrency: none; the caller serializes.
//
// Source: docs/PROTOCOL.md, sections 2 and 4.
package extent

import (
	"fmt"
	"sort"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// Allocator gives extents out of one range.
type Allocator struct {
	start, end uint64
	alignment  uint64
	free       []base.Extent // in order, never touching
	allocated  []base.Extent // in order
	freeBytes  uint64
}

// New makes an allocator of [start, end). alignment is a power of two; all of
// start, end and lengths are multiples of it. Errors: ErrInvalid.
func New(start, end, alignment uint64) (*Allocator, error) {
	if alignment == 0 || alignment&(alignment-1) != 0 {
		return nil, fmt.Errorf("%w: alignment %d is no power of two", base.ErrInvalid, alignment)
	}
	if start > end || start%alignment != 0 || end%alignment != 0 {
		return nil, fmt.Errorf("%w: range [%#x,%#x) is not aligned to %#x", base.ErrInvalid, start, end, alignment)
	}
	a := &Allocator{start: start, end: end, alignment: alignment, freeBytes: end - start}
	if end > start {
		a.free = []base.Extent{{Offset: start, Length: end - start}}
	}
	return a, nil
}

// TotalBytes is the pool: free and allocated together (E2).
func (a *Allocator) TotalBytes() uint64 { return a.end - a.start }

// FreeBytes is what is not allocated, in one piece or many.
func (a *Allocator) FreeBytes() uint64 { return a.freeBytes }

// AllocatedBytes is what is allocated.
func (a *Allocator) AllocatedBytes() uint64 { return a.TotalBytes() - a.freeBytes }

// LargestFreeBytes is the largest length that Allocate can give now.
func (a *Allocator) LargestFreeBytes() uint64 {
	var largest uint64
	for _, e := range a.free {
		largest = max(largest, e.Length)
	}
	return largest
}

// AllocatedCount is the number of allocated extents.
func (a *Allocator) AllocatedCount() int { return len(a.allocated) }

// Allocate takes the first free extent that is long enough. Errors: ErrInvalid
// for a length of zero or not aligned, ErrFull when no free extent is long enough.
func (a *Allocator) Allocate(length uint64) (base.Extent, error) {
	if length == 0 || length%a.alignment != 0 {
		return base.Extent{}, fmt.Errorf("%w: extent length %d is no multiple of %d", base.ErrInvalid, length, a.alignment)
	}
	for i, e := range a.free {
		if e.Length >= length {
			got := base.Extent{Offset: e.Offset, Length: length}
			a.takeAt(i, got)
			a.check()
			return got, nil
		}
	}
	return base.Extent{}, fmt.Errorf("%w: no free extent of %d bytes: %d are free, the largest piece has %d",
		base.ErrFull, length, a.freeBytes, a.LargestFreeBytes())
}

// Reserve takes exactly this extent, when state is built again at start. Errors:
// ErrInvalid when it is empty, not aligned or out of bounds, ErrExists when a
// part of it is allocated already.
func (a *Allocator) Reserve(e base.Extent) error {
	if e.Length == 0 || e.Offset%a.alignment != 0 || e.Length%a.alignment != 0 ||
		e.Offset < a.start || e.Offset > a.end || e.Length > a.end-e.Offset {
		return fmt.Errorf("%w: extent %s is not an aligned part of [%#x,%#x)", base.ErrInvalid, e, a.start, a.end)
	}
	i := sort.Search(len(a.free), func(i int) bool { return a.free[i].End() > e.Offset })
	if i == len(a.free) || !a.free[i].Contains(e) {
		return fmt.Errorf("%w: extent %s is not free", base.ErrExists, e)
	}
	a.takeAt(i, e)
	a.check()
	return nil
}

// Free gives an extent back, whole. Errors: ErrNotFound when exactly this extent
// is not allocated.
func (a *Allocator) Free(e base.Extent) error {
	j := sort.Search(len(a.allocated), func(j int) bool { return a.allocated[j].Offset >= e.Offset })
	if j == len(a.allocated) || a.allocated[j] != e {
		return fmt.Errorf("%w: extent %s is not allocated", base.ErrNotFound, e)
	}
	a.allocated = append(a.allocated[:j], a.allocated[j+1:]...)
	a.freeBytes += e.Length

	i := sort.Search(len(a.free), func(i int) bool { return a.free[i].Offset > e.Offset })
	left := i > 0 && a.free[i-1].End() == e.Offset
	right := i < len(a.free) && a.free[i].Offset == e.End()
	switch {
	case left && right:
		a.free[i-1].Length += e.Length + a.free[i].Length
		a.free = append(a.free[:i], a.free[i+1:]...)
	case left:
		a.free[i-1].Length += e.Length
	case right:
		a.free[i].Offset, a.free[i].Length = e.Offset, a.free[i].Length+e.Length
	default:
		a.free = insert(a.free, i, e)
	}
	a.check()
	return nil
}

// takeAt cuts e out of free[i], which contains it.
func (a *Allocator) takeAt(i int, e base.Extent) {
	f := a.free[i]
	before := base.Extent{Offset: f.Offset, Length: e.Offset - f.Offset}
	after := base.Extent{Offset: e.End(), Length: f.End() - e.End()}
	switch {
	case before.Length == 0 && after.Length == 0:
		a.free = append(a.free[:i], a.free[i+1:]...)
	case before.Length == 0:
		a.free[i] = after
	case after.Length == 0:
		a.free[i] = before
	default:
		a.free[i] = before
		a.free = insert(a.free, i+1, after)
	}
	a.freeBytes -= e.Length
	j := sort.Search(len(a.allocated), func(j int) bool { return a.allocated[j].Offset > e.Offset })
	a.allocated = insert(a.allocated, j, e)
}

func insert(s []base.Extent, i int, e base.Extent) []base.Extent {
	s = append(s, base.Extent{})
	copy(s[i+1:], s[i:])
	s[i] = e
	return s
}

// checkedCount bounds the whole check after each change: above it the check
// would make a test of many regions quadratic, and Check is there to be called.
const checkedCount = 512

func (a *Allocator) check() {
	if invariants.Enabled && len(a.free)+len(a.allocated) <= checkedCount {
		a.Check()
	}
}

// Check asserts E1 and E2 in invariant builds.
func (a *Allocator) Check() {
	if !invariants.Enabled {
		return
	}
	at, free, allocated := a.start, uint64(0), uint64(0)
	lastFree := false
	i, j := 0, 0
	for at < a.end {
		switch {
		case i < len(a.free) && a.free[i].Offset == at:
			invariants.Check(!lastFree, "E1", "free extents touch at %#x", at)
			invariants.Check(a.free[i].Length > 0 && a.free[i].Length%a.alignment == 0, "E1", "free extent %s", a.free[i])
			at, free, lastFree, i = a.free[i].End(), free+a.free[i].Length, true, i+1
		case j < len(a.allocated) && a.allocated[j].Offset == at:
			invariants.Check(a.allocated[j].Length > 0 && a.allocated[j].Length%a.alignment == 0, "E1", "allocated extent %s", a.allocated[j])
			at, allocated, lastFree, j = a.allocated[j].End(), allocated+a.allocated[j].Length, false, j+1
		default:
			invariants.Failf("E1", "no extent begins at %#x", at)
		}
	}
	invariants.Check(at == a.end && i == len(a.free) && j == len(a.allocated), "E1", "extents pass the end %#x", a.end)
	invariants.Check(free == a.freeBytes && free+allocated == a.TotalBytes(), "E2", "free %d (counted %d) + allocated %d, total %d", a.freeBytes, free, allocated, a.TotalBytes())
}
