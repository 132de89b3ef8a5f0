package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/node"
)

// WorkerCommand is the first argument of a worker process.
const WorkerCommand = "torture-worker"

// workerOptions of a process, on its command line as one JSON argument.
type workerOptions struct {
	Server    string `json:"server"`
	Process   uint32 `json:"process"` // number of the process, never used again in a run
	Seed      uint64 `json:"seed"`
	Keys      uint32 `json:"keys"`
	PageBytes int    `json:"page_bytes"`
	Pool      string `json:"pool"` // its path, as it is in a process's maps
	// RegionBytes a region; the session takes regions until the pool is full.
	RegionBytes uint64        `json:"region_bytes"`
	Checksums   client.Switch `json:"checksums"`
	// Tidy workers live as long as the run: they leave no views behind when they reopen.
	Tidy bool `json:"tidy"`
}

const (
	workerThreads = 2
	// callTimeout bounds every call; a call that takes longer is stuck.
	callTimeout = 20 * time.Second
	openEvery   = 100 * time.Millisecond
	// maxLeft bounds the sessions of a process that ended with views out.
	maxLeft      = 2
	maxViews     = 12 // of a thread
	beatInterval = 200 * time.Millisecond
)

// worker is the body of one worker process.
type worker struct {
	opt   workerOptions
	say   *speaker
	count atomic.Uint32 // of generations

	// mu is held for reading by every call, for writing by who changes the client.
	mu struct {
		sync.RWMutex
		client *client.Client
	}
	threads [workerThreads]*thread
	left    []heldView // of sessions that ended with views out; thread 0's
	lefts   int
	untold  bool  // a daemon was away when a session ended
	forked  []int // thread 0's

	resting atomic.Bool
	rested  sync.WaitGroup
	stop    context.CancelFunc
}

// thread makes calls, one after the other.
type thread struct {
	w     *worker
	index int
	rng   *rand.Rand
	views []heldView
	pins  []base.Key
	codes []base.Code
	out   []client.View
	bufs  [][]byte
}

// heldView is a view that is out.
type heldView struct {
	client *client.Client
	view   client.View
	key    uint32
	gen    generation
	until  time.Time
}

// RunWorker is the body of a worker process: it does what its seed says, and obeys orders
// from in until quit or the end of in.
func RunWorker(ctx context.Context, optionsJSON string, in io.Reader, out io.Writer) error {
	w := &worker{}
	if err := json.Unmarshal([]byte(optionsJSON), &w.opt); err != nil {
		return fmt.Errorf("%w: options of a torture worker: %w", base.ErrInvalid, err)
	}
	ctx, w.stop = context.WithCancel(ctx)
	defer w.stop()
	w.say = newSpeaker(w.opt.Process, out)
	if err := w.open(ctx); err != nil {
		return err
	}
	w.say.ready()
	var threads, beats sync.WaitGroup
	for i := range w.threads {
		t := &thread{w: w, index: i, rng: rand.New(rand.NewPCG(w.opt.Seed, uint64(i))), codes: make([]base.Code, 8), out: make([]client.View, 8)} //nolint:gosec // a script, no secret
		for range 8 {
			t.bufs = append(t.bufs, make([]byte, w.opt.PageBytes))
		}
		w.threads[i] = t
	}
	w.rested.Add(workerThreads)
	for _, t := range w.threads {
		threads.Go(func() { t.run(ctx) })
	}
	beating, stopBeats := context.WithCancel(ctx)
	beats.Go(func() { w.beat(beating) })
	err := w.obey(ctx, in)
	w.stop()
	threads.Wait()
	stopBeats()
	beats.Wait()
	return errors.Join(err, w.end())
}

func (w *worker) beat(ctx context.Context) {
	tick := time.NewTicker(beatInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.say.beat()
		}
	}
}

// end closes the session in order.
func (w *worker) end() error {
	for _, t := range w.threads {
		t.releaseViews()
	}
	w.reapForked()
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.mu.client.Close(ctx)
	w.say.beat()
	return err
}

func (w *worker) obey(ctx context.Context, in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() && ctx.Err() == nil {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("%w: order of a torture worker: %w", base.ErrInvalid, err)
		}
		a := answerLine{Order: o.Do}
		switch o.Do {
		case "quit":
			return nil
		case "rest":
			// The threads end their calls and give their views back.
			w.resting.Store(true)
			w.rested.Wait()
			w.checkLeft()
			a.Left, a.Untold = w.lefts, w.untold
		case "store", "load":
			if !w.resting.Load() {
				a.Error = "give the order rest first"
				break
			}
			w.check(ctx, o, &a)
		default:
			a.Error = fmt.Sprintf("order %q is unknown", o.Do)
		}
		w.say.answer(a)
	}
	return lines.Err()
}

// open opens a session and repeats it until it works.
func (w *worker) open(ctx context.Context) error {
	for {
		c, err := w.openOnce(ctx)
		if err == nil {
			w.mu.client = c
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		slog.Info("opening a session failed", "error", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(openEvery):
		}
	}
}

func (w *worker) openOnce(ctx context.Context) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return client.Open(ctx, client.Config{
		ServerAddress: w.opt.Server, InstanceID: fmt.Sprintf("torture-%d", w.opt.Process),
		Opaque: true, PageBytes: uint64(w.opt.PageBytes), RegionBytes: w.opt.RegionBytes, //nolint:gosec // positive
		Checksums: w.opt.Checksums, WriteOrder: []base.Medium{base.MediumCXL}, Prefault: client.Off,
		Logger: slog.Default(),
	})
}

