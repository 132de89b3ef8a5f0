package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/session"
)

// Versions of the control plane that this client speaks.
const (
	minVersion = 1
	maxVersion = 1
)

// link is one epoch of the session at one server: its secret, the control connection
// and the pool of hot ones. A new epoch is a new link.
// Concurrency: fields are set before it is published.
type link struct {
	session     base.SessionID
	epoch       base.Epoch
	serverEpoch base.ServerEpoch
	secret      []byte
	namespace   base.NamespaceNumber
	resp        *maruv1.OpenResponse
	sameBoot    bool // the server runs under our boot id

	api      maruv1.MetadataServerClient
	unix     *grpc.ClientConn // nil: the client's own connection is used
	hot      *hotPool
	provable atomic.Bool
	// hung: a call had no answer in its time. Until the next heartbeat has one, calls are
	// not made, so that a server that hangs costs one of them its time-out and not all.
	hung   atomic.Bool
	owner  atomic.Uint32 // the server's incarnation at the RM; 0: it has none now
	proved bool          // the domains, to the RM and the server; under growMu

	pools map[uint32]pool

	ctx    context.Context // ends with the epoch
	cancel context.CancelFunc
	once   sync.Once
	over   atomic.Bool // close was called
}

// pool is a pool as this server epoch names it.
type pool struct {
	number    uint32
	id        base.PoolID
	medium    base.Medium
	private   bool
	coherence base.Coherence
	grant     uint64
}

func poolsOf(refs []*maruv1.PoolRef) map[uint32]pool {
	out := make(map[uint32]pool, len(refs))
	for _, r := range refs {
		p := pool{
			number: r.GetNumber(), medium: base.Medium(r.GetInfo().GetMedium()), grant: r.GetGrantBytes(), //nolint:gosec // an enum
			private:   r.GetInfo().GetScope() == maruv1.Scope_SCOPE_PROCESS,
			coherence: base.Coherence(r.GetInfo().GetCoherence()), //nolint:gosec // an enum
		}
		copy(p.id[:], r.GetInfo().GetPoolId())
		out[p.number] = p
	}
	return out
}

func poolNumbers(pools map[uint32]pool) []session.PoolNumber {
	out := make([]session.PoolNumber, 0, len(pools))
	for _, p := range pools {
		out = append(out, session.PoolNumber{ID: p.id, Medium: p.medium, Number: p.number})
	}
	return out
}

func (l *link) close() {
	l.once.Do(func() {
		l.over.Store(true)
		l.cancel()
		l.hot.close()
		if l.unix != nil {
			_ = l.unix.Close()
		}
	})
}

// authorize puts the epoch's proof into a control call.
func (l *link) authorize(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx,
		"maru-session-bin", string(l.session[:]),
		"maru-epoch", strconv.FormatUint(uint64(l.epoch), 10),
		"maru-secret-bin", string(l.secret))
}

// control bounds a control call and proves it.
func (c *Client) control(ctx context.Context, l *link) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
	return l.authorize(ctx), cancel
}

// epochOver reports whether an error means that the session must be opened again.
func epochOver(err error) bool {
	return errors.Is(err, base.ErrStale) || errors.Is(err, base.ErrFenced) || errors.Is(err, base.ErrNotFound)
}

// away reports whether an error means that the server did not answer now.
func away(err error) bool {
	return errors.Is(err, base.ErrUnavailable) || errors.Is(err, base.ErrTimeout)
}

// sessionID is the session's id as messages carry it.
func (c *Client) sessionID() []byte {
	id := c.Session()
	return id[:]
}

// openSession registers the session and makes the link. Until an Open was answered nothing
// is held under the session's id, and no secret is here: should the server know the id,
// from an Open whose answer was lost, only a new one helps.
func (c *Client) openSession(ctx context.Context) error {
	err := c.tryOpen(ctx)
	denied := errors.Is(err, base.ErrDenied)
	if err == nil || c.lastOpen != nil || !denied && !rpc.OutcomeUnknown(err) {
		return err
	}
	id := base.SessionID(base.NewID())
	c.id.Store(&id)
	if denied && ctx.Err() == nil {
		c.log.Info("the server knows this session, and here its secret is not: the answer to an Open was lost; the session has a new id",
			"new_session", id.String(), "error", err)
		return c.tryOpen(ctx)
	}
	return err
}

