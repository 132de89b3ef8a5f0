package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// pendingDelete is a delete of keys or of a namespace: what it hid waits for its
// marks. It is known as long as its operation is in a ledger or it is not done.
type pendingDelete struct {
	id        DeleteID
	codes     []base.Code // a key each, for a delete of keys
	waiting   []int32     // marks that each key waits for
	remaining int
	done      bool
	inLedger  bool
	ns        *namespace       // not nil: the whole namespace
	order     base.CommitOrder // commits up to here are meant
	objects   uint64
}

// markWaiter is one key of a delete that waits for one replica's mark.
type markWaiter struct {
	delete *pendingDelete
	key    int
}

// tombstoneKey is a key that was deleted before relisting was complete: a session
// may still list an older replica of it (R7). The deletes wait for its mark.
type tombstoneKey struct {
	ns  base.NamespaceNumber
	key base.Key
}

// Delete hides keys of the caller's namespace at once, every replica of them in every
// domain, and returns a handle that is done when relisting is complete and every mark
// is cleared; EffectDeleteDone says when. A key of which a view is out is refused as
// pinned, and stays. A repeated operation gives the same handle.
// Errors, with nothing hidden: base.ErrStale, base.ErrLimit, base.ErrInvalid.
func (d *Directory) Delete(now time.Duration, who Caller, seq base.Sequence, keys []base.Key) (DeleteID, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return 0, err
	}
	if id, err := d.repeatDelete(s, seq); id != 0 || err != nil {
		return id, err
	}
	lim := &d.cfg.Limits
	switch {
	case len(keys) > hot.MaxKeys:
		return 0, fmt.Errorf("%w: delete: %d keys; at most %d a call", base.ErrLimit, len(keys), hot.MaxKeys)
	case s.relist == relistWaiting:
		return 0, fmt.Errorf("%w: delete: list what the session holds first", base.ErrBusy)
	case d.RelistIncomplete() && len(d.tombstones)+len(keys) > lim.MaxTombstones:
		return 0, limitErr("max-tombstones", lim.MaxTombstones, "delete: relisting is not complete and too many keys were deleted since the restart")
	}
	pd, err := d.newDelete(s, seq)
	if err != nil {
		return 0, err
	}
	pd.codes = make([]base.Code, len(keys))
	pd.waiting = make([]int32, len(keys))
	for i := range keys {
		pd.codes[i] = d.deleteKey(now, s.ns, &keys[i], pd, i)
	}
	d.settleDelete(pd)
	return pd.id, nil
}

func (d *Directory) repeatDelete(s *session, seq base.Sequence) (DeleteID, error) {
	if op := s.operation(seq); op != nil {
		if op.kind != opDelete {
			return 0, fmt.Errorf("%w: operation %d was used for another call", base.ErrInvalid, seq)
		}
		return op.delete, nil
	}
	return 0, nil
}

// newDelete admits a delete; s is nil for an operator's.
func (d *Directory) newDelete(s *session, seq base.Sequence) (*pendingDelete, error) {
	if len(d.deletes) >= d.cfg.Limits.MaxDeletes {
		return nil, limitErr("max-deletes", d.cfg.Limits.MaxDeletes, "as many deletes wait for marks or for their watermark")
	}
	if s != nil {
		if err := d.admitOperation(s, seq, 0); err != nil {
			return nil, err
		}
	}
	order, err := base.MakeCommitOrder(d.cfg.Owner, d.commitCount)
	if err != nil {
		return nil, err
	}
	d.nextDelete++
	pd := &pendingDelete{id: d.nextDelete, order: order, inLedger: s != nil}
	d.deletes[pd.id] = pd
	d.deleteList = append(d.deleteList, pd.id)
	if s != nil {
		s.addOperation(&operation{seq: seq, kind: opDelete, epoch: s.epoch, session: s, delete: pd.id})
	}
	return pd, nil
}

