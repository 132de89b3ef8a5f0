package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rpc"
)

// RM protocol versions that this server speaks.
const (
	minRMVersion = 1
	maxRMVersion = 1
)

// Waits between two tries to reach the resource manager.
const (
	minRMBackoff = 50 * time.Millisecond
	maxRMBackoff = 2 * time.Second
)

// rmLink keeps the connection to the resource manager: it finds it, becomes an
// owner there, watches what happens to the owner's regions and mappers, and comes
// back after a loss. One goroutine (run) does all of it.
type rmLink struct {
	server  *Server
	log     *slog.Logger
	address string
	first   chan struct{} // closed when the first attempt has succeeded or failed
	once    sync.Once

	mu struct {
		sync.Mutex
		conn      *grpc.ClientConn
		client    maruv1.ResourceManagerClient // nil while the RM is away
		owner     ownership                    // zero until the RM gave an incarnation; then for life
		store     base.StoreID
		unixPath  string
		pools     map[base.PoolID]*maruv1.PoolInfo
		processes map[base.SessionID]peer.Process // of the holders before this start
		reason    string                          // why it is away
	}
}

// ownership is what the calls of an owner carry.
type ownership struct {
	incarnation base.Incarnation
	token       []byte // proves it; empty when the RM was of a version without proofs
}

func newRMLink(s *Server) *rmLink {
	l := &rmLink{server: s, address: s.cfg.RMAddress, log: s.log.With("rm", s.cfg.RMAddress), first: make(chan struct{})}
	l.mu.reason = "the resource manager at " + l.address + " has not answered yet"
	l.mu.pools = make(map[base.PoolID]*maruv1.PoolInfo)
	return l
}

