package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/session"
)

const (
	engineID       = "engine"
	privateBytes   = 3 * pageBytes
	cpuBudgetBytes = 4 * privateBytes

	mostOpens = 8 // of one client once the faults have stopped
)

// clientActor is package client without threads and memory: the session core, one link
// an epoch, a background worker.
type clientActor struct {
	w       *world
	rank    uint32
	role    base.Role
	private bool
	viewer  bool        // it may export views
	remote  bool        // on another machine, a VM: nobody can prove its end
	agent   *agentActor // of its machine; nil: none, or it is on the resource manager's
	boot    base.BootID // of the agent's machine, when it was started
	confirm bool        // it has no roots to compare with: a Release must confirm what it read
	vm      bool        // its machine stands still, with its clock
	since   time.Duration
	stood   time.Duration    // how long its clock stood still
	touched bool             // to be checked
	edge    []int            // what it reads when its next heartbeat is taken
	secret  directory.Secret // of its epoch
	own     [core.SessionSecretBytes]byte
	id      base.SessionID
	process *process
	core    *session.Core

	link    *link
	opening bool
	backoff time.Duration
	beats   uint64

	openCount int // since the faults stopped

	holdSequence uint64
	holdToken    []byte
	watching     *stream

	vouched, looking bool // by the agent; it is asked again
	vouchNot         time.Duration
	asking           []func(bool)
	bound            bool // what the resource manager has on record durably, for the checks

	maps       map[base.RegionID]*mapping
	handles    map[base.RegionID]core.Handle
	segment    []cell        // private memory
	segmentOf  base.RegionID // the region that has it; 0: none
	unholds    []core.Handle
	unprepared bool
	prepareNot time.Duration
	mapping    bool // describe, hold, map and unmap run one at a time
	mapQueue   []func()
	growing    bool
	growNot    time.Duration

	working, kicked bool
	busy            int // stores, loads and deletes under way
	views           []*view
	early           []session.Release // that overtook the list, by the fault
	closing, closed bool
	left            bool
}

// link is one epoch at one server.
type link struct {
	srv         *serverActor
	who         directory.Caller
	server      base.ServerEpoch
	process     *process
	namespace   base.NamespaceNumber
	incarnation base.Incarnation
	pools       []directory.PoolGrant
	over        bool
	proved      bool
}

// view is an exported buffer.
type view struct {
	id   uint64
	cell *cell
	want tag
	row  hot.AcquireRow

	acquire base.Sequence
	index   uint32
}

func (w *world) newClient(rank int, role base.Role) *clientActor {
	c := &clientActor{
		w: w, rank: uint32(rank), role: role, id: w.id(), //nolint:gosec // a few
		maps: map[base.RegionID]*mapping{}, handles: map[base.RegionID]core.Handle{},
		segment: make([]cell, privateBytes/pageBytes), unprepared: true, backoff: 20 * time.Millisecond,
	}
	c.process = w.newProcess(fmt.Sprintf("%v%d.%d", role, rank, len(w.processes)+1))
	c.process.client = c
	half := w.id()
	copy(c.own[:], half[:])
	if role == base.RoleWorker {
		c.remote = !w.calm && w.chance(25)
		c.private = !c.remote && w.chance(40)
		c.confirm = c.remote && w.chance(50)
		c.viewer = w.chance(70)
		if c.remote && w.chance(60) {
			c.agent = w.agentOf(rank)
			c.boot = c.agent.boot()
		}
	}
	c.core = session.New(session.Config{Session: c.id, MaxOperations: 256, MaxLeases: 64})
	w.note("%s starts, private memory: %v, remote: %v", c.process.name, c.private, c.remote)
	w.by(c.process, func() { w.at(c.process, w.between(0, 300*time.Millisecond), c.run) })
	return c
}

// now is what its clock says.
func (c *clientActor) now() time.Duration { return c.process.clock() }

// node is where it runs.
func (c *clientActor) node() base.NodeID {
	switch {
	case c.agent != nil:
		return c.agent.node
	case c.remote:
		return base.NodeID{0xfe, byte(c.process.pid)}
	}
	return c.w.manager.cfg.Node
}

// peer is what the resource manager sees of it.
func (c *clientActor) peer() core.Peer {
	p := c.w.manager.peer(c.process)
	if c.remote {
		p = core.Peer{Node: c.node(), Boot: base.BootID{0xfe, byte(c.process.pid)}, Reason: "it calls over TCP"}
		if c.agent != nil {
			p.Boot = c.boot
		}
	}
	p.Secret = c.own[:]
	return p
}

