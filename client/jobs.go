package client

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// transfers are the copy threads and the queue of submitted jobs.
// Locks: mu, held for moments only.
type transfers struct {
	c     *Client
	queue chan *job
	// device jobs wait for the engine's stream and for the link: they have threads of their
	// own, so that neither host copies nor the other direction waits behind them.
	deviceStores, deviceLoads chan *job
	deviceOnce                sync.Once
	help                      chan *group
	out                       atomic.Int64 // jobs that JobResult has not taken
	event                     int          // eventfd
	wg                        sync.WaitGroup
	quit                      chan struct{}

	mu struct {
		sync.Mutex
		last     JobID
		jobs     map[JobID]*job
		finished []JobID // not handed out by Completed yet
		running  int
		idle     chan struct{} // closed when running is 0, while somebody waits
		stopped  bool
	}
}

// job is a submitted transfer. Its arenas hold copies of the caller's lists.
type job struct {
	id     JobID
	stores []StoreItem
	loads  []LoadItem
	runs   [][]byte
	blocks []uint32
	codes  []base.Code
	after  after
	copied bool // nothing reads the memory of stores any more
	done   bool
	lookup bool // not a transfer
}

var jobs = sync.Pool{New: func() any { return new(job) }}

func (t *transfers) start(c *Client) error {
	t.c = c
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.event = -1
		return fmt.Errorf("%w: eventfd: %w; raise ulimit -n", base.ErrLimit, err)
	}
	t.event = fd
	t.queue = make(chan *job, c.cfg.QueueJobs)
	t.help = make(chan *group, c.cfg.CopyThreads-1)
	t.deviceStores, t.deviceLoads = make(chan *job, c.cfg.QueueJobs), make(chan *job, c.cfg.QueueJobs)
	t.quit = make(chan struct{})
	t.mu.jobs = map[JobID]*job{}
	for range c.cfg.CopyThreads {
		t.wg.Go(t.thread)
	}
	return nil
}

// deviceThreads is how many jobs of one direction are under way at once: the second asks
// the server while the first is copied.
const deviceThreads = 2

// startDevice starts the threads of device jobs.
func (t *transfers) startDevice() {
	t.deviceOnce.Do(func() {
		for _, queue := range []chan *job{t.deviceStores, t.deviceLoads} {
			for range deviceThreads {
				t.wg.Go(func() {
					for {
						select {
						case j := <-queue:
							t.runJob(j)
						case <-t.quit:
							return
						}
					}
				})
			}
		}
	})
}

// thread is one copy thread: it runs jobs and helps with the copies of others.
func (t *transfers) thread() {
	w := new(worker)
	for {
		select {
		case g := <-t.help:
			g.run(w)
			g.drop()
		case j := <-t.queue:
			t.runJob(j)
		case <-t.quit:
			return
		}
	}
}

func (t *transfers) runJob(j *job) {
	if len(j.stores) > 0 {
		t.c.store(t.c.ctx, j.stores, j.codes, &j.after, func() {
			t.mu.Lock()
			j.copied = true
			t.signalLocked()
			t.mu.Unlock()
		})
	} else {
		t.c.load(t.c.ctx, j.loads, j.codes, &j.after)
	}
	j.after.forget()
	t.mu.Lock()
	j.done = true
	t.mu.finished = append(t.mu.finished, j.id)
	t.mu.running--
	if t.mu.running == 0 && t.mu.idle != nil {
		close(t.mu.idle)
		t.mu.idle = nil
	}
	t.signalLocked()
	t.mu.Unlock()
}

// signalLocked makes the descriptor readable.
func (t *transfers) signalLocked() {
	if t.event < 0 {
		return
	}
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(t.event, one[:]) // full means readable already
}

// drain waits until every submitted job is done, or ctx is: it returns false then.
func (t *transfers) drain(ctx context.Context) bool {
	t.mu.Lock()
	t.mu.stopped = true
	var wait chan struct{}
	if t.mu.running > 0 {
		t.mu.idle = make(chan struct{})
		wait = t.mu.idle
	}
	t.mu.Unlock()
	if wait == nil {
		return true
	}
	select {
	case <-wait:
		return true
	case <-ctx.Done():
		return false
	}
}

// stop ends the threads. Jobs that still wait are not run; those that run are waited for.
func (t *transfers) stop() {
	if t.quit == nil {
		return
	}
	t.mu.Lock()
	t.mu.stopped = true
	t.mu.Unlock()
	close(t.quit)
	t.wg.Wait()
	t.quit = nil
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.event >= 0 {
		_ = unix.Close(t.event)
		t.event = -1
	}
}

// SubmitStore queues a Store. The items are copied; the memory behind them must stay
// until the job is done. Errors: ErrBusy when QueueJobs are out, ErrInvalid for an empty
// list, ErrClosed.
func (c *Client) SubmitStore(items []StoreItem) (JobID, error) { return c.SubmitStoreAfter(items, 0) }

// SubmitStoreAfter is SubmitStore of blocks that the engine writes in stream s, as
// StoreAfter. It does not wait for the device.
func (c *Client) SubmitStoreAfter(items []StoreItem, s Stream) (JobID, error) {
	if err := c.enter(context.Background()); err != nil {
		return 0, err
	}
	defer c.leave()
	a, err := c.order(s, func(i int) LayoutID { return items[i].Layout }, len(items))
	if err != nil {
		return 0, err
	}
	j := jobs.Get().(*job)
	j.after = a
	for i := range items {
		it := items[i]
		it.Runs, it.Blocks = j.keep(it.Runs, it.Blocks)
		j.stores = append(j.stores, it)
	}
	return c.transfers.submit(j, len(items))
}

