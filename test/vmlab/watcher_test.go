//go:build vmlab

package vmlab

import (
	"strings"
	"testing"
	"time"
)

// TestWatcher: two machines on one device, the resource manager on the first. On the second
// the agent vouches for engines, each in a pid namespace of its own as a container has it.
// Their holds outlive SIGKILL of the resource manager, the server and the agent, and end
// by proof: when they are killed, when they are killed while the agent is away, and when
// their machine is lost and boots again.
func TestWatcher(t *testing.T) {
	a, b := BootPair(t, Ethernet)
	rm, server, tool := a.Program("./cmd/maru-resource-manager"), a.Program("./cmd/maru-server"), a.Program("./cmd/maru")
	agent := b.Program("./cmd/maru-remote-cxl-agent")
	startRM := func() *Job { return daemon(a, rm, "--host 0.0.0.0 --insecure", "19850") }
	startServer := func() *Job {
		return daemon(a, server, "--server-id vmlab --host 0.0.0.0 --insecure --rm-address "+AddressA+":9850 --session-ttl 100s --heartbeat-interval 5s"+
			" --session-margin 10s --hello-timeout 30s --frame-timeout 30s --rm-call-timeout 30s", "15555")
	}
	startAgent := func() *Job {
		return daemon(b, agent, "--watch-only --name second --rm "+AddressA+":9850 --rm-call-timeout 30s", "19860")
	}
	const list = " rm holds --server '' --address unix:/run/maru/rm-9850.sock"
	// holds waits until the list begins with what is expected.
	holds := func(when, want string) string {
		t.Helper()
		r := a.Try("for i in $(seq 150); do out=$(" + tool + list + " 2>&1); case \"$out\" in '" + want + "'*) echo \"$out\"; exit 0;; esac; sleep 0.4; done; echo \"$out\"; exit 1")
		if r.Status != 0 {
			t.Fatalf("%s: want %q, the list is\n%s", when, want, r.Stdout)
		}
		return r.Stdout
	}

	a.GoTest(inside, "^TestRMInit$")
	rmJob := startRM()
	startServer()
	startAgent()
	b.GoTest(inside, "^TestContainersStart$")
	text := holds("two engines in containers", "2 holds of 2 sessions")
	if strings.Contains(text, "cannot be proved") || strings.Count(text, "agent second") != 2 {
		t.Errorf("the holds are not the agent's to prove:\n%s", text)
	}
	b.GoTest(inside, "^TestContainersListed$")

	a.Run("killall -9 maru-resource-manager maru-server")
	if r := rmJob.Wait(30 * time.Second); r.Status != 137 {
		t.Errorf("the resource manager ended with %d", r.Status)
	}
	startRM()
	startServer()
	holds("after SIGKILL of resource manager and server", "2 holds of 2 sessions")
	b.Run("kill -9 $(cat /state/container.1)")
	holds("one engine is killed", "1 hold of 1 session")

	// The second one dies while its watcher is away: nobody knows, until it comes back.
	b.Run("killall -9 maru-remote-cxl-agent && kill -9 $(cat /state/container.2)")
	time.Sleep(2 * time.Second)
	holds("nobody has seen the end", "1 hold of 1 session")
	startAgent()
	holds("the agent is back", "0 holds")

	b.GoTest(inside, "^TestContainersStart$")
	holds("two new ones", "2 holds of 2 sessions")
	b.Crash()
	b.Start()
	holds("their machine boots again, and nobody has said so", "2 holds of 2 sessions")
	startAgent()
	holds("the agent says that it has booted again", "0 holds")
}
