package client

import (
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/session"
)

// worker is the scratch of one copying goroutine: loops, leaf lists, a piece that is
// read only to be hashed.
type worker struct {
	copier    checksum.Copier
	scatterer checksum.Scatterer
	leaves    []uint64
	want      []uint64
	spill     []byte
}

var workers = sync.Pool{New: func() any { return new(worker) }}

// parts is work in independent parts.
type parts interface{ part(w *worker, i int) }

// group spreads parts over the copy threads. Whoever has no part left leaves; the caller
// waits for the parts, not for the threads.
type group struct {
	work parts
	next atomic.Int64
	n    int64
	done sync.WaitGroup
	refs atomic.Int64
}

var groups = sync.Pool{New: func() any { return new(group) }}

func (g *group) run(w *worker) {
	for {
		i := g.next.Add(1) - 1
		if i >= g.n {
			return
		}
		g.work.part(w, int(i))
		g.done.Done()
	}
}

func (g *group) drop() {
	if g.refs.Add(-1) == 0 {
		g.work = nil
		groups.Put(g)
	}
}

// each runs n parts on the calling goroutine and on the copy threads that are idle.
func (t *transfers) each(work parts, n int) {
	if n == 0 {
		return
	}
	w := workers.Get().(*worker)
	defer workers.Put(w)
	if n == 1 || cap(t.help) == 0 {
		for i := range n {
			work.part(w, i)
		}
		return
	}
	g := groups.Get().(*group)
	g.work, g.n = work, int64(n)
	g.next.Store(0)
	g.refs.Store(1)
	g.done.Add(n)
	for range min(n-1, cap(t.help)) {
		g.refs.Add(1)
		select {
		case t.help <- g:
			continue
		default:
			g.refs.Add(-1)
		}
		break
	}
	g.run(w)
	g.done.Wait()
	g.drop()
}

// writeLeaves puts a leaf list behind an object's data.
func writeLeaves(dst []byte, leaves []uint64) {
	for i, l := range leaves {
		binary.LittleEndian.PutUint64(dst[i*checksum.LeafBytes:], l)
	}
}

// readLeaves copies a leaf list once, so that what is checked is what is used.
func readLeaves(dst []uint64, src []byte, n int) []uint64 {
	dst = dst[:0]
	for i := range n {
		dst = append(dst, binary.LittleEndian.Uint64(src[i*checksum.LeafBytes:]))
	}
	return dst
}

// gather copies the runs of an item into a page and returns the checksum. The caller
// guards it.
func (w *worker) gather(page []byte, length uint64, piece int, seed uint64, leafList bool, runs [][]byte, l *layout, blocks []uint32) uint64 {
	w.copier.Reset(page[:length], piece, seed, w.leaves[:0])
	if l != nil {
		l.runs(blocks, func(run []byte) { w.copier.Write(run) })
	} else {
		for _, run := range runs {
			w.copier.Write(run)
		}
	}
	w.leaves, _ = w.copier.Finish()
	if piece == 0 {
		return 0
	}
	if leafList {
		writeLeaves(page[leafListAt(length):], w.leaves)
	}
	return checksum.Root(w.leaves, length, seed)
}

// loadPart is what one item reads of an object.
type loadPart struct {
	page   []byte
	length uint64 // of the object
	from   uint64 // first byte that is wanted
	size   uint64
	root   uint64
	seed   uint64
	piece  int // 0: not verified
	leaves bool
	runs   [][]byte
	layout *layout
	blocks []uint32
}

// scatter copies a part of an object into runs and verifies what it touched. The caller
// guards it. Pieces that the part begins or ends inside are read whole.
func (w *worker) scatter(p *loadPart) base.Code {
	if p.piece == 0 {
		w.deliver(p, p.page[p.from:p.from+p.size], 0)
		return base.CodeOK
	}
	piece := uint64(p.piece)
	first := p.from / piece
	last := (p.from + p.size + piece - 1) / piece // one behind
	start, end := first*piece, min(last*piece, p.length)
	w.leaves = w.leaves[:0]
	whole := start == 0 && end == p.length
	if whole {
		w.deliver(p, p.page[:p.length], p.from)
		if checksum.Root(w.leaves, p.length, p.seed) != p.root {
			return base.CodeCorrupt
		}
		return base.CodeOK
	}
	count := checksum.PieceCount(p.length, p.piece)
	if p.leaves {
		w.want = readLeaves(w.want, p.page[leafListAt(p.length):], count)
		if checksum.Root(w.want, p.length, p.seed) != p.root {
			return base.CodeCorrupt
		}
		w.deliver(p, p.page[start:end], p.from-start)
		if checksum.FirstDifference(w.leaves, w.want[first:last]) >= 0 {
			return base.CodeCorrupt
		}
		return base.CodeOK
	}
	// Only the root is known: the pieces around the part are hashed where they lie.
	w.want = checksum.Leaves(w.want[:0], p.page[:start], p.piece, p.seed)
	w.deliver(p, p.page[start:end], p.from-start)
	w.want = append(w.want, w.leaves...)
	w.want = checksum.Leaves(w.want, p.page[end:p.length], p.piece, p.seed)
	if checksum.Root(w.want, p.length, p.seed) != p.root {
		return base.CodeCorrupt
	}
	return base.CodeOK
}

