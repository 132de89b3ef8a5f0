package server

import (
	"crypto/subtle"
	"fmt"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
)

// session is the shell's side of one session epoch: who connects to it and how
// it is woken. What it owns, may do and has to be told is the directory's.
// Concurrency: all methods from any goroutine.
type session struct {
	id              base.SessionID
	epoch           base.Epoch
	secret          directory.Secret
	namespaceNumber base.NamespaceNumber
	namespaceID     base.NamespaceID
	role            base.Role
	engine          string
	rank, world     uint32

	mu struct {
		sync.Mutex
		ended  bool
		reason string
		conns  map[*hotConn]struct{}
		wake   chan struct{} // closed and replaced at each change
	}
}

func newSession(id base.SessionID, epoch base.Epoch, secret directory.Secret) *session {
	s := &session{id: id, epoch: epoch, secret: secret}
	s.mu.conns = make(map[*hotConn]struct{})
	s.mu.wake = make(chan struct{})
	return s
}

func (s *session) caller() directory.Caller {
	return directory.Caller{Session: s.id, Epoch: s.epoch}
}

// attach binds a hot connection to this epoch.
func (s *session) attach(c *hotConn, maxCount int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended {
		return s.overLocked()
	}
	if len(s.mu.conns) >= maxCount {
		return fmt.Errorf("%w: session %s has %d hot connections (setting max-session-connections)", base.ErrLimit, s.id, maxCount)
	}
	s.mu.conns[c] = struct{}{}
	return nil
}

func (s *session) overLocked() error {
	return fmt.Errorf("%w: epoch %d of session %s is over: %s; open again", base.ErrStale, s.epoch, s.id, s.mu.reason)
}

func (s *session) detach(c *hotConn) {
	s.mu.Lock()
	delete(s.mu.conns, c)
	s.mu.Unlock()
}

// end closes the epoch: connections are cut and streams come back.
func (s *session) end(reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended {
		return
	}
	s.mu.ended, s.mu.reason = true, reason
	s.wakeLocked()
	for c := range s.mu.conns {
		c.close()
	}
}

// notify wakes the session's streams.
func (s *session) notify() {
	s.mu.Lock()
	s.wakeLocked()
	s.mu.Unlock()
}

func (s *session) wakeLocked() {
	close(s.mu.wake)
	s.mu.wake = make(chan struct{})
}

// changes returns a channel that is closed at the next change, and why the epoch
// is over, if it is.
func (s *session) changes() (wake <-chan struct{}, reason string, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.wake, s.mu.reason, s.mu.ended
}

// alive returns why the epoch is over, nil while it is not.
func (s *session) alive() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended {
		return s.overLocked()
	}
	return nil
}

// proves compares a secret in constant time.
func (s *session) proves(secret []byte) bool {
	return subtle.ConstantTimeCompare(s.secret[:], secret) == 1
}

// sessionTable finds sessions by id: the current epoch of each.
type sessionTable struct {
	mu struct {
		sync.RWMutex
		byID map[base.SessionID]*session
	}
}

func (t *sessionTable) init() { t.mu.byID = make(map[base.SessionID]*session) }

func (t *sessionTable) get(id base.SessionID) *session {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.mu.byID[id]
}

// put makes s the current epoch of its session, unless a younger one is there.
func (t *sessionTable) put(s *session) (older *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	older = t.mu.byID[s.id]
	if older != nil && older.epoch > s.epoch {
		return s
	}
	t.mu.byID[s.id] = s
	return older
}

// drop forgets an epoch that is over.
func (t *sessionTable) drop(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.byID[s.id] == s {
		delete(t.mu.byID, s.id)
	}
}

func (t *sessionTable) all() []*session {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]*session, 0, len(t.mu.byID))
	for _, s := range t.mu.byID {
		out = append(out, s)
	}
	return out
}

// noSecret stands for a session that is not known, so that asking for an unknown
// one takes the same work as a wrong secret.
var noSecret = directory.Secret(base.NewID())

// proveHello finds the session of a Hello and checks its proof.
func (s *Server) proveHello(ch *hot.Challenge, hello *hot.Hello) (*session, error) {
	sess := s.sessions.get(hello.Session)
	secret := noSecret
	if sess != nil && sess.epoch == hello.Epoch {
		secret = sess.secret
	}
	good := hot.EqualMAC(hot.HelloMAC(secret[:], ch, hello), hello.MAC)
	switch {
	case hello.ServerEpoch != s.epoch:
		return nil, fmt.Errorf("%w: server epoch %x, this server runs in %x; open again", base.ErrStale, hello.ServerEpoch, s.epoch)
	case sess == nil || sess.epoch != hello.Epoch:
		return nil, fmt.Errorf("%w: epoch %d of session %s is not current; open again", base.ErrStale, hello.Epoch, hello.Session)
	case !good:
		return nil, fmt.Errorf("%w: the proof of session %s does not hold", base.ErrDenied, hello.Session)
	}
	return sess, sess.alive()
}
