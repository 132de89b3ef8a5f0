package core

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
)

// far is a node without a resource manager.
type far struct {
	*world
	t     *testing.T
	node  base.NodeID
	boot  base.BootID
	agent base.AgentID
	claim AgentClaim
	seq   uint64
	inc   base.Incarnation
}

func newFar(t *testing.T, w *world) *far {
	f := &far{world: w, t: t, node: base.NodeID{7}, boot: base.BootID{1}, agent: base.AgentID{5}}
	f.inc = w.owner(t, 1)
	f.start()
	return f
}

func (f *far) request() StartAgent {
	return StartAgent{Agent: f.agent, Node: f.node, Boot: f.boot, Name: "far", Secret: secretOf(base.OwnerID(f.agent))}
}

func (f *far) start() {
	f.t.Helper()
	a := must(f.core.StartAgent(f.batch, 1, f.request()))(f.t)
	f.claim = AgentClaim{Agent: f.agent, Epoch: a.Epoch, Token: a.Token[:]}
}

func (f *far) process(pid int64) ProcessID {
	return ProcessID{PID: pid, Namespace: 6, StartTicks: uint64(pid), Boot: f.boot}
}

func sessionSecret(b byte) []byte { return append(make([]byte, SessionSecretBytes-1), b) }

func (f *far) vouch(s byte, pid int64, secret []byte) error {
	f.seq++
	return f.core.VouchSession(f.batch, 1, Vouch{
		AgentClaim: f.claim, Session: base.SessionID{s}, Process: f.process(pid), Secret: secret, Server: base.OwnerID{1}, Sequence: f.seq,
	})
}

func (f *far) holdAs(s byte, secret []byte, vouched bool, sequence uint64, h Handle) (Held, error) {
	return f.core.Hold(f.batch, 2, Hold{
		Session: base.SessionID{s}, Server: base.OwnerID{1}, Incarnation: f.inc, Sequence: sequence, Handles: []Handle{h}, Vouched: vouched,
		Nonce: [base.IDBytes]byte{s, 99}, Peer: Peer{Node: f.node, Boot: f.boot, Reason: "tcp", Secret: secret},
	})
}

func (f *far) report(r Report) ([][]Place, error) {
	f.seq++
	if r.Agent == (base.AgentID{}) {
		r.AgentClaim = f.claim
	}
	r.Sequence = f.seq
	return f.core.ReportProcesses(f.batch, 3, r)
}

