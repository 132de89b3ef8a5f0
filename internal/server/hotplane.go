package server

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/peer"
)

// handshakePayloadBytes bounds a frame of a peer that has not proved a session: a
// Hello has 128 bytes.
const handshakePayloadBytes = 256

// rejectReason is why a hot connection was cut: a metric's label, so the set is closed.
type rejectReason string

// Reasons.
const (
	rejectFull      rejectReason = "connection_limit"
	rejectHandshake rejectReason = "handshake"
	rejectStale     rejectReason = "stale"
	rejectTimeout   rejectReason = "timeout"
	rejectMalformed rejectReason = "malformed"
)

// hotPlane owns the connections of the hot plane.
// Concurrency: all methods from any goroutine.
type hotPlane struct {
	server *Server
	log    *slog.Logger
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		conns  map[*hotConn]struct{}
	}
	listeners []net.Listener

	logGate logGate
}

func newHotPlane(s *Server, listeners ...net.Listener) *hotPlane {
	p := &hotPlane{server: s, log: s.log.With("plane", "hot"), listeners: listeners}
	p.logGate.interval = 10 * time.Second
	p.mu.conns = make(map[*hotConn]struct{})
	return p
}

func (p *hotPlane) start() {
	for _, l := range p.listeners {
		p.wg.Add(1)
		go p.accept(l)
	}
}

func (p *hotPlane) accept(l net.Listener) {
	defer p.wg.Done()
	wait := time.Millisecond
	for {
		conn, err := l.Accept()
		switch {
		case err == nil:
			wait = time.Millisecond
			p.admit(conn)
		case errors.Is(err, net.ErrClosed):
			return
		default:
			// Out of descriptors, mostly. The loop must neither end nor spin.
			if p.logGate.open() {
				p.log.Error("cannot accept hot connections", "address", l.Addr(), "error", err)
			}
			if !p.server.sleep(wait) {
				return
			}
			wait = min(2*wait, time.Second)
		}
	}
}

// admit starts the connection's goroutine, unless there are too many.
func (p *hotPlane) admit(conn net.Conn) {
	c := &hotConn{plane: p, conn: conn, server: p.server}
	p.mu.Lock()
	full := len(p.mu.conns) >= p.server.cfg.MaxHotConnectionCount
	if !full && !p.mu.closed {
		p.mu.conns[c] = struct{}{}
		p.wg.Add(1)
		p.mu.Unlock()
		p.server.metrics.hotConnections.Inc()
		go c.run()
		return
	}
	p.mu.Unlock()
	if full {
		p.reject(conn, rejectFull, fmt.Errorf("%w: %d hot connections (setting max-hot-connections)",
			base.ErrLimit, p.server.cfg.MaxHotConnectionCount))
	}
	_ = conn.Close()
}

// reject counts and, now and then, logs why a peer was cut off.
func (p *hotPlane) reject(conn net.Conn, reason rejectReason, err error) {
	p.server.metrics.hotRejects.WithLabelValues(string(reason)).Inc()
	if reason == rejectStale {
		// Every client comes once with its old epoch after a restart.
		p.log.Debug("hot connection closed", "reason", string(reason), "error", err)
		return
	}
	if p.logGate.open() {
		p.log.Warn("hot connection closed", "network", conn.LocalAddr().Network(), "peer", conn.RemoteAddr().String(), "reason", string(reason), "error", err,
			"not_logged", p.logGate.takeSkipped())
	}
}

func (p *hotPlane) remove(c *hotConn) {
	p.mu.Lock()
	delete(p.mu.conns, c)
	p.mu.Unlock()
	p.server.metrics.hotConnections.Dec()
}

// close ends all connections and waits for their goroutines.
func (p *hotPlane) close() {
	for _, l := range p.listeners {
		_ = l.Close()
	}
	p.mu.Lock()
	p.mu.closed = true
	for c := range p.mu.conns {
		_ = c.conn.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// hotConn is one connection: its goroutine reads a frame, works, and answers with
// one write. The buffers live as long as the connection, so that a request in
// steady state allocates nothing.
type hotConn struct {
	plane   *hotPlane
	server  *Server
	conn    net.Conn
	session *session
	reader  *hot.Reader
	out     []byte
	scratch hotScratch

	// awaiting is true while no byte of the next frame has come; late is true while
	// a deadline is set.
	awaiting, late bool
	holds          lockHeld
	closed         atomic.Bool
}

// lockHeld is which of the directory's locks a connection has now.
type lockHeld uint8

const (
	holdsNothing lockHeld = iota
	holdsRead
	holdsWrite
)

// Read feeds the frame reader. A peer may be silent between frames for as long as
// it likes; the rest of a frame that was begun has to come in time.
func (c *hotConn) Read(b []byte) (int, error) {
	if c.awaiting {
		n, err := c.conn.Read(b)
		c.awaiting = n == 0
		return n, err
	}
	if !c.late {
		c.late = true
		if err := c.conn.SetReadDeadline(time.Now().Add(c.server.cfg.FrameTimeout)); err != nil {
			return 0, err
		}
	}
	return c.conn.Read(b)
}

func (c *hotConn) next() (hot.Header, []byte, error) {
	c.awaiting = true
	h, payload, err := c.reader.Next()
	if c.late && err == nil {
		c.late = false
		err = c.conn.SetReadDeadline(time.Time{})
	}
	return h, payload, err
}

func (c *hotConn) run() {
	defer c.plane.wg.Done()
	defer c.plane.remove(c)
	defer c.close()
	defer func() {
		// A bug must not take the other sessions' metadata with it.
		if v := recover(); v != nil {
			switch c.holds {
			case holdsWrite:
				c.server.poison()
				c.server.dir.Unlock()
			case holdsRead:
				c.server.dir.RUnlock()
			case holdsNothing:
			}
			c.server.recovered("hot plane", v)
		}
	}()
	if tcp, ok := c.conn.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3})
	}
	c.reader = hot.NewReader(c)
	if err := c.handshake(); err != nil {
		c.cut(rejectHandshake, err)
		return
	}
	defer c.session.detach(c)
	for {
		h, payload, err := c.next()
		if err != nil {
			c.cut(rejectMalformed, err)
			return
		}
		if h.Flags != 0 {
			c.cut(rejectMalformed, fmt.Errorf("%w: an answer from a client", base.ErrInvalid))
			return
		}
		c.out, err = c.dispatch(c.out[:0], h, payload)
		if err != nil {
			c.cut(rejectMalformed, err)
			return
		}
		if _, err := c.conn.Write(c.out); err != nil {
			return
		}
		if cap(c.out) > maxKeptAnswerBytes {
			c.out = nil
		}
	}
}

