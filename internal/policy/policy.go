// Package policy holds the decisions of the store as pure functions: where a new
// replica goes (POL-01) and which replica a reader gets (POL-02). It knows no
// session, lease or clock; eligibility and lifetime are checked by the caller
// before it ranks anything (POL-05), so that no policy can choose a place that
// is out of reach.
//
// Source: POL-01, 02, 05..09.
package policy

import (
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// Order is an order of media: the write order of placement or the read order of
// selection; the two are independent (POL-06). The zero value prefers cpu, then
// cxl, then ssd.
type Order struct{ media [4]base.Medium }

// NewOrder checks an order that a user gave. An empty list is the zero value.
// Errors: base.ErrInvalid for a medium that is unknown or named twice.
func NewOrder(field string, media []base.Medium) (Order, error) {
	var o Order
	for i, m := range media {
		if m != base.MediumCPU && m != base.MediumCXL && m != base.MediumSSD {
			return Order{}, fmt.Errorf("%w: %s has %v at place %d, allowed: cpu, cxl, ssd", base.ErrInvalid, field, m, i+1)
		}
		if slices.Contains(media[:i], m) {
			return Order{}, fmt.Errorf("%w: %s names %v twice", base.ErrInvalid, field, m)
		}
		o.media[i] = m
	}
	return o, nil
}

// Rank returns the place of a medium in the order; media that the order does not
// name come after those that it names, in the order of the zero value.
func (o Order) Rank(m base.Medium) int {
	named := 0
	for i, have := range o.media {
		if have == base.MediumNone {
			break
		}
		if have == m {
			return i
		}
		named++
	}
	return named + int(m)
}

// Names reports whether the order names a medium. The zero value names all.
func (o Order) Names(m base.Medium) bool {
	return o.media[0] == base.MediumNone || slices.Contains(o.media[:], m)
}

// Media returns the named media, best first.
func (o Order) Media() []base.Medium {
	n := slices.Index(o.media[:], base.MediumNone)
	if n < 0 {
		n = len(o.media)
	}
	return slices.Clone(o.media[:n])
}

// Candidate is a pool that a new replica could go to. Eligible says that the
// session may write there at all; FreeBytes is what its grant and the pool still
// have.
type Candidate struct {
	Pool      uint32
	Medium    base.Medium
	Eligible  bool
	FreeBytes uint64
}

// Place orders the pools that can take sizeBytes (POL-01): by the write order,
// then by room, then by number. It appends their numbers to dst; nothing appended
// means SKIP: the store is skipped and the hits are kept (POL-07). The caller
// allocates from the first that succeeds and from no other (POL-08).
func Place(dst []uint32, order Order, sizeBytes uint64, candidates []Candidate) []uint32 {
	start := len(dst)
	byPool := func(n uint32) Candidate {
		return candidates[slices.IndexFunc(candidates, func(c Candidate) bool { return c.Pool == n })]
	}
	for _, c := range candidates {
		if c.Eligible && c.FreeBytes >= sizeBytes && order.Names(c.Medium) {
			dst = append(dst, c.Pool)
		}
	}
	slices.SortFunc(dst[start:], func(x, y uint32) int {
		a, b := byPool(x), byPool(y)
		switch {
		case order.Rank(a.Medium) != order.Rank(b.Medium):
			return order.Rank(a.Medium) - order.Rank(b.Medium)
		case a.FreeBytes != b.FreeBytes:
			if a.FreeBytes > b.FreeBytes {
				return -1
			}
			return 1
		}
		return int(a.Pool) - int(b.Pool)
	})
	return dst
}

// Better reports whether a reader with this read order takes a replica in medium
// a rather than one in medium b (POL-02). Ties keep what was found first.
func (o Order) Better(a, b base.Medium) bool { return o.Rank(a) < o.Rank(b) }
