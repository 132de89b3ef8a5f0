package server

import (
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/peer"
)

// boundTable remembers which process each session belongs to: the first one that
// opened it, or proved it, over a Unix socket. A session belongs to one client
// object, so it never moves to another process.
type boundTable struct {
	mu struct {
		sync.Mutex
		process map[base.SessionID]peer.Process
	}
}

func (t *boundTable) init() { t.mu.process = make(map[base.SessionID]peer.Process) }

func (t *boundTable) has(id base.SessionID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.mu.process[id]
	return ok
}

func (t *boundTable) set(id base.SessionID, p peer.Process) {
	t.mu.Lock()
	t.mu.process[id] = p
	t.mu.Unlock()
}

func (t *boundTable) drop(id base.SessionID) {
	t.mu.Lock()
	delete(t.mu.process, id)
	t.mu.Unlock()
}

// errOtherProcess is why a second process cannot use a session.
func errOtherProcess(id base.SessionID, p *peer.Peer) error {
	return fmt.Errorf("%w: session %s belongs to another process than %s; a handler opened after fork or in another process "+
		"is a new session", base.ErrDenied, id, p)
}

// bindProcess watches the process of a session from now on. The end of the process
// is then the proof that its memory is gone (docs/PROTOCOL.md, section 3). It
// returns why the process cannot be watched; only ErrDenied is a reason to refuse it.
func (s *Server) bindProcess(id base.SessionID, p *peer.Peer) error {
	if p == nil {
		return fmt.Errorf("%w: it came over TCP; the Unix socket is %s", base.ErrUnsupported, s.UnixPath())
	}
	// The watcher knows whether a second peer is the same process, also where processes
	// have no name here (another pid namespace).
	err := s.watcher.Watch(id, p, func(proof string) {
		// The callback must not wait; the directory's lock is never held over I/O.
		s.sessionGone(id, directory.GonePidfd, proof)
	})
	switch {
	case errors.Is(err, base.ErrExists):
		return errOtherProcess(id, p)
	case err != nil:
		return err
	}
	s.bound.set(id, p.Process)
	return nil
}

// peerOf finds the process behind a connection of the Unix socket; nil when there
// is none to be found.
func (s *Server) peerOf(conn net.Conn) *peer.Peer {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil
	}
	p, err := peer.FromConn(c)
	if err != nil {
		return nil
	}
	return p
}

// forgetProcess stops watching a session whose record is gone.
func (s *Server) forgetProcess(id base.SessionID) {
	s.watcher.Unwatch(id)
	s.bound.drop(id)
}
