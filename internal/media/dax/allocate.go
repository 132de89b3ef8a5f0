package dax

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/memlimit"
	"github.com/xcena-dev/maru/internal/media/numa"
)

// makeFile makes a file of full size. It gets its name only when it is whole: what dies
// before leaves nothing, and nobody opens half a pool. Errors: fs.ErrExist when another
// was faster.
func makeFile(path string, o OpenOptions) (*os.File, error) {
	dir := filepath.Dir(path)
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EINVAL) {
			return makeNamedFile(path, o)
		}
		return nil, &fs.PathError{Op: "create", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	err = allocate(f, path, o.SizeBytes, o)
	if err == nil {
		// linkat on the descriptor itself needs a privilege; through /proc it does not.
		from := "/proc/self/fd/" + strconv.Itoa(fd)
		err = unix.Linkat(unix.AT_FDCWD, from, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
		if err != nil {
			err = &fs.PathError{Op: "link", Path: path, Err: err}
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// makeNamedFile is for file systems without O_TMPFILE. A crash in the middle leaves a file
// of another size, which the next start refuses by name.
func makeNamedFile(path string, o OpenOptions) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := allocate(f, path, o.SizeBytes, o); err != nil {
		_ = os.Remove(path)
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// fillHoles allocates what a file lacks: a sparse file would fault when its disk is full.
func fillHoles(f *os.File, path string, size uint64, o OpenOptions) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return openError(path, err)
	}
	if size == 0 || uint64(st.Blocks)*512 >= size {
		return nil
	}
	return allocateMissing(f, path, size, size-uint64(st.Blocks)*512, o)
}

func allocate(f *os.File, path string, size uint64, o OpenOptions) error {
	if size%uint64(os.Getpagesize()) != 0 || size > 1<<60 {
		return fmt.Errorf("%w: size %d of %s is not a multiple of %d", base.ErrInvalid, size, path, os.Getpagesize())
	}
	return allocateMissing(f, path, size, size, o)
}

// allocateMissing allocates [0, size), of which missing bytes are not there yet.
func allocateMissing(f *os.File, path string, size, missing uint64, o OpenOptions) error {
	if o.NUMANode == nil {
		return allocateHere(f, path, size, missing, o)
	}
	return numa.With(*o.NUMANode, func() error { return allocateHere(f, path, size, missing, o) })
}

// allocateHere is allocateMissing under whatever policy the thread has.
func allocateHere(f *os.File, path string, size, missing uint64, o OpenOptions) error {
	var fsys unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fsys); err != nil {
		return openError(path, err)
	}
	tmpfs := fsys.Type == unix.TMPFS_MAGIC
	// tmpfs without a size (blocks 0) is bounded by memory only.
	if free := fsys.Bavail * uint64(fsys.Bsize); fsys.Blocks != 0 && missing > free {
		return fullError(path, missing, free, tmpfs)
	}
	if tmpfs && !o.Overcommit {
		if have, err := memlimit.ReadOn(o.ProcRoot, o.NUMANode); err == nil && missing > have.Bytes {
			return fmt.Errorf("%w: %s lies in memory (tmpfs) and needs %s, available are %s (%s); choose a smaller size or allow overcommit",
				base.ErrInvalid, path, humanBytes(missing), humanBytes(have.Bytes), have.Source)
		}
	}
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, int64(size))
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			_ = unix.Fstatfs(int(f.Fd()), &fsys)
			return fullError(path, missing, fsys.Bavail*uint64(fsys.Bsize), tmpfs)
		case errors.Is(err, unix.EOPNOTSUPP):
			return fmt.Errorf("%w: the file system of %s cannot allocate a file in full (fallocate); use tmpfs, ext4 or xfs",
				base.ErrUnsupported, path)
		case errors.Is(err, unix.EFBIG):
			return fmt.Errorf("%w: %s of %s is more than its file system or ulimit -f allows", base.ErrInvalid, path, humanBytes(size))
		}
		return fmt.Errorf("%w: allocating %s of %s: %w", base.ErrUnavailable, humanBytes(size), path, err)
	}
}

func fullError(path string, needs, has uint64, tmpfs bool) error {
	cure := "free space there, choose a smaller size or another directory"
	if tmpfs {
		cure = "choose a smaller size, remove files there, or make it larger (mount -o remount,size=SIZE)"
	}
	return fmt.Errorf("%w: %s is full: %s needs %s, it has %s; %s",
		base.ErrFull, filepath.Dir(path), filepath.Base(path), humanBytes(needs), humanBytes(has), cure)
}

// humanBytes shows a size with the digits that an operator can act on.
func humanBytes(n uint64) string {
	for _, u := range []struct {
		shift uint
		name  string
	}{{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n >= 1<<u.shift {
			return fmt.Sprintf("%.2f %s", float64(n)/float64(uint64(1)<<u.shift), u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
