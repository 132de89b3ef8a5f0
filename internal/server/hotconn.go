package server

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
)

// hotScratch is what a request is decoded into and its answer made in. It lives as
// long as its connection.
type hotScratch struct {
	probe    hot.ProbeRequest
	acquire  hot.AcquireRequest
	release  hot.ReleaseRequest
	commit   hot.CommitRequest
	resolve  hot.ResolveRequest
	relist   hot.RelistRequest
	requests hot.RequestsRequest
	rows     []byte
	effects  []directory.Effect
}

// dispatch carries out one request and appends the whole answer to out. An error
// means that the peer broke the protocol and is cut off; a refusal is an answer.
func (c *hotConn) dispatch(out []byte, h hot.Header, payload []byte) ([]byte, error) {
	s, x := c.server, &c.scratch
	var err error
	var rows int
	x.rows = x.rows[:0]
	switch h.Op {
	case hot.OpProbe:
		if err := hot.DecodeProbe(payload, &x.probe); err != nil {
			return out, err
		}
		rows = x.probe.Keys.Len()
		out, err = c.probe(out, h.RequestID)
	case hot.OpAcquire:
		if err := hot.DecodeAcquire(payload, &x.acquire); err != nil {
			return out, err
		}
		rows = x.acquire.Keys.Len()
		out, err = c.acquire(out, h.RequestID)
	case hot.OpRelease:
		if err := hot.DecodeRelease(payload, &x.release); err != nil {
			return out, err
		}
		rows = x.release.Rows.Len()
		out, err = c.release(out, h.RequestID)
	case hot.OpCommit:
		if err := hot.DecodeCommit(payload, &x.commit); err != nil {
			return out, err
		}
		rows = x.commit.Rows.Len()
		out, err = c.commit(out, h.RequestID)
	case hot.OpResolve:
		if err := hot.DecodeResolve(payload, &x.resolve); err != nil {
			return out, err
		}
		rows = 1
		out, err = c.resolve(out, h.RequestID)
	case hot.OpRelist:
		if err := hot.DecodeRelist(payload, &x.relist); err != nil {
			return out, err
		}
		rows = x.relist.Pages.Len() + x.relist.Leases.Len()
		out, err = c.relist(out, h.RequestID)
	case hot.OpRequests:
		if err := hot.DecodeRequests(payload, &x.requests); err != nil {
			return out, err
		}
		rows = x.requests.Count()
		out, err = c.requests(out, h.RequestID)
	default:
		return out, fmt.Errorf("%w: operation %s inside a session", base.ErrInvalid, h.Op)
	}
	s.metrics.hotRequests[h.Op].Inc()
	s.metrics.hotKeys[h.Op].Add(float64(rows))
	if err != nil {
		s.metrics.hotErrors.WithLabelValues(base.CodeOf(err).String()).Inc()
		return hot.AppendError(out[:0], h.Op, h.RequestID, err), nil
	}
	return out, nil
}

// lock takes the directory's lock and remembers it for the case of a panic.
func (c *hotConn) lock() {
	c.server.dir.Lock()
	c.holds = holdsWrite
}

// unlock takes the effects, gives the write lock up and carries them out.
func (c *hotConn) unlock() {
	s, x := c.server, &c.scratch
	x.effects = s.dir.AppendEffects(x.effects[:0])
	c.holds = holdsNothing
	s.dir.Unlock()
	if len(x.effects) > 0 {
		s.perform(x.effects)
		clear(x.effects)
	}
}

func (c *hotConn) probe(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var leading uint32
	var err error
	if x.probe.RequestID == 0 {
		s.dir.RLock()
		c.holds = holdsRead
		x.rows, leading, err = s.dir.Probe(now, who, &x.probe, x.rows)
		c.holds = holdsNothing
		s.dir.RUnlock()
	} else {
		c.lock()
		x.rows, leading, err = s.dir.ProbeKeep(now, who, &x.probe, x.rows)
		c.unlock()
	}
	if err != nil {
		return out, err
	}
	return hot.AppendProbeAnswer(out, id, &hot.ProbeAnswer{LeadingHits: leading, Verdicts: x.rows}), nil
}

func (c *hotConn) acquire(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var manifests uint32
	var err error
	start := len(out)
	out = hot.BeginAcquireAnswer(out, id)
	c.lock()
	out, manifests, err = s.dir.Acquire(now, who, &x.acquire, out)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.FinishAcquireAnswer(out, start, manifests), nil
}

func (c *hotConn) release(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var err error
	c.lock()
	x.rows, err = s.dir.Release(now, who, &x.release, x.rows)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.AppendReleaseAnswer(out, id, &hot.ReleaseAnswer{Held: x.rows}), nil
}

func (c *hotConn) commit(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var err error
	c.lock()
	x.rows, err = s.dir.Commit(now, who, &x.commit, x.rows)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.AppendCommitAnswer(out, id, x.rows), nil
}

func (c *hotConn) resolve(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var outcome hot.Outcome
	var err error
	c.lock()
	outcome, x.rows, err = s.dir.Resolve(now, who, &x.resolve, x.rows)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.AppendResolveAnswer(out, id, &hot.ResolveAnswer{Outcome: outcome, Results: x.rows}), nil
}

func (c *hotConn) relist(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	var err error
	c.lock()
	x.rows, err = s.dir.Relist(now, who, &x.relist, x.rows)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.AppendRelistAnswer(out, id, &hot.RelistAnswer{Results: x.rows}), nil
}

func (c *hotConn) requests(out []byte, id uint64) ([]byte, error) {
	s, x, who := c.server, &c.scratch, c.session.caller()
	if err := s.serving(); err != nil {
		return out, err
	}
	now := bootTime()
	c.lock()
	known, err := s.dir.Requests(now, who, &x.requests)
	c.unlock()
	if err != nil {
		return out, err
	}
	return hot.AppendRequestsAnswer(out, id, &hot.RequestsAnswer{Known: known}), nil
}
