package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rpc"
)

// manager is the client's side of the resource manager: holds, domain proofs, and the
// watch of regions that drain. Over its Unix socket the RM watches this process, which
// is what proves its end.
// Concurrency: safe. Locks: manager.mu is held over the making of a connection only.
type manager struct {
	client *Client
	// secret shows the RM that a call is this session's, where the RM cannot see the
	// process; made once.
	secret []byte
	agent  nodeAgent
	mu     struct {
		sync.Mutex
		conn     *grpc.ClientConn
		api      maruv1.ResourceManagerClient
		address  string
		offered  string // the addresses that the server had named when conn was made
		store    []byte // id of the resource manager that knows this session
		sequence uint64
		token    []byte
		watching bool
	}
}

// use returns the connection, made when it is first needed, and again when the server
// names other addresses: they may be of the same resource manager at another place. One
// with another store knows neither the holds of this session nor the regions that it has
// mapped, and gives others the same numbers. Errors: ErrForeign, ErrUnavailable.
func (m *manager) use(ctx context.Context, l *link) (maruv1.ResourceManagerClient, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var problems []error
	var candidates []string
	if l.sameBoot && l.resp.GetRmUnixPath() != "" {
		candidates = append(candidates, "unix:"+l.resp.GetRmUnixPath())
	}
	for _, a := range l.resp.GetRmAddresses() {
		candidates = append(candidates, m.client.reachable(a))
	}
	offered := strings.Join(candidates, " ")
	if m.mu.api != nil && (offered == m.mu.offered || offered == "") {
		return m.mu.api, nil
	}
	for _, a := range candidates {
		api, conn, err := m.connect(ctx, a)
		if err == nil {
			if m.mu.conn != nil {
				_ = m.mu.conn.Close()
			}
			m.mu.api, m.mu.conn, m.mu.address, m.mu.offered = api, conn, a, offered
			return api, nil
		}
		problems = append(problems, fmt.Errorf("resource manager at %s: %w", a, err))
	}
	if len(problems) == 0 {
		return nil, fmt.Errorf("%w: the server names no resource manager (%s)", base.ErrUnavailable, l.resp.GetReason())
	}
	return nil, errors.Join(problems...)
}

func (m *manager) connect(ctx context.Context, address string) (maruv1.ResourceManagerClient, *grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, m.client.cfg.ConnectTimeout)
	defer cancel()
	probe, err := rpc.Dial(ctx, address)
	if err != nil {
		return nil, nil, err
	}
	d, err := maruv1.NewResourceManagerClient(probe).Describe(ctx, &maruv1.DescribeRequest{
		Version: &maruv1.ProtocolVersion{Min: minVersion, Max: maxVersion},
	})
	_ = probe.Close()
	if err != nil {
		return nil, nil, err
	}
	if m.mu.store != nil && !bytes.Equal(m.mu.store, d.GetStoreId()) {
		return nil, nil, fmt.Errorf("%w: it is another one than this process has its memory of (store %x, was %x): start this process again to use it",
			base.ErrForeign, d.GetStoreId(), m.mu.store)
	}
	m.mu.store = d.GetStoreId()
	m.agent.manager(d, string(d.GetBootId()) == string(m.client.node.Boot[:]))
	a, _ := rpc.ParseAddress(address)
	if a.Network == "tcp" && d.GetUnixPath() != "" && string(d.GetBootId()) == string(m.client.node.Boot[:]) {
		unix := "unix:" + d.GetUnixPath()
		if probe, err := rpc.Dial(ctx, unix); err == nil {
			_ = probe.Close()
			address = unix
		}
	}
	conn, err := rpc.NewClient(address, rpc.Retry{ConnectTimeout: m.client.cfg.ConnectTimeout})
	if err != nil {
		return nil, nil, err
	}
	return maruv1.NewResourceManagerClient(conn), conn, nil
}

func (m *manager) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.conn != nil {
		_ = m.mu.conn.Close()
		m.mu.conn, m.mu.api = nil, nil
	}
}

func (m *manager) next() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.sequence++
	return m.mu.sequence
}

