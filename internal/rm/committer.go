package rm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// kind says what a job waits for.
type kind uint8

const (
	// jobDurable answers when everything up to it is durable: changes, and reads
	// that show state which a peer could act on.
	jobDurable kind = iota
	// jobGlance answers at once: pictures for people, also while the store fails.
	jobGlance
)

// job is one request for the committer.
type job struct {
	kind kind
	// run works on the core; its changes go into the batch.
	run func(b *core.Batch) error
	// device, if set, runs after the commit and before the slots and the answer.
	device func() error
	err    error
	done   chan struct{}
}

// retryInterval is how soon a failed commit is tried again when nobody asks.
const retryInterval = time.Second

// do gives a job to the committer and waits. When the context ends first, the
// job may still be done: the outcome is unknown to the caller.
func (s *Server) do(ctx context.Context, j *job) error {
	j.done = make(chan struct{})
	select {
	case s.jobs <- j:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.stopping:
		return errClosing()
	}
	select {
	case <-j.done:
		return j.err
	case <-ctx.Done():
		return ctx.Err()
	case <-s.committed: // it was queued behind the committer's last look
		select {
		case <-j.done:
			return j.err
		default:
			return errClosing()
		}
	}
}

func errClosing() error {
	return fmt.Errorf("%w: the resource manager is closing", base.ErrUnavailable)
}

// commitLoop owns core, store and devices until stopping, then answers what is
// still queued and ends.
func (s *Server) commitLoop() {
	defer close(s.committed)
	retry := time.NewTimer(retryInterval)
	retry.Stop()
	for {
		var batch []*job
		select {
		case j := <-s.jobs:
			batch = s.gather(j)
		case <-s.kick:
		case <-retry.C:
		case <-s.stopping:
			for {
				select {
				case j := <-s.jobs:
					j.err = errClosing()
					close(j.done)
				default:
					return
				}
			}
		}
		if s.runBatch(batch) != nil {
			retry.Reset(retryInterval)
		}
	}
}

func (s *Server) gather(first *job) []*job {
	batch := append(make([]*job, 0, 16), first)
	for len(batch) < s.cfg.MaxBatchCount {
		select {
		case j := <-s.jobs:
			batch = append(batch, j)
		default:
			return batch
		}
	}
	return batch
}

// runBatch runs jobs, makes what they changed durable, and answers.
func (s *Server) runBatch(batch []*job) error {
	s.endProcesses()
	var waiting []*job
	for _, j := range batch {
		j.err = j.run(s.pending)
		if j.kind == jobGlance {
			close(j.done)
			continue
		}
		waiting = append(waiting, j)
	}
	err := s.commit(len(waiting))
	if err != nil {
		for _, j := range waiting {
			// It is in the batch that is committed next: no refusal (X1).
			j.err = fmt.Errorf("%w: %w; it may still take effect", base.ErrUnknown, err)
			close(j.done)
		}
		s.log.Error("commit failed; it is tried again, and nothing is acknowledged before it succeeds", "error", err)
		s.glance.Store(s.takeGlance(err))
		return err
	}
	for _, j := range waiting {
		if j.err == nil && j.device != nil {
			j.err = unfinished(j.device())
		}
	}
	slotErr := unfinished(s.flushSlots())
	events := s.pending.Events()
	s.pending = &core.Batch{}
	s.glance.Store(s.takeGlance(nil)) // before the answers: who was answered sees it
	for _, j := range waiting {
		if j.err == nil {
			j.err = slotErr
		}
		close(j.done)
	}
	s.hub.publish(events)
	for _, e := range events {
		if e.Kind == core.EventSessionGone {
			s.proofs.forget(e.Session)
			s.log.Info("mapper is gone", "session", e.Session, "proof", string(e.Proof))
		}
	}
	return nil
}

// unfinished is what callers hear of a device that failed behind their commit. It is no
// refusal: what they asked for is in the store, and a hold, say, stays there until it is
// given back. It is no success either: without its slot a store from before that commit
// would be taken for the newest one, and without its table a region must not be mapped. So
// the outcome is not known to them (X1). Who asks again meets a pool that is offline, and
// a free or an unhold that is already done; at the next start the slot is written.
// The callers of other pools in the batch hear the same, and find their work done.
func unfinished(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: it is on record, and the device failed behind that: %w", base.ErrUnknown, err)
}

// commit makes the pending batch durable, if there is anything in it.
func (s *Server) commit(requests int) error {
	s.slots = nil
	if s.pending.IsEmpty() {
		return nil
	}
	s.slots = s.core.Seal(s.pending)
	start := time.Now()
	err := s.store.Commit(s.pending.Changes())
	s.metrics.commit(time.Since(start), requests, err)
	return err
}

// flushSlots writes the slots of the batch. A pool whose slot cannot be written
// goes offline: its store is one ahead, which the next attach puts right.
func (s *Server) flushSlots() error {
	var all error
	for _, w := range s.slots {
		d, ok := s.devices[w.Pool]
		if !ok {
			continue
		}
		if err := d.writeSlot(w); err != nil {
			s.poolFailed(w.Pool, err)
			all = errors.Join(all, fmt.Errorf("header of %s: %w", d.file.Path(), err))
			continue
		}
		s.core.SlotWritten(w)
	}
	s.slots = nil
	return all
}

// poolFailed takes a pool out of use after an error of its device.
func (s *Server) poolFailed(id base.PoolID, err error) {
	s.log.Error("device failed; its pool is offline until the resource manager starts again", "pool", id, "error", err)
	s.core.SetOffline(id, "its device failed: "+err.Error()+"; repair it and start the resource manager again")
}

// prepare writes a new region's line and table.
func (s *Server) prepare(r core.Region) error {
	d, ok := s.devices[r.Pool]
	if !ok {
		return fmt.Errorf("%w: pool %s has no device", base.ErrOffline, r.Pool)
	}
	if err := d.prepare(r); err != nil {
		s.poolFailed(r.Pool, err)
		return fmt.Errorf("table of region %d on %s: %w", r.ID, d.file.Path(), err)
	}
	s.core.Prepared(r.ID)
	return nil
}

// ended leaves word of a process's end; the watcher calls it and must not wait.
func (s *Server) ended(p core.ProcessID, proof core.Proof) {
	s.gone.Lock()
	s.gone.list = append(s.gone.list, goneProcess{p, proof})
	s.gone.Unlock()
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

type goneProcess struct {
	process core.ProcessID
	proof   core.Proof
}

// endProcesses takes the ended processes into the core. On software-coherent
// pools their dirty lines are written back first: later, they could go over what
// the range's next user wrote.
func (s *Server) endProcesses() {
	s.gone.Lock()
	list := s.gone.list
	s.gone.list = nil
	s.gone.Unlock()
	for _, g := range list {
		failed := false
		if g.proof == core.ProofPidfd {
			for _, r := range s.core.DirtyRegions(g.process) {
				d, ok := s.devices[r.Pool]
				if !ok {
					failed = true // its lines may be dirty still: the region stays as it is
					continue
				}
				if err := d.writeBack(r); err != nil {
					s.poolFailed(r.Pool, err)
					failed = true
				}
			}
		}
		if failed {
			s.log.Error("a dead mapper's lines could not be written back; its holds stay until a restart with the device, or maru rm drop-holds", "process", g.process)
			continue
		}
		s.core.ProcessGone(s.pending, g.process, g.proof)
	}
}