// use returns the client and what we are there. Errors: ErrUnavailable.
func (l *rmLink) use() (maruv1.ResourceManagerClient, ownership, error) {
	if l == nil {
		return nil, ownership{}, fmt.Errorf("%w: this server runs with --cpu-only; it has no cxl pools", base.ErrUnsupported)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.client == nil {
		return nil, l.mu.owner, fmt.Errorf("%w: %s", base.ErrUnavailable, l.mu.reason)
	}
	return l.mu.client, l.mu.owner, nil
}

// status says whether the RM is there, and why not.
func (l *rmLink) status() (incarnation base.Incarnation, reason string) {
	if l == nil {
		return 0, ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.owner.incarnation, l.mu.reason
}

func (l *rmLink) addresses() (tcp []string, unixPath string) {
	if l == nil {
		return nil, ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return []string{l.address}, l.mu.unixPath
}

func (l *rmLink) poolInfo(id base.PoolID) *maruv1.PoolInfo {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.pools[id]
}

// largestPool is RPC-21's bound; 0 while no pool is known.
func (l *rmLink) largestPool(m base.Medium) uint64 {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var largest uint64
	for _, p := range l.mu.pools {
		if base.Medium(p.GetMedium()) == m { //nolint:gosec // an enum
			largest = max(largest, p.GetCapacityBytes())
		}
	}
	return largest
}

func (l *rmLink) poolIDs() [][]byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([][]byte, 0, len(l.mu.pools))
	for id := range l.mu.pools {
		out = append(out, id[:])
	}
	return out
}

func (l *rmLink) tried() { l.once.Do(func() { close(l.first) }) }

// waitFirst waits until the first attempt has succeeded or failed.
func (l *rmLink) waitFirst(ctx context.Context, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-l.first:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// run ends when ctx does, or when this server is fenced.
func (l *rmLink) run(ctx context.Context) {
	wait := minRMBackoff
	logged := ""
	for ctx.Err() == nil {
		began := time.Now()
		err := l.attempt(ctx)
		l.lost(err)
		l.tried()
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, base.ErrFenced) {
			l.server.fence(err.Error())
			return
		}
		if time.Since(began) > 10*maxRMBackoff {
			wait, logged = minRMBackoff, ""
		}
		if text := err.Error(); text != logged {
			cure := "start maru-resource-manager there, or name another one with --rm-address"
			if errors.Is(err, base.ErrUnproven) {
				cure = unprovenCure(l.server.state)
			}
			l.log.Warn("no resource manager; cpu pools are served, cxl pools are not", "error", err, "cure", cure)
			logged = text
		}
		if !l.server.sleep(wait) {
			return
		}
		wait = min(2*wait, maxRMBackoff)
	}
}

// lost forgets the connection and tells the directory that allocations must wait.
func (l *rmLink) lost(err error) {
	l.mu.Lock()
	conn := l.mu.conn
	l.mu.conn, l.mu.client = nil, nil
	switch {
	case errors.Is(err, base.ErrUnproven):
		l.mu.reason = "the resource manager at " + l.address + " does not take this server for the owner: " + err.Error()
	case err != nil:
		l.mu.reason = "the resource manager at " + l.address + " is away: " + err.Error()
	}
	l.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
}

// attempt lives as long as one connection does.
func (l *rmLink) attempt(ctx context.Context) error {
	conn, described, err := l.connect(ctx)
	if err != nil {
		return err
	}
	client := maruv1.NewResourceManagerClient(conn)
	store, err := base.IDFromBytes("store_id", described.GetStoreId())
	if err != nil {
		_ = conn.Close()
		return err
	}
	l.mu.Lock()
	owner, known := l.mu.owner, l.mu.store
	l.mu.conn = conn
	l.mu.unixPath = ""
	if described.GetUnixPath() != "" && l.local(described) {
		l.mu.unixPath = described.GetUnixPath()
	}
	l.mu.Unlock()
	if owner.incarnation != 0 && known != store {
		return fmt.Errorf("%w: the resource manager at %s has store %s, this server's regions are in store %s; "+
			"bring the old one back, or restart this server to begin anew", base.ErrForeign, l.address, base.StoreID(store), known)
	}
	if err := l.setPools(described.GetPools()); err != nil {
		return err
	}
	if owner.incarnation == 0 {
		if owner, err = l.startOwner(ctx, client, store); err != nil {
			return err
		}
	}
	return l.serve(ctx, client, owner)
}

func (l *rmLink) local(d *maruv1.DescribeResponse) bool {
	return string(d.GetBootId()) == string(l.server.node.Boot[:])
}

// connect dials the RM's address and moves to its Unix socket when it runs on this
// boot: only there can either side prove the other's process.
func (l *rmLink) connect(ctx context.Context) (*grpc.ClientConn, *maruv1.DescribeResponse, error) {
	conn, described, err := l.dial(ctx, l.address)
	if err != nil {
		return nil, nil, err
	}
	path := described.GetUnixPath()
	if path == "" || !l.local(described) {
		return conn, described, nil
	}
	local, again, err := l.dial(ctx, "unix:"+path)
	if err != nil || string(again.GetStoreId()) != string(described.GetStoreId()) {
		if err == nil {
			_ = local.Close()
			err = fmt.Errorf("%w: another resource manager answers there", base.ErrForeign)
		}
		l.log.Warn("the resource manager's Unix socket cannot be used; TCP is", "path", path, "error", err)
		return conn, described, nil
	}
	_ = conn.Close()
	return local, again, nil
}

func (l *rmLink) dial(ctx context.Context, address string) (*grpc.ClientConn, *maruv1.DescribeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
	defer cancel()
	conn, err := rpc.Dial(ctx, address, l.server.cfg.rmOptions...)
	if err != nil {
		return nil, nil, err
	}
	d, err := maruv1.NewResourceManagerClient(conn).Describe(ctx, &maruv1.DescribeRequest{
		Version: &maruv1.ProtocolVersion{Min: minRMVersion, Max: maxRMVersion},
	})
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, d, nil
}

// startOwner asks for this start's incarnation, once: a lost answer costs one number.
func (l *rmLink) startOwner(ctx context.Context, client maruv1.ResourceManagerClient, store base.StoreID) (ownership, error) {
	callCtx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
	defer cancel()
	s := l.server
	answer, err := client.StartOwner(callCtx, &maruv1.StartOwnerRequest{
		OwnerId: s.state.server[:], Name: s.state.name, NodeId: s.node.Node[:], BootId: s.node.Boot[:],
		DirectoryId: s.state.directory[:], DirectoryLocked: true, OwnerSecret: s.state.secret.Bytes(),
	})
	if err != nil {
		return ownership{}, fmt.Errorf("becoming an owner at the resource manager: %w", err)
	}
	owner := ownership{base.Incarnation(answer.GetIncarnation()), answer.GetOwnerToken()}
	if owner.incarnation == 0 || owner.incarnation > base.MaxIncarnation {
		return ownership{}, fmt.Errorf("%w: the resource manager gave incarnation %d", base.ErrInvalid, owner.incarnation)
	}
	if err := s.ownerStarted(ctx, client, owner, answer.GetPredecessorsEnded()); err != nil {
		return ownership{}, err
	}
	l.mu.Lock()
	l.mu.owner, l.mu.store = owner, store
	l.mu.Unlock()
	l.log.Info("owner at the resource manager", "server_id", s.state.server.String(), "incarnation", owner.incarnation,
		"predecessors_ended", answer.GetPredecessorsEnded(), "reason", answer.GetReason())
	return owner, nil
}

// serve makes the RM usable and follows its events until the connection is lost.
func (l *rmLink) serve(ctx context.Context, client maruv1.ResourceManagerClient, owner ownership) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := l.server
	before := s.silent()
	stream, err := client.WatchOwner(ctx, &maruv1.WatchOwnerRequest{
		OwnerId: s.state.server[:], Incarnation: uint32(owner.incarnation), OwnerToken: owner.token,
	})
	if err != nil {
		return err
	}
	first := true
	for {
		event, err := stream.Recv()
		if first && errors.Is(err, base.ErrNotFound) {
			return fmt.Errorf("%w: the resource manager does not know server %s (%s) any more: an operator dropped it",
				base.ErrFenced, s.state.server, s.state.name)
		}
		if err != nil {
			return fmt.Errorf("watching this owner at the resource manager: %w", err)
		}
		if first {
			if event.GetSnapshot() == nil {
				return fmt.Errorf("%w: the first event of the resource manager is no snapshot", base.ErrMismatch)
			}
			// The snapshot says that the RM knows this incarnation: from here on it is used.
			first = false
			l.mu.Lock()
			l.mu.client, l.mu.reason = client, ""
			l.mu.Unlock()
			s.rmAvailable()
			l.tried()
		}
		if err := l.event(event, before); err != nil {
			return err
		}
	}
}

// event takes one event of the stream; before are the sessions that were silent when it was
// asked for.
func (l *rmLink) event(e *maruv1.OwnerEvent, before []directory.Caller) error {
	s := l.server
	switch e := e.GetEvent().(type) {
	case *maruv1.OwnerEvent_SessionGone:
		id, err := base.IDFromBytes("session_id", e.SessionGone.GetSessionId())
		if err != nil {
			return err
		}
		s.sessionGone(id, goneProof(e.SessionGone.GetProof()), "the resource manager: "+e.SessionGone.GetProof())
	case *maruv1.OwnerEvent_RegionFreed:
		pool, err := base.IDFromBytes("pool_id", e.RegionFreed.GetPoolId())
		if err != nil {
			return err
		}
		s.regionFreed(pool, base.RegionID(e.RegionFreed.GetRegionId()))
	case *maruv1.OwnerEvent_Fenced:
		if e.Fenced.GetIncarnation() == 0 {
			return fmt.Errorf("%w: an operator dropped server %s (%s) at the resource manager", base.ErrFenced, s.state.server, s.state.name)
		}
		return fmt.Errorf("%w: incarnation %d of server %s (%s) was started", base.ErrFenced,
			e.Fenced.GetIncarnation(), s.state.server, s.state.name)
	case *maruv1.OwnerEvent_Snapshot:
		holders := make(map[base.SessionID]struct{}, len(e.Snapshot.GetSessions()))
		for _, b := range e.Snapshot.GetSessions() {
			id, err := base.IDFromBytes("sessions", b)
			if err != nil {
				return err
			}
			holders[id] = struct{}{}
		}
		s.watched(before, holders)
	}
	return nil
}

func goneProof(text string) directory.GoneProof {
	for p := directory.GoneSaidSo; p <= directory.GoneOperator; p++ {
		if p.String() == text {
			return p
		}
	}
	return directory.GoneOperator
}

// setPools checks and takes over what the RM says of its pools.
func (l *rmLink) setPools(infos []*maruv1.PoolInfo) error {
	pools := make([]directory.Pool, 0, len(infos))
	byID := make(map[base.PoolID]*maruv1.PoolInfo, len(infos))
	for _, info := range infos {
		id, err := base.IDFromBytes("pool_id", info.GetPoolId())
		if err != nil {
			return err
		}
		medium, coherence := base.Medium(info.GetMedium()), base.Coherence(info.GetCoherence()) //nolint:gosec // enums
		if medium != base.MediumCXL || (coherence != base.CoherenceHardware && coherence != base.CoherenceSoftware) {
			l.log.Warn("a pool of the resource manager cannot be used", "pool", info.GetName(), "id", base.PoolID(id).String(),
				"medium", medium.String(), "coherence", coherence.String())
			continue
		}
		byID[id] = info
		pools = append(pools, directory.Pool{
			ID: id, Medium: medium, Tier: base.Tier(info.GetTier()), Scope: base.Scope(info.GetScope()), //nolint:gosec // enums
			Coherence: coherence, CapacityBytes: info.GetCapacityBytes(),
			LargestFreeBytes: info.GetLargestFreeBytes(), Online: info.GetState() == maruv1.PoolState_POOL_STATE_ONLINE,
		})
	}
	l.mu.Lock()
	l.mu.pools = byID
	l.mu.Unlock()
	if err := l.server.setPools(pools); err != nil {
		return fmt.Errorf("pools of the resource manager: %w", err)
	}
	return nil
}

// refresh asks for the pools again: their free space changes.
func (l *rmLink) refresh(ctx context.Context) error {
	client, _, err := l.use()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.ListPools(ctx, &maruv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	return l.setPools(answer.GetPools())
}

// listRegions reads everything that the RM has for this owner, page by page.
func (l *rmLink) listRegions(ctx context.Context, client maruv1.ResourceManagerClient, owner ownership,
) ([]*maruv1.RegionInfo, error) {
	const perPage = 1000
	l.mu.Lock()
	pools := make([]base.PoolID, 0, len(l.mu.pools))
	for id := range l.mu.pools {
		pools = append(pools, id)
	}
	l.mu.Unlock()
	var all []*maruv1.RegionInfo
	for _, pool := range pools {
		after := uint32(0)
		for {
			callCtx, cancel := context.WithTimeout(ctx, l.server.cfg.RMCallTimeout)
			answer, err := client.ListRegions(callCtx, &maruv1.ListRegionsRequest{
				OwnerId: l.server.state.server[:], Incarnation: uint32(owner.incarnation), OwnerToken: owner.token, PoolId: pool[:],
				AfterRegionId: after, Limit: perPage,
			})
			cancel()
			if err != nil {
				return nil, fmt.Errorf("listing this owner's regions: %w", err)
			}
			regions := answer.GetRegions()
			all = append(all, regions...)
			if !answer.GetMore() || len(regions) == 0 {
				break
			}
			after = regions[len(regions)-1].GetRegionId()
		}
	}
	return all, nil
}
