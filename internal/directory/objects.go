package directory

import (
	"encoding/binary"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
	"github.com/xcena-dev/maru/internal/offheap"
)

var le = binary.LittleEndian

// replicaState is a replica's state and flags, one byte.
type replicaState uint8

const (
	replicaFree        replicaState = 0
	replicaReady       replicaState = 1
	replicaRetiring    replicaState = 2
	replicaQuarantined replicaState = 3
	replicaStates      replicaState = 3

	flagMarkCleared   replicaState = 1 << 2 // no mark on the device
	flagReclaimAsked  replicaState = 1 << 3 // the writer was told to reclaim, or is about to be
	flagRestartHeld   replicaState = 1 << 4 // listed after a restart: not reused before rule "Server restart"
	flagOrphan        replicaState = 1 << 5 // a page without object: listed leases, or an uncertain page
	flagDeleteWaiting replicaState = 1 << 6 // a delete waits for the mark
	flagClearAsked    replicaState = 1 << 7 // the resource manager was asked to clear the mark
)

// replica is one copy of an object. It holds no pointer: the slabs it lies in are
// not seen by the garbage collector. Its first 24 bytes are what a probe reads.
type replica struct {
	lengthState uint64 // length u40 << 8 | replicaState
	region      uint32 // slot of the region
	next        uint32 // next replica of the object, or of the free list
	page        uint32
	object      uint32
	generation  base.Generation
	order       base.CommitOrder
	checksum    uint64
	copies      uint32 // copy leases
	views       uint32 // view leases
	requests    uint32 // request leases
	_           uint32
}

// object is 128 bytes, two cache lines. The first has all that a probe needs: what a
// lookup compares, and of the first replica where it lies and whether it is READY.
// The parent's digest fills what is left of both.
type object struct {
	key        words
	namespace  uint32
	parentHead uint32
	first      replica // state replicaFree while only further replicas exist
	parentTail [3]uint64
}

func (e *object) setParent(p *base.Digest) {
	e.parentHead = le.Uint32(p[:])
	for i := range e.parentTail {
		e.parentTail[i] = le.Uint64(p[4+8*i:])
	}
}

// replicaRef names a replica: an object's number for its first replica, or
// extraBit | number in the slab of further ones. 0 is none; numbers below
// firstObject are free for other uses (lease rows).
type replicaRef = uint32

const (
	extraBit    = 1 << 31
	firstObject = 16

	objectBytes  = 128
	replicaBytes = 64
)

func (r *replica) length() uint64      { return r.lengthState >> 8 }
func (r *replica) flags() replicaState { return replicaState(r.lengthState) } //nolint:gosec // low byte
func (r *replica) state() replicaState { return r.flags() & replicaStates }
func (r *replica) leases() uint32      { return r.copies + r.views }
func (r *replica) setFlag(f replicaState) {
	r.lengthState |= uint64(f)
}

func (r *replica) clearFlag(f replicaState) {
	r.lengthState &^= uint64(f)
}
func (r *replica) has(f replicaState) bool { return r.flags()&f != 0 }
func (r *replica) setState(s replicaState) {
	r.lengthState = r.lengthState&^uint64(replicaStates) | uint64(s)
}

// store is the table of objects and their replicas.
type store struct {
	memory   offheap.Allocator
	seed     uint64
	segments [segmentCount]segment

	objectSlab  offheap.Slab
	objects     []object
	objectHigh  uint32 // first number never used
	objectFree  uint32 // free list through first.next
	objectCount uint64
	maxObjects  uint64

	extraSlab  offheap.Slab
	extra      []replica
	extraHigh  uint32
	extraFree  uint32
	extraCount uint64
	maxExtra   uint64
}

func newStore(mem offheap.Allocator, seed, maxObjects, maxExtra uint64) (*store, error) {
	st := &store{
		memory: mem, seed: seed, objectHigh: firstObject, extraHigh: 1,
		maxObjects: maxObjects, maxExtra: maxExtra,
	}
	var err error
	if st.objectSlab, err = mem.Reserve((maxObjects + firstObject) * objectBytes); err != nil {
		return nil, err
	}
	if st.extraSlab, err = mem.Reserve((maxExtra + 1) * replicaBytes); err != nil {
		return nil, err
	}
	if err := st.growObjects(firstObject + 64); err != nil {
		return nil, err
	}
	return st, st.tableInit()
}

