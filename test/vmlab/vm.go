//go:build vmlab

package vmlab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// bootTimeout is far above the 3 s of a boot: the host may be busy.
	bootTimeout = 90 * time.Second
	// RunTimeout bounds one command of Run.
	RunTimeout = 120 * time.Second
	// pollEvery is how often the host looks for the files of the agent.
	pollEvery = 20 * time.Millisecond
)

// VM is one machine on one pool, with a small disk of its own at /state. Pool, disk
// and shared folder live as long as the test; the machine ends with it. What the
// machine did not sync to its disk is lost in a Crash, as on any host.
//
// Concurrency: Start, Crash and PowerOff belong to the test's goroutine; Run, Try
// and Go may be called from several while the machine is up.
type VM struct {
	t     testing.TB
	img   image
	dir   string // console, logs
	share string // /host in the guest
	pool  string
	disk  string // /state in the guest
	name  string
	link  link
	jobs  chan int // the number of the next job

	boots    int
	launched time.Time
	programs []string // what install has put into /tmp, for the next boot too

	bell *os.File // the machine's second serial line; a line on it says "look"

	process *os.Process
	ended   chan struct{} // closed when process is gone
}

// Result is what a command in a machine left.
type Result struct {
	Stdout, Stderr string
	// Status is the exit status; of a command that died of signal n, 128 + n.
	Status int
}

// link is the network card of a machine, whose cable ends at one other machine.
// The zero value is a machine without one.
type link struct {
	local, remote string // socket files on the host
	address       string // in the guest, with the length of the prefix
	mac           string
	kind          Link
}

// Link is what the machines of BootPair have between them.
type Link string

const (
	// Ethernet is TCP/IP alone.
	Ethernet Link = "ethernet"
	// SoftRoCE is RDMA verbs (device rxe0) beside TCP/IP.
	SoftRoCE Link = "soft-roce"
)

// Boot makes a fresh pool, boots a machine on it and waits until it takes
// commands. The test is skipped when the host lacks a prerequisite (prepare).
func Boot(t testing.TB) *VM {
	t.Helper()
	v := newVM(t, prepare(t), "a", freshPool(t))
	v.Start()
	return v
}

// Addresses of the two machines of BootPair, on the network between them.
const (
	AddressA = "10.77.0.1"
	AddressB = "10.77.0.2"
)

// BootPair boots two machines on one fresh pool, with a network between them:
// two hosts that share CXL memory. It waits until both take commands and each
// reaches the other.
func BootPair(t testing.TB, kind Link) (a, b *VM) {
	t.Helper()
	img, pool, sockets := prepare(t), freshPool(t), t.TempDir()
	a, b = newVM(t, img, "a", pool), newVM(t, img, "b", pool)
	plugA, plugB := filepath.Join(sockets, "a"), filepath.Join(sockets, "b")
	a.link = link{local: plugA, remote: plugB, address: AddressA + "/24", mac: "52:54:00:77:00:01", kind: kind}
	b.link = link{local: plugB, remote: plugA, address: AddressB + "/24", mac: "52:54:00:77:00:02", kind: kind}
	a.launch()
	b.launch()
	a.awaitReady()
	b.awaitReady()
	// The cards come up some tenths of a second after the boot.
	a.Run("for i in 1 2 3 4 5 6 7 8 9 10; do ping -c 1 -W 1 " + AddressB + " >/dev/null && exit 0; done; exit 1")
	return a, b
}

func freshPool(t testing.TB) string {
	t.Helper()
	pool := filepath.Join(t.TempDir(), "pool.img")
	if err := makePool(pool, DefaultPoolBytes); err != nil {
		t.Fatalf("vmlab: make the pool: %v", err)
	}
	return pool
}

func newVM(t testing.TB, img image, name, pool string) *VM {
	t.Helper()
	v := &VM{t: t, img: img, dir: t.TempDir(), share: t.TempDir(), pool: pool, name: name, jobs: make(chan int, 1)}
	v.jobs <- 0
	v.disk = filepath.Join(v.dir, "disk.img")
	if err := makeDisk(v.disk); err != nil {
		t.Fatalf("vmlab: make the disk: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("vmlab: console of machine %s:\n%s", name, v.tail("console"))
		}
		v.kill()
	})
	return v
}

