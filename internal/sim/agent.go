package sim

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

const (
	reportInterval = 5 * time.Second
	vouchAgain     = 5 * time.Second
	vouchTries     = 5
)

// agentActor is internal/agent on one remote machine, without its sockets: the watcher of
// that machine's mappers, with a durable record of the sessions that it has bound.
type agentActor struct {
	w       *world
	rank    int
	node    base.NodeID
	boots   int
	id      base.AgentID
	secret  base.OwnerSecret
	durable map[base.SessionID]core.ProcessID

	// Of this life:
	process   *process
	claim     core.AgentClaim // epoch 0: not started at the resource manager
	sequence  uint64
	connected bool
	records   map[base.SessionID]core.ProcessID
	gone      map[core.ProcessID]bool // ended, and not acknowledged yet
	binding   map[base.SessionID]bool
	reporting bool // a report is under way
	again     bool // and another one is due
	beat      int  // of the timer that counts
}

// agentOf is the agent of a rank's remote machine, made with its first client.
func (w *world) agentOf(rank int) *agentActor {
	if g := w.agents[rank]; g != nil {
		return g
	}
	g := &agentActor{
		w: w, rank: rank, node: base.NodeID{0xfd, byte(rank + 1)}, id: w.id(), durable: map[base.SessionID]core.ProcessID{},
	}
	var err error
	if g.secret, err = base.MakeOwnerSecret(append(g.id[:], g.node[:]...)); err != nil {
		w.fail("sim", "secret: %v", err)
	}
	w.agents[rank] = g
	w.at(nil, w.between(0, 2*time.Second), g.start) // its first client may be there before it
	return g
}

func (g *agentActor) alive() bool { return g.process != nil && !g.process.ended }

// boot is the boot id of its machine.
func (g *agentActor) boot() base.BootID {
	return base.BootID{0xfd, byte(g.rank + 1), byte(g.boots + 1)}
}

func (g *agentActor) processID(c *clientActor) core.ProcessID {
	return core.ProcessID{PID: c.process.pid, Namespace: 1, StartTicks: uint64(c.process.pid), Boot: c.boot} //nolint:gosec // a count
}

// start takes up the processes on record.
func (g *agentActor) start() {
	w := g.w
	if g.alive() {
		return
	}
	g.process = w.newProcess(fmt.Sprintf("agent%d.%d", g.rank, len(w.processes)+1))
	g.process.agent = g
	g.claim, g.sequence, g.connected = core.AgentClaim{Agent: g.id}, 0, false
	g.reporting, g.again = false, false
	g.gone, g.binding = map[core.ProcessID]bool{}, map[base.SessionID]bool{}
	g.records = maps.Clone(g.durable)
	w.note("%s starts with %d sessions on record", g.process.name, len(g.records))
	for _, p := range g.records {
		// A process of an older boot is gone with it.
		if p.Boot != g.boot() || w.byPID(p.PID).ended || w.planted(AgentRestartIsProof) {
			g.gone[p] = true
		}
	}
	w.by(g.process, func() { w.at(g.process, w.between(0, 100*time.Millisecond), g.connect) })
}

// kill ends its process; it is started again.
func (g *agentActor) kill() {
	w := g.w
	if !g.alive() {
		return
	}
	w.note("%s is killed", g.process.name)
	w.result.AgentRestarts++
	w.end(g.process)
	w.at(nil, w.between(time.Millisecond, 5*time.Second), g.start)
}

// reboot ends everything on its machine.
func (g *agentActor) reboot() {
	w := g.w
	w.note("the machine of rank %d is booted again", g.rank)
	w.result.Reboots++
	g.boots++
	for _, c := range w.clients {
		if c.agent == g {
			w.kill(c, "ends with its machine")
		}
	}
	if g.alive() {
		w.end(g.process)
	}
	w.at(nil, w.between(500*time.Millisecond, 5*time.Second), g.start)
	w.at(nil, w.between(500*time.Millisecond, 5*time.Second), func() { w.replace(g.rank) })
}

// connect becomes the machine's agent, once a life, and reports.
func (g *agentActor) connect() {
	w := g.w
	g.connected = false
	if g.claim.Epoch != 0 {
		g.usable()
		return
	}
	call(w, g.process, w.manager.process, "StartAgent", once, w.manager.startAgent(core.StartAgent{
		Agent: g.id, Node: g.node, Boot: g.boot(), Name: "agent", Secret: g.secret,
	}), func(out core.AgentStarted, err error, _ fate) {
		if err != nil {
			g.retry(err)
			return
		}
		w.note("%s is agent with epoch %d", g.process.name, out.Epoch)
		g.claim.Epoch, g.claim.Token = out.Epoch, bytes.Clone(out.Token[:])
		g.usable()
	})
}

func (g *agentActor) usable() {
	g.connected = true
	g.report()
}