func (f *far) held(s byte) bool {
	holds, _ := f.core.Holds(3, base.SessionID{s}, base.SessionID{}, 0, 0)
	return len(holds) > 0
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) || want == nil && err != nil {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// What an agent vouched for ends by its report, and only by that: not by another agent's,
// not by one without its token, not by who knows ids, and never by a local pid that looks
// the same (R3, S1).
func TestAgentEndsWhatItVouchedFor(t *testing.T) {
	f := newFar(t, newWorld(t))
	a, b := f.allocate(t, 1, f.inc, 1), f.allocate(t, 1, f.inc, 2)
	wantErr(t, "vouch", f.vouch(1, 11, sessionSecret(1)), nil)
	wantErr(t, "again", f.vouch(1, 11, sessionSecret(1)), nil)
	wantErr(t, "for another process", f.vouch(1, 12, sessionSecret(1)), base.ErrDenied)
	wantErr(t, "with another secret", f.vouch(1, 11, sessionSecret(2)), base.ErrDenied)
	held, err := f.holdAs(1, sessionSecret(1), true, 1, a.Handle)
	if err != nil || !held.Provable || len(held.Token) != TokenBytes {
		t.Fatalf("%+v, %v", held, err)
	}
	_, err = f.holdAs(1, nil, false, 2, b.Handle)
	wantErr(t, "a hold without the secret", err, base.ErrDenied)
	_, err = f.holdAs(1, sessionSecret(2), true, 2, b.Handle)
	wantErr(t, "a hold with another secret", err, base.ErrDenied)
	for what, p := range map[string]Peer{"nobody": {}, "another secret": {Secret: sessionSecret(9)}, "a local process": {Process: f.process(11)}} {
		wantErr(t, what+" watches the session", f.core.SessionPeer(base.SessionID{1}, p), base.ErrDenied)
		_, err := f.core.Unhold(f.batch, 3, Unhold{Session: base.SessionID{1}, Sequence: 9, Handles: []Handle{a.Handle}, Peer: p})
		wantErr(t, what+" unholds", err, base.ErrDenied)
	}

	// Not vouched for: it holds too, and no agent ends it.
	if held, err := f.holdAs(2, sessionSecret(2), false, 1, a.Handle); err != nil || held.Provable {
		t.Fatalf("%+v, %v", held, err)
	}
	other := StartAgent{Agent: base.AgentID{6}, Node: base.NodeID{8}, Boot: base.BootID{1}, Secret: secretOf(base.OwnerID{6})}
	started := must(f.core.StartAgent(f.batch, 1, other))(t)
	gone := []EndedProcess{{Process: f.process(11)}}
	must(f.report(Report{AgentClaim: AgentClaim{Agent: other.Agent, Epoch: started.Epoch, Token: started.Token[:]}, Ended: gone}))(t)
	_, err = f.report(Report{AgentClaim: AgentClaim{Agent: f.agent, Epoch: 1, Token: started.Token[:]}, Ended: gone})
	wantErr(t, "a report with another's token", err, base.ErrUnproven)
	_, err = f.report(Report{AgentClaim: AgentClaim{Agent: f.agent, Epoch: 2, Token: f.claim.Token}, Ended: gone})
	wantErr(t, "a report of another epoch", err, base.ErrFenced)
	f.core.ProcessGone(f.batch, f.process(11), ProofPidfd)
	if !f.held(1) || !f.held(2) {
		t.Fatal("a hold ended by somebody's word")
	}
	must(f.core.Free(f.batch, f.core.claimOf(base.OwnerID{1}), a.Handle))(t)
	must(f.report(Report{Ended: gone}))(t)
	if f.held(1) || !f.held(2) {
		t.Fatalf("after the report: held %t and %t", f.held(1), f.held(2))
	}
	events := f.batch.Events()
	if e := events[len(events)-1]; e.Kind != EventSessionGone || e.Session != (base.SessionID{1}) || e.Proof != ProofPidfd {
		t.Errorf("%+v", e)
	}
	// What was under way when the process ended changes nothing.
	_, err = f.holdAs(1, sessionSecret(1), true, 3, b.Handle)
	wantErr(t, "a hold of the dead", err, base.ErrStale)
	late := Vouch{AgentClaim: f.claim, Session: base.SessionID{1}, Process: f.process(11), Secret: sessionSecret(1), Sequence: f.seq - 1}
	wantErr(t, "a vouch of before the report", f.core.VouchSession(f.batch, 1, late), base.ErrBusy)
	if f.core.SessionCount() != 1 {
		t.Errorf("%d sessions are left", f.core.SessionCount())
	}
}

// claimOf is that of the program which has the owner now.
func (c *Core) claimOf(id base.OwnerID) Claim {
	o := c.owners[id]
	t := c.ownerToken(&o.row)
	return Claim{Owner: id, Incarnation: o.row.Current.Incarnation, Token: t[:]}
}

// A hold that was taken before the agent came becomes provable when its holder shows the
// session's secret, and not for anybody else.
func TestVouchLater(t *testing.T) {
	f := newFar(t, newWorld(t))
	a := f.allocate(t, 1, f.inc, 1)
	held := must(f.holdAs(1, sessionSecret(1), false, 1, a.Handle))(t)
	if held.Provable || len(held.Token) == 0 {
		t.Fatalf("%+v", held)
	}
	// The id of a session is no secret: who has a capability may hold under it, and must
	// not learn the token by which all of its holds can be given back.
	for what, secret := range map[string][]byte{"no secret": nil} {
		got, err := f.holdAs(1, secret, false, 2, f.allocate(t, 1, f.inc, 7).Handle)
		if err != nil || got.Token != nil {
			t.Errorf("%s: token %x, %v", what, got.Token, err)
		}
	}
	_, err := f.holdAs(1, sessionSecret(2), false, 3, a.Handle)
	wantErr(t, "a hold with another secret", err, base.ErrDenied)
	wantErr(t, "vouching with another secret", f.vouch(1, 11, sessionSecret(2)), base.ErrDenied)
	wantErr(t, "vouching", f.vouch(1, 11, sessionSecret(1)), nil)
	if ok, why := f.core.Provable(base.SessionID{1}); !ok {
		t.Error(why)
	}
	must(f.report(Report{Ended: []EndedProcess{{Process: f.process(11)}}}))(t)
	if f.held(1) {
		t.Error("it is held on")
	}
}

// The lost answer to a first hold: the same call again gives the token.
func TestLostFirstHold(t *testing.T) {
	f := newFar(t, newWorld(t))
	a := f.allocate(t, 1, f.inc, 1)
	first, again := must(f.holdAs(1, sessionSecret(1), false, 1, a.Handle))(t), must(f.holdAs(1, sessionSecret(1), false, 1, a.Handle))(t)
	if len(first.Token) == 0 || !slices.Equal(first.Token, again.Token) {
		t.Errorf("tokens %x and %x", first.Token, again.Token)
	}
	// An unhold that comes first binds the session to the same secret.
	must(f.core.Unhold(f.batch, 1, Unhold{Session: base.SessionID{2}, Sequence: 1, Handles: []Handle{a.Handle}, Peer: Peer{Secret: sessionSecret(2)}}))(t)
	must(f.holdAs(2, sessionSecret(2), false, 2, a.Handle))(t)
}

// An agent's start under another boot ends what it vouched for before, and nothing that
// others hold: whoever asked first is the agent of a node.
func TestAgentReboots(t *testing.T) {
	f := newFar(t, newWorld(t))
	a := f.allocate(t, 1, f.inc, 1)
	wantErr(t, "vouch", f.vouch(1, 11, sessionSecret(1)), nil)
	must(f.holdAs(1, sessionSecret(1), true, 1, a.Handle))(t)
	must(f.holdAs(2, sessionSecret(2), false, 1, a.Handle))(t)
	old := f.boot
	// A call that claims a reboot of a node with an agent does not make one.
	f.boot = base.BootID{2}
	if _, err := f.holdAs(3, sessionSecret(3), false, 1, a.Handle); err != nil || !f.held(1) || !f.held(2) {
		t.Fatalf("a claim of a reboot: %v, held %t and %t", err, f.held(1), f.held(2))
	}
	wantErr(t, "vouching under another boot", f.vouch(4, 12, sessionSecret(4)), base.ErrStale)
	before := f.claim
	started := must(f.core.StartAgent(f.batch, 1, f.request()))(t)
	if started.Ended != 1 || f.held(1) || !f.held(2) || !f.held(3) {
		t.Errorf("%+v, held %t %t %t", started, f.held(1), f.held(2), f.held(3))
	}
	_, err := f.core.ReportProcesses(f.batch, 1, Report{AgentClaim: before})
	wantErr(t, "the older start", err, base.ErrFenced)
	f.boot = old
	_, err = f.core.StartAgent(f.batch, 1, f.request())
	wantErr(t, "a start of the older boot", err, base.ErrStale)
	// What it could not vouch for names the cure.
	holds, _ := f.core.Holds(3, base.SessionID{2}, base.SessionID{}, 0, 0)
	if h := holds[0]; h.Provable || !strings.Contains(h.Cure, "drop-holds --session 02000000") {
		t.Errorf("%+v", h)
	}
}

func TestStartAgentRefuses(t *testing.T) {
	f := newFar(t, newWorld(t))
	for what, c := range map[string]struct {
		change func(*StartAgent)
		want   error
		text   string
	}{
		"no secret":              {func(r *StartAgent) { r.Secret = base.OwnerSecret{} }, base.ErrUnproven, "no secret"},
		"another secret":         {func(r *StartAgent) { r.Secret = secretOf(base.OwnerID{77}) }, base.ErrUnproven, "drop-agent"},
		"a second agent":         {func(r *StartAgent) { r.Agent = base.AgentID{9} }, base.ErrUnproven, "drop-agent " + f.agent.String()},
		"our own node":           {func(r *StartAgent) { r.Node = testConfig().Node }, base.ErrInvalid, "itself"},
		"a copied directory":     {func(r *StartAgent) { r.Node = base.NodeID{99} }, base.ErrForeign, "copied"},
		"no boot":                {func(r *StartAgent) { r.Boot = base.BootID{} }, base.ErrInvalid, "boot_id"},
		"a long name":            {func(r *StartAgent) { r.Name = strings.Repeat("x", 300) }, base.ErrInvalid, "name"},
		"the same one once more": {func(*StartAgent) {}, nil, ""},
	} {
		r := f.request()
		c.change(&r)
		n := len(f.core.agents)
		_, err := f.core.StartAgent(f.batch, 1, r)
		wantErr(t, what, err, c.want)
		if c.want != nil && (!strings.Contains(err.Error(), c.text) || len(f.core.agents) != n) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := f.core.ReportProcesses(f.batch, 1, Report{AgentClaim: AgentClaim{Agent: base.AgentID{42}, Epoch: 1}})
	wantErr(t, "a report of nobody", err, base.ErrNotFound)
}

// An agent that is away, one that lost a process, and one that was dropped: the holds
// stay, and the list says who must act.
func TestHoldsOfSilentAgents(t *testing.T) {
	f := newFar(t, newWorld(t))
	a := f.allocate(t, 1, f.inc, 1)
	wantErr(t, "vouch", f.vouch(1, 11, sessionSecret(1)), nil)
	must(f.holdAs(1, sessionSecret(1), true, 1, a.Handle))(t)
	const minute = 60_000
	show := func(now int64) HoldInfo {
		t.Helper()
		holds, _ := f.core.Holds(now, base.SessionID{}, base.SessionID{}, 0, 0)
		if len(holds) != 1 {
			t.Fatalf("%+v", holds)
		}
		return holds[0]
	}
	if h := show(2); h.Proof != "agent far" || h.Cure != "" || !h.Provable || h.PoolName == "" && h.ExtentBytes == 0 {
		t.Errorf("%+v", h)
	}
	if h := show(10 * minute); !strings.Contains(h.Proof, "away (heard 10m0s ago)") || !strings.Contains(h.Cure, "start maru-remote-cxl-agent") || !h.Provable {
		t.Errorf("%+v", h)
	}
	must(f.report(Report{Unwatched: map[ProcessID]string{f.process(11): "another pid namespace", f.process(99): "not ours"}}))(t)
	if h := show(3); h.Provable || !strings.Contains(h.Cure, "another pid namespace") && !strings.Contains(h.Proof, "another pid namespace") {
		t.Errorf("%+v", h)
	}
	if len(f.core.unwatched) != 1 {
		t.Errorf("%v", f.core.unwatched)
	}
	// Its process shows itself again under another name, as an agent in a new namespace sees it.
	wantErr(t, "found again", f.vouch(1, 12, sessionSecret(1)), nil)
	if h := show(3); !h.Provable || h.Process.PID != 12 {
		t.Errorf("%+v", h)
	}
	if err := f.commit(); err != nil {
		t.Fatal(err)
	}
	if err := f.load(); err != nil { // the resource manager restarts
		t.Fatal(err)
	}
	if h := show(3); !strings.Contains(h.Proof, "not since this resource manager started") || !h.Provable {
		t.Errorf("%+v", h)
	}
	if n, err := f.core.DropAgent(f.batch, f.agent); n != 1 || err != nil {
		t.Error(n, err)
	}
	if h := show(3); h.Provable || h.Agent != (base.AgentID{}) || !strings.Contains(h.Proof, "dropped") {
		t.Errorf("%+v", h)
	}
	_, err := f.core.DropAgent(f.batch, f.agent)
	wantErr(t, "dropped twice", err, base.ErrNotFound)
	if _, err := f.core.StartAgent(f.batch, 1, StartAgent{Agent: base.AgentID{9}, Node: f.node, Boot: f.boot, Secret: secretOf(base.OwnerID{9})}); err != nil {
		t.Errorf("the next agent of that node: %v", err)
	}
}

// On a software-coherent pool a dead mapper's lines are written back on its node before
// its hold ends; a reboot leaves none.
func TestWriteBackComesFirst(t *testing.T) {
	w := newWorld(t)
	w.core.pools[w.pool].row.Coherence = base.CoherenceSoftware
	f := newFar(t, w)
	a, b := f.allocate(t, 1, f.inc, 1), f.allocate(t, 1, f.inc, 2)
	read := must(f.core.MintRead(b.Handle))(t)
	wantErr(t, "vouch", f.vouch(1, 11, sessionSecret(1)), nil)
	must(f.holdAs(1, sessionSecret(1), true, 1, a.Handle))(t)
	must(f.holdAs(1, sessionSecret(1), true, 2, read))(t)
	gone := EndedProcess{Process: f.process(11)}
	need := must(f.report(Report{Ended: []EndedProcess{gone}}))(t)
	if len(need[0]) != 1 || need[0][0].Region.ID != a.Handle.Region || len(need[0][0].Handle.Token) != 0 || !f.held(1) {
		t.Fatalf("%+v, held %t", need, f.held(1))
	}
	if ok, why := f.core.Provable(base.SessionID{1}); ok || !strings.Contains(why, "written back") {
		t.Error(ok, why)
	}
	gone.WrittenBack = []base.RegionID{a.Handle.Region}
	if need := must(f.report(Report{Ended: []EndedProcess{gone}}))(t); len(need[0]) != 0 || f.held(1) {
		t.Errorf("%+v, held %t", need, f.held(1))
	}
	wantErr(t, "vouch", f.vouch(2, 12, sessionSecret(2)), nil)
	must(f.holdAs(2, sessionSecret(2), true, 1, a.Handle))(t)
	old := f.process(12)
	f.boot = base.BootID{2}
	f.start()
	if f.held(2) {
		t.Error("a reboot left a hold")
	}
	if need := must(f.report(Report{Ended: []EndedProcess{{Process: old}}}))(t); len(need[0]) != 0 {
		t.Errorf("%+v", need)
	}
}

// A local mapper that is named anew since the resource manager was started in another
// pid namespace: its secret shows that it is the same one.
func TestRename(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a, b := w.allocate(t, 1, inc, 1), w.allocate(t, 1, inc, 2)
	me := Peer{Node: testConfig().Node, Boot: testConfig().Boot, Secret: sessionSecret(1), Process: ProcessID{PID: 1, Namespace: 2, StartTicks: 3, Boot: testConfig().Boot}}
	hold := func(p Peer, seq uint64, h Handle) (Held, error) {
		return w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{1}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: seq, Handles: []Handle{h}, Peer: p})
	}
	must(hold(me, 1, a.Handle))(t)
	anew := me
	anew.Process.PID, anew.Process.Namespace = 501, 9
	_, err := hold(anew, 2, b.Handle)
	wantErr(t, "another name while the first is watched", err, base.ErrDenied)
	w.core.Unwatched(me.Process, "another namespace")
	stranger := anew
	stranger.Secret = sessionSecret(2)
	_, err = hold(stranger, 2, b.Handle)
	wantErr(t, "another name with another secret", err, base.ErrDenied)
	if held := must(hold(anew, 2, b.Handle))(t); !held.Provable {
		t.Errorf("%+v", held)
	}
	w.core.ProcessGone(w.batch, anew.Process, ProofPidfd)
	if w.core.HoldCount() != 0 {
		t.Error("it is held on")
	}
}

