package sim

import (
	"time"

	"github.com/xcena-dev/maru/internal/directory"
)

// callTimeout is how long a caller waits.
const callTimeout = 2 * time.Second

// latency of one message.
func (w *world) latency() time.Duration {
	if !w.faulty || w.calm {
		return w.between(100*time.Microsecond, 2*time.Millisecond)
	}
	switch n := w.IntN(100); {
	case n < 80:
		return w.between(100*time.Microsecond, 5*time.Millisecond)
	case n < 95:
		return w.between(5*time.Millisecond, 200*time.Millisecond)
	default:
		return w.between(200*time.Millisecond, 4*time.Second)
	}
}

// again says how the network treats a request.
type again uint8

const (
	mayRepeat again = iota // it may arrive twice: a client's retry of the same operation
	once                   // the transport delivers it at most once
)

// call sends a request to a process and waits for the answer. serve runs at the peer and
// must call its argument at most once a delivery; done runs at the caller, once.
func call[T any](w *world, from, to *process, what string, rep again, serve func(answer func(T, error)), done func(T, error, fate)) {
	var zero T
	if to == nil || to.ended {
		w.at(from, time.Millisecond, func() { done(zero, errNotSent, notSent) })
		return
	}
	c := &calling[T]{w: w, from: from, to: to, what: what, serve: serve, done: done}
	w.at(from, callTimeout, c.timeout)
	if w.isCut(from, to) {
		w.note("network: %s cannot reach %s", from.name, to.name)
		return
	}
	if w.trouble(3) {
		w.note("network: %s of %s is lost", what, from.name)
		return
	}
	deliver := c.deliver
	w.at(to, w.latency(), deliver)
	if rep == mayRepeat && w.trouble(4) {
		w.note("network: %s of %s is sent twice", what, from.name)
		w.at(to, w.latency(), deliver)
	}
}

// calling is a call under way.
type calling[T any] struct {
	w        *world
	from, to *process
	what     string
	settled  bool
	serve    func(answer func(T, error))
	done     func(T, error, fate)
}

func (c *calling[T]) finish(v T, err error, f fate) {
	if !c.settled {
		c.settled = true
		c.done(v, err, f)
	}
}

func (c *calling[T]) timeout() {
	if c.settled {
		return
	}
	if c.w.trace != nil {
		c.w.note("%s: no answer to %s", c.from.name, c.what)
	}
	var zero T
	c.finish(zero, errNoAnswer, noAnswer)
}

func (c *calling[T]) deliver() { c.serve(c.answer) }

func (c *calling[T]) answer(v T, err error) {
	w := c.w
	if w.isCut(c.from, c.to) {
		w.note("network: answer to %s cannot reach %s", c.what, c.from.name)
		return
	}
	if w.trouble(3) {
		w.note("network: answer to %s of %s is lost", c.what, c.from.name)
		return
	}
	d := w.latency()
	if x := c.from.client; x != nil && x.edge != nil && c.what == "Heartbeat" {
		d = w.between(1200*time.Millisecond, 1700*time.Millisecond)
	}
	w.at(c.from, d, func() { c.finish(v, err, answered) })
}

// stream delivers in order, and ends with either side.
type stream struct {
	w        *world
	from, to *process
	last     time.Duration
	broken   bool
}

func (w *world) newStream(from, to *process) *stream { return &stream{w: w, from: from, to: to} }

// send delivers one event of the stream.
func (s *stream) send(f func()) {
	if s.broken || s.from.ended || s.to.ended {
		return
	}
	// What a partition holds up is sent again after it.
	at := max(s.last, s.w.cutEnds(s.from, s.to)+s.w.latency())
	s.last = at
	s.w.at(s.to, at-s.w.now, func() {
		if !s.broken {
			f()
		}
	})
}

// cut is a partition: programs that cannot reach each other for a while. A client is
// named by its rank, so that whoever replaces it is cut off too.
type cut struct {
	kind        Kind
	rank        int
	only        *process // of the daemons; nil: all servers
	from, until time.Duration
}

// brokenAfter is how long a connection lives without an answer (keepalive).
const brokenAfter = 3 * time.Second

func (w *world) cut(kind Kind, rank int, d time.Duration) {
	w.note("network: %v %d for %v", kind, rank, d)
	w.result.Cuts++
	w.cuts = append(w.cuts, cut{kind: kind, rank: rank, until: w.now + d})
	if d <= brokenAfter {
		return
	}
	switch s := w.server; kind {
	case ActCutServer:
		if c := w.worker(rank); c != nil && w.planted(DisconnectIsProof) && s.alive() {
			w.at(s.process, brokenAfter, func() { s.sessionGone(c.id, directory.GonePidfd) })
		}
	case ActCutDaemons:
		for _, s := range append([]*serverActor{s}, w.older...) {
			w.at(s.process, brokenAfter, s.linkLost)
		}
	case ActCutManager:
		if c := w.worker(rank); c != nil && c.watching != nil {
			c.watching.broken = true
			w.at(c.process, brokenAfter, c.watchManager)
		}
	}
}

// cutEnds is now, or when the last partition between two programs ends.
func (w *world) cutEnds(a, b *process) time.Duration {
	end := w.now
	if len(w.cuts) == 0 || !w.faulty {
		return end
	}
	if a.client == nil {
		a, b = b, a
	}
	if a.agent != nil {
		a, b = b, a
	}
	manager := a == w.manager.process || b == w.manager.process
	kept := w.cuts[:0]
	for _, c := range w.cuts {
		if c.until <= w.now {
			continue
		}
		kept = append(kept, c)
		between := false
		switch {
		case c.from > w.now:
		case b.agent != nil:
			between = a.client == nil && c.kind == ActCutAgent && b.agent.rank == c.rank // its clients are on its machine
		case a.client == nil:
			between = c.kind == ActCutDaemons && (c.only == nil || c.only == a || c.only == b)
		case int(a.client.rank) == c.rank:
			between = c.kind == ActCutServer && !manager || c.kind == ActCutManager && manager
		}
		if between {
			end = max(end, c.until)
		}
	}
	w.cuts = kept
	return end
}

func (w *world) isCut(a, b *process) bool { return w.cutEnds(a, b) > w.now }

// stopMachine has every program stand still, as when a VM is paused. Its clock stands
// still too, or jumps when it goes on. Nobody on it can tell; what a remote reader sees
// are peers that do not answer.
func (w *world) stopMachine(d time.Duration, clockToo bool) {
	if w.machine.stopped {
		return
	}
	w.note("the machine stands still for %v, its clock too: %v", d, clockToo)
	w.result.Machines++
	w.machine.stopped, w.machine.clockToo, w.machine.since = true, clockToo, w.now
	for _, p := range w.processes {
		if p.agent == nil && (p.client == nil || !p.client.remote) {
			w.pause(p, d)
		}
	}
	w.at(nil, d, w.machineGoesOn)
}

func (w *world) machineGoesOn() {
	m := &w.machine
	if !m.stopped {
		return
	}
	m.stopped = false
	if m.clockToo {
		w.stood += w.now - m.since
	}
	waiting := m.waiting
	m.waiting = nil
	for _, f := range waiting {
		f()
	}
}

// onMachine runs f, when the machine goes on if it stands still.
func (w *world) onMachine(f func()) {
	if w.machine.stopped {
		w.machine.waiting = append(w.machine.waiting, f)
		return
	}
	f()
}
