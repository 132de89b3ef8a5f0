package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
)

// Config of a demonstration. Zero means default.
type Config struct {
	Server  string // address of a running maru-server
	Program string // this program; default: the running one
	Workers int    // default 3
	Scale   int    // the model has 1/Scale of its layers; default 16
	Chains  int    // chains of each worker; default 3
	Shared  int    // leading chunks that every chain has; default 2
	Own     int    // further chunks of each chain; default 4
	// Progress is told what happens, for people.
	Progress func(format string, args ...any)
}

const batchObjects = 4

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name  string
		value *int
		byDef int
		most  int
	}{
		{"workers", &c.Workers, 3, 32},
		{"scale", &c.Scale, 16, 32},
		{"chains", &c.Chains, 3, 1000},
		{"shared chunks", &c.Shared, 2, 64},
		{"own chunks", &c.Own, 4, 64},
	} {
		if *f.value == 0 {
			*f.value = f.byDef
		}
		if *f.value < 1 || *f.value > f.most {
			return c, fmt.Errorf("%w: %s %d must be 1 to %d", base.ErrInvalid, f.name, *f.value, f.most)
		}
	}
	if c.Workers < 2 {
		return c, fmt.Errorf("%w: workers %d must be at least 2: one is killed and the others read its keys", base.ErrInvalid, c.Workers)
	}
	if _, err := Llama31(c.Scale); err != nil {
		return c, err
	}
	if c.Program == "" {
		p, err := os.Executable()
		if err != nil {
			return c, fmt.Errorf("demo: find this program: %w", err)
		}
		c.Program = p
	}
	if c.Progress == nil {
		c.Progress = func(string, ...any) {}
	}
	return c, nil
}

// PoolBytes is the size of a pool that holds everything the demonstration stores,
// with a killed worker's regions left in it.
func (c Config) PoolBytes() (uint64, error) {
	c, err := c.withDefaults()
	if err != nil {
		return 0, err
	}
	return uint64(c.Workers+1)*c.regionBytes()*2 + 64<<20, nil
}

// regionBytes holds a worker's chains and leaf lists.
func (c Config) regionBytes() uint64 {
	s, _ := Llama31(c.Scale)
	objects := uint64(c.Chains * (c.Shared + c.Own))           //nolint:gosec // positive
	return objects * (uint64(s.ChunkBytes())*65/64 + 4096) / 2 //nolint:gosec // positive; grows by expansion
}

// WorkerRow is one worker's part.
type WorkerRow struct {
	Worker int   `json:"worker"`
	PID    int   `json:"pid"`
	Killed bool  `json:"killed"`
	Stored Tally `json:"stored"`
	Loaded Tally `json:"loaded"`
	// OfKilled is what it read of the killed worker's acknowledged objects.
	OfKilled Tally `json:"of_killed"`
}

// Result is the demonstration's outcome.
type Result struct {
	Model       string      `json:"model"`
	ObjectBytes int         `json:"object_bytes"`
	Rows        []WorkerRow `json:"workers"`
	// KilledAcknowledged counts the objects whose store the killed worker had been
	// told of; all of them must be readable.
	KilledAcknowledged int      `json:"killed_acknowledged"`
	WrongBytes         int      `json:"wrong_bytes"`
	OK                 bool     `json:"ok"`
	Problems           []string `json:"problems"`
}

// Run runs the demonstration against a server. A Result with Problems is no error:
// err says that it could not be run.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	shape, err := Llama31(cfg.Scale)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r := &run{cfg: cfg, result: &Result{
		Model:       fmt.Sprintf("Llama-3.1-8B, %d of 32 layers, bf16, chunks of %d tokens", shape.Layers, shape.ChunkTokens),
		ObjectBytes: shape.ChunkBytes(), Rows: make([]WorkerRow, cfg.Workers),
	}}
	defer r.end()
	for i := range cfg.Workers {
		p, err := startWorker(ctx, cfg.Program, Options{
			Server: cfg.Server, Index: i, Scale: cfg.Scale, RegionBytes: cfg.regionBytes(), Batch: batchObjects,
		})
		if err != nil {
			return nil, err
		}
		r.workers = append(r.workers, p)
		r.result.Rows[i] = WorkerRow{Worker: i, PID: p.PID()}
	}
	if err := r.steps(); err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	r.judge()
	return r.result, nil
}

type run struct {
	cfg     Config
	workers []*process
	result  *Result
	acked   []Chain // of the killed worker
}

func (r *run) end() {
	for _, p := range r.workers {
		p.End()
	}
}

