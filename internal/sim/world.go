package sim

import (
	"container/heap"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Options of a run.
type Options struct {
	Seed  uint64
	Steps int   // actions of clients and faults; 0: 150
	Fault Fault // a planted error; NoFault in a real run
	// Trace, if set, is called with each event of the run.
	Trace func(line string)
}

// Result counts what happened in a run. Digest covers its trace: two runs of one seed
// have the same.
type Result struct {
	Seed            uint64        `json:"seed"`
	Steps           int           `json:"steps"`
	Events          int           `json:"events"`
	Virtual         time.Duration `json:"virtual_ns"`
	Digest          uint64        `json:"digest"`
	Stores          int           `json:"stores"`
	Unknown         int           `json:"unknown_commits"`
	Reads           int           `json:"reads"`
	ReadsDiscarded  int           `json:"reads_discarded"`
	Views           int           `json:"views"`
	Deletes         int           `json:"deletes"`
	Regions         int           `json:"regions"`
	ManagerRestarts int           `json:"rm_restarts"`
	ServerRestarts  int           `json:"server_restarts"`
	Kills           int           `json:"kills"`
	Pauses          int           `json:"pauses"`
	Closes          int           `json:"closes"`
	Left            int           `json:"left_with_views"`
	Listed          int           `json:"listed_pages"`
	Kept            int           `json:"kept_regions_given_back"`
}

// Add sums the counts of another run; seed and digest stay.
func (r *Result) Add(o Result) {
	r.Steps += o.Steps
	r.Events += o.Events
	r.Virtual += o.Virtual
	r.Stores += o.Stores
	r.Unknown += o.Unknown
	r.Reads += o.Reads
	r.ReadsDiscarded += o.ReadsDiscarded
	r.Views += o.Views
	r.Deletes += o.Deletes
	r.Regions += o.Regions
	r.ManagerRestarts += o.ManagerRestarts
	r.ServerRestarts += o.ServerRestarts
	r.Kills += o.Kills
	r.Pauses += o.Pauses
	r.Closes += o.Closes
	r.Left += o.Left
	r.Listed += o.Listed
	r.Kept += o.Kept
}

// Failure is a broken invariant.
type Failure struct {
	Seed      uint64
	At        time.Duration
	Invariant string
	Text      string
	Last      []string // the last events before it
}

// Error tells the seed, what broke, and the last events.
func (f *Failure) Error() string {
	return fmt.Sprintf("seed %d: %s broken at %v: %s\nlast events:\n  %s", f.Seed, f.Invariant, f.At, f.Text, strings.Join(f.Last, "\n  "))
}

// Run plays one seed. Errors: *Failure.
func Run(o Options) (Result, error) {
	if o.Steps <= 0 {
		o.Steps = 150
	}
	w := newWorld(o)
	w.play()
	w.result.Virtual, w.result.Digest = w.now, w.digest
	if w.failure != nil {
		return w.result, w.failure
	}
	return w.result, nil
}

// lastEvents is how many lines a failure shows.
const lastEvents = 50

// world is the state of one run.
type world struct {
	opt     Options
	rng     *rand.Rand
	now     time.Duration
	order   uint64
	queue   eventQueue
	rough   float64 // percent of the troubles of a step that happen
	faulty  bool    // the network and the programs have faults
	failure *Failure
	result  Result
	digest  uint64
	ring    []string
	events  int

	processes []*process // pid = index + 1
	memory    *memory
	mappings  []*mapping
	truth     truth
	acked     map[base.RegionID]base.Extent // allocations that the RM acknowledged
	extents   map[base.RegionID]regionAt    // every region that was ever given

	manager *managerActor
	server  *serverActor
	clients []*clientActor

	lastOrder base.CommitOrder
}

func newWorld(o Options) *world {
	w := &world{
		opt: o, rng: rand.New(rand.NewPCG(o.Seed, 0x6d617275)), faulty: true, digest: fnvOffset,
		acked: map[base.RegionID]base.Extent{}, extents: map[base.RegionID]regionAt{},
		truth: newTruth(), memory: newMemory(),
	}
	w.result.Seed, w.result.Steps = o.Seed, o.Steps
	return w
}

const fnvOffset = 0xcbf29ce484222325

// note records an event.
func (w *world) note(format string, args ...any) {
	line := fmt.Sprintf("%12v ", w.now) + fmt.Sprintf(format, args...)
	h := fnv.New64a()
	_, _ = h.Write([]byte(line))
	w.digest = w.digest*0x100000001b3 ^ h.Sum64()
	if len(w.ring) == lastEvents {
		w.ring = append(w.ring[:0], w.ring[1:]...)
	}
	w.ring = append(w.ring, line)
	if w.opt.Trace != nil {
		w.opt.Trace(line)
	}
}

// fail ends the run; the first failure counts.
func (w *world) fail(invariant, format string, args ...any) {
	if w.failure == nil {
		w.failure = &Failure{
			Seed: w.opt.Seed, At: w.now, Invariant: invariant, Text: fmt.Sprintf(format, args...),
			Last: append([]string(nil), w.ring...),
		}
	}
}

func (w *world) chance(percent float64) bool { return w.rng.Float64()*100 < percent }

// trouble is chance while there are faults.
func (w *world) trouble(percent float64) bool { return w.faulty && w.chance(percent) }

func (w *world) between(low, high time.Duration) time.Duration {
	return low + time.Duration(w.rng.Int64N(int64(high-low)+1))
}

func (w *world) id() (out [base.IDBytes]byte) {
	for i := 0; i < len(out); i += 8 {
		v := w.rng.Uint64()
		for j := range 8 {
			out[i+j] = byte(v >> (8 * j))
		}
	}
	return out
}

// process is one life of a program.
type process struct {
	name    string
	pid     int64
	ended   bool
	paused  bool
	backlog []*event // what waits for a stopped program
}

func (w *world) newProcess(name string) *process {
	p := &process{name: name, pid: int64(len(w.processes) + 1)}
	w.processes = append(w.processes, p)
	return p
}

func (w *world) byPID(pid int64) *process {
	if pid < 1 || pid > int64(len(w.processes)) {
		return nil
	}
	return w.processes[pid-1]
}

// end kills a program: its memory mappings go with it, its calls have no answers.
func (w *world) end(p *process) {
	p.ended, p.paused, p.backlog = true, false, nil
	kept := w.mappings[:0]
	for _, m := range w.mappings {
		if m.process != p {
			kept = append(kept, m)
		}
	}
	w.mappings = kept
}

func (w *world) pause(p *process, d time.Duration) {
	if p.ended || p.paused {
		return
	}
	w.result.Pauses++
	w.note("%s is stopped for %v", p.name, d)
	p.paused = true
	w.at(nil, d, func() { w.resume(p) })
}

func (w *world) resume(p *process) {
	if p.ended || !p.paused {
		return
	}
	w.note("%s goes on", p.name)
	p.paused = false
	for _, e := range p.backlog {
		e.at, e.order = w.now, w.next()
		heap.Push(&w.queue, e)
	}
	p.backlog = nil
}

type event struct {
	at      time.Duration
	order   uint64
	process *process // nil: the world's own
	run     func()
}

type eventQueue []*event

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].order < q[j].order
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(*event)) } //nolint:forcetypeassert // only events
func (q *eventQueue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return e
}

