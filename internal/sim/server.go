package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// Times of sessions.
const (
	ttl       = 10 * time.Second
	margin    = time.Second
	heartbeat = time.Second

	drainPatience = 5 * time.Second
	sweepInterval = 20 * time.Second
	deleteWait    = 1500 * time.Millisecond
)

// serverActor is internal/server without its sockets: the directory, the link to the
// resource manager, the watcher of local processes.
type serverActor struct {
	w         *world
	id        base.OwnerID
	directory [base.IDBytes]byte // its state directory
	secretOf  base.OwnerSecret   // the operator gives it to all servers with the id
	dirty     bool               // to be checked
	checker   directory.Checker
	effects   []directory.Effect // room for those of a step

	// Of this life:
	process     *process
	dir         *directory.Directory
	epoch       base.ServerEpoch
	incarnation base.Incarnation
	token       core.Token // of the newest start
	link        *stream    // to the resource manager; nil while it is away
	connecting  bool
	seen        map[base.SessionID]int64 // processes of the holders before this start
	bound       map[base.SessionID]int64
	peers       map[base.SessionID]*clientActor
	deletes     map[directory.DeleteID][]func()
	flights     map[flightKey][]func()
	acquired    map[flightKey]bool
	meant       map[flightKey][]*stored
	draining    map[base.RegionID]time.Duration
	waiting     []func() // for a region that goes free
}

type flightKey struct {
	session   base.SessionID
	operation base.Sequence
}

func newServer(w *world) *serverActor {
	s := &serverActor{w: w, id: w.id(), directory: w.id()}
	var err error
	if s.secretOf, err = base.MakeOwnerSecret(append(s.id[:], s.directory[:]...)); err != nil {
		w.fail("sim", "secret: %v", err)
	}
	return s
}

// now is what its clock says.
func (s *serverActor) now() time.Duration { return s.process.clock() }

// claim is what the calls of an owner carry.
func (s *serverActor) claim(inc base.Incarnation) core.Claim {
	token := s.token
	return core.Claim{Owner: s.id, Incarnation: inc, Token: token[:]}
}

func (s *serverActor) alive() bool { return s.process != nil && !s.process.ended }

func (s *serverActor) start() {
	w := s.w
	s.process = w.newProcess(fmt.Sprintf("server%d", w.result.ServerRestarts+w.result.Rolls))
	s.epoch = base.ServerEpoch(w.Uint64() | 1)
	s.incarnation, s.link, s.connecting, s.waiting = 0, nil, false, nil
	s.seen, s.bound = map[base.SessionID]int64{}, map[base.SessionID]int64{}
	s.peers = map[base.SessionID]*clientActor{}
	s.deletes = map[directory.DeleteID][]func(){}
	s.flights, s.acquired = map[flightKey][]func(){}, map[flightKey]bool{}
	s.meant = map[flightKey][]*stored{}
	s.draining = map[base.RegionID]time.Duration{}
	manager := directory.ManagerExpected
	if w.planted(OwnerNotAwaited) {
		manager = directory.ManagerNone
	}
	d, err := directory.New(directory.Config{
		ServerEpoch: s.epoch, TTL: ttl, RequestLeaseTTL: 5 * time.Second, EventTimeout: 20 * time.Second, RetryInterval: time.Second,
		CPUBudgetBytes: cpuBudgetBytes, HashSeed: w.Uint64(), Manager: manager,
		Limits: directory.Limits{
			MaxObjects: 4096, MaxExtraReplicas: 4096, MaxRegions: 64, MaxRegionPages: 64, MaxPages: 1024, MaxEvents: 16, MaxOperations: 512,
		},
	})
	if err != nil {
		w.fail("sim", "the directory cannot be made: %v", err)
		return
	}
	s.dir = d
	w.note("%s starts with epoch %x", s.process.name, uint64(s.epoch))
	w.by(s.process, func() {
		s.connect()
		s.tick()
		w.at(s.process, w.between(time.Second, sweepInterval), s.sweep)
	})
}

// tick calls the directory's clock.
func (s *serverActor) tick() {
	var next time.Duration
	_ = s.step(func(d *directory.Directory) error { next = d.Tick(s.now()); return nil })
	wait := min(max(next-s.now(), time.Millisecond), time.Second)
	s.w.at(s.process, wait, s.tick)
}

// step runs f and carries out what it left.
func (s *serverActor) step(f func(d *directory.Directory) error) error {
	s.dirty = true
	err := f(s.dir)
	list := s.dir.AppendEffects(s.effects[:0])
	s.effects = nil // one that calls step again finds none
	for i := range list {
		s.perform(&list[i])
	}
	s.effects = list
	return err
}

