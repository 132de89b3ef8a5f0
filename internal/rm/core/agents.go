package core

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// AgentDigestBytes is the size of what an agent's row keeps of its secret.
const AgentDigestBytes = sha256.Size

// AgentSilence is how long an agent may be silent before it counts as away: three of
// the reports that it makes while nothing happens, and a margin. It is for people
// only: nothing ends because of it.
const AgentSilence = 30 * time.Second

// maxAgentCount bounds agents: one a node.
const maxAgentCount = 4096

// maxReasonBytes bounds what an agent says of one process.
const maxReasonBytes = 512

// agent is the watcher of another node. It may end the sessions that it vouched for
// itself, and nothing else.
type agent struct {
	row     agentRow
	heardMS int64 // 0: not since the start of this program
	// endedAt is the highest sequence of a report that told an end. A vouch of before it
	// may be for a process that the report ended, and would outlive it. It need not be
	// durable: no call outlives the program that it was sent to.
	endedAt uint64
}

// AgentClaim is who an agent's call says it is, and the token that shows it.
type AgentClaim struct {
	Agent base.AgentID
	Epoch uint32
	Token []byte // of StartAgent's answer
}

// StartAgent asks to be the agent of a node.
type StartAgent struct {
	Agent  base.AgentID
	Node   base.NodeID
	Boot   base.BootID
	Name   string
	Secret base.OwnerSecret
}

// AgentStarted is the answer.
type AgentStarted struct {
	Epoch uint32
	Token Token // in every call of this start
	Ended int   // sessions of older boots
}

func agentDigest(id base.AgentID, secret base.OwnerSecret) [AgentDigestBytes]byte {
	b := append([]byte("maru-agent-secret-v1"), id[:]...)
	return sha256.Sum256(append(b, secret.Bytes()...))
}

// agentToken proves a start of an agent; like an owner's it is derived and not kept.
func (c *Core) agentToken(a *agentRow) Token {
	return c.mac("maru-agent-v1", a.ID[:], binary.LittleEndian.AppendUint32(nil, a.Epoch), a.Digest)
}

// StartAgent makes the caller the agent of its node: the first one that asks, and from
// then on who shows the same secret. That gives it no power over what it did not vouch
// for. A new boot id proves that everything that it vouched for before is gone; an older
// start of the same boot is fenced. Errors: ErrInvalid, ErrUnproven, ErrStale (an older
// boot), ErrLimit.
func (c *Core) StartAgent(b *Batch, now int64, req StartAgent) (AgentStarted, error) {
	switch {
	case req.Agent == (base.AgentID{}), req.Node == (base.NodeID{}), req.Boot == (base.BootID{}):
		return AgentStarted{}, fmt.Errorf("%w: agent_id, node_id and boot_id must not be zero", base.ErrInvalid)
	case len(req.Name) > maxNameBytes:
		return AgentStarted{}, fmt.Errorf("%w: name has %d bytes, allowed: up to %d", base.ErrInvalid, len(req.Name), maxNameBytes)
	case req.Node == c.cfg.Node:
		return AgentStarted{}, fmt.Errorf("%w: node %s is the resource manager's own, which watches its mappers itself: no agent is needed there", base.ErrInvalid, req.Node)
	case req.Secret.IsZero():
		return AgentStarted{}, fmt.Errorf("%w: agent %s shows no secret", base.ErrUnproven, req.Agent)
	}
	digest := agentDigest(req.Agent, req.Secret)
	a, known := c.agents[req.Node]
	if known && (a.row.ID != req.Agent || subtle.ConstantTimeCompare(a.row.Digest, digest[:]) != 1) {
		return AgentStarted{}, fmt.Errorf("%w: node %s has agent %s (%s), and this is another one or shows another secret: use the state directory of that agent, or, "+
			"when it is lost, end it with maru rm drop-agent %s --confirm", base.ErrUnproven, req.Node, a.row.ID, a.row.Name, a.row.ID)
	}
	if !known {
		for _, o := range c.agents {
			if o.row.ID == req.Agent {
				return AgentStarted{}, fmt.Errorf("%w: agent %s is that of node %s, not of %s: a state directory must not be copied to another machine", base.ErrForeign, req.Agent, o.row.Node, req.Node)
			}
		}
		if len(c.agents) >= maxAgentCount {
			return AgentStarted{}, fmt.Errorf("%w: %d agents are known, no more are kept; end one with maru rm drop-agent", base.ErrLimit, len(c.agents))
		}
	}
	if err := c.checkBoot(req.Node, req.Boot); err != nil {
		return AgentStarted{}, err
	}
	if !known {
		a = &agent{row: agentRow{ID: req.Agent, Node: req.Node, Digest: digest[:]}}
		c.agents[req.Node] = a
	}
	rebooted := known && a.row.Boot != req.Boot
	a.row.Epoch++
	a.row.Boot, a.row.Name, a.row.StartedMS, a.heardMS, a.endedAt = req.Boot, req.Name, now, now, 0
	c.putAgent(b, a)
	out := AgentStarted{Epoch: a.row.Epoch, Token: c.agentToken(&a.row)}
	if rebooted {
		n := len(c.sessions)
		c.endSessions(b, ProofReboot, func(s *session) bool { return s.row.Agent == req.Agent && s.row.Boot != req.Boot })
		out.Ended = n - len(c.sessions)
	}
	// Whoever asked first is the agent. So its word for a boot ends what it vouched for,
	// and nothing that others hold; it only keeps messages of older boots out.
	if _, noted := c.nodes[req.Node]; rebooted || !noted {
		c.setBoot(b, req.Node, req.Boot)
	}
	return out, nil
}

