package mapping

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/numa"
)

// Access says what a mapping allows.
type Access uint8

// Kinds of access. The zero value allows no write.
const (
	ReadOnly Access = iota
	ReadWrite
)

func (a Access) String() string {
	switch a {
	case ReadOnly:
		return "read-only"
	case ReadWrite:
		return "read-write"
	}
	return fmt.Sprintf("access(%d)", uint8(a))
}

// Sync asks for MAP_SYNC: metadata of a file on a dax file system is durable before
// a store to it can be seen.
type Sync uint8

// Kinds of sync.
const (
	SyncNone        Sync = iota
	SyncIfAvailable      // as the file system can
)

// Advice is what the kernel is told about a mapping.
type Advice uint8

// Kinds of advice.
const (
	AdviceNone      Advice = iota
	AdviceHugePages        // transparent huge pages, where the kernel has them for shared memory
)

// Backing says what touching a mapping costs.
type Backing uint8

// Kinds of backing.
const (
	BackingHeld   Backing = iota // allocated already: devices, files made in full
	BackingMemory                // taken from the machine's memory page by page
)

// Options of a mapping.
type Options struct {
	Access  Access
	Sync    Sync
	Advice  Advice
	Backing Backing
	// Node is the NUMA node that memory is taken from; nil: any.
	Node *int
	// MemoryRoot is put in front of /proc and /sys when memory is asked for; "" outside tests.
	MemoryRoot string
	// Name is what errors call it: a path as a rule.
	Name string
}

// Mapping is a mapped range. Ownership: whoever made it unmaps it, once, after the
// last lease and exported view on it is gone (D1). Concurrency: all methods are safe
// for concurrent use; Unmap must not run beside users of Bytes.
type Mapping struct {
	name    string
	access  Access
	backing Backing
	node    *int
	root    string
	size    uint64

	mu struct {
		sync.RWMutex
		data []byte // nil once unmapped
	}
}

// Map maps length bytes of fd from offset, shared. The descriptor may be closed
// afterwards. Errors: ErrInvalid, ErrFull (no address space or huge pages), ErrDenied,
// ErrUnsupported; of a node those of numa.Bind.
func Map(fd int, offset, length uint64, o Options) (*Mapping, error) {
	page := uint64(os.Getpagesize())
	switch {
	case length == 0 || length > math.MaxInt || offset > math.MaxInt64:
		return nil, fmt.Errorf("%w: mapping %d bytes at %d of %s", base.ErrInvalid, length, offset, o.Name)
	case offset%page != 0 || length%page != 0:
		return nil, fmt.Errorf("%w: mapping %d bytes at %d of %s: both must be multiples of %d", base.ErrInvalid, length, offset, o.Name, page)
	}
	prot := unix.PROT_READ
	if o.Access == ReadWrite {
		prot |= unix.PROT_WRITE
	}
	data, err := mmap(fd, int64(offset), int(length), prot, o.Sync)
	if err != nil {
		return nil, mapError(o.Name, offset, length, err)
	}
	// A child must not keep a pool alive, nor copy on write what it shares.
	if err := unix.Madvise(data, unix.MADV_DONTFORK); err != nil {
		_ = unix.Munmap(data)
		return nil, fmt.Errorf("%w: keeping children away from %s: %w", base.ErrUnsupported, o.Name, err)
	}
	if o.Node != nil {
		if err := numa.Bind(data, *o.Node); err != nil {
			_ = unix.Munmap(data)
			return nil, fmt.Errorf("mapping %s: %w", o.Name, err)
		}
	}
	if o.Advice == AdviceHugePages {
		// A kernel without huge pages for this memory is slower, not wrong.
		_ = unix.Madvise(data, unix.MADV_HUGEPAGE)
	}
	m := &Mapping{name: o.Name, access: o.Access, backing: o.Backing, node: o.Node, root: o.MemoryRoot, size: length}
	m.mu.data = data
	start := addressOf(data)
	addLive(start, start+uintptr(len(data)))
	return m, nil
}

// munmap is unix.Munmap, but in tests.
var munmap = unix.Munmap

func mmap(fd int, offset int64, length, prot int, s Sync) ([]byte, error) {
	if s == SyncIfAvailable {
		data, err := unix.Mmap(fd, offset, length, prot, unix.MAP_SHARED_VALIDATE|unix.MAP_SYNC)
		if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			return data, err
		}
	}
	return unix.Mmap(fd, offset, length, prot, unix.MAP_SHARED)
}

func mapError(name string, offset, length uint64, err error) error {
	what := fmt.Sprintf("mapping %d bytes at %d of %s", length, offset, name)
	switch {
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("%w: %s: %w; raise ulimit -v and vm.max_map_count, or for huge pages vm.nr_hugepages", base.ErrFull, what, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %s: %w", base.ErrDenied, what, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %s: %w; the device may need a larger alignment", base.ErrInvalid, what, err)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w: %s: %w", base.ErrOffline, what, err)
	}
	return fmt.Errorf("%w: %s: %w", base.ErrUnsupported, what, err)
}

// Bytes returns the range, nil once it is unmapped. Ownership: the mapping's; the
// slice is not to be used after Unmap. Access that may fault goes through Guard.
func (m *Mapping) Bytes() []byte {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.data
}

// SizeBytes returns the length of the range, also after Unmap.
func (m *Mapping) SizeBytes() uint64 { return m.size }

// Access returns what the mapping allows.
func (m *Mapping) Access() Access { return m.access }

// Name returns what errors call it.
func (m *Mapping) Name() string { return m.name }

// Guard is the package's [Guard] with this mapping's name in the error.
func (m *Mapping) Guard(fn func()) error {
	if err := Guard(fn); err != nil {
		return fmt.Errorf("using %s: %w", m.name, err)
	}
	return nil
}

// Unmap gives the range back. Errors: ErrClosed when it was unmapped before; ErrInternal when
// the kernel refuses: the range is mapped as before, and Unmap can be called again.
func (m *Mapping) Unmap() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.data == nil {
		return fmt.Errorf("%w: %s was unmapped before", base.ErrClosed, m.name)
	}
	// Out of the registry first: the address may belong to another mapping right after.
	start := addressOf(m.mu.data)
	removeLive(start)
	if err := munmap(m.mu.data); err != nil {
		addLive(start, start+uintptr(len(m.mu.data))) // it is there still, and can be asked for again
		return fmt.Errorf("%w: unmapping %s: %w", base.ErrInternal, m.name, err)
	}
	m.mu.data = nil
	return nil
}

// Close is Unmap, for io.Closer.
func (m *Mapping) Close() error { return m.Unmap() }
