// Package doctor looks at a machine as a place for Maru and says, for each thing
// that is not as it should be, what it means and what to do. It changes nothing.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/media/cpu"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/settings"
)

// Status of a finding.
type Status string

// Statuses. Bad means that something which is configured or common will not work.
const (
	OK   Status = "ok"
	Note Status = "note"
	Bad  Status = "bad"
)

// Finding is the outcome of one look.
type Finding struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Cure   string `json:"cure,omitempty"`
}

// Options of an examination. Zero means this machine and the default ports.
type Options struct {
	// PoolBytes is the size of the pool that somebody wants; 0: only say what fits.
	PoolBytes uint64
	// Node is the NUMA node that the pool's memory comes from; nil: any.
	Node *int
	// Pages is what the pool is made of.
	Pages cpu.HugePages
	// Python is the interpreter that runs the engine; "": it is not looked at.
	Python string
	// Root is put in front of /proc, /sys and /dev, for tests.
	Root string
	// CUDA tells the version of the driver, for tests; nil: it is asked.
	CUDA func() (int, error)
}

// Examine takes every look.
func Examine(ctx context.Context, o Options) []Finding {
	return []Finding{
		kernel(), devices(o), sharedMemory(o), memory(o), container(o), memlock(o), hugePages(o), maps(o), distances(o), ports(ctx), identity(o),
		pidNamespace(o), nvidia(o), cuda(o), mps(o), engine(ctx, o),
	}
}

func (o Options) path(p string) string { return filepath.Join("/", o.Root, p) }

func kernel() Finding {
	f := Finding{Name: "kernel", Status: OK}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Finding{Name: "kernel", Status: Bad, Found: err.Error(), Cure: "Maru runs on Linux"}
	}
	release := unix.ByteSliceToString(u.Release[:])
	f.Found = fmt.Sprintf("Linux %s, %s", release, runtime.GOARCH)
	major, minor := version(release)
	switch {
	case major < 5 || major == 5 && minor < 14:
		f.Status, f.Cure = Bad, "5.14 or later is needed: pidfds prove that a process is gone, MADV_POPULATE_WRITE touches memory"
	case major < 6 || major == 6 && minor < 5:
		f.Status, f.Cure = Note, "from 6.5 on a socket tells its peer's pidfd; before, the pid is looked up and checked against its start time"
	}
	return f
}

func version(release string) (major, minor int) {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 2 {
		return 0, 0
	}
	major, _ = strconv.Atoi(parts[0])
	if end := strings.IndexFunc(parts[1], func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		parts[1] = parts[1][:end]
	}
	minor, _ = strconv.Atoi(parts[1])
	return major, minor
}

func devices(o Options) Finding {
	f := Finding{Name: "dax devices", Status: OK}
	all, err := dax.Discover(o.path("sys"))
	if err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "look at /sys/bus/dax/devices as root"}
	}
	var found []string
	for _, d := range all {
		found = append(found, fmt.Sprintf("%s %s driver %s", d.Path, settings.AboutSize(d.SizeBytes), d.Driver))
		if d.Driver == dax.DriverKmem {
			f.Status, f.Cure = Note, "kmem gives a device's memory to the system: `daxctl reconfigure-device --mode=devdax "+d.Name+"` gives it back"
		}
	}
	if len(found) == 0 {
		return Finding{Name: f.Name, Status: Note, Found: "none", Cure: "`maru up` emulates a pool on /dev/shm; a CXL device appears here once it is in devdax mode"}
	}
	f.Found = strings.Join(found, "; ")
	return f
}

func sharedMemory(o Options) Finding {
	f := Finding{Name: "/dev/shm", Status: OK}
	var s unix.Statfs_t
	if err := unix.Statfs(o.path("dev/shm"), &s); err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "mount a tmpfs on /dev/shm, or give `maru up --dir` another place"}
	}
	total, free := s.Blocks*uint64(s.Bsize), s.Bavail*uint64(s.Bsize) //nolint:gosec // a block size is positive
	f.Found = fmt.Sprintf("%s, %s free", settings.AboutSize(total), settings.AboutSize(free)) + fits(o.PoolBytes, free)
	switch {
	case o.PoolBytes > free:
		f.Status = Bad
		f.Cure = fmt.Sprintf("the pool needs %s: remove files there, or `mount -o remount,size=%s /dev/shm` (containers: --shm-size)",
			settings.AboutSize(o.PoolBytes), settings.AboutSize(o.PoolBytes*5/4))
	case total <= 64<<20:
		f.Status, f.Cure = Bad, "this is a container's default: give it --shm-size, or mount the host's /dev/shm"
	}
	return f
}

func ports(ctx context.Context) Finding {
	f := Finding{Name: "ports", Status: OK}
	var free, taken []string
	for _, p := range []int{rm.DefaultPort, server.DefaultPort, server.DefaultPort + 1} {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p)))
		if err != nil {
			taken = append(taken, strconv.Itoa(p))
			continue
		}
		_ = l.Close()
		free = append(free, strconv.Itoa(p))
	}
	f.Found = "free: " + cmp.Or(strings.Join(free, ", "), "none")
	if len(taken) > 0 {
		f.Status = Note
		f.Found += "; in use: " + strings.Join(taken, ", ")
		f.Cure = "fine when maru runs here (`maru usage`); else find the program with `ss -ltnp`, or choose other ports (daemons: --port; `maru up`: --listen)"
	}
	return f
}

func identity(o Options) Finding {
	f := Finding{Name: "machine identity", Status: OK}
	id, err := node.Read(node.Options{Root: o.Root})
	if err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "holds name the machine: its id must be readable and its own"}
	}
	f.Found = fmt.Sprintf("node %s, boot %s", id.Node, id.Boot)
	return f
}

func pidNamespace(o Options) Finding {
	f := Finding{Name: "pid namespace", Status: OK}
	own, err1 := os.Readlink(o.path("proc/self/ns/pid"))
	first, err2 := os.Readlink(o.path("proc/1/ns/pid"))
	if err := errors.Join(err1, err2); err != nil {
		return Finding{
			Name: f.Name, Status: Note, Found: err.Error(),
			Cure: "it cannot be compared with init's without root and CAP_SYS_PTRACE, which containers lack; daemons must run in the host's pid namespace to vouch for their clients after a restart",
		}
	}
	f.Found = own
	// Init of a container is not init of the host, but daemons and engines that share
	// what pid 1 has can vouch for one another.
	if own != first {
		f.Status, f.Cure = Note, "clients of another pid namespace are not provable after a daemon's restart: run the daemons with the host's (--pid=host)"
	}
	return f
}

// fits says that what was asked for has room, where it was and it has.
func fits(want, room uint64) string {
	if want == 0 || want > room {
		return ""
	}
	return fmt.Sprintf(": the pool of %s fits", settings.AboutSize(want))
}
