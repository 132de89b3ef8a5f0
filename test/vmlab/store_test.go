//go:build vmlab

package vmlab

import (
	"strings"
	"testing"
	"time"
)

const inside = "./test/vmlab/inside"

// daemon starts a program of ours in the machine and waits for its HTTP port to
// say that it is ready.
func daemon(vm *VM, program, flags, httpPort string) *Job {
	vm.t.Helper()
	job := vm.Go("exec " + program + " " + flags)
	vm.t.Cleanup(func() {
		if vm.t.Failed() {
			vm.t.Logf("vmlab: output of %s:\n%s", program, job.Output())
		}
	})
	r := vm.Try("for i in $(seq 200); do wget -q -O- http://127.0.0.1:" + httpPort + "/readyz && exit 0; sleep 0.1; done; exit 1")
	if r.Status != 0 {
		vm.t.Fatalf("vmlab: %s does not get ready:\n%s", program, job.Output())
	}
	return job
}

// TestStore: regions on a real device outlive the SIGKILL of the resource manager
// and the loss of the machine, at their places and with their bytes. Two client
// processes share objects on it through the resource manager and the server; the
// writer is gone when the reader comes. After SIGKILL of both daemons, and after the
// loss of the machine, the store is cold, gives out no wrong byte, and works on.
func TestStore(t *testing.T) {
	vm := Boot(t)
	rm, server := vm.Program("./cmd/maru-resource-manager"), vm.Program("./cmd/maru-server")
	startRM := func() *Job {
		t.Helper()
		return daemon(vm, rm, "--log-level debug", "19850")
	}
	startServer := func() *Job {
		t.Helper()
		// Time passes slowly in a machine: every limit is ten times the default.
		return daemon(vm, server, "--server-id vmlab --rm-address 127.0.0.1:9850 --session-ttl 100s --heartbeat-interval 5s"+
			" --session-margin 10s --hello-timeout 30s --frame-timeout 30s --rm-call-timeout 30s", "15555")
	}
	ended := func(j *Job, want int) {
		t.Helper()
		if r := j.Wait(30 * time.Second); r.Status != want {
			t.Errorf("%q ended with %d, want %d\n%s", j.command, r.Status, want, r.Stderr)
		}
	}

	vm.GoTest(inside, "^TestRMInit$")
	rmJob := startRM()
	vm.GoTest(inside, "^TestRM(Busy|Fill|Kept)$")

	// A second one on the same device says whose it is, and harms nothing.
	second := vm.Try(rm + " --state-dir /state/second --port 9900 --pool devdax:" + deviceDAX)
	if second.Status == 0 || !strings.Contains(second.Stderr, deviceDAX) {
		t.Errorf("a second resource manager: status %d, %q; want a failure that names %s", second.Status, second.Stderr, deviceDAX)
	}

	vm.Run("killall -9 maru-resource-manager")
	ended(rmJob, 137)
	rmJob = startRM()
	vm.GoTest(inside, "^TestRMKept$")

	// Writer and reader are two processes.
	serverJob := startServer()
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")

	vm.Run("killall -9 maru-server maru-resource-manager")
	ended(rmJob, 137)
	ended(serverJob, 137)
	startRM()
	startServer()
	vm.GoTest(inside, "^Test(RMKept|ClientCold)$")
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")

	vm.Crash()
	vm.Start()
	rmJob, serverJob = startRM(), startServer()
	vm.GoTest(inside, "^Test(RMKept|ClientCold)$")
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")

	// The server first: it gives its regions back.
	vm.Run("killall -TERM maru-server")
	ended(serverJob, 0)
	vm.Run("killall -TERM maru-resource-manager")
	ended(rmJob, 0)
}
