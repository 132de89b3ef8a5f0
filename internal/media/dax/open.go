package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

// Kind is how a pool's path is opened and mapped; the numbers are those of DeviceKind
// on the wire.
type Kind uint8

// Kinds. KindAuto finds out.
const (
	KindAuto   Kind = iota
	KindDevdax      // character device of device_dax
	KindFsdax       // file on a file system mounted with dax
	KindFile        // any other file
)

func (k Kind) String() string {
	switch k {
	case KindAuto:
		return "auto"
	case KindDevdax:
		return "devdax"
	case KindFsdax:
		return "fsdax"
	case KindFile:
		return "file"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ParseKind reads a kind as String shows it.
func ParseKind(s string) (Kind, error) {
	for _, k := range []Kind{KindAuto, KindDevdax, KindFsdax, KindFile} {
		if k.String() == s {
			return k, nil
		}
	}
	return KindAuto, fmt.Errorf("%w: device kind %q is unknown, allowed: auto, devdax, fsdax, file", base.ErrInvalid, s)
}

// Lock says whether a device is opened as its one owner.
type Lock uint8

// Kinds of lock.
const (
	LockNone      Lock = iota // a mapper: clients, agents
	LockExclusive             // the owner: a resource manager, maru device
)

// OpenOptions of a device or file.
type OpenOptions struct {
	// Create makes a plain file of SizeBytes where none is. One that is there is opened,
	// if it has that size.
	Create bool
	// SizeBytes is what a file must have; 0 takes what it has. Of a device it is the least.
	SizeBytes uint64
	// ReadOnly opens for reading: mappings can then be read-only only.
	ReadOnly bool
	Lock     Lock
	// Overcommit lets a file on tmpfs be larger than the memory that is available.
	Overcommit bool
	// NUMANode is where the memory of a file that is made on tmpfs or hugetlbfs comes
	// from, strictly; nil: as the kernel likes.
	NUMANode *int
	// HugePages asks for transparent huge pages in mappings of files on tmpfs.
	HugePages bool
	// SysfsRoot and ProcRoot are for tests; empty means "/sys" and "/".
	SysfsRoot string
	ProcRoot  string
}

// File is an open device or file. Ownership: the caller closes it; mappings live on.
// Concurrency: safe for concurrent use.
type File struct {
	path       string
	kind       Kind
	sizeBytes  uint64
	alignBytes uint64
	opts       OpenOptions
	f          *os.File
	once       sync.Once
	err        error
}

// Open opens what a pool is made of. Errors: ErrInvalid (sizes, path, kind), ErrNotFound,
// ErrMismatch (another kind or size), ErrBusy (another owner), ErrFull (no room to make
// it), ErrDenied, ErrUnsupported.
func Open(path string, kind Kind, o OpenOptions) (*File, error) {
	if o.SysfsRoot == "" {
		o.SysfsRoot = "/sys"
	}
	if !filepath.IsAbs(path) {
		return nil, fmt.Errorf("%w: device path %q is not absolute", base.ErrInvalid, path)
	}
	if o.Create && (o.ReadOnly || o.SizeBytes == 0 || kind == KindDevdax) {
		return nil, fmt.Errorf("%w: making %s needs a size, write access and a kind other than devdax", base.ErrInvalid, path)
	}
	f, err := openOrMake(path, o)
	if err != nil {
		return nil, err
	}
	x := &File{path: path, f: f, opts: o}
	if err := x.inspect(kind); err != nil {
		_ = f.Close()
		return nil, err
	}
	return x, nil
}

func openOrMake(path string, o OpenOptions) (*os.File, error) {
	flags := os.O_RDWR
	if o.ReadOnly {
		flags = os.O_RDONLY
	}
	// A FIFO or a tape must not hold the opener; what it is is looked at afterwards.
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) && o.Create {
		f, err = makeFile(path, o)
		if errors.Is(err, fs.ErrExist) {
			// Somebody else made it meanwhile.
			f, err = os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
		}
	}
	if err != nil {
		return nil, openError(path, err)
	}
	return f, nil
}

func openError(path string, err error) error {
	switch {
	case base.CodeOf(err) != base.CodeInternal:
		return err
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: device %s: %w; name another one, or for a file give the size that it is made with", base.ErrNotFound, path, err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return fmt.Errorf("%w: device %s: %w; give this user access to it", base.ErrDenied, path, err)
	case errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w: device %s: %w; no driver has it", base.ErrOffline, path, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: device %s: %w", base.ErrBusy, path, err)
	}
	return fmt.Errorf("%w: device %s: %w", base.ErrInvalid, path, err)
}

// inspect finds out what was opened, locks it and checks its size.
func (x *File) inspect(want Kind) error {
	info, err := x.f.Stat()
	if err != nil {
		return openError(x.path, err)
	}
	switch {
	case info.Mode()&fs.ModeCharDevice != 0:
		err = x.inspectDevice()
	case info.Mode().IsRegular():
		err = x.inspectFile(info)
	default:
		err = fmt.Errorf("%w: %s is neither a dax device nor a file (%s)", base.ErrInvalid, x.path, info.Mode().Type())
	}
	if err != nil {
		return err
	}
	if want != KindAuto && want != x.kind {
		return fmt.Errorf("%w: %s is of kind %s, not %s", base.ErrMismatch, x.path, x.kind, want)
	}
	if x.opts.Lock == LockExclusive {
		if err := x.lock(); err != nil {
			return err
		}
	}
	if x.kind == KindDevdax {
		if x.sizeBytes < x.opts.SizeBytes {
			return fmt.Errorf("%w: device %s has %d bytes, %d are needed", base.ErrMismatch, x.path, x.sizeBytes, x.opts.SizeBytes)
		}
		return nil
	}
	if x.opts.SizeBytes != 0 && x.sizeBytes != x.opts.SizeBytes {
		return fmt.Errorf("%w: %s is there and has %d bytes, not %d; name its size, another path, or remove it if it is not needed",
			base.ErrMismatch, x.path, x.sizeBytes, x.opts.SizeBytes)
	}
	if x.opts.Lock == LockExclusive && !x.opts.ReadOnly {
		return fillHoles(x.f, x.path, x.sizeBytes, x.opts)
	}
	return nil
}

