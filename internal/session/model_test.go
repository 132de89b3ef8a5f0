package session

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// The model is a server and a device that keep everything in maps: replicas by place,
// what was retired for ever, the mark of each page. It knows no states of pages; it
// checks what may never happen.
type use struct {
	region base.RegionID
	index  base.PageIndex
	gen    base.Generation
}

type replica struct {
	use
	order   base.CommitOrder
	retired bool
	leases  int
}

type sentCommit struct {
	seq    base.Sequence
	refs   []PageRef
	server base.ServerEpoch
	done   bool              // the server has carried it out
	res    hot.CommitResults // then
}

type world struct {
	t        *rapid.T
	c        *Core
	epoch    base.Epoch
	server   base.ServerEpoch
	order    uint64
	events   uint64
	replicas map[use]*replica
	retired  map[use]bool // told to retire: never marked again
	dead     map[use]bool // generations that are over
	marks    map[[2]uint64]base.CommitOrder
	writing  []PageRef
	sent     []*sentCommit
	clears   []PageRef
	batches  []*Batch
	leased   map[*Batch][]*replica
}

func place(r base.RegionID, i base.PageIndex) [2]uint64 { return [2]uint64{uint64(r), uint64(i)} }

func (w *world) pick(n int, label string) int { return rapid.IntRange(0, n-1).Draw(w.t, label) }

func (w *world) alloc() {
	ref, _, ok := w.c.Alloc(bothMedia)
	if !ok {
		return
	}
	if m := w.marks[place(ref.Region, ref.Index)]; m != 0 {
		w.t.Fatalf("page %+v is given out with mark %d on the device", ref, m)
	}
	for _, x := range w.writing {
		if x.Region == ref.Region && x.Index == ref.Index {
			w.t.Fatalf("page %+v is given out twice", ref)
		}
	}
	for u, r := range w.replicas {
		if u.region == ref.Region && u.index == ref.Index && (!r.retired || r.leases > 0) {
			w.t.Fatalf("page %+v is given out under replica %+v", ref, r)
		}
	}
	w.writing = append(w.writing, ref)
}

func (w *world) commit() {
	if len(w.writing) == 0 {
		return
	}
	n := min(len(w.writing), 1+w.pick(3, "batch"))
	items := make([]Commit, n)
	for i := range n {
		items[i] = Commit{Region: w.writing[i].Region, Index: w.writing[i].Index, Length: 1}
	}
	rows := make([]hot.CommitRow, n)
	seq, err := w.c.BeginCommit(items, rows)
	if err != nil {
		return
	}
	s := &sentCommit{seq: seq, server: w.server}
	for i := range rows {
		u := use{rows[i].Region, items[i].Index, rows[i].Generation}
		if w.dead[u] || w.retired[u] || w.replicas[u] != nil {
			w.t.Fatalf("generation %+v is used again", u)
		}
		s.refs = append(s.refs, PageRef{Region: u.region, Index: u.index, Generation: u.gen})
	}
	w.writing = w.writing[n:]
	w.sent = append(w.sent, s)
}

// carryOut is the server's half of a Commit.
func (w *world) carryOut(s *sentCommit) {
	if s.done || s.server != w.server {
		return
	}
	s.done = true
	for _, ref := range s.refs {
		switch w.pick(4, "result") {
		case 0:
			s.res = hot.AppendCommitResult(s.res, hot.CommitResult{Code: base.CodeAlreadyStored})
		case 1:
			s.res = hot.AppendCommitResult(s.res, hot.CommitResult{Code: base.CodeDenied})
		default:
			w.order++
			u := use{ref.Region, ref.Index, ref.Generation}
			w.replicas[u] = &replica{use: u, order: base.CommitOrder(w.order)}
			s.res = hot.AppendCommitResult(s.res, hot.CommitResult{Code: base.CodeOK, Order: base.CommitOrder(w.order)})
		}
	}
}

func (w *world) settle(answer bool) {
	if len(w.sent) == 0 {
		return
	}
	k := w.pick(len(w.sent), "sent")
	s := w.sent[k]
	if !answer {
		w.c.LoseCommit(s.seq)
		return
	}
	w.sent = append(w.sent[:k], w.sent[k+1:]...)
	lost := w.c.commits[s.seq] != nil && w.c.commits[s.seq].lost
	switch {
	case s.server != w.server:
		if w.c.EndCommit(s.seq, s.res) {
			w.t.Fatal("an answer of a server that is gone was believed (S1)")
		}
		return
	case !s.done && (lost || w.pick(3, "resolve") == 0):
		w.c.LoseCommit(s.seq)
		w.c.Resolved(s.seq, hot.OutcomeAborted, nil)
		for _, ref := range s.refs {
			w.dead[use{ref.Region, ref.Index, ref.Generation}] = true
		}
		return
	case lost:
		w.c.Resolved(s.seq, hot.OutcomeCommitted, s.res)
	default:
		w.carryOut(s)
		w.c.EndCommit(s.seq, s.res)
	}
	for _, ref := range s.refs {
		w.mark(ref)
	}
}

