package cabi

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
)

const (
	// MaxBatchCount bounds the items of one call.
	MaxBatchCount = 1 << 16
	// closedLogCount bounds closed clients whose last log lines nobody has read.
	closedLogCount = 16
	// manyCPUs is from where on Go's own default of one thread a CPU is too much for
	// a library: each rank of an engine loads its own runtime.
	manyCPUs = 8
	// closeTimeout is what Close has without a timeout of the caller.
	closeTimeout = 10 * time.Second
)

// Library is one table of clients. The process has one, tests have many.
//
// Concurrency: all methods are safe for concurrent use.
type Library struct {
	open Opener
	mu   struct {
		sync.RWMutex
		clients map[uint64]*entry
		last    uint64 // number of the newest client handle
		closed  []uint64
		procs   int // what GOMAXPROCS was set to here; 0: not yet
	}
}

// entry is one open client.
type entry struct {
	client Client
	cfg    client.Config
	logs   *logRing
	poison atomic.Pointer[string]
	closed atomic.Bool
	mu     struct {
		sync.Mutex
		regions []ownRegion
	}
}

type ownRegion struct {
	id    base.RegionID
	pages uint64
}

// NewLibrary returns an empty table whose clients come from open.
func NewLibrary(open Opener) *Library {
	l := &Library{open: open}
	l.mu.clients = make(map[uint64]*entry)
	return l
}

// ClientCount returns how many clients are open: 0 after everything was closed.
func (l *Library) ClientCount() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := 0
	for _, e := range l.mu.clients {
		if !e.closed.Load() {
			n++
		}
	}
	return n
}

// Open parses the configuration, opens a client and returns its handle.
//
// Errors: those of ParseConfig and of client.Open; ErrInternal for a panic in it.
func (l *Library) Open(text []byte) (handle uint64, err error) {
	defer func() {
		if p := recover(); p != nil {
			handle, err = 0, fmt.Errorf("%w: panic in open: %v\n%s", base.ErrInternal, p, debug.Stack())
		}
	}()
	cfg, err := ParseConfig(text)
	if err != nil {
		return 0, err
	}
	l.setProcs(cfg.GoMaxProcs)
	e := &entry{cfg: cfg.Client, logs: newLogRing()}
	e.cfg.Logger = slog.New(&logHandler{ring: e.logs})
	e.cfg.OnRegion = func(id base.RegionID, pages uint64) {
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, r := range e.mu.regions {
			if r.id == id {
				return
			}
		}
		e.mu.regions = append(e.mu.regions, ownRegion{id, pages})
	}
	e.client, err = l.open(context.Background(), e.cfg)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", cfg.Client.ServerAddress, err)
	}
	l.mu.Lock()
	l.mu.last++
	handle, err = makeHandle(KindClient, l.mu.last)
	if err == nil {
		l.mu.clients[handle] = e
	}
	l.mu.Unlock()
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = e.client.Close(ctx)
		return 0, err
	}
	return handle, nil
}

// setProcs applies go_max_procs. Without one, a process on a machine with many
// CPUs gets a small default, unless its environment says otherwise.
func (l *Library) setProcs(want int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if want == 0 {
		if l.mu.procs != 0 || os.Getenv("GOMAXPROCS") != "" || runtime.GOMAXPROCS(0) <= manyCPUs {
			return
		}
		want = manyCPUs
	}
	if want > l.mu.procs {
		l.mu.procs = want
		runtime.GOMAXPROCS(want)
	}
}

// find returns the entry of a handle.
//
// Errors: ErrInvalid for what never was a client's handle, ErrClosed for a stale
// one, ErrInternal for a poisoned client.
func (l *Library) find(h uint64) (*entry, error) {
	number, err := numberOf(KindClient, h)
	if err != nil {
		return nil, err
	}
	l.mu.RLock()
	e, last := l.mu.clients[h], l.mu.last
	l.mu.RUnlock()
	switch {
	case e != nil && !e.closed.Load():
		return e, nil
	case number <= last:
		return nil, fmt.Errorf("%w: client %#x was closed before", base.ErrClosed, h)
	}
	return nil, fmt.Errorf("%w: client %#x was never opened", base.ErrInvalid, h)
}

