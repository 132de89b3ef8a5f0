package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Faults are what was done to the programs.
type Faults struct {
	WorkerKills    uint64 `json:"worker_kills"`
	WorkerPauses   uint64 `json:"worker_pauses"` // longer than the TTL
	WorkerStumbles uint64 `json:"worker_stumbles"`
	WorkersEnded   uint64 `json:"workers_ended"` // in order, after a session ended untold
	ServerKills    uint64 `json:"server_kills"`
	ServerStops    uint64 `json:"server_stops"` // in order
	ServerPauses   uint64 `json:"server_pauses"`
	RMKills        uint64 `json:"rm_kills"`
	RMStops        uint64 `json:"rm_stops"`
	RMPauses       uint64 `json:"rm_pauses"`
	BothKilled     uint64 `json:"both_killed"`
	StoreFaults    uint64 `json:"store_faults"` // commits of the resource manager told to fail
}

// kills counts processes that were ended by SIGKILL.
func (f Faults) kills() uint64 { return f.WorkerKills + f.ServerKills + f.RMKills + 2*f.BothKilled }

type faultCounts struct {
	workerKills, workerPauses, workerStumbles         atomic.Uint64
	serverKills, serverStops, serverPauses            atomic.Uint64
	rmKills, rmStops, rmPauses, bothKilled, storeFail atomic.Uint64
	replaced                                          atomic.Uint64
}

func (f *faultCounts) sum() Faults {
	return Faults{
		WorkerKills: f.workerKills.Load(), WorkerPauses: f.workerPauses.Load(), WorkerStumbles: f.workerStumbles.Load(),
		ServerKills: f.serverKills.Load(), ServerStops: f.serverStops.Load(), ServerPauses: f.serverPauses.Load(),
		RMKills: f.rmKills.Load(), RMStops: f.rmStops.Load(), RMPauses: f.rmPauses.Load(),
		WorkersEnded: f.replaced.Load(), BothKilled: f.bothKilled.Load(), StoreFaults: f.storeFail.Load(),
	}
}

// hurtWorkers is the script of the workers' faults. What it stops goes on before it ends.
func (d *driver) hurtWorkers(ctx context.Context, rng *rand.Rand) error {
	for nap(ctx, rng, 100*time.Millisecond, 1500*time.Millisecond) {
		if err := d.replaceUntold(ctx, rng); err != nil {
			return err
		}
		p := d.workers[rng.IntN(len(d.workers))]
		switch n := rng.IntN(10); {
		case n < 4 && !p.tidy:
			d.faults.workerKills.Add(1)
			if err := d.replaceWorker(ctx, p, rng); err != nil {
				return err
			}
		case n < 7:
			d.faults.workerPauses.Add(1)
			p.pause(ctx, rng, ttl+ttl/8, 2*ttl)
		default:
			d.faults.workerStumbles.Add(1)
			p.pause(ctx, rng, ttl/20, ttl-margin)
		}
	}
	return nil
}

