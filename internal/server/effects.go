package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

// perform carries out what the directory asked for. It never waits: what goes to
// the resource manager is queued.
func (s *Server) perform(effects []directory.Effect) {
	for i := range effects {
		e := &effects[i]
		switch e.Kind {
		case directory.EffectSendEvent:
			if sess := s.sessions.get(e.Session); sess != nil && sess.epoch == e.Epoch {
				sess.notify()
			}
		case directory.EffectCloseConnections:
			if sess := s.sessions.get(e.Session); sess != nil && sess.epoch == e.Epoch {
				reason := e.Event.Reason
				if reason == "" {
					reason = "it was closed, opened again, or sent no heartbeat in time"
				}
				sess.end(reason)
				s.sessions.drop(sess)
			}
		case directory.EffectFreeRegion, directory.EffectClearRecords:
			s.rmWork.put(*e)
		case directory.EffectDeleteDone:
			s.deletes.done(e.Delete)
		case directory.EffectSessionExpired:
			s.metrics.sessionEvents.WithLabelValues("expired").Inc()
			s.log.Warn("a session sent no heartbeat in time: its replicas are hidden until it comes back or its process is proved gone",
				"session", e.Session.String(), "epoch", uint32(e.Epoch), "ttl", s.cfg.TTL)
		case directory.EffectCapacityReturned:
			s.metrics.sessionEvents.WithLabelValues("capacity_returned").Inc()
			s.log.Info("cpu memory came back to the budget", "node", e.Node.String(), "bytes", e.Bytes)
		}
	}
}

// step runs f under the directory's write lock and carries out what it left.
func (s *Server) step(f func(d *directory.Directory, now time.Duration) error) error {
	effects, err := s.stepLocked(f)
	s.perform(effects)
	return err
}

func (s *Server) stepLocked(f func(d *directory.Directory, now time.Duration) error) ([]directory.Effect, error) {
	s.dir.Lock()
	whole := false
	defer func() {
		if !whole {
			s.poison()
		}
		s.dir.Unlock()
	}()
	if s.dir.closed.Load() {
		whole = true
		return nil, errStops
	}
	err := f(s.dir.Directory, bootTime())
	effects := s.dir.AppendEffects(nil)
	whole = true
	return effects, err
}

// errStops is the answer of a server on its way down.
var errStops = fmt.Errorf("%w: the server stops", base.ErrClosed)

// look runs f under the read lock.
func (s *Server) look(f func(d *directory.Directory, now time.Duration) error) error {
	s.dir.RLock()
	defer s.dir.RUnlock()
	if s.dir.closed.Load() {
		return errStops
	}
	return f(s.dir.Directory, bootTime())
}

// rmWorkerCount goroutines carry out effects at the resource manager; together they
// share its fsyncs.
const rmWorkerCount = 4

// workQueue holds effects for the resource manager. It is bounded by the
// directory: a region has at most one free and one batch of clears in flight.
type workQueue struct {
	mu struct {
		sync.Mutex
		items  []directory.Effect
		closed bool
	}
	wake *sync.Cond
}

func newWorkQueue() *workQueue {
	q := &workQueue{}
	q.wake = sync.NewCond(&q.mu)
	return q
}

func (q *workQueue) put(e directory.Effect) {
	q.mu.Lock()
	q.mu.items = append(q.mu.items, e)
	q.mu.Unlock()
	q.wake.Signal()
}

func (q *workQueue) take() (directory.Effect, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.mu.items) == 0 && !q.mu.closed {
		q.wake.Wait()
	}
	if q.mu.closed {
		return directory.Effect{}, false
	}
	e := q.mu.items[0]
	q.mu.items[0] = directory.Effect{}
	q.mu.items = q.mu.items[1:]
	return e, true
}

func (q *workQueue) close() {
	q.mu.Lock()
	q.mu.closed = true
	q.mu.Unlock()
	q.wake.Broadcast()
}

