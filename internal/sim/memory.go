package sim

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// The pool: pages of half a MiB lie on whole cells, since extents are aligned to 2 MiB.
const (
	pageBytes   = 512 << 10
	pieceBytes  = 64 << 10
	poolExtents = 8 // units of 2 MiB
	deviceBytes = poolfmt.DataOffset + poolExtents*poolfmt.Alignment
)

// tag is the content of half a page: which object's bytes, and which store of it.
type tag struct {
	key    int
	serial uint64
}

// cell is a page's memory.
type cell struct{ half [2]tag }

func (c *cell) shows(t tag) bool { return c.half[0] == t && c.half[1] == t }

func (c *cell) String() string { return fmt.Sprintf("%v|%v", c.half[0], c.half[1]) }

// memory is the pool's device behind its header.
type memory struct {
	cells []cell
	marks map[uint64]base.CommitOrder // by byte offset of the record
}

func newMemory() *memory {
	return &memory{cells: make([]cell, deviceBytes/pageBytes), marks: map[uint64]base.CommitOrder{}}
}

// regionAt is where a region lies.
type regionAt struct {
	extent base.Extent
	plan   poolfmt.Plan
}

func (r regionAt) record(p base.PageIndex) uint64 { return r.extent.Offset + r.plan.Record(p) }

func (m *memory) page(r regionAt, p base.PageIndex) *cell {
	return &m.cells[(r.extent.Offset+r.plan.Page(p))/pageBytes]
}

// zero clears a region's table.
func (m *memory) zero(r regionAt) {
	for p := range r.plan.PageCount {
		delete(m.marks, r.record(base.PageIndex(p))) //nolint:gosec // a page
	}
}

// mapping is a region in a process's address space.
type mapping struct {
	process *process
	session base.SessionID
	region  base.RegionID
	at      regionAt
	own     bool
}

func (w *world) mapRegion(m *mapping) {
	w.note("%s maps region %d %v", m.process.name, m.region, m.at.extent)
	w.mappings = append(w.mappings, m)
}

func (w *world) unmapRegion(m *mapping) {
	w.note("%s unmaps region %d", m.process.name, m.region)
	for i, have := range w.mappings {
		if have == m {
			w.mappings = append(w.mappings[:i], w.mappings[i+1:]...)
			return
		}
	}
}

// stored is one committed replica.
type stored struct {
	tag     tag
	region  base.RegionID
	page    base.PageIndex
	gen     base.Generation
	order   base.CommitOrder
	session base.SessionID
	server  base.ServerEpoch
	hidden  base.ServerEpoch // the server that retired it; its successor may not know
	retired bool             // the writer was told so
	deleted bool             // and its delete was acknowledged
}

// truth is every commit of the run.
type truth struct {
	bySerial map[uint64]*stored
	list     []*stored
	serial   uint64
}

func newTruth() truth { return truth{bySerial: map[uint64]*stored{}} }

func (t *truth) find(region base.RegionID, page base.PageIndex, gen base.Generation, session base.SessionID) *stored {
	for i := len(t.list) - 1; i >= 0; i-- {
		if s := t.list[i]; s.region == region && s.page == page && s.gen == gen && (region < base.FirstPrivateRegion || s.session == session) {
			return s
		}
	}
	return nil
}
