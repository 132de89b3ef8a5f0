package engine

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// Layer is one tensor on the device: run i of block b begins at Base + b x StrideBytes +
// Offsets[i] and has RunBytes, all multiples of AlignBytes.
type Layer struct {
	Base        uint64
	StrideBytes int64
	RunBytes    uint64
	Offsets     []int64
}

// Layout is the memory that blocks lie in: [block][layer][run] is their order in an
// object. It was checked whole (G2) and never changes.
type Layout struct {
	Layers     []Layer
	BlockCount uint32
	Choice     *Choice // of Engine.Choose; nil: there is none
}

// Object is what a transfer moves between one range of host memory and blocks of a
// layout.
//
// Ownership: Host and Blocks are the caller's and must stay as they are until the
// transfer has ended; the results are the caller's then.
type Object struct {
	// Host is whole pieces of a value: it begins at a border of pieces, and ends at one or
	// at the value's end.
	Host []byte
	// Mapped says how the device reaches Host.
	Mapped Mapped
	// SkipBytes and SizeBytes are what of Host the blocks take. The rest is only hashed. Of a
	// save they are 0 and len(Host).
	SkipBytes, SizeBytes uint64
	PieceBytes           uint64
	Seed                 uint64
	Layout               *Layout
	Blocks               []uint32

	// Results.

	// Leaves has the hash of every piece of Host, in order, when Err is nil.
	Leaves []uint64
	// Err: the object was not moved, or nobody knows. ErrFault, ErrInvalid (a block that the
	// layout has not).
	Err error
	// Faulted, only with Err: memory of Host faulted, and nothing else did.
	Faulted bool
	// Running, only with Err: the device was lost and may still write to Host (save) or to
	// the blocks (load), as long as this process lives.
	Running bool
}

// Mapped says how the device reaches host memory.
type Mapped uint8

// Ways to host memory.
const (
	Bounced    Mapped = iota // through a registered buffer of the lane
	Registered               // by itself: it lies in one registration
)

// Transfer is a batch of objects in one direction.
type Transfer struct {
	Direction Direction
	After     Event // of Engine.Record; 0: nothing to wait for
	Objects   []Object
	// Arrived is called for each object whose last byte and leaf are there, in order, by
	// the lane while it copies the next ones: it must be quick and not call the engine.
	// Objects of which something fails later were called for as well. May be nil.
	Arrived func(i int)

	done chan struct{}
	// Of the lane.
	at      cursor
	total   uint64 // bytes of all Hosts
	taken   uint64 // of them, by chunks
	pending int    // chunks in flight
	failed  error
}

// firstChunkBytes is the size of the chunk that nothing else runs beside.
const firstChunkBytes = 1 << 20

// begin forgets what an earlier Run has left.
func (t *Transfer) begin() {
	t.done = make(chan struct{})
	t.at, t.total, t.taken, t.pending, t.failed = cursor{}, 0, 0, 0, nil
	for i := range t.Objects {
		o := &t.Objects[i]
		o.Leaves, o.Err, o.Running, o.Faulted = o.Leaves[:0], nil, false, false
		t.total += uint64(len(o.Host))
	}
}

// chunkBytes is how much the next chunk takes at most. The link waits for the kernel of a
// save's first chunk, and nothing runs beside the kernel of a load's last one: chunks grow
// from small ones, and shrink to them.
func (t *Transfer) chunkBytes(stage uint64) uint64 {
	n := t.taken
	if t.Direction == Load {
		n = (t.total - t.taken) / 2
	}
	return min(max(n, firstChunkBytes), stage)
}

// cursor is how far a transfer is cut into chunks.
type cursor struct {
	object int
	host   uint64 // bytes of Host
	runCursor
}

// runCursor is a place in the runs of an object's blocks.
type runCursor struct {
	block, layer, run int
	runByte           uint64
}

