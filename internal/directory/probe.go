package directory

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Probe answers which keys the caller, or with targets the target workers, could
// read; it appends a hot.Verdict a key to dst and returns the count of leading
// hits. It reserves nothing (RPC-08) and takes no request leases: see ProbeKeep.
//
// With targets, key i is a hit when for each s the key's shard s is readable with
// the domains of target s; a target that is not live, or of another engine or
// namespace than the caller, makes every key a miss (RPC-24, RPC-25). The medium of
// such a hit is the highest-numbered of its shards', the slowest to read.
//
// Concurrency: read lock; it writes nothing.
// Errors: base.ErrStale; base.ErrMismatch for another namespace.
func (d *Directory) Probe(now time.Duration, who Caller, req *hot.ProbeRequest, dst []byte) ([]byte, uint32, error) {
	s, err := d.current(now, who)
	if err != nil {
		return dst, 0, err
	}
	return d.probe(now, s, req, dst, nil)
}

// probe appends verdicts, and to kept the replicas behind each hit.
func (d *Directory) probe(now time.Duration, s *session, req *hot.ProbeRequest, dst []byte, kept *[]replicaRef) ([]byte, uint32, error) {
	if req.Namespace != s.ns.number {
		return dst, 0, fmt.Errorf("%w: probe: namespace number %d, the session has %d", base.ErrMismatch, req.Namespace, s.ns.number)
	}
	keys, shards := req.Keys.Len(), req.TargetCount()
	if keys > hot.MaxKeys || keys*max(1, shards) > hot.MaxExpandedKeys {
		return dst, 0, fmt.Errorf("%w: probe: %d keys of %d shards; at most %d keys and %d in all", base.ErrLimit, keys, shards, hot.MaxKeys, hot.MaxExpandedKeys)
	}
	// Targets of usual engines lie on the stack.
	var few [16]reader
	readers := few[:0]
	if shards > len(few) {
		readers = make([]reader, 0, shards)
	}
	reachable := true
	for i := range shards {
		t := d.sessions[req.Target(i)]
		if t == nil || t.state != StateLive || t.deadline <= now || t.ns != s.ns || t.engine != s.engine {
			reachable = false
			break
		}
		readers = append(readers, d.reader(now, t))
	}
	if shards == 0 {
		readers = append(readers, d.reader(now, s))
	}
	start := len(dst)
	leading := uint32(0)
	if reachable {
		dst, leading = d.probeBlocks(readers, req, dst, kept)
	}
	for n := len(dst) - start; n < keys; n++ {
		v := hot.Miss
		if req.Mode == hot.ModePrefix && n > 0 {
			v = hot.NotTried
		}
		dst = append(dst, byte(v))
	}
	return dst, leading, nil
}

// probeBlocks looks keys up a block at a time. In a prefix it stops after the block
// with the first key that is no hit.
func (d *Directory) probeBlocks(readers []reader, req *hot.ProbeRequest, dst []byte, kept *[]replicaRef) ([]byte, uint32) {
	keys, shards := req.Keys.Len(), req.TargetCount()
	perBlock := max(1, blockKeys/max(1, shards))
	leading, run := uint32(0), true
	ns := uint32(readers[0].session.ns.number)
	var b block
	for from := 0; from < keys; from += perBlock {
		packed := req.Keys[from*base.KeyBytes:]
		n := min(perBlock, keys-from)
		if shards <= blockKeys {
			// All shards of all keys of this block in one lookup.
			b.expand(packed, n, shards)
			d.store.lookup(ns, &b, toProbe)
		}
		for k := range n {
			var medium base.Medium
			switch {
			case shards == 0 && kept == nil:
				_, medium = readers[0].pick(b.object[k])
			case shards <= blockKeys:
				medium = pickAll(readers, b.object[k*len(readers):], kept)
			default:
				medium = d.pickWide(readers, ns, packed[k*base.KeyBytes:], kept)
			}
			if medium == base.MediumNone {
				dst = append(dst, byte(hot.Miss))
				run = false
				if req.Mode == hot.ModePrefix {
					return dst, leading
				}
				continue
			}
			dst = append(dst, byte(hot.MakeHit(medium)))
			if run {
				leading++
			}
		}
	}
	return dst, leading
}

