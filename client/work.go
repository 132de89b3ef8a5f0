package client

import (
	"context"
	"log/slog"
	"sync"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/session"
)

// kick wakes the background worker. It never blocks.
func (c *Client) kick() {
	select {
	case c.kicked <- struct{}{}:
	default:
	}
}

// work is the background worker: what needs no caller. What fails is tried again with
// the next heartbeat.
func (c *Client) work() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.kicked:
		}
		c.dropGone(c.ctx)
		l := c.current()
		if l == nil {
			continue
		}
		c.flushReleases(c.ctx, l)
		c.acknowledge(l)
		c.resolveLost(l)
		c.deleteCorrupt(l)
		c.finishGrowth(l)
		c.flushReturns(c.ctx, l)
		c.refill()
		c.learn(l)
	}
}

// flushReleases tells the server of the leases that have ended.
func (c *Client) flushReleases(ctx context.Context, l *link) {
	for ctx.Err() == nil {
		c.mu.Lock()
		rows := c.mu.core.TakeReleases(nil, hot.MaxKeys)
		server := c.mu.core.ServerEpoch()
		c.mu.Unlock()
		if len(rows) == 0 {
			return
		}
		_, err := c.release(ctx, l, rows)
		c.mu.Lock()
		c.mu.core.Released(rows, server, err == nil)
		c.mu.Unlock()
		if err != nil {
			c.failed(l, err)
			return
		}
	}
}

// release makes one Release call. held has a byte a row: 1 when its leases were in force.
func (c *Client) release(ctx context.Context, l *link, rows []session.Release) (held []byte, err error) {
	var req hot.ReleaseRequest
	for _, r := range rows {
		req.Rows = hot.AppendReleaseRow(req.Rows, hot.ReleaseRow{Acquire: r.Acquire, First: r.First, Count: r.Count})
	}
	// Releasing again changes nothing, so that it needs no operation of its own.
	req.Watermark = c.watermark()
	_, err = l.hot.call(ctx, hot.OpRelease, c.cfg.RPCTimeout,
		func(dst []byte, id uint64) []byte { return hot.AppendRelease(dst, id, &req) },
		func(payload []byte) error {
			var answer hot.ReleaseAnswer
			if err := hot.DecodeReleaseAnswer(payload, &answer); err != nil {
				return err
			}
			held = append(held, answer.Held...)
			return nil
		})
	return held, err
}

// acknowledge tells the server which marks are cleared and which pages were reclaimed.
func (c *Client) acknowledge(l *link) {
	c.mu.Lock()
	cleared, reclaimed := c.mu.core.TakeAcks(nil, nil)
	server := c.mu.core.ServerEpoch()
	c.mu.Unlock()
	if len(cleared)+len(reclaimed) == 0 {
		return
	}
	req := &maruv1.AcknowledgeRequest{}
	for i := range cleared {
		req.MarksCleared = append(req.MarksCleared, pageEvent(&cleared[i]))
	}
	for i := range reclaimed {
		req.Reclaimed = append(req.Reclaimed, pageEvent(&reclaimed[i]))
	}
	ctx, cancel := c.control(l.ctx, l)
	defer cancel()
	_, err := l.api.Acknowledge(ctx, req)
	c.mu.Lock()
	if err == nil {
		c.mu.core.AcksTaken(reclaimed, server)
	} else {
		c.mu.core.ReturnAcks(cleared, reclaimed, server)
	}
	c.mu.Unlock()
	if err != nil {
		c.failed(l, err)
		return
	}
	c.kick() // a region may be idle now
}

func pageEvent(a *session.Ack) *maruv1.PageEvent {
	return &maruv1.PageEvent{
		PoolNumber: a.PoolNumber, RegionId: uint32(a.Region), Offset: a.Offset, Generation: uint64(a.Generation),
	}
}

