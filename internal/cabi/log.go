package cabi

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// logCount bounds the records that wait for a reader; the oldest go first, and the
// next record says how many went.
const logCount = 256

// logRing keeps a client's log records until the host asks for them: the library
// itself never prints.
type logRing struct {
	wake chan struct{} // capacity 1: something has changed
	mu   struct {
		sync.Mutex
		records [][]byte
		dropped int
		closed  bool
	}
}

func newLogRing() *logRing { return &logRing{wake: make(chan struct{}, 1)} }

func (r *logRing) add(record []byte) {
	r.mu.Lock()
	if len(r.mu.records) == logCount {
		r.mu.records = slices.Delete(r.mu.records, 0, 1)
		r.mu.dropped++
	}
	r.mu.records = append(r.mu.records, record)
	r.mu.Unlock()
	r.signal()
}

func (r *logRing) close() {
	r.mu.Lock()
	r.mu.closed = true
	r.mu.Unlock()
	r.signal()
}

func (r *logRing) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// wait gives the oldest record to take, which says whether it took it.
//
// Errors: ErrPending when none came in time, ErrClosed behind the last one.
func (r *logRing) wait(timeout time.Duration, take func(record []byte) bool) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		r.mu.Lock()
		if len(r.mu.records) > 0 {
			if take(r.mu.records[0]) {
				r.mu.records = slices.Delete(r.mu.records, 0, 1)
			}
			r.mu.Unlock()
			return nil
		}
		closed := r.mu.closed
		r.mu.Unlock()
		if closed {
			// The next waiter has to see it too.
			r.signal()
			return fmt.Errorf("%w: the client is closed and its log is read", base.ErrClosed)
		}
		select {
		case <-r.wake:
		case <-timer.C:
			return fmt.Errorf("%w: no log record within %v", base.ErrPending, timeout)
		}
	}
}

// logHandler writes slog records into a ring.
type logHandler struct {
	ring   *logRing
	prefix string
	attrs  map[string]string
}

func (h *logHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (h *logHandler) Handle(_ context.Context, rec slog.Record) error {
	attrs := make(map[string]string, len(h.attrs)+rec.NumAttrs())
	for k, v := range h.attrs {
		attrs[k] = v
	}
	rec.Attrs(func(a slog.Attr) bool {
		flatten(attrs, h.prefix, a)
		return true
	})
	h.ring.mu.Lock()
	if n := h.ring.mu.dropped; n > 0 {
		attrs["records_dropped"] = fmt.Sprint(n)
		h.ring.mu.dropped = 0
	}
	h.ring.mu.Unlock()
	b, err := json.Marshal(struct {
		Time  time.Time         `json:"time"`
		Level string            `json:"level"`
		Msg   string            `json:"msg"`
		Attrs map[string]string `json:"attrs"`
	}{rec.Time, rec.Level.String(), rec.Message, attrs})
	if err != nil {
		return fmt.Errorf("encode log record: %w", err)
	}
	h.ring.add(b)
	return nil
}

func flatten(out map[string]string, prefix string, a slog.Attr) {
	v := a.Value.Resolve()
	if v.Kind() == slog.KindGroup {
		if a.Key != "" {
			prefix += a.Key + "."
		}
		for _, g := range v.Group() {
			flatten(out, prefix, g)
		}
		return
	}
	out[prefix+a.Key] = v.String()
}

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	n := &logHandler{ring: h.ring, prefix: h.prefix, attrs: make(map[string]string, len(h.attrs)+len(attrs))}
	for k, v := range h.attrs {
		n.attrs[k] = v
	}
	for _, a := range attrs {
		flatten(n.attrs, h.prefix, a)
	}
	return n
}

func (h *logHandler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &logHandler{ring: h.ring, prefix: h.prefix + name + ".", attrs: h.attrs}
}
