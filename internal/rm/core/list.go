package core

import (
	"cmp"
	"maps"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// RegionState is where a region is in its life.
type RegionState uint8

// States of a region; the numbers are those of the wire.
const (
	RegionAllocated RegionState = iota + 1
	RegionHeld
	RegionDraining
)

// RegionInfo is what a list shows of a region.
type RegionInfo struct {
	Region
	State            RegionState
	OwnerIncarnation base.Incarnation
	Operation        uint64
	Handle           *Handle // write capability, for the owner only
	Holders          []base.SessionID
	AllocatedMS      int64
}

// ListRegions asks for a part of the regions in order of id.
type ListRegions struct {
	Claim             // zero: all, without capabilities
	Pool  base.PoolID // zero: all
	After base.RegionID
	Limit int
}

// MaxPageCount bounds a page of a list.
const MaxPageCount = 1000

func pageLimit(n int) int {
	if n <= 0 || n > MaxPageCount {
		return MaxPageCount
	}
	return n
}

// ListRegions lists regions, for an owner with their write capabilities. A
// draining region has none: its mappers are still there, and after drop-owner who
// starts with that id first may be anybody. Errors: ErrFenced, ErrUnproven.
func (c *Core) ListRegions(req ListRegions) (out []RegionInfo, more bool, err error) {
	return c.AppendRegions(nil, req)
}

// AppendRegions is ListRegions for who lists often: it takes the room behind out, that of
// the Holders of entries there too.
func (c *Core) AppendRegions(out []RegionInfo, req ListRegions) (_ []RegionInfo, more bool, err error) {
	most := pageLimit(req.Limit)
	limit := len(out) + most
	mine := req.Owner != (base.OwnerID{})
	if mine {
		o, err := c.owned(req.Claim)
		if err != nil {
			return nil, false, err
		}
		most = min(most, o.count)
	}
	list := c.regionsInOrder()
	first, _ := slices.BinarySearchFunc(list, req.After, func(r *region, id base.RegionID) int {
		if r.row.ID > id {
			return 1
		}
		return -1
	})
	list = list[first:]
	out = slices.Grow(out, min(len(list), most))
	for _, r := range list {
		if mine && r.row.Owner != req.Owner || req.Pool != (base.PoolID{}) && r.row.Pool != req.Pool {
			continue
		}
		if len(out) == limit {
			return out, true, nil
		}
		if len(out) == cap(out) {
			out = append(out, RegionInfo{})
		} else {
			out = out[:len(out)+1]
		}
		info := &out[len(out)-1]
		*info = RegionInfo{
			Region: r.view(), State: RegionAllocated, OwnerIncarnation: r.row.OwnerIncarnation, Operation: r.row.Operation,
			Holders: r.appendHolders(info.Holders[:0]), AllocatedMS: r.row.AllocatedMS,
		}
		switch {
		case r.row.Draining:
			info.State = RegionDraining
		case r.held > 0:
			info.State = RegionHeld
		}
		if mine && !r.row.Draining {
			h := c.writeHandle(r)
			info.Handle = &h
		}
	}
	return out, false, nil
}

// OwnerInfo is what a list shows of an owner.
type OwnerInfo struct {
	ID                base.OwnerID
	Name              string
	Incarnation       base.Incarnation
	Node              base.NodeID
	Boot              base.BootID
	RegionCount       int
	AllocatedBytes    uint64
	StartedMS         int64
	PredecessorsEnded bool
	Proved            bool // a digest of its secret is on record
}

// ListOwners lists all owners in order.
func (c *Core) ListOwners() []OwnerInfo {
	var out []OwnerInfo
	for _, o := range slices.SortedFunc(maps.Values(c.owners), func(x, y *owner) int {
		return cmp.Compare(string(x.row.ID[:]), string(y.row.ID[:]))
	}) {
		out = append(out, OwnerInfo{
			ID: o.row.ID, Name: o.row.Name, Incarnation: o.row.Current.Incarnation, Node: o.row.Current.Node, Boot: o.row.Current.Boot,
			RegionCount: o.count, AllocatedBytes: o.bytes, StartedMS: o.row.StartedMS, PredecessorsEnded: len(o.row.Unproved) == 0,
			Proved: len(o.row.Digest) > 0,
		})
	}
	return out
}

// OwnerSessions lists the sessions with a hold on an owner's regions.
func (c *Core) OwnerSessions(id base.OwnerID) []base.SessionID {
	seen := map[base.SessionID]bool{}
	for _, r := range c.regions {
		if r.row.Owner == id {
			for _, s := range r.holders() {
				seen[s] = true
			}
		}
	}
	return slices.SortedFunc(maps.Keys(seen), compareSessions)
}

// SessionDraining lists the draining regions that a session holds.
func (c *Core) SessionDraining(id base.SessionID) []Region {
	var out []Region
	s, ok := c.sessions[id]
	if !ok {
		return nil
	}
	for _, rid := range slices.Sorted(maps.Keys(s.rows)) {
		if r := c.regions[rid]; s.rows[rid].Held && r.row.Draining {
			out = append(out, r.view())
		}
	}
	return out
}

// SessionPeer reports whether a peer may act for a session: its process, or who shows
// its secret; anybody who shows none when it is bound to no process. Errors: ErrDenied.
func (c *Core) SessionPeer(id base.SessionID, p Peer) error {
	if s, ok := c.sessions[id]; ok {
		return c.checkPeer(s, p)
	}
	return nil
}

// Processes lists the processes to watch: those of sessions and of owners' starts
// on this node. On another one, after a move of the store, their pids mean nothing.
func (c *Core) Processes() []ProcessID {
	seen := map[ProcessID]bool{}
	for _, s := range c.sessions {
		if s.row.Node == c.cfg.Node && s.row.Agent == (base.AgentID{}) {
			seen[s.row.Process] = true
		}
	}
	for _, o := range c.owners {
		for _, st := range append([]start{o.row.Current}, o.row.Unproved...) {
			if !st.Ended && st.Node == c.cfg.Node {
				seen[st.Process] = true
			}
		}
	}
	delete(seen, ProcessID{})
	return slices.SortedFunc(maps.Keys(seen), func(x, y ProcessID) int {
		return cmp.Or(cmp.Compare(x.PID, y.PID), cmp.Compare(x.StartTicks, y.StartTicks), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(string(x.Boot[:]), string(y.Boot[:])))
	})
}

// DirtyRegions lists the regions of software-coherent pools that a process
// mapped for writing: on its own host they are written back before anybody else
// may write them, so before ProcessGone.
func (c *Core) DirtyRegions(p ProcessID) []Region {
	var out []Region
	for _, r := range c.regionsInOrder() {
		if r.pool.row.Coherence != base.CoherenceSoftware {
			continue
		}
		for id, row := range r.rows {
			if row.Held && !row.ReadOnly && c.sessions[id].row.Process == p {
				out = append(out, r.view())
				break
			}
		}
	}
	return out
}

// SessionCount counts the sessions that are known.
func (c *Core) SessionCount() int { return len(c.sessions) }

// HoldCount counts rows of (session, region), unheld ones included.
func (c *Core) HoldCount() int { return c.holdCount }

// RegionCount counts regions in all pools.
func (c *Core) RegionCount() int { return len(c.regions) }

// OwnerCount counts owners.
func (c *Core) OwnerCount() int { return len(c.owners) }
