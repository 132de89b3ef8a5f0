package bolt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
)

const (
	formatVersion = 1
	metaBucket    = "meta"
	keyFormat     = "format"
	keyKind       = "kind"
	keyID         = "id"
	keySum        = "sum"
	attribute     = "attribute:"
	checkBytes    = 8

	// initialMapBytes is enough for some 100 000 regions without mapping anew.
	initialMapBytes = 64 << 20

	// writtenAheadBytes holds some 5000 regions.
	writtenAheadBytes = 4 << 20
)

// Identity says whose store it is. It never changes.
type Identity struct {
	Kind       string // of program, such as "rm"
	ID         [base.IDBytes]byte
	Attributes map[string]string // what else must fit, such as the check of a secret
}

// Store is an open store.
type Store struct {
	path     string
	db       *bbolt.DB
	identity Identity
	// unsure: a commit failed, and what of it the disk has is not known.
	unsure bool
	broken error // bbolt panicked: its locks are in no known state
}

var _ store.Store = (*Store)(nil)

// sum is what the store says about all of its values.
type sum struct{ count, checks uint64 }

func decodeSum(b []byte) (s sum, ok bool) {
	if len(b) != 16 {
		return s, false
	}
	return sum{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}, true
}

func (s sum) encode() []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, s.count), s.checks)
}

// Create makes an empty store. It appears under its name whole or not at all.
// Errors: ErrExists, ErrDenied, ErrUnavailable.
func Create(path string, id Identity) (err error) {
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%w: store %s", base.ErrExists, path)
	}
	aside := path + ".new"
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fileError("make", path, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(aside)
		}
	}()
	db, err := bbolt.Open(aside, 0o600, &bbolt.Options{Timeout: time.Second, NoFreelistSync: true})
	if err != nil {
		return fileError("make", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucket([]byte(metaBucket))
		if err != nil {
			return err
		}
		for k, v := range map[string][]byte{
			keyFormat: {formatVersion}, keyKind: []byte(id.Kind), keyID: id.ID[:], keySum: sum{}.encode(),
		} {
			if err := b.Put([]byte(k), v); err != nil {
				return err
			}
		}
		for k, v := range id.Attributes {
			if err := b.Put([]byte(attribute+k), []byte(v)); err != nil {
				return err
			}
		}
		return nil
	})
	if closeErr := db.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = writeAhead(aside)
	}
	if err == nil {
		err = os.Link(aside, path) // unlike a rename it never replaces a store
	}
	if err == nil {
		err = os.Remove(aside)
	}
	if err == nil {
		err = SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return fileError("make", path, err)
	}
	return nil
}

// writeAhead gives the file blocks that were written once. bbolt makes its file
// longer without writing to it, and then the first commit to use a page has to
// wait for the file system's journal too.
func writeAhead(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Size() < writtenAheadBytes {
		_, err = f.WriteAt(make([]byte, writtenAheadBytes-info.Size()), info.Size())
	}
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

// Open opens a store that exists, verifies all of it, and locks it against other
// processes. wait bounds how long a lock is waited for. Errors: ErrNotFound,
// ErrBusy (another process has it), ErrCorrupt, ErrForeign (of another kind of
// program), ErrUnsupported (a newer format), ErrDenied, ErrUnavailable.
func Open(path, kind string, wait time.Duration) (*Store, error) {
	if err := preflight(path); err != nil {
		return nil, err
	}
	s := &Store{path: path}
	if err := s.verify(kind, wait); err != nil {
		return nil, err
	}
	err := s.contain("open", func() (err error) {
		s.db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: wait, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType, InitialMmapSize: initialMapBytes})
		return err
	})
	if err != nil {
		return nil, s.openError(err)
	}
	return s, nil
}

func (s *Store) openError(err error) error {
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return fmt.Errorf("%w: store %s is in use by another process", base.ErrBusy, s.path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrChecksum), errors.Is(err, berrors.ErrVersionMismatch):
		return fmt.Errorf("%w: store %s: %w", base.ErrCorrupt, s.path, err)
	}
	return fileError("open", s.path, err)
}

// fileError gives an error of the file system its sentinel and its cure.
func fileError(operation, path string, err error) error {
	if err == nil || base.CodeOf(err) != base.CodeInternal {
		return err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s store %s: %w", base.ErrNotFound, operation, path, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %s store %s: %w", base.ErrDenied, operation, path, err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: %s store %s: %w: make room on its file system and try again, nothing is lost", base.ErrUnavailable, operation, path, err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %s store %s: %w: mount its file system writable", base.ErrUnavailable, operation, path, err)
	}
	return fmt.Errorf("%w: %s store %s: %w", base.ErrUnavailable, operation, path, err)
}