// replaceUntold ends workers of which a session ended while a daemon was away: its regions
// go back with the process, as they do when an engine ends.
func (d *driver) replaceUntold(ctx context.Context, rng *rand.Rand) error {
	for _, p := range d.workers {
		if !p.proc.untold.Load() {
			continue
		}
		p.log.note("is replaced: a session ended while a daemon was away")
		d.faults.replaced.Add(1)
		// A daemon may be away again: that it ends is all.
		if err := p.quit(); errors.Is(err, base.ErrTimeout) {
			return err
		}
		p.mu.Lock()
		err := d.startWorker(context.WithoutCancel(ctx), p, rng.Uint64())
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// replaceWorker kills a worker, sometimes one that is stopped, and starts another one.
func (d *driver) replaceWorker(ctx context.Context, p *program, rng *rand.Rand) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rng.IntN(4) == 0 {
		_ = p.proc.Signal(syscall.SIGSTOP)
		nap(ctx, rng, 0, 2*ttl)
	}
	p.log.note("SIGKILL")
	p.endLocked(syscall.SIGKILL)
	nap(ctx, rng, 0, 500*time.Millisecond)
	return d.startWorker(context.WithoutCancel(ctx), p, rng.Uint64())
}

// pause stops a program for a drawn time.
func (p *program) pause(ctx context.Context, rng *rand.Rand, least, most time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.proc
	r.stopped.Store(true)
	p.log.note("SIGSTOP")
	_ = r.Signal(syscall.SIGSTOP)
	nap(ctx, rng, least, most)
	p.log.note("SIGCONT")
	_ = r.Signal(syscall.SIGCONT)
	r.heard.Store(int64(time.Since(r.started)))
	r.stopped.Store(false)
}

// hurtDaemons is the script of the resource manager's and the server's faults. Bursts of
// kills take turns with times in which both run, so that processes get old too.
func (d *driver) hurtDaemons(ctx context.Context, rng *rand.Rand) error {
	for {
		for range 2 + rng.IntN(4) {
			if !nap(ctx, rng, 200*time.Millisecond, 5*time.Second) {
				return nil
			}
			if err := d.killDaemons(ctx, rng); err != nil {
				return err
			}
		}
		for range 3 + rng.IntN(5) {
			if !nap(ctx, rng, 500*time.Millisecond, 5*time.Second) {
				return nil
			}
			switch rng.IntN(5) {
			case 0:
				d.faults.serverPauses.Add(1)
				d.server.pause(ctx, rng, 100*time.Millisecond, 2*ttl)
			case 1:
				d.faults.rmPauses.Add(1)
				d.rm.pause(ctx, rng, 100*time.Millisecond, 2*ttl)
			default:
				d.failStore(rng)
			}
		}
	}
}

// failStore makes the resource manager's next commits fail.
func (d *driver) failStore(rng *rand.Rand) {
	f := storeFault{Kind: []faultKind{faultFull, faultIO, faultFile}[rng.IntN(3)], Count: 1 + rng.Int64N(4)}
	d.faults.storeFail.Add(uint64(f.Count)) //nolint:gosec // positive
	d.rm.mu.Lock()
	defer d.rm.mu.Unlock()
	d.rm.log.note("the next %d commits fail: %s", f.Count, f.Kind)
	_ = d.rm.proc.Send(f)
}

func (d *driver) killDaemons(ctx context.Context, rng *rand.Rand) error {
	how := syscall.SIGKILL
	switch n := rng.IntN(8); {
	case n < 3:
		if rng.IntN(4) == 0 {
			how = syscall.SIGTERM
			d.faults.serverStops.Add(1)
		} else {
			d.faults.serverKills.Add(1)
		}
		return d.restart(ctx, rng, d.server, how)
	case n < 6:
		if rng.IntN(4) == 0 {
			how = syscall.SIGTERM
			d.faults.rmStops.Add(1)
		} else {
			d.faults.rmKills.Add(1)
		}
		return d.restart(ctx, rng, d.rm, how)
	}
	// Both, in any order, started again in any order.
	d.faults.bothKilled.Add(1)
	first, second := d.rm, d.server
	if rng.IntN(2) == 0 {
		first, second = second, first
	}
	first.mu.Lock()
	defer first.mu.Unlock()
	second.mu.Lock()
	defer second.mu.Unlock()
	first.log.note("SIGKILL, both")
	first.endLocked(syscall.SIGKILL)
	nap(ctx, rng, 0, 300*time.Millisecond)
	second.log.note("SIGKILL, both")
	second.endLocked(syscall.SIGKILL)
	nap(ctx, rng, 0, ttl)
	if rng.IntN(2) == 0 {
		first, second = second, first
	}
	if err := d.startDaemon(context.WithoutCancel(ctx), first); err != nil {
		return err
	}
	nap(ctx, rng, 0, time.Second)
	return d.startDaemon(context.WithoutCancel(ctx), second)
}

func (d *driver) restart(ctx context.Context, rng *rand.Rand, p *program, how syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.log.note("%v", how)
	p.endLocked(how)
	nap(ctx, rng, 0, 2*time.Second)
	if err := d.startDaemon(context.WithoutCancel(ctx), p); err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	return nil
}
