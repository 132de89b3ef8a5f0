package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/store"
)

// Waits between two tries to reach the resource manager, or to report what it did not
// take.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
)

// maxReportCount bounds the processes of one report; the rest follows at once.
const maxReportCount = 1024

// run keeps the connection to the resource manager until Close, or until another start of
// this agent fences it.
func (a *Agent) run() {
	wait, logged := minBackoff, ""
	for a.ctx.Err() == nil {
		began := time.Now()
		err := a.attempt(a.ctx)
		a.disconnected(err)
		if a.ctx.Err() != nil {
			return
		}
		if errors.Is(err, base.ErrFenced) {
			a.fail(fmt.Errorf("this agent was started elsewhere: %w", err))
			return
		}
		if time.Since(began) > 10*maxBackoff {
			wait, logged = minBackoff, ""
		}
		if text := err.Error(); text != logged {
			a.log.Warn("no resource manager: mappers are watched on, ends are reported when it is back, and nobody new is vouched for", "rm", a.cfg.RMAddress, "error", err)
			logged = text
		}
		if !a.sleep(wait) {
			return
		}
		wait = min(2*wait, maxBackoff)
	}
}

func (a *Agent) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-a.ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (a *Agent) disconnected(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.api, a.mu.reported = nil, false
	a.mu.unproven = errors.Is(err, base.ErrUnproven)
	if err != nil {
		a.mu.reason = "the resource manager at " + a.cfg.RMAddress + " is away: " + err.Error()
		if a.mu.unproven {
			a.mu.reason = "the resource manager at " + a.cfg.RMAddress + " does not take this for the agent of its node: " + err.Error()
		}
	}
}

// attempt lives as long as one connection does.
func (a *Agent) attempt(ctx context.Context) error {
	conn, api, manager, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := a.isOurs(manager); err != nil {
		return err
	}
	if err := a.start(ctx, api); err != nil {
		return err
	}
	a.mu.Lock()
	a.mu.api, a.mu.reason, a.mu.unproven = api, "", false
	a.mu.Unlock()
	return a.report(ctx, api)
}

func (a *Agent) connect(ctx context.Context) (*grpc.ClientConn, maruv1.ResourceManagerClient, base.StoreID, error) {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.CallTimeout)
	defer cancel()
	conn, err := rpc.Dial(ctx, a.cfg.RMAddress)
	if err != nil {
		return nil, nil, base.StoreID{}, err
	}
	api := maruv1.NewResourceManagerClient(conn)
	d, err := api.Describe(ctx, &maruv1.DescribeRequest{Version: &maruv1.ProtocolVersion{Min: protocolVersion, Max: protocolVersion}})
	var id [base.IDBytes]byte
	if err == nil {
		id, err = base.IDFromBytes("store_id", d.GetStoreId())
	}
	if err != nil {
		_ = conn.Close()
		return nil, nil, base.StoreID{}, err
	}
	return conn, api, id, nil
}

// isOurs keeps the sessions on record to the resource manager that they are bound at: an
// end that another one acknowledged would be lost to it.
func (a *Agent) isOurs(manager base.StoreID) error {
	a.mu.Lock()
	known, count := a.mu.manager, len(a.mu.sessions)
	a.mu.Unlock()
	if known == manager {
		return nil
	}
	if known != (base.StoreID{}) && count > 0 {
		return fmt.Errorf("%w: the resource manager at %s has store %s, the %d sessions on record are bound at the one with store %s: bring that one back, or, "+
			"when it is given up, move the state directory %s away", base.ErrForeign, a.cfg.RMAddress, manager, count, known, a.cfg.StateDir)
	}
	if err := a.commit(store.Change{Bucket: bucketManager, Key: managerKey, Value: encode(managerRow{manager})}); err != nil {
		return err
	}
	a.mu.Lock()
	a.mu.manager, a.mu.epoch, a.mu.token, a.mu.sequence = manager, 0, nil, 0
	a.mu.Unlock()
	return nil
}

// start becomes the agent of this node, once a life: a lost answer costs one number.
func (a *Agent) start(ctx context.Context, api maruv1.ResourceManagerClient) error {
	a.mu.Lock()
	started := a.mu.epoch != 0
	a.mu.Unlock()
	if started {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.CallTimeout)
	defer cancel()
	answer, err := api.StartAgent(ctx, &maruv1.StartAgentRequest{
		AgentId: a.state.agent[:], NodeId: a.identity.Node[:], BootId: a.identity.Boot[:], Name: a.cfg.Name, AgentSecret: a.state.secret.Bytes(),
	})
	if err != nil {
		return fmt.Errorf("becoming the agent of node %s: %w", a.identity.Node, err)
	}
	if answer.GetEpoch() == 0 || len(answer.GetAgentToken()) == 0 {
		return fmt.Errorf("%w: the resource manager answered epoch %d and a token of %d bytes", base.ErrInvalid, answer.GetEpoch(), len(answer.GetAgentToken()))
	}
	a.mu.Lock()
	a.mu.epoch, a.mu.token = answer.GetEpoch(), answer.GetAgentToken()
	a.mu.Unlock()
	a.log.Info("agent at the resource manager", "rm", a.cfg.RMAddress, "epoch", answer.GetEpoch(), "sessions_ended_by_reboot", answer.GetEndedSessionCount())
	return nil
}

