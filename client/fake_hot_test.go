package client

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func (f *fake) serveHot(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.mu.conns[conn] = struct{}{}
		f.mu.Unlock()
		go func() {
			f.serveConn(conn)
			_ = conn.Close()
			f.mu.Lock()
			delete(f.mu.conns, conn)
			f.mu.Unlock()
		}()
	}
}

func (f *fake) serveConn(conn net.Conn) {
	f.mu.Lock()
	ch := hot.Challenge{ServerEpoch: base.ServerEpoch(f.mu.serverEpoch)}
	f.mu.Unlock()
	_, _ = rand.Read(ch.Nonce[:])
	if _, err := conn.Write(hot.AppendChallenge(nil, &ch)); err != nil {
		return
	}
	r := hot.NewReader(conn)
	h, payload, err := r.Next()
	if err != nil || h.Op != hot.OpHello {
		return
	}
	var hello hot.Hello
	if hot.DecodeHello(payload, &hello) != nil {
		return
	}
	f.mu.Lock()
	s := f.mu.sessions[hello.Session]
	f.mu.Unlock()
	if s == nil || s.epoch != uint32(hello.Epoch) || hot.HelloMAC(s.secret, &ch, &hello) != hello.MAC {
		_, _ = conn.Write(hot.AppendError(nil, hot.OpHello, h.RequestID, fmt.Errorf("%w: hello", base.ErrStale)))
		return
	}
	w := hot.Welcome{Namespace: 7, MAC: hot.WelcomeMAC(s.secret, &ch, &hello)}
	if _, err := conn.Write(hot.AppendWelcome(nil, h.RequestID, &w)); err != nil {
		return
	}
	for {
		h, payload, err := r.Next()
		if err != nil {
			return
		}
		for f.hang.Load() || h.Op == hot.OpCommit && f.hangCommit.Load() {
			time.Sleep(time.Millisecond)
		}
		out, err := f.answer(s, h, payload)
		if err != nil {
			out = hot.AppendError(nil, h.Op, h.RequestID, err)
		}
		if f.drop[h.Op].Load() > 0 && f.drop[h.Op].Add(-1) >= 0 {
			if f.endOnDrop.Load() {
				f.mu.Lock()
				s.ended = true
				f.mu.Unlock()
			}
			return
		}
		if _, err := conn.Write(out); err != nil {
			return
		}
	}
}

