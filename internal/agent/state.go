package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/settings"
	"github.com/xcena-dev/maru/internal/statedir"
	"github.com/xcena-dev/maru/internal/store"
	"github.com/xcena-dev/maru/internal/store/bolt"
)

// Files of a state directory (docs/rfcs/0009-node-watcher.md). The mark is written last:
// from then on a missing store is a loss, not a first start.
const (
	lockFile   = "lock"
	secretFile = "agent-secret"
	storeFile  = "agent.db"
	markFile   = "format"
	storeKind  = "agent"
	markText   = "maru-remote-cxl-agent state 1, agent "

	attributeNode   = "node"
	attributeSecret = "secret-check"
	attributeRows   = "rows"
	rowsVersion     = "1"

	bucketSessions = "sessions"
	bucketManager  = "manager"
	managerKey     = "store"
)

// sessionRow is one session and its process; the session is the key.
type sessionRow struct {
	Session    base.SessionID `cbor:"1,keyasint"`
	PID        int64          `cbor:"2,keyasint"`
	Namespace  uint64         `cbor:"3,keyasint"` // inode of the pid namespace
	StartTicks uint64         `cbor:"4,keyasint"`
	Boot       base.BootID    `cbor:"5,keyasint"`
	SinceMS    int64          `cbor:"6,keyasint"`
}

// managerRow says which resource manager the sessions are bound at.
type managerRow struct {
	Store base.StoreID `cbor:"1,keyasint"`
}

func (r sessionRow) process() peer.Process {
	return peer.Process{PID: int(r.PID), PIDNamespace: r.Namespace, StartTicks: r.StartTicks, BootID: r.Boot}
}

func rowOf(id base.SessionID, p peer.Process, now int64) sessionRow {
	return sessionRow{Session: id, PID: int64(p.PID), Namespace: p.PIDNamespace, StartTicks: p.StartTicks, Boot: p.BootID, SinceMS: now}
}

var encoder, decoder = func() (cbor.EncMode, cbor.DecMode) {
	e, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		panic(err)
	}
	d, err := cbor.DecOptions{DupMapKey: cbor.DupMapKeyEnforcedAPF, ExtraReturnErrors: cbor.ExtraDecErrorUnknownField}.DecMode()
	if err != nil {
		panic(err)
	}
	return e, d
}()

func encode(row any) []byte {
	b, err := encoder.Marshal(row)
	if err != nil { // rows hold nothing that cannot be encoded
		panic(fmt.Sprintf("maru: encode %T: %v", row, err))
	}
	return b
}

func putSession(r sessionRow) store.Change {
	return store.Change{Bucket: bucketSessions, Key: string(r.Session[:]), Value: encode(r)}
}

func dropSession(id base.SessionID) store.Change {
	return store.Change{Bucket: bucketSessions, Key: string(id[:])}
}

// state is an open state directory.
type state struct {
	dir    string
	lock   *os.File
	store  *bolt.Store
	agent  base.AgentID
	secret base.OwnerSecret

	// As it was loaded.
	sessions []sessionRow
	manager  base.StoreID // zero: never reached one
}

// lossCure is for a state directory that lost a part of itself.
func lossCure(agent string) string {
	return fmt.Sprintf("put it back, or, when it is lost, move the state directory away to start as a new agent, and end the old one: maru rm drop-agent %s --confirm "+
		"(the holds that it vouched for stay until their processes unmap, or maru rm drop-holds)", agent)
}