// suspects reports whether a session is hidden and holds something.
func (s *serverActor) suspects(id base.SessionID) bool {
	for _, x := range s.dir.Usage(s.now()).Sessions {
		if x.Session == id {
			return x.State == directory.StateSuspect && x.Regions > 0
		}
	}
	return false
}

func (s *serverActor) perform(e *directory.Effect) {
	w := s.w
	switch e.Kind {
	case directory.EffectSendEvent:
		if e.Event.Kind == directory.EventRetire {
			w.hidden(s, e.Event.Region, base.PageIndex(e.Event.Offset/pageBytes), e.Event.Generation, e.Session)
		}
		c := s.peers[e.Session]
		if c == nil || w.trouble(10) {
			return // the heartbeat brings it
		}
		event, epoch, server := e.Event, e.Epoch, s.epoch
		w.at(c.process, w.latency(), func() { c.events(epoch, server, []directory.Event{event}) })
	case directory.EffectFreeRegion:
		effect := *e
		s.freeAtManager(effect.Region, effect.Incarnation, func(err error) {
			_ = s.step(func(d *directory.Directory) error {
				d.RegionFreed(s.now(), effect.Pool, effect.Region, err)
				return nil
			})
		})
	case directory.EffectClearRecords:
		effect := *e
		done := func(_ struct{}, err error, _ fate) {
			_ = s.step(func(d *directory.Directory) error {
				d.RecordsCleared(s.now(), effect.Pool, effect.Region, effect.Pages, err)
				return nil
			})
		}
		if s.link == nil {
			w.at(s.process, time.Millisecond, func() { done(struct{}{}, errNotSent, notSent) })
			return
		}
		call(w, s.process, w.manager.process, "ClearRecords", mayRepeat,
			w.manager.clear(s.claim(s.incarnation), effect.Region, effect.Pages, effect.WriterLeft), done)
	case directory.EffectDeleteDone:
		for _, f := range s.deletes[e.Delete] {
			w.at(s.process, 0, f)
		}
		delete(s.deletes, e.Delete)
	case directory.EffectSessionExpired:
		if w.trace != nil {
			w.note("%s: session of %s expired", s.process.name, w.nameOf(e.Session))
		}
		if w.planted(ExpiryIsProof) {
			id := e.Session
			w.at(s.process, 0, func() { s.sessionGone(id, directory.GonePidfd) })
		}
	case directory.EffectCloseConnections, directory.EffectCapacityReturned:
	}
}

func (s *serverActor) handle(r base.RegionID, inc base.Incarnation) core.Handle {
	return core.Handle{Pool: s.w.manager.pool(), Region: r, Incarnation: inc}
}

// freeAtManager gives a region back.
func (s *serverActor) freeAtManager(id base.RegionID, inc base.Incarnation, done func(error)) {
	w := s.w
	if s.link == nil {
		w.at(s.process, time.Millisecond, func() { done(errNotSent) })
		return
	}
	s.draining[id] = w.now
	delete(w.acked, id) // from here on it may be free
	w.freed[id] = true
	call(w, s.process, w.manager.process, "Free", mayRepeat, w.manager.free(s.claim(s.incarnation), s.handle(id, inc)),
		func(draining bool, err error, _ fate) {
			if err == nil && !draining || errors.Is(err, base.ErrNotFound) {
				s.wentFree(id)
			}
			s.checkFenced(err)
			done(err)
		})
}

func (s *serverActor) wentFree(id base.RegionID) {
	delete(s.draining, id)
	list := s.waiting
	s.waiting = nil
	for _, f := range list {
		s.w.at(s.process, 0, f)
	}
}

// checkFenced ends a server that a newer incarnation has fenced.
func (s *serverActor) checkFenced(err error) {
	if errors.Is(err, base.ErrFenced) && !s.w.planted(FencedGoesOn) {
		p := s.process
		s.w.at(p, 0, func() {
			s.w.note("%s is fenced and stops", p.name)
			s.w.result.Fenced++
			s.w.stopServer(s)
		})
	}
}

// sessionGone tells the directory of a proof.
func (s *serverActor) sessionGone(id base.SessionID, proof directory.GoneProof) {
	if s.w.planted(CrashNotTold) && proof == directory.GonePidfd {
		return
	}
	if s.w.trace != nil {
		s.w.note("%s: session of %s is gone (%v)", s.process.name, s.w.nameOf(id), proof)
	}
	delete(s.bound, id)
	delete(s.peers, id)
	_ = s.step(func(d *directory.Directory) error { d.SessionGone(s.now(), id, proof); return nil })
}