// resolveLost closes Commits whose answers were lost (X1). A Resolve can be repeated, and is
// no operation of its own: it ends the one that all others may be waiting for, when as many
// as there may be have come behind it.
func (c *Client) resolveLost(l *link) {
	c.mu.Lock()
	lost := c.mu.core.LostCommits(nil)
	c.mu.Unlock()
	for _, op := range lost {
		req := hot.ResolveRequest{Target: op.Sequence, TargetEpoch: op.Epoch, TargetServerEpoch: op.ServerEpoch}
		req.Watermark = c.watermark()
		var marks []session.PageRef
		_, err := l.hot.call(c.ctx, hot.OpResolve, c.cfg.RPCTimeout,
			func(dst []byte, id uint64) []byte { return hot.AppendResolve(dst, id, &req) },
			func(payload []byte) error {
				var answer hot.ResolveAnswer
				if err := hot.DecodeResolveAnswer(payload, &answer); err != nil {
					return err
				}
				c.mu.Lock()
				defer c.mu.Unlock()
				marks = append(marks[:0], c.mu.core.Refs(op.Sequence)...)
				c.mu.core.Resolved(op.Sequence, answer.Outcome, answer.Results)
				return nil
			})
		if err != nil {
			c.failed(l, err)
			return
		}
		c.count.resolved.Add(uint64(len(marks)))
		c.mark(marks, l)
	}
}

// reportCorrupt queues a key whose bytes did not match under a confirmed lease. The
// object is deleted: it costs a recomputation, a wrong byte costs an answer.
func (c *Client) reportCorrupt(key base.Key) {
	c.mu.Lock()
	if len(c.mu.corrupt) < 1024 {
		c.mu.corrupt = append(c.mu.corrupt, key)
	}
	c.mu.Unlock()
	c.kick()
}

func (c *Client) deleteCorrupt(l *link) {
	c.mu.Lock()
	keys := c.mu.corrupt
	c.mu.corrupt = nil
	c.mu.Unlock()
	if len(keys) == 0 {
		return
	}
	codes := make([]base.Code, len(keys))
	if err := c.deleteKeys(c.ctx, l, hot.AppendKeys(nil, keys), codes); err != nil {
		c.mu.Lock()
		c.mu.corrupt = append(c.mu.corrupt, keys...)
		c.mu.Unlock()
	}
}

// limiter lets one line of each text through in ten seconds.
type limiter struct {
	mu struct {
		sync.Mutex
		last    map[string]time.Time
		skipped map[string]int
	}
}

const logEvery = 10 * time.Second

func (m *limiter) warn(log *slog.Logger, text string, args ...any) {
	m.mu.Lock()
	if m.mu.last == nil {
		m.mu.last, m.mu.skipped = map[string]time.Time{}, map[string]int{}
	}
	if time.Since(m.mu.last[text]) < logEvery {
		m.mu.skipped[text]++
		m.mu.Unlock()
		return
	}
	skipped := m.mu.skipped[text]
	m.mu.last[text], m.mu.skipped[text] = time.Now(), 0
	m.mu.Unlock()
	if skipped > 0 {
		args = append(args, "not_logged", skipped)
	}
	log.Warn(text, args...)
}

// deleteKeys makes Delete calls.
func (c *Client) deleteKeys(ctx context.Context, l *link, keys hot.Keys, codes []base.Code) error {
	for first := 0; first < keys.Len(); first += hot.MaxKeys {
		n := min(keys.Len()-first, hot.MaxKeys)
		req := &maruv1.DeleteRequest{}
		for i := range n {
			k := keys.At(first + i)
			req.Keys = append(req.Keys, k[:])
		}
		c.mu.Lock()
		seq, err := c.mu.core.Begin()
		c.mu.Unlock()
		if err != nil {
			return err
		}
		req.Operation = uint64(seq)
		resp, err := func() (*maruv1.DeleteResponse, error) {
			ctx, cancel := c.control(ctx, l)
			defer cancel()
			return l.api.Delete(ctx, req)
		}()
		c.mu.Lock()
		c.mu.core.End(seq) // hidden or not, nothing here depends on it
		c.mu.Unlock()
		if err != nil {
			c.failed(l, err)
			return err
		}
		for i := range n {
			codes[first+i] = base.CodeUnknown
			if i < len(resp.GetResults()) {
				codes[first+i] = base.Code(resp.GetResults()[i].GetCode())
			}
		}
	}
	return nil
}
