package directory

import (
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Request leases only keep replicas from eviction: by request id, for a time,
// refreshed. They are outside R4 and RPC-23, and losing one is an expected miss. A
// session has at most max-request-leases of them, and of a pool's capacity they keep
// at most half; the oldest go first.

// requestLease is what one engine request keeps.
type requestLease struct {
	id         uint64
	expires    time.Duration
	rows       []keptRow
	prev, next *requestLease
}

// keptRow names a replica; it may be freed while it is kept, and its number used
// again. The order is nobody else's.
type keptRow struct {
	ref   replicaRef
	order base.CommitOrder
}

// requestTable holds a session's request leases, linked from the oldest on.
type requestTable struct {
	byID        map[uint64]*requestLease
	first, last *requestLease
	rows        int
}

func (t *requestTable) unlink(q *requestLease) {
	if q.prev != nil {
		q.prev.next = q.next
	} else {
		t.first = q.next
	}
	if q.next != nil {
		q.next.prev = q.prev
	} else {
		t.last = q.prev
	}
	q.prev, q.next = nil, nil
}

func (t *requestTable) push(q *requestLease) {
	q.prev = t.last
	if t.last != nil {
		t.last.next = q
	} else {
		t.first = q
	}
	t.last = q
}

// ProbeKeep is Probe that takes or renews the request leases of req.RequestID for its
// hits. With request id 0 it is Probe.
// Errors: as Probe.
func (d *Directory) ProbeKeep(now time.Duration, who Caller, req *hot.ProbeRequest, dst []byte) ([]byte, uint32, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return dst, 0, err
	}
	d.raiseWatermark(s, req.Watermark)
	if req.RequestID == 0 {
		return d.probe(now, s, req, dst, nil)
	}
	refs := d.scratch.refs[:0]
	dst, leading, err := d.probe(now, s, req, dst, &refs)
	d.scratch.refs = refs
	if err != nil {
		return dst, 0, err
	}
	d.keepRequest(now, s, req.RequestID, refs)
	return dst, leading, nil
}

func (d *Directory) keepRequest(now time.Duration, s *session, id uint64, refs []replicaRef) {
	t, lim := &s.requests, &d.cfg.Limits
	if old := t.byID[id]; old != nil {
		d.endRequest(s, old)
	}
	if len(refs) == 0 {
		return
	}
	for t.first != nil && (len(t.byID) >= lim.MaxRequests || t.rows+len(refs) > lim.MaxRequestLeases) {
		d.counters.RequestsDropped++
		d.endRequest(s, t.first)
	}
	if len(refs) > lim.MaxRequestLeases {
		d.counters.RequestsDropped++
		return
	}
	q := &requestLease{id: id, expires: now + d.cfg.RequestLeaseTTL, rows: make([]keptRow, 0, len(refs))}
	for _, ref := range refs {
		r := d.store.replica(ref)
		g := d.regions[r.region]
		for t.first != nil && g.pool.requestBytes+g.place.PageBytes > g.pool.info.CapacityBytes/2 {
			d.counters.RequestsDropped++
			d.endRequest(s, t.first)
		}
		if g.pool.requestBytes+g.place.PageBytes > g.pool.info.CapacityBytes/2 {
			continue
		}
		r.requests++
		g.requests++
		g.pool.requestBytes += g.place.PageBytes
		q.rows = append(q.rows, keptRow{ref: ref, order: r.order})
	}
	if len(q.rows) == 0 {
		return
	}
	if t.byID == nil {
		t.byID = map[uint64]*requestLease{}
	}
	t.byID[id] = q
	t.rows += len(q.rows)
	t.push(q)
}

func (d *Directory) endRequest(s *session, q *requestLease) {
	t := &s.requests
	for _, k := range q.rows {
		r := d.store.replica(k.ref)
		if r.order != k.order || r.state() == replicaFree || r.requests == 0 {
			continue
		}
		g := d.regions[r.region]
		r.requests--
		g.requests--
		g.pool.requestBytes -= g.place.PageBytes
	}
	t.rows -= len(q.rows)
	t.unlink(q)
	delete(t.byID, q.id)
}

func (d *Directory) endRequests(s *session) {
	for s.requests.first != nil {
		d.endRequest(s, s.requests.first)
	}
}

// expireRequests ends what was not refreshed and returns when the next is due. The
// time to live is one for all, so that the oldest is the first to go.
func (d *Directory) expireRequests(now time.Duration, s *session) time.Duration {
	for s.requests.first != nil {
		if s.requests.first.expires > now {
			return s.requests.first.expires
		}
		d.counters.RequestsExpired++
		d.endRequest(s, s.requests.first)
	}
	return never
}

// Requests refreshes or ends the request leases of engine requests and returns how
// many of the ids were known.
// Errors: base.ErrStale.
func (d *Directory) Requests(now time.Duration, who Caller, req *hot.RequestsRequest) (uint32, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return 0, err
	}
	d.raiseWatermark(s, req.Watermark)
	d.expireRequests(now, s)
	known := uint32(0)
	for i := range req.Count() {
		q := s.requests.byID[req.ID(i)]
		if q == nil {
			continue
		}
		known++
		if req.Action == hot.RequestsEnd {
			d.endRequest(s, q)
			continue
		}
		q.expires = now + d.cfg.RequestLeaseTTL
		s.requests.unlink(q)
		s.requests.push(q)
	}
	return known, nil
}
