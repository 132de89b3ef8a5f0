package client

import (
	"maps"
	"slices"
	"sync"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
)

// knownCount is the most descriptions that are kept, those of the newest regions.
const knownCount = 1024

// known are descriptions of shared regions that came ahead of need, so that the first read
// of a region costs one call, the hold, and not two. A description does not become wrong: a
// region's id is never used again, and its capability is its own for ever. It may be of a
// region that is gone: the resource manager refuses the hold then, and the server is asked.
// What may be read is decided elsewhere: by the lease, and by the hold.
// Concurrency: safe; a leaf.
type known struct {
	mu struct {
		sync.Mutex
		of      *link         // whose pool numbers and tokens they are
		heard   base.RegionID // the newest that the server has
		through base.RegionID // it was asked for all up to here
		behind  bool          // it is to be asked
		byID    map[base.RegionID]*maruv1.SharedRegion
	}
}

// begin forgets everything: the domains of a link are proved, and what it may map is to be
// asked for.
func (k *known) begin(l *link) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.of, k.mu.heard, k.mu.through, k.mu.behind = l, 0, 0, true
	k.mu.byID = map[base.RegionID]*maruv1.SharedRegion{}
}

// newest takes which region is the newest at the server, and reports whether it is to be
// asked for more.
func (k *known) newest(l *link, id base.RegionID) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.of != l {
		return false // not before its domains are proved
	}
	k.mu.heard = max(k.mu.heard, id)
	k.mu.behind = k.mu.behind || k.mu.heard > k.mu.through
	return k.mu.behind
}

// find returns the descriptions of all of these regions, or nothing.
func (k *known) find(l *link, ids []uint32) []*maruv1.SharedRegion {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.of != l || len(ids) > listCount {
		return nil
	}
	out := make([]*maruv1.SharedRegion, 0, len(ids))
	for _, id := range ids {
		r := k.mu.byID[base.RegionID(id)]
		if r == nil {
			return nil
		}
		out = append(out, r)
	}
	return out
}

// keep takes what the server said of regions: a problem is that one is gone, mostly.
func (k *known) keep(l *link, regions []*maruv1.SharedRegion) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.of == l {
		k.keepLocked(regions)
	}
}

func (k *known) keepLocked(regions []*maruv1.SharedRegion) {
	for _, r := range regions {
		id := base.RegionID(r.GetHandle().GetRegionId())
		if r.GetProblem().GetCode() != 0 {
			delete(k.mu.byID, id)
			continue
		}
		k.mu.byID[id] = r
	}
	more := len(k.mu.byID) - knownCount
	if more <= 0 {
		return
	}
	ids := slices.Sorted(maps.Keys(k.mu.byID))
	for _, id := range ids[:more] {
		delete(k.mu.byID, id)
	}
}

// want says what to ask the server for: regions behind after. What is asked for now covers
// everything up to heard.
func (k *known) want(l *link) (after, heard base.RegionID, ask bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.through, k.mu.heard, k.mu.of == l && k.mu.behind
}

// learned takes the answer to what want said.
func (k *known) learned(l *link, regions []*maruv1.SharedRegion, heard base.RegionID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.of != l {
		return
	}
	k.mu.through = max(k.mu.through, heard)
	for _, r := range regions {
		k.mu.through = max(k.mu.through, base.RegionID(r.GetHandle().GetRegionId()))
	}
	k.mu.behind = k.mu.heard > k.mu.through
	k.keepLocked(regions)
}

// learn asks the server for the regions of this namespace that this session does not know.
// Of the background worker. What fails is asked again with the next heartbeat.
func (c *Client) learn(l *link) {
	after, heard, ask := c.known.want(l)
	if !ask {
		return
	}
	ctx, cancel := c.control(c.ctx, l)
	defer cancel()
	resp, err := l.api.DescribeRegions(ctx, &maruv1.DescribeRegionsRequest{
		AllOfNamespace: true, AfterRegionId: uint32(after), MaxCount: knownCount,
	})
	if err != nil {
		c.failed(l, err)
		return
	}
	c.known.learned(l, resp.GetRegions(), heard)
}
