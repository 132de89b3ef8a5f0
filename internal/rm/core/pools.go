package core

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/extent"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// Device is what the shell found on a device.
type Device struct {
	Header poolfmt.Header
	Name   string // for people and for the order of filling; the path when empty
	Path   string
	Kind   DeviceKind
	Bytes  uint64
}

func (d Device) name() string {
	if d.Name != "" {
		return d.Name
	}
	return d.Path
}

const takeoverCure = "maru device takeover --confirm drops all of its regions and goes on with the device's numbers"

// notAttached is the reason of a pool whose device was not seen since the start.
const notAttached = "its device was not found"

// Attach brings a device's pool online. When write is set, the shell writes that
// slot, says SlotWritten, and only then commits anything. A device with our
// store id that was never used (sequence 0) becomes a new pool. Errors:
// ErrForeign (another store's, or a store that does not fit the device: restored,
// older or newer), ErrBusy (the pool is online from another path), ErrInvalid
// (too small), ErrCorrupt.
func (c *Core) Attach(b *Batch, d Device) (id base.PoolID, write *SlotWrite, err error) {
	h := d.Header
	if h.Store != c.cfg.Store {
		return id, nil, fmt.Errorf("%w: device %s belongs to the resource manager with store %s, this one has store %s: use its state directory, or %s",
			base.ErrForeign, d.Path, h.Store, c.cfg.Store, takeoverCure)
	}
	usable := poolfmt.UsableBytes(d.Bytes)
	if usable == 0 {
		return id, nil, fmt.Errorf("%w: device %s has %d bytes, needed are at least %d", base.ErrInvalid, d.Path, d.Bytes, uint64(poolfmt.DataOffset+poolfmt.Alignment))
	}
	p, known := c.pools[h.Pool]
	if !known {
		if h.Slot != poolfmt.FirstSlot() {
			return id, nil, fmt.Errorf("%w: the store has no pool %s, but device %s was used under sequence %d: the store is another or an older one; restore the newest, or %s",
				base.ErrForeign, h.Pool, d.Path, h.Sequence, takeoverCure)
		}
		p, err = c.newPool(poolRow{
			ID: h.Pool, Name: d.name(), Path: d.Path, Kind: d.Kind, DeviceBytes: d.Bytes, Coherence: h.Coherence,
			NextRegion: h.NextRegion, NextIncarnation: h.NextIncarnation, NextOwner: h.NextOwner,
		})
		if err != nil {
			return id, nil, err
		}
		p.reason = ""
		c.pools[h.Pool] = p
		b.touch(p)
		return h.Pool, nil, nil
	}
	if p.online() {
		return id, nil, fmt.Errorf("%w: pool %s is online from %s; %s shows the same pool: is it a copy?", base.ErrBusy, h.Pool, p.row.Path, d.Path)
	}
	if poolfmt.UsableBytes(d.Bytes) < poolfmt.UsableBytes(p.row.DeviceBytes) {
		return id, nil, fmt.Errorf("%w: device %s has %d bytes, pool %s was made with %d: it was truncated or exchanged", base.ErrCorrupt, d.Path, d.Bytes, p.row.Name, p.row.DeviceBytes)
	}
	switch {
	case h.Slot == p.row.slot():
	case p.row.Sequence == h.Sequence+1:
		write = &SlotWrite{Pool: h.Pool, Slot: p.row.slot()}
	case h.Sequence == p.row.Sequence:
		return id, nil, fmt.Errorf("%w: pool %s: store and device agree on sequence %d but not on its numbers: the store is not the one that wrote the device; restore the newest, or %s",
			base.ErrForeign, p.row.Name, h.Sequence, takeoverCure)
	default:
		return id, nil, fmt.Errorf("%w: pool %s: the store has sequence %d, the device %s has %d: one of them was restored or is older; restore the newest store, or %s",
			base.ErrForeign, p.row.Name, p.row.Sequence, d.Path, h.Sequence, takeoverCure)
	}
	if h.Coherence != p.row.Coherence {
		return id, nil, fmt.Errorf("%w: pool %s: coherence is %s in the store and %s on the device", base.ErrCorrupt, p.row.Name, p.row.Coherence, h.Coherence)
	}
	p.slotSequence = h.Sequence
	p.reason = ""
	if p.row.Path != d.Path || p.row.Kind != d.Kind || p.row.NextOwner != c.counters.NextOwner || d.Name != "" && p.row.Name != d.Name {
		p.row.Path, p.row.Kind = d.Path, d.Kind
		if d.Name != "" {
			p.row.Name = d.Name
		}
		b.touch(p)
	}
	return h.Pool, write, nil
}

