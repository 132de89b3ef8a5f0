package directory

import (
	"fmt"
	"math/bits"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/offheap"
)

// The index from (namespace, key) to an object: open addressing with linear
// probing, in segments that grow one at a time, so that no insert waits for a
// rehash of everything. A slot is tag u32 << 32 | object u32; 0 is empty. The
// home of a slot follows from its tag alone, so that growing and deleting never
// touch the objects. A delete shifts back what follows it: there are no
// tombstones that would slow the table down with age.
const (
	segmentBits     = 6
	segmentCount    = 1 << segmentBits
	minSegmentSlots = 8       // so that an empty table is small to check and to copy
	maxSegmentSlots = 1 << 27 // 8 Gi slots in all; objects end before
	// Linear probing stays short up to about three quarters.
	maxLoadNumerator, maxLoadDenominator = 3, 4
)

type segment struct {
	slab  offheap.Slab
	slots []uint64
	used  int
}

// words is a key as four little-endian u64.
type words [4]uint64

func keyWords(b []byte) words {
	_ = b[31]
	return words{le.Uint64(b), le.Uint64(b[8:]), le.Uint64(b[16:]), le.Uint64(b[24:])}
}

// withShard replaces the shard (bytes 28 and 29 of a key).
func (w words) withShard(shard uint16) words {
	w[3] = w[3]&^(0xffff<<32) | uint64(shard)<<32
	return w
}

// hashKey mixes all of a key, the namespace and a secret seed: keys of the opaque
// namespace and forged ones need not be random.
func hashKey(seed uint64, ns uint32, w *words) uint64 {
	h1, l1 := bits.Mul64(w[0]^seed^0x9e3779b97f4a7c15, w[1]^bits.RotateLeft64(seed, 23)^0xbf58476d1ce4e5b9)
	h2, l2 := bits.Mul64(w[2]^bits.RotateLeft64(seed, 41)^0x94d049bb133111eb, w[3]^uint64(ns)*0xd6e8feb86659fd93^seed)
	h, l := bits.Mul64(h1^l2^0xa0761d6478bd642f, h2^l1^seed^0xe7037ed1a0b428db)
	return h ^ l
}

func segmentOf(hash uint64) int { return int(hash & (segmentCount - 1)) }
func tagOf(hash uint64) uint64  { return hash >> 32 }

// homeOf spreads tags over the slots in order, by their upper bits.
func homeOf(tag uint64, slotCount int) int {
	return int((tag * uint64(slotCount)) >> 32) //nolint:gosec // below slotCount
}

// tableInit makes empty segments.
func (st *store) tableInit() error {
	for i := range st.segments {
		if err := st.segments[i].init(st.memory, minSegmentSlots); err != nil {
			return err
		}
	}
	return nil
}

func (s *segment) init(mem offheap.Allocator, slotCount int) error {
	slab, err := mem.Reserve(8 * uint64(slotCount)) //nolint:gosec // positive
	if err != nil {
		return err
	}
	b, err := slab.Grow(8 * uint64(slotCount)) //nolint:gosec // positive
	if err != nil {
		return err
	}
	s.slab, s.slots = slab, offheap.View[uint64](b)[:slotCount:slotCount]
	return nil
}

// reserveSlot makes room for one more entry in the segment of hash.
func (st *store) reserveSlot(hash uint64) error {
	s := &st.segments[segmentOf(hash)]
	if (s.used+1)*maxLoadDenominator <= len(s.slots)*maxLoadNumerator {
		return nil
	}
	if 2*len(s.slots) > maxSegmentSlots {
		return fmt.Errorf("%w: a table segment has %d slots", base.ErrFull, len(s.slots))
	}
	var grown segment
	if err := grown.init(st.memory, 2*len(s.slots)); err != nil {
		return err
	}
	for _, v := range s.slots {
		if v != 0 {
			grown.put(v)
		}
	}
	old := s.slab
	*s = grown
	return old.Free()
}

