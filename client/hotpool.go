package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
)

// hotPool is the hot connections of one epoch. A connection carries one call at a time;
// they are made when they are needed, and the one used last is used first, so that an
// idle client has one. Buffers live as long as their slot: a call allocates nothing.
// Concurrency: safe.
type hotPool struct {
	link    *link
	address rpc.Address
	timeout time.Duration // of one connect with its handshake

	tokens chan struct{}
	mu     struct {
		sync.Mutex
		idle   []*hotConn
		busy   map[*hotConn]struct{}
		closed bool
		// down: no connect is tried before, so that a server that is away costs a call
		// nothing.
		down time.Time
		why  error
	}
}

// hotConn is a slot with its connection, nil while there is none.
type hotConn struct {
	conn   *socket
	reader *hot.Reader
	out    []byte
	id     uint64
	used   bool // it has answered a call: if it fails now, it may only be stale
}

// downFor is how long a failed connect answers for the calls behind it.
const downFor = 100 * time.Millisecond

func newHotPool(l *link, address rpc.Address, connections int, timeout time.Duration) *hotPool {
	p := &hotPool{link: l, address: address, timeout: timeout, tokens: make(chan struct{}, connections)}
	p.mu.busy = make(map[*hotConn]struct{}, connections)
	for range connections {
		p.tokens <- struct{}{}
		p.mu.idle = append(p.mu.idle, &hotConn{out: make([]byte, 0, 4096)})
	}
	return p
}

// get waits for a slot and connects it if need be. Errors: ErrUnavailable, ErrTimeout,
// ErrStale (the epoch is over), ErrDenied.
func (p *hotPool) get(ctx context.Context, deadline time.Time) (*hotConn, error) {
	if p.link.hung.Load() {
		return nil, fmt.Errorf("%w: the server did not answer the last call and no heartbeat since", base.ErrUnavailable)
	}
	select {
	case <-p.tokens:
	default:
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		select {
		case <-p.tokens:
		case <-timer.C:
			return nil, fmt.Errorf("%w: waiting for a hot connection (setting HotConnections)", base.ErrTimeout)
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: waiting for a hot connection: %w", base.ErrTimeout, ctx.Err())
		}
	}
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		p.tokens <- struct{}{}
		return nil, fmt.Errorf("%w: the session's epoch is over", base.ErrUnavailable)
	}
	n := len(p.mu.idle) - 1
	h := p.mu.idle[n]
	p.mu.idle = p.mu.idle[:n]
	p.mu.busy[h] = struct{}{}
	down, why := p.mu.down, p.mu.why
	p.mu.Unlock()
	if h.conn != nil {
		return h, nil
	}
	if why != nil && time.Now().Before(down) {
		p.put(h)
		return nil, why
	}
	if err := p.connect(ctx, h); err != nil {
		p.mu.Lock()
		p.mu.down, p.mu.why = time.Now().Add(downFor), err
		p.mu.Unlock()
		p.put(h)
		return nil, err
	}
	return h, nil
}

// put gives a slot back.
func (p *hotPool) put(h *hotConn) {
	p.mu.Lock()
	delete(p.mu.busy, h)
	if p.mu.closed {
		h.close()
	}
	p.mu.idle = append(p.mu.idle, h)
	p.mu.Unlock()
	p.tokens <- struct{}{}
}

func (h *hotConn) close() {
	if h.conn != nil {
		h.conn.Close()
		h.conn = nil
	}
}

// close ends the pool; calls in flight fail.
func (p *hotPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed = true
	for _, h := range p.mu.idle {
		h.close()
	}
	for h := range p.mu.busy {
		if h.conn != nil {
			h.conn.Close() // its user sees an error and puts the slot back
		}
	}
}

// connect dials and proves the session, both ways.
func (p *hotPool) connect(ctx context.Context, h *hotConn) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	dialed, err := rpc.DialNet(ctx, p.address)
	if err != nil {
		return err
	}
	conn, err := newSocket(dialed)
	if err != nil {
		return fmt.Errorf("hot connection to %s: %w", p.address, err)
	}
	deadline, _ := ctx.Deadline()
	conn.setDeadline(deadline)
	reader := hot.NewReader(conn)
	if err := p.handshake(conn, reader); err != nil {
		conn.Close()
		return fmt.Errorf("hot connection to %s: %w", p.address, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		conn.Close()
		return fmt.Errorf("%w: the session's epoch is over", base.ErrUnavailable)
	}
	h.conn, h.reader, h.used = conn, reader, false
	return nil
}

