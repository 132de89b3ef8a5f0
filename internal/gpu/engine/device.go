package engine

import (
	"errors"
	"time"
)

// ErrUnanswered is a Wait that the driver refused for a reason of the call: it says
// nothing about the work, and may be asked again.
var ErrUnanswered = errors.New("maru: the GPU's driver did not say whether a copy has ended")

// Direction says which way bytes go.
type Direction uint8

// Directions.
const (
	Save Direction = iota // from the device to host memory
	Load                  // from host memory to the device
)

func (d Direction) String() string {
	if d == Save {
		return "save"
	}
	return "load"
}

// Access says how the device may use host memory.
type Access uint8

// Kinds of access.
const (
	ReadWrite Access = iota
	ReadOnly
)

// Stream is the raw handle of a stream of the engine; 0 is the default stream of the
// device's primary context.
type Stream uint64

// Event is a point in a stream that a device's Record has made. 0: none.
type Event uint64

// Info says what a device is, for logs and people.
type Info struct {
	Ordinal       int
	Name          string
	DriverVersion int // 13000 is CUDA 13.0
	MemoryBytes   uint64
	BatchCopy     bool // many copies in one call
}

// Driver opens devices. Errors of Open: ErrUnsupported (no driver, no such device, MPS),
// ErrLimit (no memory for the context).
type Driver interface {
	Open(ordinal int) (Device, error)
}

// Device is one GPU, on the context that the engine of the process uses. Nothing of it
// blocks for the GPU but Close.
//
// Concurrency: all methods may be called at once, from any goroutine. Errors of all:
// ErrFault when the device is lost, which stays so.
type Device interface {
	Info() Info
	// Check refuses a range that is not memory of this device. Errors: ErrInvalid.
	Check(address, size uint64) error
	// Register makes host memory readable, and writable, by the device, at once. It takes
	// some 40 ms a GiB. Errors: ErrUnsupported for memory that the driver refuses.
	Register(mem []byte, access Access) error
	// Unregister ends it. No copy of the memory may run any more.
	Unregister(mem []byte) error
	// Record makes an event behind what is in the stream now. Errors: ErrUnsupported for
	// a stream that is being captured: the event would draw other streams into the graph.
	Record(s Stream) (Event, error)
	// Passed reports whether what was in the stream before an event is done.
	Passed(e Event) (bool, error)
	// Forget gives an event back.
	Forget(e Event)
	// NewLane makes the streams, staging memory and lists of one direction.
	NewLane(o LaneOptions) (Lane, error)
	// Close ends the device after its lanes are closed and its memory is unregistered.
	Close() error
}

// LaneOptions are the sizes of a lane.
type LaneOptions struct {
	SlotCount     int
	StageBytes    uint64 // a slot
	PieceCount    int    // a slot, at most
	FragmentCount int
	CopyCount     int
	// BlockCount is how many blocks of threads a kernel has: few, so that the engine's
	// kernels keep the rest.
	BlockCount int
}

// Lane is one direction of a device: slots, each with a stream, staging memory on the
// device and lists that a launch is described in. The work of two slots overlaps.
//
// Concurrency: a lane belongs to one goroutine, which has called Bind and stays on its
// thread; Wake may be called from any.
type Lane interface {
	// Bind prepares the calling thread, which must be locked for life.
	Bind() error
	// Slot returns a slot's lists. They must not be touched while the slot is in flight.
	Slot(i int) *Slot
	// Bounce returns registered host memory of StageBytes for a slot, made at its first
	// use. Errors: ErrLimit.
	Bounce(i int) ([]byte, error)
	// Launch starts what a slot's lists say. started is false when nothing of it was
	// started; with an error and started it is unknown what runs, until Wait says that
	// the slot is done.
	Launch(i int, l *Launch) (started bool, err error)
	// Wait naps until a slot is done, Wake was called or the limit is over. Errors:
	// ErrUnanswered: the question was refused, and what runs goes on; anything else, the
	// device is lost, and nobody knows what still runs.
	Wait(i int, limit time.Duration) (done bool, err error)
	// Settle, after a Wait has failed, waits until nothing of a slot runs. It returns false
	// when the device does not say.
	Settle(i int) bool
	// Wake ends a Wait, the running one or the next.
	Wake()
	// Close waits for what runs, as far as the device answers, and gives all back.
	Close() error
}

// Way is how a launch moves bytes.
type Way uint8

// Ways. The values are those of the kernels.
const (
	Staged Way = iota // packed or unpacked on the device, copied in large ranges
	Direct            // every range copied by itself; a kernel only hashes
)

func (w Way) String() string {
	if w == Direct {
		return "direct"
	}
	return "staged"
}

// Launch is one use of a slot.
type Launch struct {
	Direction Direction
	Way       Way
	After     Event // the work begins behind it; 0: at once
	Pieces    int   // of Slot.Pieces, and so on
	Fragments int
	Copies    int
}

// Slot is what a launch reads and writes on the host.
type Slot struct {
	StageAddress uint64 // of the slot's staging memory, on the device
	Pieces       []Piece
	Fragments    []Fragment
	Copies       []Copy
	Hashes       []uint64 // one a piece, of those over ShortBytes
	Tails        []byte   // TailBytes each: the bytes of short pieces
}

// Sizes of short pieces, whose hash the host computes.
const (
	ShortBytes = 240
	TailBytes  = 256
	TailCount  = 1024 // a launch
)

// AlignBytes is what addresses on the device and lengths of runs are multiples of.
const AlignBytes = 16

// Piece is one piece of a checksum, as the kernels read it.
type Piece struct {
	Address uint64 // of the block's memory, when Count is 0
	Stage   uint64
	Seed    uint64
	Bytes   uint32
	First   uint32 // fragment
	Count   uint32 // fragments that are moved; 0: the piece is one range at Address
	Tail    uint32 // 1 + its tail, for a short piece
}

// Fragment is a part of a piece that is moved by itself, as the kernels read it.
type Fragment struct {
	Address uint64
	Stage   uint64
	Bytes   uint32
	_       uint32
}

// Copy is one copy between host and device.
type Copy struct {
	Host   uint64
	Device uint64
	Bytes  uint64
}
