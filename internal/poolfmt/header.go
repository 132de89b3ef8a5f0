package poolfmt

import (
	"bytes"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// magicHeader is the magic of the original's device header too: its version 1
// is recognised and refused by name.
var magicHeader = [8]byte{'M', 'A', 'R', 'U', 'D', 'E', 'V', 0}

// Static is the first line of a header. It is written when a device is
// initialised or taken over, and never in between.
type Static struct {
	Pool      base.PoolID
	Store     base.StoreID // of the resource manager that owns the pool
	Coherence base.Coherence
}

// Slot is what changes with every transaction that touches the pool. The Next
// fields are the lowest numbers that were never given; a resource manager that
// lost its store goes on from them.
type Slot struct {
	Sequence        uint64
	NextRegion      base.RegionID
	NextIncarnation base.Incarnation // of a region
	NextOwner       base.Incarnation // of an owner
}

// Header is a decoded header: the static line and the newest valid slot.
type Header struct {
	Static
	Slot
}

// EncodeStatic gives the line at offset 0.
func EncodeStatic(s Static) [LineBytes]byte {
	var b [LineBytes]byte
	copy(b[0:8], magicHeader[:])
	le.PutUint16(b[8:], HeaderVersion)
	b[10] = byte(s.Coherence)
	copy(b[16:32], s.Pool[:])
	copy(b[32:48], s.Store[:])
	le.PutUint64(b[56:], check8(seedStatic, b[:56]))
	return b
}

// DecodeStatic reads the line at offset 0. Errors: ErrNotFound for a blank line,
// ErrForeign for somebody else's bytes, ErrUnsupported for another version,
// ErrCorrupt when the check or a field does not hold, ErrInvalid for a short
// buffer.
func DecodeStatic(b []byte) (Static, error) {
	if len(b) < LineBytes {
		return Static{}, fmt.Errorf("%w: pool header needs %d bytes, has %d", base.ErrInvalid, LineBytes, len(b))
	}
	b = b[:LineBytes]
	if isZero(b) {
		return Static{}, fmt.Errorf("%w: no pool header", base.ErrNotFound)
	}
	if !bytes.Equal(b[:8], magicHeader[:]) {
		return Static{}, fmt.Errorf("%w: the device begins with %q, which is no pool header", base.ErrForeign, b[:8])
	}
	if v := le.Uint16(b[8:]); v != HeaderVersion {
		return Static{}, fmt.Errorf("%w: pool header of version %d, this program has version %d", base.ErrUnsupported, v, HeaderVersion)
	}
	if got, want := le.Uint64(b[56:]), check8(seedStatic, b[:56]); got != want {
		return Static{}, fmt.Errorf("%w: pool header: check is %#x, must be %#x", base.ErrCorrupt, got, want)
	}
	s := Static{Coherence: base.Coherence(b[10])}
	copy(s.Pool[:], b[16:32])
	copy(s.Store[:], b[32:48])
	if b[11] != 0 || !isZero(b[12:16]) || !isZero(b[48:56]) {
		return Static{}, fmt.Errorf("%w: pool header: reserved bytes are not zero", base.ErrCorrupt)
	}
	if s.Coherence != base.CoherenceHardware && s.Coherence != base.CoherenceSoftware {
		return Static{}, fmt.Errorf("%w: pool header: coherence %d", base.ErrCorrupt, b[10])
	}
	if s.Pool == (base.PoolID{}) || s.Store == (base.StoreID{}) {
		return Static{}, fmt.Errorf("%w: pool header: zero pool or store id", base.ErrCorrupt)
	}
	return s, nil
}

// SlotOffset is where the slot of a sequence is written: consecutive ones
// alternate, so a torn write leaves the one before it whole.
func SlotOffset(sequence uint64) int {
	return LineBytes * (1 + int(sequence%slotCount))
}

// EncodeSlot gives the line that belongs at SlotOffset(s.Sequence).
func EncodeSlot(pool base.PoolID, s Slot) [LineBytes]byte {
	var b [LineBytes]byte
	le.PutUint64(b[0:], s.Sequence)
	le.PutUint32(b[8:], uint32(s.NextRegion))
	le.PutUint32(b[12:], uint32(s.NextIncarnation))
	le.PutUint32(b[16:], uint32(s.NextOwner))
	le.PutUint64(b[24:], check8(seedSlot0+s.Sequence%slotCount, b[:24], pool[:]))
	return b
}

// decodeSlot reads the slot line with the given number (0 or 1).
func decodeSlot(b []byte, pool base.PoolID, number uint64) (Slot, bool) {
	s := Slot{
		Sequence:        le.Uint64(b[0:]),
		NextRegion:      base.RegionID(le.Uint32(b[8:])),
		NextIncarnation: base.Incarnation(le.Uint32(b[12:])),
		NextOwner:       base.Incarnation(le.Uint32(b[16:])),
	}
	switch {
	case s.Sequence%slotCount != number,
		le.Uint64(b[24:]) != check8(seedSlot0+number, b[:24], pool[:]),
		!isZero(b[20:24]), !isZero(b[32:LineBytes]),
		s.NextRegion == 0, s.NextRegion > base.FirstPrivateRegion,
		s.NextIncarnation == 0, s.NextIncarnation > base.MaxIncarnation+1,
		s.NextOwner == 0, s.NextOwner > base.MaxIncarnation+1:
		return Slot{}, false
	}
	return s, true
}

// FirstSlot is the slot of a device that was just initialised.
func FirstSlot() Slot { return Slot{NextRegion: 1, NextIncarnation: 1, NextOwner: 1} }

// EncodeHeader gives a whole header with one valid slot, for initialisation.
func EncodeHeader(h Header) [HeaderBytes]byte {
	var b [HeaderBytes]byte
	static := EncodeStatic(h.Static)
	copy(b[:], static[:])
	slot := EncodeSlot(h.Pool, h.Slot)
	copy(b[SlotOffset(h.Sequence):], slot[:])
	return b
}

// IsUnfinished reports whether b holds what an initialisation leaves that was cut short
// before the static line, which comes last: the first slot and nothing else.
func IsUnfinished(b []byte) bool {
	if len(b) < HeaderBytes {
		return false
	}
	slot := EncodeSlot(base.PoolID{}, FirstSlot())
	at := SlotOffset(0)
	const known = 24 // then the check, which the pool's id is part of
	return isZero(b[:at]) && bytes.Equal(b[at:at+known], slot[:known]) && isZero(b[at+known+8:HeaderBytes])
}

// DecodeHeader reads a whole header and picks the newest valid slot. Errors: as
// DecodeStatic, and ErrCorrupt when no slot is valid.
func DecodeHeader(b []byte) (Header, error) {
	if len(b) < HeaderBytes {
		return Header{}, fmt.Errorf("%w: pool header needs %d bytes, has %d", base.ErrInvalid, HeaderBytes, len(b))
	}
	static, err := DecodeStatic(b)
	if err != nil {
		return Header{}, err
	}
	h := Header{Static: static}
	found := false
	for number := range uint64(slotCount) {
		line := b[LineBytes*(1+number):][:LineBytes]
		s, ok := decodeSlot(line, static.Pool, number)
		if ok && (!found || s.Sequence > h.Sequence) {
			h.Slot, found = s, true
		}
	}
	if !found {
		return Header{}, fmt.Errorf("%w: pool header: neither slot is valid", base.ErrCorrupt)
	}
	return h, nil
}

// NonceOffset is where a nonce slot lies in the pool. number is below
// NonceSlotCount.
func NonceOffset(number uint32) uint64 {
	return NonceAreaOffset + uint64(number)*NonceSlotBytes
}

// Nonce is what the resource manager leaves in a nonce slot for one mapper.
type Nonce struct {
	Value   [NonceBytes]byte
	Session base.SessionID
}

// EncodeNonce gives a nonce slot's line.
func EncodeNonce(pool base.PoolID, n Nonce) [NonceSlotBytes]byte {
	var b [NonceSlotBytes]byte
	copy(b[:], n.Value[:])
	copy(b[32:], n.Session[:])
	le.PutUint64(b[56:], check8(seedNonce, b[:56], pool[:]))
	return b
}

// DecodeNonce reads a nonce slot's line. Errors: ErrCorrupt, also for a blank
// slot and for one of another pool; ErrInvalid for a short buffer.
func DecodeNonce(b []byte, pool base.PoolID) (Nonce, error) {
	if len(b) < NonceSlotBytes {
		return Nonce{}, fmt.Errorf("%w: nonce slot needs %d bytes, has %d", base.ErrInvalid, NonceSlotBytes, len(b))
	}
	b = b[:NonceSlotBytes]
	if le.Uint64(b[56:]) != check8(seedNonce, b[:56], pool[:]) || !isZero(b[48:56]) {
		return Nonce{}, fmt.Errorf("%w: nonce slot of pool %s", base.ErrCorrupt, pool)
	}
	var n Nonce
	copy(n.Value[:], b)
	copy(n.Session[:], b[32:])
	return n, nil
}
