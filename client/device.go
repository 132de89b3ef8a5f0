package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

// Stream is the raw handle of a stream of the engine's GPU. Copies of device layouts
// begin behind what is in it at the call; 0 is the device's default stream.
type Stream uint64

// device is the GPU of this client's device layouts, from the first of them to Close.
// Locks: regions, held while memory is unregistered, never while it is registered (a
// second or so); queue is a leaf.
type device struct {
	ordinal int
	engine  *engine.Engine

	regions struct {
		sync.Mutex
		byMapping map[*mapping.Mapping]*engine.Registration // nil: refused
		gone      map[*mapping.Mapping]struct{}             // unmapped before their turn came
		busy      *mapping.Mapping                          // is being registered, without the lock
		done      chan struct{}                             // closed when busy is over
		ended     bool
	}
	queue struct {
		sync.Mutex
		maps []*mapped // to be registered; [0] is at work
	}
	bounceSaid atomic.Bool
	stuck      atomic.Bool // the device was lost while it copied to a page
}

// RegisterDeviceLayout makes a layout known whose tensors lie in the memory of a GPU. The
// first one opens the device, which takes up to half a second, and registers this
// client's memory with it in the background. Errors: ErrUnsupported (no driver, no such
// device, a second device, MPS, tensors that the kernels cannot take), ErrInvalid
// (addresses that are not this device's), ErrLimit (no device memory), ErrClosed.
//
// Ownership: as of RegisterLayout.
func (c *Client) RegisterDeviceLayout(l Layout, ordinal int) (LayoutID, error) {
	if err := c.enter(context.Background()); err != nil {
		return 0, err
	}
	defer c.leave()
	own, err := newLayout(l)
	if err != nil {
		return 0, err
	}
	d, err := c.openDevice(ordinal)
	if err != nil {
		return 0, err
	}
	if err := d.check(own, uint64(c.cfg.PieceBytes)); err != nil {
		return 0, err
	}
	own.device, own.deviceRuns = d, own.onDeviceRuns()
	own.deviceRuns.Choice = d.engine.Choose(&own.deviceRuns, uint64(c.cfg.PieceBytes))
	return c.addLayout(own), nil
}

func (c *Client) openDevice(ordinal int) (*device, error) {
	c.deviceMu.Lock()
	defer c.deviceMu.Unlock()
	if d := c.device.Load(); d != nil {
		if d.ordinal != ordinal {
			return nil, fmt.Errorf("%w: layouts of GPU %d and of GPU %d in one client; open one client a GPU", base.ErrUnsupported, d.ordinal, ordinal)
		}
		return d, d.engine.Lost()
	}
	if c.cfg.Devices == nil {
		return nil, fmt.Errorf("%w: this program has no GPU support (Config.Devices); libmaru.so has", base.ErrUnsupported)
	}
	dev, err := c.cfg.Devices.Open(ordinal)
	if err != nil {
		return nil, err
	}
	e, err := engine.Open(dev, engine.Config{
		StagingBytes: c.cfg.DeviceStagingBytes, Rule: c.cfg.DeviceCopy, OnMeasured: func(m engine.Measured) {
			c.log.Info("how runs are copied was measured", "gpu", ordinal, "direction", m.Direction.String(), "run_bytes", m.RunBytes, "way", m.Way.String(),
				"staged_gb_s", math.Round(m.StagedBytesPerSecond/1e8)/10, "direct_gb_s", math.Round(m.DirectBytesPerSecond/1e8)/10)
		},
	})
	if err != nil {
		return nil, err
	}
	d := &device{ordinal: ordinal, engine: e}
	d.regions.byMapping = map[*mapping.Mapping]*engine.Registration{}
	d.regions.gone = map[*mapping.Mapping]struct{}{}
	c.transfers.startDevice()
	c.device.Store(d)
	info := e.Info()
	c.log.Info("KV blocks on a GPU", "gpu", ordinal, "name", info.Name, "driver", info.DriverVersion, "staging_bytes", 2*e.StageBytes()*4)
	for _, m := range *c.maps.Load() {
		c.registerLater(m)
	}
	return d, nil
}

