package rm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// persist is what makes a written line reach the pool's memory.
type persist uint8

const (
	persistNone  persist = iota // tmpfs: the page cache is the pool
	persistLines                // devdax, fsdax: write cache lines back
	persistSync                 // a file on a disk: msync
)

// device is an open, locked and mapped pool device. Concurrency: the committer's.
type device struct {
	file    *dax.File
	m       *mapping.Mapping
	persist persist
	pool    base.PoolID
	origin  origin
}

// origin says whether a pool's file was there before.
type origin uint8

const (
	originFound origin = iota
	originMade         // by openDevice: it holds nothing, and need not be looked through
)

// openDevice opens a pool's path, locked against other resource managers, and
// maps all of it. Errors: those of dax.Open and Map, ErrUnsupported.
func openDevice(p PoolSpec, sysfs string, overcommit bool) (*device, error) {
	o := dax.OpenOptions{
		SizeBytes: p.SizeBytes, Create: p.SizeBytes != 0, Lock: dax.LockExclusive, SysfsRoot: sysfs, Overcommit: overcommit, NUMANode: p.NUMANode,
	}
	_, statErr := os.Lstat(p.Path)
	f, err := dax.Open(p.Path, p.Kind, o)
	if err != nil {
		return nil, err
	}
	d := &device{file: f}
	if o.Create && errors.Is(statErr, fs.ErrNotExist) {
		d.origin = originMade
	}
	size := poolfmt.DataOffset + poolfmt.UsableBytes(f.SizeBytes())
	if f.SizeBytes() < poolfmt.DataOffset+poolfmt.Alignment {
		_ = f.Close()
		return nil, fmt.Errorf("%w: %s has %d bytes, a pool needs at least %d", base.ErrInvalid, p.Path, f.SizeBytes(), poolfmt.DataOffset+poolfmt.Alignment)
	}
	if d.m, err = f.Map(0, size, mapping.ReadWrite); err != nil {
		_ = f.Close()
		return nil, err
	}
	if d.persist, err = persistOf(f); err != nil {
		_ = d.close()
		return nil, err
	}
	return d, nil
}

func persistOf(f *dax.File) (persist, error) {
	if f.Kind() != dax.KindFile {
		if !flush.Supported() {
			return 0, fmt.Errorf("%w: %s: this processor or build cannot write cache lines back", base.ErrUnsupported, f.Path())
		}
		return persistLines, nil
	}
	var fsys unix.Statfs_t
	if err := unix.Statfs(f.Path(), &fsys); err != nil {
		return 0, fmt.Errorf("%w: %s: %w", base.ErrUnavailable, f.Path(), err)
	}
	if fsys.Type == unix.TMPFS_MAGIC || fsys.Type == unix.HUGETLBFS_MAGIC {
		return persistNone, nil
	}
	return persistSync, nil
}

func (d *device) close() error { return errors.Join(d.m.Unmap(), d.file.Close()) }

// write puts bytes at an offset and makes them durable as the device can.
// Errors: ErrFault, ErrUnavailable.
func (d *device) write(offset uint64, b []byte) error {
	return d.change(offset, uint64(len(b)), func(to []byte) { copy(to, b) })
}

func (d *device) change(offset, length uint64, f func(to []byte)) error {
	var err error
	faultErr := d.m.Guard(func() {
		f(d.m.Bytes()[offset:][:length])
		err = d.flush(offset, length)
	})
	return errors.Join(faultErr, err)
}

func (d *device) flush(offset, length uint64) error {
	switch d.persist {
	case persistLines:
		return flush.WriteBack(d.m.Bytes()[offset:][:length])
	case persistSync:
		const page = 4096
		start := offset / page * page
		if err := unix.Msync(d.m.Bytes()[start:offset+length], unix.MS_SYNC); err != nil {
			return fmt.Errorf("%w: msync of %s: %w", base.ErrUnavailable, d.file.Path(), err)
		}
	}
	return nil
}

// read copies bytes out, past what caches of this host may still hold of another
// host's lines. Errors: ErrFault.
func (d *device) read(offset, length uint64) ([]byte, error) {
	out := make([]byte, length)
	var err error
	faultErr := d.m.Guard(func() {
		from := d.m.Bytes()[offset:][:length]
		if d.persist == persistLines {
			err = flush.Invalidate(from)
		}
		copy(out, from)
	})
	return out, errors.Join(faultErr, err)
}

func (d *device) header() (poolfmt.Header, error) {
	b, err := d.read(0, poolfmt.HeaderBytes)
	if err != nil {
		return poolfmt.Header{}, err
	}
	return poolfmt.DecodeHeader(b)
}

