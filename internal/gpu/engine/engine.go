package engine

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Rule decides between the ways of moving bytes.
type Rule uint8

// Rules.
const (
	Auto         Rule = iota // as measured (Choose); before, direct where every run has DirectRunBytes
	AlwaysStaged             //
	AlwaysDirect             // wherever pieces lie in one run
)

// Config of an engine. The zero value of a field means its default.
type Config struct {
	// StagingBytes is the device memory of one direction's stage. Default 64 MiB.
	StagingBytes uint64
	Rule         Rule
	// DirectRunBytes is from where on runs are copied by themselves, where nothing was
	// measured. Default 2 MiB.
	DirectRunBytes uint64
	// SaveBlocks and LoadBlocks are the blocks of threads of a kernel. Default 8 and 16:
	// a save is not waited for, a load is.
	SaveBlocks, LoadBlocks int
	// RegistrationBytes bounds one registration. Default 32 GiB.
	RegistrationBytes uint64
	// AnswerTimeout is how long a lane asks again when the driver refuses to say whether a
	// copy has ended; then the device is lost. Default 5 s.
	AnswerTimeout time.Duration
	// OnMeasured is told of each measurement, by a lane: it must be quick and not call the
	// engine. May be nil.
	OnMeasured func(Measured)
}

const (
	slotCount      = 4
	pieceCount     = 8192
	fragmentCount  = 16384
	copyCount      = 4096
	minStageBytes  = 1 << 20
	maxStaging     = 1 << 32
	defaultStaging = 64 << 20
	maxBlocks      = 1024
)

// resolve fills the defaults in. Errors: ErrInvalid.
func (c *Config) resolve() error {
	if c.StagingBytes == 0 {
		c.StagingBytes = defaultStaging
	}
	if c.DirectRunBytes == 0 {
		c.DirectRunBytes = 2 << 20
	}
	if c.SaveBlocks == 0 {
		c.SaveBlocks = 8
	}
	if c.LoadBlocks == 0 {
		c.LoadBlocks = 16
	}
	if c.RegistrationBytes == 0 {
		c.RegistrationBytes = 32 << 30
	}
	if c.AnswerTimeout == 0 {
		c.AnswerTimeout = 5 * time.Second
	}
	switch {
	case c.StagingBytes < slotCount*minStageBytes || c.StagingBytes > maxStaging:
		return fmt.Errorf("%w: staging of %d bytes; allowed: %d to %d", base.ErrInvalid, c.StagingBytes, slotCount*minStageBytes, uint64(maxStaging))
	case c.SaveBlocks < 0 || c.SaveBlocks > maxBlocks || c.LoadBlocks < 0 || c.LoadBlocks > maxBlocks:
		return fmt.Errorf("%w: %d and %d blocks of threads; allowed: 1 to %d", base.ErrInvalid, c.SaveBlocks, c.LoadBlocks, maxBlocks)
	case c.Rule > AlwaysDirect:
		return fmt.Errorf("%w: rule %d", base.ErrInvalid, c.Rule)
	}
	return nil
}

// Stats are counters since Open.
type Stats struct {
	SavedBytes, LoadedBytes uint64
	SaveChunks, LoadChunks  uint64
	BouncedBytes            uint64 // of saves, through the bounce buffer
	Failed                  uint64 // transfers
	RegisteredBytes         uint64 // now
	RefusedBytes            uint64 // mappings that go through the bounce buffer
	Lost                    bool
}

// Engine moves objects between one device and host memory.
//
// Concurrency: all methods are safe for concurrent use.
type Engine struct {
	device Device
	cfg    Config
	lanes  [2]*lane // by direction
	lost   atomic.Pointer[error]
	stream atomic.Uint64 // the engine's, as the last Record named it
	// measuring is held by the lane that measures, which only tries to take it.
	measuring sync.Mutex
	count     struct {
		chunks     [2]atomic.Uint64
		bytes      [2]atomic.Uint64
		bounced    atomic.Uint64
		failed     atomic.Uint64
		registered atomic.Int64
		refused    atomic.Int64
	}
	mu struct {
		sync.Mutex
		registrations map[*Registration]struct{}
		choices       []*Choice // one a length of runs
		closed        bool
	}
}

