package client

import (
	"context"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Probe writes one hot.Verdict a key into verdicts, which must be as long as the keys,
// and returns the count of hits before the first that is none. It reserves nothing.
// While the server is away everything is a miss. Errors: ErrInvalid, ErrClosed.
func (c *Client) Probe(ctx context.Context, q ProbeQuery, verdicts []byte) (leading int, err error) {
	if err := c.enter(ctx); err != nil {
		return 0, err
	}
	defer c.leave()
	n := q.Keys.Len()
	switch {
	case len(q.Keys)%base.KeyBytes != 0:
		return 0, fmt.Errorf("%w: %d bytes of keys; a key has %d", base.ErrInvalid, len(q.Keys), base.KeyBytes)
	case len(verdicts) < n:
		return 0, fmt.Errorf("%w: %d keys, room for %d verdicts", base.ErrInvalid, n, len(verdicts))
	case q.Mode > hot.ModePrefix:
		return 0, fmt.Errorf("%w: mode %d; allowed: each, prefix", base.ErrInvalid, q.Mode)
	case len(q.Targets) > hot.MaxShards:
		return 0, fmt.Errorf("%w: %d targets; at most %d", base.ErrInvalid, len(q.Targets), hot.MaxShards)
	}
	leading, _ = c.probe(ctx, q, verdicts[:n])
	return leading, nil
}

// probe is Probe behind its checks. With an error, verdicts are misses from the first call
// on that had no answer, or was refused.
func (c *Client) probe(ctx context.Context, q ProbeQuery, verdicts []byte) (leading int, err error) {
	n := len(verdicts)
	l := c.current()
	if l == nil {
		c.missAll(q.Mode, verdicts, &c.count.missesAway)
		return 0, fmt.Errorf("%w: no session is open at %s", base.ErrUnavailable, c.cfg.ServerAddress)
	}
	var packed []byte
	for i := range q.Targets {
		packed = append(packed, q.Targets[i][:]...)
	}
	chunk := min(hot.MaxKeys, hot.MaxExpandedKeys/max(1, len(q.Targets)))
	for first := 0; first < n; first += chunk {
		last := min(first+chunk, n)
		part := q
		part.Keys = q.Keys[first*base.KeyBytes : last*base.KeyBytes]
		got, err := c.probeOnce(ctx, l, part, packed, verdicts[first:last])
		if err != nil {
			if !away(err) && !epochOver(err) {
				c.limited.warn(c.log, "a probe was refused; its keys are misses", "error", err)
			}
			c.missAll(q.Mode, verdicts[first:n], &c.count.missesAway)
			return leading, err
		}
		if leading == first {
			leading += got
		}
		if q.Mode == hot.ModePrefix && leading < last {
			for i := last; i < n; i++ {
				verdicts[i] = byte(hot.NotTried)
			}
			break
		}
	}
	return leading, nil
}

func (c *Client) missAll(mode hot.Mode, verdicts []byte, counter *counter) {
	for i := range verdicts {
		verdicts[i] = byte(hot.Miss)
		if mode == hot.ModePrefix && i > 0 {
			verdicts[i] = byte(hot.NotTried)
		}
	}
	counter.Add(uint64(len(verdicts)))
}

func (c *Client) watermark() base.Sequence {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.core.Watermark()
}

// probeOnce makes one Probe call.
func (c *Client) probeOnce(ctx context.Context, l *link, q ProbeQuery, targets, verdicts []byte) (leading int, err error) {
	req := hot.ProbeRequest{RequestID: q.RequestID, Namespace: l.namespace, Mode: q.Mode, Targets: targets, Keys: q.Keys}
	req.Watermark = c.watermark()
	_, err = l.hot.call(ctx, hot.OpProbe, c.cfg.RPCTimeout,
		func(dst []byte, id uint64) []byte { return hot.AppendProbe(dst, id, &req) },
		func(payload []byte) error {
			var answer hot.ProbeAnswer
			if err := hot.DecodeProbeAnswer(payload, &answer); err != nil {
				return err
			}
			if len(answer.Verdicts) != len(verdicts) {
				return fmt.Errorf("%w: %d verdicts for %d keys", base.ErrInvalid, len(answer.Verdicts), len(verdicts))
			}
			copy(verdicts, answer.Verdicts)
			leading = int(answer.LeadingHits)
			return nil
		})
	if err != nil {
		c.failed(l, err)
	}
	return leading, err
}

// RefreshRequests keeps the request leases of engine requests.
func (c *Client) RefreshRequests(ctx context.Context, ids []uint64) error {
	return c.requests(ctx, hot.RequestsRefresh, ids)
}

// EndRequests ends them.
func (c *Client) EndRequests(ctx context.Context, ids []uint64) error {
	return c.requests(ctx, hot.RequestsEnd, ids)
}

// requests acts on request leases. They only keep replicas from eviction, so that a
// server that is away is no error.
func (c *Client) requests(ctx context.Context, action hot.RequestsAction, ids []uint64) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	return c.callRequests(ctx, action, ids)
}

func (c *Client) callRequests(ctx context.Context, action hot.RequestsAction, ids []uint64) error {
	for first := 0; first < len(ids); first += hot.MaxKeys {
		l := c.current()
		if l == nil {
			return nil
		}
		req := hot.RequestsRequest{Action: action}
		for _, id := range ids[first:min(first+hot.MaxKeys, len(ids))] {
			req.IDs = append(req.IDs, byte(id), byte(id>>8), byte(id>>16), byte(id>>24), byte(id>>32), byte(id>>40), byte(id>>48), byte(id>>56))
		}
		req.Watermark = c.watermark()
		_, err := l.hot.call(ctx, hot.OpRequests, c.cfg.RPCTimeout,
			func(dst []byte, id uint64) []byte { return hot.AppendRequests(dst, id, &req) },
			func(payload []byte) error {
				var answer hot.RequestsAnswer
				return hot.DecodeRequestsAnswer(payload, &answer)
			})
		if err != nil {
			c.failed(l, err)
			if away(err) || epochOver(err) {
				return nil
			}
			return err
		}
	}
	return nil
}

// Delete hides keys for good. codes has one a key: OK, NotFound, Pinned, or Unknown
// when the server did not finish in time (the key stays hidden). Errors: ErrUnavailable
// while the server is away.
func (c *Client) Delete(ctx context.Context, keys hot.Keys, codes []base.Code) error {
	if err := c.enter(ctx); err != nil {
		return err
	}
	defer c.leave()
	if len(keys)%base.KeyBytes != 0 || len(codes) < keys.Len() {
		return fmt.Errorf("%w: %d bytes of keys, %d codes", base.ErrInvalid, len(keys), len(codes))
	}
	l := c.current()
	if l == nil {
		return fmt.Errorf("%w: no session is open at %s", base.ErrUnavailable, c.cfg.ServerAddress)
	}
	return c.deleteKeys(ctx, l, keys, codes)
}
