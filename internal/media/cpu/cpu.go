// Package cpu is the private memory of one session: memfd segments, mapped shared, so
// that they can be registered with a GPU or handed to another process later. It is no
// allocator: pages are cut by the session core, and no object crosses a segment's
// border.
//
// A segment cannot shrink or grow (sealed), is not inherited by children, and costs
// nothing until it is touched: a pool of any size is ready at once, and Populate touches
// it while it serves.
//
// # Numbered invariants
//
//  1. All segments but the last have the same size, a multiple of 2 MiB.
//  2. Close unmaps every segment once; nothing is unmapped before (D1).
//
// Locks: Pool.mu; that of a mapping inside it.
package cpu

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/hugetlb"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/media/memlimit"
	"github.com/xcena-dev/maru/internal/media/numa"
)

const (
	// DefaultSegmentBytes is what one segment has at most: large enough that a registration
	// with a GPU is rare, small enough that it takes well under a second.
	DefaultSegmentBytes = 1 << 30
	// AlignBytes is what the size of a segment is a multiple of: a huge page.
	AlignBytes = 2 << 20
	// maxSegmentCount bounds the file descriptors of a pool.
	maxSegmentCount = 4096
)

// HugePages says what pages the memory is made of.
type HugePages uint8

// Kinds of pages.
const (
	HugePagesAdvise HugePages = iota // transparent huge pages, where the kernel gives them
	HugePagesNone                    // small pages
	HugePages2M                      // hugetlb pages, which the operator has reserved
	HugePages1G                      // the same
)

func (h HugePages) String() string {
	switch h {
	case HugePagesAdvise:
		return "auto"
	case HugePagesNone:
		return "off"
	case HugePages2M, HugePages1G:
		return h.size().String()
	}
	return fmt.Sprintf("hugepages(%d)", uint8(h))
}

// ParseHugePages reads what String shows; "" is the default. Errors: ErrInvalid.
func ParseHugePages(s string) (HugePages, error) {
	for h := HugePagesAdvise; h <= HugePages1G; h++ {
		if s == h.String() || s == "" {
			return h, nil
		}
	}
	return HugePagesAdvise, fmt.Errorf("%w: huge pages %q, allowed: auto, off, 2M, 1G", base.ErrInvalid, s)
}

// size is that of reserved pages, 0 of others.
func (h HugePages) size() hugetlb.Size {
	switch h {
	case HugePages2M:
		return hugetlb.Size2M
	case HugePages1G:
		return hugetlb.Size1G
	}
	return 0
}

// GranuleBytes is what the size of a pool is a multiple of.
func (h HugePages) GranuleBytes() uint64 { return max(4096, uint64(h.size())) }

// Overcommit says whether a pool may be larger than the memory that is available.
type Overcommit uint8

// Kinds of overcommit.
const (
	OvercommitRefuse Overcommit = iota
	OvercommitAllow
)

// Options of a pool.
type Options struct {
	// SizeBytes is the size of the pool, a multiple of HugePages.GranuleBytes. All of it
	// is usable.
	SizeBytes uint64
	// SegmentBytes bounds one segment, a multiple of 2 MiB and of GranuleBytes; 0 means
	// DefaultSegmentBytes.
	SegmentBytes uint64
	HugePages    HugePages
	// NUMANode is where all of the memory comes from, strictly; nil: as the kernel likes.
	NUMANode   *int
	Overcommit Overcommit
	// Name is shown in /proc/PID/maps; empty means "maru-cpu".
	Name string
	// Root is put in front of /proc and /sys when memory is asked for; "" outside tests.
	Root string
}

// Pool is private memory. Ownership: the session's; it closes it after the last lease
// and exported view is gone. Concurrency: safe for concurrent use.
type Pool struct {
	sizeBytes    uint64
	segmentBytes uint64
	segments     []*mapping.Mapping
	fds          []int

	mu struct {
		sync.Mutex
		closed bool
	}
}