func (w *world) mark(ref PageRef) {
	order, ok := w.c.MayMark(ref, w.epoch, w.server)
	if !ok {
		return
	}
	u := use{ref.Region, ref.Index, ref.Generation}
	r := w.replicas[u]
	if w.retired[u] || w.dead[u] || r == nil || r.order != order {
		w.t.Fatalf("mark %d for %+v, replica %+v, retired %v (R7)", order, ref, r, w.retired[u])
	}
	w.marks[place(ref.Region, ref.Index)] = order
}

func (w *world) someReplica() *replica {
	if len(w.replicas) == 0 {
		return nil
	}
	// Maps have no order; a place drawn by number keeps a seed repeatable.
	var best *replica
	k := uint64(w.pick(64, "replica"))
	var bestScore uint64
	for _, r := range w.replicas {
		score := (uint64(r.order)*2654435761 + k*40503) & 0xffffffff
		if best == nil || score < bestScore {
			best, bestScore = r, score
		}
	}
	return best
}

func (w *world) tell(k EventKind, r *replica) {
	w.events++
	ok, clear := w.c.Receive(Event{Number: w.events, Kind: k, Region: r.region, Offset: uint64(r.index) * 4096, Generation: r.gen})
	if !ok && w.c.Phase() != Away {
		w.t.Fatalf("event %d was not accepted", w.events)
	}
	if !ok {
		w.events--
		return
	}
	if clear != (PageRef{}) {
		w.clears = append(w.clears, clear)
	}
}

func (w *world) retire() {
	if r := w.someReplica(); r != nil && !r.retired {
		r.retired = true
		w.retired[r.use] = true
		w.tell(RetireEvent, r)
	}
}

func (w *world) reclaim() {
	if r := w.someReplica(); r != nil && r.retired && r.leases == 0 {
		w.tell(ReclaimEvent, r)
	}
}

func (w *world) clear() {
	for _, ref := range w.clears {
		w.marks[place(ref.Region, ref.Index)] = 0
		w.c.Cleared(ref, true)
	}
	w.clears = nil
}

func (w *world) ack() {
	cleared, reclaimed := w.c.TakeAcks(nil, nil)
	if w.pick(3, "lost ack") == 0 {
		w.c.ReturnAcks(cleared, reclaimed, w.server)
		return
	}
	for _, a := range reclaimed {
		u := use{a.Region, a.Index, a.Generation}
		if m := w.marks[place(a.Region, a.Index)]; m != 0 && w.replicas[u] != nil && w.replicas[u].order == m {
			w.t.Fatalf("reclaim of %+v is acknowledged with its mark on the device", a)
		}
		delete(w.replicas, u)
		w.dead[u] = true
	}
	w.c.AcksTaken(reclaimed, w.server)
}

func (w *world) acquire() {
	r := w.someReplica()
	b := &Batch{}
	kind := base.LeaseCopy
	if rapid.Bool().Draw(w.t, "view") {
		kind = base.LeaseView
	}
	if r == nil || r.retired || w.c.BeginAcquire(b, kind, 1) != nil {
		return
	}
	row := hot.AppendAcquireRow(nil, &hot.AcquireRow{
		Verdict: hot.MakeHit(base.MediumCXL), Region: r.region, Offset: uint64(r.index) * 4096, Generation: r.gen,
	})
	w.c.EndAcquire(b, row)
	r.leases++
	w.batches = append(w.batches, b)
	w.leased[b] = []*replica{r}
}

func (w *world) release() {
	if len(w.batches) == 0 {
		return
	}
	k := w.pick(len(w.batches), "batch")
	b := w.batches[k]
	w.batches = append(w.batches[:k], w.batches[k+1:]...)
	w.c.ReleaseBatch(b)
	for _, r := range w.leased[b] {
		r.leases--
	}
	delete(w.leased, b)
	w.c.Released(w.c.TakeReleases(nil, 100), w.server, true)
}