func (c *Core) putAgent(b *Batch, a *agent) {
	c.raiseFormat(b, formatAgents)
	b.put(bucketAgents, string(a.row.Node[:]), a.row)
}

// agentOf finds the agent of a claim. Errors: ErrNotFound (it never started here, or was
// dropped), ErrFenced, ErrUnproven.
func (c *Core) agentOf(who AgentClaim) (*agent, error) {
	for _, a := range c.agents {
		if a.row.ID != who.Agent {
			continue
		}
		if a.row.Epoch != who.Epoch {
			return nil, fmt.Errorf("%w: agent %s of node %s has epoch %d now, not %d: another one was started in its state directory, or in a copy of it", base.ErrFenced, who.Agent, a.row.Node, a.row.Epoch, who.Epoch)
		}
		if want := c.agentToken(&a.row); !hmac.Equal(who.Token, want[:]) {
			return nil, fmt.Errorf("%w: agent %s: the call does not carry the token that start %d was answered with", base.ErrUnproven, who.Agent, who.Epoch)
		}
		return a, nil
	}
	return nil, fmt.Errorf("%w: agent %s is not known here: call StartAgent", base.ErrNotFound, who.Agent)
}

// Vouch binds a session to a process that an agent watches.
type Vouch struct {
	AgentClaim
	Session  base.SessionID
	Process  ProcessID
	Secret   []byte // the session's
	Server   base.OwnerID
	Sequence uint64
}

// VouchSession binds a session before its first hold, or one that was held without
// proof if the session's secret is shown: who has that is the process that held. A
// session that is bound already keeps its process, unless the agent lost that one and
// finds it under a new name. Errors: ErrInvalid, ErrNotFound, ErrFenced, ErrUnproven, ErrStale (the
// process is of another boot than the agent), ErrBusy, ErrDenied, ErrLimit.
func (c *Core) VouchSession(b *Batch, now int64, req Vouch) error {
	a, err := c.agentOf(req.AgentClaim)
	if err != nil {
		return err
	}
	a.heardMS = now
	p := req.Process
	switch {
	case req.Session == (base.SessionID{}):
		return fmt.Errorf("%w: session_id is zero", base.ErrInvalid)
	case len(req.Secret) != SessionSecretBytes:
		return fmt.Errorf("%w: session_secret has %d bytes, must have %d", base.ErrInvalid, len(req.Secret), SessionSecretBytes)
	case p.PID <= 0 || p.Namespace == 0 || p.StartTicks == 0:
		return fmt.Errorf("%w: process %+v is not complete", base.ErrInvalid, p)
	case req.Sequence <= a.endedAt:
		return fmt.Errorf("%w: a report of ends overtook this call: make it again if the process lives", base.ErrBusy)
	case p.Boot != a.row.Boot:
		return fmt.Errorf("%w: %s has boot id %s, its node's agent was started under %s", base.ErrStale, p, p.Boot, a.row.Boot)
	}
	s, known := c.sessions[req.Session]
	switch {
	case !known && len(c.sessions) >= c.limits.MaxSessionCount:
		return fmt.Errorf("%w: %d sessions are known, the setting max_session_count allows no more", base.ErrLimit, len(c.sessions))
	case !known:
		s = newSession(req.Session, Peer{Process: p, Node: a.row.Node, Boot: a.row.Boot}, secretNonce(req.Session, req.Secret))
		c.sessions[req.Session] = s
	case !s.knows(req.Secret):
		return fmt.Errorf("%w: session %s is known and was made by who has another secret", base.ErrDenied, req.Session)
	case s.row.Agent == a.row.ID && s.row.Process == p:
		delete(c.unwatched, p)
		return nil
	case !s.row.Process.IsZero() && c.unwatched[s.row.Process] == "":
		return fmt.Errorf("%w: session %s is bound to %s, not to %s", base.ErrDenied, req.Session, s.row.Process, p)
	}
	delete(c.unwatched, p)
	s.row.Process, s.row.Agent, s.row.Node, s.row.Boot, s.row.Reason = p, a.row.ID, a.row.Node, a.row.Boot, ""
	if req.Server != (base.OwnerID{}) {
		s.row.Server = req.Server
	}
	c.putSession(b, s)
	return nil
}