// Rows of version 3, as TestRowsGolden does for version 2.
func TestAgentRowsGolden(t *testing.T) {
	f := newFar(t, newWorld(t))
	wantErr(t, "vouch", f.vouch(1, 11, sessionSecret(1)), nil)
	a := f.allocate(t, 1, f.inc, 1)
	must(f.holdAs(1, sessionSecret(1), true, 1, a.Handle))(t)
	must(f.holdAs(2, sessionSecret(2), false, 1, a.Handle))(t)
	if err := f.commit(); err != nil {
		t.Fatal(err)
	}
	const name = "rows-v3.golden"
	if *update {
		if err := os.WriteFile(filepath.Join("testdata", name), []byte(f.rows(t)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := f.rows(t), golden(t, name); got != want {
		t.Errorf("rows are\n%s\nthe golden file has\n%s", got, want)
	}
	again := worldOf(t, golden(t, name))
	if err := again.load(); err != nil {
		t.Fatal(err)
	}
	if x, y := again.core.ListAgents(0), f.core.ListAgents(0); len(x) != 1 || x[0].ID != y[0].ID || x[0].Epoch != y[0].Epoch || x[0].SessionCount != 1 {
		t.Errorf("loaded %+v, was %+v", x, y)
	}
	if _, err := again.core.ReportProcesses(again.batch, 1, Report{AgentClaim: f.claim}); err != nil {
		t.Errorf("the token over a restart: %v", err)
	}
	row, agent := f.core.sessions[base.SessionID{1}].row, f.core.agents[f.node].row
	half := agent
	half.Digest = agent.Digest[:31]
	lost := row
	lost.Agent = base.AgentID{42}
	for what, c := range map[string]store.Change{
		"rows of version 2":         {Bucket: bucketFormat, Key: formatKey, Value: encode(formatRow{Version: 2})},
		"half a digest":             {Bucket: bucketAgents, Key: string(agent.Node[:]), Value: encode(half)},
		"no agent":                  {Bucket: bucketAgents, Key: string(agent.Node[:])},
		"a session of no agent":     {Bucket: bucketSessions, Key: string(row.ID[:]), Value: encode(lost)},
		"an agent under two nodes":  {Bucket: bucketAgents, Key: string(agent.ID[:]), Value: encode(agentRow{ID: agent.ID, Node: base.NodeID(agent.ID), Epoch: 1, Digest: agent.Digest})},
		"an agent that never began": {Bucket: bucketAgents, Key: string(agent.Node[:]), Value: encode(agentRow{ID: agent.ID, Node: agent.Node, Digest: agent.Digest})},
	} {
		w := worldOf(t, golden(t, name))
		if err := w.store.Commit([]store.Change{c}); err != nil {
			t.Fatal(err)
		}
		wantErr(t, what, w.load(), base.ErrCorrupt)
	}
}
