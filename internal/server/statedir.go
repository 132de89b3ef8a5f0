package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/statedir"
)

// The state directory holds who this server is, and an exclusive lock for its
// life. It holds no objects: after a restart sessions list what they hold.
const (
	stateFile    = "server.json"
	stateLock    = "lock"
	stateVersion = 1
	maxStateSize = 16 << 10
)

// stateRecord is server.json. LockDevice and LockInode name the lock file that the
// directory id belongs to: a copied state directory has another one, and must not
// prove the end of a process that holds the lock of the original
// (docs/PROTOCOL.md, "Server restart").
type stateRecord struct {
	Version     int    `json:"version"`
	ServerID    string `json:"server_id"`
	DirectoryID string `json:"directory_id"`
	Name        string `json:"name"`
	LockDevice  uint64 `json:"lock_device"`
	LockInode   uint64 `json:"lock_inode"`
	SecretCheck string `json:"secret_check"` // of the secret beside it
}

// stateDir is a locked state directory.
// Ownership: the server's; the lock ends with Close or with the process.
type stateDir struct {
	path      string
	lock      *os.File
	server    base.OwnerID
	directory [base.IDBytes]byte
	name      string
	secret    base.OwnerSecret
}

// openStateDir locks dir and reads or makes the server's identity. An empty name
// keeps the recorded one. Errors: ErrBusy (another server has it), ErrCorrupt,
// ErrNotFound and ErrForeign (the secret), ErrDenied, ErrFull, ErrInvalid.
func openStateDir(dir, name string) (*stateDir, error) {
	if !filepath.IsAbs(dir) {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, fmt.Errorf("%w: --state-dir %q: %w", base.ErrInvalid, dir, err)
		}
		dir = abs
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, stateError("making", dir, err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, stateLock), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, stateError("opening the lock of", dir, err)
	}
	s := &stateDir{path: dir, lock: lock}
	if err := s.open(name); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

func (s *stateDir) open(name string) error {
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%w: another maru-server uses the state directory %s; stop it or give this one its own --state-dir",
				base.ErrBusy, s.path)
		}
		return stateError("locking", s.path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(s.lock.Fd()), &st); err != nil {
		return stateError("looking at the lock of", s.path, err)
	}
	record, err := readState(filepath.Join(s.path, stateFile))
	if err != nil {
		return err
	}
	was := record
	if record.Version == 0 {
		record = stateRecord{Version: stateVersion, ServerID: base.OwnerID(base.NewID()).String()}
	}
	if record.DirectoryID == "" || record.LockDevice != st.Dev || record.LockInode != st.Ino {
		record.DirectoryID = base.OwnerID(base.NewID()).String()
		record.LockDevice, record.LockInode = st.Dev, st.Ino
	}
	if name != "" {
		record.Name = name
	}
	if record.Name == "" {
		record.Name = "maru-server"
	}
	if s.server, err = base.ParseID(record.ServerID); err != nil {
		return corruptState(s.path, err)
	}
	if s.secret, record.SecretCheck, err = openSecret(s.path, record); err != nil {
		return err
	}
	if record != was {
		if err := writeState(s.path, record); err != nil {
			return err
		}
	}
	if s.directory, err = base.ParseID(record.DirectoryID); err != nil {
		return corruptState(s.path, err)
	}
	s.name = record.Name
	return nil
}

func readState(path string) (stateRecord, error) {
	var r stateRecord
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, stateError("reading", path, err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, maxStateSize)
	n, err := f.Read(b)
	if err != nil && n > 0 {
		return r, stateError("reading", path, err)
	}
	if err := json.Unmarshal(b[:n], &r); err != nil {
		return r, corruptState(path, err)
	}
	if r.Version != stateVersion {
		return r, fmt.Errorf("%w: %s has version %d, this program reads %d; use the program that wrote it, or another --state-dir",
			base.ErrUnsupported, path, r.Version, stateVersion)
	}
	return r, nil
}

// writeState replaces server.json whole: a torn file would lose the server's id
// and with it every region at the resource manager.
func writeState(dir string, r stateRecord) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("%w: encoding %s: %w", base.ErrInternal, stateFile, err)
	}
	return replaceFile(dir, stateFile, append(b, '\n'))
}

// replaceFile writes a file of mode 0600 whole and durably.
func replaceFile(dir, name string, content []byte) error {
	if err := statedir.Replace(dir, name, content); err != nil {
		return stateError("writing", filepath.Join(dir, name), err)
	}
	return nil
}

func corruptState(path string, err error) error {
	return fmt.Errorf("%w: %s: %w; restore it, or remove it to start as a new server "+
		"(then end the old one at the resource manager: maru rm drop-owner)", base.ErrCorrupt, path, err)
}

func stateError(doing, path string, err error) error {
	kind, cure := base.ErrUnavailable, "--state-dir must name a directory that this user can write"
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		kind = base.ErrDenied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		kind, cure = base.ErrFull, "make room there, or give another --state-dir"
	case errors.Is(err, syscall.ENOTDIR):
		kind = base.ErrInvalid
	}
	return fmt.Errorf("%w: %s %s: %w; %s", kind, doing, path, err, cure)
}

// Close gives the lock up. The lock file stays: its inode is part of the identity.
func (s *stateDir) Close() error { return s.lock.Close() }

// defaultStateDir is where a server of that name keeps its state when no directory
// is given: with the machine's daemons when it may, else with the user.
func defaultStateDir(name string) string {
	if name == "" {
		name = "maru-server"
	}
	const system = "/var/lib/maru"
	if unix.Access(system, unix.W_OK|unix.X_OK) == nil || os.Getuid() == 0 {
		return filepath.Join(system, name)
	}
	if d := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "maru", name)
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = os.TempDir()
	}
	return filepath.Join(home, ".local", "state", "maru", name)
}