// tryOpen makes one Open call. It tries the server's Unix socket first when it was there
// before: after a restart the process behind it is what proves the session.
func (c *Client) tryOpen(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, max(c.cfg.ConnectTimeout, c.cfg.RPCTimeout))
	defer cancel()
	req := c.openRequest()
	var unix *grpc.ClientConn
	resp, sent, err := (*maruv1.OpenResponse)(nil), time.Duration(0), error(nil)
	if c.unixPath != "" {
		if unix, err = rpc.Dial(ctx, "unix:"+c.unixPath); err == nil {
			sent = c.clock()
			resp, err = maruv1.NewMetadataServerClient(unix).Open(ctx, req)
		}
		if err != nil {
			if unix != nil {
				_ = unix.Close()
			}
			unix = nil
			if errors.Is(err, base.ErrFenced) {
				c.unixPath = "" // of a server that stopped serving for good
			} else if !away(err) && !errors.Is(err, base.ErrDenied) && !errors.Is(err, base.ErrNotFound) {
				return err
			}
		}
	}
	if resp == nil {
		sent = c.clock()
		if resp, err = maruv1.NewMetadataServerClient(c.conn).Open(ctx, req); err != nil {
			if errors.Is(err, base.ErrFenced) {
				c.door.leave()
			}
			return err
		}
	}
	c.lastOpen = resp
	return c.adopt(ctx, resp, sent, unix)
}

func (c *Client) openRequest() *maruv1.OpenRequest {
	cfg := &c.cfg
	req := &maruv1.OpenRequest{
		Version:        &maruv1.ProtocolVersion{Min: minVersion, Max: maxVersion},
		Capabilities:   c.capabilities(),
		SessionId:      c.sessionID(),
		Role:           maruv1.Role(cfg.Role),
		EngineId:       cfg.EngineID,
		Rank:           cfg.Rank,
		WorldSize:      cfg.WorldSize,
		NamespaceCbor:  cfg.Namespace,
		Opaque:         cfg.Opaque,
		ValueBytes:     cfg.ValueBytes,
		PieceSize:      cfg.PieceBytes,
		NodeId:         c.node.Node[:],
		BootId:         c.node.Boot[:],
		CpuBytes:       c.cpuGrant(),
		CxlBytes:       c.cxlGrant(),
		InstanceId:     cfg.InstanceID,
		ProgramVersion: Version,
		Views:          cfg.Views == On,
	}
	if cfg.Role == base.RoleScheduler {
		req.ValueBytes = 0
	}
	for _, m := range cfg.WriteOrder {
		req.WriteOrder = append(req.WriteOrder, maruv1.Medium(m))
	}
	for _, m := range cfg.ReadOrder {
		req.ReadOrder = append(req.ReadOrder, maruv1.Medium(m))
	}
	if old := c.lastOpen; old != nil {
		req.PreviousSecret = old.GetSecret()
		req.PreviousServerEpoch = old.GetServerEpoch()
		req.PreviousEpoch = old.GetEpoch()
		req.SessionSecret = c.manager.secret
	}
	return req
}

func (c *Client) capabilities() []string {
	switch {
	case c.cfg.Role == base.RoleScheduler:
		return nil
	case c.cfg.CPUBytes != 0 && c.cfg.wantsCXL():
		return []string{"mixed_storage_v1"}
	case c.cfg.CPUBytes != 0:
		return []string{"cpu_storage_v1"}
	}
	return []string{"cxl_storage_v1"}
}