// retry follows an error of the link.
func (g *agentActor) retry(err error) {
	w := g.w
	g.connected = false
	switch {
	case errors.Is(err, base.ErrFenced):
		// A start of it whose answer was lost came late: it ends, and is started again.
		w.note("%s is fenced and stops", g.process.name)
		g.kill()
		return
	case errors.Is(err, base.ErrNotFound):
		g.claim.Epoch, g.claim.Token = 0, nil // an operator dropped it: it starts anew, its numbers go on
	}
	w.at(g.process, w.between(50*time.Millisecond, 2*time.Second), g.connect)
}

// report tells which processes have ended, and that it lives.
func (g *agentActor) report() {
	w := g.w
	if !g.connected {
		return
	}
	if g.reporting {
		g.again = true
		return
	}
	g.reporting, g.again = true, false
	g.sequence++
	req := core.Report{AgentClaim: g.claim, Sequence: g.sequence}
	for _, p := range slices.SortedFunc(maps.Keys(g.gone), func(x, y core.ProcessID) int { return int(x.PID - y.PID) }) {
		req.Ended = append(req.Ended, core.EndedProcess{Process: p})
	}
	if w.planted(ReportedIsDone) {
		g.forget(req.Ended)
	}
	call(w, g.process, w.manager.process, "ReportProcesses", once, w.manager.reportProcesses(req), func(_ [][]core.Place, err error, _ fate) {
		g.reporting = false
		if err != nil {
			w.note("%s: a report of %d ends: %v", g.process.name, len(req.Ended), err)
			g.retry(err)
			return
		}
		g.forget(req.Ended)
		g.beat++
		beat := g.beat
		w.at(g.process, reportInterval, func() {
			if g.beat == beat {
				g.report()
			}
		})
		if g.again {
			g.report()
		}
	})
}

// forget drops what the resource manager has acknowledged, in memory, then durably.
func (g *agentActor) forget(ended []core.EndedProcess) {
	w := g.w
	for _, e := range ended {
		if !g.gone[e.Process] {
			continue
		}
		w.note("%s: the end of process %d is done", g.process.name, e.Process.PID)
		w.result.Vouched++
		delete(g.gone, e.Process)
		maps.DeleteFunc(g.records, func(_ base.SessionID, p core.ProcessID) bool { return p == e.Process })
		w.at(g.process, w.between(100*time.Microsecond, 10*time.Millisecond), func() {
			maps.DeleteFunc(g.durable, func(_ base.SessionID, p core.ProcessID) bool { return p == e.Process })
		})
	}
}

// processEnded: its watcher sees a process end, if it watches it.
func (g *agentActor) processEnded(c *clientActor) {
	if !g.alive() {
		return
	}
	p := g.processID(c)
	g.w.at(g.process, g.w.between(time.Millisecond, 1500*time.Millisecond), func() { g.notice(p) })
}

func (g *agentActor) notice(p core.ProcessID) {
	for _, q := range g.records {
		if q == p && !g.gone[p] {
			g.w.note("%s: process %d has ended", g.process.name, p.PID)
			g.gone[p] = true
			g.report()
			return
		}
	}
}

// bind answers a client at the Unix socket.
func (g *agentActor) bind(c *clientActor, server base.OwnerID, answer func(struct{}, error)) {
	w, id, p := g.w, c.id, g.processID(c)
	switch {
	case !g.connected:
		answer(struct{}{}, errNotSent)
		return
	case g.binding[id]:
		answer(struct{}{}, fmt.Errorf("%w: it is being bound", base.ErrBusy))
		return
	}
	g.binding[id] = true
	end := func(err error) {
		delete(g.binding, id)
		answer(struct{}{}, err)
	}
	_, known := g.records[id]
	vouch := func() {
		g.vouch(c, server, 1, func(err error, f fate) {
			// Unless it is bound nowhere for certain, its end is reported.
			if err != nil && !known && f == answered && !unknownOutcome(f, err) && !errors.Is(err, base.ErrBusy) {
				delete(g.records, id)
				delete(g.durable, id)
			}
			end(err)
		})
	}
	if known {
		vouch()
		return
	}
	w.at(g.process, w.between(100*time.Microsecond, 10*time.Millisecond), func() {
		if !w.planted(RecordNotKept) {
			g.durable[id] = p
		}
		g.records[id] = p
		if c.process.ended {
			g.notice(p)
		}
		vouch()
	})
}

// vouch binds a session at the resource manager. The process lives when the number is
// drawn: a report of its end has a higher one.
func (g *agentActor) vouch(c *clientActor, server base.OwnerID, try int, done func(error, fate)) {
	w, p := g.w, g.processID(c)
	if g.gone[p] || g.records[c.id] != p {
		done(fmt.Errorf("%w: it has ended", base.ErrClosed), notSent)
		return
	}
	if !g.connected {
		done(errNotSent, notSent)
		return
	}
	c.ambushed("is bound")
	g.sequence++
	req := core.Vouch{AgentClaim: g.claim, Session: c.id, Process: p, Secret: c.own[:], Server: server, Sequence: g.sequence}
	if w.planted(VouchUnnumbered) {
		req.Sequence = 1 << 62
	}
	call(w, g.process, w.manager.process, "VouchSession", once, w.manager.vouchSession(c, req), func(_ struct{}, err error, f fate) {
		if f == answered && errors.Is(err, base.ErrBusy) && try < vouchTries {
			g.vouch(c, server, try+1, done)
			return
		}
		if err != nil {
			w.note("%s: vouching for %s: %v", g.process.name, c.process.name, err)
		}
		done(err, f)
	})
}