// openState locks a state directory and opens what is in it; an empty one is set up for
// this machine. Errors: ErrBusy (another agent has it), ErrNotFound (a part is missing),
// ErrForeign (of another machine, or parts that do not belong together), ErrCorrupt,
// ErrUnsupported (of a newer version), ErrDenied, ErrUnavailable.
func openState(dir string, node base.NodeID, wait time.Duration) (_ *state, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, statedir.Error("make state directory", dir, err)
	}
	s := &state{dir: dir}
	defer func() {
		if err != nil {
			_ = s.close()
		}
	}()
	if s.lock, err = statedir.Lock(dir, lockFile, "another agent of this node: one is enough for all of its mappers", wait); err != nil {
		return nil, err
	}
	mark, err := readMark(dir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, storeFile)
	_, statErr := os.Lstat(path)
	if errors.Is(statErr, fs.ErrNotExist) {
		if mark != "" {
			return nil, fmt.Errorf("%w: %s is missing, but %s says that there was one: %s", base.ErrNotFound, path, filepath.Join(dir, markFile), lossCure(mark))
		}
		if err := setUp(dir, path, node); err != nil {
			return nil, err
		}
	}
	if s.store, err = bolt.Open(path, storeKind, wait); err != nil {
		return nil, err
	}
	id := s.store.Identity()
	s.agent = id.ID
	switch {
	case mark != "" && mark != s.agent.String():
		return nil, fmt.Errorf("%w: %s is of agent %s, but this state directory was made for %s: %s", base.ErrForeign, path, s.agent, mark, lossCure(mark))
	case id.Attributes[attributeRows] != rowsVersion:
		return nil, fmt.Errorf("%w: the rows of %s have version %s, this program reads %s", base.ErrUnsupported, path, id.Attributes[attributeRows], rowsVersion)
	case id.Attributes[attributeNode] != node.String():
		return nil, fmt.Errorf("%w: state directory %s was made on node %s, this is %s (a copied image?): another boot id here would prove nothing of the mappers there; "+
			"remove the directory on the copy, never on the first machine", base.ErrForeign, dir, id.Attributes[attributeNode], node)
	}
	if s.secret, err = readSecret(dir, id.Attributes[attributeSecret], s.agent); err != nil {
		return nil, err
	}
	if err := s.store.Load(s.row); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", path, err, lossCure(s.agent.String()))
	}
	if mark == "" {
		if err := statedir.Replace(dir, markFile, []byte(markText+s.agent.String()+"\n")); err != nil {
			return nil, statedir.Error("write", filepath.Join(dir, markFile), err)
		}
	}
	return s, nil
}

// row takes one row of the store. Errors: ErrCorrupt, ErrUnsupported.
func (s *state) row(bucket, key string, value []byte) error {
	switch bucket {
	case bucketSessions:
		var r sessionRow
		if err := decoder.Unmarshal(value, &r); err != nil {
			return fmt.Errorf("%w: session %x: %w", base.ErrCorrupt, key, err)
		}
		if key != string(r.Session[:]) || r.PID <= 0 || r.Namespace == 0 || r.StartTicks == 0 || r.Boot == (base.BootID{}) {
			return fmt.Errorf("%w: session %x: its process is not complete", base.ErrCorrupt, key)
		}
		s.sessions = append(s.sessions, r)
	case bucketManager:
		var r managerRow
		if err := decoder.Unmarshal(value, &r); err != nil || key != managerKey {
			return fmt.Errorf("%w: row %q of the resource manager: %w", base.ErrCorrupt, key, err)
		}
		s.manager = r.Store
	default:
		return fmt.Errorf("%w: bucket %q: the store is of a newer version", base.ErrUnsupported, bucket)
	}
	return nil
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

// setUp makes secret and store. What a crash in between leaves is made again: the store,
// which fits the secret, comes last.
func setUp(dir, path string, node base.NodeID) error {
	secret := base.NewOwnerSecret()
	if err := statedir.Replace(dir, secretFile, []byte(secret.EncodeHex()+"\n")); err != nil {
		return statedir.Error("write", filepath.Join(dir, secretFile), err)
	}
	return bolt.Create(path, bolt.Identity{Kind: storeKind, ID: base.NewID(), Attributes: map[string]string{
		attributeNode: node.String(), attributeSecret: secretCheck(secret), attributeRows: rowsVersion,
	}})
}

// secretCheck tells whether a secret is the store's and tells nothing about it, nor about
// the digest that the resource manager keeps.
func secretCheck(s base.OwnerSecret) string {
	sum := sha256.Sum256(append([]byte("maru-agent-secret-check-v1"), s.Bytes()...))
	return hex.EncodeToString(sum[:])
}

func readSecret(dir, check string, agent base.AgentID) (base.OwnerSecret, error) {
	path := filepath.Join(dir, secretFile)
	text, err := settings.ReadSecretFile(path)
	if errors.Is(err, base.ErrNotFound) {
		return base.OwnerSecret{}, fmt.Errorf("%w: %s, which agent %s proves itself with, is missing: %s", base.ErrNotFound, path, agent, lossCure(agent.String()))
	}
	if err != nil {
		return base.OwnerSecret{}, err // it names the cure
	}
	secret, err := base.DecodeOwnerSecret(string(text))
	if err != nil {
		return base.OwnerSecret{}, fmt.Errorf("%w: %s: %w: %s", base.ErrCorrupt, path, err, lossCure(agent.String()))
	}
	if secretCheck(secret) != check {
		return base.OwnerSecret{}, fmt.Errorf("%w: %s is not the secret of agent %s: %s", base.ErrForeign, path, agent, lossCure(agent.String()))
	}
	return secret, nil
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
		return "", fmt.Errorf("%w: %s does not say which agent this directory has: %.80q", base.ErrCorrupt, path, b)
	}
	return id, nil
}