// next goes to the beginning of the next run.
func (r *runCursor) next(l *Layout) {
	r.runByte = 0
	if r.run++; r.run < len(l.Layers[r.layer].Offsets) {
		return
	}
	r.run = 0
	if r.layer++; r.layer < len(l.Layers) {
		return
	}
	r.layer = 0
	r.block++
}

func (t *Transfer) cut() bool { return t.at.object == len(t.Objects) }

// fail ends the cutting; what is in flight is waited for.
func (t *Transfer) fail(err error) {
	if t.failed == nil {
		t.failed = err
	}
	t.at.object = len(t.Objects)
	for i := range t.Objects {
		if t.Objects[i].Err == nil {
			t.Objects[i].Err = t.failed
		}
	}
}

// span is the part of an object that a chunk has.
type span struct {
	object     int
	firstPiece int // of the slot
	pieceCount int
	hostFrom   uint64
	hostTo     uint64
	stageFrom  uint64 // relative to the slot's stage
}

// chunk is what one slot has in flight.
type chunk struct {
	t      *Transfer
	launch Launch
	spans  []span
	failed error // the launch was started in part
}

// stageAlignBytes is what objects in a stage begin at a multiple of.
const stageAlignBytes = 512

// wayOf decides how an object moves. Only whole pieces within one run can be hashed where
// they lie.
func (o *Object) wayOf(d Direction, rule Rule, directRunBytes uint64) Way {
	if rule == AlwaysStaged || o.Mapped == Bounced || o.SkipBytes != 0 || o.SizeBytes != uint64(len(o.Host)) {
		return Staged
	}
	chosen, measured := o.Layout.Choice.Way(d)
	for i := range o.Layout.Layers {
		n := o.Layout.Layers[i].RunBytes
		if n%o.PieceBytes != 0 || rule == Auto && !measured && n < directRunBytes {
			return Staged
		}
	}
	if rule == Auto && measured {
		return chosen
	}
	return Direct
}

// fill cuts the next chunk of t into a slot. bounce is the slot's, or nil when no object
// needs one; needBounce reports that the next object does and there is none: call again
// with one. It returns false when there is nothing left.
func (c *chunk) fill(t *Transfer, s *Slot, o *LaneOptions, rule Rule, directRunBytes uint64, bounce []byte) (filled, needBounce bool) {
	c.t, c.spans, c.failed = t, c.spans[:0], nil
	c.launch = Launch{Direction: t.Direction, After: t.After}
	room := t.chunkBytes(o.StageBytes)
	var stage, taken uint64
	defer func() { t.taken += taken }()
	tails := 0
	for t.at.object < len(t.Objects) {
		obj := &t.Objects[t.at.object]
		way := obj.wayOf(t.Direction, rule, directRunBytes)
		if len(c.spans) > 0 && way != c.launch.Way {
			return true, false
		}
		if obj.Mapped == Bounced && bounce == nil {
			return len(c.spans) > 0, len(c.spans) == 0
		}
		c.launch.Way = way
		stage = (stage + stageAlignBytes - 1) &^ (stageAlignBytes - 1)
		sp := span{object: t.at.object, firstPiece: c.launch.Pieces, hostFrom: t.at.host, hostTo: t.at.host, stageFrom: stage}
		full := false
		firstCopy := c.launch.Copies
		for t.at.host < uint64(len(obj.Host)) {
			n := min(obj.PieceBytes, uint64(len(obj.Host))-t.at.host)
			if stage+n > o.StageBytes || taken > 0 && taken+n > room || c.launch.Pieces == o.PieceCount || n <= ShortBytes && tails == TailCount ||
				c.launch.Copies >= o.CopyCount-1 {
				full = true
				break
			}
			fits, err := c.piece(obj, s, o, stage, n, &tails)
			if err != nil {
				t.fail(err)
				return false, false
			}
			if !fits {
				full = true
				break
			}
			c.copy(obj, s, firstCopy, stage, n, bounce)
			stage += n
			taken += n
			t.at.host += n
		}
		sp.hostTo, sp.pieceCount = t.at.host, c.launch.Pieces-sp.firstPiece
		if sp.pieceCount > 0 {
			c.spans = append(c.spans, sp)
		}
		if full {
			return len(c.spans) > 0, false // without one the piece fits no chunk at all
		}
		t.at = cursor{object: t.at.object + 1}
	}
	return len(c.spans) > 0, false
}

