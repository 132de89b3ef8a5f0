package rm

import (
	"context"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

func (s *service) ListPools(context.Context, *maruv1.ListPoolsRequest) (*maruv1.ListPoolsResponse, error) {
	out := &maruv1.ListPoolsResponse{}
	for _, p := range s.glance.Load().pools {
		out.Pools = append(out.Pools, poolOut(p, poolfmt.Alignment))
	}
	return out, nil
}

func (s *service) ListRegions(ctx context.Context, req *maruv1.ListRegionsRequest) (*maruv1.ListRegionsResponse, error) {
	var x ids
	in := core.ListRegions{
		Claim: core.Claim{Owner: x.may("owner_id", req.GetOwnerId()), Incarnation: base.Incarnation(req.GetIncarnation()), Token: req.GetOwnerToken()},
		Pool:  x.may("pool_id", req.GetPoolId()),
		After: base.RegionID(req.GetAfterRegionId()), Limit: int(min(req.GetLimit(), core.MaxPageCount)),
	}
	if x.err != nil {
		return nil, x.err
	}
	var list []core.RegionInfo
	out := &maruv1.ListRegionsResponse{}
	// Capabilities are handed out, so the list waits until it is durable.
	err := s.do(ctx, &job{run: func(*core.Batch) (err error) { list, out.More, err = s.core.ListRegions(in); return err }})
	if err != nil {
		return nil, err
	}
	for _, r := range list {
		i := &maruv1.RegionInfo{
			PoolId: r.Pool[:], RegionId: uint32(r.ID), Incarnation: uint32(r.Incarnation), State: maruv1.RegionState(r.State), OwnerId: r.Owner[:],
			OwnerIncarnation: uint32(r.OwnerIncarnation), Operation: r.Operation, NamespaceDigest: r.Namespace[:], WriterSession: r.Writer[:],
			Place: placeOut(r.Region), Holders: sessionsOut(r.Holders), AllocatedUnixMs: r.AllocatedMS,
		}
		if r.Handle != nil {
			i.Handle = handleOut(*r.Handle)
		}
		out.Regions = append(out.Regions, i)
	}
	return out, nil
}

func (s *service) ListHolds(ctx context.Context, req *maruv1.ListHoldsRequest) (*maruv1.ListHoldsResponse, error) {
	var x ids
	after, only := base.SessionID(x.may("after_session_id", req.GetAfterSessionId())), base.SessionID(x.may("session_id", req.GetSessionId()))
	if x.err != nil {
		return nil, x.err
	}
	var list []core.HoldInfo
	out := &maruv1.ListHoldsResponse{}
	wait := jobGlance
	if only != (base.SessionID{}) {
		wait = jobDurable
	}
	err := s.do(ctx, &job{kind: wait, run: func(*core.Batch) error {
		list, out.More = s.core.Holds(nowMS(), only, after, base.RegionID(req.GetAfterRegionId()), int(min(req.GetLimit(), core.MaxPageCount)))
		return nil
	}})
	if err != nil {
		return nil, err
	}
	for _, h := range list {
		out.Holds = append(out.Holds, &maruv1.HoldInfo{
			SessionId: h.Session[:], ServerId: h.Server[:], OwnerIncarnation: uint32(h.OwnerIncarnation), NodeId: h.Node[:], Process: processOut(h.Process),
			PoolId: h.Pool[:], RegionId: uint32(h.Region), Views: h.Views, Provable: h.Provable, Draining: h.Draining, SinceUnixMs: h.SinceMS,
			Cure: h.Cure, Sequence: h.Sequence, Reason: h.Reason, Proof: h.Proof, PoolName: h.PoolName, ExtentLength: h.ExtentBytes,
			BootId: h.Boot[:], ReadOnly: h.ReadOnly, OwnerId: h.Owner[:], OwnerName: h.OwnerName, AgentId: agentOut(h.Agent),
		})
	}
	return out, nil
}

func (s *service) ListOwners(ctx context.Context, _ *maruv1.ListOwnersRequest) (*maruv1.ListOwnersResponse, error) {
	var list []core.OwnerInfo
	err := s.do(ctx, &job{kind: jobGlance, run: func(*core.Batch) error { list = s.core.ListOwners(); return nil }})
	if err != nil {
		return nil, err
	}
	out := &maruv1.ListOwnersResponse{}
	for _, o := range list {
		out.Owners = append(out.Owners, &maruv1.OwnerInfo{
			OwnerId: o.ID[:], Name: o.Name, Incarnation: uint32(o.Incarnation), NodeId: o.Node[:], BootId: o.Boot[:], RegionCount: uint64(o.RegionCount),
			AllocatedBytes: o.AllocatedBytes, StartedUnixMs: o.StartedMS, PredecessorsEnded: o.PredecessorsEnded,
			Proved: o.Proved,
		})
	}
	return out, nil
}

func (s *service) WatchOwner(req *maruv1.WatchOwnerRequest, stream grpc.ServerStreamingServer[maruv1.OwnerEvent]) error {
	var x ids
	who := x.claim(req.GetOwnerId(), req.GetIncarnation(), req.GetOwnerToken())
	if x.err != nil {
		return x.err
	}
	var w *watch[*maruv1.OwnerEvent]
	snapshot := &maruv1.Snapshot{}
	// Registered in the same step as the snapshot is taken, so that nothing falls
	// between. The job is waited for even if the caller leaves: it gives a watch.
	err := s.do(context.WithoutCancel(stream.Context()), &job{run: func(*core.Batch) (err error) {
		if err := s.core.Claim(who); err != nil {
			return err
		}
		snapshot.Sessions = sessionsOut(s.core.OwnerSessions(who.Owner))
		w, err = s.hub.watchOwner(who.Owner, who.Incarnation)
		return err
	}})
	if err != nil {
		if w != nil {
			s.hub.unwatchOwner(who.Owner, w)
		}
		return err
	}
	defer s.hub.unwatchOwner(who.Owner, w)
	if err := stream.Send(&maruv1.OwnerEvent{Event: &maruv1.OwnerEvent_Snapshot{Snapshot: snapshot}}); err != nil {
		return err
	}
	return forward(stream.Context(), w, stream.Send)
}

func (s *service) WatchSession(req *maruv1.WatchSessionRequest, stream grpc.ServerStreamingServer[maruv1.SessionRegionEvent]) error {
	var x ids
	id := base.SessionID(x.must("session_id", req.GetSessionId()))
	caller := s.caller(stream.Context(), base.NodeID{}, base.BootID{}, x.session(req.GetSessionSecret()))
	if x.err != nil {
		return x.err
	}
	var w *watch[*maruv1.SessionRegionEvent]
	var draining []core.Region
	err := s.do(context.WithoutCancel(stream.Context()), &job{run: func(*core.Batch) (err error) {
		if err := s.core.SessionPeer(id, caller); err != nil {
			return err
		}
		draining = s.core.SessionDraining(id)
		w, err = s.hub.watchSession(id)
		return err
	}})
	if err != nil {
		if w != nil {
			s.hub.unwatchSession(id, w)
		}
		return err
	}
	defer s.hub.unwatchSession(id, w)
	for _, r := range draining {
		if err := stream.Send(&maruv1.SessionRegionEvent{PoolId: r.Pool[:], RegionId: uint32(r.ID), Draining: true}); err != nil {
			return err
		}
	}
	return forward(stream.Context(), w, stream.Send)
}

// forward sends a watch's events until it or the call ends.
func forward[E any](ctx context.Context, w *watch[E], send func(E) error) error {
	for {
		select {
		case e, ok := <-w.events:
			if !ok {
				return w.err
			}
			if err := send(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func agentOut(id base.AgentID) []byte {
	if id == (base.AgentID{}) {
		return nil
	}
	return id[:]
}
