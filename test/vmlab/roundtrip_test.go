//go:build vmlab

package vmlab

import (
	"testing"
	"time"
)

// TestRoundTrip: two client processes share objects on a real device through the
// resource manager and the server. The writer is gone when the reader comes. After
// SIGKILL of both daemons, and after the loss of the machine, the store is cold,
// gives out no wrong byte, and works on.
func TestRoundTrip(t *testing.T) {
	vm := Boot(t)
	rm, server := vm.Program("./cmd/maru-resource-manager"), vm.Program("./cmd/maru-server")
	var jobs []*Job
	start := func() {
		t.Helper()
		jobs = []*Job{
			daemon(vm, rm, "", "19850"),
			// Time passes slowly in a machine: every limit is ten times the default.
			daemon(vm, server, "--server-id vmlab --rm-address 127.0.0.1:9850 --session-ttl 100s --heartbeat-interval 5s"+
				" --session-margin 10s --hello-timeout 30s --frame-timeout 30s --rm-call-timeout 30s", "15555"),
		}
	}
	vm.GoTest(inside, "^TestRMInit$")
	start()
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")

	vm.Run("killall -9 maru-server maru-resource-manager")
	for _, j := range jobs {
		if r := j.Wait(30 * time.Second); r.Status != 137 {
			t.Errorf("a killed daemon ended with %d\n%s", r.Status, r.Stderr)
		}
	}
	start()
	vm.GoTest(inside, "^TestClientCold$")
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")

	vm.Crash()
	vm.Start()
	start()
	vm.GoTest(inside, "^TestClientCold$")
	vm.GoTest(inside, "^TestClientStore$")
	vm.GoTest(inside, "^TestClientLoad$")
}
