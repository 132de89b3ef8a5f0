package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/rm"
)

// Result is the outcome of a run.
type Result struct {
	Seed       uint64   `json:"seed"`
	Seconds    float64  `json:"seconds"`
	Workers    int      `json:"workers"`
	PoolBytes  uint64   `json:"pool_bytes"`
	Checksums  bool     `json:"checksums"`
	Operations uint64   `json:"operations"`
	Counts     Counts   `json:"counts"`
	Faults     Faults   `json:"faults"`
	Kills      uint64   `json:"kills"`
	Processes  uint32   `json:"worker_processes"`
	Series     []Series `json:"series"`
	// RestSeconds is how long the programs took to come to rest, FreeSeconds until every
	// byte was free.
	RestSeconds float64  `json:"rest_seconds"`
	FreeSeconds float64  `json:"free_seconds"`
	WrongBytes  uint64   `json:"wrong_bytes"`
	OK          bool     `json:"ok"`
	Problems    []string `json:"problems"`
	ProblemSum  int      `json:"problem_count"`
	// Dir keeps the logs and the state of a run that failed.
	Dir string `json:"dir,omitempty"`
}

// Run runs the torture. A Result that is not OK is no error: err says that it could not
// be run.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	// Children of workers that were killed are this process's to wait for.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("torture: become the parent of what workers leave: %w", err)
	}
	d := &driver{cfg: cfg, judge: newJudge(), sums: client.On}
	if cfg.Seed%2 == 0 {
		d.sums = client.Off // the bytes alone tell
	}
	d.forked.pids = map[int]bool{}
	var made string
	if d.pool, made, err = cfg.pool(); err != nil {
		return nil, err
	}
	if d.dir, err = os.MkdirTemp(cfg.Parent, "maru-torture-"); err != nil {
		return nil, fmt.Errorf("torture: make a directory: %w", err)
	}
	if made != "" {
		defer func() { _ = os.Remove(made) }()
	}
	result, err := d.run(ctx)
	if err == nil && result.OK {
		return result, os.RemoveAll(d.dir)
	}
	if err != nil {
		return nil, fmt.Errorf("%w (seed %d, logs in %s)", err, cfg.Seed, d.dir)
	}
	result.Dir = d.dir
	return result, nil
}

