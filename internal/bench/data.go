package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func init() { benches["data"] = runData }

// dataSizes is how much the transfer benchmark does.
type dataSizes struct {
	objects []objectSize
	media   []string
	batch   int
	rounds  int // after one that is not counted: it touches all memory
	probe   int // keys of a probed batch
	turns   int // of probes, Python and Go by turns
	probes  int // each turn
}

// objectSize is one size of objects, with how many batches go through the pool, and the
// parts of memcpy's speed that are wanted without and with checksums.
type objectSize struct {
	bytes        int
	batches      int
	plain, check float64
}

func runData(ctx context.Context, o Options) (*Report, error) {
	s := dataSizes{
		objects: []objectSize{{2 << 20, 4, 0.95, 0.80}, {256 << 10, 16, 0.90, 0.75}, {64 << 10, 48, 0.75, 0.65}},
		media:   []string{"cpu", "cxl"}, batch: 32, rounds: 8, probe: 512, turns: 12, probes: 250,
	}
	if o.Quick {
		s.rounds, s.turns, s.probes = 1, 4, 100
		s.objects[0].batches, s.objects[1].batches, s.objects[2].batches = 3, 5, 12
	}
	return s.run(ctx, o)
}

// overheadTarget is what Python may add to a batch of packed keys.
const overheadTarget = 20 * time.Microsecond

func (s dataSizes) run(ctx context.Context, o Options) (_ *Report, err error) {
	python, err := findPython(ctx)
	if err != nil {
		return nil, err
	}
	o.Progress("data: %s", python)
	r := NewReport("data")
	var largest uint64
	for _, size := range s.objects {
		largest = max(largest, uint64(size.bytes)*uint64(s.batch*(size.batches+1))) //nolint:gosec // positive
	}
	var at serverReady
	server, err := startPart(ctx, "server", serverOptions{CPUBytes: 4*largest + 256<<20, CXLBytes: largest + largest/4 + 96<<20}, &at)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	script, err := python.start(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, script.close()) }()
	for _, medium := range s.media {
		for _, sums := range []client.Switch{client.Off, client.On} {
			for _, size := range s.objects {
				if err := s.transfers(ctx, o, r, script, at.Server, medium, sums, size); err != nil {
					return nil, err
				}
			}
		}
	}
	return r, s.overhead(ctx, o, r, script, at.Server)
}

// transferTimes are the durations of one kind of call by its name.
type transferTimes map[string][]time.Duration

func (t transferTimes) add(o transferTimes) {
	for name, d := range o {
		t[name] = append(t[name], d...)
	}
}

// transfers measures one size in one medium from Python, then from Go, each beside its
// own copies.
func (s dataSizes) transfers(ctx context.Context, o Options, r *Report, script *process, server, medium string, sums client.Switch, size objectSize) error {
	o.Progress("data: %s, %s, checksums %v", medium, sizeName(size.bytes), sums)
	python, goTimes := transferTimes{}, transferTimes{}
	// One after the other: the pools of both would not fit beside each other.
	err := script.call(map[string]any{
		"do": "open transfers", "server": server, "medium": medium, "checksums": sums == client.On,
		"object_bytes": size.bytes, "batch": s.batch, "batches": size.batches,
	}, nil)
	if err != nil {
		return err
	}
	for i := range s.rounds + 1 {
		t := transferTimes{}
		if err := script.call(map[string]any{"do": "measure"}, &t); err != nil {
			return err
		}
		if i > 0 {
			python.add(t)
		}
	}
	if err := script.call(map[string]any{"do": "close"}, nil); err != nil {
		return err
	}
	g, err := openTransfers(ctx, server, medium, sums, size, s.batch)
	if err != nil {
		return err
	}
	for i := range s.rounds + 1 {
		t, err := g.measure(ctx)
		if err != nil {
			return errors.Join(err, g.close())
		}
		if i > 0 {
			goTimes.add(t)
		}
	}
	if err := g.close(); err != nil {
		return err
	}
	wanted := size.plain
	if sums == client.On {
		wanted = size.check
	}
	label := fmt.Sprintf("%s, %s, checksums %v", sizeName(size.bytes), medium, sums)
	bytes := float64(size.bytes)
	for _, call := range []string{"store", "load"} {
		addSpeed(o, r, fmt.Sprintf("%s %dx %s, Python", call, s.batch, label), python, call, bytes*float64(s.batch), wanted)
		addSpeed(o, r, fmt.Sprintf("%s 1x %s, Python", call, label), python, call+" one", bytes, 0)
		addSpeed(o, r, fmt.Sprintf("%s %dx %s, Go", call, s.batch, label), goTimes, call, bytes*float64(s.batch), wanted)
		addSpeed(o, r, fmt.Sprintf("%s 1x %s, Go", call, label), goTimes, call+" one", bytes, 0)
	}
	return nil
}

