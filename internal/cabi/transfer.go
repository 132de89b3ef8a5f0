package cabi

import (
	"errors"
	"fmt"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// MaxParts bounds the runs or blocks of one batch.
const MaxParts = 1 << 24

// Run is maru_run: a range of the caller's memory.
type Run struct {
	Data  uintptr
	Bytes uint64
}

// Layer is maru_layer.
type Layer struct {
	Base             uintptr
	BlockStrideBytes int64
	RunBytes         uint64
	RunCount         uint32
	Reserved         uint32
}

// Batch is maru_batch with its arrays as slices.
type Batch struct {
	Keys    []byte
	Parents []byte // or empty
	Ends    []uint64
	Runs    []Run // or:
	Layout  uint64
	Blocks  []uint32
	Offsets []uint64 // or empty
	Stream  uint64   // of the engine's GPU, with a device layout
}

// RegisterLayout makes an engine's tensors known. offsets has the run offsets of
// all layers, one after another.
func (l *Library) RegisterLayout(h uint64, layers []Layer, offsets []int64, blockCount uint32) (layout uint64, err error) {
	return l.registerLayout(h, layers, offsets, blockCount, func(c Client, lay client.Layout) (client.LayoutID, error) {
		return c.RegisterLayout(lay)
	})
}

// RegisterDeviceLayout makes tensors on a GPU known, as RegisterLayout.
func (l *Library) RegisterDeviceLayout(h uint64, ordinal uint32, layers []Layer, offsets []int64, blockCount uint32) (layout uint64, err error) {
	return l.registerLayout(h, layers, offsets, blockCount, func(c Client, lay client.Layout) (client.LayoutID, error) {
		if ordinal > maxOrdinal {
			return 0, fmt.Errorf("%w: GPU %d; at most %d is allowed", base.ErrInvalid, ordinal, maxOrdinal)
		}
		return c.RegisterDeviceLayout(lay, int(ordinal))
	})
}

// maxOrdinal bounds what can be a GPU's number.
const maxOrdinal = 1023

func (l *Library) registerLayout(h uint64, layers []Layer, offsets []int64, blockCount uint32,
	register func(c Client, lay client.Layout) (client.LayoutID, error),
) (layout uint64, err error) {
	err = l.call(h, "register layout", func(e *entry) error {
		if err := checkCount(len(layers)); err != nil {
			return err
		}
		lay := client.Layout{BlockCount: blockCount, Layers: make([]client.LayerLayout, len(layers))}
		// The offsets outlive the call, the caller's array does not.
		rest := append([]int64(nil), offsets...)
		for i, y := range layers {
			if y.Reserved != 0 {
				return fmt.Errorf("%w: layer %d: reserved is %d, must be 0", base.ErrInvalid, i, y.Reserved)
			}
			if uint64(y.RunCount) > uint64(len(rest)) {
				return fmt.Errorf("%w: layer %d has %d runs, %d offsets are left", base.ErrInvalid, i, y.RunCount, len(rest))
			}
			lay.Layers[i] = client.LayerLayout{
				Base: y.Base, BlockStrideBytes: y.BlockStrideBytes, RunBytes: y.RunBytes,
				RunOffsets: rest[:y.RunCount:y.RunCount],
			}
			rest = rest[y.RunCount:]
		}
		if len(rest) != 0 {
			return fmt.Errorf("%w: %d offsets are left over behind the last layer", base.ErrInvalid, len(rest))
		}
		id, err := register(e.client, lay)
		if err != nil {
			return err
		}
		layout, err = makeHandle(KindLayout, uint64(id))
		return err
	})
	return layout, err
}

// UnregisterLayout forgets a layout.
func (l *Library) UnregisterLayout(h, layout uint64) error {
	return l.call(h, "unregister layout", func(e *entry) error {
		id, err := numberOf(KindLayout, layout)
		if err != nil {
			return err
		}
		return e.client.UnregisterLayout(client.LayoutID(id))
	})
}

// lifetime says how long the arrays of a batch stay.
type lifetime int

const (
	duringCall lifetime = iota
	copied              // the job outlives them
)

// parts is what a batch's arrays become: one of runs and blocks, cut by ends.
type parts struct {
	keys   hot.Keys
	runs   [][]byte
	blocks []uint32
	layout client.LayoutID
}

func (b *Batch) check(life lifetime) (parts, error) {
	var p parts
	k, err := checkKeys(b.Keys)
	if err != nil {
		return p, err
	}
	p.keys = k
	if k.Len() == 0 || len(b.Ends) != k.Len() {
		return p, fmt.Errorf("%w: a batch of %d keys and %d ends", base.ErrInvalid, k.Len(), len(b.Ends))
	}
	count := len(b.Runs)
	switch {
	case b.Layout != 0 && count == 0:
		id, err := numberOf(KindLayout, b.Layout)
		if err != nil {
			return p, err
		}
		p.layout, count = client.LayoutID(id), len(b.Blocks)
	case b.Layout != 0:
		return p, fmt.Errorf("%w: a batch has runs or a layout, this one has both", base.ErrInvalid)
	}
	last := uint64(0)
	for i, end := range b.Ends {
		if end <= last || end > uint64(count) {
			return p, fmt.Errorf("%w: item %d ends at %d, behind %d and up to %d is allowed", base.ErrInvalid, i, end, last, count)
		}
		last = end
	}
	if p.layout != 0 {
		p.blocks = b.Blocks
		if life == copied {
			p.blocks = append([]uint32(nil), b.Blocks...)
		}
		return p, nil
	}
	p.runs = make([][]byte, count)
	for i, r := range b.Runs {
		if p.runs[i], err = memoryAt(r); err != nil {
			return p, fmt.Errorf("run %d: %w", i, err)
		}
	}
	return p, nil
}

func (b *Batch) storeItems(life lifetime) ([]client.StoreItem, error) {
	p, err := b.check(life)
	if err != nil {
		return nil, err
	}
	if len(b.Offsets) > 0 {
		return nil, fmt.Errorf("%w: offsets are for loads, a store begins at the object's start", base.ErrInvalid)
	}
	items := make([]client.StoreItem, p.keys.Len())
	start := uint64(0)
	for i, end := range b.Ends {
		it := &items[i]
		it.Key = p.keys.At(i)
		if len(b.Parents) > 0 {
			it.Parent = base.Digest(b.Parents[i*base.DigestBytes : (i+1)*base.DigestBytes])
		}
		if p.layout != 0 {
			it.Layout, it.Blocks = p.layout, p.blocks[start:end:end]
		} else {
			it.Runs = p.runs[start:end:end]
		}
		start = end
	}
	return items, nil
}

func (b *Batch) loadItems(life lifetime) ([]client.LoadItem, error) {
	p, err := b.check(life)
	if err != nil {
		return nil, err
	}
	if len(b.Parents) > 0 {
		return nil, fmt.Errorf("%w: parents are for stores", base.ErrInvalid)
	}
	items := make([]client.LoadItem, p.keys.Len())
	start := uint64(0)
	for i, end := range b.Ends {
		it := &items[i]
		it.Key = p.keys.At(i)
		if len(b.Offsets) > 0 {
			it.OffsetBytes = b.Offsets[i]
		}
		if p.layout != 0 {
			it.Layout, it.Blocks = p.layout, p.blocks[start:end:end]
		} else {
			it.Runs = p.runs[start:end:end]
		}
		start = end
	}
	return items, nil
}

// Store copies objects into the store and waits.
func (l *Library) Store(h uint64, b *Batch, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "store", func(e *entry) error {
		items, err := b.storeItems(duringCall)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.StoreAfter(ctx, items, codes, client.Stream(b.Stream))
	})
}