// stop has its process stand still; of a remote one the machine does, with its clock.
func (c *clientActor) stop(d time.Duration) {
	for _, x := range c.w.clients {
		if x == c || c.agent != nil && x.agent == c.agent && x.alive() {
			if x.remote && !x.process.paused {
				x.vm, x.since = true, c.w.now
			}
			c.w.pause(x.process, d)
		}
	}
	if c.agent != nil && c.agent.alive() {
		c.w.pause(c.agent.process, d)
	}
}

func (c *clientActor) alive() bool { return !c.process.ended }

// current is the link of the open epoch.
func (c *clientActor) current() *link {
	if c.link == nil || c.link.over {
		return nil
	}
	return c.link
}

// run is the heartbeat and reconnect loop.
func (c *clientActor) run() {
	if c.closed {
		return
	}
	l := c.current()
	if l == nil {
		c.open()
		return
	}
	c.w.at(c.process, heartbeat, func() {
		if c.link == l {
			c.run()
		}
	})
	c.beat(l)
}

func (c *clientActor) open() {
	if c.opening || c.closed {
		return
	}
	c.opening = true
	w, server := c.w, c.w.server
	req := &directory.OpenRequest{
		Session: c.id, Role: c.role, Namespace: w.namespace(), Opaque: true, PieceBytes: pieceBytes, EngineID: engineID,
		Rank: c.rank, WorldSize: uint32(w.script.Workers), Node: c.node(), Views: c.viewer, //nolint:gosec // a few
	}
	if c.private {
		req.CPUBytes = privateBytes
	}
	if c.role == base.RoleScheduler {
		req.PieceBytes, req.Rank = 0, 0
	}
	if c.link != nil {
		req.PreviousServerEpoch, req.PreviousEpoch = c.link.server, c.link.who.Epoch
	}
	req.PreviousSecret = c.secret
	sent, process := c.now(), server.process
	call(w, c.process, process, "Open", once, func(answer func(*opened, error)) {
		out, err := server.open(c, req)
		answer(out, err)
	}, func(out *opened, err error, _ fate) {
		c.opening = false
		if c.closed {
			return
		}
		if err != nil {
			if errors.Is(err, base.ErrDenied) || errors.Is(err, base.ErrClosed) {
				w.note("%s: Open is refused: %v", c.process.name, err)
				if c.remote {
					// It cannot prove that it is the session's process: it must be started again.
					w.at(nil, time.Millisecond, func() {
						w.kill(c, "gives up")
						w.replace(int(c.rank))
					})
					return
				}
			}
			c.backoff = min(2*c.backoff, heartbeat)
			w.at(c.process, c.backoff, c.run)
			return
		}
		c.backoff = 20 * time.Millisecond
		c.install(server, out, process, sent)
	})
}

type opened struct {
	directory.OpenResult
	server      base.ServerEpoch
	incarnation base.Incarnation
	secret      directory.Secret
	returned    bool // from being suspect
}

// open is the server's side.
func (s *serverActor) open(c *clientActor, req *directory.OpenRequest) (*opened, error) {
	again := *req // each delivery has a secret of its own
	req = &again
	req.Secret = s.w.id()
	if !c.remote && (s.bound[c.id] == c.process.pid || s.seen[c.id] == c.process.pid) {
		req.Proof = directory.ProofProcess
	}
	req.Provable = !c.remote
	out := &opened{server: s.epoch, incarnation: s.incarnation, secret: req.Secret}
	err := s.step(func(d *directory.Directory) (err error) {
		out.returned = s.suspects(c.id)
		out.OpenResult, err = d.Open(s.now(), req)
		return err
	})
	if err != nil {
		return nil, err
	}
	s.peers[c.id] = c
	if !c.remote {
		s.bind(c.id, c.process)
	}
	return out, nil
}

