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
	header  [poolfmt.HeaderBytes]byte // on the device
	static  poolfmt.Static
	started bool              // at least once
	listed  []core.RegionInfo // by the last check
	pools   []core.Pool       // for the same

	// Of this life:
	process *process
	core    *core.Core
	pending *core.Batch
	jobs    []*job
	busy    bool
	gone    []core.ProcessID
	watches map[core.ProcessID]bool
	phase   phase
	slots   []core.SlotWrite // that are being flushed

	owners   []*ownerStream
	sessions []*sessionStream
}

type storeKey struct{ bucket, key string }

// phase is what a committer is in the middle of.
type phase uint8

const (
	thinking  phase = iota
	writing         // the store: a crash loses the batch whole
	preparing       // region lines and tables
	flushing        // slots: a crash may tear one
)

type job struct {
	run    func(b *core.Batch) error
	device func() error
	done   func(error)
	err    error
}

type ownerStream struct {
	*stream
	server *serverActor
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
	a.static = poolfmt.Static{Pool: w.id(), Store: a.cfg.Store, Coherence: base.CoherenceHardware}
	a.header = poolfmt.EncodeHeader(poolfmt.Header{Static: a.static, Slot: poolfmt.FirstSlot()})
	return a
}

func (a *managerActor) alive() bool { return a.process != nil && !a.process.ended }

func (a *managerActor) pool() base.PoolID { return a.static.Pool }

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
	a.owners, a.sessions, a.watches = nil, nil, map[core.ProcessID]bool{}
	a.phase, a.slots = thinking, nil
	w.dirty.manager = true
	if !a.load() {
		return
	}
	a.core.NoteOwnBoot(a.pending)
	header, err := poolfmt.DecodeHeader(a.header[:])
	if err != nil {
		w.fail("RM-07", "the device's header: %v", err)
		return
	}
	_, write, err := a.core.Attach(a.pending, core.Device{
		Header: header, Name: "pool", Path: "pool", Kind: core.KindFile, Bytes: deviceBytes,
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
	if !w.planted(WatchListForgotten) {
		for _, p := range a.core.Processes() {
			a.watch(p)
		}
	}
	a.checkAcknowledged()
}

// load makes the core of what is durable.
func (a *managerActor) load() bool {
	w := a.w
	if !a.started {
		a.core = core.New(a.cfg)
		return true
	}
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
			return false
		}
	}
	c, err := loader.Finish()
	if err != nil {
		w.fail("RM-07", "the store does not fit together: %v", err)
		return false
	}
	a.core = c
	return true
}

// crash leaves behind what a power cut or SIGKILL does in the middle of a cycle. The
// store is bbolt's: its last transaction is there whole or not at all. A slot is a line of
// 64 bytes that is written in words of 8.
func (a *managerActor) crash() {
	switch a.phase {
	case thinking:
	case writing:
		a.w.result.LostWrites++
	case preparing:
		a.w.result.SlotsMissed++
	case flushing:
		a.w.result.SlotsMissed++
		if len(a.slots) > 0 && a.w.chance(60) {
			s := a.slots[0]
			line := poolfmt.EncodeSlot(s.Pool, s.Slot)
			words := 1 + a.w.IntN(3) // of the four that are not zero
			copy(a.header[poolfmt.SlotOffset(s.Slot.Sequence):], line[:8*words])
			a.w.note("the slot of sequence %d is torn after %d words", s.Slot.Sequence, words)
			a.w.result.SlotsTorn++
		}
	}
}

