package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	grpcpeer "google.golang.org/grpc/peer"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/peer"
)

// Protocol versions of the control plane that this server speaks.
const (
	minVersion = 1
	maxVersion = 1
)

// Capabilities that a client can ask for (RPC-05).
const (
	capabilityCPU   = "cpu_storage_v1"
	capabilityCXL   = "cxl_storage_v1"
	capabilityMixed = "mixed_storage_v1"
)

// control is the gRPC service. Its methods translate: what is decided is decided
// by the directory.
type control struct {
	maruv1.UnimplementedMetadataServerServer
	server *Server
}

// version picks the highest version that both sides speak.
func version(v *maruv1.ProtocolVersion) (uint32, error) {
	low, high := v.GetMin(), v.GetMax()
	if v == nil || low == 0 || high < low {
		return 0, fmt.Errorf("%w: version says %d to %d; a client names the versions it speaks", base.ErrInvalid, low, high)
	}
	if high < minVersion || low > maxVersion {
		return 0, fmt.Errorf("%w: the client speaks protocol versions %d to %d, this server %d to %d; update the older one",
			base.ErrUnsupported, low, high, minVersion, maxVersion)
	}
	return min(high, maxVersion), nil
}

func (s *Server) capabilities() []string {
	if s.cfg.CPUOnly {
		return []string{capabilityCPU}
	}
	return []string{capabilityCPU, capabilityCXL, capabilityMixed}
}

// grantCapabilities refuses by name what is not there.
func (s *Server) grantCapabilities(wanted []string) ([]string, error) {
	have := s.capabilities()
	var granted []string
	for _, w := range wanted {
		switch {
		case slices.Contains(have, w):
			if !slices.Contains(granted, w) {
				granted = append(granted, w)
			}
		case w == capabilityCXL || w == capabilityMixed:
			return nil, fmt.Errorf("%w: capability %q: this server runs with --cpu-only and has no resource manager", base.ErrUnsupported, w)
		default:
			return nil, fmt.Errorf("%w: capability %.64q is unknown here; this server has %v", base.ErrUnsupported, w, have)
		}
	}
	return granted, nil
}

// DescribeServer needs no session.
func (c *control) DescribeServer(_ context.Context, m *maruv1.DescribeServerRequest) (*maruv1.DescribeServerResponse, error) {
	s := c.server
	v, err := version(m.GetVersion())
	if err != nil {
		return nil, err
	}
	reason, degraded := s.degraded()
	return &maruv1.DescribeServerResponse{
		Version: v, Capabilities: s.capabilities(), ServerId: s.state.server[:], ServerEpoch: uint64(s.epoch),
		ProgramVersion: s.cfg.Version, Degraded: degraded, Reason: reason,
	}, nil
}

// Open registers a session.
func (c *control) Open(ctx context.Context, m *maruv1.OpenRequest) (*maruv1.OpenResponse, error) {
	answer, err := c.open(ctx, m)
	if err != nil {
		c.server.metrics.openRefused.WithLabelValues(base.CodeOf(err).String()).Inc()
		return nil, fmt.Errorf("open: %w", err)
	}
	return answer, nil
}

func (c *control) open(ctx context.Context, m *maruv1.OpenRequest) (*maruv1.OpenResponse, error) {
	s := c.server
	v, err := version(m.GetVersion())
	if err != nil {
		return nil, err
	}
	granted, err := s.grantCapabilities(m.GetCapabilities())
	if err != nil {
		return nil, err
	}
	req, err := openRequest(m)
	if err != nil {
		return nil, err
	}
	proc := peer.FromContext(ctx)
	if err := s.judgeOpener(req, proc); err != nil {
		return nil, err
	}
	// Only the session's process has the secret that the resource manager knows it by.
	shown := func() bool {
		return req.Proof != directory.ProofProcess && req.PreviousServerEpoch != 0 && !s.bound.has(req.Session) &&
			s.rm.knowsSession(ctx, req.Session, m.GetSessionSecret())
	}
	if req.PreviousServerEpoch != s.epoch && shown() {
		req.Proof = directory.ProofProcess
	}
	sess, result, workers, err := s.openSession(req)
	if errors.Is(err, base.ErrDenied) && shown() {
		// It shows a secret that was never in force: an Open that it had given up came after
		// the one whose answer it has.
		req.Proof = directory.ProofProcess
		sess, result, workers, err = s.openSession(req)
	}
	if err != nil {
		return nil, err
	}
	s.afterOpen(sess, req, proc)
	reason, degraded := s.degraded()
	incarnation, _ := s.rm.status()
	rmAddresses, rmUnix := s.rm.addresses()
	limits := s.dir.Limits()
	return &maruv1.OpenResponse{
		Version: v, Capabilities: granted, Epoch: uint32(result.Epoch), Secret: sess.secret[:],
		ServerId: s.state.server[:], OwnerIncarnation: uint32(incarnation), ServerEpoch: uint64(s.epoch),
		NodeId: s.node.Node[:], BootId: s.node.Boot[:],
		NamespaceNumber: uint32(result.Namespace), NamespaceId: req.Namespace[:],
		ControlAddress: reachable(ctx, s.control.tcp.Addr()), HotAddress: reachable(ctx, s.hotTCP.Addr()),
		ControlUnixPath: s.UnixPath(), HotUnixPath: s.HotUnixPath(),
		RmAddresses: rmAddresses, RmUnixPath: rmUnix,
		TtlMs: milliseconds(s.cfg.TTL), HeartbeatMs: milliseconds(s.cfg.Heartbeat), MarginMs: milliseconds(s.cfg.Margin),
		Limits: &maruv1.Limits{
			MaxBatchKeys: hot.MaxKeys, MaxExpandedKeys: hot.MaxExpandedKeys, MaxFrameBytes: hot.MaxPayloadBytes + hot.HeaderBytes,
			MaxLeases: uint32(limits.MaxLeases), MaxRequestLeases: uint32(limits.MaxRequestLeases), //nolint:gosec // validated
			MaxOperations: uint32(limits.MaxOperations), LargestRegionBytes: s.largestRegion(result.Pools), //nolint:gosec // validated
			MaxConnections: uint32(s.cfg.MaxSessionConnectionCount), //nolint:gosec // validated
		},
		Pools: s.poolRefs(result.Pools), Degraded: degraded, Reason: reason, Relist: result.Relist, Workers: workers,
	}, nil
}

