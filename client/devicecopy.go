package client

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

// onDevice reports whether a layout's tensors lie on a GPU.
func (l *layout) onDevice() bool { return l != nil && l.device != nil }

// takes refuses an item whose device is not the one that the job was ordered on, or is
// lost. Errors: ErrInvalid, ErrFault.
func (l *layout) takes(a *after) error {
	switch {
	case !l.onDevice():
		return nil
	case l.device != a.device:
		return fmt.Errorf("%w: items of host memory and of a GPU in one batch, the GPU's behind them", base.ErrInvalid)
	}
	return l.device.engine.Lost()
}

// deviceMoves is the scratch of a batch's transfers on a device.
type deviceMoves struct {
	transfer engine.Transfer
	tasks    []int // [i]: the task of object i
	want     []uint64
}

func (d *deviceMoves) begin(dir engine.Direction, a *after) {
	d.transfer.Direction, d.transfer.After = dir, a.event
	d.transfer.Objects, d.tasks = d.transfer.Objects[:0], d.tasks[:0]
}

// add appends an object; its leaf list is that of an earlier use of the place.
func (d *deviceMoves) add(task int, o engine.Object) {
	n := len(d.transfer.Objects)
	if n < cap(d.transfer.Objects) {
		o.Leaves = d.transfer.Objects[:n+1][n].Leaves[:0]
	}
	d.transfer.Objects = append(d.transfer.Objects, o)
	d.tasks = append(d.tasks, task)
}

// end forgets whose memory it was.
func (d *deviceMoves) end() {
	for i := range d.transfer.Objects {
		o := &d.transfer.Objects[i]
		*o = engine.Object{Leaves: o.Leaves}
	}
	d.transfer.Arrived = nil
}

// saveOnDevice copies the tasks whose blocks lie on a device into their pages.
func (c *Client) saveOnDevice(s *storeWork, a *after) {
	if a.device == nil {
		return
	}
	d := &s.moves
	d.begin(engine.Save, a)
	defer d.end()
	for i := range s.tasks {
		t := &s.tasks[i]
		if !t.layout.onDevice() {
			continue
		}
		it := &s.items[t.item]
		m := c.region(t.ref.Region)
		page := m.page(t.ref.Index)[:t.length:t.length]
		t.code = base.CodeOK
		d.add(i, engine.Object{
			Host: page, Mapped: m.reached(page), SizeBytes: t.length, PieceBytes: uint64(c.cfg.PieceBytes),
			Seed: checksum.Seed(c.namespace, it.Key), Layout: &t.layout.deviceRuns, Blocks: it.Blocks,
		})
	}
	if len(d.tasks) == 0 {
		return
	}
	// While the next objects are copied.
	d.transfer.Arrived = func(k int) { c.saved(s, &s.tasks[d.tasks[k]], d.transfer.Objects[k].Leaves) }
	err := a.device.engine.Run(&d.transfer)
	for k, i := range d.tasks {
		t, o := &s.tasks[i], &d.transfer.Objects[k]
		if err == nil && o.Err == nil {
			continue
		}
		t.code, t.end = base.CodeFault, pageUnused
		if o.Faulted {
			t.end = pageFaults
			continue
		}
		if o.Running {
			t.end = pageFaults
			c.keepStuck(c.region(t.ref.Region))
		}
		c.deviceFailed(engine.Save, err, o.Err)
	}
}

// saved takes the leaves of an object that has arrived in its page.
func (c *Client) saved(s *storeWork, t *storeTask, leaves []uint64) {
	m := c.region(t.ref.Region)
	if !c.summed(m) {
		return
	}
	page := m.page(t.ref.Index)
	if mapping.Guard(func() {
		if !c.cfg.Opaque {
			writeLeaves(page[leafListAt(t.length):], leaves)
		}
	}) != nil {
		t.code = base.CodeFault
		return
	}
	t.sum = checksum.Root(leaves, t.length, checksum.Seed(c.namespace, s.items[t.item].Key))
}