// The resource manager's side.

func (a *managerActor) startAgent(req core.StartAgent) func(func(core.AgentStarted, error)) {
	return request(a, func(b *core.Batch) (core.AgentStarted, error) { return a.core.StartAgent(b, a.nowMS(), req) }, nil)
}

func (a *managerActor) vouchSession(c *clientActor, req core.Vouch) func(func(struct{}, error)) {
	return request(a, func(b *core.Batch) (struct{}, error) {
		return struct{}{}, a.core.VouchSession(b, a.nowMS(), req)
	}, func(struct{}) error {
		c.bound, _ = a.core.Provable(c.id)
		return nil
	})
}

func (a *managerActor) reportProcesses(req core.Report) func(func([][]core.Place, error)) {
	return request(a, func(b *core.Batch) ([][]core.Place, error) { return a.core.ReportProcesses(b, a.nowMS(), req) }, nil)
}

// dropAgent is maru rm drop-agent.
func (a *managerActor) dropAgent(g *agentActor) {
	if !a.alive() || a.process.paused {
		return
	}
	a.w.result.AgentsDropped++
	a.w.note("an operator drops the agent of rank %d", g.rank)
	a.w.at(a.process, a.w.latency(), func() {
		request(a, func(b *core.Batch) (int, error) {
			for _, c := range a.w.clients {
				if c.agent == g {
					c.bound = false
					if a.w.planted(DropAgentIsProof) {
						_, _ = a.core.DropHolds(b, base.NodeID{}, c.id)
					}
				}
			}
			return a.core.DropAgent(b, g.id)
		}, nil)(func(int, error) {})
	})
}

// operatorLooks is what an operator does about a process that has ended and of which maru
// rm holds says that nobody can prove it.
func (w *world) operatorLooks(c *clientActor, times int) {
	if times == 0 {
		return
	}
	m := w.manager
	if m.alive() && m.core != nil {
		if ok, _ := m.core.Provable(c.id); !ok && m.holdsAny(c.id) {
			m.operatorDrops(c.id)
		}
	}
	w.at(nil, 10*time.Second, func() { w.operatorLooks(c, times-1) })
}

func (a *managerActor) holdsAny(id base.SessionID) bool {
	holds, _ := a.core.AppendHolds(nil, id, base.SessionID{}, 0, 1)
	return len(holds) > 0
}

// unbound: a hold of before it was vouched for has made a session (anew). Its end is
// nobody's to prove until the agent vouches (again); maru rm holds says so.
func (a *managerActor) unbound(id base.SessionID) {
	for _, c := range a.w.clients {
		if c.id == id {
			c.bound = false
		}
	}
}

// checkVouched: what an agent has vouched for comes back without an operator, unless one
// dropped that agent (L1).
func (a *managerActor) checkVouched() {
	for _, c := range a.w.clients {
		if !c.bound || c.agent == nil {
			continue
		}
		if ok, why := a.core.Provable(c.id); !ok && a.holdsAny(c.id) {
			a.w.fail("L1", "an agent vouched for %s, nobody dropped it, and its holds are not provable: %s", c.process.name, why)
		}
	}
}

// The client's side.

// vouch has the agent vouch for this process where that is needed, and tells whether it
// has.
func (c *clientActor) vouch(l *link, next func(vouched bool)) {
	w := c.w
	if c.agent == nil || !c.vouched && w.now < c.vouchNot {
		next(false)
		return
	}
	if c.vouched {
		next(true)
		return
	}
	c.asking = append(c.asking, next)
	if len(c.asking) > 1 {
		return
	}
	server := l.srv.id
	call(w, c.process, c.agent.process, "BindSession", once, func(answer func(struct{}, error)) {
		c.agent.bind(c, server, answer)
	}, func(_ struct{}, err error, _ fate) {
		if c.vouched = err == nil; err != nil {
			c.vouchNot = w.now + vouchAgain
		}
		list := c.asking
		c.asking = nil
		for _, f := range list {
			f(c.vouched)
		}
	})
}

// ambushed kills a process while its agent or the resource manager writes it down.
func (c *clientActor) ambushed(while string) {
	w := c.w
	if w.trouble(w.rough / 10) {
		w.at(nil, w.between(0, time.Second), func() { w.kill(c, "is killed while it "+while) })
		w.at(nil, w.between(time.Second, 5*time.Second), func() { w.replace(int(c.rank)) })
	}
}

// lookForAgent asks the agent again until it vouches.
func (c *clientActor) lookForAgent() {
	if c.looking || c.agent == nil {
		return
	}
	c.looking, c.vouched = true, false
	var look func()
	look = func() {
		l := c.link
		if c.closed || l == nil {
			c.looking = false
			return
		}
		c.vouch(l, func(vouched bool) {
			if vouched {
				c.looking = false
				return
			}
			c.w.at(c.process, vouchAgain, look)
		})
	}
	c.w.at(c.process, vouchAgain, look)
}