// Start boots the machine on the pool as it is, after Crash or PowerOff.
func (v *VM) Start() {
	v.t.Helper()
	v.launch()
	v.awaitReady()
}

// launch starts QEMU.
func (v *VM) launch() {
	v.t.Helper()
	if v.process != nil {
		v.t.Fatalf("vmlab: start of machine %s, which runs", v.name)
	}
	if err := os.RemoveAll(v.agentDir()); err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	if err := os.MkdirAll(v.agentDir(), 0o755); err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	v.boots++
	v.launched = time.Now()
	log, err := os.Create(filepath.Join(v.dir, "qemu"))
	if err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	defer log.Close()
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35,nvdimm=on", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off",
		// The second, absent processor keeps locked instructions atomic between
		// machines on one pool.
		"-smp", "1,maxcpus=2", "-m", "512M,slots=2,maxmem=8G",
		"-kernel", v.img.kernel, "-initrd", v.img.initrd,
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check" +
			" vmlab.name=" + v.name + " vmlab.address=" + v.link.address + " vmlab.link=" + string(v.link.kind),
		"-serial", "file:" + filepath.Join(v.dir, "console"),
		"-chardev", "stdio,id=bell,signal=off", "-serial", "chardev:bell",
		"-object", fmt.Sprintf("memory-backend-file,id=pool,share=on,mem-path=%s,size=%d", v.pool, DefaultPoolBytes),
		"-device", "nvdimm,id=nv0,memdev=pool",
		"-fsdev", "local,id=host,path=" + v.share + ",security_model=none,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		"-drive", "if=none,id=disk,format=raw,file=" + v.disk,
		"-device", "virtio-blk-pci,drive=disk",
	}
	if v.link.local != "" {
		// A socket file outlives a crash, and QEMU does not take it over.
		os.Remove(v.link.local)
		args = append(args,
			"-netdev", "dgram,id=n0,local.type=unix,local.path="+v.link.local+",remote.type=unix,remote.path="+v.link.remote,
			"-device", "virtio-net-pci,netdev=n0,romfile=,mac="+v.link.mac)
	}
	hear, ring, err := os.Pipe()
	if err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	defer hear.Close()
	v.process, v.ended, err = spawn(hear, log, "qemu-system-x86_64", args...)
	if err != nil {
		ring.Close()
		v.t.Fatalf("vmlab: start QEMU: %v", err)
	}
	v.bell = ring
}

// awaitReady returns when the agent of the machine looks for jobs.
func (v *VM) awaitReady() {
	v.t.Helper()
	for {
		if _, err := os.Stat(filepath.Join(v.agentDir(), "ready")); err == nil {
			v.t.Logf("vmlab: boot %d of machine %s took %d ms", v.boots, v.name, time.Since(v.launched).Milliseconds())
			for _, name := range v.programs {
				v.fetch(name)
			}
			return
		}
		select {
		case <-v.ended:
			v.t.Fatalf("vmlab: QEMU ended during the boot of machine %s:\n%s\n%s", v.name, v.tail("qemu"), v.tail("console"))
		case <-time.After(pollEvery):
		}
		if time.Since(v.launched) > bootTimeout {
			v.t.Fatalf("vmlab: machine %s has not booted within %v:\n%s\n%s", v.name, bootTimeout, v.tail("qemu"), v.tail("console"))
		}
	}
}

// agentDir is where host and agent leave files for each other.
func (v *VM) agentDir() string { return filepath.Join(v.share, "jobs") }

