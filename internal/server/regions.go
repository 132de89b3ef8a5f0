package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

// Bounds of region calls.
const (
	maxDescribeCount = 1024
	maxMintCount     = 1000 // handles a call to the resource manager
)

// readTokens caches read capabilities: they follow from the write capability and
// change with the region's incarnation only.
type readTokens struct {
	mu struct {
		sync.RWMutex
		byRegion map[regionAt]readToken
	}
}

type readToken struct {
	incarnation base.Incarnation
	token       []byte
}

func (t *readTokens) init() { t.mu.byRegion = make(map[regionAt]readToken) }

func (t *readTokens) get(at regionAt, incarnation base.Incarnation) []byte {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if r := t.mu.byRegion[at]; r.incarnation == incarnation {
		return r.token
	}
	return nil
}

// keep takes a read capability of the RM; what is none is not kept, and asked for when it
// is needed.
func (t *readTokens) keep(h *maruv1.RegionHandle) {
	pool, err := base.IDFromBytes("pool_id", h.GetPoolId())
	if err != nil || !h.GetReadOnly() || len(h.GetToken()) == 0 {
		return
	}
	t.mu.Lock()
	t.mu.byRegion[regionAt{pool, base.RegionID(h.GetRegionId())}] = readToken{base.Incarnation(h.GetIncarnation()), h.GetToken()}
	t.mu.Unlock()
}

func (t *readTokens) forget(at regionAt) {
	t.mu.Lock()
	delete(t.mu.byRegion, at)
	t.mu.Unlock()
}

// Return takes a granted region back.
func (c *control) Return(ctx context.Context, m *maruv1.ReturnRequest) (*maruv1.ReturnResponse, error) {
	sess := sessionOf(ctx)
	err := c.server.step(func(d *directory.Directory, now time.Duration) error {
		return d.Return(now, sess.caller(), base.Sequence(m.GetOperation()), m.GetPoolNumber(), base.RegionID(m.GetRegionId()))
	})
	if err != nil {
		return nil, err
	}
	return &maruv1.ReturnResponse{}, nil
}