// deliver copies src without its first skip bytes into the part's runs. What of src the
// runs do not take is read for its leaves only.
func (w *worker) deliver(p *loadPart, src []byte, skip uint64) {
	s := &w.scatterer
	s.Reset(src, p.piece, p.seed, w.leaves[:0])
	w.swallow(skip)
	if p.layout != nil {
		p.layout.runs(p.blocks, func(run []byte) { s.Read(run) })
	} else {
		for _, run := range p.runs {
			s.Read(run)
		}
	}
	if p.piece != 0 {
		w.swallow(uint64(len(src)) - skip - p.size)
	}
	w.leaves, _ = s.Finish()
}

// swallow reads n bytes of the scatterer to nowhere.
func (w *worker) swallow(n uint64) {
	if n > 0 && w.spill == nil {
		w.spill = make([]byte, 64<<10)
	}
	for n > 0 {
		k := min(n, uint64(len(w.spill)))
		w.scatterer.Read(w.spill[:k])
		n -= k
	}
}

// storeWork copies the items of a Store.
type storeWork struct {
	c     *Client
	items []StoreItem
	tasks []storeTask
	keys  hot.Keys
	probe []byte
	moves deviceMoves
}

type storeTask struct {
	item   int
	length uint64
	layout *layout
	ref    session.PageRef
	sum    uint64
	code   base.Code
	end    pageEnd
}

// pageEnd is what becomes of the page of a copy that failed.
type pageEnd uint8

const (
	pageFaults pageEnd = iota // its memory cannot be used: quarantined
	pageUnused                // nothing is copied there: free again
)

func (s *storeWork) part(w *worker, i int) {
	t := &s.tasks[i]
	if t.layout.onDevice() {
		return // saveOnDevice has them all at once
	}
	it := &s.items[t.item]
	m := s.c.region(t.ref.Region)
	piece := 0
	if s.c.summed(m) {
		piece = int(s.c.cfg.PieceBytes)
	}
	seed := checksum.Seed(s.c.namespace, it.Key)
	err := mapping.Guard(func() {
		t.sum = w.gather(m.page(t.ref.Index), t.length, piece, seed, !s.c.cfg.Opaque, it.Runs, t.layout, it.Blocks)
	})
	t.code = base.CodeOK
	if err != nil {
		t.code = base.CodeFault
	}
}

// loadWork copies the items of a Load that one Acquire has leased.
type loadWork struct {
	c       *Client
	items   []LoadItem
	tasks   []loadTask
	keys    hot.Keys
	got     acquired
	batch   session.Batch
	release []session.Release
	moves   deviceMoves
}

type loadTask struct {
	item   int
	size   uint64
	layout *layout
	code   base.Code
	unsure bool // no root is over its bytes, from memory that others write
	// Of a device layout: what part has prepared for loadOnDevice.
	prepared loadPart
	waits    bool
}

func (s *loadWork) part(w *worker, i int) {
	t := &s.tasks[i]
	it := &s.items[t.item]
	m, page, code := s.c.leased(&s.got, i)
	if code != base.CodeOK {
		t.code = code
		return
	}
	row := &s.got.rows[i]
	if it.OffsetBytes > row.Length || t.size > row.Length-it.OffsetBytes {
		t.code = base.CodeInvalid
		return
	}
	p := loadPart{
		page: page, length: row.Length, from: it.OffsetBytes, size: t.size, root: row.Checksum,
		leaves: !s.c.cfg.Opaque, runs: it.Runs, layout: t.layout, blocks: it.Blocks,
	}
	if s.c.summed(m) {
		p.piece = int(s.c.cfg.PieceBytes)
		p.seed = checksum.Seed(s.c.namespace, it.Key)
		if row.Checksum == 0 {
			t.code = base.CodeMiss // stored without a checksum, and this client wants one
			return
		}
		pieces := uint64(checksum.PieceCount(row.Length, p.piece)) //nolint:gosec // bounded by the page
		p.leaves = p.leaves && leafListAt(row.Length)+pieces*checksum.LeafBytes <= uint64(len(page))
	}
	err := mapping.Guard(func() {
		if m.software() && m.own != session.Own {
			// The leaf list lies behind the data: the whole page is dropped.
			_ = flush.Invalidate(page) // supported, or mapRegion had refused
		}
		if t.layout.onDevice() {
			t.prepared, t.waits = p, true
			return
		}
		t.code = w.scatter(&p)
	})
	if err != nil {
		t.code = base.CodeFault
	}
}