// EndedProcess is one that an agent saw end.
type EndedProcess struct {
	Process     ProcessID
	WrittenBack []base.RegionID // regions of software-coherent pools
}

// Report is what an agent says of processes that it vouched for.
type Report struct {
	AgentClaim
	Ended     []EndedProcess
	Unwatched map[ProcessID]string // why the agent cannot find them any more
	Sequence  uint64
}

// ReportProcesses takes an agent's word for the processes of sessions that it vouched
// for; for any other process it changes nothing. For each ended process it gives what
// has to be written back on its node first (software-coherent pools, after a pidfd: a
// reboot leaves no dirty line); nothing means that it is done. Errors: ErrNotFound,
// ErrFenced, ErrUnproven, ErrInvalid.
func (c *Core) ReportProcesses(b *Batch, now int64, req Report) ([][]Place, error) {
	a, err := c.agentOf(req.AgentClaim)
	if err != nil {
		return nil, err
	}
	if len(req.Ended) > MaxReportCount || len(req.Unwatched) > MaxReportCount {
		return nil, fmt.Errorf("%w: %d ended and %d unwatched processes in one report, allowed: up to %d each", base.ErrInvalid, len(req.Ended), len(req.Unwatched), MaxReportCount)
	}
	for _, e := range req.Ended {
		if e.Process.IsZero() {
			return nil, fmt.Errorf("%w: an ended process is zero", base.ErrInvalid)
		}
	}
	a.heardMS = now
	if len(req.Ended) > 0 {
		a.endedAt = max(a.endedAt, req.Sequence)
	}
	vouched := func(p ProcessID) func(*session) bool {
		return func(s *session) bool { return s.row.Agent == a.row.ID && s.row.Process == p }
	}
	out := make([][]Place, len(req.Ended))
	for i, e := range req.Ended {
		proof := ProofPidfd
		if e.Process.Boot != a.row.Boot {
			proof = ProofReboot
		} else if out[i] = c.dirty(vouched(e.Process), e.WrittenBack); len(out[i]) > 0 {
			c.unwatched[e.Process] = "it has ended, and its cache lines on a software-coherent pool have to be written back on its node first"
			continue
		}
		c.endSessions(b, proof, vouched(e.Process))
		delete(c.unwatched, e.Process)
	}
	for p, reason := range req.Unwatched {
		if slices.ContainsFunc(slices.Collect(maps.Values(c.sessions)), vouched(p)) {
			c.unwatched[p] = "its node's agent cannot find it any more: " + reason[:min(len(reason), maxReasonBytes)]
		}
	}
	return out, nil
}

// MaxReportCount bounds one report of an agent.
const MaxReportCount = 1024

// dirty lists the regions of software-coherent pools that sessions hold for writing,
// less those that were written back.
func (c *Core) dirty(match func(*session) bool, clean []base.RegionID) []Place {
	seen := map[base.RegionID]bool{}
	for _, id := range clean {
		seen[id] = true
	}
	var out []Place
	for _, s := range c.sessions {
		if !match(s) {
			continue
		}
		for id, row := range s.rows {
			if r := c.regions[id]; row.Held && !row.ReadOnly && !seen[id] && r.pool.row.Coherence == base.CoherenceSoftware {
				seen[id] = true
				out = append(out, r.place(Handle{Pool: r.row.Pool, Region: id, Incarnation: r.row.Incarnation}))
			}
		}
	}
	slices.SortFunc(out, func(x, y Place) int { return cmp.Compare(x.Region.ID, y.Region.ID) })
	return out
}