// addSpeed adds a row of a call beside its memcpy; wanted 0 is no target.
func addSpeed(o Options, r *Report, name string, t transferTimes, call string, bytes, wanted float64) {
	mine, reference := median(t[call]), median(t[call+" memcpy"])
	speed := func(d time.Duration) float64 { return bytes / float64(max(d.Nanoseconds(), 1)) } // bytes a ns are GB/s
	row := r.Add(name, speed(mine), "GB/s", speed(reference))
	if wanted > 0 {
		row.Want(fmt.Sprintf(">= %.0f %% of memcpy", 100*wanted), row.Ratio >= wanted)
		o.Progress("%s: %s: ratio %.2f; by tenths of the run %s us, memcpy %s us", r.Bench, name, row.Ratio, tenths(t[call]), tenths(t[call+" memcpy"]))
	}
}

// overhead measures what Python adds to a batch of keys above the Go client, by turns.
func (s dataSizes) overhead(ctx context.Context, o Options, r *Report, script *process, server string) (err error) {
	o.Progress("data: probes of %d keys from Python and from Go", s.probe)
	var packed hexKeys
	if err := script.call(map[string]any{"do": "open keys", "server": server, "count": s.probe}, &packed); err != nil {
		return err
	}
	c, err := openOpaque(ctx, server)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := closing()
		defer cancel()
		err = errors.Join(err, c.Close(ctx))
	}()
	times := map[string][]time.Duration{}
	for range s.turns {
		for _, form := range []string{"packed", "str"} {
			var t []time.Duration
			if err := script.call(map[string]any{"do": "probe", "form": form, "rounds": s.probes}, &t); err != nil {
				return err
			}
			times[form] = append(times[form], t...)
		}
		free, err := goProbes(ctx, c, packed.keys, s.probes)
		if err != nil {
			return err
		}
		bound, err := onOneThread(func() ([]time.Duration, error) { return goProbes(ctx, c, packed.keys, s.probes) })
		if err != nil {
			return err
		}
		times["go"], times["thread"] = append(times["go"], free...), append(times["thread"], bound...)
	}
	if err := script.call(map[string]any{"do": "close"}, nil); err != nil {
		return err
	}
	goes, python, text := median(times["go"]), median(times["packed"]), median(times["str"])
	r.Add(fmt.Sprintf("probe %d keys, Go client, p50", s.probe), microseconds(goes), "us", 0)
	r.Add(fmt.Sprintf("probe %d keys, Go client bound to a thread as calls from C are, p50", s.probe), microseconds(median(times["thread"])), "us", microseconds(goes))
	r.Add(fmt.Sprintf("probe %d packed keys, Python, p50", s.probe), microseconds(python), "us", microseconds(goes))
	r.Add(fmt.Sprintf("Python overhead of a batch of %d packed keys", s.probe), microseconds(python-goes), "us", 0).
		Want("< 20 us", python-goes < overheadTarget)
	r.Add(fmt.Sprintf("exists of %d str keys, MaruHandler, p50", s.probe), microseconds(text), "us", microseconds(goes))
	r.Add(fmt.Sprintf("Python overhead of a batch of %d str keys", s.probe), microseconds(text-goes), "us", 0)
	o.Progress("data: p50 by tenths of the run: Go %s us, packed %s us, str %s us", tenths(times["go"]), tenths(times["packed"]), tenths(times["str"]))
	return nil
}

// goProbes times probes of the Go client.
func goProbes(ctx context.Context, c *client.Client, packed hot.Keys, count int) ([]time.Duration, error) {
	verdicts := make([]byte, packed.Len())
	times := make([]time.Duration, 0, count)
	for range count {
		began := time.Now()
		hits, err := c.Probe(ctx, client.ProbeQuery{Keys: packed}, verdicts)
		times = append(times, time.Since(began))
		if err != nil {
			return nil, err
		}
		if hits != packed.Len() {
			return nil, fmt.Errorf("%w: %d of %d probed keys hit", base.ErrInternal, hits, packed.Len())
		}
	}
	return times, nil
}

// onOneThread runs f as a call from C runs: its goroutine is bound to the caller's
// thread, so that each wait for the network hands over between two threads.
func onOneThread(f func() ([]time.Duration, error)) (times []time.Duration, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		times, err = f()
	}()
	<-done
	return times, err
}