// check refuses what the kernels cannot take, and addresses that are not the device's.
func (d *device) check(l *layout, piece uint64) error {
	for i := range l.Layers {
		y := &l.Layers[i]
		if uint64(y.Base)%engine.AlignBytes != 0 || y.RunBytes%engine.AlignBytes != 0 || y.BlockStrideBytes%engine.AlignBytes != 0 {
			return fmt.Errorf("%w: layer %d: base %#x, stride %d and run of %d bytes must be multiples of %d on a GPU", base.ErrUnsupported,
				i, y.Base, y.BlockStrideBytes, y.RunBytes, engine.AlignBytes)
		}
		if piece > d.engine.StageBytes() || piece/y.RunBytes > 4096 {
			return fmt.Errorf("%w: pieces of %d bytes, made of runs of %d: allowed are %d bytes and 4096 runs a piece", base.ErrUnsupported,
				piece, y.RunBytes, d.engine.StageBytes())
		}
		for _, off := range y.RunOffsets {
			if off%engine.AlignBytes != 0 {
				return fmt.Errorf("%w: layer %d: offset %d must be a multiple of %d on a GPU", base.ErrUnsupported, i, off, engine.AlignBytes)
			}
			if hi, span := bits.Mul64(uint64(l.BlockCount-1), magnitude(y.BlockStrideBytes)); hi != 0 || span > maxAddress ||
				magnitude(off) > maxAddress || uint64(y.Base) > maxAddress || y.RunBytes > maxAddress {
				return fmt.Errorf("%w: layer %d: offset %d, stride %d, %d blocks leave the address space", base.ErrInvalid, i, off, y.BlockStrideBytes, l.BlockCount)
			}
			first := int64(y.Base) + off //nolint:gosec // an address
			last := first + int64(l.BlockCount-1)*y.BlockStrideBytes
			if last < first {
				first, last = last, first
			}
			if first <= 0 {
				return fmt.Errorf("%w: layer %d: a run at %#x", base.ErrInvalid, i, uint64(first)) //nolint:gosec // for people
			}
			if err := d.engine.Check(uint64(first), uint64(last-first)+y.RunBytes); err != nil {
				return fmt.Errorf("layer %d, offset %d: %w", i, off, err)
			}
		}
	}
	return nil
}

// maxAddress bounds addresses of a process, and so everything that is added to one.
const maxAddress = 1 << 57

func magnitude(n int64) uint64 {
	if n < 0 {
		return -uint64(n) //nolint:gosec // also of the least
	}
	return uint64(n)
}

// onDeviceRuns is the layout as the engine reads it.
func (l *layout) onDeviceRuns() (out engine.Layout) {
	out.BlockCount = l.BlockCount
	for i := range l.Layers {
		y := &l.Layers[i]
		out.Layers = append(out.Layers, engine.Layer{
			Base: uint64(y.Base), StrideBytes: y.BlockStrideBytes, RunBytes: y.RunBytes, Offsets: y.RunOffsets,
		})
	}
	return out
}

// after is the point in the engine's stream that a job begins behind.
type after struct {
	device *device // nil: nothing of the job lies on one
	event  engine.Event
}

func (a *after) forget() {
	if a.device != nil {
		a.device.engine.Forget(a.event)
		a.event = 0
	}
}

// order marks the stream for items whose layout, the first that there is, lies on a
// device. Errors: ErrInvalid (a stream, and no device), ErrUnsupported (it is being
// captured), ErrFault (the device is lost).
func (c *Client) order(s Stream, layoutOf func(i int) LayoutID, n int) (after, error) {
	d := c.device.Load()
	if d != nil {
		var found *layout
		c.mu.Lock()
		for i := range n {
			if id := layoutOf(i); id != 0 {
				found = c.mu.layouts[id]
				break
			}
		}
		c.mu.Unlock()
		if found == nil || found.device == nil {
			d = nil
		}
	}
	if d == nil {
		if s != 0 {
			return after{}, fmt.Errorf("%w: stream %#x, and memory of the host", base.ErrInvalid, uint64(s))
		}
		return after{}, nil
	}
	ev, err := d.engine.Record(engine.Stream(s))
	if err != nil && d.engine.Lost() == nil {
		return after{}, err
	}
	// Of a lost device there is no event, and every item fails one by one.
	return after{device: d, event: ev}, nil
}

// DeviceInfo says which GPU this client copies from and to; false while there is none.
func (c *Client) DeviceInfo() (info engine.Info, counts engine.Stats, ok bool) {
	d := c.device.Load()
	if d == nil {
		return engine.Info{}, engine.Stats{}, false
	}
	return d.engine.Info(), d.engine.Stats(), true
}

// registerLater has a mapping registered in the background, after it is populated. Until
// then, and when it is refused, copies go through the bounce buffer.
func (c *Client) registerLater(m *mapped) {
	d := c.device.Load()
	if d == nil {
		return
	}
	d.queue.Lock()
	defer d.queue.Unlock()
	d.queue.maps = append(d.queue.maps, m)
	if len(d.queue.maps) == 1 {
		c.wg.Go(func() { c.registerAll(d) })
	}
}

func (c *Client) registerAll(d *device) {
	for {
		d.queue.Lock()
		m := d.queue.maps[0]
		d.queue.Unlock()
		c.register(d, m)
		d.queue.Lock()
		d.queue.maps = d.queue.maps[1:]
		last := len(d.queue.maps) == 0
		d.queue.Unlock()
		if last {
			return
		}
	}
}

