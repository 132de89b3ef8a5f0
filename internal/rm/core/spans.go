package core

import "sort"

// spans is a set of closed operations as runs of consecutive numbers, in order,
// never touching.
type spans []span

type span struct{ first, last uint64 }

func (s spans) contains(n uint64) bool {
	i := sort.Search(len(s), func(i int) bool { return s[i].last >= n })
	return i < len(s) && s[i].first <= n
}

// addSpan closes an operation. It touches at most three rows, however many
// operations are closed.
func (o *owner) addSpan(b *Batch, n uint64) {
	s := o.closed
	i := sort.Search(len(s), func(i int) bool { return s[i].last >= n })
	if i < len(s) && s[i].first <= n {
		return
	}
	joinsLeft := i > 0 && s[i-1].last+1 == n
	joinsRight := i < len(s) && s[i].first == n+1
	switch {
	case joinsLeft && joinsRight:
		b.drop(bucketOperations, spanKey(o.row.ID, s[i].first))
		s[i-1].last = s[i].last
		s = append(s[:i], s[i+1:]...)
		i--
	case joinsLeft:
		i--
		s[i].last = n
	case joinsRight:
		b.drop(bucketOperations, spanKey(o.row.ID, s[i].first))
		s[i].first = n
	default:
		s = append(s, span{})
		copy(s[i+1:], s[i:])
		s[i] = span{n, n}
	}
	o.closed = s
	b.put(bucketOperations, spanKey(o.row.ID, s[i].first), spanRow{Last: s[i].last})
}

func (o *owner) dropSpans(b *Batch) {
	for _, s := range o.closed {
		b.drop(bucketOperations, spanKey(o.row.ID, s.first))
	}
	o.closed = nil
}

// load takes a stored span, which must follow all others.
func (s *spans) load(first, last uint64) bool {
	if first == 0 || last < first || len(*s) > 0 && (*s)[len(*s)-1].last >= first-1 {
		return false
	}
	*s = append(*s, span{first, last})
	return true
}