// hold takes holds on regions, all or none. Without an answer the same call is made once
// more, since repeating a recorded sequence succeeds. Without an answer to that either,
// the holds may be on record: they are queued to be given back, with a later sequence. The
// caller has mapMu, so that this is not done before it has mapped what it held again.
func (m *manager) hold(ctx context.Context, l *link, handles []*maruv1.RegionHandle) ([]*maruv1.RegionAccess, error) {
	api, err := m.use(ctx, l)
	if err != nil {
		return nil, err
	}
	c := m.client
	vouched := m.vouch(ctx, l)
	req := &maruv1.HoldRequest{
		SessionSecret: m.secret, Vouched: vouched,
		SessionId: c.sessionID(), ServerId: l.resp.GetServerId(), OwnerIncarnation: l.owner.Load(),
		Views: c.cfg.Views == On, Sequence: m.next(), Handles: handles, NodeId: c.node.Node[:], BootId: c.node.Boot[:],
	}
	var resp *maruv1.HoldResponse
	lost := false
	for range 2 {
		cctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
		resp, err = api.Hold(cctx, req)
		cancel()
		if !rpc.OutcomeUnknown(err) {
			break
		}
		if lost = true; ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		if lost {
			c.queueUnholds(handles)
		}
		if vouched && errors.Is(err, base.ErrStale) {
			m.agent.again() // an operator may have dropped the session there
		}
		return nil, fmt.Errorf("holding %d regions: %w", len(handles), err)
	}
	if len(resp.GetRegions()) != len(handles) {
		c.queueUnholds(handles)
		return nil, fmt.Errorf("%w: %d regions were held, %d were asked for", base.ErrInvalid, len(resp.GetRegions()), len(handles))
	}
	m.mu.Lock()
	if len(resp.GetHoldToken()) > 0 {
		m.mu.token = resp.GetHoldToken()
	}
	watch := !m.mu.watching
	m.mu.watching = true
	m.mu.Unlock()
	if !resp.GetProvable() {
		m.notProvable(l, resp.GetReason())
	}
	if watch {
		c.wg.Go(m.watch)
	}
	return resp.GetRegions(), nil
}

// listCount is the most regions that one call names. A resource manager may allow fewer
// (its setting max_list_count): a list that it refuses is halved.
const listCount = 1024

// unhold gives holds back after the mappings are gone. With an error, rest is what it may
// still have.
func (m *manager) unhold(ctx context.Context, handles []*maruv1.RegionHandle) (rest []*maruv1.RegionHandle, err error) {
	m.mu.Lock()
	api, token := m.mu.api, m.mu.token
	m.mu.Unlock()
	if api == nil {
		return nil, nil
	}
	most := listCount
	for len(handles) > 0 {
		n := min(len(handles), most)
		cctx, cancel := context.WithTimeout(ctx, m.client.cfg.RPCTimeout)
		_, err := api.Unhold(cctx, &maruv1.UnholdRequest{
			SessionId: m.client.sessionID(), Sequence: m.next(), Handles: handles[:n], HoldToken: token, SessionSecret: m.secret,
		})
		cancel()
		switch {
		case errors.Is(err, base.ErrLimit) && n > 1:
			most = n / 2
		case err != nil:
			return handles, err
		default:
			handles = handles[n:]
		}
	}
	return nil, nil
}

// hasToken reports whether the RM has given the session's hold token: it is needed where
// the RM cannot see this process.
func (m *manager) hasToken() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.mu.token) > 0
}

// queueUnholds queues holds to be given back by the background worker. The RM refuses a
// list that names a region twice.
func (c *Client) queueUnholds(handles []*maruv1.RegionHandle) {
	c.mu.Lock()
	for _, h := range handles {
		c.mu.unholds = slices.DeleteFunc(c.mu.unholds, func(q *maruv1.RegionHandle) bool { return q.GetRegionId() == h.GetRegionId() })
		c.mu.unholds = append(c.mu.unholds, h)
	}
	c.mu.Unlock()
	c.kick()
}