// DropAgent is the operator's word that an agent will not come back. What it vouched for
// is held on, and its end is not provable any more. Errors: ErrNotFound.
func (c *Core) DropAgent(b *Batch, id base.AgentID) (int, error) {
	for node, a := range c.agents {
		if a.row.ID != id {
			continue
		}
		n := 0
		for _, s := range c.sessions {
			if s.row.Agent != id {
				continue
			}
			n++
			delete(c.unwatched, s.row.Process)
			s.row.Agent, s.row.Process = base.AgentID{}, ProcessID{}
			s.row.Reason = "the agent that vouched for it was dropped by an operator"
			c.putSession(b, s)
			c.forgetIfIdle(b, s)
		}
		delete(c.agents, node)
		b.drop(bucketAgents, string(node[:]))
		return n, nil
	}
	return 0, fmt.Errorf("%w: agent %s", base.ErrNotFound, id)
}

// AgentInfo is what a list shows of an agent.
type AgentInfo struct {
	ID           base.AgentID
	Name         string
	Node         base.NodeID
	Boot         base.BootID
	Epoch        uint32
	StartedMS    int64
	HeardMS      int64 // 0: not since this program started
	Away         bool
	SessionCount int
}

// ListAgents lists all agents in order of their node.
func (c *Core) ListAgents(now int64) []AgentInfo {
	count := map[base.AgentID]int{}
	for _, s := range c.sessions {
		count[s.row.Agent]++
	}
	var out []AgentInfo
	for _, a := range c.agents {
		out = append(out, AgentInfo{
			ID: a.row.ID, Name: a.row.Name, Node: a.row.Node, Boot: a.row.Boot, Epoch: a.row.Epoch, StartedMS: a.row.StartedMS,
			HeardMS: a.heardMS, Away: a.away(now), SessionCount: count[a.row.ID],
		})
	}
	slices.SortFunc(out, func(x, y AgentInfo) int { return cmp.Compare(string(x.Node[:]), string(y.Node[:])) })
	return out
}

func (a *agent) away(now int64) bool {
	return a.heardMS == 0 || now-a.heardMS > AgentSilence.Milliseconds()
}

// silence says since when an agent is away, for people.
func (a *agent) silence(now int64) string {
	if a.heardMS == 0 {
		return "not since this resource manager started"
	}
	return (time.Duration(now-a.heardMS) * time.Millisecond).Round(time.Second).String() + " ago"
}

// agentByID finds an agent for a list; nil: there is none.
func (c *Core) agentByID(id base.AgentID) *agent {
	for _, a := range c.agents {
		if a.row.ID == id {
			return a
		}
	}
	return nil
}

// SessionSecretBytes is the size of a session's secret, which its client makes.
const SessionSecretBytes = 32

// secretNonce is what a session's row keeps of the secret, in place of random bits: the
// hold token follows from it, so that who shows the secret can be given the token again.
func secretNonce(id base.SessionID, secret []byte) [base.IDBytes]byte {
	sum := sha256.Sum256(append(append([]byte("maru-session-secret-v1"), id[:]...), secret...))
	return [base.IDBytes]byte(sum[:base.IDBytes])
}

// knows reports whether a secret is the session's.
func (s *session) knows(secret []byte) bool {
	if len(secret) != SessionSecretBytes {
		return false
	}
	want := secretNonce(s.row.ID, secret)
	return subtle.ConstantTimeCompare(s.row.Nonce[:], want[:]) == 1
}

// KnowsSession reports whether a secret is that of a session on record.
func (c *Core) KnowsSession(id base.SessionID, secret []byte) bool {
	s, ok := c.sessions[id]
	return ok && s.knows(secret)
}

// Unwatched says that the end of a process on record cannot be proved any more, and why.
// It is not durable: a restart looks again.
func (c *Core) Unwatched(p ProcessID, reason string) {
	if !p.IsZero() {
		c.unwatched[p] = reason
	}
}

// Watched takes Unwatched back.
func (c *Core) Watched(p ProcessID) { delete(c.unwatched, p) }

// Provable reports whether the end of a session's process can be proved, and why not.
func (c *Core) Provable(id base.SessionID) (provable bool, reason string) {
	s, ok := c.sessions[id]
	if !ok {
		return false, "the session is not known"
	}
	return c.provable(s)
}

func (c *Core) provable(s *session) (bool, string) {
	if s.row.Process.IsZero() {
		return false, cmp.Or(s.row.Reason, "no process is known")
	}
	if reason := c.unwatched[s.row.Process]; reason != "" {
		return false, reason
	}
	return true, ""
}

// UnprovableCount counts sessions with holds whose end nobody can prove.
func (c *Core) UnprovableCount() (n int) {
	for _, s := range c.sessions {
		if ok, _ := c.provable(s); !ok && s.held > 0 {
			n++
		}
	}
	return n
}