// openRequest translates and checks what only the message knows.
func openRequest(m *maruv1.OpenRequest) (*directory.OpenRequest, error) {
	id, err := base.IDFromBytes("session_id", m.GetSessionId())
	if err != nil {
		return nil, err
	}
	nodeID, err := base.IDFromBytes("node_id", m.GetNodeId())
	if err != nil {
		return nil, err
	}
	if _, err := base.IDFromBytes("boot_id", m.GetBootId()); err != nil {
		return nil, err
	}
	var previous directory.Secret
	if len(m.GetPreviousSecret()) != 0 {
		if previous, err = base.IDFromBytes("previous_secret", m.GetPreviousSecret()); err != nil {
			return nil, err
		}
	}
	if err := keys.CheckCanonical(m.GetNamespaceCbor()); err != nil {
		return nil, fmt.Errorf("namespace_cbor: %w", err)
	}
	if opaque := keys.IsOpaque(m.GetNamespaceCbor()); opaque != m.GetOpaque() {
		return nil, fmt.Errorf("%w: opaque is %v and namespace_cbor is the reserved namespace: %v; both belong together",
			base.ErrMismatch, m.GetOpaque(), opaque)
	}
	return &directory.OpenRequest{
		Session: id, PreviousSecret: previous, Role: base.Role(m.GetRole()), //nolint:gosec // checked by the directory
		EngineID: m.GetEngineId(), Rank: m.GetRank(), WorldSize: m.GetWorldSize(),
		Namespace: base.NamespaceOf(m.GetNamespaceCbor()), Opaque: m.GetOpaque(), ValueBytes: m.GetValueBytes(), PieceBytes: m.GetPieceSize(),
		Node: nodeID, CPUBytes: m.GetCpuBytes(), CXLBytes: m.GetCxlBytes(),
		WriteOrder: mediaOf(m.GetWriteOrder()), ReadOrder: mediaOf(m.GetReadOrder()), InstanceID: m.GetInstanceId(),
		PreviousServerEpoch: base.ServerEpoch(m.GetPreviousServerEpoch()), PreviousEpoch: base.Epoch(m.GetPreviousEpoch()), Views: m.GetViews(),
	}, nil
}

func mediaOf(in []maruv1.Medium) []base.Medium {
	out := make([]base.Medium, len(in))
	for i, m := range in {
		out[i] = base.Medium(min(max(m, 0), 255)) //nolint:gosec // bounded; the directory refuses unknown ones
	}
	return out
}

// judgeOpener says what the opener's process proves. A session that is bound to a
// process is opened by that process only.
func (s *Server) judgeOpener(req *directory.OpenRequest, proc *peer.Peer) error {
	bound := s.bound.has(req.Session)
	switch {
	case bound && proc != nil:
		if err := s.bindProcess(req.Session, proc); err != nil {
			return err // another process, or nobody can tell
		}
		req.Proof = directory.ProofProcess
	case proc != nil && s.rm.wasProcess(req.Session, proc):
		req.Proof = directory.ProofProcess
	}
	req.Provable = bound || proc != nil
	return nil
}

// openSession makes the new epoch known to directory and shell in one step.
func (s *Server) openSession(req *directory.OpenRequest) (*session, directory.OpenResult, []*maruv1.EngineWorker, error) {
	_, _ = rand.Read(req.Secret[:])
	var result directory.OpenResult
	var sess, older *session
	var workers []*maruv1.EngineWorker
	err := s.step(func(d *directory.Directory, now time.Duration) error {
		var err error
		if result, err = d.Open(now, req); err != nil {
			return err
		}
		sess = newSession(req.Session, result.Epoch, req.Secret)
		sess.namespaceNumber, sess.namespaceID, sess.role = result.Namespace, req.Namespace, req.Role
		sess.engine, sess.rank, sess.world = req.EngineID, req.Rank, max(req.WorldSize, 1)
		older = s.sessions.put(sess)
		workers = s.workersLocked(sess, now)
		return nil
	})
	if err != nil {
		return nil, result, nil, err
	}
	if older != nil {
		older.end("the session was opened again")
	}
	return sess, result, workers, nil
}

