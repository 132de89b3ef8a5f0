package rm

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// protocolVersion is what this program speaks.
const protocolVersion = 1

// capabilities say what this program can do within the protocol version.
var capabilities = []string{"regions_v1", "holds_v1", "domain_proof_v1", "records_v1", "watch_v1"}

// maxRecordCount bounds one ReadRecords or ClearRecords call.
const maxRecordCount = 8192

// service answers gRPC calls: it reads a message, gives the committer a job, and
// writes the answer.
type service struct {
	maruv1.UnimplementedResourceManagerServer
	*Server
}

func nowMS() int64 { return time.Now().UnixMilli() }

func (s *service) Describe(_ context.Context, req *maruv1.DescribeRequest) (*maruv1.DescribeResponse, error) {
	if v := req.GetVersion(); v != nil && (v.GetMin() > protocolVersion || v.GetMax() < protocolVersion) {
		return nil, fmt.Errorf("%w: the peer speaks protocol versions %d to %d, this resource manager speaks %d", base.ErrUnsupported, v.GetMin(), v.GetMax(), protocolVersion)
	}
	out := &maruv1.DescribeResponse{
		Version: protocolVersion, Capabilities: capabilities, StoreId: s.state.id[:], NodeId: s.identity.Node[:], BootId: s.identity.Boot[:],
		UnixPath: s.UnixPath(), ProgramVersion: s.cfg.Version,
	}
	for _, p := range s.glance.Load().pools {
		out.Pools = append(out.Pools, poolOut(p, poolfmt.Alignment))
	}
	return out, nil
}

func (s *service) StartOwner(ctx context.Context, req *maruv1.StartOwnerRequest) (*maruv1.StartOwnerResponse, error) {
	var x ids
	in := core.StartOwner{
		Owner: x.must("owner_id", req.GetOwnerId()), Name: req.GetName(), Directory: x.may("directory_id", req.GetDirectoryId()), Locked: req.GetDirectoryLocked(),
		Secret: x.secret(req.GetOwnerSecret()),
	}
	caller := s.caller(ctx, x.may("node_id", req.GetNodeId()), x.may("boot_id", req.GetBootId()), nil)
	if x.err != nil {
		return nil, x.err
	}
	in.Node, in.Boot, in.Process = caller.Node, caller.Boot, caller.Process
	var out core.Started
	err := s.do(ctx, &job{
		run: func(b *core.Batch) (err error) {
			if out, err = s.core.StartOwner(b, nowMS(), in); err == nil {
				s.watch(ctx, in.Process)
			}
			return err
		},
	})
	if err != nil {
		return nil, err
	}
	s.log.Info("owner started", "owner", in.Owner, "name", in.Name, "incarnation", out.Incarnation, "predecessors_ended", out.PredecessorsEnded, "reason", out.Reason)
	return &maruv1.StartOwnerResponse{
		Incarnation: uint32(out.Incarnation), PredecessorsEnded: out.PredecessorsEnded, Reason: out.Reason, OwnerToken: out.Token[:],
	}, nil
}

func (s *service) Allocate(ctx context.Context, req *maruv1.AllocateRequest) (*maruv1.AllocateResponse, error) {
	var x ids
	in := core.Allocate{
		Claim: x.claim(req.GetOwnerId(), req.GetIncarnation(), req.GetOwnerToken()), Operation: req.GetOperation(),
		PageCount: req.GetPageCount(), PageBytes: req.GetPageSize(), PieceBytes: req.GetPieceSize(),
		Writer: x.must("writer_session", req.GetWriterSession()), Pool: x.may("pool_id", req.GetPoolId()),
	}
	if len(req.GetNamespaceDigest()) != base.NamespaceBytes {
		return nil, fmt.Errorf("%w: namespace_digest has %d bytes, must have %d", base.ErrInvalid, len(req.GetNamespaceDigest()), base.NamespaceBytes)
	}
	if x.err != nil {
		return nil, x.err
	}
	copy(in.Namespace[:], req.GetNamespaceDigest())
	var out core.Allocated
	answer := &maruv1.AllocateResponse{}
	err := s.do(ctx, &job{
		run: func(b *core.Batch) (err error) {
			if out, err = s.core.Allocate(b, nowMS(), in); err != nil {
				return err
			}
			// With the answer, so that no reader has to wait until the server has asked for it.
			if read, err := s.core.MintRead(out.Handle); err == nil {
				answer.ReadHandle = handleOut(read)
			}
			return nil
		},
		device: func() error {
			if !out.Prepare {
				return nil
			}
			return s.prepare(out.Region)
		},
	})
	if err != nil {
		return nil, err
	}
	answer.Handle, answer.Place = handleOut(out.Handle), placeOut(out.Region)
	return answer, nil
}