// Load copies objects out of the store and waits.
func (l *Library) Load(h uint64, b *Batch, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "load", func(e *entry) error {
		items, err := b.loadItems(duringCall)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		return e.client.LoadAfter(ctx, items, codes, client.Stream(b.Stream))
	})
}

// SubmitStore queues a store.
func (l *Library) SubmitStore(h uint64, b *Batch) (job uint64, err error) {
	err = l.call(h, "submit store", func(e *entry) error {
		items, err := b.storeItems(copied)
		if err != nil {
			return err
		}
		id, err := e.client.SubmitStoreAfter(items, client.Stream(b.Stream))
		if err != nil {
			return err
		}
		job, err = makeHandle(KindJob, uint64(id))
		return err
	})
	return job, err
}

// SubmitLoad queues a load.
func (l *Library) SubmitLoad(h uint64, b *Batch) (job uint64, err error) {
	err = l.call(h, "submit load", func(e *entry) error {
		items, err := b.loadItems(copied)
		if err != nil {
			return err
		}
		id, err := e.client.SubmitLoadAfter(items, client.Stream(b.Stream))
		if err != nil {
			return err
		}
		job, err = makeHandle(KindJob, uint64(id))
		return err
	})
	return job, err
}

// EventFD returns the descriptor that is readable while finished jobs wait.
func (l *Library) EventFD(h uint64) (fd int, err error) {
	err = l.call(h, "event fd", func(e *entry) error {
		if fd = e.client.EventFD(); fd < 0 {
			return fmt.Errorf("%w: this client has no event descriptor", base.ErrUnsupported)
		}
		return nil
	})
	return fd, err
}

// Completed hands out finished jobs.
func (l *Library) Completed(h uint64, out []uint64) (count int, err error) {
	err = l.call(h, "completed", func(e *entry) error {
		if err := checkCount(len(out)); err != nil {
			return err
		}
		ids := make([]client.JobID, len(out))
		count = e.client.Completed(ids)
		for i := range count {
			var err error
			if out[i], err = makeHandle(KindJob, uint64(ids[i])); err != nil {
				return err
			}
		}
		return nil
	})
	return count, err
}

// JobCopied tells whether the memory of a job's items is the caller's again.
//
// Errors: ErrPending while it is not, ErrNotFound for a job that is unknown or was
// forgotten.
func (l *Library) JobCopied(h, job uint64) error {
	return l.call(h, "job copied", func(e *entry) error {
		id, err := numberOf(KindJob, job)
		if err != nil {
			return err
		}
		copied, err := e.client.JobCopied(client.JobID(id))
		if err == nil && !copied {
			err = fmt.Errorf("%w: job %#x still copies", base.ErrPending, job)
		}
		return err
	})
}

// JobResult copies a finished job's codes out and forgets the job.
//
// Errors: ErrPending while it runs, ErrLimit when codes is too short (the job
// stays), ErrNotFound for one that is unknown or was forgotten.
func (l *Library) JobResult(h, job uint64, codes []base.Code) error {
	return l.call(h, "job result", func(e *entry) error {
		id, err := numberOf(KindJob, job)
		if err != nil {
			return err
		}
		done, err := e.client.JobResult(client.JobID(id), codes)
		switch {
		case errors.Is(err, base.ErrInvalid):
			return fmt.Errorf("%w: room for %d codes: %w", base.ErrLimit, len(codes), err)
		case err != nil:
			return err
		case !done:
			return fmt.Errorf("%w: job %#x still runs", base.ErrPending, job)
		}
		return nil
	})
}