// install makes a link the current one.
func (c *clientActor) install(server *serverActor, o *opened, process *process, sent time.Duration) {
	c.secret = o.secret
	if o.returned && c.core.Count().Ready > 0 {
		c.w.result.Returned++
	}
	l := &link{
		srv: server, who: directory.Caller{Session: c.id, Epoch: o.Epoch}, server: o.server, process: process, namespace: o.Namespace,
		incarnation: o.incarnation, pools: o.Pools,
	}
	old := c.link
	if old != nil {
		old.over = true
	}
	c.link = l
	c.w.note("%s opens epoch %d at server epoch %x, relist %v", c.process.name, o.Epoch, uint64(o.server), o.Relist)
	if c.openCount++; !c.w.faulty && c.openCount > mostOpens {
		c.w.fail("L1", "%s has opened %d times since the faults stopped", c.process.name, c.openCount)
	}
	if c.w.planted(UnknownIsAbort) {
		list := c.core.LostCommits(nil)
		slices.SortFunc(list, func(a, b session.Lost) int { return cmp.Compare(a.Sequence, b.Sequence) })
		for _, lost := range list {
			if lost.ServerEpoch != o.server {
				c.core.Resolved(lost.Sequence, hot.OutcomeAborted, nil)
			}
		}
	}
	snap := c.core.Opened(session.Opening{
		Epoch: o.Epoch, ServerEpoch: o.server, Sent: sent, TTL: ttl, Margin: margin, Relist: o.Relist, Pools: numbers(o.Pools),
	})
	c.unprepared, c.prepareNot = true, 0
	c.run()
	if snap == nil && old != nil {
		c.mark(c.core.Unmarked(nil), l) // their epoch changed between Commit and mark
	}
	if snap != nil {
		// The core's book of leases is a map: its order must not be the run's.
		slices.SortFunc(snap.Leases, func(a, b hot.RelistLease) int {
			return cmp.Or(cmp.Compare(a.Acquire, b.Acquire), cmp.Compare(a.Index, b.Index))
		})
		c.relist(l, snap)
	}
	c.kick()
}

func numbers(pools []directory.PoolGrant) []session.PoolNumber {
	var out []session.PoolNumber
	for _, p := range pools {
		out = append(out, session.PoolNumber{ID: p.Pool.ID, Medium: p.Pool.Medium, Number: p.Number})
	}
	return out
}

// relist sends the snapshot in two frames and applies the results.
func (c *clientActor) relist(l *link, snap *session.Snapshot) {
	w := c.w
	half := len(snap.Pages) / 2
	if len(c.views) > 0 && w.trouble(w.rough) {
		v := c.views[w.IntN(len(c.views))]
		w.at(c.process, w.between(0, 5*time.Millisecond), func() { c.unlook(v) })
	}
	var clear []session.PageRef
	var frame func(first, end int, leases []hot.RelistLease)
	frame = func(first, end int, leases []hot.RelistLease) {
		req := hot.RelistRequest{Last: end == len(snap.Pages)}
		for i := first; i < end; i++ {
			req.Pages = hot.AppendRelistPage(req.Pages, &snap.Pages[i])
		}
		for i := range leases {
			req.Leases = hot.AppendRelistLease(req.Leases, &leases[i])
		}
		req.Watermark = c.core.Watermark()
		call(w, c.process, l.process, "Relist", mayRepeat, func(answer func([]byte, error)) {
			var out []byte
			err := l.srv.step(func(d *directory.Directory) (err error) {
				if c.role == base.RoleScheduler && w.planted(SchedulerDenied) {
					return base.ErrDenied
				}
				out, err = d.Relist(l.srv.now(), l.who, &req, nil)
				return err
			})
			answer(out, err)
		}, func(out []byte, err error, _ fate) {
			if err != nil {
				c.clearMarks(clear)
				if !l.over {
					c.lose(l)
				}
				return
			}
			clear = c.core.Relisted(snap, first, out, clear)
			if !req.Last {
				frame(end, len(snap.Pages), snap.Leases)
				return
			}
			c.clearMarks(clear)
			done := c.core.RelistDone(snap)
			unmarked := c.core.Unmarked(nil)
			if done {
				w.result.Listed += len(snap.Pages)
				w.note("%s has listed %d pages and %d leases", c.process.name, len(snap.Pages), len(snap.Leases))
				c.mark(unmarked, l)
			}
			c.kick()
		})
	}
	if half > 0 && w.chance(50) {
		frame(0, half, nil)
		return
	}
	frame(0, len(snap.Pages), snap.Leases)
}

// lose ends an epoch.
func (c *clientActor) lose(l *link) {
	if c.link == l {
		c.core.Fence()
	}
	if !l.over {
		l.over = true
		c.w.note("%s loses epoch %d", c.process.name, l.who.Epoch)
		c.w.at(c.process, 0, c.run)
	}
}

func epochOver(err error) bool {
	return errors.Is(err, base.ErrStale) || errors.Is(err, base.ErrFenced) || errors.Is(err, base.ErrNotFound)
}

func (c *clientActor) failed(l *link, err error) {
	if epochOver(err) {
		c.lose(l)
	}
}

type beatAnswer struct {
	events      []directory.Event
	incarnation base.Incarnation
}

func (c *clientActor) beat(l *link) { c.beatThen(l, func(error) {}) }

