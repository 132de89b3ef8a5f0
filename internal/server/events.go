package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

// pendingEvents translates what the session has not acknowledged.
func (s *Server) pendingEvents(sess *session, after uint64) ([]*maruv1.Event, error) {
	var events []directory.Event
	var pools []directory.PoolGrant
	err := s.look(func(d *directory.Directory, now time.Duration) error {
		var err error
		if events, err = d.PendingEvents(now, sess.caller(), after, nil); err != nil {
			return err
		}
		for i := range events {
			if events[i].Kind == directory.EventPools {
				pools, err = d.Pools(now, sess.caller())
				break
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	out := make([]*maruv1.Event, 0, len(events))
	for i := range events {
		out = append(out, s.event(&events[i], pools))
	}
	return out, nil
}

func (s *Server) event(e *directory.Event, pools []directory.PoolGrant) *maruv1.Event {
	page := func() *maruv1.PageEvent {
		return &maruv1.PageEvent{
			PoolNumber: e.Pool, RegionId: uint32(e.Region), Offset: e.Offset, Generation: uint64(e.Generation), CommitOrder: uint64(e.Order),
		}
	}
	out := &maruv1.Event{Number: e.Number}
	switch e.Kind {
	case directory.EventRetire:
		out.Event = &maruv1.Event_Retire{Retire: page()}
	case directory.EventReclaim:
		out.Event = &maruv1.Event_Reclaim{Reclaim: page()}
	case directory.EventDrain:
		out.Event = &maruv1.Event_Drain{Drain: &maruv1.DrainEvent{PoolId: e.PoolID[:], RegionId: uint32(e.Region)}}
	case directory.EventFence:
		out.Event = &maruv1.Event_Fence{Fence: &maruv1.FenceEvent{Reason: e.Reason}}
	case directory.EventPools:
		incarnation, _ := s.rm.status()
		out.Event = &maruv1.Event_Pools{Pools: &maruv1.PoolsEvent{Pools: s.poolRefs(pools), OwnerIncarnation: uint32(incarnation)}}
	}
	return out
}

// Events streams what a session has to be told. What a broken stream lost comes
// again with the next heartbeat, or with a stream that says after which event.
func (c *control) Events(m *maruv1.EventsRequest, stream grpc.ServerStreamingServer[maruv1.EventBatch]) error {
	s, sess := c.server, sessionOf(stream.Context())
	after := m.GetAfter()
	for {
		wake, reason, ended := sess.changes()
		if ended {
			// The last word of an epoch: whoever hears it opens again.
			return stream.Send(&maruv1.EventBatch{Events: []*maruv1.Event{{
				Number: after + 1, Event: &maruv1.Event_Fence{Fence: &maruv1.FenceEvent{Reason: reason}},
			}}})
		}
		events, err := s.pendingEvents(sess, after)
		if errors.Is(err, base.ErrStale) {
			sess.end("it sent no heartbeat in time")
			continue
		}
		if err != nil {
			return fmt.Errorf("events: %w", err)
		}
		if n := len(events); n > 0 {
			if err := stream.Send(&maruv1.EventBatch{Events: events}); err != nil {
				return err
			}
			after = events[n-1].GetNumber()
			continue
		}
		select {
		case <-wake:
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.ctx.Done():
			return fmt.Errorf("%w: the server stops", base.ErrClosed)
		}
	}
}

func pageRefs(in []*maruv1.PageEvent) []directory.PageRef {
	out := make([]directory.PageRef, 0, len(in))
	for _, p := range in {
		out = append(out, directory.PageRef{
			Pool: p.GetPoolNumber(), Region: base.RegionID(p.GetRegionId()), Offset: p.GetOffset(), Generation: base.Generation(p.GetGeneration()),
		})
	}
	return out
}

// Acknowledge records what the client has done of its events.
func (c *control) Acknowledge(ctx context.Context, m *maruv1.AcknowledgeRequest) (*maruv1.AcknowledgeResponse, error) {
	sess := sessionOf(ctx)
	err := c.server.step(func(d *directory.Directory, now time.Duration) error {
		return d.Acknowledge(now, sess.caller(), pageRefs(m.GetMarksCleared()), pageRefs(m.GetReclaimed()))
	})
	if err != nil {
		return nil, fmt.Errorf("acknowledge: %w", err)
	}
	return &maruv1.AcknowledgeResponse{}, nil
}