// pickAll is the slowest medium of a key's objects, one for each reader, when all of
// them are readable, else MediumNone. The replicas of a hit are appended to kept.
func pickAll(readers []reader, objects []uint32, kept *[]replicaRef) base.Medium {
	mark := 0
	if kept != nil {
		mark = len(*kept)
	}
	slowest := base.MediumNone
	for i := range readers {
		ref, m := readers[i].pick(objects[i])
		if ref == 0 {
			if kept != nil {
				*kept = (*kept)[:mark]
			}
			return base.MediumNone
		}
		slowest = max(slowest, m)
		if kept != nil {
			*kept = append(*kept, ref)
		}
	}
	return slowest
}

// pickWide is pickAll for a key of more shards than a block has room for.
func (d *Directory) pickWide(readers []reader, ns uint32, key []byte, kept *[]replicaRef) base.Medium {
	objects := make([]uint32, len(readers))
	for i := range readers {
		w := keyWords(key).withShard(uint16(i)) //nolint:gosec // at most hot.MaxShards
		objects[i] = d.store.find(ns, &w)
	}
	return pickAll(readers, objects, kept)
}

// expand fills a block with the first n packed keys; with shards, with all shards of
// each.
func (b *block) expand(keys []byte, n, shards int) {
	b.n = n * max(1, shards)
	for i := range n {
		w := keyWords(keys[i*base.KeyBytes:])
		if shards == 0 {
			b.key[i] = w
			continue
		}
		for shard := range shards {
			b.key[i*shards+shard] = w.withShard(uint16(shard)) //nolint:gosec // at most hot.MaxShards
		}
	}
}

// reader picks replicas for one session. It remembers what it found of the last
// region, since keys that are asked for together were mostly stored together; so it
// is good for one call only, under one hold of the lock.
type reader struct {
	directory *Directory
	session   *session
	now       time.Duration
	slot      uint32
	medium    base.Medium // of the region in slot; MediumNone: out of reach
	known     bool
}

func (d *Directory) reader(now time.Duration, s *session) reader {
	return reader{directory: d, session: s, now: now}
}

// reach is the medium of a region whose READY replicas the session reads, MediumNone
// when it does not.
func (x *reader) reach(slot uint32) base.Medium {
	if x.known && x.slot == slot {
		return x.medium
	}
	x.slot, x.known, x.medium = slot, true, base.MediumNone
	if g := x.directory.regions[slot]; g.visible(x.now) && x.session.readable(g) {
		x.medium = g.pool.info.Medium
	}
	return x.medium
}

// pick is the replica of an object that the session reads, and its medium: of those
// that it can reach the one whose medium its read order prefers (POL-02, POL-05). 0
// is none.
func (x *reader) pick(o uint32) (replicaRef, base.Medium) {
	if o == 0 {
		return 0, base.MediumNone
	}
	st := x.directory.store
	if f := &st.objects[o].first; f.next == 0 {
		// Nearly every object: one replica.
		if f.state() == replicaReady {
			if m := x.reach(f.region); m != base.MediumNone {
				return o, m
			}
		}
		return 0, base.MediumNone
	}
	best, bestMedium, bestRank := replicaRef(0), base.MediumNone, 0
	for ref := st.firstOf(o); ref != 0; {
		r := st.replica(ref)
		if r.state() == replicaReady {
			if m := x.reach(r.region); m != base.MediumNone {
				if rank := x.session.readOrder.Rank(m); best == 0 || rank < bestRank {
					best, bestMedium, bestRank = ref, m, rank
				}
			}
		}
		ref = r.next
	}
	return best, bestMedium
}