func (w *world) reopen(restart bool) {
	w.epoch++
	w.events = 0
	if restart {
		w.server++
	}
	s := w.c.Opened(Opening{
		Epoch: w.epoch, ServerEpoch: w.server, TTL: time.Hour,
		Pools: []PoolNumber{{ID: base.PoolID{1}, Medium: base.MediumCXL, Number: uint32(w.server)}},
	})
	if restart != (s != nil) {
		w.t.Fatal("a snapshot is for a restart only")
	}
	if s == nil {
		return
	}
	listed := map[use]hot.RelistState{}
	results := make([]byte, len(s.Pages))
	for i, p := range s.Pages {
		u := use{p.Region, base.PageIndex(p.Offset / 4096), p.Generation}
		listed[u] = p.State
		r := w.replicas[u]
		results[i] = byte(hot.RelistQuarantined)
		switch {
		case p.State == hot.RelistReady && r != nil && !r.retired && rapid.Bool().Draw(w.t, "kept"):
			results[i] = byte(hot.RelistKept)
		case rapid.Bool().Draw(w.t, "retire"):
			results[i] = byte(hot.RelistRetire)
			w.retired[u] = true
		default:
			w.retired[u] = true // quarantined: never visible again in this model
		}
		if r == nil {
			r = &replica{use: u, order: p.Order}
			w.replicas[u] = r
		}
		r.retired = w.retired[u]
	}
	for u, r := range w.replicas {
		if _, ok := listed[u]; !ok && !w.dead[u] && u.region < base.FirstPrivateRegion && w.owns(u.region) {
			w.t.Fatalf("replica %+v was not listed: %+v", r, w.c.regions[u.region].pages[u.index])
		}
		if u.region >= base.FirstPrivateRegion {
			delete(w.replicas, u) // given up with its region
			w.dead[u] = true
		}
	}
	w.clears = w.c.Relisted(s, 0, results, w.clears)
	w.c.RelistDone(s)
	for _, ref := range w.c.Unmarked(nil) {
		w.mark(ref)
	}
}

// owns reports whether a region is still ours: one that goes is told to nobody.
func (w *world) owns(id base.RegionID) bool {
	r := w.c.regions[id]
	return r != nil && r.own == Own && r.mode != going
}

func (w *world) check() {
	for at, m := range w.marks {
		if m == 0 {
			continue
		}
		state, ok := w.c.PageState(base.RegionID(at[0]), base.PageIndex(at[1]))
		if ok && (state == Free || state == Writing || state == Committing) {
			w.t.Fatalf("page %v is %s with mark %d on the device", at, state, m)
		}
	}
	leases := 0
	for _, rs := range w.leased {
		leases += len(rs)
	}
	if w.c.Leases() > leases {
		w.t.Fatalf("%d leases here, %d are out", w.c.Leases(), leases)
	}
	for _, id := range w.c.TakeGone(nil) {
		for _, rs := range w.leased {
			for _, r := range rs {
				if r.region == id {
					w.t.Fatalf("region %d goes under a lease (D1)", id)
				}
			}
		}
		for _, ref := range w.writing {
			if ref.Region == id {
				w.t.Fatalf("region %d goes with a page in writing (D1)", id)
			}
		}
		w.c.RemoveRegion(id)
		for u := range w.replicas {
			if u.region == id {
				delete(w.replicas, u)
				w.dead[u] = true
			}
		}
		for at := range w.marks {
			if at[0] == uint64(id) {
				delete(w.marks, at)
			}
		}
	}
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{
			t: t, c: New(Config{MaxLeases: 8}), server: 100, replicas: map[use]*replica{}, retired: map[use]bool{},
			dead: map[use]bool{}, marks: map[[2]uint64]base.CommitOrder{}, leased: map[*Batch][]*replica{},
		}
		w.reopen(false)
		for _, info := range []RegionInfo{shared(1, 3), private(0, 2), shared(2, 2)} {
			info.ServerEpoch = w.c.ServerEpoch()
			if err := w.c.AddRegion(info, Own); err != nil {
				t.Fatal(err)
			}
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch rapid.IntRange(0, 16).Draw(t, "step") {
			case 0, 1, 2:
				w.alloc()
			case 3, 4:
				w.commit()
			case 5, 6:
				if len(w.sent) > 0 {
					w.carryOut(w.sent[w.pick(len(w.sent), "carry out")])
				}
				w.settle(true)
			case 7:
				w.settle(false)
			case 8:
				w.retire()
			case 9:
				w.reclaim()
			case 10:
				w.clear()
			case 11:
				w.ack()
			case 12:
				w.acquire()
			case 13:
				w.release()
			case 14:
				if len(w.writing) > 0 {
					k := w.pick(len(w.writing), "free")
					ref := w.writing[k]
					w.writing = append(w.writing[:k], w.writing[k+1:]...)
					if err := w.c.FreePage(ref.Region, ref.Index); err != nil {
						t.Fatal(err)
					}
				}
			case 16:
				if rapid.IntRange(0, 9).Draw(t, "drain") == 0 {
					w.c.Drain(base.RegionID(1 + w.pick(2, "region")))
				}
			case 15:
				w.reopen(rapid.IntRange(0, 2).Draw(t, "restart") == 0)
			}
			w.check()
		}
	})
}
