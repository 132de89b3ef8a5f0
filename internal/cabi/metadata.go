package cabi

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Actions of Requests.
const (
	RequestsRefresh = 1
	RequestsEnd     = 2
)

func checkKeys(keys []byte) (hot.Keys, error) {
	if len(keys)%base.KeyBytes != 0 {
		return nil, fmt.Errorf("%w: keys have %d bytes, no multiple of %d", base.ErrInvalid, len(keys), base.KeyBytes)
	}
	return keys, checkCount(len(keys) / base.KeyBytes)
}

func checkMode(mode uint32) (hot.Mode, error) {
	if mode > uint32(hot.ModePrefix) {
		return 0, fmt.Errorf("%w: mode is %d, allowed: 0 (each), 1 (prefix)", base.ErrInvalid, mode)
	}
	return hot.Mode(mode), nil //nolint:gosec // 0 or 1
}

// Ping makes one round trip.
func (l *Library) Ping(h uint64, timeoutMS int64) error {
	return l.call(h, "ping", func(e *entry) error {
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.Ping(ctx)
	})
}

// Probe fills verdicts, one a key. targets are packed 16-byte sessions.
func (l *Library) Probe(h uint64, keys []byte, mode uint32, targets []byte, requestID uint64, verdicts []byte, timeoutMS int64) (leading int, err error) {
	err = l.call(h, "probe", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		m, err := checkMode(mode)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		q := client.ProbeQuery{Keys: k, Mode: m, RequestID: requestID}
		for i := 0; i+base.IDBytes <= len(targets); i += base.IDBytes {
			q.Targets = append(q.Targets, base.SessionID(targets[i:i+base.IDBytes]))
		}
		leading, err = e.client.Probe(ctx, q, verdicts)
		return err
	})
	return leading, err
}

// Requests keeps or ends request leases.
func (l *Library) Requests(h uint64, action uint32, ids []uint64, timeoutMS int64) error {
	return l.call(h, "requests", func(e *entry) error {
		if err := checkCount(len(ids)); err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		a, err := checkAction(action)
		if err != nil {
			return err
		}
		if a == hot.RequestsEnd {
			return e.client.EndRequests(ctx, ids)
		}
		return e.client.RefreshRequests(ctx, ids)
	})
}

func checkAction(action uint32) (hot.RequestsAction, error) {
	switch action {
	case RequestsRefresh:
		return hot.RequestsRefresh, nil
	case RequestsEnd:
		return hot.RequestsEnd, nil
	}
	return 0, fmt.Errorf("%w: action is %d, allowed: 1 (refresh), 2 (end)", base.ErrInvalid, action)
}

// SubmitLookup queues a scheduler's lookup, whose job has a code a key and one more.
func (l *Library) SubmitLookup(h uint64, keys []byte, workers, replicas uint32, requestID uint64, timeoutMS int64) (job uint64, err error) {
	err = l.call(h, "submit lookup", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		if k.Len() == MaxBatchCount {
			return fmt.Errorf("%w: a lookup has at most %d keys, its result one code more", base.ErrLimit, MaxBatchCount-1)
		}
		if workers > maxWorkers || replicas > maxWorkers {
			return fmt.Errorf("%w: %d workers, %d replicas; at most %d are allowed", base.ErrInvalid, workers, replicas, maxWorkers)
		}
		if err := checkTimeout(timeoutMS); err != nil {
			return err
		}
		id, err := e.client.SubmitLookup(client.Lookup{
			Keys: k, Workers: int(workers), Replicas: int(replicas), RequestID: requestID, Timeout: time.Duration(timeoutMS) * time.Millisecond,
		})
		if err != nil {
			return err
		}
		job, err = makeHandle(KindJob, uint64(id))
		return err
	})
	return job, err
}

// maxWorkers bounds what can be the size of an engine.
const maxWorkers = 1 << 20

// SubmitRequests is Requests without waiting for it.
func (l *Library) SubmitRequests(h uint64, action uint32, ids []uint64) error {
	return l.call(h, "submit requests", func(e *entry) error {
		if err := checkCount(len(ids)); err != nil {
			return err
		}
		a, err := checkAction(action)
		if err != nil {
			return err
		}
		return e.client.SubmitRequests(a, ids)
	})
}

// Targets copies the sessions of the live workers into out, packed.
func (l *Library) Targets(h uint64, out []byte, timeoutMS int64) (count int, err error) {
	err = l.call(h, "targets", func(e *entry) error {
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		sessions, err := e.client.Targets(ctx)
		if err != nil {
			return err
		}
		count = len(sessions)
		if len(out) < count*base.IDBytes {
			return fmt.Errorf("%w: room for %d sessions, there are %d", base.ErrLimit, len(out)/base.IDBytes, count)
		}
		for i := range sessions {
			copy(out[i*base.IDBytes:], sessions[i][:])
		}
		return nil
	})
	return count, err
}

// Delete hides keys for good.
func (l *Library) Delete(h uint64, keys []byte, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "delete", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.Delete(ctx, k, codes)
	})
}

// Pin counts up a view lease on each key.
func (l *Library) Pin(h uint64, keys []byte, mode uint32, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "pin", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		m, err := checkMode(mode)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.Pin(ctx, k, m, codes)
	})
}

// Unpin counts down.
func (l *Library) Unpin(h uint64, keys []byte, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "unpin", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.Unpin(ctx, k, codes)
	})
}