// failedCopy settles the page of a store whose copy failed.
func (c *Client) failedCopy(t *storeTask) base.Code {
	if t.end == pageFaults {
		return c.faulted(t.ref.Region, t.ref.Index)
	}
	c.mu.Lock()
	_ = c.mu.core.FreePage(t.ref.Region, t.ref.Index) // it is being written: by this task
	c.mu.Unlock()
	return t.code
}

func (c *Client) deviceFailed(dir engine.Direction, errs ...error) {
	for _, err := range errs {
		if err != nil {
			c.count.faults.Add(1)
			c.limited.warn(c.log, "copies of the GPU fail; loads are misses and stores are skipped", "direction", dir, "error", err)
			return
		}
	}
}

// loadOnDevice copies what part has prepared into blocks of a device, and verifies it.
func (c *Client) loadOnDevice(s *loadWork, a *after) {
	if a.device == nil {
		return
	}
	d := &s.moves
	d.begin(engine.Load, a)
	defer d.end()
	for i := range s.tasks {
		t := &s.tasks[i]
		if !t.waits {
			continue
		}
		p := &t.prepared
		piece := uint64(c.cfg.PieceBytes)
		if p.from%engine.AlignBytes != 0 || p.length%engine.AlignBytes != 0 {
			t.code = base.CodeInvalid
			continue
		}
		first := p.from / piece
		start, end := first*piece, min((p.from+p.size+piece-1)/piece*piece, p.length)
		host := p.page[start:end:end]
		m := c.region(s.got.rows[i].Region)
		d.add(i, engine.Object{
			Host: host, Mapped: m.reached(host), SkipBytes: p.from - start, SizeBytes: p.size, PieceBytes: piece,
			Seed: p.seed, Layout: &p.layout.deviceRuns, Blocks: p.blocks,
		})
	}
	if len(d.tasks) == 0 {
		return
	}
	d.transfer.Arrived = func(k int) {
		t := &s.tasks[d.tasks[k]]
		if mapping.Guard(func() { t.code = d.verdict(&t.prepared, d.transfer.Objects[k].Leaves) }) != nil {
			t.code = base.CodeFault
		}
	}
	err := a.device.engine.Run(&d.transfer)
	for k, i := range d.tasks {
		if o := &d.transfer.Objects[k]; err != nil || o.Err != nil {
			s.tasks[i].code = base.CodeMiss
			if o.Faulted {
				s.tasks[i].code = base.CodeFault
				continue
			}
			c.deviceFailed(engine.Load, err, o.Err)
		}
	}
}

// verdict compares the hashes of the pieces that were loaded with what was committed, by
// the rules of scatter. The caller guards it.
func (d *deviceMoves) verdict(p *loadPart, leaves []uint64) base.Code {
	if p.piece == 0 {
		return base.CodeOK
	}
	piece := uint64(p.piece)
	first := p.from / piece
	start := first * piece
	end := min(start+uint64(len(leaves))*piece, p.length)
	switch {
	case start == 0 && end == p.length:
		d.want = append(d.want[:0], leaves...)
	case p.leaves:
		d.want = readLeaves(d.want, p.page[leafListAt(p.length):], checksum.PieceCount(p.length, p.piece))
		if checksum.FirstDifference(leaves, d.want[first:first+uint64(len(leaves))]) >= 0 {
			return base.CodeCorrupt
		}
	default:
		// Only the root is known: the other pieces are hashed where they lie.
		d.want = checksum.Leaves(d.want[:0], p.page[:start], p.piece, p.seed)
		d.want = append(d.want, leaves...)
		d.want = checksum.Leaves(d.want, p.page[end:p.length], p.piece, p.seed)
	}
	if checksum.Root(d.want, p.length, p.seed) != p.root {
		return base.CodeCorrupt
	}
	return base.CodeOK
}