// Open makes an engine on a device. Ownership: the device becomes the engine's, also
// when an error is returned. Errors: ErrInvalid, ErrLimit (no device memory).
func Open(d Device, cfg Config) (*Engine, error) {
	e := &Engine{device: d, cfg: cfg}
	e.mu.registrations = map[*Registration]struct{}{}
	err := e.cfg.resolve()
	for dir, blocks := range map[Direction]int{Save: e.cfg.SaveBlocks, Load: e.cfg.LoadBlocks} {
		if err != nil {
			break
		}
		e.lanes[dir], err = e.newLane(dir, LaneOptions{
			SlotCount: slotCount, StageBytes: e.cfg.StagingBytes / slotCount &^ (stageAlignBytes - 1), PieceCount: pieceCount,
			FragmentCount: fragmentCount, CopyCount: copyCount, BlockCount: blocks,
		})
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	for _, l := range e.lanes {
		l.start()
	}
	return e, nil
}

// Info says what the device is.
func (e *Engine) Info() Info { return e.device.Info() }

// StageBytes is the most bytes that one chunk has: no piece may be larger.
func (e *Engine) StageBytes() uint64 { return e.cfg.StagingBytes / slotCount &^ (stageAlignBytes - 1) }

// Check refuses a range that is not memory of the device.
func (e *Engine) Check(address, size uint64) error { return e.device.Check(address, size) }

// Record makes an event behind what is in a stream now, for the transfers of one job.
// Ownership: the caller's, who gives it to Forget after the last of them. Errors: ErrUnsupported (the stream is being captured), ErrFault.
func (e *Engine) Record(s Stream) (Event, error) {
	if err := e.Lost(); err != nil {
		return 0, err
	}
	e.stream.Store(uint64(s))
	return e.device.Record(s)
}

// Forget gives an event back that no transfer uses any more.
func (e *Engine) Forget(ev Event) {
	if ev != 0 {
		e.device.Forget(ev)
	}
}

// Lost returns why the device is lost, nil while it is not.
func (e *Engine) Lost() error {
	if p := e.lost.Load(); p != nil {
		return *p
	}
	return nil
}

func (e *Engine) lose(err error) {
	e.lost.CompareAndSwap(nil, &err) // the other lane finds out by its own calls
}

// Run moves a transfer and returns when nothing of it runs any more (G3). The results
// are in its objects; the error says that it was not begun. Errors: ErrClosed, ErrFault
// (the device is lost).
func (e *Engine) Run(t *Transfer) error {
	if err := e.Lost(); err != nil {
		return err
	}
	if len(t.Objects) == 0 {
		return nil
	}
	t.begin()
	if err := e.lanes[t.Direction].submit(t); err != nil {
		return err
	}
	<-t.done
	return nil
}

// ended is called by the lane, once a transfer.
func (e *Engine) ended(t *Transfer) {
	if t.failed != nil {
		e.count.failed.Add(1)
	} else {
		var n uint64
		for i := range t.Objects {
			n += t.Objects[i].SizeBytes
		}
		e.count.bytes[t.Direction].Add(n)
	}
	close(t.done)
}

// Stats returns the counters.
func (e *Engine) Stats() Stats {
	return Stats{
		SavedBytes: e.count.bytes[Save].Load(), LoadedBytes: e.count.bytes[Load].Load(),
		SaveChunks: e.count.chunks[Save].Load(), LoadChunks: e.count.chunks[Load].Load(),
		BouncedBytes: e.count.bounced.Load(), Failed: e.count.failed.Load(),
		RegisteredBytes: uint64(max(e.count.registered.Load(), 0)), RefusedBytes: uint64(max(e.count.refused.Load(), 0)), //nolint:gosec // not negative
		Lost: e.Lost() != nil,
	}
}

// Close waits for the transfers, ends the lanes, unregisters what is registered and
// gives the device back, in this order.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.mu.closed {
		e.mu.Unlock()
		return nil
	}
	e.mu.closed = true
	var list []*Registration
	for r := range e.mu.registrations {
		list = append(list, r)
	}
	e.mu.Unlock()
	var errs []error
	for _, l := range e.lanes {
		if l != nil {
			errs = append(errs, l.stop())
		}
	}
	for _, r := range list {
		errs = append(errs, r.Close())
	}
	return errors.Join(append(errs, e.device.Close())...)
}
