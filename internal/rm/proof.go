package rm

import (
	"crypto/rand"
	"crypto/subtle"
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// proofs are the nonce slots in use and who proved that it reaches a pool. They
// are not durable: after a restart mappers prove again. Concurrency: the committer's.
type proofs struct {
	timeout time.Duration
	slots   map[base.PoolID]*[poolfmt.NonceSlotCount]nonceSlot
	proved  map[provedKey]struct{}
	order   []provedKey // oldest first
}

type nonceSlot struct {
	nonce   poolfmt.Nonce
	expires time.Time
}

type provedKey struct {
	session base.SessionID
	pool    base.PoolID
}

// maxProvedCount bounds what is remembered; the oldest proof goes first, and who
// needs it proves again.
const maxProvedCount = 1 << 16

func newProofs(timeout time.Duration) *proofs {
	return &proofs{timeout: timeout, slots: map[base.PoolID]*[poolfmt.NonceSlotCount]nonceSlot{}, proved: map[provedKey]struct{}{}}
}

// start takes a slot for a session: its own again, else one that is free or has
// expired. Errors: ErrBusy.
func (p *proofs) start(now time.Time, session base.SessionID, pool base.PoolID) (uint32, poolfmt.Nonce, error) {
	slots := p.slots[pool]
	if slots == nil {
		slots = &[poolfmt.NonceSlotCount]nonceSlot{}
		p.slots[pool] = slots
	}
	free := -1
	for i := range slots {
		live := now.Before(slots[i].expires)
		if live && slots[i].nonce.Session == session {
			free = i
			break
		}
		if !live && free < 0 {
			free = i
		}
	}
	if free < 0 {
		return 0, poolfmt.Nonce{}, fmt.Errorf("%w: all %d nonce slots of pool %s are in use; try again within %s", base.ErrBusy, poolfmt.NonceSlotCount, pool, p.timeout)
	}
	n := poolfmt.Nonce{Session: session}
	_, _ = rand.Read(n.Value[:])
	slots[free] = nonceSlot{nonce: n, expires: now.Add(p.timeout)}
	return uint32(free), n, nil
}

// cancel gives a slot back whose nonce could not be written.
func (p *proofs) cancel(pool base.PoolID, slot uint32) { p.slots[pool][slot] = nonceSlot{} }

// finish compares what a mapper read. Errors: ErrInvalid, ErrStale (no such
// challenge, or it expired), ErrDenied (other bytes: it maps something else).
func (p *proofs) finish(now time.Time, session base.SessionID, pool base.PoolID, slot uint32, nonce []byte) error {
	if slot >= poolfmt.NonceSlotCount || len(nonce) != poolfmt.NonceBytes {
		return fmt.Errorf("%w: slot %d with a nonce of %d bytes, allowed: slots below %d and %d bytes", base.ErrInvalid, slot, len(nonce), poolfmt.NonceSlotCount, poolfmt.NonceBytes)
	}
	slots := p.slots[pool]
	if slots == nil || slots[slot].nonce.Session != session || now.After(slots[slot].expires) {
		return fmt.Errorf("%w: session %s has no open challenge in slot %d of pool %s: start the proof again", base.ErrStale, session, slot, pool)
	}
	want := slots[slot].nonce.Value
	slots[slot] = nonceSlot{}
	if subtle.ConstantTimeCompare(want[:], nonce) != 1 {
		return fmt.Errorf("%w: session %s did not read the nonce of pool %s: it maps another device or a copy, or does not see fresh bytes", base.ErrDenied, session, pool)
	}
	k := provedKey{session, pool}
	if _, ok := p.proved[k]; !ok {
		p.proved[k] = struct{}{}
		p.order = append(p.order, k)
	}
	for len(p.order) > maxProvedCount {
		delete(p.proved, p.order[0])
		p.order = p.order[1:]
	}
	return nil
}

func (p *proofs) isProved(session base.SessionID, pool base.PoolID) bool {
	_, ok := p.proved[provedKey{session, pool}]
	return ok
}

// forget drops a session that is gone.
func (p *proofs) forget(session base.SessionID) {
	kept := p.order[:0:0]
	for _, k := range p.order {
		if k.session == session {
			delete(p.proved, k)
		} else {
			kept = append(kept, k)
		}
	}
	p.order = kept
}