// put stores a slot value in the first empty slot from its home on.
func (s *segment) put(v uint64) {
	i := homeOf(v>>32, len(s.slots))
	for s.slots[i] != 0 {
		if i++; i == len(s.slots) {
			i = 0
		}
	}
	s.slots[i] = v
	s.used++
}

// remove takes the slot of an object out and closes the gap.
func (s *segment) remove(tag uint64, object uint32) bool {
	n := len(s.slots)
	i := homeOf(tag, n)
	want := tag<<32 | uint64(object)
	for s.slots[i] != want {
		if s.slots[i] == 0 {
			return false
		}
		if i++; i == n {
			i = 0
		}
	}
	for j := i; ; {
		if j++; j == n {
			j = 0
		}
		v := s.slots[j]
		if v == 0 {
			break
		}
		// v may move into the gap at i unless its home lies in (i, j], cyclically.
		home := homeOf(v>>32, n)
		if i <= j {
			if i < home && home <= j {
				continue
			}
		} else if i < home || home <= j {
			continue
		}
		s.slots[i] = v
		i = j
	}
	s.slots[i] = 0
	s.used--
	return true
}

// find returns the object of a key, 0 when there is none.
func (st *store) find(ns uint32, w *words) uint32 {
	hash := hashKey(st.seed, ns, w)
	return st.findHashed(hash, ns, w)
}

func (st *store) findHashed(hash uint64, ns uint32, w *words) uint32 {
	s := &st.segments[segmentOf(hash)]
	tag := tagOf(hash)
	slots := s.slots
	for i := homeOf(tag, len(slots)); ; {
		v := slots[i]
		if v == 0 {
			return 0
		}
		if v>>32 == tag {
			if o := &st.objects[uint32(v)]; o.key == *w && o.namespace == ns { //nolint:gosec // low half
				return uint32(v) //nolint:gosec // low half
			}
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// blockKeys is the batch in which lookups overlap their cache misses. The scratch
// of one block lies on the caller's stack, so that lookups run together under a
// read lock and allocate nothing.
const blockKeys = 64

type block struct {
	n      int
	key    [blockKeys]words
	hash   [blockKeys]uint64
	object [blockKeys]uint32 // result: 0 is none
}

// purpose is what a lookup is made for: how much of an object it fetches.
type purpose uint8

const (
	toProbe purpose = iota // the first line
	toLease                // the whole object
)

// lookup finds the objects of a block's first n keys: three passes, each of which
// works on what the one before it has asked the memory for.
func (st *store) lookup(ns uint32, b *block, why purpose) {
	n := b.n
	var home [blockKeys]uint32
	for i := range n {
		h := hashKey(st.seed, ns, &b.key[i])
		s := st.segments[segmentOf(h)].slots
		at := homeOf(tagOf(h), len(s))
		b.hash[i], home[i] = h, uint32(at) //nolint:gosec // below maxSegmentSlots
		prefetchSlot(&s[at])
	}
	// The object that the probe sequence offers first, by tag alone.
	for i := range n {
		s := st.segments[segmentOf(b.hash[i])].slots
		v := s[home[i]]
		if tag := tagOf(b.hash[i]); v != 0 && v>>32 != tag {
			v = nextTag(s, int(home[i]), tag)
		}
		o := uint32(v) //nolint:gosec // low half
		b.object[i] = o
		if why == toProbe {
			prefetchHead(&st.objects[o])
		} else {
			prefetchObject(&st.objects[o])
		}
	}
	for i := range n {
		o := b.object[i]
		if o == 0 {
			continue
		}
		if e := &st.objects[o]; e.key != b.key[i] || e.namespace != ns {
			// Another key with the same tag came first: rare.
			b.object[i] = st.findHashed(b.hash[i], ns, &b.key[i])
		}
	}
}

// nextTag is the first slot value behind slot i with the tag, 0 for none.
func nextTag(slots []uint64, i int, tag uint64) uint64 {
	for {
		if i++; i == len(slots) {
			i = 0
		}
		if v := slots[i]; v == 0 || v>>32 == tag {
			return v
		}
	}
}
