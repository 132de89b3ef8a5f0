package core

import (
	"cmp"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/store"
)

// Batch collects what requests change until it is committed. The zero value is
// empty and ready. Later changes of a key replace earlier ones.
type Batch struct {
	changes map[batchKey][]byte
	touched map[base.PoolID]bool
	events  []Event
}

type batchKey struct{ bucket, key string }

// IsEmpty reports whether there is nothing to commit.
func (b *Batch) IsEmpty() bool { return len(b.changes) == 0 && len(b.touched) == 0 }

// Changes returns the batch for the store, in order.
func (b *Batch) Changes() []store.Change {
	out := make([]store.Change, 0, len(b.changes))
	for k, v := range b.changes {
		out = append(out, store.Change{Bucket: k.bucket, Key: k.key, Value: v})
	}
	slices.SortFunc(out, func(x, y store.Change) int {
		return cmp.Or(cmp.Compare(x.Bucket, y.Bucket), cmp.Compare(x.Key, y.Key))
	})
	return out
}

// Events returns what to publish after the commit, in order.
func (b *Batch) Events() []Event { return b.events }

func (b *Batch) put(bucket, key string, row any) { b.set(bucket, key, encode(row)) }
func (b *Batch) drop(bucket, key string)         { b.set(bucket, key, nil) }

func (b *Batch) set(bucket, key string, value []byte) {
	if b.changes == nil {
		b.changes = map[batchKey][]byte{}
	}
	b.changes[batchKey{bucket, key}] = value
}

func (b *Batch) touch(p *pool) {
	if b.touched == nil {
		b.touched = map[base.PoolID]bool{}
	}
	b.touched[p.row.ID] = true
}

func (b *Batch) event(e Event) { b.events = append(b.events, e) }

// SlotWrite is a slot that the shell writes and flushes after the commit.
type SlotWrite struct {
	Pool base.PoolID
	Slot poolfmt.Slot
}

// Seal gives each touched pool its next sequence and returns the slots to write
// after the commit. It is called right before each commit and gives the same
// sequences until SlotWritten.
func (c *Core) Seal(b *Batch) []SlotWrite {
	var out []SlotWrite
	for id := range b.touched {
		p, ok := c.pools[id]
		if !ok {
			continue
		}
		if p.online() {
			p.row.Sequence = p.slotSequence + 1
			p.row.NextOwner = c.counters.NextOwner
			out = append(out, SlotWrite{Pool: id, Slot: p.row.slot()})
			b.put(bucketPools, string(id[:]), p.row)
		}
	}
	slices.SortFunc(out, func(x, y SlotWrite) int { return cmp.Compare(string(x.Pool[:]), string(y.Pool[:])) })
	return out
}

// SlotWritten says that a slot returned by Seal or Attach is on the device.
func (c *Core) SlotWritten(w SlotWrite) {
	if p, ok := c.pools[w.Pool]; ok {
		p.slotSequence = w.Slot.Sequence
	}
}

// Event is what a batch tells to watchers after it is durable.
type Event struct {
	Kind        EventKind
	Owners      []base.OwnerID   // who is told
	Sessions    []base.SessionID // who is told (EventDraining)
	Session     base.SessionID   // who is gone
	Proof       Proof
	Pool        base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation // the newer one (EventFenced)
}

// EventKind says what happened.
type EventKind uint8

// Kinds of event.
const (
	EventSessionGone EventKind = iota + 1
	EventRegionFreed
	EventFenced
	EventDraining
)

// Proof says why a mapper is known to be gone (docs/PROTOCOL.md, section 3).
type Proof string

// Proofs. Time is none.
const (
	ProofSaidSo       Proof = "said_so"
	ProofPidfd        Proof = "pidfd"
	ProofReboot       Proof = "reboot"
	ProofDeregistered Proof = "deregistered"
	ProofOperator     Proof = "operator"
)