func (c *Client) register(d *device, m *mapped) {
	// Registering would touch the memory as well, ten times slower, and more of it than the
	// machine has.
	err := m.mapping.Populate(c.ctx, 1)
	if errors.Is(err, context.Canceled) || errors.Is(err, base.ErrClosed) {
		return
	}
	d.regions.Lock()
	r, known := d.regions.byMapping[m.mapping]
	_, gone := d.regions.gone[m.mapping]
	delete(d.regions.gone, m.mapping)
	if known && !gone { // a segment that had another region before
		m.registration.Store(r)
	}
	if known || gone || d.regions.ended || c.ctx.Err() != nil {
		d.regions.Unlock()
		return
	}
	d.regions.busy, d.regions.done = m.mapping, make(chan struct{})
	d.regions.Unlock()

	access := engine.ReadWrite
	if m.mapping.Access() == mapping.ReadOnly {
		access = engine.ReadOnly
	}
	if err == nil {
		r, err = d.engine.Register(c.ctx, m.mapping.Bytes(), m.info.PageBytes, access)
	}
	d.regions.Lock()
	defer d.regions.Unlock()
	d.regions.busy = nil
	close(d.regions.done)
	if errors.Is(err, context.Canceled) {
		return
	}
	d.regions.byMapping[m.mapping] = r
	if err != nil {
		if !d.bounceSaid.Swap(true) {
			c.log.Warn("the memory of a pool is not registered with the GPU: its copies go through a bounce buffer, at the speed of one processor; keep the pool on a device, hugetlbfs or tmpfs, not in a file on a disk, and smaller than the memory that is free",
				"memory", m.mapping.Name(), "error", err)
		}
		return
	}
	m.registration.Store(r)
}

// unregister ends a mapping's registration before it is unmapped. Nothing copies there
// any more. Errors: the device may still reach the memory.
func (c *Client) unregister(m *mapped) error {
	d := c.device.Load()
	if d == nil {
		return nil
	}
	if m.stuck.Load() {
		return fmt.Errorf("%w: the GPU was lost while it copied there", base.ErrFault)
	}
	d.queue.Lock()
	waiting := false
	for _, q := range d.queue.maps {
		waiting = waiting || q.mapping == m.mapping
	}
	d.queue.Unlock()
	d.regions.Lock()
	defer d.regions.Unlock()
	for d.regions.busy == m.mapping {
		done := d.regions.done
		d.regions.Unlock()
		<-done
		d.regions.Lock()
	}
	r := d.regions.byMapping[m.mapping]
	if waiting {
		d.regions.gone[m.mapping] = struct{}{}
	}
	delete(d.regions.byMapping, m.mapping)
	m.registration.Store(nil)
	if r == nil {
		return nil
	}
	return r.Close()
}

// closeDevice ends the copies and the registrations, before anything is unmapped. It
// reports whether the device can reach no memory of this client any more.
func (c *Client) closeDevice() bool {
	d := c.device.Load()
	if d == nil {
		return true
	}
	d.regions.Lock()
	d.regions.ended = true
	d.regions.Unlock()
	err := d.engine.Close()
	if err != nil {
		c.log.Error("leaving the GPU failed; memory that it may reach stays mapped", "error", err)
	}
	return err == nil && !d.stuck.Load()
}

// leaveDevice is the end of Close while copies of the device still run, or wait for a
// stream of the engine that does not get on: nothing is unmapped or unregistered, their
// goroutines stay until they end, and the session closes as LEFT. The end of the process
// is what proves that the device writes no more.
func (c *Client) leaveDevice(ctx context.Context) error {
	c.mu.Lock()
	c.mu.core.UnpinAll()
	c.mu.core.Leave()
	c.mu.Unlock()
	c.cancel()
	c.wg.Wait()
	if l := c.link.Load(); l != nil && !l.over.Load() {
		if err := c.say(context.WithoutCancel(ctx), l, &maruv1.CloseRequest{Left: true}); err != nil {
			c.log.Warn("the server was not told that this session ends; it finds out when the process does", "error", err)
		}
		l.close()
	}
	c.manager.close()
	_ = c.conn.Close()
	return fmt.Errorf("%w: copies of GPU %d still run, or wait for a stream of the engine: their memory stays mapped until the process ends",
		base.ErrTimeout, c.device.Load().ordinal)
}

// reached is how the device reaches an object's page.
func (m *mapped) reached(b []byte) engine.Mapped {
	if m.registration.Load().Covers(b) {
		return engine.Registered
	}
	return engine.Bounced
}

// keepStuck notes that a lost device may still write to a region: it is never unmapped
// and never given back while this process lives.
func (c *Client) keepStuck(m *mapped) {
	if d := c.device.Load(); d != nil {
		d.stuck.Store(true)
	}
	if !m.stuck.Swap(true) {
		c.log.Error("the GPU was lost while it copied to a region; its pages in the making stay quarantined until this process ends", "region", m.info.ID)
	}
}