// adopt checks an Open's answer, moves to the Unix sockets of the own machine, proves
// the session on the hot plane, and makes the epoch the current one.
func (c *Client) adopt(ctx context.Context, resp *maruv1.OpenResponse, sent time.Duration, unix *grpc.ClientConn) (err error) {
	l := &link{
		session: c.Session(), epoch: base.Epoch(resp.GetEpoch()), serverEpoch: base.ServerEpoch(resp.GetServerEpoch()),
		secret: resp.GetSecret(), namespace: base.NamespaceNumber(resp.GetNamespaceNumber()), resp: resp, unix: unix,
		sameBoot: string(resp.GetBootId()) == string(c.node.Boot[:]), pools: poolsOf(resp.GetPools()),
	}
	l.owner.Store(resp.GetOwnerIncarnation())
	l.ctx, l.cancel = context.WithCancel(c.ctx)
	adopted := false
	defer func() {
		if adopted {
			return
		}
		if c.link.Load() == nil && l.api != nil {
			// Nothing is held under it, and nobody will come back for it.
			_ = c.say(context.WithoutCancel(ctx), l, &maruv1.CloseRequest{Drained: true})
			c.lastOpen = nil
		}
		l.cancel()
		if l.hot != nil {
			l.hot.close()
		}
		if l.unix != nil {
			_ = l.unix.Close()
		}
	}()
	switch {
	case resp.GetVersion() < minVersion || resp.GetVersion() > maxVersion:
		return fmt.Errorf("%w: the server speaks version %d of the control plane, this client %d to %d",
			base.ErrUnsupported, resp.GetVersion(), minVersion, maxVersion)
	case l.epoch == 0 || len(l.secret) != hot.SecretBytes:
		return fmt.Errorf("%w: Open answered epoch %d and a secret of %d bytes", base.ErrInvalid, l.epoch, len(l.secret))
	case string(resp.GetNamespaceId()) != string(c.namespace[:]):
		return fmt.Errorf("%w: the server answered namespace %x, ours is %s", base.ErrMismatch, resp.GetNamespaceId(), c.namespace)
	}
	l.api = maruv1.NewMetadataServerClient(c.conn)
	if l.sameBoot && resp.GetControlUnixPath() != "" && l.unix == nil {
		if conn, err := rpc.Dial(ctx, "unix:"+resp.GetControlUnixPath()); err == nil {
			l.unix = conn
		} else {
			c.log.Warn("the server is on this machine but its socket cannot be used: this process is not provable, its memory comes back only by an operator or a reboot",
				"socket", resp.GetControlUnixPath(), "error", err, "cure", "run both as one user, or give the server a socket that this user can open")
		}
	}
	if l.unix != nil {
		l.api = maruv1.NewMetadataServerClient(l.unix)
	}
	if err := c.dialHot(ctx, l); err != nil {
		return err
	}
	c.install(l, sent)
	adopted = true
	return nil
}

// dialHot makes the first hot connection: over the Unix socket of the own machine, else
// over TCP.
func (c *Client) dialHot(ctx context.Context, l *link) error {
	var unixErr error
	connections := c.cfg.HotConnections
	if most := int(l.resp.GetLimits().GetMaxConnections()); most > 0 {
		connections = min(connections, most)
	}
	if path := l.resp.GetHotUnixPath(); l.unix != nil && path != "" {
		l.hot = newHotPool(l, rpc.Address{Network: "unix", Target: path}, connections, c.cfg.ConnectTimeout)
		if unixErr = l.hot.prove(ctx); unixErr == nil {
			return nil
		}
		l.hot.close()
		if !away(unixErr) && !errors.Is(unixErr, base.ErrNotFound) && !errors.Is(unixErr, base.ErrDenied) {
			return unixErr
		}
	}
	address, err := rpc.ParseAddress(c.reachable(l.resp.GetHotAddress()))
	if err != nil {
		return errors.Join(fmt.Errorf("the server's hot address: %w", err), unixErr)
	}
	l.hot = newHotPool(l, address, connections, c.cfg.ConnectTimeout)
	return l.hot.prove(ctx)
}

// reachable replaces a host that means "any address of the server" by the host under
// which the server was found.
func (c *Client) reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	if ip := net.ParseIP(host); host != "" && (ip == nil || !ip.IsUnspecified()) {
		return address
	}
	a, err := rpc.ParseAddress(c.cfg.ServerAddress)
	if err != nil || a.Network != "tcp" {
		return net.JoinHostPort("127.0.0.1", port)
	}
	host, _, _ = net.SplitHostPort(a.Target)
	return net.JoinHostPort(host, port)
}

// prove makes one connection now.
func (p *hotPool) prove(ctx context.Context) error {
	h, err := p.get(ctx, time.Now().Add(p.timeout))
	if err != nil {
		return err
	}
	p.put(h)
	return nil
}