// bind watches a session's process; one that has ended already is reported at once.
func (s *serverActor) bind(id base.SessionID, p *process) {
	s.bound[id] = p.pid
	if p.ended {
		s.processEnded(p)
	}
}

// processEnded: the watcher saw a local process end.
func (s *serverActor) processEnded(p *process) {
	if !s.alive() {
		return
	}
	s.w.at(s.process, s.w.between(time.Millisecond, 1500*time.Millisecond), func() {
		for _, c := range s.w.clients {
			if pid, ok := s.bound[c.id]; ok && pid == p.pid {
				s.sessionGone(c.id, directory.GonePidfd)
			}
		}
	})
}

// connect makes the server an owner at the resource manager, takes over what older
// incarnations left, and follows the owner's events.
func (s *serverActor) connect() {
	if s.link != nil || s.connecting {
		return
	}
	s.connecting = true
	w := s.w
	again := func() {
		s.connecting = false
		w.at(s.process, w.between(50*time.Millisecond, time.Second), s.connect)
	}
	call(w, s.process, w.manager.process, "ListPools", mayRepeat, w.manager.list(core.Claim{}), func(l ownerList, err error, _ fate) {
		if err != nil {
			again()
			return
		}
		s.setPools(l.pools)
		if s.incarnation != 0 {
			s.watch(again)
			return
		}
		s.startOwner(again)
	})
}

func (s *serverActor) setPools(list []core.Pool) {
	var pools []directory.Pool
	for _, p := range list {
		pools = append(pools, directory.Pool{
			ID: p.ID, Medium: base.MediumCXL, Tier: base.TierL1, Scope: base.ScopeDomain, Coherence: p.Coherence,
			CapacityBytes: p.CapacityBytes, LargestFreeBytes: p.LargestFreeBytes, Online: p.OfflineReason == "",
		})
	}
	if err := s.step(func(d *directory.Directory) error { return d.SetPools(s.now(), pools) }); err != nil {
		s.w.fail("sim", "pools are refused: %v", err)
	}
}

func (s *serverActor) startOwner(again func()) {
	w := s.w
	node, boot := w.manager.cfg.Node, w.manager.cfg.Boot
	call(w, s.process, w.manager.process, "StartOwner", once, w.manager.startOwner(core.StartOwner{
		Owner: s.id, Name: "server", Node: node, Boot: boot, Directory: s.directory, Locked: true, Process: w.manager.processID(s.process.pid),
		Secret: s.secretOf,
	}), func(started core.Started, err error, _ fate) {
		if err != nil {
			again()
			return
		}
		s.token = started.Token
		call(w, s.process, w.manager.process, "ListRegions", mayRepeat, w.manager.list(s.claim(started.Incarnation)), func(l ownerList, err error, _ fate) {
			if err != nil {
				again()
				return
			}
			s.recover(started, l)
			s.incarnation = started.Incarnation
			w.note("%s is owner with incarnation %d", s.process.name, started.Incarnation)
			s.watch(again)
		})
	})
}

// recover takes over the regions of older incarnations.
func (s *serverActor) recover(started core.Started, l ownerList) {
	now := s.now()
	holders := map[base.RegionID][]directory.Holder{}
	for _, h := range l.holds {
		if h.Server == s.id {
			holders[h.Region] = append(holders[h.Region], directory.Holder{Session: h.Session, Views: h.Views})
			s.seen[h.Session] = h.Process.PID
		}
	}
	var list []directory.RecoveredRegion
	for _, r := range l.regions {
		if r.OwnerIncarnation == started.Incarnation || r.State == core.RegionDraining ||
			s.w.planted(RecoverHeldOnly) && len(holders[r.ID]) == 0 {
			continue
		}
		list = append(list, directory.RecoveredRegion{
			Pool: r.Pool, Region: r.ID, Incarnation: r.Incarnation, Place: placeOf(r.Region), Namespace: r.Namespace, Writer: r.Writer,
			Write: r.Handle.Token, Holders: holders[r.ID],
		})
	}
	if s.w.planted(ForgetHolders) {
		for i := range list {
			list[i].Holders = slices.DeleteFunc(list[i].Holders, func(h directory.Holder) bool { return h.Session != list[i].Writer })
		}
	}
	err := s.step(func(d *directory.Directory) error {
		if err := d.RecoverRegions(now, list); err != nil {
			return err
		}
		if started.PredecessorsEnded || s.w.planted(FenceStartsTTL) {
			d.PredecessorsEnded(now)
		}
		return d.SetOwner(now, started.Incarnation)
	})
	if err != nil {
		s.w.fail("sim", "regions cannot be recovered: %v", err)
	}
}