// report tells what is to be told, at once, and every interval that this agent lives.
func (a *Agent) report(ctx context.Context, api maruv1.ResourceManagerClient) error {
	var wait time.Duration
	for {
		req, ended := a.pending()
		callCtx, cancel := context.WithTimeout(ctx, a.cfg.CallTimeout)
		answer, err := api.ReportProcesses(callCtx, req)
		cancel()
		if errors.Is(err, base.ErrNotFound) {
			// An operator dropped this agent while it ran. It starts anew, and its mappers
			// come by themselves. Its numbers go on: the new start may have the old epoch and
			// token, and a VouchSession of before that is under way must stay below its reports.
			a.mu.Lock()
			a.mu.epoch, a.mu.token = 0, nil
			a.mu.Unlock()
		}
		if err != nil {
			return fmt.Errorf("reporting: %w", err)
		}
		if len(answer.GetEnded()) != len(ended) {
			return fmt.Errorf("%w: %d processes were reported, %d answered", base.ErrInvalid, len(ended), len(answer.GetEnded()))
		}
		rest, err := a.acknowledged(answer, ended)
		if err != nil {
			return err
		}
		switch {
		case rest == allDone:
			wait = a.cfg.ReportInterval
		case rest == moreNow:
			continue
		default: // something cannot be written back now
			wait = min(maxBackoff, a.cfg.ReportInterval)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-a.kick:
		case <-t.C:
		}
		t.Stop()
	}
}

// pending makes the next report. Lost processes are in every one, since the resource
// manager keeps them in memory only, and a connection comes back without a word when it
// was restarted. Of more than one report holds, a map's order picks others each time.
func (a *Agent) pending() (req *maruv1.ReportProcessesRequest, ended []peer.Process) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.sequence++
	req = &maruv1.ReportProcessesRequest{AgentId: a.state.agent[:], Epoch: a.mu.epoch, AgentToken: a.mu.token, Sequence: a.mu.sequence}
	for p, x := range a.mu.processes {
		switch {
		case x.state == isGone && len(ended) < maxReportCount:
			e := &maruv1.EndedProcess{Process: processOut(p)}
			for _, h := range x.writtenBack {
				e.WrittenBack = append(e.WrittenBack, h)
			}
			req.Ended, ended = append(req.Ended, e), append(ended, p)
		case x.state == isLost && len(req.GetUnwatched()) < maxReportCount:
			req.Unwatched = append(req.Unwatched, &maruv1.UnwatchedProcess{Process: processOut(p), Reason: x.lost})
		}
	}
	return req, ended
}

type restOf uint8

const (
	allDone  restOf = iota
	moreNow         // the next report follows at once
	tryLater        // what is left cannot be done now
)

// acknowledged takes the answer to a report: what is done is forgotten, durably; what has
// to be written back first is.
func (a *Agent) acknowledged(answer *maruv1.ReportProcessesResponse, ended []peer.Process) (restOf, error) {
	var drop []store.Change
	rest := allDone
	if len(ended) == maxReportCount {
		rest = moreNow
	}
	a.mu.Lock()
	a.mu.reported, a.mu.lastHeard = true, time.Now()
	for i, e := range answer.GetEnded() {
		x := a.mu.processes[ended[i]]
		if x == nil || !e.GetDone() {
			continue
		}
		a.metrics.reported.WithLabelValues(x.proof.String()).Inc()
		for id := range x.sessions {
			drop = append(drop, dropSession(id))
			a.removeLocked(id)
		}
	}
	a.mu.Unlock()
	if len(drop) > 0 {
		// Without it they are reported again after a restart, which does no harm.
		if err := a.commit(drop...); err != nil {
			return rest, err
		}
	}
	for i, e := range answer.GetEnded() {
		for _, r := range e.GetWriteBack() {
			if err := writeBack(r); err != nil {
				a.limited.Warn("write back", "a dead mapper's cache lines cannot be written back; its region stays until they are, or this node was booted again",
					"process", ended[i], "region", r.GetHandle().GetRegionId(), "path", r.GetPath(), "error", err)
				rest = max(rest, tryLater)
				continue
			}
			a.mu.Lock()
			if x := a.mu.processes[ended[i]]; x != nil {
				if x.writtenBack == nil {
					x.writtenBack = map[base.RegionID]*maruv1.RegionHandle{}
				}
				x.writtenBack[base.RegionID(r.GetHandle().GetRegionId())] = r.GetHandle()
			}
			a.mu.Unlock()
			if rest == allDone {
				rest = moreNow
			}
		}
	}
	return rest, nil
}

// writeBack pushes the lines of a region out of this node's caches: later they could go
// over what the range's next user wrote (docs/PROTOCOL.md, "Proof that a mapper is gone").
func writeBack(r *maruv1.RegionAccess) error {
	f, err := dax.Open(r.GetPath(), dax.Kind(r.GetDeviceKind()), dax.OpenOptions{}) //nolint:gosec // an enum
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	m, err := f.Map(r.GetPlace().GetOffset(), r.GetPlace().GetExtentLength(), mapping.ReadWrite)
	if err != nil {
		return err
	}
	var flushErr error
	faultErr := m.Guard(func() {
		if flushErr = flush.WriteBack(m.Bytes()); flushErr == nil {
			flushErr = flush.Invalidate(m.Bytes())
		}
	})
	return errors.Join(faultErr, flushErr, m.Unmap())
}
