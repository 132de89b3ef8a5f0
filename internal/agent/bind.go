package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rpc"
)

// protocolVersion is what this program speaks, to clients and to the resource manager.
const protocolVersion = 1

// sessionSecretBytes is the size of a session's secret.
const sessionSecretBytes = 32

// service answers the processes of this node.
type service struct {
	maruv1.UnimplementedNodeWatcherServer
	*Agent
}

func checkVersion(v *maruv1.ProtocolVersion) error {
	if v != nil && (v.GetMin() > protocolVersion || v.GetMax() < protocolVersion) {
		return fmt.Errorf("%w: the peer speaks protocol versions %d to %d, this agent speaks %d", base.ErrUnsupported, v.GetMin(), v.GetMax(), protocolVersion)
	}
	return nil
}

func (s *service) DescribeWatcher(_ context.Context, req *maruv1.DescribeWatcherRequest) (*maruv1.DescribeWatcherResponse, error) {
	if err := checkVersion(req.GetVersion()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &maruv1.DescribeWatcherResponse{
		Version: protocolVersion, AgentId: s.state.agent[:], NodeId: s.identity.Node[:], BootId: s.identity.Boot[:], ProgramVersion: s.cfg.Version,
		Connected: s.mu.api != nil,
	}
	if s.mu.manager != (base.StoreID{}) {
		out.StoreId = append([]byte(nil), s.mu.manager[:]...)
	}
	return out, nil
}

// BindSession follows the order of the package comment. Errors: ErrInvalid, ErrDenied (the
// session is another process's), ErrMismatch (of another resource manager), ErrBusy,
// ErrLimit, ErrUnavailable (the resource manager is away), ErrClosed, ErrUnsupported.
func (s *service) BindSession(ctx context.Context, req *maruv1.BindSessionRequest) (*maruv1.BindSessionResponse, error) {
	answer, err := s.bind(ctx, req)
	if err != nil {
		s.metrics.refused.Inc()
		s.limited.Warn("bind", "a session was not bound: its end is not provable until it is", "session", fmt.Sprintf("%x", req.GetSessionId()), "error", err)
	}
	return answer, err
}

func (s *service) bind(ctx context.Context, req *maruv1.BindSessionRequest) (*maruv1.BindSessionResponse, error) {
	if err := checkVersion(req.GetVersion()); err != nil {
		return nil, err
	}
	raw, err := base.IDFromBytes("session_id", req.GetSessionId())
	id := base.SessionID(raw)
	switch {
	case err != nil:
		return nil, err
	case id == (base.SessionID{}):
		return nil, fmt.Errorf("%w: session_id is zero", base.ErrInvalid)
	case len(req.GetSessionSecret()) != sessionSecretBytes:
		return nil, fmt.Errorf("%w: session_secret has %d bytes, must have %d", base.ErrInvalid, len(req.GetSessionSecret()), sessionSecretBytes)
	}
	p := peer.FromContext(ctx)
	if p == nil {
		return nil, fmt.Errorf("%w: only the Unix socket shows a process", base.ErrUnsupported)
	}
	if !p.Provable() {
		return &maruv1.BindSessionResponse{Reason: p.Unprovable, NodeId: s.identity.Node[:]}, nil
	}
	if err := s.begin(id, p.Process, req.GetStoreId()); err != nil {
		return nil, err
	}
	defer s.endBinding(id)
	fresh, err := s.record(id, p)
	if err != nil {
		return nil, err
	}
	if err := s.vouch(ctx, id, p.Process, req); err != nil {
		err = fmt.Errorf("binding session %s at the resource manager: %w", id, err)
		if !fresh || rpc.OutcomeUnknown(err) || errors.Is(err, base.ErrUnavailable) || errors.Is(err, base.ErrBusy) {
			return nil, err // it may be bound, now or since before: its end is reported
		}
		return nil, errors.Join(err, s.forget(id))
	}
	return &maruv1.BindSessionResponse{Provable: true, NodeId: s.identity.Node[:]}, nil
}

// vouchTries bounds how often a call that a report overtook is made again.
const vouchTries = 5

// vouch makes the call to the resource manager. Errors: ErrClosed (the process ended
// meanwhile), ErrBusy, ErrUnavailable, and those of VouchSession.
func (s *service) vouch(ctx context.Context, id base.SessionID, p peer.Process, bind *maruv1.BindSessionRequest) (err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.CallTimeout)
	defer cancel()
	for range vouchTries {
		// The process lives when the number is drawn: a report of its end has a higher one.
		s.mu.Lock()
		api, x := s.mu.api, s.mu.processes[p]
		s.mu.sequence++
		req := &maruv1.VouchSessionRequest{
			AgentId: s.state.agent[:], Epoch: s.mu.epoch, AgentToken: s.mu.token, SessionId: id[:], SessionSecret: bind.GetSessionSecret(),
			ServerId: bind.GetServerId(), Process: processOut(p), Sequence: s.mu.sequence,
		}
		s.mu.Unlock()
		switch {
		case x == nil || x.state != isWatched:
			return fmt.Errorf("%w: %s has ended", base.ErrClosed, p)
		case api == nil:
			return fmt.Errorf("%w: the resource manager went away", base.ErrUnavailable)
		}
		if _, err = api.VouchSession(ctx, req); !errors.Is(err, base.ErrBusy) {
			return err
		}
	}
	return err
}