// takeUnholds takes the holds that are to be given back, but those of regions that are
// mapped: again since, or still, because they could not be unmapped. Called under mapMu, or
// by Close.
func (c *Client) takeUnholds() []*maruv1.RegionHandle {
	c.mu.Lock()
	list := c.mu.unholds
	c.mu.unholds = nil
	c.mu.Unlock()
	return slices.DeleteFunc(list, func(h *maruv1.RegionHandle) bool {
		id := base.RegionID(h.GetRegionId())
		return c.region(id) != nil || c.stillMapped(id)
	})
}

// stillMapped reports whether unmapping a region has failed: its hold is given back when it
// succeeds.
func (c *Client) stillMapped(id base.RegionID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.mu.unmaps, func(m *mapped) bool { return base.RegionID(m.handle.GetRegionId()) == id })
}

// unholdOne gives the hold of a region back that could not be mapped. Called under mapMu.
func (c *Client) unholdOne(ctx context.Context, h *maruv1.RegionHandle) {
	if c.stillMapped(base.RegionID(h.GetRegionId())) {
		return
	}
	list := []*maruv1.RegionHandle{h}
	if _, err := c.manager.unhold(ctx, list); err != nil {
		c.queueUnholds(list)
	}
}

// watch takes the regions that drain at the RM, for as long as the client lives.
func (m *manager) watch() {
	c := m.client
	backoff := firstBackoff
	for c.ctx.Err() == nil {
		m.mu.Lock()
		api := m.mu.api
		m.mu.Unlock()
		if api == nil {
			return // closed
		}
		stream, err := api.WatchSession(c.ctx, &maruv1.WatchSessionRequest{SessionId: c.sessionID(), SessionSecret: m.secret})
		for err == nil {
			var e *maruv1.SessionRegionEvent
			if e, err = stream.Recv(); err == nil && e.GetDraining() {
				c.mu.Lock()
				c.mu.core.Drain(base.RegionID(e.GetRegionId()))
				c.mu.Unlock()
				c.kick()
				backoff = firstBackoff
			}
		}
		select {
		case <-c.ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, time.Second)
	}
}

// prove shows the RM that this process reaches a pool's memory: it reads the nonce that
// the RM wrote there (equal UUIDs or host names prove nothing).
func (m *manager) prove(ctx context.Context, l *link, id base.PoolID) error {
	api, err := m.use(ctx, l)
	if err != nil {
		return err
	}
	c := m.client
	ctx, cancel := context.WithTimeout(ctx, c.cfg.RPCTimeout)
	defer cancel()
	start, err := api.StartDomainProof(ctx, &maruv1.StartDomainProofRequest{SessionId: c.sessionID(), PoolId: id[:], SessionSecret: m.secret})
	if err != nil {
		return err
	}
	at := poolfmt.NonceOffset(start.GetSlot())
	if start.GetSlot() >= poolfmt.NonceSlotCount || start.GetMapBytes() < at+poolfmt.NonceSlotBytes {
		return fmt.Errorf("%w: nonce slot %d in %d mapped bytes", base.ErrInvalid, start.GetSlot(), start.GetMapBytes())
	}
	x, err := dax.Open(start.GetPath(), dax.Kind(start.GetDeviceKind()), dax.OpenOptions{ReadOnly: true}) //nolint:gosec // an enum
	if err != nil {
		return err
	}
	mem, err := x.Map(0, start.GetMapBytes(), mapping.ReadOnly)
	_ = x.Close()
	if err != nil {
		return err
	}
	defer func() { _ = mem.Unmap() }()
	slot := make([]byte, poolfmt.NonceSlotBytes)
	if start.GetCoherence() == maruv1.Coherence_COHERENCE_SOFTWARE {
		err = mem.Guard(func() { invalidate(mem.Bytes()[at : at+poolfmt.NonceSlotBytes]) })
	}
	if err == nil {
		err = mem.Guard(func() { copy(slot, mem.Bytes()[at:]) })
	}
	if err != nil {
		return err
	}
	// A copy of the pool, or another one at that path, shows no nonce of this pool.
	nonce, err := poolfmt.DecodeNonce(slot, id)
	if err != nil {
		return err
	}
	_, err = api.FinishDomainProof(ctx, &maruv1.FinishDomainProofRequest{
		SessionId: c.sessionID(), PoolId: id[:], Slot: start.GetSlot(), Nonce: nonce.Value[:], SessionSecret: m.secret,
	})
	return err
}