// call runs f on the client of a handle and contains its panics.
func (l *Library) call(h uint64, what string, f func(e *entry) error) (err error) {
	e, err := l.find(h)
	if err != nil {
		return err
	}
	if text := e.poison.Load(); text != nil {
		return fmt.Errorf("%w: this client can only be closed: %s", base.ErrInternal, *text)
	}
	defer func() {
		if p := recover(); p != nil {
			text := fmt.Sprintf("panic in %s: %v", what, p)
			e.poison.CompareAndSwap(nil, &text)
			e.cfg.Logger.Error("a bug in the library, please report it; the client is closed for everything but close",
				"panic", text, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: %s", base.ErrInternal, text)
		}
	}()
	return f(e)
}

// within makes the context of a call. 0 leaves the bound to the client.
func within(timeoutMS int64) (context.Context, context.CancelFunc, error) {
	if err := checkTimeout(timeoutMS); err != nil {
		return nil, nil, err
	}
	if timeoutMS == 0 {
		return context.Background(), func() {}, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(timeoutMS)*time.Millisecond)
	return ctx, cancel, nil
}

func checkTimeout(timeoutMS int64) error {
	if timeoutMS < 0 || timeoutMS > math.MaxInt64/int64(time.Millisecond) {
		return fmt.Errorf("%w: timeout_ms is %d, allowed: 0 (the client's) to %d", base.ErrInvalid, timeoutMS, math.MaxInt64/int64(time.Millisecond))
	}
	return nil
}

// Close ends a client. The handle is gone whatever it returns.
//
// Errors: ErrInvalid, ErrClosed for a handle that is none; else those of the
// client's Close.
func (l *Library) Close(h uint64, timeoutMS int64) (err error) {
	e, err := l.find(h)
	if err != nil {
		return err
	}
	ctx, cancel, err := within(timeoutMS)
	if err != nil {
		return err
	}
	defer cancel()
	if timeoutMS == 0 {
		ctx, cancel = context.WithTimeout(ctx, closeTimeout)
		defer cancel()
	}
	if !e.closed.CompareAndSwap(false, true) {
		return fmt.Errorf("%w: client %#x was closed before", base.ErrClosed, h)
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: panic in close: %v\n%s", base.ErrInternal, p, debug.Stack())
		}
		e.logs.close()
		l.forget(h)
	}()
	return e.client.Close(ctx)
}

// forget keeps the last few closed clients for whoever reads their last lines.
func (l *Library) forget(h uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = append(l.mu.closed, h)
	if len(l.mu.closed) > closedLogCount {
		delete(l.mu.clients, l.mu.closed[0])
		l.mu.closed = l.mu.closed[1:]
	}
}

// WaitLog copies the next log record into buf. With ErrLimit, needed is the room
// that it takes.
func (l *Library) WaitLog(h uint64, timeoutMS int64, buf []byte) (needed int, err error) {
	if _, err := numberOf(KindClient, h); err != nil {
		return 0, err
	}
	if timeoutMS < 0 || timeoutMS > math.MaxInt64/int64(time.Millisecond) {
		return 0, fmt.Errorf("%w: timeout_ms is %d", base.ErrInvalid, timeoutMS)
	}
	l.mu.RLock()
	e := l.mu.clients[h]
	l.mu.RUnlock()
	if e == nil {
		_, err := l.find(h)
		return 0, err
	}
	short := false
	err = e.logs.wait(time.Duration(timeoutMS)*time.Millisecond, func(record []byte) bool {
		needed = len(record)
		short = needed+1 > len(buf)
		if !short {
			copy(buf, record)
			buf[needed] = 0
		}
		return !short
	})
	if err == nil && short {
		err = shortBuffer(needed, len(buf))
	}
	return needed, err
}

func shortBuffer(needed, have int) error {
	return fmt.Errorf("%w: the buffer has %d bytes, %d and a zero byte are needed", base.ErrLimit, have, needed)
}

// putText copies text and a zero byte into buf.
func putText(buf, text []byte) (int, error) {
	if len(text)+1 > len(buf) {
		return len(text), shortBuffer(len(text), len(buf))
	}
	copy(buf, text)
	buf[len(text)] = 0
	return len(text), nil
}