// DescribeRegions gives extents and read capabilities.
func (c *control) DescribeRegions(ctx context.Context, m *maruv1.DescribeRegionsRequest) (*maruv1.DescribeRegionsResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	if len(m.GetRegionIds()) > maxDescribeCount {
		return nil, fmt.Errorf("%w: describe regions: %d ids, at most %d a call", base.ErrLimit, len(m.GetRegionIds()), maxDescribeCount)
	}
	ids := make([]base.RegionID, len(m.GetRegionIds()))
	for i, id := range m.GetRegionIds() {
		ids[i] = base.RegionID(id)
	}
	var infos []directory.RegionInfo
	err := s.look(func(d *directory.Directory, now time.Duration) error {
		var err error
		infos, err = d.DescribeRegions(now, sess.caller(), ids, m.GetAllOfNamespace(), nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("describe regions: %w", err)
	}
	if m.GetAllOfNamespace() {
		infos = newestRegions(infos, base.RegionID(m.GetAfterRegionId()), int(m.GetMaxCount()))
	}
	mintErr := s.mintReadTokens(ctx, infos)
	answer := &maruv1.DescribeRegionsResponse{Regions: make([]*maruv1.SharedRegion, 0, len(infos))}
	for i := range infos {
		answer.Regions = append(answer.Regions, s.sharedRegion(&infos[i], mintErr))
	}
	return answer, nil
}

// newestRegions leaves the regions of ids above after, at most so many of the highest ids;
// 0 means all.
func newestRegions(infos []directory.RegionInfo, after base.RegionID, most int) []directory.RegionInfo {
	infos = slices.DeleteFunc(infos, func(i directory.RegionInfo) bool { return i.Region <= after })
	if most == 0 || len(infos) <= most {
		return infos
	}
	slices.SortFunc(infos, func(x, y directory.RegionInfo) int { return cmp.Compare(y.Region, x.Region) })
	return infos[:most]
}

// newestRegion is the highest id of a shared region that the RM gave this server. Regions of
// older incarnations have lower ones.
type newestRegion struct{ id atomic.Uint32 }

func (n *newestRegion) raise(id base.RegionID) {
	for {
		have := n.id.Load()
		if uint32(id) <= have || n.id.CompareAndSwap(have, uint32(id)) {
			return
		}
	}
}

func (s *Server) sharedRegion(info *directory.RegionInfo, mintErr error) *maruv1.SharedRegion {
	err := info.Err
	var token []byte
	if err == nil {
		if token = s.tokens.get(regionAt{info.PoolID, info.Region}, info.Incarnation); token == nil {
			err = mintErr
			if err == nil {
				err = fmt.Errorf("%w: the resource manager gave no read capability for region %d", base.ErrUnavailable, info.Region)
			}
		}
	}
	if err != nil {
		return &maruv1.SharedRegion{
			PoolNumber: info.Pool, Handle: &maruv1.RegionHandle{RegionId: uint32(info.Region)}, Problem: problemOf(err),
		}
	}
	h := handleOf(info.PoolID, info.Region, info.Incarnation, token)
	h.ReadOnly = true
	return &maruv1.SharedRegion{PoolNumber: info.Pool, Handle: h, Place: placeOf(&info.Place), WriterSession: info.Writer[:]}
}

func problemOf(err error) *maruv1.Problem {
	return &maruv1.Problem{Code: uint32(base.CodeOf(err)), Text: err.Error()}
}

// mintReadTokens has the RM make the read capabilities that are not cached.
func (s *Server) mintReadTokens(ctx context.Context, infos []directory.RegionInfo) error {
	var missing []*maruv1.RegionHandle
	for i := range infos {
		info := &infos[i]
		if info.Err == nil && s.tokens.get(regionAt{info.PoolID, info.Region}, info.Incarnation) == nil {
			missing = append(missing, handleOf(info.PoolID, info.Region, info.Incarnation, info.Write))
		}
	}
	for len(missing) > 0 {
		n := min(len(missing), maxMintCount)
		if err := s.mint(ctx, missing[:n]); err != nil {
			return err
		}
		missing = missing[n:]
	}
	return nil
}

func (s *Server) mint(ctx context.Context, handles []*maruv1.RegionHandle) error {
	client, _, err := s.rm.use()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.MintRead(ctx, &maruv1.MintReadRequest{Handles: handles})
	if err != nil {
		return fmt.Errorf("read capabilities: %w", s.checkFenced(err))
	}
	for _, h := range answer.GetHandles() {
		s.tokens.keep(h)
	}
	return nil
}

// ProveDomains asks the RM which pools the session has proved, and believes only it.
func (c *control) ProveDomains(ctx context.Context, _ *maruv1.ProveDomainsRequest) (*maruv1.ProveDomainsResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	client, _, err := s.rm.use()
	if err != nil {
		return nil, fmt.Errorf("prove domains: %w", err)
	}
	callCtx, cancel := context.WithTimeout(ctx, s.cfg.RMCallTimeout)
	defer cancel()
	answer, err := client.CheckDomainProof(callCtx, &maruv1.CheckDomainProofRequest{SessionId: sess.id[:], PoolIds: s.rm.poolIDs()})
	if err != nil {
		return nil, fmt.Errorf("prove domains: %w", s.checkFenced(err))
	}
	proved := make([]base.PoolID, 0, len(answer.GetProvedPoolIds()))
	for _, b := range answer.GetProvedPoolIds() {
		id, err := base.IDFromBytes("proved_pool_ids", b)
		if err != nil {
			return nil, err
		}
		proved = append(proved, id)
	}
	err = s.step(func(d *directory.Directory, now time.Duration) error {
		return d.ProveDomains(now, sess.caller(), proved)
	})
	if err != nil {
		return nil, fmt.Errorf("prove domains: %w", err)
	}
	return &maruv1.ProveDomainsResponse{ProvedPoolIds: answer.GetProvedPoolIds()}, nil
}

// ReportUnreachable stops counting hits where this session cannot read (FE-08, FE-12).
func (c *control) ReportUnreachable(ctx context.Context, m *maruv1.ReportUnreachableRequest) (*maruv1.ReportUnreachableResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	err := s.step(func(d *directory.Directory, now time.Duration) error {
		return d.ReportUnreachable(now, sess.caller(), m.GetPoolNumber(), base.RegionID(m.GetRegionId()))
	})
	if err != nil {
		return nil, fmt.Errorf("report unreachable: %w", err)
	}
	s.metrics.sessionEvents.WithLabelValues("unreachable").Inc()
	s.log.Warn("a session cannot reach memory of a pool; it gets no hits there until it proves it again",
		"session", sess.id.String(), "pool", m.GetPoolNumber(), "region", m.GetRegionId(), "reason", fmt.Sprintf("%.200q", m.GetReason()))
	return &maruv1.ReportUnreachableResponse{}, nil
}

// Close ends a session by its own word.
func (c *control) Close(ctx context.Context, m *maruv1.CloseRequest) (*maruv1.CloseResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	var kind directory.CloseKind
	switch {
	case m.GetDrained() && m.GetLeft(), !m.GetDrained() && !m.GetLeft():
		return nil, fmt.Errorf("%w: close: exactly one of drained and left must be set", base.ErrInvalid)
	case m.GetDrained():
		kind = directory.CloseDrained
	default:
		kind = directory.CloseLeft
	}
	if err := s.step(func(d *directory.Directory, now time.Duration) error { return d.Close(now, sess.caller(), kind) }); err != nil {
		return nil, err
	}
	how := "left with exports out"
	if kind == directory.CloseDrained {
		how = "drained"
		s.forgetProcess(sess.id)
	}
	s.metrics.sessionEvents.WithLabelValues("closed").Inc()
	s.log.Info("session closed", "session", sess.id.String(), "how", how)
	sess.end("it was closed")
	s.sessions.drop(sess)
	return &maruv1.CloseResponse{}, nil
}
