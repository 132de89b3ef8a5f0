package cabitest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

// RegisterLayout keeps a layout.
func (c *Client) RegisterLayout(l client.Layout) (client.LayoutID, error) {
	if len(l.Layers) == 0 || l.BlockCount == 0 {
		return 0, fmt.Errorf("%w: layout of %d layers and %d blocks", base.ErrInvalid, len(l.Layers), l.BlockCount)
	}
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	c.mu.last++
	c.mu.layouts[client.LayoutID(c.mu.last)] = l
	return client.LayoutID(c.mu.last), nil
}

// RegisterDeviceLayout keeps a layout whose device is memory of the host.
func (c *Client) RegisterDeviceLayout(l client.Layout, ordinal int) (client.LayoutID, error) {
	if ordinal != 0 {
		return 0, fmt.Errorf("%w: GPU %d", base.ErrUnsupported, ordinal)
	}
	id, err := c.RegisterLayout(l)
	if err == nil {
		c.store.mu.Lock()
		defer c.store.mu.Unlock()
		c.mu.device[id] = true
	}
	return id, err
}

// DeviceInfo says that there is a device once a layout is on it.
func (c *Client) DeviceInfo() (engine.Info, engine.Stats, bool) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	return engine.Info{Name: "fake", DriverVersion: 13000}, engine.Stats{}, len(c.mu.device) > 0
}

// order refuses a stream without a device layout, and CapturedStream with one.
func (c *Client) order(id client.LayoutID, s client.Stream) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	switch on := c.mu.device[id]; {
	case !on && s != 0:
		return fmt.Errorf("%w: stream %#x, and memory of the host", base.ErrInvalid, uint64(s))
	case s == CapturedStream:
		return fmt.Errorf("%w: the stream is being captured", base.ErrUnsupported)
	}
	return nil
}

// CapturedStream is always being captured.
const CapturedStream client.Stream = 0xca

// UnregisterLayout forgets it.
func (c *Client) UnregisterLayout(id client.LayoutID) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if _, ok := c.mu.layouts[id]; !ok {
		return fmt.Errorf("%w: layout %d", base.ErrNotFound, id)
	}
	delete(c.mu.layouts, id)
	return nil
}

// ranges turns runs or blocks into ranges of memory.
func (c *Client) ranges(runs [][]byte, id client.LayoutID, blocks []uint32) ([][]byte, error) {
	if id == 0 {
		return runs, nil
	}
	c.store.mu.Lock()
	l, ok := c.mu.layouts[id]
	c.store.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("%w: layout %d", base.ErrNotFound, id)
	}
	var out [][]byte
	for _, b := range blocks {
		if b >= l.BlockCount {
			return nil, fmt.Errorf("%w: block %d of %d", base.ErrInvalid, b, l.BlockCount)
		}
		for _, y := range l.Layers {
			for _, o := range y.RunOffsets {
				at := y.Base + uintptr(int64(b)*y.BlockStrideBytes+o) //nolint:gosec // a test's layout
				p := *(*unsafe.Pointer)(unsafe.Pointer(&at))
				out = append(out, unsafe.Slice((*byte)(p), y.RunBytes))
			}
		}
	}
	return out, nil
}

// Store copies and commits, item by item.
func (c *Client) Store(ctx context.Context, items []client.StoreItem, codes []base.Code) error {
	c.fault("store")
	for i, it := range items {
		codes[i] = base.CodeOf(c.storeOne(ctx, it))
	}
	return nil
}

func (c *Client) storeOne(ctx context.Context, it client.StoreItem) error {
	src, err := c.ranges(it.Runs, it.Layout, it.Blocks)
	if err != nil {
		return err
	}
	var page [1]client.Page
	if _, err := c.Alloc(ctx, 1, page[:]); err != nil {
		return err
	}
	n := uint64(0)
	for _, s := range src {
		if n+uint64(len(s)) > uint64(len(page[0].Bytes)) {
			return errors.Join(fmt.Errorf("%w: object is larger than a page", base.ErrInvalid), c.FreePage(page[0].Region, page[0].Index))
		}
		n += uint64(copy(page[0].Bytes[n:], s)) //nolint:gosec // a length
	}
	var code [1]base.Code
	item := client.CommitItem{Key: it.Key, Parent: it.Parent, Region: page[0].Region, Index: page[0].Index, Length: n}
	if err := c.CommitPages(ctx, []client.CommitItem{item}, code[:]); err != nil {
		return err
	}
	return base.ErrorOf(code[0])
}

