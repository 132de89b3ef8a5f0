package client

import (
	"context"
	"errors"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/session"
)

// dropGone unmaps what the core gave up, then gives the holds back. It has mapMu, so
// that no region is held and mapped again between the two: a late Unhold would take the
// new hold.
func (c *Client) dropGone(ctx context.Context) {
	c.mu.Lock()
	c.scratchGone = c.mu.core.TakeGone(c.scratchGone[:0])
	queued := len(c.mu.unholds)
	again := len(c.mu.unmaps) > 0 && !time.Now().Before(c.mu.unmapNot)
	c.mu.Unlock()
	if len(c.scratchGone) == 0 && queued == 0 && !again {
		return
	}
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	if again {
		c.unmapAgain()
	}
	for _, id := range c.scratchGone {
		if h := c.unmap(id); h != nil {
			c.queueUnholds([]*maruv1.RegionHandle{h})
		}
	}
	list := c.takeUnholds()
	if len(list) == 0 {
		return
	}
	list, err := c.manager.unhold(ctx, list)
	switch {
	case err == nil:
	case rpc.OutcomeUnknown(err) || away(err) || errors.Is(err, base.ErrDenied) && !c.manager.hasToken():
		// Repeated with a later sequence, with the next heartbeat. mapMu is held: nothing
		// was queued meanwhile.
		c.mu.Lock()
		c.mu.unholds = list
		c.mu.Unlock()
	default:
		c.limited.warn(c.log, "giving holds back was refused", "regions", len(list), "error", err)
	}
}

// unmap ends one mapping and forgets the region. It returns the hold to give back.
func (c *Client) unmap(id base.RegionID) *maruv1.RegionHandle {
	m := c.region(id)
	if m == nil {
		c.mu.Lock()
		c.mu.core.RemoveRegion(id)
		c.mu.Unlock()
		return nil
	}
	c.setRegion(id, nil)
	if m.segment >= 0 {
		// The segment stays: another region of the same client may have it.
		c.mu.Lock()
		c.mu.core.RemoveRegion(id)
		if !m.stuck.Load() { // else nobody gets its pages again
			c.mu.segmentRegion[m.segment] = 0
			c.mu.unprepared = true
		}
		c.mu.Unlock()
		return nil
	}
	// Every copy has ended: a lease or a page in the making would have kept the region.
	if !c.unmapShared(m) {
		return nil
	}
	c.mu.Lock()
	c.mu.core.RemoveRegion(id)
	c.mu.Unlock()
	return m.handle
}

// unmapShared ends the mapping of a shared region, and reports whether it is gone: only then
// its hold may be given back.
func (c *Client) unmapShared(m *mapped) bool {
	if err := c.unregister(m); err != nil {
		c.log.Error("the GPU may still reach a region; it stays mapped and its hold is kept", "region", m.info.ID, "error", err)
		return false
	}
	// Under the page lock: a mark in the making is finished before the bytes go.
	m.marks.Lock()
	err := c.unmapMemory(m.mapping)
	m.records, m.data = nil, nil
	m.marks.Unlock()
	if err != nil {
		c.log.Error("unmapping a region failed; it is tried again, and its hold is kept until then", "region", m.info.ID, "error", err)
		c.mu.Lock()
		c.mu.unmaps, c.mu.unmapNot = append(c.mu.unmaps, m), time.Now().Add(unmapLater)
		c.mu.Unlock()
		return false
	}
	return true
}

// discard ends a mapping that was made and is not used, and gives the hold back that it was
// made under. m is nil when nothing was mapped. Called under mapMu.
func (c *Client) discard(ctx context.Context, m *mapped, held *maruv1.RegionHandle) {
	if m != nil {
		m.stray, m.handle = true, held
		if !c.unmapShared(m) {
			return
		}
	}
	c.unholdOne(ctx, held)
}

// unmapLater is how long after a failure unmapping is tried again.
const unmapLater = time.Second

// unmapAgain unmaps what could not be unmapped when its region went, and queues the holds to
// be given back. A server that was started meanwhile believes that own ones are granted
// still: they were given up before, and nothing of them was listed. The caller has mapMu,
// or is Close.
func (c *Client) unmapAgain() {
	c.mu.Lock()
	list := c.mu.unmaps
	c.mu.unmaps = nil
	c.mu.Unlock()
	for _, m := range list {
		if err := c.unmapMemory(m.mapping); err != nil {
			c.limited.warn(c.log, "unmapping a region fails still", "region", m.info.ID, "error", err)
			c.mu.Lock()
			c.mu.unmaps, c.mu.unmapNot = append(c.mu.unmaps, m), time.Now().Add(unmapLater)
			c.mu.Unlock()
			continue
		}
		if !m.stray {
			c.mu.Lock()
			if info, _, ok := c.mu.core.Region(m.info.ID); ok && m.own == session.Own {
				c.mu.core.GiveBack(info) // with the pool's number of now
			}
			c.mu.core.RemoveRegion(m.info.ID)
			c.mu.Unlock()
		}
		c.queueUnholds([]*maruv1.RegionHandle{m.handle})
	}
}
