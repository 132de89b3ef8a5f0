package sim

import "time"

// event is something that happens at a time.
type event struct {
	at      time.Duration
	order   uint64
	process *process // nil: the world's own
	chain   *chain
	run     func()
}

// eventQueue is a binary heap, by time and then by order. What moves in it has no
// pointers: the events lie still, in slots that are used again.
type eventQueue struct {
	heap  []queued
	slots []slotted
	free  []uint32
}

type queued struct {
	at    time.Duration
	order uint64
	slot  uint32
}

type slotted struct {
	process *process
	chain   *chain
	run     func()
}

func (a *queued) before(b *queued) bool { return a.at < b.at || a.at == b.at && a.order < b.order }

// due reports whether there is an event at that time or before.
func (q *eventQueue) due(at time.Duration) bool { return len(q.heap) > 0 && q.heap[0].at <= at }

func (q *eventQueue) push(e event) {
	x := queued{at: e.at, order: e.order}
	if n := len(q.free); n > 0 {
		x.slot = q.free[n-1]
		q.free = q.free[:n-1]
	} else {
		x.slot = uint32(len(q.slots)) //nolint:gosec // a few
		q.slots = append(q.slots, slotted{})
	}
	q.slots[x.slot] = slotted{e.process, e.chain, e.run}
	q.heap = append(q.heap, x)
	i := len(q.heap) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !x.before(&q.heap[up]) {
			break
		}
		q.heap[i] = q.heap[up]
		i = up
	}
	q.heap[i] = x
}

// pop takes the first event out. There must be one.
func (q *eventQueue) pop() event {
	first, n := q.heap[0], len(q.heap)-1
	x := q.heap[n]
	h := q.heap[:n]
	q.heap = h
	i := 0
	for n > 0 {
		down := 2*i + 1
		if down >= n {
			break
		}
		if down+1 < n && h[down+1].before(&h[down]) {
			down++
		}
		if !h[down].before(&x) {
			break
		}
		h[i] = h[down]
		i = down
	}
	if n > 0 {
		h[i] = x
	}
	s := &q.slots[first.slot]
	e := event{at: first.at, order: first.order, process: s.process, chain: s.chain, run: s.run}
	*s = slotted{}
	q.free = append(q.free, first.slot)
	return e
}
