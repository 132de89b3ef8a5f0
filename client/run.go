package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/session"
)

// firstBackoff is the wait before the first attempt to open again; it doubles up to
// one heartbeat.
const firstBackoff = 20 * time.Millisecond

// run is the heartbeat and reconnect loop. It writes one line when the server goes and
// one when it is back.
func (c *Client) run() {
	backoff := firstBackoff
	var since time.Time // of the outage
	silent := false     // the last heartbeat did not reach the server's Unix socket
	if c.link.Load() == nil {
		since = time.Now()
	}
	lost := func(err error) {
		if since.IsZero() {
			since = time.Now()
			c.count.outages.Add(1)
			text := "the session cannot be opened: everything is a miss until it is"
			if away(err) {
				text = "the server is away: everything is a miss until it is back"
			}
			c.log.Warn(text, "server", c.cfg.ServerAddress, "error", err)
		}
	}
	back := func() {
		if !since.IsZero() {
			c.log.Info("the server is back", "server", c.cfg.ServerAddress, "away_seconds", time.Since(since).Seconds())
			since = time.Time{}
		}
		backoff = firstBackoff
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-timer.C:
		case <-c.reopen:
		}
		l := c.link.Load()
		beat := c.heartbeatEvery(l)
		if l == nil || l.ctx.Err() != nil {
			if err := c.openSession(c.ctx); err != nil {
				if c.ctx.Err() != nil {
					return
				}
				lost(err)
				timer.Reset(backoff)
				backoff = min(2*backoff, beat)
				continue
			}
			back()
			c.kick()
			timer.Reset(0)
			continue
		}
		err := c.heartbeat(l.ctx, l, l.api, beat)
		if l.unix != nil && errors.Is(err, base.ErrUnavailable) {
			// Its socket is of one process on this machine. A server that is started again
			// may have another one, or be on another machine: only the configured address
			// leads to it, and its answer is that it does not know this epoch. The first
			// failure is left to the socket, which is back first when only it was restarted.
			if silent {
				err = c.heartbeat(l.ctx, l, maruv1.NewMetadataServerClient(c.conn), beat)
			}
			silent = true
		} else {
			silent = false
		}
		if err != nil {
			switch {
			case c.ctx.Err() != nil:
				return
			case l.ctx.Err() != nil:
				// Another call was first to learn that the epoch is over.
				timer.Reset(0)
				continue
			case epochOver(err):
				c.lose(l)
				timer.Reset(0)
				continue
			default:
				lost(err)
			}
		} else {
			back()
		}
		timer.Reset(beat)
	}
}

func (c *Client) heartbeatEvery(l *link) time.Duration {
	if l != nil && l.resp.GetHeartbeatMs() > 0 {
		return time.Duration(l.resp.GetHeartbeatMs()) * time.Millisecond
	}
	return time.Second
}

