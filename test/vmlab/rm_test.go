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

// TestResourceManager: regions on a real device outlive the SIGKILL of the resource
// manager and the loss of the machine, at their places and with their bytes.
func TestResourceManager(t *testing.T) {
	vm := Boot(t)
	program := vm.Program("./cmd/maru-resource-manager")
	start := func() *Job { return daemon(vm, program, "--log-level debug", "19850") }

	vm.GoTest(inside, "^TestRMInit$")
	job := start()
	vm.GoTest(inside, "^TestRM(Busy|Fill|Kept)$")

	// A second one on the same device says whose it is, and harms nothing.
	second := vm.Try(program + " --state-dir /state/second --port 9900 --pool devdax:" + deviceDAX)
	if second.Status == 0 || !strings.Contains(second.Stderr, deviceDAX) {
		t.Errorf("a second resource manager: status %d, %q; want a failure that names %s", second.Status, second.Stderr, deviceDAX)
	}

	for range 2 {
		vm.Run("killall -9 maru-resource-manager")
		if r := job.Wait(30 * time.Second); r.Status != 137 {
			t.Errorf("the killed resource manager ended with %d\n%s", r.Status, r.Stderr)
		}
		job = start()
		vm.GoTest(inside, "^TestRMKept$")
	}
	vm.Crash()
	vm.Start()
	job = start()
	vm.GoTest(inside, "^TestRMKept$")
	vm.Run("killall -TERM maru-resource-manager")
	if r := job.Wait(30 * time.Second); r.Status != 0 {
		t.Errorf("SIGTERM: status %d\n%s", r.Status, r.Stderr)
	}
}