func (s *Server) rmWorker() {
	for {
		e, ok := s.rmWork.take()
		if !ok {
			return
		}
		var err error
		switch e.Kind {
		case directory.EffectFreeRegion:
			var draining bool
			draining, err = s.freeAtRM(e.PoolID, e.Region, e.Incarnation)
			s.countRM("free", err)
			taken := err == nil || errors.Is(err, base.ErrNotFound)
			// Who waits for room is told twice. Before the directory can name another victim:
			// else one more would go although there is room now. And behind it: until then it
			// named this one, which somebody may have begun to wait for since.
			at := regionAt{e.PoolID, e.Region}
			s.flights.answered(at, taken, draining)
			_ = s.step(func(d *directory.Directory, now time.Duration) error {
				d.RegionFreed(now, e.Pool, e.Region, err)
				return nil
			})
			s.flights.answered(at, taken, draining)
		case directory.EffectClearRecords:
			err = s.clearAtRM(&e)
			s.countRM("clear", err)
			_ = s.step(func(d *directory.Directory, now time.Duration) error {
				d.RecordsCleared(now, e.Pool, e.Region, e.Pages, err)
				return nil
			})
		}
		if err != nil && !errors.Is(err, base.ErrUnavailable) && s.ctx.Err() == nil {
			s.log.Warn("the resource manager did not do what was asked; it is asked again", "what", e.Kind.String(),
				"pool", e.PoolID.String(), "region", uint32(e.Region), "error", err)
		}
	}
}

func (s *Server) countRM(kind string, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	s.metrics.rmEffects.WithLabelValues(kind, outcome).Inc()
}

// freeAtRM gives a region back, and says whether it drains there first. A region that
// the RM does not have is gone already.
func (s *Server) freeAtRM(pool base.PoolID, region base.RegionID, incarnation base.Incarnation) (draining bool, _ error) {
	client, owner, err := s.rm.use()
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.RMCallTimeout)
	defer cancel()
	at := regionAt{pool, region}
	s.flights.drains(at) // before the answer: the event that it is free may come first
	answer, err := client.Free(ctx, &maruv1.FreeRequest{
		OwnerId: s.state.server[:], Incarnation: uint32(owner.incarnation), OwnerToken: owner.token,
		Handle: &maruv1.RegionHandle{PoolId: pool[:], RegionId: uint32(region), Incarnation: uint32(incarnation)},
	})
	if err == nil {
		s.tokens.forget(at)
	}
	return answer.GetDraining(), s.checkFenced(err)
}

func (s *Server) clearAtRM(e *directory.Effect) error {
	client, owner, err := s.rm.use()
	if err != nil {
		return err
	}
	pages := make([]uint64, len(e.Pages))
	for i, p := range e.Pages {
		pages[i] = uint64(p)
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.RMCallTimeout)
	defer cancel()
	_, err = client.ClearRecords(ctx, &maruv1.ClearRecordsRequest{
		OwnerId: s.state.server[:], Incarnation: uint32(owner.incarnation), OwnerToken: owner.token,
		PoolId: e.PoolID[:], RegionId: uint32(e.Region), Pages: pages, WriterLeft: e.WriterLeft,
	})
	return s.checkFenced(err)
}

// checkFenced stops the server when the RM says that a newer incarnation exists.
func (s *Server) checkFenced(err error) error {
	if errors.Is(err, base.ErrFenced) {
		s.fence(err.Error())
	}
	return err
}

// deleteWaiters wakes calls of Delete when their marks are cleared. Several calls may
// wait for one delete: a repeated operation gives the same handle.
type deleteWaiters struct {
	mu struct {
		sync.Mutex
		waiting map[directory.DeleteID]*deleteWaiter
	}
}

type deleteWaiter struct {
	end   chan struct{}
	count int
}

func (w *deleteWaiters) init() { w.mu.waiting = make(map[directory.DeleteID]*deleteWaiter) }

// wait registers a waiter; forget must follow.
func (w *deleteWaiters) wait(id directory.DeleteID) *deleteWaiter {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.mu.waiting[id]
	if x == nil {
		x = &deleteWaiter{end: make(chan struct{})}
		w.mu.waiting[id] = x
	}
	x.count++
	return x
}

func (w *deleteWaiters) forget(id directory.DeleteID, x *deleteWaiter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x.count--; x.count == 0 && w.mu.waiting[id] == x {
		delete(w.mu.waiting, id)
	}
}

func (w *deleteWaiters) done(id directory.DeleteID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.mu.waiting[id]; x != nil {
		close(x.end)
		delete(w.mu.waiting, id)
	}
}

// sessionGone tells the directory that a process is proved gone.
func (s *Server) sessionGone(id base.SessionID, proof directory.GoneProof, text string) {
	s.log.Info("the process of a session is proved gone", "session", id.String(), "proof", text)
	s.metrics.sessionEvents.WithLabelValues("gone").Inc()
	s.bound.drop(id)
	_ = s.step(func(d *directory.Directory, now time.Duration) error {
		d.SessionGone(now, id, proof)
		return nil
	})
	if sess := s.sessions.get(id); sess != nil {
		sess.end(fmt.Sprintf("its process is proved gone (%s)", text))
		s.sessions.drop(sess)
	}
}