// install makes a link the current one and tells the core; then the snapshot that a
// restarted server wants is sent, and what the link needs is started.
func (c *Client) install(l *link, sent time.Duration) {
	r := l.resp
	ms := func(v uint32) time.Duration { return time.Duration(v) * time.Millisecond }
	c.mu.Lock()
	old := c.link.Load()
	c.mu.core.SetLimits(int(r.GetLimits().GetMaxOperations()), int(r.GetLimits().GetMaxLeases()))
	snap := c.mu.core.Opened(session.Opening{
		Epoch: l.epoch, ServerEpoch: l.serverEpoch, Sent: sent, TTL: ms(r.GetTtlMs()), Margin: ms(r.GetMarginMs()),
		Relist: r.GetRelist(), Pools: poolNumbers(l.pools),
	})
	closed := c.mu.core.Phase() == session.Closed
	c.link.Store(l)
	c.mu.pools = l.pools
	c.mu.workers = workersOf(r.GetWorkers())
	c.mu.unprepared, c.mu.prepareNot = true, time.Time{}
	c.mu.Unlock()
	if l.sameBoot && r.GetControlUnixPath() != "" {
		c.unixPath = r.GetControlUnixPath()
	}
	if old != nil {
		old.close()
		c.count.reconnects.Add(1)
	}
	if !closed { // else it was opened only to be closed there too
		c.wg.Go(func() { c.stream(l) })
	}
	switch {
	case snap != nil:
		c.relist(l, snap)
	case old != nil:
		// Their epoch changed between Commit and mark.
		c.mu.Lock()
		unmarked := c.mu.core.Unmarked(nil)
		c.mu.Unlock()
		c.mark(unmarked, l)
	}
	c.kick()
}

// relist sends the snapshot and applies the results.
func (c *Client) relist(l *link, snap *session.Snapshot) {
	var frame []byte
	var clear []session.PageRef
	for first, lease := 0, 0; ; {
		pages := min(len(snap.Pages)-first, hot.MaxKeys)
		leases := min(len(snap.Leases)-lease, hot.MaxKeys)
		req := hot.RelistRequest{Last: first+pages == len(snap.Pages) && lease+leases == len(snap.Leases)}
		for i := range pages {
			req.Pages = hot.AppendRelistPage(req.Pages, &snap.Pages[first+i])
		}
		for i := range leases {
			req.Leases = hot.AppendRelistLease(req.Leases, &snap.Leases[lease+i])
		}
		var answer hot.RelistAnswer
		_, err := l.hot.call(l.ctx, hot.OpRelist, c.cfg.RPCTimeout,
			func(dst []byte, id uint64) []byte {
				c.mu.Lock()
				req.Operation.Watermark = c.mu.core.Watermark()
				c.mu.Unlock()
				frame = hot.AppendRelist(dst, id, &req)
				return frame
			},
			func(payload []byte) error {
				if err := hot.DecodeRelistAnswer(payload, &answer); err != nil {
					return err
				}
				c.mu.Lock()
				clear = c.mu.core.Relisted(snap, first, answer.Results, clear)
				c.mu.Unlock()
				return nil
			})
		if err != nil {
			c.clearMarks(clear)
			// Without its acknowledgement nothing is committed; opening again lists again.
			if l.ctx.Err() == nil {
				c.log.Warn("listing this session's pages failed; the session is opened again", "error", err)
				c.lose(l)
			}
			return
		}
		first += pages
		lease += leases
		if req.Last {
			break
		}
	}
	c.clearMarks(clear)
	c.mu.Lock()
	done := c.mu.core.RelistDone(snap)
	unmarked := c.mu.core.Unmarked(nil)
	c.mu.Unlock()
	if done {
		c.mark(unmarked, l)
	}
}

// lose ends an epoch: the session is to be opened again.
func (c *Client) lose(l *link) {
	c.mu.Lock()
	if c.link.Load() == l {
		c.mu.core.Fence()
	}
	c.mu.Unlock()
	l.close()
	select {
	case c.reopen <- struct{}{}:
	default:
	}
}

// failed takes the error of a call: an epoch that is over is opened again.
func (c *Client) failed(l *link, err error) {
	if epochOver(err) {
		c.lose(l)
	}
}