func (s *service) Free(ctx context.Context, req *maruv1.FreeRequest) (*maruv1.FreeResponse, error) {
	var x ids
	who, h := x.claim(req.GetOwnerId(), req.GetIncarnation(), req.GetOwnerToken()), x.handle(req.GetHandle())
	if x.err != nil {
		return nil, x.err
	}
	var draining bool
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { draining, err = s.core.Free(b, who, h); return err }})
	if err != nil {
		return nil, err
	}
	return &maruv1.FreeResponse{Draining: draining}, nil
}

func (s *service) checkList(n int) error {
	limit := cmp.Or(s.cfg.Limits.MaxListCount, 4096)
	if n == 0 || n > limit {
		return fmt.Errorf("%w: %d handles in one call, the setting max_list_count allows 1 to %d", base.ErrLimit, n, limit)
	}
	return nil
}

func (s *service) MintRead(ctx context.Context, req *maruv1.MintReadRequest) (*maruv1.MintReadResponse, error) {
	var x ids
	in := x.handles(req.GetHandles())
	if err := cmp.Or(x.err, s.checkList(len(in))); err != nil {
		return nil, err
	}
	out := &maruv1.MintReadResponse{}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		for _, h := range in {
			r, err := s.core.MintRead(h)
			if err != nil {
				return err
			}
			out.Handles = append(out.Handles, handleOut(r))
		}
		return nil
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *service) GetAccess(ctx context.Context, req *maruv1.GetAccessRequest) (*maruv1.GetAccessResponse, error) {
	if err := s.checkList(len(req.GetHandles())); err != nil {
		return nil, err
	}
	out := &maruv1.GetAccessResponse{}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		for _, h := range req.GetHandles() {
			var x ids
			in := x.handle(h)
			place, err := core.Place{}, x.err
			if err == nil {
				place, err = s.core.GetAccess(in)
			}
			if err != nil {
				out.Regions = append(out.Regions, &maruv1.RegionAccess{Handle: h, Problem: problemOut(err)})
				continue
			}
			out.Regions = append(out.Regions, accessOut(place))
		}
		return nil
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *service) Hold(ctx context.Context, req *maruv1.HoldRequest) (*maruv1.HoldResponse, error) {
	var x ids
	in := core.Hold{
		Session: x.must("session_id", req.GetSessionId()), Server: x.must("server_id", req.GetServerId()),
		Incarnation: x.incarnation("owner_incarnation", req.GetOwnerIncarnation()), Views: req.GetViews(), Sequence: req.GetSequence(),
		Handles: x.handles(req.GetHandles()), AgentEpoch: req.GetAgentEpoch(), Nonce: base.NewID(),
		Vouched: req.GetVouched(),
	}
	in.Peer = s.caller(ctx, x.may("node_id", req.GetNodeId()), x.may("boot_id", req.GetBootId()), x.session(req.GetSessionSecret()))
	if x.err != nil {
		return nil, x.err
	}
	var out core.Held
	err := s.do(ctx, &job{
		run: func(b *core.Batch) (err error) {
			// Watched from here on, also if the commit fails: the hold stays pending then.
			if out, err = s.core.Hold(b, nowMS(), in); err == nil {
				s.watch(ctx, in.Peer.Process)
				out.Provable, out.Reason = s.core.Provable(in.Session)
			}
			return err
		},
		device: func() error {
			for _, r := range out.Prepare {
				if err := s.prepare(r); err != nil {
					return err
				}
			}
			return nil
		},
	})
	if err != nil {
		return nil, err
	}
	answer := &maruv1.HoldResponse{HoldToken: out.Token, Provable: out.Provable, Reason: out.Reason}
	for _, p := range out.Places {
		answer.Regions = append(answer.Regions, accessOut(p))
	}
	return answer, nil
}