// New makes a pool. Errors: ErrInvalid (sizes; a node that is not there; more than the
// memory that is available, unless overcommitted), ErrFull (not enough huge pages are
// reserved, no address space), ErrLimit (segments or file descriptors), ErrDenied and
// ErrUnsupported (nodes, huge pages).
func New(o Options) (*Pool, error) {
	if o.SegmentBytes == 0 {
		o.SegmentBytes = DefaultSegmentBytes
	}
	if o.Name == "" {
		o.Name = "maru-cpu"
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	p := &Pool{sizeBytes: o.SizeBytes, segmentBytes: o.SegmentBytes}
	for left := o.SizeBytes; left > 0; {
		n := min(left, o.SegmentBytes)
		fd, m, err := o.segment(len(p.segments), n)
		if err != nil {
			_ = p.Close()
			return nil, err
		}
		p.fds, p.segments = append(p.fds, fd), append(p.segments, m)
		left -= n
	}
	return p, nil
}

func (o Options) check() error {
	granule := o.HugePages.GranuleBytes()
	align := max(granule, AlignBytes)
	switch {
	case o.HugePages > HugePages1G:
		return fmt.Errorf("%w: %s of the cpu pool", base.ErrInvalid, o.HugePages)
	case o.SizeBytes == 0 || o.SizeBytes%granule != 0:
		return fmt.Errorf("%w: size of the cpu pool is %d bytes, must be a positive multiple of %d", base.ErrInvalid, o.SizeBytes, granule)
	case o.SegmentBytes%align != 0:
		return fmt.Errorf("%w: segment size of the cpu pool is %d bytes, must be a multiple of %d", base.ErrInvalid, o.SegmentBytes, align)
	case o.SizeBytes > 1<<56:
		return fmt.Errorf("%w: size of the cpu pool is %d bytes, more than any machine has", base.ErrInvalid, o.SizeBytes)
	case (o.SizeBytes-1)/o.SegmentBytes >= maxSegmentCount:
		return fmt.Errorf("%w: a cpu pool of %d bytes in segments of %d has more than %d of them; make segments larger",
			base.ErrLimit, o.SizeBytes, o.SegmentBytes, maxSegmentCount)
	}
	if o.NUMANode != nil {
		if err := numa.Check(o.Root, *o.NUMANode); err != nil {
			return fmt.Errorf("cpu pool: %w", err)
		}
	}
	// Reserved huge pages are no part of MemAvailable.
	if size := o.HugePages.size(); size != 0 {
		if err := hugetlb.Check(o.Root, size, o.NUMANode, o.SizeBytes); err != nil {
			return fmt.Errorf("cpu pool of %d bytes: %w", o.SizeBytes, err)
		}
		return nil
	}
	if o.Overcommit == OvercommitAllow {
		return nil
	}
	have, err := memlimit.ReadOn(o.Root, o.NUMANode)
	if err != nil {
		return fmt.Errorf("%w; allow overcommit to go on without knowing", err)
	}
	if o.SizeBytes > have.Bytes {
		return fmt.Errorf("%w: size of the cpu pool is %d bytes, available are %d (%s); choose a smaller size or allow overcommit",
			base.ErrInvalid, o.SizeBytes, have.Bytes, have.Source)
	}
	return nil
}

func (o Options) segment(index int, size uint64) (int, *mapping.Mapping, error) {
	name := fmt.Sprintf("%s-%d", o.Name, index)
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	switch o.HugePages {
	case HugePages2M:
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	case HugePages1G:
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_1GB
	case HugePagesAdvise, HugePagesNone:
	}
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags) // before Linux 6.3
	}
	if err != nil {
		return -1, nil, segmentError(name, size, err)
	}
	m, err := o.mapSegment(fd, name, size)
	if err != nil {
		_ = unix.Close(fd)
		return -1, nil, err
	}
	return fd, m, nil
}

func (o Options) mapSegment(fd int, name string, size uint64) (*mapping.Mapping, error) {
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return nil, segmentError(name, size, err)
	}
	// Sealed: nobody who gets the descriptor later can cut memory away under a reader.
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return nil, segmentError(name, size, err)
	}
	advice := mapping.AdviceNone
	if o.HugePages == HugePagesAdvise {
		advice = mapping.AdviceHugePages
	}
	backing := mapping.BackingMemory
	if o.HugePages.size() != 0 {
		backing = mapping.BackingHeld // mapping reserved them
	}
	return mapping.Map(fd, 0, size, mapping.Options{
		Access: mapping.ReadWrite, Advice: advice, Backing: backing, Node: o.NUMANode, MemoryRoot: o.Root, Name: "memory " + name,
	})
}

func segmentError(name string, size uint64, err error) error {
	what := fmt.Sprintf("making segment %s of %d bytes", name, size)
	switch {
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return fmt.Errorf("%w: %s: %w; raise ulimit -n or make segments larger", base.ErrLimit, what, err)
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("%w: %s: %w; for huge pages raise vm.nr_hugepages", base.ErrFull, what, err)
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: %s: %w", base.ErrUnsupported, what, err)
	}
	return fmt.Errorf("%w: %s: %w", base.ErrUnavailable, what, err)
}

// SizeBytes returns the size of the pool.
func (p *Pool) SizeBytes() uint64 { return p.sizeBytes }

// SegmentBytes returns what each segment but the last has.
func (p *Pool) SegmentBytes() uint64 { return p.segmentBytes }

// Segments returns all segments in their order. Ownership: the pool's; they are
// unmapped by its Close only.
func (p *Pool) Segments() []*mapping.Mapping { return p.segments }

// FD returns the descriptor of a segment, for a registration or another process.
// Ownership: the pool's; duplicate it to keep it.
func (p *Pool) FD(segment int) int { return p.fds[segment] }

// Populate touches all segments, in their order, with at most workers goroutines. It
// returns when done, when ctx ends, or at the first error. Errors: those of
// mapping.Populate.
func (p *Pool) Populate(ctx context.Context, workers int) error {
	for _, m := range p.segments {
		if err := m.Populate(ctx, workers); err != nil {
			return err
		}
	}
	return nil
}

// Close gives all memory back. Errors: ErrClosed when it was closed before.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return fmt.Errorf("%w: the cpu pool was closed before", base.ErrClosed)
	}
	p.mu.closed = true
	var errs []error
	for i, m := range p.segments {
		errs = append(errs, m.Unmap(), unix.Close(p.fds[i]))
	}
	return errors.Join(errs...)
}
