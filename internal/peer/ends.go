package peer

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/node"
)

// Proof says how the end of a process is known (docs/PROTOCOL.md, "Proof that a mapper
// is gone"). There are more proofs; these are the ones that a watcher on the spot has.
type Proof uint8

// Proofs of a watcher.
const (
	// ProofPidfd: the pidfd was readable, or the process could not be there any more when
	// it was looked for after a restart of the watcher.
	ProofPidfd Proof = iota + 1
	// ProofReboot: the process was recorded under another boot of this machine.
	ProofReboot
)

// String is the proof's name on the wire.
func (p Proof) String() string {
	switch p {
	case ProofPidfd:
		return "pidfd"
	case ProofReboot:
		return "reboot"
	}
	return fmt.Sprintf("proof(%d)", uint8(p))
}

// EndsOptions says who is told. The callbacks must not block and must not call Close;
// they run in the watcher's goroutine or in the caller of Watch and Reopen.
type EndsOptions struct {
	MaxCount int // processes; 0: [DefaultMaxWatchCount]
	// Ended is called when a process is proved gone, once for each Watch or Reopen that
	// has not been followed by another one of the same process.
	Ended func(Process, Proof)
	// Lost is called when a process that was recorded before can neither be found nor be
	// proved gone: from then on its end cannot be proved here. why says what would help.
	Lost func(p Process, why error)
}

// Ends is what every node watcher does, whoever's it is: it takes the process behind a
// Unix socket, tells when it ends and how that is known, and after a restart of its
// program takes up the processes that this recorded. What is bound to a process, and how
// it is recorded, is its user's. Concurrency: safe for concurrent use.
type Ends struct {
	o       EndsOptions
	boot    base.BootID
	watcher *Watcher
}

// NewEnds starts a watcher. Ownership: the caller closes it. Errors: ErrLimit,
// ErrUnavailable (no boot id).
func NewEnds(o EndsOptions) (*Ends, error) {
	boot, err := node.BootID()
	if err != nil {
		return nil, err
	}
	w, err := NewWatcher(o.MaxCount)
	if err != nil {
		return nil, err
	}
	return &Ends{o: o, boot: boot, watcher: w}, nil
}

// key names a process in the watcher: sessions of one process share a watch.
func (p Process) key() Key {
	var b [40]byte
	binary.LittleEndian.PutUint64(b[0:], uint64(p.PID))
	binary.LittleEndian.PutUint64(b[8:], p.PIDNamespace)
	binary.LittleEndian.PutUint64(b[16:], p.StartTicks)
	copy(b[24:], p.BootID[:])
	sum := sha256.Sum256(b[:])
	return Key(sum[:16])
}

// Watch watches the process of a live connection. One that has ended meanwhile is
// reported at once, so that no end is missed: the caller records the process first.
// Errors: ErrUnsupported (it is not provable: Peer.Unprovable says why), ErrLimit,
// ErrClosed, ErrUnavailable; nothing is watched then.
func (e *Ends) Watch(p *Peer) error {
	if !p.Provable() {
		return fmt.Errorf("%w: %s: %s", base.ErrUnsupported, p, p.Unprovable)
	}
	err := e.watcher.Watch(p.Process.key(), p, func(string) { e.o.Ended(p.Process, ProofPidfd) })
	if !errors.Is(err, base.ErrClosed) {
		return err
	}
	// The connection has gone already, and its pidfd with it.
	return e.Reopen(p.Process)
}

// Reopen watches a process that was recorded on this machine before. If it is gone by
// now that is reported at once; if nobody can know any more, it is lost, which is
// reported and returned. Errors: those of [Reopen], ErrLimit, ErrClosed, ErrUnavailable.
func (e *Ends) Reopen(p Process) error {
	gone, err := e.watcher.WatchProcess(p.key(), p, func(string) { e.o.Ended(p, ProofPidfd) })
	switch {
	case gone, errors.Is(err, base.ErrClosed) && e.ended(p):
		proof := ProofPidfd
		if p.BootID != e.boot {
			proof = ProofReboot
		}
		e.o.Ended(p, proof)
		return nil
	case err != nil && !errors.Is(err, base.ErrClosed): // closed: the watcher itself
		e.o.Lost(p, err)
	}
	return err
}

// ended reports whether a process ended between two looks.
func (e *Ends) ended(p Process) bool {
	pr, gone, err := Reopen(p)
	if err == nil && !gone {
		pr.Close()
	}
	return err == nil && gone
}

// Forget stops watching a process: nobody wants to know of its end any more.
func (e *Ends) Forget(p Process) { e.watcher.Unwatch(p.key()) }

// Count returns how many processes are watched.
func (e *Ends) Count() int { return e.watcher.Count() }

// Close stops the watcher and waits for a callback that runs; none runs afterwards but
// those of Watch and Reopen calls that are under way.
func (e *Ends) Close() { e.watcher.Close() }