func (c *Core) newPool(row poolRow) (*pool, error) {
	usable := poolfmt.UsableBytes(row.DeviceBytes)
	a, err := extent.New(poolfmt.DataOffset, poolfmt.DataOffset+usable, poolfmt.Alignment)
	if err != nil {
		return nil, err
	}
	return &pool{row: row, slotSequence: row.Sequence, reason: notAttached, extents: a}, nil
}

// SetOffline takes a pool out of use, or changes why it is.
func (c *Core) SetOffline(id base.PoolID, reason string) {
	if p, ok := c.pools[id]; ok {
		p.reason = reason
	}
}

// DropPool forgets a pool with its regions and holds, on an operator's word:
// nobody maps it, and its device is blank or will be.
func (c *Core) DropPool(b *Batch, id base.PoolID) (regions int, err error) {
	p, ok := c.pools[id]
	if !ok {
		return 0, fmt.Errorf("%w: pool %s", base.ErrNotFound, id)
	}
	for _, r := range c.regionsInOrder() {
		if r.pool != p {
			continue
		}
		for s, row := range r.rows {
			if row.Held {
				c.sessions[s].held--
			}
		}
		r.held = 0
		c.freeExtent(b, r)
		regions++
	}
	delete(c.pools, id)
	delete(b.touched, id)
	b.drop(bucketPools, string(id[:]))
	return regions, nil
}

// TakeOver makes a device's pool ours with the device's numbers and without any
// region. The shell commits, then writes the static line with our store id.
func (c *Core) TakeOver(b *Batch, d Device) error {
	if poolfmt.UsableBytes(d.Bytes) == 0 {
		return fmt.Errorf("%w: device %s has %d bytes", base.ErrInvalid, d.Path, d.Bytes)
	}
	h := d.Header
	if _, ok := c.pools[h.Pool]; ok {
		if _, err := c.DropPool(b, h.Pool); err != nil {
			return err
		}
	}
	p, err := c.newPool(poolRow{
		ID: h.Pool, Name: d.name(), Path: d.Path, Kind: d.Kind, DeviceBytes: d.Bytes, Coherence: h.Coherence, Sequence: h.Sequence,
		NextRegion: h.NextRegion, NextIncarnation: h.NextIncarnation, NextOwner: h.NextOwner,
	})
	if err != nil {
		return err
	}
	c.pools[h.Pool] = p
	c.counters.NextRegion = max(c.counters.NextRegion, h.NextRegion)
	c.counters.NextOwner = max(c.counters.NextOwner, h.NextOwner)
	c.putCounters(b)
	b.put(bucketPools, string(h.Pool[:]), p.row)
	return nil
}

// Pool is what a list shows of a pool.
type Pool struct {
	ID                                                        base.PoolID
	Name, Path                                                string
	Kind                                                      DeviceKind
	Coherence                                                 base.Coherence
	DeviceBytes, CapacityBytes, AllocatedBytes, DrainingBytes uint64
	LargestFreeBytes                                          uint64
	RegionCount                                               int
	Sequence                                                  uint64
	OfflineReason                                             string // empty: online
}

// Pools lists all pools in order.
func (c *Core) Pools() []Pool { return c.AppendPools(nil) }

// AppendPools is Pools into the room behind out.
func (c *Core) AppendPools(out []Pool) []Pool {
	for _, p := range c.poolsInOrder() {
		out = append(out, Pool{
			ID: p.row.ID, Name: p.row.Name, Path: p.row.Path, Kind: p.row.Kind, Coherence: p.row.Coherence, DeviceBytes: p.row.DeviceBytes,
			CapacityBytes: p.extents.TotalBytes(), AllocatedBytes: p.extents.AllocatedBytes(), DrainingBytes: p.draining,
			LargestFreeBytes: p.extents.LargestFreeBytes(), RegionCount: p.regionCount, Sequence: p.row.Sequence, OfflineReason: p.reason,
		})
	}
	return out
}

// OnlinePool returns a pool that can be used. Errors: ErrNotFound, ErrOffline.
func (c *Core) OnlinePool(id base.PoolID) (Pool, error) {
	p, ok := c.pools[id]
	if !ok {
		return Pool{}, fmt.Errorf("%w: pool %s", base.ErrNotFound, id)
	}
	if err := p.usable(); err != nil {
		return Pool{}, err
	}
	return Pool{ID: p.row.ID, Name: p.row.Name, Path: p.row.Path, Kind: p.row.Kind, Coherence: p.row.Coherence, DeviceBytes: p.row.DeviceBytes}, nil
}