func (r *run) steps() error {
	for _, p := range r.workers {
		if _, err := p.total(); err != nil {
			return err
		}
	}
	r.cfg.Progress("%d workers are connected", len(r.workers))
	if err := r.each(r.workers, "store", r.chainsOf, func(row *WorkerRow, t Tally) { row.Stored.add(t) }); err != nil {
		return err
	}
	r.cfg.Progress("every worker has stored its chains")
	all := func(int) []Chain {
		var out []Chain
		for i := range r.workers {
			out = append(out, r.chainsOf(i)...)
		}
		return out
	}
	if err := r.each(r.workers, "load", all, func(row *WorkerRow, t Tally) { row.Loaded.add(t) }); err != nil {
		return err
	}
	r.cfg.Progress("every worker has read the chains of all")
	if err := r.killOne(); err != nil {
		return err
	}
	r.cfg.Progress("worker %d was killed while it stored; %d more chains of it are acknowledged", 0, len(r.acked))
	survivors := r.workers[1:]
	want := append(append([]Chain{}, r.chainsOf(0)...), r.acked...)
	if err := r.each(survivors, "load", func(int) []Chain { return want },
		func(row *WorkerRow, t Tally) { row.OfKilled.add(t) }); err != nil {
		return err
	}
	r.cfg.Progress("the others have read what it had stored")
	for _, p := range survivors {
		if err := p.quit(); err != nil {
			return err
		}
	}
	return nil
}

// chainsOf are the chains that worker i stores first.
func (r *run) chainsOf(i int) []Chain {
	out := make([]Chain, r.cfg.Chains)
	for c := range out {
		out[c] = Chain{ID: i*1_000_000 + c, Shared: r.cfg.Shared, Own: r.cfg.Own}
	}
	return out
}

// each gives an order to workers at once and waits for all of them.
func (r *run) each(workers []*process, do string, chains func(int) []Chain, take func(*WorkerRow, Tally)) error {
	errs := make([]error, len(workers))
	tallies := make([]Tally, len(workers))
	var wait sync.WaitGroup
	for i, p := range workers {
		wait.Go(func() { tallies[i], errs[i] = p.do(order{Do: do, Chains: chains(p.index)}) })
	}
	wait.Wait()
	for i, p := range workers {
		take(&r.result.Rows[p.index], tallies[i])
	}
	return errors.Join(errs...)
}

// killOne kills worker 0 with SIGKILL after it has acknowledged some of a long order.
func (r *run) killOne() error {
	victim := r.workers[0]
	row := &r.result.Rows[0]
	more := make([]Chain, 64)
	for i := range more {
		more[i] = Chain{ID: 500_000 + i, Shared: r.cfg.Shared, Own: 1}
	}
	if err := victim.Send(order{Do: "store", Chains: more}); err != nil {
		return err
	}
	take := func() bool {
		t, err := victim.next()
		if err != nil || t.Done < 0 {
			return false
		}
		for _, c := range more {
			if c.ID == t.Chain {
				r.acked = append(r.acked, c)
			}
		}
		row.Stored.add(t)
		return true
	}
	for range 3 {
		if !take() {
			return victim.failure(errors.New("it should have been storing"))
		}
	}
	if err := victim.Kill(); err != nil {
		return fmt.Errorf("demo: kill worker 0: %w", err)
	}
	for take() { // lines that it had written before
	}
	victim.Reap()
	row.Killed = true
	return nil
}

// judge says what is wrong with the result.
func (r *run) judge() {
	res := r.result
	per := r.cfg.Shared + r.cfg.Own
	mine := r.cfg.Chains*r.cfg.Own + r.cfg.Shared
	res.KilledAcknowledged = r.cfg.Chains*r.cfg.Own + r.cfg.Shared + len(r.acked)
	problem := func(format string, args ...any) { res.Problems = append(res.Problems, fmt.Sprintf(format, args...)) }
	for i, row := range res.Rows {
		res.WrongBytes += row.Loaded.WrongBytes + row.OfKilled.WrongBytes
		if got := row.Stored.Objects + row.Stored.Already; !row.Killed && got != r.cfg.Chains*per {
			problem("worker %d stored %d objects or found them there, expected %d", i, got, r.cfg.Chains*per)
		}
		if row.Stored.Objects > mine+2*len(r.acked) {
			problem("worker %d stored %d objects, at most %d are new: duplicates were kept", i, row.Stored.Objects, mine+2*len(r.acked))
		}
		if want := r.cfg.Workers * r.cfg.Chains * per; row.Loaded.Objects != want {
			problem("worker %d loaded %d of %d objects (%d misses, %d failed)", i, row.Loaded.Objects, want, row.Loaded.Misses, row.Loaded.Failed)
		}
		want := r.cfg.Chains*per + len(r.acked)*(r.cfg.Shared+1)
		if !row.Killed && row.OfKilled.Objects != want {
			problem("worker %d read %d of the killed worker's %d acknowledged objects (%d misses, %d failed)",
				i, row.OfKilled.Objects, want, row.OfKilled.Misses, row.OfKilled.Failed)
		}
	}
	if res.WrongBytes > 0 {
		problem("%d wrong bytes", res.WrongBytes)
	}
	res.OK = len(res.Problems) == 0
}
