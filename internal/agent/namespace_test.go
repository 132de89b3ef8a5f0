package agent

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
)

// container gives a process a pid and a mount namespace of its own.
func container() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}}
	}
	return attr
}

// A mapper in a container, where it has another pid: the watcher in the host's namespace
// knows it by the socket's pidfd, finds it again after its own restart and the resource
// manager's, and proves its end.
func TestMapperInContainer(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	gone := l.gone()
	x, y := newID(), newID()
	mx := spawn(t, mapperEnv, l.job(x, l.allocate()), container())
	my := spawn(t, mapperEnv, l.job(y, l.allocate()), container())
	if h := l.holds(x)[0]; !h.GetProvable() || h.GetProcess().GetPid() != int64(mx.cmd.Process.Pid) {
		t.Fatalf("%v, the host sees pid %d", h, mx.cmd.Process.Pid)
	}
	mx.kill()
	l.wantGone(gone, x, "pidfd")
	if err := errors.Join(a.Close(), l.rm.Close()); err != nil {
		t.Fatal(err)
	}
	l.startRM()
	a = l.start()
	l.connected(a)
	if len(l.holds(y)) != 1 {
		t.Fatal("the living one's hold ended")
	}
	my.kill()
	l.heldNot(y)
}

// An agent in a container sees a mapper outside of it only as a pidfd without a name: it
// says so, and promises nothing.
func TestAgentInContainer(t *testing.T) {
	tool, err := exec.LookPath("unshare")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs root and unshare(1), which mounts the namespace's own /proc: ", err)
	}
	l := newLab(t)
	spawnUnder(t, []string{tool, "--pid", "--fork", "--kill-child", "--mount-proc"}, agentEnv, l.asChild())
	l.eventually("the agent", func() bool { return l.agents() == 1 })
	x := newID()
	j := l.job(x, nil)
	var line string
	l.eventually("an answer", func() bool {
		var c *child
		c, line = trySpawn(t, mapperEnv, j, nil)
		c.kill()
		return line == "serving\n" // it was answered: not provable
	})
	if r, err := l.api.ListAgents(ctxOf(t), &maruv1.ListAgentsRequest{}); err != nil || r.GetAgents()[0].GetSessionCount() != 0 {
		t.Errorf("%v, %v", r, err)
	}
}

func spawnUnder(t *testing.T, tool []string, env string, job any) *child {
	t.Helper()
	under = tool
	defer func() { under = nil }()
	return spawn(t, env, job, nil)
}

// The agent was started again in another pid namespace than before: a process on record
// may live or not. Its hold stays, is shown as not provable with the reason, and the
// process is provable again as soon as it shows itself. A pid that now is another
// process's proves an end in the same namespace only.
func TestLostAndReusedPIDs(t *testing.T) {
	l := newLab(t)
	a := l.start()
	l.connected(a)
	lost, reused := newID(), newID()
	bind := func(id []byte, p peer.Process) sessionRow {
		t.Helper()
		a.mu.Lock()
		a.mu.sequence++
		req := &maruv1.VouchSessionRequest{
			AgentId: a.state.agent[:], Epoch: a.mu.epoch, AgentToken: a.mu.token, Sequence: a.mu.sequence, SessionId: id, SessionSecret: secretOf(id),
			ServerId: l.owner, Process: processOut(p),
		}
		a.mu.Unlock()
		if _, err := l.api.VouchSession(ctxOf(t), req); err != nil {
			t.Fatal(err)
		}
		if _, err := l.api.Hold(ctxOf(t), &maruv1.HoldRequest{
			SessionId: id, ServerId: l.owner, OwnerIncarnation: l.inc, Sequence: 1, Handles: []*maruv1.RegionHandle{l.allocate()}, SessionSecret: secretOf(id), Vouched: true,
		}); err != nil {
			t.Fatal(err)
		}
		return rowOf(base.SessionID(id), p, 1)
	}
	self, err := peer.Self()
	if err != nil {
		t.Fatal(err)
	}
	elsewhere, earlier := self, self
	elsewhere.PIDNamespace = 4711
	earlier.StartTicks-- // who had this pid before us
	rows := changes(putSession(bind(lost, elsewhere)), putSession(bind(reused, earlier)))
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := openState(l.cfg.StateDir, a.identity.Node, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.store.Commit(rows), s.close()); err != nil {
		t.Fatal(err)
	}
	gone := l.gone()
	a = l.start()
	l.wantGone(gone, reused, "pidfd")
	l.eventually("word of the lost one", func() bool { return !l.holds(lost)[0].GetProvable() })
	if h := l.holds(lost)[0]; !strings.Contains(h.GetProof(), "recorded in pid namespace 4711") || !strings.Contains(h.GetCure(), "drop-holds --session") {
		t.Errorf("%v", h)
	}
	// The resource manager shows the report before the agent has its answer.
	l.eventually("the agent's own word of it", func() bool {
		r, why := a.Ready()
		return r.String() == "degraded" && strings.Contains(why, "1 processes on record cannot be found")
	})
	// The resource manager forgets it with a restart, and hears it again.
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	l.startRM()
	l.eventually("word of the lost one, again", func() bool { return !l.holds(lost)[0].GetProvable() })
	// The same process shows itself: its session's secret says so.
	m := l.mapper(lost, nil)
	if h := l.holds(lost)[0]; !h.GetProvable() || h.GetProcess().GetPid() != int64(m.cmd.Process.Pid) {
		t.Errorf("%v", h)
	}
	m.kill()
	l.heldNot(lost)
}

// A process that binds a session and forks: its child is another process, and cannot act
// for the session; the end of the child ends nothing.
func TestForkedChildIsAnother(t *testing.T) {
	l := newLab(t)
	l.connected(l.start())
	x := newID()
	j := l.job(x, l.allocate())
	m := spawn(t, mapperEnv, j, nil)
	c, line := trySpawn(t, mapperEnv, j, nil) // another process with the same session and secret
	if !strings.Contains(line, "belongs to another process") {
		t.Errorf("the other process: %q", line)
	}
	c.kill()
	if len(l.holds(x)) != 1 {
		t.Fatal("the hold ended with another process")
	}
	m.kill()
	l.heldNot(x)
}
