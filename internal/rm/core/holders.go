package core

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// HoldInfo is what a list shows of a hold.
type HoldInfo struct {
	Session          base.SessionID
	Server           base.OwnerID
	OwnerIncarnation base.Incarnation
	Node             base.NodeID
	Boot             base.BootID
	Process          ProcessID
	Agent            base.AgentID // who watches the process; zero: this program, or nobody
	Pool             base.PoolID
	PoolName         string
	Region           base.RegionID
	ExtentBytes      uint64
	Owner            base.OwnerID
	OwnerName        string
	Views, Draining  bool
	ReadOnly         bool
	SinceMS          int64
	Sequence         uint64
	Provable         bool   // its end can be proved, by whoever vouches
	Reason           string // why the region is not free
	Proof            string // how the mapper's end will be known, or why it will not
	Cure             string // who must act; empty: nobody, now
}

// ListHolds is [Core.Holds] without a time: agents that were heard of count as there.
func (c *Core) ListHolds(only, afterSession base.SessionID, afterRegion base.RegionID, limit int) (out []HoldInfo, more bool) {
	return c.Holds(0, only, afterSession, afterRegion, limit)
}

// Holds lists holds in order of session and region. It says for each why its region is
// not free, how the mapper's end will be known, and who must act for the region to come
// back (L1). only, if not zero, leaves out all other sessions.
func (c *Core) Holds(now int64, only, afterSession base.SessionID, afterRegion base.RegionID, limit int) (out []HoldInfo, more bool) {
	out, more = c.AppendHolds(nil, only, afterSession, afterRegion, limit)
	for i := range out {
		h := &out[i]
		h.OwnerName = c.ownerName(h.Owner)
		h.Reason = c.reason(h)
		c.explain(now, c.sessions[h.Session], h)
	}
	return out, more
}

// AppendHolds is [Core.Holds] for programs: it puts nothing into words (OwnerName, Reason,
// Proof, Cure) and looks at no proof, and takes the room behind out.
func (c *Core) AppendHolds(out []HoldInfo, only, afterSession base.SessionID, afterRegion base.RegionID, limit int) (_ []HoldInfo, more bool) {
	limit = len(out) + pageLimit(limit)
	for _, id := range slices.SortedFunc(maps.Keys(c.sessions), compareSessions) {
		order := compareSessions(id, afterSession)
		if order < 0 || only != (base.SessionID{}) && id != only {
			continue
		}
		s := c.sessions[id]
		for _, rid := range slices.Sorted(maps.Keys(s.rows)) {
			row := s.rows[rid]
			if !row.Held || order == 0 && rid <= afterRegion {
				continue
			}
			if len(out) == limit {
				return out, true
			}
			r := c.regions[rid]
			out = append(out, HoldInfo{
				Session: id, Server: row.Server, OwnerIncarnation: row.OwnerIncarnation, Node: s.row.Node, Boot: s.row.Boot, Process: s.row.Process,
				Agent: s.row.Agent, Pool: r.row.Pool, PoolName: r.pool.row.Name, Region: rid, ExtentBytes: r.row.Length, Owner: r.row.Owner,
				Views: row.Views, Draining: r.row.Draining, ReadOnly: row.ReadOnly, SinceMS: row.SinceMS, Sequence: row.Sequence,
			})
		}
	}
	return out, false
}

func (c *Core) ownerName(id base.OwnerID) string {
	if o, ok := c.owners[id]; ok {
		return o.row.Name
	}
	return ""
}

// reason says why a held region is not free.
func (c *Core) reason(h *HoldInfo) string {
	server := fmt.Sprintf("server %s", cmp.Or(h.OwnerName, h.Owner.String()))
	switch o, ok := c.owners[h.Owner]; {
	case h.Draining && !ok:
		return "its server was dropped; it drains until its last mapper is gone"
	case h.Draining:
		return server + " gave it back; it drains until its last mapper is gone"
	case o != nil && o.row.Current.Ended:
		return server + " has ended and keeps it until it starts again, or maru rm drop-owner"
	default:
		return "in use by " + server
	}
}

// explain says how the end of a hold's process will be known and who must act.
func (c *Core) explain(now int64, s *session, h *HoldInfo) {
	who := fmt.Sprintf("session %s", s.row.ID)
	if !s.row.Process.IsZero() {
		who = fmt.Sprintf("%s of session %s", s.row.Process, s.row.ID)
	}
	drop := fmt.Sprintf("when it is gone for certain, maru rm drop-holds --session %s --confirm", s.row.ID)
	action := "unmaps it, or ends"
	if h.Views {
		action = "releases its views, or ends"
	}
	a := c.agentByID(s.row.Agent)
	var why string
	h.Provable, why = c.provable(s)
	switch {
	case !h.Provable && a != nil:
		h.Proof = fmt.Sprintf("nobody: %s", why)
		h.Cure = fmt.Sprintf("%s unmaps it, or its node %s reboots; look at the log of agent %s there; %s", who, s.row.Node, a.name(), drop)
	case !h.Provable:
		h.Proof = fmt.Sprintf("nobody: %s", why)
		reboots := "or its node reboots"
		if c.agents[s.row.Node] != nil {
			reboots = "or its client finds its node's agent" // whose word for a boot covers only what it vouched for
		}
		h.Cure = fmt.Sprintf("%s unmaps it, %s; its end cannot be proved here (%s): %s", who, reboots, why, drop)
	case a != nil && now != 0 && a.away(now):
		h.Proof = fmt.Sprintf("agent %s, which is away (heard %s)", a.name(), a.silence(now))
		h.Cure = fmt.Sprintf("start maru-remote-cxl-agent --watch-only on node %s again, with its state directory: it says then whether %s has ended; or %s", s.row.Node, who, drop)
	default:
		h.Proof = "this resource manager"
		if a != nil {
			h.Proof = "agent " + a.name()
		}
		if h.Draining {
			h.Cure = fmt.Sprintf("comes back when %s %s", who, action)
		}
	}
}

func (a *agent) name() string { return cmp.Or(a.row.Name, a.row.ID.String()) }