// writeSlot writes one line, which no torn write can mix with its predecessor.
func (d *device) writeSlot(w core.SlotWrite) error {
	line := poolfmt.EncodeSlot(w.Pool, w.Slot)
	return d.write(uint64(poolfmt.SlotOffset(w.Slot.Sequence)), line[:])
}

// format writes a new header: blank slots first, the static line last, so that
// an initialisation that was cut short leaves no header.
func (d *device) format(h poolfmt.Header) error {
	b := poolfmt.EncodeHeader(h)
	if err := d.change(0, poolfmt.HeaderBytes, func(to []byte) { clear(to) }); err != nil {
		return err
	}
	if err := d.write(poolfmt.LineBytes, b[poolfmt.LineBytes:]); err != nil {
		return err
	}
	return d.write(0, b[:poolfmt.LineBytes])
}

// prepare writes a region's zeroed table and its line.
func (d *device) prepare(r core.Region) error {
	at := r.Extent.Offset + r.Plan.TableOffset
	if err := d.change(at, r.Plan.TableBytes, func(to []byte) { clear(to) }); err != nil {
		return err
	}
	line := poolfmt.EncodeRegion(r.Pool, r.Line())
	return d.write(at, line[:])
}

func (d *device) records(r core.Region, first, count uint64) ([]byte, error) {
	return d.read(r.Extent.Offset+r.Plan.Record(base.PageIndex(first)), count*poolfmt.RecordBytes)
}

// clearMarks clears the marks of pages, each by one aligned store.
func (d *device) clearMarks(r core.Region, pages []uint64) error {
	var errs error
	faultErr := d.m.Guard(func() {
		for _, p := range pages {
			at := r.Extent.Offset + r.Plan.Record(base.PageIndex(p))
			binary.LittleEndian.PutUint64(d.m.Bytes()[at+poolfmt.MarkOffset:], 0)
			if d.persist == persistLines {
				errs = errors.Join(errs, d.flush(at, poolfmt.RecordBytes))
			}
		}
		if d.persist == persistSync {
			errs = d.flush(r.Extent.Offset+r.Plan.TableOffset, r.Plan.TableBytes)
		}
	})
	return errors.Join(faultErr, errs)
}

// writeBack pushes a dead mapper's dirty lines out before anybody else writes there.
func (d *device) writeBack(r core.Region) error {
	var err error
	faultErr := d.m.Guard(func() {
		b := d.m.Bytes()[r.Extent.Offset:][:r.Extent.Length]
		if err = flush.WriteBack(b); err == nil {
			err = flush.Invalidate(b)
		}
	})
	return errors.Join(faultErr, err)
}

// isBlank reports whether a device that carries no header holds nothing: its
// first 2 MiB and the start of each unit behind are zero, but for what an
// initialisation of ours leaves that was cut short. Anything else is somebody's.
func (d *device) isBlank() (bool, error) {
	if d.file.Kind() != dax.KindDevdax && d.origin == originFound {
		return fileIsBlank(d.file.Path())
	}
	blank := true
	err := d.m.Guard(func() {
		b := d.m.Bytes()
		first := b[:poolfmt.DataOffset]
		if poolfmt.IsUnfinished(first) {
			first = first[poolfmt.HeaderBytes:]
		}
		if blank = allZero(first); d.origin == originMade {
			return
		}
		for at := poolfmt.DataOffset; blank && at < len(b); at += poolfmt.Alignment {
			blank = allZero(b[at:min(at+poolfmt.TableAlignment, len(b))])
		}
	})
	return blank, err
}

// fileIsBlank is isBlank for files. It asks the file system for the parts that
// were ever written: a map would read every untouched page of a new file.
func fileIsBlank(path string) (bool, error) {
	failed := func(err error) error {
		return fmt.Errorf("%w: looking for data in %s: %w", base.ErrUnavailable, path, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return false, failed(err)
	}
	defer func() { _ = f.Close() }()
	buf := make([]byte, poolfmt.TableAlignment)
	at := int64(0)
	for {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return true, nil // nothing but holes behind
		}
		if err != nil {
			return false, failed(err)
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return false, failed(err)
		}
		for at = from / poolfmt.TableAlignment * poolfmt.TableAlignment; at < to; {
			n, err := f.ReadAt(buf, at)
			if err != nil && !errors.Is(err, io.EOF) {
				return false, failed(err)
			}
			part := buf[:n]
			if at == 0 && poolfmt.IsUnfinished(part) {
				part = part[poolfmt.HeaderBytes:] // a start of ours that was cut short
			}
			if !allZero(part) {
				return false, nil
			}
			at += poolfmt.TableAlignment
			if at >= poolfmt.DataOffset && at%poolfmt.Alignment != 0 {
				at = (at/poolfmt.Alignment + 1) * poolfmt.Alignment
			}
		}
		at = to
	}
}

func allZero(b []byte) bool {
	for len(b) >= 8 {
		if binary.LittleEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