func placeOf(r core.Region) directory.Place {
	return directory.Place{
		Offset: r.Extent.Offset, ExtentBytes: r.Extent.Length, PageBytes: r.Plan.PageBytes, PageCount: r.Plan.PageCount,
		PieceBytes: r.Plan.PieceBytes, TableOffset: r.Plan.TableOffset,
	}
}

// watch opens the owner's stream; its snapshot makes the link usable.
func (s *serverActor) watch(again func()) {
	w := s.w
	settled := false
	retry := func() {
		if !settled {
			settled = true
			again()
		}
	}
	before := s.dir.Silent(s.now(), nil)
	call(w, s.process, w.manager.process, "WatchOwner", once, func(answer func(*stream, error)) {
		w.manager.watchOwner(s, s.claim(s.incarnation), func(mine *stream, holders []base.SessionID) {
			if settled || mine.from.ended || mine.broken {
				return
			}
			settled = true
			s.link, s.connecting = mine, false
			w.note("%s: the resource manager is there", s.process.name)
			s.watched(before, holders)
			w.at(s.process, w.latency(), s.sweepOnce)
		})(answer)
	}, func(_ *stream, err error, _ fate) {
		s.checkFenced(err)
		if err != nil {
			retry()
		}
	})
	// The answer may come and the snapshot not: the connection broke between the two.
	w.at(s.process, 3*callTimeout, retry)
}

// linkLost: the connection to the resource manager broke.
func (s *serverActor) linkLost() {
	if s.link == nil {
		return
	}
	s.w.note("%s: the resource manager is away", s.process.name)
	s.link.broken = true
	s.link = nil
	s.w.at(s.process, s.w.between(50*time.Millisecond, time.Second), s.connect)
}

func (s *serverActor) ownerEvent(e core.Event) {
	switch e.Kind {
	case core.EventSessionGone:
		proof := directory.GonePidfd
		if e.Proof == core.ProofOperator {
			proof = directory.GoneOperator
		}
		s.sessionGone(e.Session, proof)
	case core.EventRegionFreed:
		s.wentFree(e.Region)
	case core.EventFenced:
		if e.Incarnation != s.incarnation {
			s.checkFenced(base.ErrFenced)
		}
	case core.EventDraining:
	}
}

// watched compares the holders at the resource manager with who is silent here, and was
// before they were asked for.
func (s *serverActor) watched(before []directory.Caller, holders []base.SessionID) {
	for _, x := range s.dir.Silent(s.now(), nil) {
		if _, bound := s.bound[x.Session]; !bound && slices.Contains(before, x) && !slices.Contains(holders, x.Session) {
			s.sessionGone(x.Session, directory.GoneDeregistered)
		}
	}
}

// holdersOf lists who holds regions of an owner.
func holdersOf(holds []core.HoldInfo, owner base.OwnerID) (out []base.SessionID) {
	for _, h := range holds {
		if h.Server == owner {
			out = append(out, h.Session)
		}
	}
	return out
}

func (s *serverActor) sweep() {
	s.sweepOnce()
	s.w.at(s.process, sweepInterval, s.sweep)
}

// sweepOnce frees the regions on the resource manager's list that nobody needs.
func (s *serverActor) sweepOnce() {
	w := s.w
	if s.link == nil {
		return
	}
	inc := s.incarnation
	before := s.dir.Silent(s.now(), nil)
	call(w, s.process, w.manager.process, "ListRegions", mayRepeat, w.manager.list(s.claim(inc)), func(l ownerList, err error, _ fate) {
		s.checkFenced(err)
		if err != nil {
			return
		}
		s.setPools(l.pools)
		if l.ended && s.dir.RelistIncomplete() {
			_ = s.step(func(d *directory.Directory) error { d.PredecessorsEnded(s.now()); return nil })
		}
		if !w.planted(SweepBlind) {
			s.watched(before, holdersOf(l.holds, s.id))
		}
		inFlight, relisting := s.dir.AllocationInFlight(), s.dir.RelistIncomplete()
		for _, r := range l.regions {
			own := r.OwnerIncarnation == inc
			switch {
			case r.State == core.RegionDraining, s.dir.KnowsRegion(r.Pool, r.ID):
			case own && inFlight, !own && relisting:
				w.at(s.process, time.Second, s.sweepOnce)
				return
			case w.planted(LeakOnError):
			default:
				w.note("%s: region %d is nobody's", s.process.name, r.ID)
				s.freeAtManager(r.ID, r.Incarnation, func(error) {})
			}
		}
	})
}