// Load copies out, item by item.
func (c *Client) Load(_ context.Context, items []client.LoadItem, codes []base.Code) error {
	c.fault("load")
	for i, it := range items {
		codes[i] = base.CodeOf(c.loadOne(it))
	}
	return nil
}

func (c *Client) loadOne(it client.LoadItem) error {
	dst, err := c.ranges(it.Runs, it.Layout, it.Blocks)
	if err != nil {
		return err
	}
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	o := c.store.mu.objects[objectKey{c.ns, it.Key}]
	if o == nil {
		return base.ErrMiss
	}
	from := o.region.bytes(o.index)[:o.length]
	if it.OffsetBytes > o.length {
		return fmt.Errorf("%w: offset %d of %d", base.ErrInvalid, it.OffsetBytes, o.length)
	}
	from = from[it.OffsetBytes:]
	for _, d := range dst {
		if len(d) > len(from) {
			return fmt.Errorf("%w: %d bytes wanted, %d are left", base.ErrInvalid, len(d), len(from))
		}
		copy(d, from)
		from = from[len(d):]
	}
	return nil
}

// StoreAfter is Store.
func (c *Client) StoreAfter(ctx context.Context, items []client.StoreItem, codes []base.Code, s client.Stream) error {
	if err := c.order(items[0].Layout, s); err != nil {
		return err
	}
	return c.Store(ctx, items, codes)
}

// LoadAfter is Load.
func (c *Client) LoadAfter(ctx context.Context, items []client.LoadItem, codes []base.Code, s client.Stream) error {
	if err := c.order(items[0].Layout, s); err != nil {
		return err
	}
	return c.Load(ctx, items, codes)
}

// SubmitStoreAfter runs at once and is handed out later.
func (c *Client) SubmitStoreAfter(items []client.StoreItem, s client.Stream) (client.JobID, error) {
	if err := c.order(items[0].Layout, s); err != nil {
		return 0, err
	}
	codes := make([]base.Code, len(items))
	if err := c.Store(context.Background(), items, codes); err != nil {
		return 0, err
	}
	return c.finished(codes)
}

// SubmitLoadAfter is the same for a load.
func (c *Client) SubmitLoadAfter(items []client.LoadItem, s client.Stream) (client.JobID, error) {
	if err := c.order(items[0].Layout, s); err != nil {
		return 0, err
	}
	codes := make([]base.Code, len(items))
	if err := c.Load(context.Background(), items, codes); err != nil {
		return 0, err
	}
	return c.finished(codes)
}

func (c *Client) finished(codes []base.Code) (client.JobID, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if c.cfg.QueueJobs > 0 && len(c.mu.jobs) >= c.cfg.QueueJobs {
		return 0, fmt.Errorf("%w: queue_jobs is %d", base.ErrBusy, c.cfg.QueueJobs)
	}
	c.mu.last++
	id := client.JobID(c.mu.last)
	c.mu.jobs[id] = codes
	c.mu.done = append(c.mu.done, id)
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	if _, err := unix.Write(c.eventFD, one[:]); err != nil {
		return 0, fmt.Errorf("eventfd: %w", err)
	}
	return id, nil
}

// EventFD is readable while jobs wait.
func (c *Client) EventFD() int { return c.eventFD }

// Completed hands out jobs.
func (c *Client) Completed(dst []client.JobID) int {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	n := copy(dst, c.mu.done)
	c.mu.done = c.mu.done[n:]
	if len(c.mu.done) == 0 {
		var b [8]byte
		_, _ = unix.Read(c.eventFD, b[:]) // it may be drained already
	}
	return n
}

// JobResult gives the codes once.
func (c *Client) JobResult(job client.JobID, codes []base.Code) (bool, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	have, ok := c.mu.jobs[job]
	if !ok {
		return false, fmt.Errorf("%w: job %d", base.ErrNotFound, job)
	}
	if len(codes) < len(have) {
		return false, fmt.Errorf("%w: %d codes", base.ErrInvalid, len(have))
	}
	copy(codes, have)
	delete(c.mu.jobs, job)
	return true, nil
}

// JobCopied is true of every job: they end at once.
func (c *Client) JobCopied(job client.JobID) (bool, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if _, ok := c.mu.jobs[job]; !ok {
		return false, fmt.Errorf("%w: job %d", base.ErrNotFound, job)
	}
	return true, nil
}
