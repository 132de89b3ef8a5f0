package session

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// PageState is what a page of an own region is used for.
type PageState uint8

// States of a page.
const (
	Free PageState = iota
	Writing
	Committing
	Ready
	Retiring
	Quarantined
	Left
	stateCount
)

func (s PageState) String() string {
	names := [...]string{"free", "writing", "committing", "ready", "retiring", "quarantined", "left"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// PageRef names one use of a page.
type PageRef struct {
	Region     base.RegionID
	Index      base.PageIndex
	Generation base.Generation
}

type pageFlags uint8

const (
	// marked: a mark may be on the device.
	marked pageFlags = 1 << iota
	// uncertain: the outcome of its Commit is unknown.
	uncertain
	// clearing: the shell was told to clear the mark and has not said so yet.
	clearing
	// reclaim: to be freed as soon as its mark is cleared.
	reclaim
	// acking: free as soon as the server has taken the acknowledgement.
	acking
)

// startClear and endClear keep count of the pages whose mark is being cleared.
func (r *region) startClear(p *page) {
	if p.flags&clearing == 0 {
		p.flags |= clearing
		r.clears++
	}
}

func (r *region) endClear(p *page) {
	if p.flags&clearing != 0 {
		p.flags &^= clearing
		r.clears--
	}
}

// page is pointer-free, so that the collector never walks a pool's pages, and nothing
// of a page that was never used is touched.
type page struct {
	state    PageState
	flags    pageFlags
	next     uint32 // free list: index + 1 of the next
	counter  uint32
	gen      base.Generation
	op       base.Sequence
	length   uint64
	checksum uint64
	order    base.CommitOrder
	key      base.Key
	parent   base.Digest
}

// Ownership of a region as this client sees it.
type Ownership uint8

// Own regions are those whose pages this session allocates.
const (
	Foreign Ownership = iota
	Own
)

// RegionInfo is a region as it was granted or described.
type RegionInfo struct {
	ID          base.RegionID
	Pool        base.PoolID
	PoolNumber  uint32 // of the current server epoch
	Medium      base.Medium
	Incarnation base.Incarnation // 0 in private cpu pools
	PageBytes   uint64
	PageCount   uint64
	ServerEpoch base.ServerEpoch // of a private one: only the server that granted it knows it
}

// Private reports whether the region is of a private cpu pool.
func (i *RegionInfo) Private() bool { return i.ID >= base.FirstPrivateRegion }

type regionMode uint8

const (
	serving  regionMode = iota
	draining            // no new pages; goes when idle
	going               // handed to the shell to unmap
)

type region struct {
	RegionInfo
	own    Ownership
	mode   regionMode
	mapped bool
	leases int // copy and view leases, and mappings in the making
	views  int
	pages  []page
	free   uint32 // head of the free list: index + 1
	fresh  uint32 // pages from here on were never used
	counts [stateCount]uint64
	clears int  // pages whose mark the shell is clearing
	avail  bool // in its medium's list of regions with free pages

	before, after *region // in the list of idle regions
	listed        bool
}

func (r *region) set(p *page, to PageState) {
	r.counts[p.state]--
	p.state = to
	r.counts[to]++
	if invariants.Enabled {
		var sum uint64
		for _, n := range r.counts {
			sum += n
		}
		if sum != r.PageCount { // asked here: its arguments are garbage otherwise
			invariants.Failf("R5", "region %d: %v sum to %d of %d pages", r.ID, r.counts, sum, r.PageCount)
		}
	}
}

// take gives out a free page, O(1). Used pages first: they are touched already.
func (r *region) take() (base.PageIndex, bool) {
	for r.free != 0 || uint64(r.fresh) < r.PageCount {
		var i uint32
		if r.free != 0 {
			i = r.free - 1
			r.free = r.pages[i].next
		} else {
			i = r.fresh
			r.fresh++
		}
		p := &r.pages[i]
		p.next = 0
		if p.counter == ^uint32(0) {
			// Its counter is at the end: the page is refused for good, never wrapped.
			r.set(p, Quarantined)
			continue
		}
		p.counter++
		p.flags, p.op, p.gen = 0, 0, 0
		r.set(p, Writing)
		return base.PageIndex(i), true
	}
	return 0, false
}

// release puts a page back on the free list.
func (r *region) release(i base.PageIndex) {
	p := &r.pages[i]
	r.endClear(p)
	p.flags, p.op, p.gen, p.order = 0, 0, 0, 0
	p.next = r.free
	r.free = uint32(i) + 1
	r.set(p, Free)
}

// idle reports whether the mapping can go (D1). What the shell was told to clear is
// cleared first: nobody else reaches a mark in a region whose writer lives.
func (r *region) idle() bool {
	return r.leases == 0 && r.clears == 0 && r.counts[Writing] == 0 && r.counts[Committing] == 0
}

func (r *region) page(i base.PageIndex) *page {
	if r.own != Own || uint64(i) >= r.PageCount {
		return nil
	}
	return &r.pages[i]
}

// pageAt finds the page that begins at a byte offset of the region's data.
func (r *region) pageAt(offset uint64) (base.PageIndex, *page) {
	if r.own != Own || offset%r.PageBytes != 0 || offset/r.PageBytes >= r.PageCount {
		return 0, nil
	}
	i := base.PageIndex(offset / r.PageBytes) //nolint:gosec // below PageCount
	return i, &r.pages[i]
}