func (st *store) free() error {
	slabs := []offheap.Slab{st.objectSlab, st.extraSlab}
	for i := range st.segments {
		slabs = append(slabs, st.segments[i].slab)
	}
	var first error
	for _, s := range slabs {
		if s != nil {
			if err := s.Free(); err != nil && first == nil {
				first = err
			}
		}
	}
	return first
}

func (st *store) committedBytes() uint64 {
	n := st.objectSlab.CommittedBytes() + st.extraSlab.CommittedBytes()
	for i := range st.segments {
		n += st.segments[i].slab.CommittedBytes()
	}
	return n
}

// growCount is what a slab grows to: half as much again, so that the copying of
// the Go heap's slabs stays cheap, and at most 16 MiB more at once, so that little
// lies idle.
func growCount(have, need, maxCount, size uint64) uint64 {
	return min(max(need, min(have+have/2, have+(16<<20)/size)), maxCount)
}

func (st *store) growObjects(need uint64) error {
	b, err := st.objectSlab.Grow(objectBytes * growCount(uint64(len(st.objects)), need, st.maxObjects+firstObject, objectBytes))
	if err != nil {
		return err
	}
	st.objects = offheap.View[object](b)
	return nil
}

func (st *store) replica(ref replicaRef) *replica {
	if ref&extraBit != 0 {
		return &st.extra[ref&^extraBit]
	}
	return &st.objects[ref].first
}

// newObject takes an object from the slab; it is not in the index yet.
func (st *store) newObject() (uint32, error) {
	if st.objectCount >= st.maxObjects {
		return 0, limitErr("max-objects", st.maxObjects, "the directory is full of objects")
	}
	n := st.objectFree
	if n != 0 {
		st.objectFree = st.objects[n].first.next
	} else {
		n = st.objectHigh
		if uint64(n) >= uint64(len(st.objects)) {
			if err := st.growObjects(uint64(n) + 1); err != nil {
				return 0, err
			}
		}
		st.objectHigh++
	}
	st.objects[n] = object{}
	st.objectCount++
	return n, nil
}

func (st *store) dropObject(n uint32) {
	st.objects[n] = object{first: replica{next: st.objectFree}}
	st.objectFree = n
	st.objectCount--
}

func (st *store) newExtra() (replicaRef, error) {
	if st.extraCount >= st.maxExtra {
		return 0, limitErr("max-extra-replicas", st.maxExtra, "the directory is full of further replicas")
	}
	n := st.extraFree
	if n != 0 {
		st.extraFree = st.extra[n].next
	} else {
		n = st.extraHigh
		if uint64(n) >= uint64(len(st.extra)) {
			b, err := st.extraSlab.Grow(replicaBytes * growCount(uint64(len(st.extra)), uint64(n)+64, st.maxExtra+1, replicaBytes))
			if err != nil {
				return 0, err
			}
			st.extra = offheap.View[replica](b)
		}
		st.extraHigh++
	}
	st.extra[n] = replica{}
	st.extraCount++
	return n | extraBit, nil
}

func (st *store) dropExtra(ref replicaRef) {
	n := ref &^ extraBit
	st.extra[n] = replica{next: st.extraFree}
	st.extraFree = n
	st.extraCount--
}

// firstOf returns the first replica of an object, 0 for none.
func (st *store) firstOf(o uint32) replicaRef {
	f := &st.objects[o].first
	if f.state() != replicaFree {
		return o
	}
	return f.next
}

// insert adds a replica to the object of (ns, key) and makes the object when it is
// not there. found is the object when the caller has looked it up, else 0. The
// replica's next and object are set here.
func (st *store) insert(ns uint32, w *words, found uint32, parent *base.Digest, r replica) (replicaRef, error) {
	o := found
	if o == 0 {
		hash := hashKey(st.seed, ns, w)
		if err := st.reserveSlot(hash); err != nil {
			return 0, err
		}
		var err error
		if o, err = st.newObject(); err != nil {
			return 0, err
		}
		e := &st.objects[o]
		e.key, e.namespace = *w, ns
		e.setParent(parent)
		r.object, r.next = o, 0
		e.first = r
		st.segments[segmentOf(hash)].put(tagOf(hash)<<32 | uint64(o))
		return o, nil
	}
	e := &st.objects[o]
	r.object = o
	if e.first.state() == replicaFree {
		r.next = e.first.next
		e.first = r
		return o, nil
	}
	ref, err := st.newExtra()
	if err != nil {
		return 0, err
	}
	e = &st.objects[o]
	r.next = e.first.next
	st.extra[ref&^extraBit] = r
	e.first.next = ref
	return ref, nil
}

