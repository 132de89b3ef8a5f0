package core

import (
	"fmt"
	"maps"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// model is the deliberately dumb twin of the core: plain maps, loops over
// everything, copied whole to remember what is durable. It knows one pool.
type model struct {
	units    int
	nextID   base.RegionID
	nextInc  base.Incarnation
	nextOwn  base.Incarnation
	owners   map[base.OwnerID]mOwner
	regions  map[base.RegionID]mRegion
	sessions map[base.SessionID]ProcessID
	rows     map[[2]string]mRow
}

type mOwner struct {
	inc    base.Incarnation
	closed map[uint64]bool
}

type mRegion struct {
	owner    base.OwnerID
	ownerInc base.Incarnation
	inc      base.Incarnation
	op       uint64
	pages    uint64
	at, n    int // units
	draining bool
}

type mRow struct {
	session base.SessionID
	region  base.RegionID
	seq     uint64
	held    bool
	views   bool
}

func newModel(units int) *model {
	return &model{
		units: units, nextID: 1, nextInc: 1, nextOwn: 1, owners: map[base.OwnerID]mOwner{}, regions: map[base.RegionID]mRegion{},
		sessions: map[base.SessionID]ProcessID{}, rows: map[[2]string]mRow{},
	}
}

func (m *model) copy() *model {
	c := *m
	c.owners, c.regions, c.sessions, c.rows = maps.Clone(m.owners), maps.Clone(m.regions), maps.Clone(m.sessions), maps.Clone(m.rows)
	for id, o := range c.owners {
		o.closed = maps.Clone(o.closed)
		c.owners[id] = o
	}
	return &c
}

func rowKey(s base.SessionID, r base.RegionID) [2]string {
	return [2]string{string(s[:]), fmt.Sprint(r)}
}

func (m *model) startOwner(id base.OwnerID) base.Incarnation {
	inc := m.nextOwn
	m.nextOwn++
	m.owners[id] = mOwner{inc: inc, closed: map[uint64]bool{}}
	return inc
}

func (m *model) allocate(id base.OwnerID, inc base.Incarnation, op, pages uint64, n int) (base.RegionID, base.Code) {
	o, ok := m.owners[id]
	if !ok || o.inc != inc {
		return 0, base.CodeFenced
	}
	for rid, r := range m.regions {
		if r.owner == id && r.ownerInc == inc && r.op == op {
			switch {
			case r.draining:
				return 0, base.CodeStale
			case r.pages != pages:
				return 0, base.CodeMismatch
			}
			return rid, base.CodeOK
		}
	}
	if o.closed[op] {
		return 0, base.CodeStale
	}
	if n > m.units {
		return 0, base.CodePermanent
	}
	for at := 0; at+n <= m.units; at++ {
		free := true
		for _, r := range m.regions {
			if at < r.at+r.n && r.at < at+n {
				free = false
			}
		}
		if free {
			rid := m.nextID
			m.regions[rid] = mRegion{owner: id, ownerInc: inc, inc: m.nextInc, op: op, pages: pages, at: at, n: n}
			m.nextID++
			m.nextInc++
			return rid, base.CodeOK
		}
	}
	return 0, base.CodeFull
}

func (m *model) holders(rid base.RegionID) int {
	n := 0
	for _, row := range m.rows {
		if row.region == rid && row.held {
			n++
		}
	}
	return n
}

func (m *model) drop(rid base.RegionID) {
	delete(m.regions, rid)
	for k, row := range m.rows {
		if row.region == rid {
			delete(m.rows, k)
		}
	}
	m.forget()
}

// forget ends sessions without a process and without rows.
func (m *model) forget() {
	for s, p := range m.sessions {
		used := !p.IsZero()
		for _, row := range m.rows {
			used = used || row.session == s
		}
		if !used {
			delete(m.sessions, s)
		}
	}
}

func (m *model) free(id base.OwnerID, inc base.Incarnation, rid base.RegionID) base.Code {
	if o, ok := m.owners[id]; !ok || o.inc != inc {
		return base.CodeFenced
	}
	r, ok := m.regions[rid]
	switch {
	case !ok && rid < m.nextID:
		return base.CodeOK
	case !ok:
		return base.CodeNotFound
	case r.owner != id:
		return base.CodeDenied
	}
	m.release(rid)
	return base.CodeOK
}

func (m *model) release(rid base.RegionID) {
	r := m.regions[rid]
	if o, ok := m.owners[r.owner]; ok && o.inc == r.ownerInc && !r.draining {
		o.closed[r.op] = true
	}
	r.draining = true
	m.regions[rid] = r
	if m.holders(rid) == 0 {
		m.drop(rid)
	}
}

func (m *model) hold(s base.SessionID, p ProcessID, id base.OwnerID, inc base.Incarnation, seq uint64, views bool, rids []base.RegionID) base.Code {
	if o, ok := m.owners[id]; !ok || o.inc != inc {
		return base.CodeFenced
	}
	if bound, ok := m.sessions[s]; ok && !bound.IsZero() && bound != p {
		return base.CodeDenied
	}
	for _, rid := range rids {
		r, ok := m.regions[rid]
		if !ok {
			return base.CodeNotFound
		}
		if r.owner != id {
			return base.CodeDenied
		}
		row, ok := m.rows[rowKey(s, rid)]
		if ok && (seq < row.seq || seq == row.seq && !row.held) {
			return base.CodeStale
		}
		if ok && seq == row.seq {
			continue
		}
		if r.draining {
			return base.CodeDraining
		}
	}
	if _, ok := m.sessions[s]; !ok {
		m.sessions[s] = p
	}
	for _, rid := range rids {
		k := rowKey(s, rid)
		row, ok := m.rows[k]
		if ok && seq == row.seq {
			continue
		}
		m.rows[k] = mRow{session: s, region: rid, seq: seq, held: true, views: views || ok && row.held && row.views}
	}
	return base.CodeOK
}

func (m *model) unhold(s base.SessionID, p ProcessID, token bool, seq uint64, rids []base.RegionID) base.Code {
	bound, ok := m.sessions[s]
	switch {
	case !ok:
		exists := false
		for _, rid := range rids {
			_, known := m.regions[rid]
			exists = exists || known
		}
		if !exists {
			return base.CodeOK
		}
		m.sessions[s] = p
	case !token && (bound.IsZero() || bound != p):
		return base.CodeDenied
	}
	for _, rid := range rids {
		if row, ok := m.rows[rowKey(s, rid)]; ok && (seq < row.seq || seq == row.seq && row.held) {
			return base.CodeStale
		}
	}
	for _, rid := range rids {
		if _, ok := m.regions[rid]; ok {
			m.rows[rowKey(s, rid)] = mRow{session: s, region: rid, seq: seq}
		}
	}
	m.sweep()
	return base.CodeOK
}

// sweep frees draining regions without holds.
func (m *model) sweep() {
	for rid, r := range maps.Clone(m.regions) {
		if r.draining && m.holders(rid) == 0 {
			m.drop(rid)
		}
	}
}

func (m *model) gone(match func(base.SessionID, ProcessID) bool) {
	for s, p := range maps.Clone(m.sessions) {
		if !match(s, p) {
			continue
		}
		delete(m.sessions, s)
		for k, row := range m.rows {
			if row.session == s {
				delete(m.rows, k)
			}
		}
	}
	m.sweep()
}

func (m *model) dropOwner(id base.OwnerID) base.Code {
	if _, ok := m.owners[id]; !ok {
		return base.CodeNotFound
	}
	for rid, r := range maps.Clone(m.regions) {
		if r.owner == id {
			m.release(rid)
		}
	}
	delete(m.owners, id)
	return base.CodeOK
}

// picture is what both sides can be compared by.
func (m *model) picture() []string {
	var out []string
	for rid, r := range m.regions {
		state := RegionAllocated
		switch {
		case r.draining:
			state = RegionDraining
		case m.holders(rid) > 0:
			state = RegionHeld
		}
		out = append(out, fmt.Sprintf("region %d owner %x.%d op %d inc %d at %d+%d pages %d state %d", rid, r.owner[:1], r.ownerInc, r.op, r.inc, r.at, r.n, r.pages, state))
	}
	for _, row := range m.rows {
		if row.held {
			out = append(out, fmt.Sprintf("hold %x region %d seq %d views %v process %d", row.session[:1], row.region, row.seq, row.views, m.sessions[row.session].PID))
		}
	}
	for id, o := range m.owners {
		count := 0
		for _, r := range m.regions {
			if r.owner == id {
				count++
			}
		}
		out = append(out, fmt.Sprintf("owner %x.%d regions %d", id[:1], o.inc, count))
	}
	out = append(out, fmt.Sprintf("rows %d sessions %d", len(m.rows), len(m.sessions)))
	slices.Sort(out)
	return out
}

func corePicture(c *Core) []string {
	var out []string
	regions, _, _ := c.ListRegions(ListRegions{})
	for _, r := range regions {
		out = append(out, fmt.Sprintf("region %d owner %x.%d op %d inc %d at %d+%d pages %d state %d", r.ID, r.Owner[:1], r.OwnerIncarnation, r.Operation, r.Incarnation,
			(r.Extent.Offset-poolfmt.DataOffset)/poolfmt.Alignment, r.Extent.Length/poolfmt.Alignment, r.Plan.PageCount, r.State))
	}
	holds, _ := c.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
	for _, h := range holds {
		out = append(out, fmt.Sprintf("hold %x region %d seq %d views %v process %d", h.Session[:1], h.Region, h.Sequence, h.Views, h.Process.PID))
	}
	for _, o := range c.ListOwners() {
		out = append(out, fmt.Sprintf("owner %x.%d regions %d", o.ID[:1], o.Incarnation, o.RegionCount))
	}
	out = append(out, fmt.Sprintf("rows %d sessions %d", c.HoldCount(), c.SessionCount()))
	slices.Sort(out)
	return out
}
