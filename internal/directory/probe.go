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
	var few [32]*session
	targets := few[:0]
	if shards > len(few) {
		targets = make([]*session, 0, shards)
	}
	reachable := true
	for i := range shards {
		t := d.sessions[req.Target(i)]
		if t == nil || t.state != StateLive || t.deadline <= now || t.ns != s.ns || t.engine != s.engine {
			reachable = false
			break
		}
		targets = append(targets, t)
	}
	if shards == 0 {
		targets = append(targets, s)
	}
	start := len(dst)
	leading := uint32(0)
	if reachable {
		dst, leading = d.probeBlocks(now, s, targets, req, dst, kept)
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
func (d *Directory) probeBlocks(now time.Duration, s *session, targets []*session, req *hot.ProbeRequest, dst []byte, kept *[]replicaRef) ([]byte, uint32) {
	keys, shards := req.Keys.Len(), req.TargetCount()
	perBlock := max(1, blockKeys/max(1, shards))
	leading, run := uint32(0), true
	ns := uint32(s.ns.number)
	var b block
	for from := 0; from < keys; from += perBlock {
		n := min(perBlock, keys-from)
		for k := range n {
			verdict := hot.Verdict(0)
			if shards <= blockKeys && k == 0 {
				// All shards of all keys of this block in one lookup.
				b.n = 0
				for j := range n {
					w := keyWords(req.Keys[(from+j)*base.KeyBytes:])
					if shards == 0 {
						b.key[b.n] = w
						b.n++
					}
					for shard := range shards {
						b.key[b.n] = w.withShard(uint16(shard)) //nolint:gosec // at most hot.MaxShards
						b.n++
					}
				}
				d.store.lookup(ns, &b)
			}
			mark := 0
			if kept != nil {
				mark = len(*kept)
			}
			medium, hit := base.MediumNone, true
			for i, t := range targets {
				var o uint32
				if shards <= blockKeys {
					o = b.object[k*len(targets)+i]
				} else {
					w := keyWords(req.Keys[(from+k)*base.KeyBytes:]).withShard(uint16(i)) //nolint:gosec // at most hot.MaxShards
					o = d.store.find(ns, &w)
				}
				ref := d.selectReplica(now, t, o)
				if ref == 0 {
					hit = false
					break
				}
				medium = max(medium, d.regions[d.store.replica(ref).region].pool.info.Medium)
				if kept != nil {
					*kept = append(*kept, ref)
				}
			}
			switch {
			case hit:
				verdict = hot.MakeHit(medium)
			case kept != nil:
				*kept = (*kept)[:mark]
			}
			dst = append(dst, byte(verdict))
			if hit && run {
				leading++
				continue
			}
			run = run && hit
			if !run && req.Mode == hot.ModePrefix {
				return dst, leading
			}
		}
	}
	return dst, leading
}

// selectReplica picks the replica of an object that the session reads: of those that
// it can reach the one whose medium its read order prefers (POL-02, POL-05). 0 is
// none.
func (d *Directory) selectReplica(now time.Duration, s *session, o uint32) replicaRef {
	if o == 0 {
		return 0
	}
	best, bestRank := replicaRef(0), 0
	for ref := d.store.firstOf(o); ref != 0; {
		r := d.store.replica(ref)
		if r.state() == replicaReady {
			if g := d.regions[r.region]; g.visible(now) && s.readable(g) {
				if r.next == 0 && best == 0 {
					return ref
				}
				if rank := s.readOrder.Rank(g.pool.info.Medium); best == 0 || rank < bestRank {
					best, bestRank = ref, rank
				}
			}
		}
		ref = r.next
	}
	return best
}