func (f *fake) answer(s *fakeSession, h hot.Header, payload []byte) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.calls[h.Op.String()]++
	if s.ended {
		return nil, fmt.Errorf("%w: epoch over", base.ErrStale)
	}
	switch h.Op {
	case hot.OpProbe:
		var m hot.ProbeRequest
		if err := hot.DecodeProbe(payload, &m); err != nil {
			return nil, err
		}
		f.mu.asked = append(f.mu.asked, fmt.Sprintf("probe %d", m.RequestID))
		var a hot.ProbeAnswer
		leading := true
		for i := range m.Keys.Len() {
			v := hot.Miss
			if o := f.mu.objects[m.Keys.At(i)]; o != nil && (len(m.Targets) > 0 || f.visible(s, o)) {
				v = hot.MakeHit(base.MediumCXL)
			}
			for t := 0; t < len(m.Targets); t += base.IDBytes {
				if f.mu.hides[base.SessionID(m.Targets[t:t+base.IDBytes])][m.Keys.At(i)] {
					v = hot.Miss
				}
			}
			leading = leading && v.Status() == hot.Hit
			if leading {
				a.LeadingHits++
			}
			a.Verdicts = append(a.Verdicts, byte(v))
		}
		return hot.AppendProbeAnswer(nil, h.RequestID, &a), nil
	case hot.OpCommit:
		return f.commit(s, h, payload)
	case hot.OpResolve:
		var m hot.ResolveRequest
		if err := hot.DecodeResolve(payload, &m); err != nil {
			return nil, err
		}
		var a hot.ResolveAnswer
		switch res, ok := s.results[m.Target]; {
		case uint64(m.TargetServerEpoch) != f.mu.serverEpoch:
			a.Outcome = hot.OutcomeUnknown
		case ok:
			a.Outcome = hot.OutcomeCommitted
			for _, r := range res {
				a.Results = hot.AppendCommitResult(a.Results, r)
			}
		default:
			a.Outcome = hot.OutcomeAborted
			s.closed[m.Target] = true
		}
		return hot.AppendResolveAnswer(nil, h.RequestID, &a), nil
	case hot.OpAcquire:
		var m hot.AcquireRequest
		if err := hot.DecodeAcquire(payload, &m); err != nil {
			return nil, err
		}
		var a hot.AcquireAnswer
		if s.answers[m.Sequence] != nil { // the same operation again
			return hot.AppendAcquireAnswer(nil, h.RequestID, s.answers[m.Sequence]), nil
		}
		leased := make([]*fakeObject, m.Keys.Len())
		for i := range m.Keys.Len() {
			row := hot.AcquireRow{}
			o := f.mu.objects[m.Keys.At(i)]
			if o != nil && f.visible(s, o) {
				row = hot.AcquireRow{
					Verdict: hot.MakeHit(base.MediumCXL), Pool: o.row.Pool, Region: o.row.Region, Offset: o.row.Offset,
					Length: o.row.Length, Generation: o.row.Generation, Checksum: o.row.Checksum, Order: o.order,
				}
				o.leases++
				leased[i] = o
			}
			a.Rows = hot.AppendAcquireRow(a.Rows, &row)
			if o == nil && m.Mode == hot.ModePrefix {
				break
			}
		}
		s.acquires[m.Sequence] = leased
		s.answers[m.Sequence] = &a
		return hot.AppendAcquireAnswer(nil, h.RequestID, &a), nil
	case hot.OpRelease:
		var m hot.ReleaseRequest
		if err := hot.DecodeRelease(payload, &m); err != nil {
			return nil, err
		}
		var a hot.ReleaseAnswer
		for i := range m.Rows.Len() {
			row := m.Rows.At(i)
			held := byte(1)
			list := s.acquires[row.Acquire]
			last := uint64(row.First) + uint64(row.Count)
			if row.Count == hot.ReleaseAll {
				last = uint64(len(list))
			}
			for k := uint64(row.First); k < last; k++ {
				if k >= uint64(len(list)) || list[k] == nil {
					held = 0
					continue
				}
				list[k].leases--
				if list[k].leases < 0 {
					f.t.Error("a lease was released twice")
				}
				list[k] = nil
			}
			a.Held = append(a.Held, held)
		}
		return hot.AppendReleaseAnswer(nil, h.RequestID, &a), nil
	case hot.OpRequests:
		var m hot.RequestsRequest
		if err := hot.DecodeRequests(payload, &m); err != nil {
			return nil, err
		}
		for i := 0; i < len(m.IDs); i += 8 {
			f.mu.asked = append(f.mu.asked, fmt.Sprintf("%d %d", m.Action, binary.LittleEndian.Uint64(m.IDs[i:])))
		}
		return hot.AppendRequestsAnswer(nil, h.RequestID, &hot.RequestsAnswer{Known: uint32(m.Count())}), nil
	case hot.OpRelist:
		var m hot.RelistRequest
		if err := hot.DecodeRelist(payload, &m); err != nil {
			return nil, err
		}
		var a hot.RelistAnswer
		for i := range m.Pages.Len() {
			f.mu.relisted = append(f.mu.relisted, m.Pages.At(i))
			a.Results = append(a.Results, byte(f.mu.relistReply))
		}
		for i := range m.Leases.Len() {
			f.mu.relistLease = append(f.mu.relistLease, m.Leases.At(i))
		}
		return hot.AppendRelistAnswer(nil, h.RequestID, &a), nil
	}
	return nil, fmt.Errorf("%w: %s", base.ErrUnsupported, h.Op)
}

func (f *fake) visible(s *fakeSession, o *fakeObject) bool {
	if o.row.Region >= base.FirstPrivateRegion {
		return o.owner == s.id
	}
	return f.mu.proved[s.id]
}

func (f *fake) commit(s *fakeSession, h hot.Header, payload []byte) ([]byte, error) {
	var m hot.CommitRequest
	if err := hot.DecodeCommit(payload, &m); err != nil {
		return nil, err
	}
	res, again := s.results[m.Sequence]
	if !again && s.closed[m.Sequence] {
		return nil, fmt.Errorf("%w: resolved", base.ErrAborted)
	}
	if !again {
		for i := range m.Rows.Len() {
			row := m.Rows.At(i)
			if o := f.mu.objects[row.Key]; o != nil && f.visible(s, o) {
				res = append(res, hot.CommitResult{Code: base.CodeAlreadyStored, Order: o.order})
				continue
			}
			f.mu.order++
			order, _ := base.MakeCommitOrder(1, f.mu.order)
			f.mu.objects[row.Key] = &fakeObject{row: row, order: order, owner: s.id}
			res = append(res, hot.CommitResult{Code: base.CodeOK, Order: order})
		}
		s.results[m.Sequence] = res
	}
	var packed hot.CommitResults
	for _, r := range res {
		packed = hot.AppendCommitResult(packed, r)
	}
	return hot.AppendCommitAnswer(nil, h.RequestID, packed), nil
}
