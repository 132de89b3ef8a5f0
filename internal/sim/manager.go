package sim

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// managerActor is internal/rm without gRPC, bbolt and a device: a committer that takes
// waiting requests into one batch, and a durable store that has a batch whole or not.
type managerActor struct {
	w       *world
	cfg     core.Config
	durable map[storeKey][]byte
	header  poolfmt.Header // on the device
	started bool           // at least once

	// Of this life:
	process *process
	core    *core.Core
	pending *core.Batch
	jobs    []*job
	busy    bool
	gone    []core.ProcessID

	owner    *ownerStream
	sessions []*sessionStream
}

type storeKey struct{ bucket, key string }

type job struct {
	run    func(b *core.Batch) error
	device func() error
	done   func(error)
	err    error
}

type ownerStream struct {
	*stream
	incarnation base.Incarnation
	take        func(core.Event)
}

type sessionStream struct {
	*stream
	session base.SessionID
	take    func(base.RegionID)
}

func newManager(w *world) *managerActor {
	a := &managerActor{w: w, durable: map[storeKey][]byte{}}
	a.cfg = core.Config{Store: w.id(), Node: w.id(), Boot: w.id()}
	secret := w.id()
	copy(a.cfg.Secret[:], secret[:])
	a.header = poolfmt.Header{
		Static: poolfmt.Static{Pool: w.id(), Store: a.cfg.Store, Coherence: base.CoherenceHardware}, Slot: poolfmt.FirstSlot(),
	}
	return a
}

func (a *managerActor) alive() bool { return a.process != nil && !a.process.ended }

func (a *managerActor) pool() base.PoolID { return a.header.Pool }

func (a *managerActor) peer(p *process) core.Peer {
	return core.Peer{Process: a.processID(p.pid), Node: a.cfg.Node, Boot: a.cfg.Boot}
}

func (a *managerActor) processID(pid int64) core.ProcessID {
	return core.ProcessID{PID: pid, Namespace: 1, StartTicks: uint64(pid), Boot: a.cfg.Boot} //nolint:gosec // a count
}

// start loads the durable store into a new life.
func (a *managerActor) start() {
	w := a.w
	a.process = w.newProcess(fmt.Sprintf("rm%d", w.result.ManagerRestarts))
	a.pending, a.jobs, a.busy, a.gone = &core.Batch{}, nil, false, nil
	a.owner, a.sessions = nil, nil
	if !a.started {
		a.core = core.New(a.cfg)
	} else {
		loader := core.NewLoader(a.cfg)
		keys := make([]storeKey, 0, len(a.durable))
		for k := range a.durable {
			keys = append(keys, k)
		}
		slices.SortFunc(keys, func(x, y storeKey) int {
			return cmp.Or(cmp.Compare(x.bucket, y.bucket), cmp.Compare(x.key, y.key))
		})
		for _, k := range keys {
			if err := loader.Row(k.bucket, k.key, a.durable[k]); err != nil {
				w.fail("RM-07", "the store cannot be loaded: %v", err)
				return
			}
		}
		c, err := loader.Finish()
		if err != nil {
			w.fail("RM-07", "the store does not fit together: %v", err)
			return
		}
		a.core = c
	}
	a.core.NoteOwnBoot(a.pending)
	_, write, err := a.core.Attach(a.pending, core.Device{
		Header: a.header, Name: "pool", Path: "pool", Kind: core.KindFile, Bytes: deviceBytes,
	})
	if err != nil {
		w.fail("RM-07", "the device does not fit the store: %v", err)
		return
	}
	if write != nil {
		a.writeSlot(*write)
	}
	if !a.pending.IsEmpty() {
		slots := a.core.Seal(a.pending)
		a.commit(a.pending)
		for _, s := range slots {
			a.writeSlot(s)
		}
		a.pending = &core.Batch{}
	}
	w.note("%s starts: %s", a.process.name, a.core.Describe())
	a.started = true
	for _, p := range a.core.Processes() {
		if w.byPID(p.PID).ended {
			a.watchedEnd(p)
		}
	}
	a.checkAcknowledged()
}