// preflight reads the meta pages with plain reads and compares the file's size
// with what they promise: a page behind the end of a mapped file is a bus error.
func preflight(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fileError("open", path, err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return fileError("open", path, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%w: store %s is no regular file", base.ErrCorrupt, path)
	}
	best, found := boltMeta{}, false
	for _, at := range metaPlaces() {
		m, ok := readMeta(f, at)
		if ok && (!found || m.transaction > best.transaction) {
			best, found = m, true
		}
	}
	if !found {
		return fmt.Errorf("%w: store %s (%d bytes) has no valid meta page", base.ErrCorrupt, path, info.Size())
	}
	if need := best.pages * uint64(best.pageSize); best.pages > 1<<40 || uint64(info.Size()) < need {
		return fmt.Errorf("%w: store %s was truncated: it has %d bytes and needs %d", base.ErrCorrupt, path, info.Size(), need)
	}
	return nil
}

type boltMeta struct {
	pageSize           uint32
	pages, transaction uint64
}

// metaPlaces are where the two meta pages can lie: the second one page behind
// the first, for any page size that a machine can have.
func metaPlaces() []int64 {
	out := []int64{0}
	for size := int64(1024); size <= 64<<10; size *= 2 {
		out = append(out, size)
	}
	return out
}

func readMeta(r io.ReaderAt, at int64) (boltMeta, bool) {
	const header, size = 16, 64
	var b [header + size]byte
	if _, err := r.ReadAt(b[:], at); err != nil {
		return boltMeta{}, false
	}
	m := b[header:]
	h := fnv.New64a()
	_, _ = h.Write(m[:56])
	le := binary.LittleEndian
	if le.Uint32(m) != 0xED0CDAED || le.Uint32(m[4:]) != 2 || le.Uint64(m[56:]) != h.Sum64() {
		return boltMeta{}, false
	}
	out := boltMeta{pageSize: le.Uint32(m[8:]), pages: le.Uint64(m[40:]), transaction: le.Uint64(m[48:])}
	return out, at == 0 || at == int64(out.pageSize)
}

// contain runs what touches bbolt's map: its panics and the bus errors of a
// damaged file become an error.
func (s *Store) contain(operation string, f func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %s store %s: %v", base.ErrCorrupt, operation, s.path, r)
		}
	}()
	return f()
}

// verify walks the whole file read-only.
func (s *Store) verify(kind string, wait time.Duration) error {
	var db *bbolt.DB
	err := s.contain("open", func() (err error) {
		db, err = bbolt.Open(s.path, 0o600, &bbolt.Options{Timeout: wait, ReadOnly: true})
		return err
	})
	if err != nil {
		return s.openError(err)
	}
	s.db = db
	err = s.contain("read", func() error { return s.walk(kind, func(string, string, []byte) error { return nil }) })
	// View rolls back on a panic too, so Close does not wait for it.
	if closeErr := s.contain("close", db.Close); err == nil {
		err = closeErr
	}
	s.db = nil
	return err
}

// walk reads everything in order and verifies it.
func (s *Store) walk(kind string, visit func(bucket, key string, value []byte) error) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: store %s: "+format, append([]any{base.ErrCorrupt, s.path}, args...)...)
	}
	return s.db.View(func(tx *bbolt.Tx) error {
		meta := tx.Bucket([]byte(metaBucket))
		if meta == nil {
			return bad("no meta bucket")
		}
		format := meta.Get([]byte(keyFormat))
		if len(format) != 1 {
			return bad("no format version")
		}
		if format[0] != formatVersion {
			return fmt.Errorf("%w: store %s has format %d, this program has %d", base.ErrUnsupported, s.path, format[0], formatVersion)
		}
		id := Identity{Kind: string(meta.Get([]byte(keyKind))), Attributes: map[string]string{}}
		if id.Kind != kind {
			return fmt.Errorf("%w: store %s is of %q, not of %q", base.ErrForeign, s.path, id.Kind, kind)
		}
		raw := meta.Get([]byte(keyID))
		if len(raw) != base.IDBytes {
			return bad("no id")
		}
		copy(id.ID[:], raw)
		if err := meta.ForEach(func(k, v []byte) error {
			if name, ok := cutPrefix(k, attribute); ok {
				id.Attributes[name] = string(v)
			}
			return nil
		}); err != nil {
			return err
		}
		var got sum
		err := tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
			if string(name) == metaBucket {
				return nil
			}
			return b.ForEach(func(k, v []byte) error {
				if len(v) < checkBytes {
					return bad("row %x in bucket %s is too short", k, name)
				}
				value := v[:len(v)-checkBytes]
				c := check(string(name), string(k), value)
				if c != binary.LittleEndian.Uint64(v[len(value):]) {
					return bad("row %x in bucket %s: the check does not hold", k, name)
				}
				got.count++
				got.checks += c
				return visit(string(name), string(k), slices.Clone(value))
			})
		})
		if err != nil {
			return err
		}
		if !slices.Equal(meta.Get([]byte(keySum)), got.encode()) {
			return bad("%d rows do not add up to what was written", got.count)
		}
		s.identity = id
		return nil
	})
}