// piece adds the piece of n bytes at the cursor. It returns false, with nothing changed,
// when the fragments do not fit. Block numbers are checked as they are used: the list may
// be memory of somebody who changes it. Errors: ErrInvalid.
func (c *chunk) piece(obj *Object, s *Slot, o *LaneOptions, stage, n uint64, tails *int) (bool, error) {
	at := &c.t.at
	p := &s.Pieces[c.launch.Pieces]
	*p = Piece{Stage: s.StageAddress + stage, Seed: obj.Seed, Bytes: uint32(n), First: uint32(c.launch.Fragments)} //nolint:gosec // bounded
	from, to := max(at.host, obj.SkipBytes), min(at.host+n, obj.SkipBytes+obj.SizeBytes)
	cur, fragments := at.runCursor, c.launch.Fragments
	for b := from; b < to; {
		y := &obj.Layout.Layers[cur.layer]
		block := obj.Blocks[cur.block]
		if block >= obj.Layout.BlockCount {
			return false, fmt.Errorf("%w: block %d of a layout with %d", base.ErrInvalid, block, obj.Layout.BlockCount)
		}
		address := y.Base + uint64(int64(block)*y.StrideBytes+y.Offsets[cur.run]) + cur.runByte //nolint:gosec // checked at registration
		k := min(to-b, y.RunBytes-cur.runByte)
		if k == n { // the whole piece in one run
			p.Address = address
		} else {
			if fragments == o.FragmentCount {
				return false, nil
			}
			s.Fragments[fragments] = Fragment{
				Address: address, Stage: s.StageAddress + stage + (b - at.host), Bytes: uint32(k), //nolint:gosec // bounded
			}
			fragments++
		}
		b += k
		if cur.runByte += k; cur.runByte == y.RunBytes {
			cur.next(obj.Layout)
		}
	}
	if p.Address == 0 {
		p.Count = uint32(fragments - c.launch.Fragments) //nolint:gosec // bounded
		if p.Count == 0 {                                // only hashed: no fragment, and not whole either
			p.Count, p.First = 1, uint32(fragments) //nolint:gosec // bounded
			if fragments == o.FragmentCount {
				return false, nil
			}
			s.Fragments[fragments] = Fragment{Address: p.Stage, Stage: p.Stage}
			fragments++
		}
	}
	if n <= ShortBytes {
		*tails++
		p.Tail = uint32(*tails) //nolint:gosec // bounded
	}
	at.runCursor = cur
	c.launch.Fragments = fragments
	c.launch.Pieces++
	return true, nil
}

// copy adds the piece's bytes to the copies: to the last one of the same object when
// both sides go on there.
func (c *chunk) copy(obj *Object, s *Slot, firstCopy int, stage, n uint64, bounce []byte) {
	host := addressOf(obj.Host) + c.t.at.host
	if obj.Mapped == Bounced {
		host = addressOf(bounce) + stage
	}
	device := s.StageAddress + stage
	if c.launch.Way == Direct {
		device = s.Pieces[c.launch.Pieces-1].Address
	}
	if c.launch.Copies > firstCopy {
		if last := &s.Copies[c.launch.Copies-1]; last.Host+last.Bytes == host && last.Device+last.Bytes == device {
			last.Bytes += n
			return
		}
	}
	s.Copies[c.launch.Copies] = Copy{Host: host, Device: device, Bytes: n}
	c.launch.Copies++
}