func (s *service) Unhold(ctx context.Context, req *maruv1.UnholdRequest) (*maruv1.UnholdResponse, error) {
	var x ids
	in := core.Unhold{
		Session: x.must("session_id", req.GetSessionId()), Sequence: req.GetSequence(), Handles: x.handles(req.GetHandles()),
		Token: req.GetHoldToken(), Nonce: base.NewID(), Peer: s.caller(ctx, base.NodeID{}, base.BootID{}, x.session(req.GetSessionSecret())),
	}
	if x.err != nil {
		return nil, x.err
	}
	out := &maruv1.UnholdResponse{}
	err := s.do(ctx, &job{run: func(b *core.Batch) error {
		freed, err := s.core.Unhold(b, nowMS(), in)
		if err == nil {
			s.watch(ctx, in.Peer.Process) // it may have bound the session
		}
		for _, id := range freed {
			out.FreedRegionIds = append(out.FreedRegionIds, uint32(id))
		}
		return err
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *service) ResetHolds(ctx context.Context, req *maruv1.ResetHoldsRequest) (*maruv1.ResetHoldsResponse, error) {
	var x ids
	node := base.NodeID(x.must("node_id", req.GetNodeId()))
	// No agent's call: the watcher of a node speaks for processes that it saw end, this
	// one for all registrations of a node's older agents.
	if err := cmp.Or(x.err, s.operator(ctx, true, "reset-holds")); err != nil {
		return nil, err
	}
	var n int
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { n, err = s.core.ResetHolds(b, node, req.GetAgentEpoch()); return err }})
	if err != nil {
		return nil, err
	}
	return &maruv1.ResetHoldsResponse{Dropped: uint32(n)}, nil
}

func (s *service) ReadRecords(ctx context.Context, req *maruv1.ReadRecordsRequest) (*maruv1.ReadRecordsResponse, error) {
	var x ids
	who := x.claim(req.GetOwnerId(), req.GetIncarnation(), req.GetOwnerToken())
	pool, region := base.PoolID(x.must("pool_id", req.GetPoolId())), base.RegionID(req.GetRegionId())
	first, count := req.GetFirstPage(), req.GetPageCount()
	if x.err == nil && (count == 0 || count > maxRecordCount) {
		x.err = fmt.Errorf("%w: page_count %d, allowed: 1 to %d", base.ErrInvalid, count, maxRecordCount)
	}
	if x.err != nil {
		return nil, x.err
	}
	out := &maruv1.ReadRecordsResponse{}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		r, blank, err := s.core.Records(who, pool, region, req.GetWriterLeft())
		if err != nil {
			return err
		}
		if first >= r.Plan.PageCount || count > r.Plan.PageCount-first {
			return fmt.Errorf("%w: pages %d to %d of region %d, which has %d", base.ErrInvalid, first, first+count, region, r.Plan.PageCount)
		}
		if blank { // nobody mapped it, and its table may be of an older use
			out.Records = make([]byte, count*poolfmt.RecordBytes)
			return nil
		}
		if out.Records, err = s.devices[pool].records(r, first, count); err != nil {
			s.poolFailed(pool, err)
		}
		return err
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *service) ClearRecords(ctx context.Context, req *maruv1.ClearRecordsRequest) (*maruv1.ClearRecordsResponse, error) {
	var x ids
	who := x.claim(req.GetOwnerId(), req.GetIncarnation(), req.GetOwnerToken())
	pool, region := base.PoolID(x.must("pool_id", req.GetPoolId())), base.RegionID(req.GetRegionId())
	pages := req.GetPages()
	if x.err == nil && (len(pages) == 0 || len(pages) > maxRecordCount) {
		x.err = fmt.Errorf("%w: %d pages, allowed: 1 to %d", base.ErrInvalid, len(pages), maxRecordCount)
	}
	if x.err != nil {
		return nil, x.err
	}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		r, blank, err := s.core.Records(who, pool, region, req.GetWriterLeft())
		if err != nil {
			return err
		}
		for _, p := range pages {
			if p >= r.Plan.PageCount {
				return fmt.Errorf("%w: page %d of region %d, which has %d", base.ErrInvalid, p, region, r.Plan.PageCount)
			}
		}
		if blank {
			return nil
		}
		if err = s.devices[pool].clearMarks(r, pages); err != nil {
			s.poolFailed(pool, err)
		}
		return err
	}})
	if err != nil {
		return nil, err
	}
	return &maruv1.ClearRecordsResponse{}, nil
}