// watch has a process's end noticed.
func (a *managerActor) watch(p core.ProcessID) {
	if p.IsZero() {
		return
	}
	a.watches[p] = true
	if q := a.w.byPID(p.PID); q.ended || a.w.planted(ForeignPidIsDead) && q.client != nil && p.PID%4 == 0 {
		a.watchedEnd(p)
	}
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

// listNow takes down what the core has now.
func (a *managerActor) listNow() []core.RegionInfo {
	list, _, err := a.core.AppendRegions(a.listed[:0], core.ListRegions{})
	if err != nil {
		a.w.fail("E1", "listing regions: %v", err)
	}
	a.listed = list
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
	line := poolfmt.EncodeSlot(s.Pool, s.Slot)
	copy(a.header[poolfmt.SlotOffset(s.Slot.Sequence):], line[:])
	a.core.SlotWritten(s)
}

// watchedEnd: the watcher saw a process end.
func (a *managerActor) watchedEnd(p core.ProcessID) {
	if !a.alive() || !a.watches[p] {
		return
	}
	a.w.at(a.process, a.w.between(time.Millisecond, 1500*time.Millisecond), func() {
		if !a.watches[p] {
			return
		}
		delete(a.watches, p)
		if a.w.trace != nil {
			a.w.note("%s: %s is gone", a.process.name, p)
		}
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
// two of them and within each.
func (a *managerActor) cycle() {
	w, p := a.w, a.process
	batch := a.jobs
	a.jobs = nil
	w.dirty.manager = true
	for _, g := range a.gone {
		a.core.ProcessGone(a.pending, g, core.ProofPidfd)
		if w.planted(ReapWithServer) {
			a.reapWith(g)
		}
	}
	a.gone = nil
	for _, j := range batch {
		j.err = j.run(a.pending)
	}
	if a.pending.IsEmpty() {
		w.at(p, w.between(100*time.Microsecond, time.Millisecond), func() {
			a.devices(batch)
			a.finish(batch, nil)
		})
		return
	}
	if w.planted(AckBeforeCommit) {
		a.devices(batch)
		a.answer(batch, nil)
		batch = nil
	}
	slots := a.core.Seal(a.pending)
	a.enter(writing, 8*time.Millisecond, func() {
		if w.trouble(1) {
			w.note("%s: the commit fails", p.name)
			w.result.FailedCommits++
			a.phase = thinking
			switch {
			case w.planted(CommitErrorIgnored):
				// Its memory has it, the store does not.
				a.finish(batch, nil)
				return
			case w.planted(RetryWithoutSync):
				a.pending = &core.Batch{}
			}
			a.answer(batch, fmt.Errorf("%w: the store cannot be written", base.ErrInternal))
			w.at(p, 500*time.Millisecond, func() { a.busy = false; a.kick() })
			return
		}
		a.commit(a.pending)
		a.enter(preparing, time.Millisecond, func() {
			a.devices(batch)
			a.slots = slots
			a.enter(flushing, time.Millisecond, func() { a.finish(batch, slots) })
		})
	})
}

// enter begins a phase of a cycle that lasts most at most, and may crash in it.
func (a *managerActor) enter(ph phase, most time.Duration, then func()) {
	w, p := a.w, a.process
	a.phase = ph
	d := w.between(10*time.Microsecond, most)
	if w.trouble(w.rough / 75) {
		w.at(nil, w.between(0, d), func() {
			if p == a.process {
				w.stopManager()
			}
		})
	}
	w.at(p, d, then)
}

// finish writes the slots, answers and publishes.
func (a *managerActor) finish(batch []*job, slots []core.SlotWrite) {
	for _, s := range slots {
		a.writeSlot(s)
	}
	a.phase, a.slots = thinking, nil
	a.w.dirty.manager = true
	events := a.pending.Events()
	a.pending = &core.Batch{}
	a.answer(batch, nil)
	for _, e := range events {
		a.publish(e)
	}
	a.busy = false
	if len(a.jobs)+len(a.gone) > 0 {
		a.kick()
	}
}

func (a *managerActor) answer(batch []*job, err error) {
	for _, j := range batch {
		if j.err == nil {
			j.err = err
		}
		j.done(j.err)
	}
}

func (a *managerActor) devices(batch []*job) {
	for _, j := range batch {
		if j.err == nil && j.device != nil {
			j.err = j.device()
		}
	}
}

// reapWith plants ReapWithServer: the regions of a server that died go back.
func (a *managerActor) reapWith(p core.ProcessID) {
	q := a.w.byPID(p.PID)
	if q.client != nil || q == a.process {
		return
	}
	for _, r := range a.regions() {
		a.dropHoldsOf(a.pending, core.Handle{Pool: r.Pool, Region: r.ID, Incarnation: r.Incarnation})
		delete(a.w.acked, r.ID)
	}
	_, _, _ = a.core.DropOwner(a.pending, a.w.server.id)
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
		for _, o := range a.owners {
			if slices.Contains(e.Owners, o.server.id) {
				o.send(func() { o.server.ownerEvent(e) })
			}
		}
	}
}

// prepare writes a region's line and table.
func (a *managerActor) prepare(r core.Region) error {
	at := regionAt{r.Extent, r.Plan}
	if a.w.trouble(0.5) {
		if a.w.planted(LeakOnError) {
			return fmt.Errorf("%w: the device cannot be written", base.ErrFault)
		}
		return fmt.Errorf("%w: the device cannot be written", base.ErrInternal)
	}
	a.w.note("%s prepares region %d %v", a.process.name, r.ID, r.Extent)
	a.w.memory.zero(at)
	a.w.dirty.marks = true
	a.core.Prepared(r.ID)
	return nil
}