// checkAcknowledged: W1, what was answered is still there.
func (a *managerActor) checkAcknowledged() {
	have := map[base.RegionID]base.Extent{}
	for _, r := range a.regions() {
		have[r.ID] = r.Extent
	}
	for _, id := range sortedRegions(a.w.acked) {
		if have[id] != a.w.acked[id] {
			a.w.fail("W1", "region %d was acknowledged at %v; after a restart of the resource manager it is at %v", id, a.w.acked[id], have[id])
		}
	}
}

func sortedRegions[V any](m map[base.RegionID]V) []base.RegionID {
	out := make([]base.RegionID, 0, len(m))
	for id := range m {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

func (a *managerActor) regions() []core.RegionInfo {
	list, _, err := a.core.ListRegions(core.ListRegions{})
	if err != nil {
		a.w.fail("E1", "listing regions: %v", err)
	}
	return list
}

func (a *managerActor) commit(b *core.Batch) {
	for _, c := range b.Changes() {
		k := storeKey{c.Bucket, c.Key}
		if c.Value == nil {
			delete(a.durable, k)
		} else {
			a.durable[k] = bytes.Clone(c.Value)
		}
	}
}

func (a *managerActor) writeSlot(s core.SlotWrite) {
	a.header.Slot = s.Slot
	a.core.SlotWritten(s)
}

// watchedEnd: the watcher saw a process end.
func (a *managerActor) watchedEnd(p core.ProcessID) {
	if !a.alive() {
		return
	}
	a.w.at(a.process, a.w.between(time.Millisecond, 1500*time.Millisecond), func() {
		a.w.note("%s: %s is gone", a.process.name, p)
		a.gone = append(a.gone, p)
		a.kick()
	})
}

// do gives the committer a request.
func (a *managerActor) do(j *job) {
	a.jobs = append(a.jobs, j)
	a.kick()
}

func (a *managerActor) kick() {
	if a.busy {
		return
	}
	a.busy = true
	a.w.at(a.process, a.w.between(50*time.Microsecond, time.Millisecond), a.cycle)
}

// cycle is one batch: run, commit, device, slots, answers. A kill can come between any
// two of them.
func (a *managerActor) cycle() {
	w, p := a.w, a.process
	batch := a.jobs
	a.jobs = nil
	for _, g := range a.gone {
		a.core.ProcessGone(a.pending, g, core.ProofPidfd)
	}
	a.gone = nil
	for _, j := range batch {
		j.err = j.run(a.pending)
	}
	if len(batch) > 0 && !a.pending.IsEmpty() && w.trouble(w.rough/25) {
		w.at(nil, w.between(0, 10*time.Millisecond), func() {
			if p == a.process {
				w.stopManager()
			}
		})
	}
	var slots []core.SlotWrite
	if !a.pending.IsEmpty() {
		slots = a.core.Seal(a.pending)
	}
	answer := func(err error) {
		for _, j := range batch {
			if j.err == nil {
				j.err = err
			}
			j.done(j.err)
		}
	}
	devices := func() {
		for _, j := range batch {
			if j.err == nil && j.device != nil {
				j.err = j.device()
			}
		}
	}
	if w.opt.Fault == AckBeforeCommit {
		devices()
		answer(nil)
		batch = nil
	}
	w.at(p, w.between(100*time.Microsecond, 8*time.Millisecond), func() {
		if !a.pending.IsEmpty() && w.trouble(1) {
			w.note("%s: the commit fails", p.name)
			for _, j := range batch {
				j.err = fmt.Errorf("%w: the store cannot be written", base.ErrInternal)
				j.done(j.err)
			}
			w.at(p, 500*time.Millisecond, func() { a.busy = false; a.kick() })
			return
		}
		a.commit(a.pending)
		w.at(p, w.between(10*time.Microsecond, time.Millisecond), func() {
			devices()
			w.at(p, w.between(10*time.Microsecond, time.Millisecond), func() {
				for _, s := range slots {
					a.writeSlot(s)
				}
				events := a.pending.Events()
				a.pending = &core.Batch{}
				answer(nil)
				for _, e := range events {
					a.publish(e)
				}
				a.busy = false
				if len(a.jobs)+len(a.gone) > 0 {
					a.kick()
				}
			})
		})
	})
}

func (a *managerActor) publish(e core.Event) {
	switch e.Kind {
	case core.EventDraining:
		for _, s := range a.sessions {
			if slices.Contains(e.Sessions, s.session) {
				s.send(func() { s.take(e.Region) })
			}
		}
	default:
		if o := a.owner; o != nil && slices.Contains(e.Owners, a.w.server.id) {
			o.send(func() { o.take(e) })
		}
	}
}

// prepare writes a region's line and table.
func (a *managerActor) prepare(r core.Region) error {
	at := regionAt{r.Extent, r.Plan}
	a.w.note("%s prepares region %d %v", a.process.name, r.ID, r.Extent)
	a.w.memory.zero(at)
	a.core.Prepared(r.ID)
	return nil
}

// request runs a change of the core for a caller and answers what it gave.
func request[T any](a *managerActor, run func(b *core.Batch) (T, error), device func(T) error) func(answer func(T, error)) {
	return func(answer func(T, error)) {
		var out T
		j := &job{
			run:  func(b *core.Batch) (err error) { out, err = run(b); return err },
			done: func(err error) { answer(out, err) },
		}
		if device != nil {
			j.device = func() error { return device(out) }
		}
		a.do(j)
	}
}

func (a *managerActor) nowMS() int64 { return a.w.now.Milliseconds() }

func (a *managerActor) startOwner(req core.StartOwner) func(func(core.Started, error)) {
	return request(a, func(b *core.Batch) (core.Started, error) { return a.core.StartOwner(b, a.nowMS(), req) }, nil)
}

func (a *managerActor) allocate(req core.Allocate) func(func(core.Allocated, error)) {
	return request(a, func(b *core.Batch) (core.Allocated, error) {
		out, err := a.core.Allocate(b, a.nowMS(), req)
		if err == nil {
			at := regionAt{out.Region.Extent, out.Region.Plan}
			if old, ok := a.w.extents[out.Region.ID]; ok && (old.extent != at.extent || old.plan != at.plan) && a.w.acked[out.Region.ID].Length > 0 {
				a.w.fail("W1", "region %d was at %v and is at %v", out.Region.ID, old.extent, at.extent)
			}
			a.w.extents[out.Region.ID] = at
		}
		return out, err
	}, func(out core.Allocated) error {
		if out.Prepare {
			return a.prepare(out.Region)
		}
		return nil
	})
}

func (a *managerActor) free(who core.Claim, h core.Handle) func(func(bool, error)) {
	return request(a, func(b *core.Batch) (bool, error) {
		if a.w.opt.Fault == FreeIgnoresHolds {
			a.dropHoldsOf(b, h)
		}
		return a.core.Free(b, who, h)
	}, nil)
}

// dropHoldsOf plants FreeIgnoresHolds: every hold of a region ends as if by its mapper.
func (a *managerActor) dropHoldsOf(b *core.Batch, h core.Handle) {
	holds, _ := a.core.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
	for _, x := range holds {
		if x.Region == h.Region {
			_, _ = a.core.Unhold(b, a.nowMS(), core.Unhold{
				Session: x.Session, Sequence: x.Sequence + 1, Handles: []core.Handle{h},
				Peer: core.Peer{Process: x.Process, Node: x.Node, Boot: a.cfg.Boot},
			})
		}
	}
}

func (a *managerActor) clear(who core.Claim, id base.RegionID, pages []base.PageIndex, left bool) func(func(struct{}, error)) {
	return request(a, func(*core.Batch) (struct{}, error) {
		r, blank, err := a.core.Records(who, a.pool(), id, left)
		if err != nil || blank {
			return struct{}{}, err
		}
		for _, p := range pages {
			delete(a.w.memory.marks, regionAt{r.Extent, r.Plan}.record(p))
		}
		return struct{}{}, nil
	}, nil)
}

func (a *managerActor) hold(req core.Hold) func(func(core.Held, error)) {
	req.Nonce = a.w.id()
	return request(a, func(b *core.Batch) (core.Held, error) {
		out, err := a.core.Hold(b, a.nowMS(), req)
		if p := a.w.byPID(req.Peer.Process.PID); err == nil && p.ended {
			a.watchedEnd(req.Peer.Process) // it had ended before it was watched
		}
		return out, err
	}, func(out core.Held) error {
		for _, r := range out.Prepare {
			if err := a.prepare(r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *managerActor) unhold(req core.Unhold) func(func(struct{}, error)) {
	return request(a, func(b *core.Batch) (struct{}, error) {
		_, err := a.core.Unhold(b, a.nowMS(), req)
		return struct{}{}, err
	}, nil)
}

type ownerList struct {
	regions []core.RegionInfo
	holds   []core.HoldInfo
	pools   []core.Pool
	ended   bool // predecessors
}

// list answers all that a server asks of its regions.
func (a *managerActor) list(who core.Claim) func(func(ownerList, error)) {
	return request(a, func(*core.Batch) (out ownerList, err error) {
		out.pools = a.core.Pools()
		if who.Incarnation == 0 {
			return out, nil
		}
		if out.regions, _, err = a.core.ListRegions(core.ListRegions{Claim: who, Pool: a.pool()}); err != nil {
			return out, err
		}
		out.holds, _ = a.core.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
		for _, o := range a.core.ListOwners() {
			if o.ID == who.Owner && o.Incarnation == who.Incarnation {
				out.ended = o.PredecessorsEnded
			}
		}
		return out, nil
	}, nil)
}

// watchOwner opens the event stream of an owner; its first event is the list of holders.
func (a *managerActor) watchOwner(to *process, who core.Claim, snapshot func([]base.SessionID), take func(core.Event)) func(func(*stream, error)) {
	s := a.w.newStream(a.process, to)
	var holders []base.SessionID
	return request(a, func(*core.Batch) (*stream, error) {
		if err := a.core.Claim(who); err != nil {
			return nil, err
		}
		a.owner = &ownerStream{stream: s, incarnation: who.Incarnation, take: take}
		holders = a.core.OwnerSessions(who.Owner)
		return s, nil
	}, func(*stream) error {
		s.send(func() { snapshot(holders) })
		return nil
	})
}

func (a *managerActor) watchSession(to *process, id base.SessionID, take func(base.RegionID)) *stream {
	s := a.w.newStream(a.process, to)
	kept := a.sessions[:0]
	for _, old := range a.sessions {
		if old.session != id && !old.to.ended {
			kept = append(kept, old)
		}
	}
	a.sessions = append(kept, &sessionStream{stream: s, session: id, take: take})
	for _, r := range a.core.SessionDraining(id) {
		s.send(func() { take(r.ID) })
	}
	return s
}

// check: E1, E2, and that nothing is given out over a live mapping.
func (a *managerActor) check(regions []core.RegionInfo) {
	w := a.w
	var sum uint64
	for i, r := range regions {
		sum += r.Extent.Length
		if r.Extent.Offset%poolfmt.Alignment != 0 || r.Extent.Offset < poolfmt.DataOffset || r.Extent.End() > deviceBytes {
			w.fail("E1", "region %d lies at %v", r.ID, r.Extent)
		}
		for _, o := range regions[:i] {
			if o.Extent.Overlaps(r.Extent) {
				w.fail("E1", "region %d at %v overlaps region %d at %v", r.ID, r.Extent, o.ID, o.Extent)
			}
		}
		for _, m := range w.mappings {
			if m.region != r.ID && m.at.extent.Overlaps(r.Extent) {
				w.fail("R3", "region %d at %v was given out while %s maps region %d at %v", r.ID, r.Extent, m.process.name, m.region, m.at.extent)
			}
		}
	}
	for _, p := range a.core.Pools() {
		if p.AllocatedBytes != sum || p.AllocatedBytes > p.CapacityBytes || p.RegionCount != len(regions) {
			w.fail("E2", "%d regions have %d bytes, the pool says %d regions and %d of %d bytes", len(regions), sum, p.RegionCount, p.AllocatedBytes, p.CapacityBytes)
		}
	}
	for _, m := range w.mappings {
		held := false
		for _, r := range regions {
			held = held || r.ID == m.region && slices.Contains(r.Holders, m.session)
		}
		if !held {
			w.fail("R3", "%s maps region %d and no hold of it is on record", m.process.name, m.region)
		}
	}
	for _, id := range sortedRegions(w.acked) {
		if !slices.ContainsFunc(regions, func(r core.RegionInfo) bool { return r.ID == id && r.Extent == w.acked[id] }) {
			w.fail("W1", "region %d was acknowledged at %v and is not on the list", id, w.acked[id])
		}
	}
}