// begin refuses what need not be tried.
func (s *service) begin(id base.SessionID, p peer.Process, store []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.api == nil {
		return fmt.Errorf("%w: %s", base.ErrUnavailable, s.mu.reason)
	}
	if len(store) > 0 && string(store) != string(s.mu.manager[:]) {
		return fmt.Errorf("%w: this agent reports to the resource manager with store %s, the session holds at one with store %x", base.ErrMismatch, s.mu.manager, store)
	}
	if _, ok := s.mu.binding[id]; ok {
		return fmt.Errorf("%w: session %s is being bound", base.ErrBusy, id)
	}
	if old, ok := s.mu.sessions[id]; ok && old != p && s.mu.processes[old].state != isLost {
		return fmt.Errorf("%w: session %s belongs to another process than %s; a handler opened after fork or in another process is a new session", base.ErrDenied, id, p)
	} else if !ok && len(s.mu.sessions) >= s.cfg.MaxSessionCount {
		return fmt.Errorf("%w: %d sessions are on record, the setting max_session_count allows no more", base.ErrLimit, len(s.mu.sessions))
	}
	s.mu.binding[id] = struct{}{}
	return nil
}

func (s *service) endBinding(id base.SessionID) {
	s.mu.Lock()
	delete(s.mu.binding, id)
	s.mu.Unlock()
}

// record makes a session durable, and then watches its process. fresh tells that it was
// not on record before.
func (s *service) record(id base.SessionID, p *peer.Peer) (fresh bool, err error) {
	s.mu.Lock()
	old, known := s.mu.sessions[id]
	s.mu.Unlock()
	if !known || old != p.Process {
		if err := s.commit(putSession(rowOf(id, p.Process, time.Now().UnixMilli()))); err != nil {
			return false, err
		}
		s.mu.Lock()
		s.removeLocked(id)
		s.addLocked(id, p.Process)
		s.mu.Unlock()
	}
	if err := s.ends.Watch(p); err != nil {
		err = fmt.Errorf("watching %s: %w", p, err)
		if !known {
			err = errors.Join(err, s.forget(id))
		}
		return false, err
	}
	s.mu.Lock()
	if x := s.mu.processes[p.Process]; x != nil && x.state == isLost {
		x.state, x.lost = isWatched, ""
	}
	s.mu.Unlock()
	return !known, nil
}

// forget drops a session that is bound nowhere.
func (s *service) forget(id base.SessionID) error {
	s.mu.Lock()
	p, last := s.removeLocked(id)
	s.mu.Unlock()
	if last {
		s.ends.Forget(p)
	}
	return s.commit(dropSession(id))
}

func processOut(p peer.Process) *maruv1.ProcessID {
	return &maruv1.ProcessID{Pid: int64(p.PID), PidNamespace: p.PIDNamespace, StartTicks: p.StartTicks, BootId: p.BootID[:]}
}
