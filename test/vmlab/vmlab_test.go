//go:build vmlab

package vmlab

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

const deviceDAX = "/dev/dax0.0"

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "vmlab-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	programs.dir, programs.made = dir, map[string]bool{}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// TestDeviceDAX: the lab shows a real device-DAX, and what a static Go program
// stored in it is there after the machine was lost and came back. One machine for
// all that needs one: a boot costs more than what is asked of it.
func TestDeviceDAX(t *testing.T) {
	vm := Boot(t)
	sysfs := "/sys/bus/dax/devices/dax0.0"
	for _, c := range []struct{ what, command, want string }{
		{"a character device", "test -c " + deviceDAX + " && stat -c %s " + deviceDAX, "0"},
		{"its size", "cat " + sysfs + "/size", "266338304"},
		{"its alignment", "cat " + sysfs + "/align", "2097152"},
		{"its driver", "basename $(readlink " + sysfs + "/driver)", "device_dax"},
		{"the way from its number", "cat /sys/dev/char/$(cat " + sysfs + "/dev)/size", "266338304"},
	} {
		if got := strings.TrimSpace(vm.Run(c.command)); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}

	probe := vm.Program("./test/vmlab/daxprobe")
	deviceRefuses(vm, probe)

	const where = " " + deviceDAX + " 0x400000 0x200000 "
	bootID := vm.Run("cat /proc/sys/kernel/random/boot_id")
	if r := vm.Try(probe + " check" + where + "7"); r.Status == 0 {
		t.Errorf("the pattern is there before it was written: %s", r.Stdout)
	}
	vm.Run(probe + " write" + where + "7")
	vm.Run("echo synced >/state/a && sync")
	vm.Crash()
	vm.Start()
	if got := vm.Run("cat /state/a"); got != "synced\n" {
		t.Errorf("the disk has %q after the crash", got)
	}
	if again := vm.Run("cat /proc/sys/kernel/random/boot_id"); again == bootID {
		t.Errorf("boot id %s before and after the crash: the machine did not boot again", again)
	}
	vm.Run(probe + " check" + where + "7")
	if r := vm.Try(probe + " check" + where + "8"); r.Status == 0 {
		t.Errorf("another pattern is found too: the check finds anything: %s", r.Stdout)
	}

	vm.Run(probe + " write " + deviceDAX + " 0 0x200000 3")
	// What test/vmlab/inside asks of internal/media on a real device. Its last test
	// takes the driver away and gives it back.
	vm.GoTest(inside, "^TestDAX")
	vm.PowerOff()
	poolBegins(vm)
}

// deviceRefuses: the system calls that a device-DAX refuses, which is why a pool on
// one is only ever reached through mappings.
func deviceRefuses(vm *VM, probe string) {
	vm.t.Helper()
	for _, c := range []struct{ what, command, want string }{
		{"an unaligned offset", probe + " check " + deviceDAX + " 4096 0x200000 1", "invalid argument"},
		{"an unaligned length", probe + " check " + deviceDAX + " 0 4096 1", "invalid argument"},
		{"reading", "dd if=" + deviceDAX + " of=/dev/null bs=4096 count=1", "Invalid argument"},
		{"writing", "dd if=/dev/zero of=" + deviceDAX + " bs=4096 count=1", "Invalid argument"},
	} {
		if r := vm.Try(c.command); r.Status == 0 || !strings.Contains(r.Stderr, c.want) {
			vm.t.Errorf("%s: status %d, %q; want a failure with %q", c.what, r.Status, r.Stderr, c.want)
		}
	}
}

// poolBegins: the pool file is the memory of the device, at the offset that
// PoolDataOffset says. Tests that damage a pool from outside lean on it.
func poolBegins(vm *VM) {
	vm.t.Helper()
	f, err := os.Open(vm.Pool())
	if err != nil {
		vm.t.Fatal(err)
	}
	defer f.Close()
	var got [2]byte
	if _, err := f.ReadAt(got[:], PoolDataOffset); err != nil {
		vm.t.Fatal(err)
	}
	if got == [2]byte{} {
		vm.t.Error("the first bytes of the device are not where PoolDataOffset says")
	}
}

// TestPair: two machines have one pool and a network, each its own identity, and
// the loss of one is not the loss of the other.
func TestPair(t *testing.T) {
	a, b := BootPair(t, Ethernet)
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	if x, y := a.Run(bootID), b.Run(bootID); x == y {
		t.Errorf("both machines have the boot id %s", x)
	}
	const where = " " + deviceDAX + " 0x800000 0x200000 "
	a.Run(a.Program("./test/vmlab/daxprobe") + " write" + where + "11")
	a.Crash()
	probe := b.Program("./test/vmlab/daxprobe")
	b.Run(probe + " check" + where + "11")
	if r := b.Try("ping -c 1 -W 1 " + AddressA); r.Status == 0 {
		t.Errorf("the crashed machine answers: %s", r.Stdout)
	}
	a.Start()
	b.Run("for i in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -W 1 " + AddressA + " >/dev/null && exit 0; done; exit 1")
	b.Run(probe + " write" + where + "12")
	a.Run(a.Program("./test/vmlab/daxprobe") + " check" + where + "12")
}

// TestSoftRoCE: RDMA verbs work between the machines, so that a later test can
// blame what it tests.
func TestSoftRoCE(t *testing.T) {
	a, b := BootPair(t, SoftRoCE)
	for _, vm := range []*VM{a, b} {
		if out := vm.Run("ibv_devinfo -d rxe0"); !strings.Contains(out, "PORT_ACTIVE") {
			t.Fatalf("rxe0 is not up:\n%s", out)
		}
	}
	const flags = "ibv_rc_pingpong -d rxe0 -g 1 -n 100 -s 4096 "
	server := a.Go(flags)
	// The two meet over TCP first.
	a.Run("for i in $(seq 100); do netstat -ltn | grep -q :18515 && exit 0; sleep 0.1; done; exit 1")
	client := b.Try(flags + AddressA)
	if r := server.Wait(RunTimeout); client.Status != 0 || r.Status != 0 || !strings.Contains(client.Stdout, "100 iters") {
		t.Errorf("client: status %d\n%s%s\nserver: status %d\n%s%s",
			client.Status, client.Stdout, client.Stderr, r.Status, r.Stdout, r.Stderr)
	}
}
