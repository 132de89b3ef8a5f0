package session

import (
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// Expand is one growth of the session: the operation that asks for a region.
type Expand struct {
	Sequence base.Sequence
	Medium   base.Medium
	Bytes    uint64
	lost     bool
}

// BeginExpand numbers a growth at a server, or gives the one of the medium again whose
// outcome is open (X1): its region would be granted and used by nobody. A medium has one
// at a time. Errors: ErrUnavailable when the session is not open at that server any more,
// ErrLimit.
func (c *Core) BeginExpand(m base.Medium, bytes uint64, server base.ServerEpoch) (Expand, error) {
	if server != c.serverEpoch || c.phase == HasLeft || c.phase == Closed {
		return Expand{}, fmt.Errorf("%w: the session is %s, and another epoch began", base.ErrUnavailable, c.phase)
	}
	if e := c.expands[m]; e != nil {
		e.lost = false
		return *e, nil
	}
	seq, err := c.ledger.begin()
	if err != nil {
		return Expand{}, err
	}
	e := &Expand{Sequence: seq, Medium: m, Bytes: bytes}
	c.expands[m] = e
	return *e, nil
}

// EndExpand takes how the last try of a growth ended; unknown says that an error is no
// answer, or one that says nothing. It returns nil when the grant may be used. A growth
// whose outcome stays open is given out again by BeginExpand; a grant of a server that is
// gone is none (S1).
func (c *Core) EndExpand(e Expand, unknown bool, err error) error {
	open := c.expands[e.Medium]
	switch {
	case open == nil || open.Sequence != e.Sequence:
		if err == nil {
			err = fmt.Errorf("%w: the server that granted the region is gone", base.ErrStale)
		}
		return err
	case err != nil && (unknown || !growthRefused(err)):
		open.lost = true
		return err
	}
	delete(c.expands, e.Medium)
	c.ledger.end(e.Sequence)
	return err
}

// LostExpand reports whether a growth of a medium waits to be asked for again, and how
// large it is.
func (c *Core) LostExpand(m base.Medium) (bytes uint64, lost bool) {
	if e := c.expands[m]; e != nil && e.lost {
		return e.Bytes, true
	}
	return 0, false
}

// dropExpands ends the growths at a server that is gone: no other one has their regions.
func (c *Core) dropExpands() {
	for m, e := range c.expands {
		c.ledger.end(e.Sequence)
		delete(c.expands, m)
	}
}

// gaveCount is how many regions are remembered that were given up: those of which a server
// that is started again can believe that they are granted still, because the resource
// manager had the hold on record when it was asked. Growths that fail and regions that
// drain while their writer lives are rare.
const gaveCount = 64

// gave remembers an own shared region that was given up.
func (c *Core) gave(info RegionInfo) {
	if info.Private() || slices.ContainsFunc(c.given, func(r RegionInfo) bool { return r.ID == info.ID }) {
		return
	}
	if len(c.given) == gaveCount {
		c.given = slices.Delete(c.given, 0, 1)
	}
	c.given = append(c.given, info)
}

// giveAgain tells another server of all that was given up: to the one before it was said,
// and that one may not have passed it on.
func (c *Core) giveAgain() {
	for _, r := range c.given {
		c.GiveBack(r)
	}
}

// back is a region to give back.
type back struct {
	RegionInfo
	asked bool // the server is being told
}

// GiveBack queues an own region that was granted and is not used: the server is told
// until it has heard (X1). Nothing may be written there any more.
func (c *Core) GiveBack(info RegionInfo) {
	if !slices.ContainsFunc(c.returns, func(r back) bool { return r.ID == info.ID }) {
		c.returns = append(c.returns, back{RegionInfo: info})
	}
}

// Return is a region that the server is to have back.
type Return struct {
	Sequence   base.Sequence
	PoolNumber uint32
	Region     base.RegionID
	epoch      base.Epoch
}

// BeginReturn takes the next region to give back, for the server of an epoch. false: there
// is none, or not now, or that epoch is over: what its server hears is not what the next one
// hears, which may be the one that has the region.
func (c *Core) BeginReturn(epoch base.Epoch) (Return, bool) {
	i := slices.IndexFunc(c.returns, func(r back) bool { return !r.asked })
	if c.phase != Live || epoch != c.epoch || i < 0 {
		return Return{}, false
	}
	seq, err := c.ledger.begin()
	if err != nil {
		return Return{}, false
	}
	r := &c.returns[i]
	r.asked = true
	return Return{Sequence: seq, PoolNumber: r.PoolNumber, Region: r.ID, epoch: c.epoch}, true
}

// EndReturn takes the answer; unknown as for EndExpand. A server that does not know the
// region as ours has it back; with any other error it is told again, as another operation:
// returning a region twice changes nothing. So it is when the session was opened again
// since: the answer may be of a server that is fenced, or did not know yet what it has. It
// reports whether the server has it.
func (c *Core) EndReturn(r Return, unknown bool, err error) bool {
	c.ledger.end(r.Sequence)
	code := base.CodeOf(err)
	heard := r.epoch == c.epoch && (err == nil || !unknown && (code == base.CodeNotFound || code == base.CodeDenied))
	if i := slices.IndexFunc(c.returns, func(x back) bool { return x.ID == r.Region }); i >= 0 {
		if c.returns[i].asked = false; heard {
			c.gave(c.returns[i].RegionInfo)
			c.returns = slices.Delete(c.returns, i, i+1)
		}
	}
	return heard
}