func (p *hotPool) handshake(conn *socket, reader *hot.Reader) error {
	head, payload, err := reader.Next()
	if err != nil {
		return unavailable(err)
	}
	if head.Op == hot.OpHello {
		var w hot.Welcome
		if err := hot.DecodeWelcome(payload, &w); err != nil {
			return err // refused before it was asked: too many connections
		}
	}
	var ch hot.Challenge
	if head.Op != hot.OpChallenge {
		return fmt.Errorf("%w: the first frame is %s, not challenge", base.ErrInvalid, head.Op)
	}
	if err := hot.DecodeChallenge(payload, &ch); err != nil {
		return err
	}
	hello := hot.Hello{Session: p.link.session, Epoch: p.link.epoch, ServerEpoch: p.link.serverEpoch}
	_, _ = rand.Read(hello.Nonce[:])
	hello.MAC = hot.HelloMAC(p.link.secret, &ch, &hello)
	if _, err := conn.Write(hot.AppendHello(nil, 1, &hello)); err != nil {
		return unavailable(err)
	}
	if head, payload, err = reader.Next(); err != nil {
		return unavailable(err)
	}
	if head.Op != hot.OpHello || head.Flags != hot.FlagAnswer {
		return fmt.Errorf("%w: the answer to hello is %s", base.ErrInvalid, head.Op)
	}
	var w hot.Welcome
	if err := hot.DecodeWelcome(payload, &w); err != nil {
		return err
	}
	if !hot.EqualMAC(w.MAC, hot.WelcomeMAC(p.link.secret, &ch, &hello)) {
		return fmt.Errorf("%w: the server does not know this session's secret", base.ErrDenied)
	}
	if w.Namespace != p.link.namespace {
		return fmt.Errorf("%w: the connection is bound to namespace %d, this session to %d", base.ErrMismatch, w.Namespace, p.link.namespace)
	}
	if w.Provable {
		p.link.provable.Store(true)
	}
	return nil
}

// unavailable turns an error of a socket into ours.
func unavailable(err error) error {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("%w: the server does not answer: %w", base.ErrTimeout, err)
	}
	return fmt.Errorf("%w: the connection broke: %w", base.ErrUnavailable, err)
}

// delivery says what can be known of a call that failed.
type delivery uint8

const (
	notSent  delivery = iota // the server has not seen it
	noAnswer                 // it may have
	answered                 // it said so itself
)

// call makes one call. encode appends the frame, decode takes the answer, whose bytes
// are valid only inside it. A connection that had worked before and fails now may just
// be stale: the call is then made once more, which is the same operation to the server.
func (p *hotPool) call(
	ctx context.Context, op hot.Op, limit time.Duration, encode func(dst []byte, id uint64) []byte, decode func(payload []byte) error,
) (delivery, error) {
	deadline, shorter := time.Now().Add(limit), false
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline, shorter = d, true
	}
	state := notSent
	for {
		h, err := p.get(ctx, deadline)
		if err != nil {
			return state, err
		}
		stale := h.used
		// A caller that gives up does not wait for the server: the connection is cut.
		stop := context.AfterFunc(ctx, h.conn.Close)
		d, err := h.roundTrip(op, deadline, encode, decode)
		stop()
		if err != nil && d != answered && ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", base.ErrTimeout, ctx.Err())
		}
		if err != nil && d != answered {
			p.mu.Lock() // close runs beside us
			h.close()
			p.mu.Unlock()
		}
		p.put(h)
		if err == nil || d == answered {
			return d, err
		}
		state = max(state, d)
		if errors.Is(err, base.ErrTimeout) && !shorter && ctx.Err() == nil {
			p.link.hung.Store(true)
		}
		if !stale || !time.Now().Before(deadline) || ctx.Err() != nil {
			return state, err
		}
	}
}

func (h *hotConn) roundTrip(
	op hot.Op, deadline time.Time, encode func(dst []byte, id uint64) []byte, decode func(payload []byte) error,
) (delivery, error) {
	h.conn.setDeadline(deadline)
	h.id++
	h.out = encode(h.out[:0], h.id)
	if _, err := h.conn.Write(h.out); err != nil {
		return noAnswer, unavailable(err)
	}
	if cap(h.out) > 1<<20 {
		h.out = make([]byte, 0, 4096)
	}
	head, payload, err := h.reader.Next()
	if err != nil {
		return noAnswer, unavailable(err)
	}
	if head.Op != op || head.Flags != hot.FlagAnswer || head.RequestID != h.id {
		return noAnswer, fmt.Errorf("%w: the answer is %s %d, the request was %s %d", base.ErrInvalid, head.Op, head.RequestID, op, h.id)
	}
	h.used = true
	if err := decode(payload); err != nil {
		if len(payload) >= 4 && binary.LittleEndian.Uint32(payload) == 0 {
			return noAnswer, err // no refusal: an answer that cannot be read
		}
		return answered, err
	}
	return answered, nil
}
