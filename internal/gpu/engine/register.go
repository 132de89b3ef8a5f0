package engine

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/xcena-dev/maru/internal/base"
)

// Registration is host memory that a device can reach. It is cut into windows so that
// none passes the bound, at borders of objects: a copy across two fails.
type Registration struct {
	e       *Engine
	mem     []byte
	windows [][]byte
	step    uint64
	// closed is guarded by Engine.mu.
	closed bool
}

// Register makes memory that holds objects of objectBytes reachable. The memory should be
// populated: registering touches it otherwise, ten times slower. When a window is
// refused the ones before it are given back. Errors: ErrUnsupported (memory of this kind
// cannot be registered), ErrFault, ErrClosed, and the context's, between two windows.
func (e *Engine) Register(ctx context.Context, mem []byte, objectBytes uint64, access Access) (*Registration, error) {
	if err := e.Lost(); err != nil {
		return nil, err
	}
	r := &Registration{e: e, mem: mem, step: stepOf(uint64(len(mem)), objectBytes, e.cfg.RegistrationBytes)}
	for at := uint64(0); at < uint64(len(mem)); at += r.step {
		w := mem[at:min(at+r.step, uint64(len(mem)))]
		if ctx.Err() != nil {
			return nil, errors.Join(ctx.Err(), r.undo())
		}
		if err := e.device.Register(w, access); err != nil {
			e.count.refused.Add(int64(len(mem)))
			return nil, errors.Join(fmt.Errorf("registering %d bytes of host memory with the GPU: %w", len(mem), err), r.undo())
		}
		r.windows = append(r.windows, w)
	}
	e.mu.Lock()
	if e.mu.closed {
		e.mu.Unlock()
		return nil, errors.Join(fmt.Errorf("%w: the device", base.ErrClosed), r.undo())
	}
	e.mu.registrations[r] = struct{}{}
	e.mu.Unlock()
	e.count.registered.Add(int64(len(mem)))
	return r, nil
}

// stepOf is the size of a window: whole objects, whole pages of the machine, at most
// bound unless one object alone passes it.
func stepOf(size, objectBytes, bound uint64) uint64 {
	if size <= bound || objectBytes == 0 {
		return max(size, 1)
	}
	page := uint64(os.Getpagesize())
	unit := objectBytes / gcd(objectBytes, page) * page
	return max(bound/unit*unit, unit)
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Covers reports whether a range lies in one window.
func (r *Registration) Covers(b []byte) bool {
	if r == nil || len(b) == 0 || len(r.mem) == 0 {
		return false
	}
	start, at := addressOf(r.mem), addressOf(b)
	if at < start || at+uint64(len(b)) > start+uint64(len(r.mem)) {
		return false
	}
	return (at-start)/r.step == (at-start+uint64(len(b))-1)/r.step
}

// Close unregisters the memory. Nothing may be copied to or from it any more. Whoever
// unmaps the memory calls it first; the second call does nothing. An error says that the
// device may still reach the memory: it must stay mapped, and its owner's.
func (r *Registration) Close() error {
	r.e.mu.Lock()
	was := r.closed
	r.closed = true
	delete(r.e.mu.registrations, r)
	r.e.mu.Unlock()
	if was {
		return nil
	}
	err := r.undo()
	if err == nil {
		r.e.count.registered.Add(-int64(len(r.mem)))
	}
	return err
}

func (r *Registration) undo() error {
	var errs []error
	for _, w := range r.windows {
		errs = append(errs, r.e.device.Unregister(w))
	}
	return errors.Join(errs...)
}