// maxKeptAnswerBytes is an answer to 4096 keys; what an error path made larger is
// given back.
const maxKeptAnswerBytes = 512 << 10

// cut says why a connection ends, unless it ended by itself.
func (c *hotConn) cut(reason rejectReason, err error) {
	if c.closed.Load() || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
		return
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		reason = rejectTimeout
	} else if errors.As(err, &timeout) {
		return // reset by the peer: its own business
	}
	if errors.Is(err, base.ErrStale) {
		reason = rejectStale
	}
	c.plane.reject(c.conn, reason, err)
}

// close ends the connection; its goroutine sees it at its next read or write.
func (c *hotConn) close() {
	c.closed.Store(true)
	_ = c.conn.Close()
}

// handshake proves the session and binds the connection to it.
func (c *hotConn) handshake() error {
	deadline := time.Now().Add(c.server.cfg.HelloTimeout)
	if err := c.conn.SetDeadline(deadline); err != nil {
		return err
	}
	// The peer of the Unix socket is taken before anything is read: SO_PEERPIDFD is
	// of the process that connected, and a proof must not depend on what it sent.
	proc := c.server.peerOf(c.conn)
	if proc != nil {
		defer proc.Close()
	}
	var ch hot.Challenge
	_, _ = rand.Read(ch.Nonce[:])
	ch.ServerEpoch = c.server.epoch
	c.out = hot.AppendChallenge(c.out[:0], &ch)
	if _, err := c.conn.Write(c.out); err != nil {
		return err
	}
	c.reader.SetMaxPayload(handshakePayloadBytes)
	c.awaiting, c.late = false, true // the deadline of the whole handshake is set
	h, payload, err := c.reader.Next()
	if err != nil {
		return err
	}
	if h.Op != hot.OpHello || h.Flags != 0 {
		return fmt.Errorf("%w: the first frame is %s, not hello", base.ErrInvalid, h.Op)
	}
	var hello hot.Hello
	if err := hot.DecodeHello(payload, &hello); err != nil {
		return err
	}
	sess, provable, err := c.prove(&ch, &hello, proc)
	if err != nil {
		c.out = hot.AppendError(c.out[:0], hot.OpHello, h.RequestID, err)
		_, _ = c.conn.Write(c.out)
		return err
	}
	c.session = sess
	welcome := hot.Welcome{Namespace: sess.namespaceNumber, Provable: provable, MAC: hot.WelcomeMAC(sess.secret[:], &ch, &hello)}
	c.out = hot.AppendWelcome(c.out[:0], h.RequestID, &welcome)
	if _, err := c.conn.Write(c.out); err != nil {
		sess.detach(c)
		return err
	}
	c.reader.SetMaxPayload(hot.MaxPayloadBytes)
	c.late = false
	if err := c.conn.SetDeadline(time.Time{}); err != nil {
		sess.detach(c)
		return err
	}
	return nil
}

// prove checks a Hello, binds the session's process and attaches the connection.
func (c *hotConn) prove(ch *hot.Challenge, hello *hot.Hello, proc *peer.Peer) (_ *session, provable bool, _ error) {
	s := c.server
	if err := s.serving(); err != nil {
		return nil, false, err
	}
	sess, err := s.proveHello(ch, hello)
	if err != nil {
		return nil, false, err
	}
	if proc != nil {
		err := s.bindProcess(sess.id, proc)
		if errors.Is(err, base.ErrDenied) {
			return nil, false, err
		}
		provable = err == nil
		if provable {
			err = s.step(func(d *directory.Directory, now time.Duration) error { return d.SetProvable(now, sess.caller()) })
			if err != nil {
				return nil, false, err
			}
		}
	}
	return sess, provable, sess.attach(c, s.cfg.MaxSessionConnectionCount)
}

// logGate lets one line through an interval and counts the others.
type logGate struct {
	interval time.Duration
	last     atomic.Int64
	skipped  atomic.Uint64
}

func (g *logGate) open() bool {
	now, last := time.Now().UnixNano(), g.last.Load()
	if now-last >= int64(g.interval) && g.last.CompareAndSwap(last, now) {
		return true
	}
	g.skipped.Add(1)
	return false
}

func (g *logGate) takeSkipped() uint64 { return g.skipped.Swap(0) }