func (w *world) next() uint64 { w.order++; return w.order }

// at runs f in a process after d, unless that life has ended by then.
func (w *world) at(p *process, d time.Duration, f func()) {
	heap.Push(&w.queue, &event{at: w.now + d, order: w.next(), process: p, run: f})
}

// advance runs events until done says so, the time is up, or something broke.
func (w *world) advance(until time.Duration, done func() bool) {
	for w.failure == nil && len(w.queue) > 0 && w.queue[0].at <= until {
		if done != nil && done() {
			return
		}
		e := heap.Pop(&w.queue).(*event) //nolint:forcetypeassert // only events
		w.now = max(w.now, e.at)
		if p := e.process; p != nil {
			if p.ended {
				continue
			}
			if p.paused {
				p.backlog = append(p.backlog, e)
				continue
			}
		}
		w.events++
		w.guard(e.run)
		if w.failure == nil {
			w.guard(w.check)
		}
	}
	if w.failure == nil && (done == nil || !done()) {
		w.now = max(w.now, until)
	}
	w.result.Events = w.events
}

// guard turns a panic of a core, which is a broken assertion there, into a failure.
func (w *world) guard(f func()) {
	defer func() {
		if r := recover(); r != nil {
			id := "panic"
			text := fmt.Sprint(r)
			if rest, ok := strings.CutPrefix(text, "maru: invariant "); ok {
				id, _, _ = strings.Cut(rest, " ")
			}
			w.fail(id, "%s\n%s", text, shortStack())
		}
	}()
	f()
}

func shortStack() string {
	var keep []string
	for line := range strings.Lines(string(debug.Stack())) {
		if strings.Contains(line, "/internal/") {
			if i := strings.LastIndex(line, "/internal/"); i >= 0 {
				line = line[i+1:]
			}
			keep = append(keep, "    "+strings.TrimSpace(line))
		}
	}
	return strings.Join(keep, "\n")
}

// errNoPeer is the error of a call that nobody answered.
var (
	errNotSent  = fmt.Errorf("%w: nobody listens", base.ErrUnavailable)
	errNoAnswer = fmt.Errorf("%w: no answer", base.ErrTimeout)
)

// fate is how far a call came, for who must know whether it may have been done.
type fate uint8

const (
	notSent fate = iota
	noAnswer
	answered
)

// unknownOutcome reports whether the peer may have done what failed (X1).
func unknownOutcome(f fate, err error) bool {
	switch {
	case err == nil || f == notSent:
		return false
	case f == noAnswer:
		return true
	}
	return errors.Is(err, base.ErrUnknown) || errors.Is(err, base.ErrTimeout) || errors.Is(err, base.ErrInternal)
}
