package rm

import (
	"cmp"
	"context"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// The calls of agents: watchers of nodes without a resource manager. What each may say
// is in docs/rfcs/0009-node-watcher.md.

func (x *ids) agent(agent []byte, epoch uint32, token []byte) core.AgentClaim {
	return core.AgentClaim{Agent: x.must("agent_id", agent), Epoch: epoch, Token: token}
}

func (x *ids) process(field string, p *maruv1.ProcessID) core.ProcessID {
	return core.ProcessID{
		PID: p.GetPid(), Namespace: p.GetPidNamespace(), StartTicks: p.GetStartTicks(), Boot: x.must(field+".boot_id", p.GetBootId()),
	}
}

func (s *service) StartAgent(ctx context.Context, req *maruv1.StartAgentRequest) (*maruv1.StartAgentResponse, error) {
	var x ids
	in := core.StartAgent{
		Agent: x.must("agent_id", req.GetAgentId()), Node: x.must("node_id", req.GetNodeId()), Boot: x.must("boot_id", req.GetBootId()),
		Name: req.GetName(), Secret: x.secret(req.GetAgentSecret()),
	}
	if x.err != nil {
		return nil, x.err
	}
	var out core.AgentStarted
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { out, err = s.core.StartAgent(b, nowMS(), in); return err }})
	if err != nil {
		return nil, err
	}
	s.log.Info("agent started", "agent", in.Agent, "name", in.Name, "node", in.Node, "boot", in.Boot, "epoch", out.Epoch, "ended_by_reboot", out.Ended)
	return &maruv1.StartAgentResponse{Epoch: out.Epoch, AgentToken: out.Token[:], EndedSessionCount: uint32(out.Ended)}, nil
}

func (s *service) VouchSession(ctx context.Context, req *maruv1.VouchSessionRequest) (*maruv1.VouchSessionResponse, error) {
	var x ids
	in := core.Vouch{
		AgentClaim: x.agent(req.GetAgentId(), req.GetEpoch(), req.GetAgentToken()), Session: x.must("session_id", req.GetSessionId()),
		Process: x.process("process", req.GetProcess()), Secret: x.session(req.GetSessionSecret()), Server: x.may("server_id", req.GetServerId()),
		Sequence: req.GetSequence(),
	}
	if x.err != nil {
		return nil, x.err
	}
	err := s.do(ctx, &job{run: func(b *core.Batch) error { return s.core.VouchSession(b, nowMS(), in) }})
	if err != nil {
		return nil, err
	}
	return &maruv1.VouchSessionResponse{}, nil
}

func (s *service) ReportProcesses(ctx context.Context, req *maruv1.ReportProcessesRequest) (*maruv1.ReportProcessesResponse, error) {
	var x ids
	in := core.Report{AgentClaim: x.agent(req.GetAgentId(), req.GetEpoch(), req.GetAgentToken()), Unwatched: map[core.ProcessID]string{}, Sequence: req.GetSequence()}
	for _, e := range req.GetEnded() {
		p := core.EndedProcess{Process: x.process("ended.process", e.GetProcess())}
		for _, h := range e.GetWrittenBack() {
			p.WrittenBack = append(p.WrittenBack, base.RegionID(h.GetRegionId()))
		}
		in.Ended = append(in.Ended, p)
	}
	for _, u := range req.GetUnwatched() {
		in.Unwatched[x.process("unwatched.process", u.GetProcess())] = u.GetReason()
	}
	if x.err != nil {
		return nil, x.err
	}
	var out [][]core.Place
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { out, err = s.core.ReportProcesses(b, nowMS(), in); return err }})
	if err != nil {
		return nil, err
	}
	answer := &maruv1.ReportProcessesResponse{}
	for _, places := range out {
		a := &maruv1.EndedAnswer{Done: len(places) == 0}
		for _, p := range places {
			a.WriteBack = append(a.WriteBack, accessOut(p))
		}
		answer.Ended = append(answer.Ended, a)
	}
	return answer, nil
}

func (s *service) ListAgents(ctx context.Context, _ *maruv1.ListAgentsRequest) (*maruv1.ListAgentsResponse, error) {
	var list []core.AgentInfo
	err := s.do(ctx, &job{kind: jobGlance, run: func(*core.Batch) error { list = s.core.ListAgents(nowMS()); return nil }})
	if err != nil {
		return nil, err
	}
	out := &maruv1.ListAgentsResponse{}
	for _, a := range list {
		out.Agents = append(out.Agents, &maruv1.AgentInfo{
			AgentId: a.ID[:], Name: a.Name, NodeId: a.Node[:], BootId: a.Boot[:], Epoch: a.Epoch, StartedUnixMs: a.StartedMS,
			HeardUnixMs: a.HeardMS, Away: a.Away, SessionCount: uint64(a.SessionCount),
		})
	}
	return out, nil
}

func (s *service) DropAgent(ctx context.Context, req *maruv1.DropAgentRequest) (*maruv1.DropAgentResponse, error) {
	var x ids
	id := base.AgentID(x.must("agent_id", req.GetAgentId()))
	if err := cmp.Or(x.err, s.operator(ctx, req.GetConfirm(), "drop-agent")); err != nil {
		return nil, err
	}
	var n int
	err := s.do(ctx, &job{run: func(b *core.Batch) (err error) { n, err = s.core.DropAgent(b, id); return err }})
	if err != nil {
		return nil, err
	}
	s.log.Warn("operator dropped an agent", "agent", id, "sessions_not_provable_now", n)
	return &maruv1.DropAgentResponse{Sessions: uint32(n)}, nil
}

func (s *service) CheckSession(ctx context.Context, req *maruv1.CheckSessionRequest) (*maruv1.CheckSessionResponse, error) {
	var x ids
	id, secret := base.SessionID(x.must("session_id", req.GetSessionId())), x.session(req.GetSessionSecret())
	if x.err != nil {
		return nil, x.err
	}
	out := &maruv1.CheckSessionResponse{}
	err := s.do(ctx, &job{run: func(*core.Batch) error { out.Fits = s.core.KnowsSession(id, secret); return nil }})
	if err != nil {
		return nil, err
	}
	return out, nil
}
