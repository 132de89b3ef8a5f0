package sim

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// world is the state of one run.
type world struct {
	script  *Script
	*chain         // of the event that runs
	own     *chain // of what nobody causes
	now     time.Duration
	stood   time.Duration // of now, how long the machine's clock stood still
	order   uint64
	queue   eventQueue
	rough   float64 // percent of the troubles of a step that happen
	faulty  bool    // the network and the programs have faults
	failure *Failure
	result  Result
	trace   func(line string)
	ring    []string
	step    int
	cuts    []cut
	machine struct {
		stopped, clockToo bool
		since             time.Duration
		waiting           []func() // programs to start
	}

	processes []*process // pid = index + 1
	memory    *memory
	mappings  []*mapping
	truth     truth
	acked     map[base.RegionID]base.Extent // allocations that the RM acknowledged
	freed     map[base.RegionID]bool        // those that a server has asked to be freed
	extents   map[base.RegionID]regionAt    // every region that was ever given
	dirty     dirty

	manager *managerActor
	server  *serverActor   // at the server's address
	older   []*serverActor // that a rolling update leaves running
	clients []*clientActor
	agents  map[int]*agentActor // by rank

	newest      base.Incarnation // that the RM has issued for good
	newestToken core.Token
	lastOrders  map[base.Incarnation]base.CommitOrder
}

func newWorld(s *Script) *world {
	w := &world{
		script: s, own: newChain(s.Seed, s.Calm), faulty: true, rough: float64(s.Rough),
		acked: map[base.RegionID]base.Extent{}, freed: map[base.RegionID]bool{}, extents: map[base.RegionID]regionAt{}, lastOrders: map[base.Incarnation]base.CommitOrder{},
		truth: newTruth(), memory: newMemory(), agents: map[int]*agentActor{},
	}
	w.chain = w.own
	w.result.Steps = len(s.Actions)
	return w
}

// planted reports whether the run has this error.
func (w *world) planted(f Fault) bool { return w.script.Fault == f }

// note tells an event to whoever reads them.
func (w *world) note(format string, args ...any) {
	if w.trace != nil {
		w.trace(fmt.Sprintf("%12v ", w.now) + fmt.Sprintf(format, args...))
	}
}

// fail ends the run; the first failure counts.
func (w *world) fail(invariant, format string, args ...any) {
	if w.failure == nil {
		w.failure = &Failure{At: w.now, Step: w.step, Invariant: invariant, Text: fmt.Sprintf(format, args...), Last: w.ring}
		w.note("%s is broken: %s", invariant, w.failure.Text)
	}
}

// trouble is chance while there are faults.
func (w *world) trouble(percent float64) bool { return w.faulty && !w.calm && w.chance(percent) }

func (w *world) id() (out [base.IDBytes]byte) {
	for i := 0; i < len(out); i += 8 {
		v := w.Uint64()
		for j := range 8 {
			out[i+j] = byte(v >> (8 * j))
		}
	}
	return out
}

// process is one life of a program.
type process struct {
	w       *world
	name    string
	pid     int64
	client  *clientActor  // nil: a daemon
	agent   *agentActor   // nil: another program
	chain   *chain        // of what it does by itself
	drift   time.Duration // of its clock in a second
	ended   bool
	paused  bool
	until   time.Duration // paused at least
	backlog []event       // what waits for a stopped program
}

// mostDrift is how much a clock may be off in a second (protocol.md section 3, session
// validity: 0.1 %).
const mostDrift = time.Millisecond

func (w *world) newProcess(name string) *process {
	p := &process{w: w, name: name, pid: int64(len(w.processes) + 1), chain: newChain(w.Uint64(), w.script.Calm)}
	if !w.script.Calm {
		p.drift = p.chain.between(-mostDrift, mostDrift)
	}
	w.processes = append(w.processes, p)
	return p
}

// clock is what a process reads as CLOCK_BOOTTIME.
func (p *process) clock() time.Duration {
	w := p.w
	t := w.now - w.stood
	if w.machine.stopped && w.machine.clockToo {
		t = w.machine.since - w.stood
	}
	if p.client != nil && p.client.remote {
		if t = w.now - p.client.stood; p.paused && p.client.vm {
			t = p.client.since - p.client.stood
		}
	}
	return t + time.Duration(int64(t/time.Second)*int64(p.drift)) + t%time.Second*p.drift/time.Second
}

// by runs f with the draws of a process.
func (w *world) by(p *process, f func()) {
	old := w.chain
	w.chain = p.chain
	f()
	w.chain = old
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
	w.dirty.manager = true
}

func (w *world) pause(p *process, d time.Duration) {
	if p.ended {
		return
	}
	if p.paused {
		if p.until = max(p.until, w.now+d); p.until == w.now+d {
			w.at(nil, d, func() { w.resume(p) })
		}
		return
	}
	w.result.Pauses++
	w.note("%s is stopped for %v", p.name, d)
	p.paused = true
	p.until = w.now + d
	w.at(nil, d, func() { w.resume(p) })
}

func (w *world) resume(p *process) {
	if p.ended || !p.paused || w.faulty && w.now < p.until {
		return
	}
	w.note("%s goes on", p.name)
	if c := p.client; c != nil && c.vm {
		c.vm = false
		c.stood += w.now - c.since
	}
	p.paused = false
	for _, e := range p.backlog {
		e.at, e.order = w.now, w.next()
		w.queue.push(e)
	}
	p.backlog = nil
}

func (w *world) next() uint64 { w.order++; return w.order }

// at runs f in a process after d, unless that life has ended by then.
func (w *world) at(p *process, d time.Duration, f func()) {
	w.queue.push(event{at: w.now + d, order: w.next(), process: p, chain: w.chain, run: f})
}

// advance runs events until the time is up or something broke.
func (w *world) advance(until time.Duration) {
	for w.failure == nil && w.queue.due(until) {
		e := w.queue.pop()
		w.now = max(w.now, e.at)
		if p := e.process; p != nil {
			if p.ended {
				continue
			}
			if p.paused {
				p.backlog = append(p.backlog, e)
				continue
			}
			if p.client != nil {
				w.touch(p.client)
			}
		}
		w.result.Events++
		w.chain = e.chain
		w.guard(e.run)
		w.result.Digest = mix(w.result.Digest ^ uint64(w.now) ^ w.chain.state) //nolint:gosec // bits
		w.chain = w.own
		if w.failure == nil {
			w.guard(w.check)
		}
	}
	if w.failure == nil {
		w.now = max(w.now, until)
	}
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