func cutPrefix(b []byte, prefix string) (string, bool) {
	if len(b) < len(prefix) || string(b[:len(prefix)]) != prefix {
		return "", false
	}
	return string(b[len(prefix):]), true
}

func check(bucket, key string, value []byte) uint64 {
	h := xxh3.New()
	_, _ = h.WriteString(bucket)
	_, _ = h.Write([]byte{0, byte(len(key))})
	_, _ = h.WriteString(key)
	_, _ = h.Write(value)
	return h.Sum64()
}

// Identity returns whose store it is.
func (s *Store) Identity() Identity { return s.identity }

// Path returns the store's file.
func (s *Store) Path() string { return s.path }

// Load is store.Store's.
func (s *Store) Load(visit func(bucket, key string, value []byte) error) error {
	if s.broken != nil {
		return s.broken
	}
	return s.contain("read", func() error { return s.walk(s.identity.Kind, visit) })
}

// Commit is store.Store's.
func (s *Store) Commit(changes []store.Change) error {
	if s.broken != nil {
		return s.broken
	}
	if s.db == nil {
		return fmt.Errorf("%w: store %s", base.ErrClosed, s.path)
	}
	if s.unsure {
		if err := s.rewrite(); err != nil {
			return fileError("write", s.path, err)
		}
		s.unsure = false
	}
	finished := false
	err := s.contain("write", func() error {
		err := s.db.Update(func(tx *bbolt.Tx) error { return apply(tx, changes) })
		finished = true
		return err
	})
	if !finished {
		s.broken = fmt.Errorf("%w; start the program again", err)
		return s.broken
	}
	if err != nil {
		s.unsure = true
		return fileError("write", s.path, err)
	}
	return nil
}

// rewrite writes the file's bytes over themselves and syncs it. A sync that failed may
// have left pages that memory has and the disk has not, and that no later sync writes:
// the batch, committed again, would lean on them.
func (s *Store) rewrite() error {
	f, err := os.OpenFile(s.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	piece := make([]byte, 1<<20)
	for at := int64(0); err == nil && at < info.Size(); at += int64(len(piece)) {
		b := piece[:min(int64(len(piece)), info.Size()-at)]
		if _, err = f.ReadAt(b, at); err == nil {
			_, err = f.WriteAt(b, at)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return err
}

// apply changes rows and their sum. The sum is that of the transaction: after a commit
// that failed the file may have the batch or not.
func apply(tx *bbolt.Tx, changes []store.Change) error {
	total, ok := decodeSum(tx.Bucket([]byte(metaBucket)).Get([]byte(keySum)))
	if !ok {
		return fmt.Errorf("%w: no sum of the rows", base.ErrCorrupt)
	}
	for _, c := range changes {
		if c.Bucket == metaBucket || c.Bucket == "" || c.Key == "" || len(c.Key) > 255 {
			return fmt.Errorf("%w: change of bucket %q with a key of %d bytes", base.ErrInvalid, c.Bucket, len(c.Key))
		}
		b, err := tx.CreateBucketIfNotExists([]byte(c.Bucket))
		if err != nil {
			return err
		}
		if old := b.Get([]byte(c.Key)); len(old) >= checkBytes {
			total.count--
			total.checks -= binary.LittleEndian.Uint64(old[len(old)-checkBytes:])
		}
		if len(c.Value) == 0 {
			if err := b.Delete([]byte(c.Key)); err != nil {
				return err
			}
			continue
		}
		sum := check(c.Bucket, c.Key, c.Value)
		if err := b.Put([]byte(c.Key), binary.LittleEndian.AppendUint64(slices.Clone(c.Value), sum)); err != nil {
			return err
		}
		total.count++
		total.checks += sum
	}
	return tx.Bucket([]byte(metaBucket)).Put([]byte(keySum), total.encode())
}

// Close is store.Store's.
func (s *Store) Close() error {
	if s.db == nil || s.broken != nil {
		return nil //nolint:nilerr // bbolt panicked and the error was told then: closing could wait for ever on its locks
	}
	db := s.db
	s.db = nil
	return fileError("close", s.path, db.Close())
}