// heartbeat sends one through api, and takes what its answer brings.
func (c *Client) heartbeat(ctx context.Context, l *link, api maruv1.MetadataServerClient, beat time.Duration) error {
	req := &maruv1.HeartbeatRequest{}
	c.mu.Lock()
	core := c.mu.core
	c.mu.beats++
	req.Sequence = c.mu.beats
	req.LastEvent = core.LastEvent()
	req.Watermark = uint64(core.Watermark())
	for _, p := range c.mu.pools {
		n := core.CountPool(p.number)
		req.Uses = append(req.Uses, &maruv1.PoolUse{
			PoolNumber: p.number, WritingBytes: n.WritingBytes, QuarantinedBytes: n.QuarantinedBytes, FreeBytes: n.FreeBytes,
		})
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(l.authorize(ctx), max(beat, c.cfg.RPCTimeout))
	defer cancel()
	sent := c.clock()
	resp, err := api.Heartbeat(ctx, req)
	if err != nil {
		return err
	}
	l.owner.Store(resp.GetOwnerIncarnation())
	l.hung.Store(false)
	c.mu.Lock()
	core.Acknowledged(base.Epoch(resp.GetEpoch()), base.ServerEpoch(resp.GetServerEpoch()), sent,
		time.Duration(resp.GetTtlMs())*time.Millisecond)
	if c.cfg.Role == base.RoleScheduler {
		c.mu.workers = workersOf(resp.GetWorkers())
	}
	_, growth := core.LostExpand(base.MediumCXL)
	pending := core.Pending() > 0 || len(c.mu.corrupt) > 0 || c.mu.unprepared || growth || len(c.mu.unholds) > 0 || len(c.mu.unmaps) > 0
	lost := len(core.LostCommits(nil)) > 0
	c.mu.Unlock()
	pending = c.known.newest(l, base.RegionID(resp.GetNewestRegionId())) || pending
	if resp.GetServerEpoch() != uint64(l.serverEpoch) || resp.GetEpoch() != uint32(l.epoch) {
		return fmt.Errorf("%w: the heartbeat was answered in epoch %d of server epoch %x", base.ErrStale, resp.GetEpoch(), resp.GetServerEpoch())
	}
	c.apply(l, resp.GetEvents())
	if pending || lost {
		c.kick()
	}
	return nil
}

// stream takes the server's events of one epoch as they come. What it misses the
// heartbeat brings.
func (c *Client) stream(l *link) {
	backoff := firstBackoff
	for l.ctx.Err() == nil {
		c.mu.Lock()
		after := c.mu.core.LastEvent()
		c.mu.Unlock()
		events, err := l.api.Events(l.authorize(l.ctx), &maruv1.EventsRequest{After: after})
		for err == nil {
			var batch *maruv1.EventBatch
			if batch, err = events.Recv(); err == nil {
				c.apply(l, batch)
				backoff = firstBackoff
			}
		}
		if epochOver(err) {
			c.lose(l)
			return
		}
		if !errors.Is(err, io.EOF) && l.ctx.Err() == nil {
			c.log.Debug("the event stream broke", "error", err)
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, c.heartbeatEvery(l))
	}
}

// apply takes events in their order. Marks are cleared before anything is acknowledged.
func (c *Client) apply(l *link, batch *maruv1.EventBatch) {
	if len(batch.GetEvents()) == 0 {
		return
	}
	c.events.Lock()
	defer c.events.Unlock()
	var clear []session.PageRef
	fenced := ""
	for _, e := range batch.GetEvents() {
		ev := session.Event{Number: e.GetNumber(), Kind: session.OtherEvent}
		page := func(p *maruv1.PageEvent, k session.EventKind) {
			ev.Kind, ev.PoolNumber, ev.Region = k, p.GetPoolNumber(), base.RegionID(p.GetRegionId())
			ev.Offset, ev.Generation = p.GetOffset(), base.Generation(p.GetGeneration())
		}
		switch x := e.GetEvent().(type) {
		case *maruv1.Event_Retire:
			page(x.Retire, session.RetireEvent)
		case *maruv1.Event_Reclaim:
			page(x.Reclaim, session.ReclaimEvent)
		case *maruv1.Event_Drain:
			ev.Kind, ev.Region = session.DrainEvent, base.RegionID(x.Drain.GetRegionId())
		}
		c.mu.Lock()
		current := c.link.Load() == l
		accepted, ref := false, session.PageRef{}
		if current {
			accepted, ref = c.mu.core.Receive(ev)
		}
		c.mu.Unlock()
		if !current {
			break // what was accepted before still has its marks cleared
		}
		if !accepted {
			continue
		}
		if ref != (session.PageRef{}) {
			clear = append(clear, ref)
		}
		switch x := e.GetEvent().(type) {
		case *maruv1.Event_Fence:
			fenced = x.Fence.GetReason()
			if fenced == "" {
				fenced = "no reason given"
			}
		case *maruv1.Event_Pools:
			c.renamed(l, x.Pools)
		}
	}
	c.clearMarks(clear)
	c.kick()
	if fenced != "" {
		c.log.Warn("the server ended this session's epoch; it is opened again", "reason", fenced)
		c.lose(l)
	}
}

// renamed takes pools that came or changed; a client without a cxl region asks for its
// first one then.
func (c *Client) renamed(l *link, e *maruv1.PoolsEvent) {
	pools := poolsOf(e.GetPools())
	l.owner.Store(e.GetOwnerIncarnation())
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link.Load() != l {
		return
	}
	c.mu.core.Renumber(poolNumbers(pools))
	for n, p := range pools {
		c.mu.pools[n] = p
	}
	c.mu.unprepared, c.mu.prepareNot = true, time.Time{}
	c.mu.unproved = true
}