func (x *File) inspectDevice() error {
	var st unix.Stat_t
	if err := unix.Fstat(int(x.f.Fd()), &st); err != nil {
		return openError(x.path, err)
	}
	rdev := uint64(st.Rdev) //nolint:unconvert // 32 bits wide on some architectures
	number := strconv.Itoa(int(unix.Major(rdev))) + ":" + strconv.Itoa(int(unix.Minor(rdev)))
	dir := filepath.Join(x.opts.SysfsRoot, "dev/char", number)
	link, err := os.Readlink(filepath.Join(dir, "subsystem"))
	if err != nil || filepath.Base(link) != "dax" {
		return fmt.Errorf("%w: %s (%s) is a character device, but no dax device", base.ErrInvalid, x.path, number)
	}
	d, err := readDevice(dir)
	if err != nil {
		return fmt.Errorf("%w: size of device %s: %w", base.ErrOffline, x.path, err)
	}
	x.kind, x.sizeBytes, x.alignBytes = KindDevdax, d.SizeBytes, d.AlignBytes
	return nil
}

func (x *File) inspectFile(info fs.FileInfo) error {
	x.kind, x.sizeBytes, x.alignBytes = KindFile, uint64(info.Size()), uint64(os.Getpagesize())
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(int(x.f.Fd()), &fsys); err == nil && fsys.Type == unix.HUGETLBFS_MAGIC {
		x.alignBytes = uint64(fsys.Bsize) //nolint:gosec // a block size is positive
	}
	var st unix.Statx_t
	err := unix.Statx(int(x.f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &st)
	if err == nil && st.Attributes_mask&st.Attributes&unix.STATX_ATTR_DAX != 0 {
		x.kind = KindFsdax
	}
	return nil
}

func (x *File) lock() error {
	err := unix.Flock(int(x.f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("%w: %s belongs to another resource manager that runs now (%w); stop it or name another device",
			base.ErrBusy, x.path, unix.EBUSY)
	}
	if err != nil {
		return fmt.Errorf("%w: locking %s: %w", base.ErrUnsupported, x.path, err)
	}
	return nil
}

// Path returns where it was opened.
func (x *File) Path() string { return x.path }

// Kind returns what it is; never KindAuto.
func (x *File) Kind() Kind { return x.kind }

// SizeBytes returns its size when it was opened.
func (x *File) SizeBytes() uint64 { return x.sizeBytes }

// AlignBytes returns what offset and length of a mapping are multiples of.
func (x *File) AlignBytes() uint64 { return x.alignBytes }

// Map maps a range. Ownership: the caller unmaps it; it lives on after Close. Errors:
// ErrInvalid (alignment, bounds, write access to what was opened for reading),
// ErrMismatch (it was truncated meanwhile), ErrClosed, and those of mapping.Map.
func (x *File) Map(offset, length uint64, access mapping.Access) (*mapping.Mapping, error) {
	switch {
	case length == 0 || offset%x.alignBytes != 0 || length%x.alignBytes != 0:
		return nil, fmt.Errorf("%w: mapping %d bytes at %d of %s: both must be multiples of %d, the length not 0",
			base.ErrInvalid, length, offset, x.path, x.alignBytes)
	case offset > x.sizeBytes || length > x.sizeBytes-offset:
		return nil, fmt.Errorf("%w: mapping %d bytes at %d of %s, which has %d (DM-14)", base.ErrInvalid, length, offset, x.path, x.sizeBytes)
	case access == mapping.ReadWrite && x.opts.ReadOnly:
		return nil, fmt.Errorf("%w: %s was opened for reading", base.ErrInvalid, x.path)
	}
	raw, err := x.f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", base.ErrClosed, x.path)
	}
	o := mapping.Options{Access: access, Name: x.path}
	if x.kind == KindFsdax && access == mapping.ReadWrite {
		o.Sync = mapping.SyncIfAvailable
	}
	if x.kind == KindFile && x.opts.HugePages {
		o.Advice = mapping.AdviceHugePages
	}
	var m *mapping.Mapping
	ctlErr := raw.Control(func(fd uintptr) {
		if err = x.checkSize(int(fd), offset+length); err == nil {
			m, err = mapping.Map(int(fd), offset, length, o)
		}
	})
	if ctlErr != nil {
		return nil, fmt.Errorf("%w: %s", base.ErrClosed, x.path)
	}
	return m, err
}

// checkSize refuses a file that is shorter now: every access behind its end would fault.
func (x *File) checkSize(fd int, end uint64) error {
	if x.kind == KindDevdax {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return openError(x.path, err)
	}
	if uint64(st.Size) < end {
		return fmt.Errorf("%w: %s had %d bytes and has %d now; somebody truncated it", base.ErrMismatch, x.path, x.sizeBytes, st.Size)
	}
	return nil
}

// Close ends the lock and the descriptor; mappings live on. It may be called more than once.
func (x *File) Close() error {
	x.once.Do(func() { x.err = x.f.Close() })
	return x.err
}