// spawn starts a program that dies with this test process, however that ends. The
// kernel ties this to the thread that forked, so one thread stays for it.
func spawn(in, log *os.File, name string, args ...string) (*os.Process, chan struct{}, error) {
	cmd := exec.Command(name, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			// A machine that was killed is no error; one that was not shows in
			// the command that was waiting for it.
			_ = cmd.Wait()
			close(ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, nil, err
	}
	return cmd.Process, ended, nil
}

// Crash ends the machine as a loss of power would: nothing in it gets to run
// again. What it had stored in the pool stays.
func (v *VM) Crash() {
	v.t.Helper()
	if v.process == nil {
		v.t.Fatal("vmlab: Crash of a machine that does not run")
	}
	v.kill()
}

func (v *VM) kill() {
	if v.process == nil {
		return
	}
	// It may have ended by itself.
	_ = v.process.Kill()
	<-v.ended
	v.gone()
}

// gone notes that the process has ended.
func (v *VM) gone() {
	v.process = nil
	v.bell.Close()
}

// ring makes the agent look for files.
func (v *VM) ring() {
	v.t.Helper()
	// A machine that has ended hears nothing, which whoever waits for it finds.
	if _, err := v.bell.WriteString("look\n"); err != nil && !errors.Is(err, syscall.EPIPE) {
		v.t.Fatalf("vmlab: %v", err)
	}
}

// PowerOff ends the machine in order.
func (v *VM) PowerOff() {
	v.t.Helper()
	if v.process == nil {
		v.t.Fatal("vmlab: PowerOff of a machine that does not run")
	}
	if err := os.WriteFile(filepath.Join(v.agentDir(), "poweroff"), nil, 0o644); err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	v.ring()
	select {
	case <-v.ended:
		v.gone()
	case <-time.After(RunTimeout):
		v.t.Fatal("vmlab: the machine does not power off")
	}
}

// Run runs a shell command in the machine and returns what it printed. A status
// other than 0 fails the test.
func (v *VM) Run(command string) string {
	v.t.Helper()
	r := v.Try(command)
	if r.Status != 0 {
		v.t.Fatalf("vmlab: %q: status %d\n%s%s", command, r.Status, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// Try runs a shell command in the machine and returns whatever comes of it.
func (v *VM) Try(command string) Result {
	v.t.Helper()
	return v.Go(command).Wait(RunTimeout)
}

// Job is a command that runs in a machine.
type Job struct {
	v       *VM
	command string
	base    string // its files on the host, without suffix
	ended   chan struct{}
}

// Go starts a shell command in the machine and does not wait for it.
func (v *VM) Go(command string) *Job {
	v.t.Helper()
	n := <-v.jobs
	v.jobs <- n + 1
	j := &Job{v: v, command: command, base: filepath.Join(v.agentDir(), "j"+strconv.Itoa(n)), ended: v.ended}
	if err := writeWhole(j.base+".cmd", []byte(command+"\n")); err != nil {
		v.t.Fatalf("vmlab: %v", err)
	}
	v.ring()
	return j
}

// Output is what the job has printed so far.
func (j *Job) Output() string {
	out, _ := os.ReadFile(j.base + ".out")
	errs, _ := os.ReadFile(j.base + ".err")
	return string(out) + string(errs)
}

// WaitOutput waits until the job has printed text.
func (j *Job) WaitOutput(text string, limit time.Duration) {
	j.v.t.Helper()
	for deadline := time.Now().Add(limit); !strings.Contains(j.Output(), text); time.Sleep(pollEvery) {
		if _, err := os.Stat(j.base + ".rc"); err == nil && !strings.Contains(j.Output(), text) {
			j.v.t.Fatalf("vmlab: %q ended and never printed %q:\n%s", j.command, text, j.Output())
		}
		if time.Now().After(deadline) {
			j.v.t.Fatalf("vmlab: %q has not printed %q within %v:\n%s", j.command, text, limit, j.Output())
		}
	}
}

// Wait returns the result of the job. It fails the test when the machine ends
// before the job, or the limit passes.
func (j *Job) Wait(limit time.Duration) Result {
	j.v.t.Helper()
	for deadline := time.Now().Add(limit); ; {
		status, err := os.ReadFile(j.base + ".rc")
		if err == nil {
			out, _ := os.ReadFile(j.base + ".out")
			errs, _ := os.ReadFile(j.base + ".err")
			n, err := strconv.Atoi(string(bytes.TrimSpace(status)))
			if err != nil {
				j.v.t.Fatalf("vmlab: %q left the status %q", j.command, status)
			}
			return Result{Stdout: string(out), Stderr: string(errs), Status: n}
		}
		select {
		case <-j.ended:
			j.v.t.Fatalf("vmlab: the machine ended under %q:\n%s\n%s", j.command, j.Output(), j.v.tail("console"))
		case <-time.After(pollEvery):
		}
		if time.Now().After(deadline) {
			j.v.t.Fatalf("vmlab: %q did not end within %v:\n%s\n%s", j.command, limit, j.Output(), j.v.tail("console"))
		}
	}
}

// Program builds the Go package pkg ("./cmd/maru") as a static program and returns
// its path in the machine, where it is after every later boot too.
func (v *VM) Program(pkg string) string {
	v.t.Helper()
	return v.install(filepath.Base(pkg), "build", "-trimpath", "-ldflags=-s -w", pkg)
}

// GoTest builds the tests of the Go package pkg with the build tag vmguest, as a
// static program, and runs in the machine those that match run, in the order of
// the source. A failure ends the test.
func (v *VM) GoTest(pkg, run string) {
	v.t.Helper()
	program := v.install(filepath.Base(pkg)+".test", "test", "-c", "-vet=off", "-trimpath", "-ldflags=-s -w", "-tags", "vmguest,invariants", pkg)
	r := v.Try(program + " -test.v -test.run '" + run + "'")
	v.t.Logf("vmlab: %s in machine %s:\n%s", pkg, v.name, r.Stdout)
	if r.Status != 0 {
		v.t.Fatalf("vmlab: %s %s in machine %s: status %d\n%s", pkg, run, v.name, r.Status, r.Stderr)
	}
	// A build without the tag has no tests and passes.
	if !strings.Contains(r.Stdout, "--- PASS") {
		v.t.Fatalf("vmlab: no test of %s matches %s", pkg, run)
	}
}

// install brings a program that the go command builds into the machine, once.
func (v *VM) install(name string, build ...string) string {
	v.t.Helper()
	if !slices.Contains(v.programs, name) {
		if err := os.Link(built(v.t, name, build...), filepath.Join(v.share, name)); err != nil {
			v.t.Fatalf("vmlab: %v", err)
		}
		v.programs = append(v.programs, name)
		v.fetch(name)
	}
	return "/tmp/" + name
}

// fetch copies a program into the memory of the machine. Run from /host, each page
// of it would be a request to the host every time that it is looked at: a start
// takes ten times as long.
func (v *VM) fetch(name string) {
	v.t.Helper()
	v.Run("dd if=/host/" + name + " of=/tmp/" + name + " bs=256k && chmod +x /tmp/" + name)
}

// programs are what built has made, by name: one link for all machines.
var programs struct {
	sync.Mutex
	dir  string // made by TestMain
	made map[string]bool
}

// built returns a static program that the go command makes.
func built(t testing.TB, name string, args ...string) string {
	t.Helper()
	programs.Lock()
	defer programs.Unlock()
	path := filepath.Join(programs.dir, name)
	if programs.made[name] {
		return path
	}
	pkg := len(args) - 1
	cmd := exec.Command("go", slices.Concat(args[:pkg], []string{"-o", path}, args[pkg:])...)
	cmd.Dir = treeRoot(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("vmlab: build %s: %v\n%s", name, err, out)
	}
	programs.made[name] = true
	return path
}

// Share is the folder of the host that the machine sees at /host.
func (v *VM) Share() string { return v.share }

// Pool is the pool file. Offset 0 of /dev/dax0.0 is at PoolDataOffset in it.
func (v *VM) Pool() string { return v.pool }

// tail returns the last lines of a log file of the machine.
func (v *VM) tail(name string) string {
	b, _ := os.ReadFile(filepath.Join(v.dir, name))
	if len(b) > 4000 {
		b = b[len(b)-4000:]
	}
	return string(b)
}