// afterOpen binds the opener's process and says who cannot be proved gone.
func (s *Server) afterOpen(sess *session, req *directory.OpenRequest, proc *peer.Peer) {
	err := s.bindProcess(sess.id, proc)
	if err == nil || req.Role == base.RoleScheduler {
		s.log.Info("session opened", "session", sess.id.String(), "epoch", uint32(sess.epoch), "role", req.Role.String(),
			"engine", req.EngineID, "rank", req.Rank, "instance", req.InstanceID, "namespace", req.Namespace.String())
		return
	}
	s.log.Info("session opened; the end of its process cannot be proved until it comes over the Unix socket",
		"session", sess.id.String(), "epoch", uint32(sess.epoch), "engine", req.EngineID, "rank", req.Rank,
		"instance", req.InstanceID, "namespace", req.Namespace.String(), "reason", err)
}

func milliseconds(d time.Duration) uint32 { return uint32(d / time.Millisecond) } //nolint:gosec // settings are below an hour

// reachable is a listener's address as this caller can use it: the wildcard address
// is replaced by the one that the call came to.
func reachable(ctx context.Context, addr net.Addr) string {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || !tcp.IP.IsUnspecified() {
		return addr.String()
	}
	host := net.IPv4(127, 0, 0, 1)
	if p, ok := grpcpeer.FromContext(ctx); ok {
		if local, ok := p.LocalAddr.(*net.TCPAddr); ok {
			host = local.IP
		}
	}
	return (&net.TCPAddr{IP: host, Port: tcp.Port}).String()
}

// largestRegion is RPC-21's bound as a client may know it.
func (s *Server) largestRegion(pools []directory.PoolGrant) uint64 {
	var largest uint64
	for i := range pools {
		largest = max(largest, pools[i].Pool.CapacityBytes)
	}
	return largest
}

// poolRefs describes pools with what the RM says of them.
func (s *Server) poolRefs(grants []directory.PoolGrant) []*maruv1.PoolRef {
	out := make([]*maruv1.PoolRef, 0, len(grants))
	for i := range grants {
		g := &grants[i]
		out = append(out, &maruv1.PoolRef{Number: g.Number, Info: s.describePool(&g.Pool, g.Private), GrantBytes: g.GrantBytes})
	}
	return out
}

func (s *Server) describePool(p *directory.Pool, private bool) *maruv1.PoolInfo {
	if !private {
		if info := s.rm.poolInfo(p.ID); info != nil {
			return info
		}
	}
	state := maruv1.PoolState_POOL_STATE_OFFLINE
	if p.Online {
		state = maruv1.PoolState_POOL_STATE_ONLINE
	}
	info := &maruv1.PoolInfo{
		PoolId: p.ID[:], Medium: maruv1.Medium(p.Medium), Tier: maruv1.Tier(p.Tier), Scope: maruv1.Scope(p.Scope),
		Coherence: maruv1.Coherence(p.Coherence), CapacityBytes: p.CapacityBytes, LargestFreeBytes: p.LargestFreeBytes, State: state,
	}
	if private {
		info.PoolId, info.Name = nil, "private cpu"
	}
	return info
}

// Heartbeat keeps a session valid and brings what its stream may have lost.
func (c *control) Heartbeat(ctx context.Context, m *maruv1.HeartbeatRequest) (*maruv1.HeartbeatResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	uses := make([]directory.PoolUse, 0, len(m.GetUses()))
	for _, u := range m.GetUses() {
		uses = append(uses, directory.PoolUse{
			Pool: u.GetPoolNumber(), WritingBytes: u.GetWritingBytes(), QuarantinedBytes: u.GetQuarantinedBytes(),
			FreeBytes: u.GetFreeBytes(), PinnedBytes: u.GetPinnedBytes(),
		})
	}
	var workers []*maruv1.EngineWorker
	err := s.step(func(d *directory.Directory, now time.Duration) error {
		_, err := d.Heartbeat(now, sess.caller(), &directory.HeartbeatRequest{
			Sequence: m.GetSequence(), Uses: uses, LastEvent: m.GetLastEvent(), Watermark: base.Sequence(m.GetWatermark()),
		})
		workers = s.workersLocked(sess, now)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("heartbeat: %w", err)
	}
	events, err := s.pendingEvents(sess, m.GetLastEvent())
	if err != nil {
		return nil, fmt.Errorf("heartbeat: %w", err)
	}
	incarnation, _ := s.rm.status()
	return &maruv1.HeartbeatResponse{
		Epoch: uint32(sess.epoch), ServerEpoch: uint64(s.epoch), Events: &maruv1.EventBatch{Events: events},
		TtlMs: milliseconds(s.cfg.TTL), OwnerIncarnation: uint32(incarnation), Workers: workers,
		NewestRegionId: s.newest.id.Load(),
	}, nil
}
