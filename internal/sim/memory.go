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

// memory is the pool's device behind its header. A record is kept with the page that it
// is of: tables of regions overlap as their pages do.
type memory struct {
	cells []cell
	marks []base.CommitOrder
}

func newMemory() *memory {
	return &memory{cells: make([]cell, deviceBytes/pageBytes), marks: make([]base.CommitOrder, deviceBytes/pageBytes)}
}

// regionAt is where a region lies.
type regionAt struct {
	extent base.Extent
	plan   poolfmt.Plan
}

func (r regionAt) cell(p base.PageIndex) uint64 {
	return (r.extent.Offset + r.plan.Page(p)) / pageBytes
}

func (m *memory) page(r regionAt, p base.PageIndex) *cell { return &m.cells[r.cell(p)] }

// zero clears a region's table.
func (m *memory) zero(r regionAt) {
	for p := range r.plan.PageCount {
		m.marks[r.cell(base.PageIndex(p))] = 0 //nolint:gosec // a page
	}
}

// setMark writes a record's mark; 0 clears it.
func (w *world) setMark(r regionAt, p base.PageIndex, order base.CommitOrder) {
	w.memory.marks[r.cell(p)] = order
	w.dirty.marks = true
}

// write puts half of a page's content into memory; views of it must not change (R3).
func (w *world) write(c *cell, half int, t tag) {
	c.half[half] = t
	for _, other := range w.clients {
		for _, v := range other.views {
			if v.cell == c {
				other.checkView(v)
			}
		}
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
	w.dirty.manager = true
}

func (w *world) unmapRegion(m *mapping) {
	w.note("%s unmaps region %d", m.process.name, m.region)
	for i, have := range w.mappings {
		if have == m {
			w.mappings = append(w.mappings[:i], w.mappings[i+1:]...)
			w.dirty.manager = true
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
	hidden  base.ServerEpoch // of the server that hid it for good
	retired bool             // and its writer was told so
	deleted bool             // and its delete was acknowledged
}

// truth is every commit of the run.
type truth struct {
	bySerial map[uint64]*stored
	byKey    [keyCount][]*stored
	byOrder  map[base.CommitOrder]*stored // of cxl pools
	byUse    map[use]*stored
	serial   uint64
}

// use is one use of a page. Private regions of two sessions may have one id.
type use struct {
	region  base.RegionID
	page    base.PageIndex
	gen     base.Generation
	session base.SessionID // of private regions
}

func useOf(region base.RegionID, page base.PageIndex, gen base.Generation, session base.SessionID) use {
	u := use{region: region, page: page, gen: gen}
	if region >= base.FirstPrivateRegion {
		u.session = session
	}
	return u
}

func newTruth() truth {
	return truth{bySerial: map[uint64]*stored{}, byOrder: map[base.CommitOrder]*stored{}, byUse: map[use]*stored{}}
}

func (t *truth) add(s *stored) {
	t.bySerial[s.tag.serial] = s
	t.byKey[s.tag.key] = append(t.byKey[s.tag.key], s)
	t.byUse[useOf(s.region, s.page, s.gen, s.session)] = s
	if s.region < base.FirstPrivateRegion {
		t.byOrder[s.order] = s
	}
}
