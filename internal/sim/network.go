package sim

import "time"

// callTimeout is how long a caller waits.
const callTimeout = 2 * time.Second

// latency of one message.
func (w *world) latency() time.Duration {
	if !w.faulty {
		return w.between(100*time.Microsecond, 2*time.Millisecond)
	}
	switch n := w.rng.IntN(100); {
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
	settled := false
	finish := func(v T, err error, f fate) {
		if !settled {
			settled = true
			done(v, err, f)
		}
	}
	w.at(from, callTimeout, func() {
		if !settled {
			w.note("%s: no answer to %s", from.name, what)
		}
		finish(zero, errNoAnswer, noAnswer)
	})
	deliver := func() {
		serve(func(v T, err error) {
			if w.trouble(3) {
				w.note("network: answer to %s of %s is lost", what, from.name)
				return
			}
			w.at(from, w.latency(), func() { finish(v, err, answered) })
		})
	}
	if w.trouble(3) {
		w.note("network: %s of %s is lost", what, from.name)
		return
	}
	w.at(to, w.latency(), deliver)
	if rep == mayRepeat && w.trouble(4) {
		w.note("network: %s of %s is sent twice", what, from.name)
		w.at(to, w.latency(), deliver)
	}
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
	at := max(s.last, s.w.now+s.w.latency())
	s.last = at
	s.w.at(s.to, at-s.w.now, func() {
		if !s.broken {
			f()
		}
	})
}