func (d *Directory) deleteKey(now time.Duration, ns *namespace, key *base.Key, pd *pendingDelete, i int) base.Code {
	w := keyWords(key[:])
	o := d.store.find(uint32(ns.number), &w)
	for ref := replicaRef(0); o != 0; {
		if ref = d.nextReplica(o, ref); ref == 0 {
			break
		}
		if r := d.store.replica(ref); r.views > 0 && r.state() != replicaRetiring {
			return base.CodePinned
		}
	}
	if d.RelistIncomplete() {
		k := tombstoneKey{ns.number, *key}
		d.tombstones[k] = append(d.tombstones[k], markWaiter{pd, i})
	}
	if o == 0 {
		return base.CodeNotFound
	}
	found := false
	for ref := d.store.firstOf(o); ref != 0; {
		r := d.store.replica(ref)
		next := r.next
		g := d.regions[r.region]
		was := r.state()
		if was != replicaRetiring {
			found = true
			d.retire(now, g, ref)
		}
		if d.regions[g.slot] == g && g.pages[r.page] == ref && !r.has(flagMarkCleared) {
			// Also what an earlier delete hid: the acknowledgement means every mark.
			found = true
			d.waitForMark(ref, markWaiter{pd, i})
		}
		ref = next
	}
	if !found {
		return base.CodeNotFound
	}
	d.counters.KeysDeleted++
	return base.CodeOK
}

// waitForMark makes one key of a delete wait for a replica's mark.
func (d *Directory) waitForMark(ref replicaRef, w markWaiter) {
	d.store.replica(ref).setFlag(flagDeleteWaiting)
	d.markWaiters[ref] = append(d.markWaiters[ref], w)
	w.delete.waiting[w.key]++
	w.delete.remaining++
}

// deleteListed makes the deletes since the restart wait for a RETIRING page that a
// session lists only now.
func (d *Directory) deleteListed(g *region, ref replicaRef, key *base.Key) {
	for _, w := range d.tombstones[tombstoneKey{g.ns.number, *key}] {
		if !w.delete.done {
			w.delete.codes[w.key] = base.CodeOK
			d.waitForMark(ref, w)
		}
	}
	r := d.store.replica(ref)
	for _, id := range d.deleteList {
		if pd := d.deletes[id]; pd.ns == g.ns && !pd.done && d.meant(pd, r) {
			r.setFlag(flagDeleteWaiting)
			pd.remaining++
		}
	}
}

// nextReplica walks an object's replicas; 0 starts and ends the walk.
func (d *Directory) nextReplica(o uint32, ref replicaRef) replicaRef {
	if ref == 0 {
		return d.store.firstOf(o)
	}
	return d.store.replica(ref).next
}

// DeleteNamespace hides every object of a namespace at once: regions of live writers
// stay granted and their pages come back, KEPT regions go back whole, and commits
// after it are new. The caller may delete its own namespace.
// Errors, with nothing hidden: base.ErrPinned while views are out in it;
// base.ErrDenied for another namespace; base.ErrStale, base.ErrLimit, base.ErrInvalid.
func (d *Directory) DeleteNamespace(now time.Duration, who Caller, seq base.Sequence, id base.NamespaceID) (DeleteID, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return 0, err
	}
	if id != s.ns.id {
		return 0, fmt.Errorf("%w: delete namespace: the session's namespace is %v", base.ErrDenied, s.ns.id)
	}
	if id, err := d.repeatDelete(s, seq); id != 0 || err != nil {
		return id, err
	}
	if s.relist == relistWaiting {
		return 0, fmt.Errorf("%w: delete namespace: list what the session holds first", base.ErrBusy)
	}
	return d.deleteNamespace(now, s.ns, s, seq)
}

// OperatorDeleteNamespace is DeleteNamespace for an operator, who may delete any.
// Errors: base.ErrNotFound, base.ErrPinned, base.ErrLimit.
func (d *Directory) OperatorDeleteNamespace(now time.Duration, id base.NamespaceID) (DeleteID, error) {
	d.expireDue(now)
	ns := d.namespaces[id]
	if ns == nil {
		return 0, fmt.Errorf("%w: namespace %v", base.ErrNotFound, id)
	}
	return d.deleteNamespace(now, ns, nil, 0)
}

