package sim

import (
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Situations that chance alone would seldom make. Each is a few ordinary actions at the
// times at which the rules are tightest.

// hunt stops a reader in the middle of a copy for longer than its session lives, and has
// what it reads deleted and its place written again.
func (w *world) hunt(c *clientActor, keys []int) {
	stop := w.between(9*time.Second, 16*time.Second)
	c.stop(stop)
	for _, other := range w.liveClients(base.RoleWorker) {
		if other == c {
			continue
		}
		for _, k := range keys {
			at := w.between(time.Second, stop)
			w.at(other.process, at, func() { other.remove(k) })
			for range 3 {
				w.at(other.process, at+w.between(100*time.Millisecond, 3*time.Second), func() { other.store(w.IntN(keyCount)) })
			}
		}
	}
}

// rewrite has others delete keys and store over the room that this makes, again and again
// from first on until last.
func (w *world) rewrite(reader *clientActor, keys []int, first, last time.Duration) {
	for _, other := range w.liveClients(base.RoleWorker) {
		if other == reader {
			continue
		}
		for _, k := range keys {
			w.at(other.process, w.between(first/2, first), func() { other.remove(k) })
		}
		for at := first; at < last; at += w.between(30*time.Millisecond, 200*time.Millisecond) {
			w.at(other.process, at, func() { other.store(w.IntN(keyCount)) })
		}
	}
}

// edge has a worker read until the last moment of its session: the answer to its last
// heartbeat is late, then nothing comes through any more.
func (w *world) edge(c *clientActor, keys []int) {
	if c.current() == nil || c.edge != nil {
		return
	}
	w.note("%s reads %v until its session ends", c.process.name, keys)
	c.edge = keys
}

// edgeBegins is called when the server has taken the heartbeat.
func (w *world) edgeBegins(c *clientActor) {
	keys := c.edge
	c.edge = nil
	w.cuts = append(w.cuts, cut{kind: ActCutServer, rank: int(c.rank), from: w.now + 200*time.Millisecond, until: w.now + ttl + 2*time.Second})
	w.at(c.process, 0, func() { c.copyFor(keys, w.between(ttl+100*time.Millisecond, ttl+900*time.Millisecond)) })
	w.rewrite(c, keys, ttl-200*time.Millisecond, ttl+900*time.Millisecond)
}

// rollUnheard is a rolling update that the older server does not hear of, since it cannot
// reach the resource manager. One reader stays with it and copies for longer than a session
// lives without heartbeats; the others go to the newer one and write.
func (w *world) rollUnheard(c *clientActor, keys []int, d time.Duration) {
	old := w.server
	if c.current() == nil || c.current().srv != old || !w.roll() {
		return
	}
	w.cuts = append(w.cuts, cut{kind: ActCutDaemons, only: old.process, until: w.now + d})
	c.copyFor(keys, w.between(ttl, d))
	for _, other := range w.liveClients(base.RoleWorker) {
		if l := other.current(); other != c && l != nil {
			w.at(other.process, w.between(10*time.Millisecond, time.Second), func() {
				if !l.over {
					other.lose(l)
				}
			})
		}
	}
	w.rewrite(c, keys, 3*time.Second, d)
}

// ambush has a Commit done whose answer is lost, its object exported by others, and the
// server killed, so that nobody can say any more what became of the Commit.
func (w *world) ambush(writer *clientActor, key int) {
	for _, other := range w.liveClients(base.RoleWorker) {
		if other != writer {
			w.at(other.process, w.between(time.Millisecond, 20*time.Millisecond), func() { other.look([]int{key}) })
		}
	}
	s := w.server
	w.at(nil, w.between(150*time.Millisecond, time.Second), func() {
		if s == w.server {
			w.stopServer(s)
		}
	})
	for range 8 {
		w.at(writer.process, w.between(time.Second, 6*time.Second), func() { writer.store(w.IntN(keyCount)) })
	}
}

// stopBeforeHold stops a reader that has leases, and not yet a hold of what it is to map,
// until its session has expired and a sweep has found that it holds nothing.
func (w *world) stopBeforeHold(c *clientActor, keys []int) {
	stop := w.between(ttl+sweepInterval, ttl+3*sweepInterval)
	w.pause(c.process, stop)
	w.rewrite(c, keys, ttl+sweepInterval/2, stop+5*time.Second)
}