// SubmitLoad queues a Load, as SubmitStore.
func (c *Client) SubmitLoad(items []LoadItem) (JobID, error) { return c.SubmitLoadAfter(items, 0) }

// SubmitLoadAfter is SubmitLoad into blocks that the engine uses in stream s, as
// LoadAfter. It does not wait for the device.
func (c *Client) SubmitLoadAfter(items []LoadItem, s Stream) (JobID, error) {
	if err := c.enter(context.Background()); err != nil {
		return 0, err
	}
	defer c.leave()
	a, err := c.order(s, func(i int) LayoutID { return items[i].Layout }, len(items))
	if err != nil {
		return 0, err
	}
	j := jobs.Get().(*job)
	j.after = a
	for i := range items {
		it := items[i]
		it.Runs, it.Blocks = j.keep(it.Runs, it.Blocks)
		j.loads = append(j.loads, it)
	}
	return c.transfers.submit(j, len(items))
}

// keep copies lists into the job's arenas. An arena that grows leaves the older slices
// on its old array, which is as good.
func (j *job) keep(runs [][]byte, blocks []uint32) ([][]byte, []uint32) {
	r, b := len(j.runs), len(j.blocks)
	j.runs = append(j.runs, runs...)
	j.blocks = append(j.blocks, blocks...)
	return j.runs[r:len(j.runs):len(j.runs)], j.blocks[b:len(j.blocks):len(j.blocks)]
}

func (j *job) put() {
	j.after.forget()
	clear(j.stores)
	clear(j.loads)
	clear(j.runs)
	*j = job{stores: j.stores[:0], loads: j.loads[:0], runs: j.runs[:0], blocks: j.blocks[:0], codes: j.codes[:0]}
	jobs.Put(j)
}

func (t *transfers) submit(j *job, n int) (JobID, error) {
	if n == 0 {
		j.put()
		return 0, fmt.Errorf("%w: a job without items", base.ErrInvalid)
	}
	if cap(j.codes) < n {
		j.codes = make([]base.Code, n)
	}
	j.codes = j.codes[:n]
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.stopped {
		j.put()
		return 0, fmt.Errorf("%w: the client", base.ErrClosed)
	}
	if int(t.out.Load()) >= cap(t.queue) {
		j.put()
		return 0, fmt.Errorf("%w: %d jobs are out (setting QueueJobs); take the results of finished ones", base.ErrBusy, cap(t.queue))
	}
	t.mu.last++
	j.id = t.mu.last
	t.mu.jobs[j.id] = j
	t.mu.running++
	t.out.Add(1)
	queue := t.queue
	if j.after.device != nil {
		queue = t.deviceStores
		if len(j.loads) > 0 {
			queue = t.deviceLoads
		}
	}
	queue <- j // never full: jobs that are out are counted
	return j.id, nil
}

// JobCopied reports whether the memory of a job's items is the caller's again: a store
// has read it, though its objects may not be published yet, or the job is finished.
// Errors: ErrNotFound for a job that is unknown or was forgotten.
func (c *Client) JobCopied(id JobID) (bool, error) {
	t := &c.transfers
	t.mu.Lock()
	defer t.mu.Unlock()
	j := t.mu.jobs[id]
	if j == nil {
		return false, fmt.Errorf("%w: job %d", base.ErrNotFound, id)
	}
	return j.copied || j.done, nil
}

// EventFD returns a descriptor that is readable while finished jobs wait for Completed; it
// also becomes readable when JobCopied of a store turns true, until the next Completed.
// Ownership: the client's, until Close; -1 after it.
func (c *Client) EventFD() int {
	c.transfers.mu.Lock()
	defer c.transfers.mu.Unlock()
	return c.transfers.event
}

// Completed hands out finished jobs, each once, and clears the descriptor when none is left.
func (c *Client) Completed(dst []JobID) int {
	t := &c.transfers
	t.mu.Lock()
	defer t.mu.Unlock()
	n := copy(dst, t.mu.finished)
	t.mu.finished = t.mu.finished[:copy(t.mu.finished, t.mu.finished[n:])]
	if len(t.mu.finished) == 0 && t.event >= 0 {
		var buf [8]byte
		_, _ = unix.Read(t.event, buf[:]) // empty is as good
	}
	return n
}

// JobResult copies a finished job's codes out and forgets the job. done is false while
// it is not finished; then nothing is copied. Errors: ErrNotFound for a job that is
// unknown or was forgotten, ErrInvalid when codes is too short.
func (c *Client) JobResult(id JobID, codes []base.Code) (done bool, err error) {
	t := &c.transfers
	t.mu.Lock()
	defer t.mu.Unlock()
	j := t.mu.jobs[id]
	switch {
	case j == nil:
		return false, fmt.Errorf("%w: job %d", base.ErrNotFound, id)
	case !j.done:
		return false, nil
	case len(codes) < len(j.codes):
		return true, fmt.Errorf("%w: %d codes for %d items", base.ErrInvalid, len(codes), len(j.codes))
	}
	copy(codes, j.codes)
	delete(t.mu.jobs, id)
	for i, f := range t.mu.finished {
		if f == id { // asked for before Completed handed it out
			t.mu.finished = append(t.mu.finished[:i], t.mu.finished[i+1:]...)
			break
		}
	}
	if !j.lookup {
		t.out.Add(-1)
	}
	j.put()
	return true, nil
}