func (d *Directory) deleteNamespace(now time.Duration, ns *namespace, s *session, seq base.Sequence) (DeleteID, error) {
	views := 0
	for _, g := range d.regions {
		if g != nil && g.ns == ns {
			views += g.views
		}
	}
	if views > 0 {
		return 0, fmt.Errorf("%w: delete namespace: %d views are out in it; unpin them first", base.ErrPinned, views)
	}
	pd, err := d.newDelete(s, seq)
	if err != nil {
		return 0, err
	}
	pd.ns = ns
	if d.RelistIncomplete() {
		d.nsTombs[ns.number] = true
	}
	for _, g := range d.regions {
		if g == nil || g.ns != ns {
			continue
		}
		pd.objects += uint64(g.ready) //nolint:gosec // positive
		if g.state == regionKept && g.writer == nil {
			d.sendBack(now, g)
		}
		for _, ref := range g.pages {
			if ref == 0 || d.store.replica(ref).has(flagOrphan) {
				continue // nothing that a key names
			}
			d.retire(now, g, ref)
			if r := d.store.replica(ref); !r.has(flagMarkCleared) {
				r.setFlag(flagDeleteWaiting)
				pd.remaining++
			}
		}
	}
	d.counters.KeysDeleted += pd.objects
	d.settleDelete(pd)
	return pd.id, nil
}

// markGone tells the deletes that wait for a replica that its mark is gone: cleared,
// or its region freed.
func (d *Directory) markGone(ref replicaRef) {
	r := d.store.replica(ref)
	r.clearFlag(flagDeleteWaiting)
	for _, w := range d.markWaiters[ref] {
		w.delete.waiting[w.key]--
		w.delete.remaining--
		d.settleDelete(w.delete)
	}
	delete(d.markWaiters, ref)
	ns := d.regions[r.region].ns
	for _, id := range slices.Clone(d.deleteList) {
		if pd := d.deletes[id]; pd != nil && pd.ns == ns && !pd.done && d.meant(pd, r) {
			pd.remaining--
			d.settleDelete(pd)
		}
	}
}

// meant reports whether a delete of a namespace hid the replica: it was
// committed under an older owner incarnation, or its counter is not above the delete's.
func (d *Directory) meant(pd *pendingDelete, r *replica) bool {
	if o := r.order.Owner(); o != 0 && o < d.cfg.Owner {
		return true
	}
	return r.order.Counter() <= pd.order.Counter()
}

// settleDelete ends a delete that waits for nothing more.
func (d *Directory) settleDelete(pd *pendingDelete) {
	if pd.done || pd.remaining > 0 || d.RelistIncomplete() {
		return
	}
	pd.done = true
	d.effect(Effect{Kind: EffectDeleteDone, Delete: pd.id})
	d.dropDelete(pd)
}

// endDelete is called when the operation leaves its ledger.
func (d *Directory) endDelete(id DeleteID) {
	if pd := d.deletes[id]; pd != nil {
		pd.inLedger = false
		d.dropDelete(pd)
	}
}

func (d *Directory) dropDelete(pd *pendingDelete) {
	if !pd.done || pd.inLedger {
		return
	}
	delete(d.deletes, pd.id)
	if i := slices.Index(d.deleteList, pd.id); i >= 0 {
		d.deleteList = slices.Delete(d.deleteList, i, i+1)
	}
}

// DeleteStatus appends a code a key of a delete of keys: CodeUnknown for one that
// waits for marks, or of which a session may still list a replica. It returns the objects that a delete of a namespace hid, and
// whether the delete is done. A handle that is not known any more is done.
// Concurrency: read lock.
func (d *Directory) DeleteStatus(id DeleteID, dst []base.Code) (codes []base.Code, objects uint64, done bool) {
	pd := d.deletes[id]
	if pd == nil {
		return dst, 0, true
	}
	for i, c := range pd.codes {
		if (c == base.CodeOK || c == base.CodeNotFound) && !pd.done && (pd.waiting[i] > 0 || d.RelistIncomplete()) {
			c = base.CodeUnknown
		}
		dst = append(dst, c)
	}
	return dst, pd.objects, pd.done
}