// reopen closes the session and opens another one. Views that are out then end, or, now
// and then, stay to the end of the process.
func (w *worker) reopen(ctx context.Context, rng *rand.Rand) {
	w.mu.Lock()
	defer w.mu.Unlock()
	leave := !w.opt.Tidy && w.lefts < maxLeft && rng.IntN(3) == 0
	kept := 0
	for _, t := range w.threads {
		if leave {
			kept += len(t.views)
			w.left = append(w.left, t.views...)
			t.views = nil
		} else {
			t.releaseViews()
		}
		t.pins = nil
	}
	closing, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	began := time.Now()
	err := w.mu.client.Close(closing)
	w.slow("close", began)
	if err != nil {
		// Nobody was told. The regions are unmapped, and go back when this process ends.
		slog.Info("closing a session", "error", err)
		w.untold = true
		w.say.say(nil, 'U')
	}
	if kept > 0 {
		w.lefts++
		w.say.add(func(c *Counts) { c.Left++ })
	}
	w.say.add(func(c *Counts) { c.Reopens++ })
	_ = w.open(ctx) // fails only when the process ends
}

// slow says so when a call outlived its deadline by far, the process not having been stopped.
func (w *worker) slow(call string, began time.Time) {
	if took := time.Since(began); took > 2*callTimeout {
		w.say.wrong("%s took %v", call, took)
	}
}

// checkLeft reads the views again that sessions of before have left.
func (w *worker) checkLeft() {
	for i := range w.left {
		w.checkView(&w.left[i])
	}
}

func (w *worker) checkView(v *heldView) {
	g, wrong := inspect(v.view.Bytes, v.key)
	w.say.add(func(c *Counts) { c.ViewChecks++ })
	if wrong == 0 && g == v.gen {
		return
	}
	w.say.add(func(c *Counts) { c.WrongBytes += uint64(max(wrong, 1)) }) //nolint:gosec // positive
	w.say.wrong("view of key %d generation %x, region %d page %d, of session %v shows generation %x with %d wrong bytes",
		v.key, v.gen, v.view.Region, v.view.Index, v.client.Session(), g, wrong)
}

// check stores or loads a range of keys, at rest.
func (w *worker) check(ctx context.Context, o order, a *answerLine) {
	t := w.threads[0]
	for k := o.First; k < o.First+o.Count && ctx.Err() == nil; k++ {
		switch o.Do {
		case "store":
			if t.store(ctx, []uint32{k}) > 0 {
				a.Stored++
			}
		case "load":
			a.Hits += t.load(ctx, []uint32{k})
		}
	}
}

// run makes calls until the order rest, then the end.
func (t *thread) run(ctx context.Context) {
	for ctx.Err() == nil && !t.w.resting.Load() {
		began := time.Now()
		what := t.step(ctx)
		t.w.slow(what, began)
		if !t.connected() {
			// Everything misses at once; the time is for what comes back.
			time.Sleep(10 * time.Millisecond)
		}
		if t.rng.IntN(4) == 0 {
			time.Sleep(time.Duration(t.rng.IntN(3000)) * time.Microsecond)
		}
	}
	t.w.mu.RLock()
	t.releaseViews()
	t.unpin(ctx)
	t.w.mu.RUnlock()
	t.w.rested.Done()
}

func (t *thread) connected() bool {
	t.w.mu.RLock()
	defer t.w.mu.RUnlock()
	return t.w.mu.client.Connected()
}

// pick draws distinct keys; low ones are drawn more often.
func (t *thread) pick(n int) []uint32 {
	out := make([]uint32, 0, n)
	for len(out) < n {
		most := t.w.opt.Keys
		if t.rng.IntN(2) == 0 {
			most = most/16 + 1
		}
		k := t.rng.Uint32N(most)
		for _, have := range out {
			if have == k {
				return out
			}
		}
		out = append(out, k)
	}
	return out
}

func (t *thread) step(ctx context.Context) string {
	// A session that ends while a daemon is away keeps its regions to the end of its process.
	if t.index == 0 && t.rng.IntN(3000) == 0 && (!t.w.opt.Tidy || t.connected()) {
		t.w.reopen(ctx, t.rng)
		return "reopen"
	}
	t.w.mu.RLock()
	defer t.w.mu.RUnlock()
	if t.index == 0 && t.rng.IntN(400) == 0 {
		t.w.checkLeft()
		t.w.reapForked()
	}
	if t.index == 0 && t.rng.IntN(2000) == 0 {
		t.w.fork(t.rng)
		return "fork"
	}
	t.tendViews()
	switch n := t.rng.IntN(100); {
	case n < 45:
		t.load(ctx, t.pick(1+t.rng.IntN(6)))
		return "load"
	case n < 60:
		t.retrieve(ctx, t.pick(1+t.rng.IntN(4)))
		return "retrieve"
	case n < 64:
		t.pin(ctx)
		return "pin"
	case n < 84:
		t.store(ctx, t.pick(1+t.rng.IntN(4)))
		return "store"
	case n < 90:
		t.storeInPlace(ctx)
		return "store in place"
	}
	t.delete(ctx, t.pick(1+t.rng.IntN(3)))
	return "delete"
}

func (t *thread) packed(keys []uint32) hot.Keys {
	var out hot.Keys
	for _, k := range keys {
		key, err := keyOf(k)
		if err != nil {
			t.w.say.wrong("key %d: %v", k, err)
			continue
		}
		out = hot.AppendKeys(out, []base.Key{key})
	}
	return out
}

// calling gives a call its deadline and says when it began.
func (t *thread) calling(ctx context.Context) (context.Context, context.CancelFunc, time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	return ctx, cancel, node.BootTime()
}

// callFailed reports an error of a call that no fault explains. It returns whether the
// call was made: if not, there are no codes.
func (t *thread) callFailed(ctx context.Context, call string, err error) bool {
	if err != nil && ctx.Err() == nil {
		t.w.say.wrong("%s: %v", call, err)
	}
	return err != nil
}