// insertOrphan makes a replica that belongs to no object.
func (st *store) insertOrphan(r replica) (replicaRef, error) {
	ref, err := st.newExtra()
	if err != nil {
		return 0, err
	}
	r.next, r.object = 0, 0
	r.setFlag(flagOrphan)
	st.extra[ref&^extraBit] = r
	return ref, nil
}

// adopt gives an orphan its object. Its number stays: leases name it.
func (st *store) adopt(ref replicaRef, ns uint32, key *base.Key, parent *base.Digest) error {
	w := keyWords(key[:])
	o := st.find(ns, &w)
	if o == 0 {
		hash := hashKey(st.seed, ns, &w)
		if err := st.reserveSlot(hash); err != nil {
			return err
		}
		var err error
		if o, err = st.newObject(); err != nil {
			return err
		}
		e := &st.objects[o]
		e.key, e.namespace = w, ns
		e.setParent(parent)
		st.segments[segmentOf(hash)].put(tagOf(hash)<<32 | uint64(o))
	}
	e, r := &st.objects[o], st.replica(ref)
	r.clearFlag(flagOrphan)
	r.object, r.next = o, e.first.next
	e.first.next = ref
	return nil
}

// remove takes a replica out, and its object with the last of them.
func (st *store) remove(ref replicaRef) {
	r := st.replica(ref)
	if r.has(flagOrphan) {
		st.dropExtra(ref)
		return
	}
	o := r.object
	e := &st.objects[o]
	if ref == o {
		next := e.first.next
		e.first = replica{next: next, object: o}
	} else {
		prev := &e.first
		for prev.next != ref {
			if prev.next == 0 {
				invariants.Failf("R3", "replica %#x is not in the list of object %d", ref, o)
				return
			}
			prev = st.replica(prev.next)
		}
		prev.next = r.next
		st.dropExtra(ref)
	}
	if e.first.state() == replicaFree && e.first.next == 0 {
		hash := hashKey(st.seed, e.namespace, &e.key)
		if !st.segments[segmentOf(hash)].remove(tagOf(hash), o) {
			invariants.Failf("R3", "object %d is not in the index", o)
		}
		st.dropObject(o)
	}
}

// check walks the index and the slabs; it is for CheckInvariants.
func (st *store) check() error {
	var inIndex uint64
	for si := range st.segments {
		s := &st.segments[si]
		used := 0
		if s.used == 0 && allZero(s.slots) {
			continue
		}
		for _, v := range s.slots {
			if v == 0 {
				continue
			}
			used++
			o := uint32(v) //nolint:gosec // low half
			if o < firstObject || uint64(o) >= uint64(st.objectHigh) {
				return fmt.Errorf("index names object %d of %d", o, st.objectHigh)
			}
			e := &st.objects[o]
			hash := hashKey(st.seed, e.namespace, &e.key)
			if segmentOf(hash) != si || tagOf(hash) != v>>32 || st.findHashed(hash, e.namespace, &e.key) != o {
				return fmt.Errorf("object %d is not found by its key", o)
			}
			if st.firstOf(o) == 0 {
				return fmt.Errorf("object %d has no replica", o)
			}
			for ref := st.firstOf(o); ref != 0; ref = st.replica(ref).next {
				if r := st.replica(ref); r.object != o || r.state() == replicaFree || r.has(flagOrphan) {
					return fmt.Errorf("replica %#x of object %d: object %d, state %d", ref, o, r.object, r.state())
				}
			}
		}
		if used != s.used {
			return fmt.Errorf("segment %d counts %d entries, has %d", si, s.used, used)
		}
		inIndex += uint64(used) //nolint:gosec // positive
	}
	if inIndex != st.objectCount {
		return fmt.Errorf("%d objects in the index, %d counted", inIndex, st.objectCount)
	}
	return nil
}

// allZero looks at all slots without a branch for each: most segments of a small table
// are empty.
func allZero(slots []uint64) bool {
	var all uint64
	for len(slots) >= minSegmentSlots {
		s := slots[:minSegmentSlots]
		all |= s[0] | s[1] | s[2] | s[3] | s[4] | s[5] | s[6] | s[7]
		slots = slots[minSegmentSlots:]
	}
	for _, v := range slots {
		all |= v
	}
	return all == 0
}
