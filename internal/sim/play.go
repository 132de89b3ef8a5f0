package sim

import (
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

const (
	workerCount = 3
	mostWorkers = 16
	keyCount    = 12

	// meanGap is the time between two actions. A heartbeat is due after four or five of
	// them and a session ends after fifty: a run of 500 sees all of it several times.
	meanGap = 150 * time.Millisecond
)

func slicesSort(ids []base.RegionID) { slices.Sort(ids) }

func (w *world) namespace() base.NamespaceID { return simNamespace }

var simNamespace = base.NamespaceOf([]byte("sim"))

// key is the object key of a number.
func (w *world) key(n int) base.Key { return simKeys[n] }

var simKeys = func() (keys [keyCount]base.Key) {
	for n := range keys {
		var d base.Digest
		d[0], d[1] = byte(n+1), 0x5a
		keys[n] = base.MakeKey(d, 0, base.PartAllLayers)
	}
	return keys
}()

func (w *world) numberOf(k base.Key) int { return int(k[0]) - 1 }

func (w *world) nameOf(id base.SessionID) string {
	for _, c := range w.clients {
		if c.id == id {
			return c.process.name
		}
	}
	return id.String()
}

// play runs the script, then sees that everything comes back.
func (w *world) play() {
	w.manager = newManager(w)
	w.server = newServer(w)
	w.guard(w.manager.start)
	w.guard(w.server.start)
	for i := range w.script.Workers {
		w.clients = append(w.clients, w.newClient(i, base.RoleWorker))
	}
	w.clients = append(w.clients, w.newClient(w.script.Workers, base.RoleScheduler))
	w.advance(300 * time.Millisecond)
	chains := make([]chain, len(w.script.Actions)) // one piece: their events keep them
	for i := range w.script.Actions {
		a := &w.script.Actions[i]
		w.step = i + 1
		w.advance(w.now + a.Gap)
		if w.failure != nil {
			break
		}
		chains[i] = makeChain(a.Seed, a.Calm)
		w.chain = &chains[i]
		w.guard(func() { w.act(a) })
		w.chain = w.own
		if w.failure == nil {
			w.guard(w.check)
		}
	}
	w.finish()
	if w.failure == nil {
		w.guard(w.checkAll)
	}
	w.result.Virtual = w.now
}

func (w *world) liveClients(role base.Role) (out []*clientActor) {
	for _, c := range w.clients {
		if c.role == role && c.alive() && !c.closing {
			out = append(out, c)
		}
	}
	return out
}

// worker is the live one of a rank, nil when there is none.
func (w *world) worker(rank int) *clientActor {
	for i := len(w.clients) - 1; i >= 0; i-- {
		if c := w.clients[i]; c.role == base.RoleWorker && int(c.rank) == rank && c.alive() && !c.closing {
			return c
		}
	}
	return nil
}

// act carries out an action.
func (w *world) act(a *Action) {
	c := w.worker(a.Rank)
	if c != nil {
		w.touch(c)
	}
	busy := c == nil || c.process.paused
	switch a.Kind {
	case ActStore:
		if !busy {
			c.store(a.Keys[0])
		}
	case ActLoad:
		if !busy {
			c.load(a.Keys)
		}
	case ActView:
		if !busy {
			c.look(a.Keys)
		}
	case ActDelete:
		if !busy {
			c.remove(a.Keys[0])
		}
	case ActProbe:
		if s := w.liveClients(base.RoleScheduler); len(s) > 0 && !s[0].process.paused && c != nil {
			s[0].probe(a.Keys, c.id)
		}
	case ActRest:
		w.advance(w.now + a.For)
	case ActPause:
		if c != nil {
			c.stop(a.For)
		}
	case ActKill:
		if c != nil {
			w.kill(c, "is killed")
			w.at(nil, w.between(100*time.Millisecond, 5*time.Second), func() { w.replace(a.Rank) })
		}
	case ActClose:
		if c != nil {
			w.at(c.process, 0, func() { c.close(a.For) })
			w.at(nil, w.between(100*time.Millisecond, 5*time.Second), func() { w.replace(a.Rank) })
		}
	case ActFork:
		if c != nil {
			c.fork(a.For)
		}
	case ActKillManager:
		w.stopManager()
	case ActKillServer:
		w.stopServer(w.server)
	case ActPauseServer:
		w.pause(w.server.process, a.For)
	case ActPauseManager:
		w.pause(w.manager.process, a.For)
	case ActDropLink:
		if w.server.alive() {
			w.server.linkLost()
		}
	case ActCutServer, ActCutManager, ActCutDaemons:
		w.cut(a.Kind, a.Rank, a.For)
	case ActMachine:
		w.stopMachine(a.For, a.Keys[0]%2 == 1)
	case ActRoll:
		w.roll()
	case ActRollCut:
		if !busy {
			w.rollUnheard(c, a.Keys, a.For)
		}
	case ActEdge:
		if !busy {
			w.edge(c, a.Keys)
		}
	case ActKillAgent, ActDropAgent, ActReboot, ActCutAgent:
		w.actAgent(a)
	case kindCount:
	}
}

// actAgent is about the agent of a rank's machine.
func (w *world) actAgent(a *Action) {
	g := w.agents[a.Rank]
	if g == nil {
		return
	}
	switch a.Kind {
	case ActKillAgent:
		g.kill()
	case ActDropAgent:
		w.manager.dropAgent(g)
	case ActReboot:
		g.reboot()
	default:
		w.cut(a.Kind, a.Rank, a.For)
	}
}

// replace starts a worker of a rank that has none.
func (w *world) replace(rank int) {
	w.onMachine(func() {
		if w.faulty && w.worker(rank) == nil {
			w.clients = append(w.clients, w.newClient(rank, base.RoleWorker))
		}
	})
}

// kill ends a client's process; its watchers see it.
func (w *world) kill(c *clientActor, how string) {
	if !c.alive() {
		return
	}
	w.note("%s %s", c.process.name, how)
	w.result.Kills++
	w.end(c.process)
	c.views = nil
	if c.agent != nil {
		c.agent.processEnded(c)
		if w.trouble(w.rough / 4) {
			w.at(nil, w.between(0, 2*time.Second), c.agent.kill)
		}
		w.at(nil, w.between(5*time.Second, 20*time.Second), func() { w.operatorLooks(c, 12) })
		return
	}
	if c.remote {
		// Nobody can prove its end; an operator who knows of it says so.
		if !w.faulty || w.chance(50) {
			w.at(nil, w.between(2*time.Second, 20*time.Second), func() { w.manager.operatorDrops(c.id) })
		}
		if !w.faulty {
			// A Hold that was under way may have come after the first.
			w.at(nil, 20*time.Second, func() { w.manager.operatorDrops(c.id) })
		}
		return
	}
	w.manager.watchedEnd(w.manager.processID(c.process.pid))
	for _, s := range append([]*serverActor{w.server}, w.older...) {
		if _, bound := s.bound[c.id]; bound {
			s.processEnded(c.process)
		}
	}
}

func (w *world) stopManager() {
	m := w.manager
	if !m.alive() {
		return
	}
	w.note("%s is killed", m.process.name)
	w.result.ManagerRestarts++
	m.crash()
	w.end(m.process)
	for _, s := range append([]*serverActor{w.server}, w.older...) {
		if s.alive() {
			w.at(s.process, w.between(time.Millisecond, 100*time.Millisecond), s.linkLost)
		}
	}
	w.at(nil, w.between(time.Millisecond, 3*time.Second), func() {
		w.onMachine(func() {
			m.start()
			for _, c := range w.clients {
				if c.alive() && c.watching != nil {
					w.at(c.process, w.between(time.Millisecond, time.Second), c.watchManager)
				}
			}
		})
	})
}

// stopServer kills a server. The one at the address is started again; one that a rolling
// update has left is not.
func (w *world) stopServer(s *serverActor) {
	if !s.alive() {
		return
	}
	w.note("%s is killed", s.process.name)
	w.result.ServerRestarts++
	w.endServer(s)
	if s != w.server {
		w.older = slices.DeleteFunc(w.older, func(o *serverActor) bool { return o == s })
		return
	}
	w.at(nil, w.between(time.Millisecond, 3*time.Second), func() { w.onMachine(s.start) })
	if w.trouble(w.rough / 4) {
		w.stopManager()
	}
	if w.trouble(w.rough / 2) {
		w.purge()
	}
}

func (w *world) endServer(s *serverActor) {
	dead := s.process
	w.end(dead)
	w.manager.watchedEnd(w.manager.processID(dead.pid))
	for _, c := range w.clients {
		if c.alive() && len(c.views) > 0 && w.trouble(w.rough/2) {
			// It lists its views last of all.
			w.pause(c.process, w.between(3*time.Second, 8*time.Second))
		}
		if l := c.link; c.alive() && l != nil && l.process == dead {
			w.at(c.process, w.between(time.Millisecond, 500*time.Millisecond), func() {
				if !l.over {
					c.lose(l)
				}
			})
		}
	}
}

// roll starts a second server with the same id on another state directory: the address
// is its own from now on, and the older one runs until it is fenced.
func (w *world) roll() bool {
	old := w.server
	if !old.alive() || old.incarnation == 0 || w.machine.stopped {
		return false
	}
	w.note("%s: a rolling update", old.process.name)
	w.result.Rolls++
	w.older = append(w.older, old)
	w.server = newServer(w)
	w.server.id, w.server.secretOf = old.id, old.secretOf
	w.server.start()
	return true
}

// purge has keys deleted while a server finds out what older ones left.
func (w *world) purge() {
	for _, c := range w.liveClients(base.RoleWorker) {
		for range 4 {
			for _, k := range drawKeys(w.chain, nil, 3) {
				w.at(c.process, w.between(0, 8*time.Second), func() { c.remove(k) })
			}
		}
	}
}