func (s *service) StartDomainProof(ctx context.Context, req *maruv1.StartDomainProofRequest) (*maruv1.StartDomainProofResponse, error) {
	var x ids
	session, pool := base.SessionID(x.must("session_id", req.GetSessionId())), base.PoolID(x.must("pool_id", req.GetPoolId()))
	caller := s.caller(ctx, base.NodeID{}, base.BootID{}, x.session(req.GetSessionSecret()))
	if x.err != nil {
		return nil, x.err
	}
	out := &maruv1.StartDomainProofResponse{MapBytes: poolfmt.DataOffset}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		p, err := s.core.OnlinePool(pool)
		if err != nil {
			return err
		}
		if err := s.core.SessionPeer(session, caller); err != nil {
			return err
		}
		slot, nonce, err := s.proofs.start(time.Now(), session, pool)
		if err != nil {
			return err
		}
		line := poolfmt.EncodeNonce(pool, nonce)
		if err := s.devices[pool].write(poolfmt.NonceOffset(slot), line[:]); err != nil {
			s.proofs.cancel(pool, slot)
			s.poolFailed(pool, err)
			return err
		}
		out.Slot, out.Path, out.DeviceKind, out.Coherence = slot, p.Path, maruv1.DeviceKind(p.Kind), maruv1.Coherence(p.Coherence)
		return nil
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *service) FinishDomainProof(ctx context.Context, req *maruv1.FinishDomainProofRequest) (*maruv1.FinishDomainProofResponse, error) {
	var x ids
	session, pool := base.SessionID(x.must("session_id", req.GetSessionId())), base.PoolID(x.must("pool_id", req.GetPoolId()))
	caller := s.caller(ctx, base.NodeID{}, base.BootID{}, x.session(req.GetSessionSecret()))
	if x.err != nil {
		return nil, x.err
	}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		if err := s.core.SessionPeer(session, caller); err != nil {
			return err
		}
		return s.proofs.finish(time.Now(), session, pool, req.GetSlot(), req.GetNonce())
	}})
	if err != nil {
		return nil, err
	}
	return &maruv1.FinishDomainProofResponse{}, nil
}

func (s *service) CheckDomainProof(ctx context.Context, req *maruv1.CheckDomainProofRequest) (*maruv1.CheckDomainProofResponse, error) {
	var x ids
	session := base.SessionID(x.must("session_id", req.GetSessionId()))
	pools := make([]base.PoolID, 0, len(req.GetPoolIds()))
	for _, b := range req.GetPoolIds() {
		pools = append(pools, x.must("pool_ids", b))
	}
	if x.err != nil {
		return nil, x.err
	}
	out := &maruv1.CheckDomainProofResponse{}
	err := s.do(ctx, &job{run: func(*core.Batch) error {
		for _, p := range pools {
			if s.proofs.isProved(session, p) {
				out.ProvedPoolIds = append(out.ProvedPoolIds, p[:])
			}
		}
		return nil
	}})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// operator refuses callers that are neither this program's user nor root on the
// Unix socket. Errors: ErrDenied, ErrInvalid (not confirmed).
func (s *service) operator(ctx context.Context, confirm bool, what string) error {
	p := peer.FromContext(ctx)
	if p == nil {
		return fmt.Errorf("%w: %s needs the Unix socket %s", base.ErrDenied, what, s.UnixPath())
	}
	if p.UID != 0 && int(p.UID) != os.Geteuid() {
		return fmt.Errorf("%w: %s needs user %d or root, the caller is user %d", base.ErrDenied, what, os.Geteuid(), p.UID)
	}
	if !confirm {
		return fmt.Errorf("%w: %s cannot be undone, and gives ranges back that may still be mapped; say confirm when it is true that nothing of it runs any more", base.ErrInvalid, what)
	}
	return nil
}

func (s *service) DropHolds(ctx context.Context, req *maruv1.DropHoldsRequest) (*maruv1.DropHoldsResponse, error) {
	var x ids
	node, session := base.NodeID(x.may("node_id", req.GetNodeId())), base.SessionID(x.may("session_id", req.GetSessionId()))
	if err := cmp.Or(x.err, s.operator(ctx, req.GetConfirm(), "drop-holds")); err != nil {
		return nil, err
	}
	var n int
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { n, err = s.core.DropHolds(b, node, session); return err }})
	if err != nil {
		return nil, err
	}
	s.log.Warn("operator dropped holds", "node", node, "session", session, "dropped", n)
	return &maruv1.DropHoldsResponse{Dropped: uint32(n)}, nil
}

func (s *service) DropOwner(ctx context.Context, req *maruv1.DropOwnerRequest) (*maruv1.DropOwnerResponse, error) {
	var x ids
	id := base.OwnerID(x.must("owner_id", req.GetOwnerId()))
	if err := cmp.Or(x.err, s.operator(ctx, req.GetConfirm(), "drop-owner")); err != nil {
		return nil, err
	}
	var freed, draining int
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { freed, draining, err = s.core.DropOwner(b, id); return err }})
	if err != nil {
		return nil, err
	}
	s.log.Warn("operator dropped an owner", "owner", id, "freed", freed, "draining", draining)
	return &maruv1.DropOwnerResponse{Freed: uint32(freed), Draining: uint32(draining)}, nil
}