// beatThen sends a heartbeat; then hears how it ended.
func (c *clientActor) beatThen(l *link, then func(error)) {
	w := c.w
	c.beats++
	req := &directory.HeartbeatRequest{
		Sequence: c.beats, LastEvent: c.core.LastEvent(), Watermark: c.core.Watermark(), Uses: make([]directory.PoolUse, 0, len(l.pools)),
	}
	for _, p := range l.pools {
		n := c.core.CountPool(p.Number)
		req.Uses = append(req.Uses, directory.PoolUse{
			Pool: p.Number, WritingBytes: n.WritingBytes, QuarantinedBytes: n.QuarantinedBytes, FreeBytes: n.FreeBytes,
		})
	}
	sent := c.now()
	call(w, c.process, l.process, "Heartbeat", mayRepeat, func(answer func(beatAnswer, error)) {
		out := beatAnswer{incarnation: l.srv.incarnation}
		err := l.srv.step(func(d *directory.Directory) (err error) {
			if _, err = d.Heartbeat(l.srv.now(), l.who, req); err == nil {
				out.events, err = d.PendingEvents(l.srv.now(), l.who, req.LastEvent, nil)
			}
			return err
		})
		answer(out, err)
		if err == nil && c.edge != nil {
			w.edgeBegins(c)
		}
	}, func(out beatAnswer, err error, f fate) {
		if err != nil {
			if f == notSent && l.process.ended {
				c.lose(l) // the connection is gone: open again
			}
			c.failed(l, err)
			then(err)
			return
		}
		if w.planted(ValidFromAnswer) {
			sent = c.now()
		}
		c.core.Acknowledged(l.who.Epoch, l.server, sent, ttl)
		l.incarnation = max(l.incarnation, out.incarnation)
		c.events(l.who.Epoch, l.server, out.events)
		_, lost := c.core.LostExpand(base.MediumCXL)
		if lost || c.core.Pending() > 0 || c.unprepared || len(c.core.LostCommits(nil)) > 0 || len(c.unholds) > 0 {
			c.kick()
		}
		then(nil)
	})
}

// events takes events of the server's stream in their order.
func (c *clientActor) events(epoch base.Epoch, server base.ServerEpoch, list []directory.Event) {
	l := c.current()
	if l == nil || l.who.Epoch != epoch || l.server != server || c.closed {
		return
	}
	var clear []session.PageRef
	fenced := false
	for _, e := range list {
		ev := session.Event{
			Number: e.Number, Kind: session.OtherEvent, PoolNumber: e.Pool, Region: e.Region, Offset: e.Offset, Generation: e.Generation,
		}
		switch e.Kind {
		case directory.EventRetire:
			ev.Kind = session.RetireEvent
			if c.w.planted(ReuseAtRetire) {
				ev.Kind = session.ReclaimEvent
			}
		case directory.EventReclaim:
			ev.Kind = session.ReclaimEvent
		case directory.EventDrain:
			ev.Kind = session.DrainEvent
		case directory.EventFence, directory.EventPools:
		}
		accepted, ref := c.core.Receive(ev)
		if accepted && e.Kind == directory.EventRetire {
			c.w.retired(e.Region, base.PageIndex(e.Offset/pageBytes), e.Generation, c.id) //nolint:gosec // a page
		}
		if accepted && e.Region != 0 && c.w.trace != nil {
			c.w.note("%s is told %v of page %d of region %d, generation %v", c.process.name, e.Kind, e.Offset/pageBytes, e.Region, e.Generation)
		}
		if !accepted {
			fenced = fenced || e.Kind == directory.EventFence
			continue
		}
		if ref != (session.PageRef{}) {
			clear = append(clear, ref)
		}
		switch e.Kind {
		case directory.EventFence:
			fenced = true
		case directory.EventPools:
			c.unprepared, c.prepareNot, l.proved = true, 0, false
			l.incarnation = max(l.incarnation, l.srv.incarnation)
		case directory.EventRetire, directory.EventReclaim, directory.EventDrain:
		}
	}
	c.clearMarks(clear)
	c.kick()
	if fenced {
		c.lose(l)
	}
}

// check: counts of the core, and what views show.
func (c *clientActor) check() {
	if !c.alive() {
		return
	}
	n := c.core.Count()
	if sum := n.Free + n.Writing + n.Committing + n.Ready + n.Retiring + n.Quarantined + n.Left; sum != n.Pages {
		c.w.fail("R5", "%s: %d pages, states sum to %d", c.process.name, n.Pages, sum)
	}
	if c.core.Leases() < 0 {
		c.w.fail("R4", "%s: %d leases", c.process.name, c.core.Leases())
	}
}

func (c *clientActor) checkView(v *view) {
	if !v.cell.shows(v.want) {
		c.w.fail("R3", "%s has a view of %v (%v) that shows %v", c.process.name, v.want, v.row.Location(), v.cell)
	}
}