func (d *driver) run(ctx context.Context) (_ *Result, err error) {
	if err := d.preparePool(ctx); err != nil {
		return nil, err
	}
	var logs []*logFile
	add := func(name string) (*program, error) {
		l, err := newLog(d.dir, name, d.judge)
		if err != nil {
			return nil, err
		}
		logs = append(logs, l)
		return &program{d: d, name: name, log: l}, nil
	}
	if d.rm, err = add("resource-manager"); err != nil {
		return nil, err
	}
	if d.server, err = add("server"); err != nil {
		return nil, err
	}
	for i := range d.cfg.Workers {
		p, err := add(fmt.Sprintf("worker-%d", i))
		if err != nil {
			return nil, err
		}
		p.tidy, p.index = i < max(1, d.cfg.Workers/4), i
		d.workers = append(d.workers, p)
	}
	defer func() {
		d.killAll()
		for _, l := range logs {
			err = errors.Join(err, l.close())
		}
	}()
	result := &Result{Seed: d.cfg.Seed, Workers: d.cfg.Workers, Checksums: d.sums == client.On}
	if err := d.start(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	watching, stopWatching := context.WithCancel(ctx)
	var watchers sync.WaitGroup
	watchers.Go(func() { d.watch(watching, began) })
	err = d.hurt(ctx)
	length := time.Since(began)
	stopWatching()
	watchers.Wait()
	if err := errors.Join(err, ctx.Err()); err != nil {
		return nil, err
	}
	d.cfg.Progress("the faults are over after %v; everything has to come to rest", length.Round(time.Second))
	if err := d.rest(ctx, result); err != nil {
		d.judge.find("%v", err)
	}
	result.Seconds, result.Series = length.Seconds(), d.samples.compare(length)
	d.fill(result)
	return result, nil
}

// fill completes a result with what the judge knows.
func (d *driver) fill(r *Result) {
	for _, s := range r.Series {
		if s.grew() {
			d.judge.find("%s: %s grew from %d to %d, allowed are %d", s.Role, s.What, s.First, s.Last, s.Allowed)
		}
	}
	r.Counts, r.Faults, r.Processes = d.judge.counts(), d.faults.sum(), d.next.Load()
	r.Operations, r.Kills, r.WrongBytes = r.Counts.operations(), r.Faults.kills(), r.Counts.WrongBytes
	if r.Counts.Loads == 0 || r.Counts.Stores == 0 {
		d.judge.find("%d loads and %d stores: this run tests nothing", r.Counts.Loads, r.Counts.Stores)
	}
	r.Problems, r.ProblemSum = d.judge.findings()
	r.OK = r.ProblemSum == 0
}

// preparePool makes a device the pool of this run's resource manager. A file that the
// run makes needs nothing.
func (d *driver) preparePool(ctx context.Context) error {
	if d.pool.SizeBytes != 0 {
		return nil
	}
	coherence := base.CoherenceUnknown
	if d.pool.Kind == dax.KindDevdax {
		coherence = base.CoherenceHardware
	}
	_, err := rm.InitDevice(ctx, rm.DeviceOptions{StateDir: d.path("rm"), Path: d.pool.Path, Kind: d.pool.Kind, Coherence: coherence})
	return err
}

func (d *driver) start(ctx context.Context) error {
	rng := rand.New(rand.NewPCG(d.cfg.Seed, 1)) //nolint:gosec // a script
	for _, p := range []*program{d.rm, d.server} {
		p.mu.Lock()
		err := d.startDaemon(context.WithoutCancel(ctx), p)
		p.mu.Unlock()
		if err == nil {
			err = p.awaitReady(ctx)
		}
		if err != nil {
			return err
		}
	}
	for _, p := range d.workers {
		p.mu.Lock()
		err := d.startWorker(context.WithoutCancel(ctx), p, rng.Uint64())
		p.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if err := d.each(func(p *program) error { return p.awaitReady(ctx) }); err != nil {
		return err
	}
	d.cfg.Progress("%d workers are connected; seed %d, logs in %s", len(d.workers), d.cfg.Seed, d.dir)
	return nil
}

// hurt plays the scripts of faults for the run's time.
func (d *driver) hurt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Duration)
	defer cancel()
	errs := make([]error, 2)
	var scripts sync.WaitGroup
	for i, script := range []func(context.Context, *rand.Rand) error{d.hurtWorkers, d.hurtDaemons} {
		scripts.Go(func() {
			errs[i] = script(ctx, rand.New(rand.NewPCG(d.cfg.Seed, uint64(10+i)))) //nolint:gosec // a script
			if errs[i] != nil {
				cancel()
			}
		})
	}
	scripts.Go(func() { d.progress(ctx) })
	scripts.Wait()
	return errors.Join(errs...)
}

// progress says now and then how far it is and what was found.
func (d *driver) progress(ctx context.Context) {
	tick := time.NewTicker(15 * time.Second)
	defer tick.Stop()
	said := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c, f := d.judge.counts(), d.faults.sum()
			texts, found := d.judge.findings()
			for ; said < len(texts); said++ {
				d.cfg.Progress("PROBLEM: %s", texts[said])
			}
			d.cfg.Progress("%d operations (%d loads, %d views, %d stores, %d deletes), %d kills, %d wrong bytes, %d problems",
				c.operations(), c.Loads, c.Views, c.Stores, c.Deletes, f.kills(), c.WrongBytes, found)
		}
	}
}

// killAll ends everything that still runs, also what workers forked.
func (d *driver) killAll() {
	for _, p := range append([]*program{d.rm, d.server}, d.workers...) {
		p.mu.Lock()
		if r := p.proc; r != nil {
			r.meant.Store(true)
			_ = r.Signal(syscall.SIGKILL)
			<-r.ended
		}
		p.mu.Unlock()
	}
	d.reapForked(syscall.SIGKILL)
}

// reapForked waits for forked children whose worker has ended: they are this process's
// now. With a signal they are ended first.
func (d *driver) reapForked(s syscall.Signal) {
	d.forked.Lock()
	defer d.forked.Unlock()
	for pid := range d.forked.pids {
		// Only a child of this process can be waited for, so its pid cannot be another's.
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != nil {
			delete(d.forked.pids, pid) // its worker waited for it
			continue
		}
		if s != 0 {
			_ = unix.Kill(pid, s)
			_, _ = unix.Wait4(pid, nil, 0, nil)
			delete(d.forked.pids, pid)
			continue
		}
		if got, err := unix.Wait4(pid, nil, unix.WNOHANG, nil); err != nil || got == pid {
			delete(d.forked.pids, pid)
		}
	}
}
