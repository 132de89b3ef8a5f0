package cabi

import (
	"fmt"
	"sync"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
)

// Page is maru_page: a page that Alloc gave out. A test compares the layouts.
type Page struct {
	Data   uintptr
	Bytes  uint64
	Region uint32
	Index  uint32
}

// View is maru_view.
type View struct {
	ID     uint64
	Data   uintptr
	Bytes  uint64
	Region uint32
	Index  uint32
}

// Rows of one call, kept between calls so that batches allocate nothing.
var (
	pagePool   = sync.Pool{New: func() any { return new([]client.Page) }}
	viewPool   = sync.Pool{New: func() any { return new([]client.View) }}
	commitPool = sync.Pool{New: func() any { return new([]client.CommitItem) }}
)

// rows returns n zeroed rows of a pooled slice.
func rows[T any](p *[]T, n int) []T {
	if cap(*p) < n {
		*p = make([]T, n)
	}
	*p = (*p)[:n]
	clear(*p)
	return *p
}

// Alloc fills out with pages. With ErrFull the first count are the caller's.
func (l *Library) Alloc(h uint64, out []Page, timeoutMS int64) (count int, err error) {
	err = l.call(h, "alloc", func(e *entry) error {
		if err := checkCount(len(out)); err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		pooled := pagePool.Get().(*[]client.Page)
		defer pagePool.Put(pooled)
		pages := rows(pooled, len(out))
		count, err = e.client.Alloc(ctx, len(pages), pages)
		for i := range count {
			p := &pages[i]
			out[i] = Page{Data: addressOf(p.Bytes), Bytes: uint64(len(p.Bytes)), Region: uint32(p.Region), Index: uint32(p.Index)}
		}
		return err
	})
	return count, err
}

// Free gives pages back that Alloc gave out.
func (l *Library) Free(h uint64, regions, indices []uint32, codes []base.Code) error {
	return l.call(h, "free", func(e *entry) error {
		if err := checkCount(len(regions)); err != nil {
			return err
		}
		for i := range regions {
			codes[i] = base.CodeOf(e.client.FreePage(base.RegionID(regions[i]), base.PageIndex(indices[i])))
		}
		return nil
	})
}

// Commit publishes pages that were written in place. parents is packed, or empty.
func (l *Library) Commit(h uint64, keys, parents []byte, regions, indices []uint32, lengths []uint64, codes []base.Code, timeoutMS int64) error {
	return l.call(h, "commit", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		pooled := commitPool.Get().(*[]client.CommitItem)
		defer commitPool.Put(pooled)
		items := rows(pooled, k.Len())
		for i := range items {
			items[i] = client.CommitItem{
				Key: k.At(i), Region: base.RegionID(regions[i]), Index: base.PageIndex(indices[i]), Length: lengths[i],
			}
			if len(parents) > 0 {
				items[i].Parent = base.Digest(parents[i*base.DigestBytes : (i+1)*base.DigestBytes])
			}
		}
		return e.client.CommitPages(ctx, items, codes)
	})
}

// Retrieve takes a view lease on each key. A miss has ID 0.
func (l *Library) Retrieve(h uint64, keys []byte, mode uint32, out []View, timeoutMS int64) error {
	return l.call(h, "retrieve", func(e *entry) error {
		k, err := checkKeys(keys)
		if err != nil {
			return err
		}
		m, err := checkMode(mode)
		if err != nil {
			return err
		}
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		pooled := viewPool.Get().(*[]client.View)
		defer viewPool.Put(pooled)
		views := rows(pooled, k.Len())
		if err := e.client.Retrieve(ctx, k, m, views); err != nil {
			return err
		}
		for i := range views {
			v := &views[i]
			out[i] = View{}
			if v.ID != 0 {
				out[i] = View{ID: v.ID, Data: addressOf(v.Bytes), Bytes: uint64(len(v.Bytes)), Region: uint32(v.Region), Index: uint32(v.Index)}
			}
		}
		return nil
	})
}

// ReleaseViews ends view leases.
func (l *Library) ReleaseViews(h uint64, ids []uint64) error {
	return l.call(h, "release", func(e *entry) error {
		if err := checkCount(len(ids)); err != nil {
			return err
		}
		e.client.ReleaseViews(ids)
		return nil
	})
}

// RegionView returns the address of bytes of a mapped region, which stay until as
// many ReleaseRegionView of it.
func (l *Library) RegionView(h uint64, region uint32, offset, size uint64) (data uintptr, writable bool, err error) {
	err = l.call(h, "region view", func(e *entry) error {
		b, w, err := e.client.RegionView(base.RegionID(region), offset, size)
		if err != nil {
			return err
		}
		data, writable = addressOf(b), w
		return nil
	})
	return data, writable, err
}

// ReleaseRegionView takes one RegionView back.
func (l *Library) ReleaseRegionView(h uint64, region uint32) error {
	return l.call(h, "release region view", func(e *entry) error {
		return e.client.ReleaseRegionView(base.RegionID(region))
	})
}

// RegionPageCount returns the page count of a region that is owned or mapped.
func (l *Library) RegionPageCount(h uint64, region uint32) (count uint64, err error) {
	err = l.call(h, "region page count", func(e *entry) error {
		count, err = e.client.RegionPageCount(base.RegionID(region))
		return err
	})
	return count, err
}

// RegionPageBytes returns the page size of a region that is owned or mapped.
func (l *Library) RegionPageBytes(h uint64, region uint32) (size uint64, err error) {
	err = l.call(h, "region page bytes", func(e *entry) error {
		size, err = e.client.RegionPageBytes(base.RegionID(region))
		return err
	})
	return size, err
}

// RegionFreeCount returns the free pages of an own region.
func (l *Library) RegionFreeCount(h uint64, region uint32) (count uint64, err error) {
	err = l.call(h, "region free count", func(e *entry) error {
		count, err = e.client.RegionFreeCount(base.RegionID(region))
		return err
	})
	return count, err
}

// OwnedRegions copies the regions whose pages this client allocates into out.
func (l *Library) OwnedRegions(h uint64, out []uint32) (count int, err error) {
	err = l.call(h, "owned regions", func(e *entry) error {
		regions := e.client.OwnedRegions()
		count = len(regions)
		if count > len(out) {
			return fmt.Errorf("%w: room for %d regions, there are %d", base.ErrLimit, len(out), count)
		}
		for i, r := range regions {
			out[i] = uint32(r)
		}
		return nil
	})
	return count, err
}

// NextRegion returns the own region behind a cursor, in the order in which they
// came.
//
// Errors: ErrNotFound when there is none yet.
func (l *Library) NextRegion(h, cursor uint64) (next uint64, region uint32, pages uint64, err error) {
	err = l.call(h, "next region", func(e *entry) error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if cursor >= uint64(len(e.mu.regions)) {
			return errNoRegion
		}
		r := e.mu.regions[cursor]
		next, region, pages = cursor+1, uint32(r.id), r.pages
		return nil
	})
	return next, region, pages, err
}

// errNoRegion is made once: NextRegion is asked after every allocation.
var errNoRegion = fmt.Errorf("%w: no further region", base.ErrNotFound)
