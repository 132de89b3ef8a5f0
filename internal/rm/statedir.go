package rm

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/statedir"
	"github.com/xcena-dev/maru/internal/store/bolt"
)

// Files of a state directory. The mark is written last: from then on a missing
// store is a loss, not a first start.
const (
	storeFile  = "rm.db"
	secretFile = "secret"
	markFile   = "format"
	lockFile   = "lock"
	storeKind  = "rm"

	markText        = "maru-resource-manager state 1, store "
	attributeSecret = "secret-check"
)

const lossCure = "restore it from a backup, or move the state directory away, start anew, and take each device over with maru device takeover --confirm (its regions are dropped)"

// state is an open state directory.
type state struct {
	dir    string
	lock   *os.File
	store  *bolt.Store
	secret [core.SecretBytes]byte
	id     base.StoreID
}

// DefaultStateDir is /var/lib/maru/rm where it can be written, else rm under the
// user's state directory.
func DefaultStateDir() string {
	const system = "/var/lib/maru"
	if unix.Access(system, unix.W_OK) == nil || os.Geteuid() == 0 {
		return filepath.Join(system, "rm")
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "maru", "rm")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local", "state", "maru", "rm")
	}
	return filepath.Join(system, "rm")
}

// openState locks a state directory and opens what is in it; an empty one is
// set up. Errors: ErrBusy (another resource manager has it), ErrNotFound (a part
// is missing), ErrCorrupt, ErrForeign, ErrDenied, ErrUnavailable.
func openState(dir string, wait time.Duration) (_ *state, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, statedir.Error("make state directory", dir, err)
	}
	s := &state{dir: dir}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if s.lock, err = statedir.Lock(dir, lockFile, "another resource manager or maru device: stop it, or give another --state-dir", wait); err != nil {
		return nil, err
	}
	mark, err := readMark(dir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, storeFile)
	_, statErr := os.Lstat(path)
	missing := errors.Is(statErr, fs.ErrNotExist)
	if missing && mark != "" {
		return nil, fmt.Errorf("%w: store %s is missing, but %s says that there was one: %s", base.ErrNotFound, path, filepath.Join(dir, markFile), lossCure)
	}
	if missing {
		if err := setUp(dir, path); err != nil {
			return nil, err
		}
	}
	if s.store, err = bolt.Open(path, storeKind, wait); err != nil {
		if errors.Is(err, base.ErrCorrupt) {
			err = fmt.Errorf("%w: %s", err, lossCure)
		}
		return nil, err
	}
	s.id = s.store.Identity().ID
	if mark != "" && mark != s.id.String() {
		return nil, fmt.Errorf("%w: store %s has id %s, but this state directory was made with %s: put the right one back, or %s", base.ErrForeign, path, s.id, mark, lossCure)
	}
	if s.secret, err = readSecret(dir); err != nil {
		return nil, err
	}
	if got := secretCheck(s.secret); got != s.store.Identity().Attributes[attributeSecret] {
		return nil, fmt.Errorf("%w: %s is not the secret of store %s: put the right one back, or %s", base.ErrForeign, filepath.Join(dir, secretFile), path, lossCure)
	}
	if mark == "" {
		if err := statedir.Replace(dir, markFile, []byte(markText+s.id.String()+"\n")); err != nil {
			return nil, statedir.Error("write", filepath.Join(dir, markFile), err)
		}
	}
	return s, nil
}

func (s *state) close() error {
	var err error
	if s.store != nil {
		err = s.store.Close()
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
		s.lock = nil
	}
	return err
}

func readMark(dir string) (string, error) {
	path := filepath.Join(dir, markFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", statedir.Error("read", path, err)
	}
	id, ok := strings.CutPrefix(strings.TrimSpace(string(b)), markText)
	if _, err := base.ParseID(id); !ok || err != nil {
		return "", fmt.Errorf("%w: %s does not say which store this directory has: %q", base.ErrCorrupt, path, b)
	}
	return id, nil
}

// setUp makes secret and store. What a crash in between leaves is made again:
// the store, which fits the secret, comes last.
func setUp(dir, path string) error {
	var secret [core.SecretBytes]byte
	_, _ = rand.Read(secret[:])
	if err := statedir.Replace(dir, secretFile, []byte(hex.EncodeToString(secret[:])+"\n")); err != nil {
		return statedir.Error("write", filepath.Join(dir, secretFile), err)
	}
	return bolt.Create(path, bolt.Identity{
		Kind: storeKind, ID: base.NewID(), Attributes: map[string]string{attributeSecret: secretCheck(secret)},
	})
}

// secretCheck tells whether a secret is the store's and tells nothing about it.
func secretCheck(secret [core.SecretBytes]byte) string {
	sum := sha256.Sum256(append([]byte("maru-rm-secret-check-v1"), secret[:]...))
	return hex.EncodeToString(sum[:])
}

func readSecret(dir string) (secret [core.SecretBytes]byte, err error) {
	path := filepath.Join(dir, secretFile)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return secret, fmt.Errorf("%w: %s, the secret of the store beside it, is missing: %s", base.ErrNotFound, path, lossCure)
	}
	if err != nil {
		return secret, statedir.Error("read", path, err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return secret, fmt.Errorf("%w: %s has mode %#o and can be read by others: chmod 0600 it", base.ErrDenied, path, info.Mode().Perm())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return secret, statedir.Error("read", path, err)
	}
	raw, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(raw) != len(secret) {
		return secret, fmt.Errorf("%w: %s does not hold %d hexadecimal digits", base.ErrCorrupt, path, 2*len(secret))
	}
	copy(secret[:], raw)
	return secret, nil
}

// loadCore builds the core from the store.
func (s *state) loadCore(cfg core.Config) (*core.Core, error) {
	cfg.Store, cfg.Secret = s.id, s.secret
	l := core.NewLoader(cfg)
	err := s.store.Load(l.Row)
	var c *core.Core
	if err == nil {
		c, err = l.Finish()
	}
	if err != nil {
		return nil, fmt.Errorf("store %s: %w: %s", s.store.Path(), err, lossCure)
	}
	return c, nil
}
