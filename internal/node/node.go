package node

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

const (
	idFile     = "node-id"
	idVersion  = "maru-node-id-1"
	maxIDBytes = 4096
)

// errNotDurable: the id is in its place, but might be lost with the power.
var errNotDurable = fmt.Errorf("%w: node id", base.ErrUnavailable)

// Identity is a machine and its current boot.
type Identity struct {
	Node base.NodeID
	Boot base.BootID
}

// Options says where to look. The zero value is the machine itself.
type Options struct {
	// Root is put in front of all paths; for tests and for containers that see the
	// host's files elsewhere.
	Root string
	// Dir is the directory of the node id; empty means /var/lib/maru when that can be
	// written or has an id already, else the user's state directory
	// ($XDG_STATE_HOME/maru, ~/.local/state/maru).
	Dir string
}

// Read returns who this machine is, and makes a node id when there is none.
// Errors: ErrForeign (the file is of another machine), ErrCorrupt, ErrDenied,
// ErrUnavailable (no boot id).
func Read(o Options) (Identity, error) {
	boot, err := o.BootID()
	if err != nil {
		return Identity{}, err
	}
	node, err := o.NodeID()
	if err != nil {
		return Identity{}, err
	}
	return Identity{Node: node, Boot: boot}, nil
}

// BootID reads the kernel's boot id. Errors: ErrUnavailable.
func (o Options) BootID() (base.BootID, error) {
	path := o.path("/proc/sys/kernel/random/boot_id")
	b, err := os.ReadFile(path)
	if err != nil {
		return base.BootID{}, fmt.Errorf("%w: reading the boot id: %w; without it a reboot cannot be told from a silent peer",
			base.ErrUnavailable, err)
	}
	id, err := base.ParseID(strings.TrimSpace(string(b)))
	if err != nil || id == [base.IDBytes]byte{} {
		return base.BootID{}, fmt.Errorf("%w: %s holds %.40q, no boot id", base.ErrUnavailable, path, b)
	}
	return id, nil
}

// BootID is [Options.BootID] of this machine.
func BootID() (base.BootID, error) { return Options{}.BootID() }

func (o Options) path(p string) string { return filepath.Join("/", o.Root, p) }

// dirs are the places of the node id, best first.
func (o Options) dirs() []string {
	if o.Dir != "" {
		return []string{o.path(o.Dir)}
	}
	dirs := []string{o.path("/var/lib/maru")}
	if d := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		dirs = append(dirs, o.path(filepath.Join(d, "maru")))
	} else if home, err := os.UserHomeDir(); err == nil && filepath.IsAbs(home) {
		dirs = append(dirs, o.path(filepath.Join(home, ".local/state/maru")))
	}
	return dirs
}

// NodeID reads the machine's node id, and makes it at the first start. An id in the
// first place that has one is used, so that all users of a machine agree as soon as
// one of them could write /var/lib/maru.
func (o Options) NodeID() (base.NodeID, error) {
	uuid := o.dmiUUID()
	var problems []error
	for _, dir := range o.dirs() {
		id, err := readID(filepath.Join(dir, idFile), uuid)
		if err == nil {
			return id, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			return base.NodeID{}, err
		}
	}
	for _, dir := range o.dirs() {
		id, err := makeID(dir, uuid)
		if err == nil {
			return id, nil
		}
		// An id that others may have read already must not be followed by another one elsewhere.
		if errors.Is(err, base.ErrForeign) || errors.Is(err, base.ErrCorrupt) || errors.Is(err, errNotDurable) {
			return base.NodeID{}, err
		}
		problems = append(problems, err)
	}
	return base.NodeID{}, fmt.Errorf("%w: no directory for the node id: %w; make one of them writable, or name another",
		base.ErrDenied, errors.Join(problems...))
}

// dmiUUID returns the firmware's machine UUID, which only root can read on most
// systems, or "" when it is not there or is a placeholder.
func (o Options) dmiUUID() string {
	for _, p := range []string{"/sys/class/dmi/id/product_uuid", "/sys/devices/virtual/dmi/id/product_uuid"} {
		b, err := os.ReadFile(o.path(p))
		if err != nil {
			continue
		}
		id, err := base.ParseID(strings.TrimSpace(string(b)))
		if err != nil {
			continue
		}
		// Firmware without a number shows all zeroes or all ones; those would make
		// every such machine look like the same one.
		uniform := true
		for _, c := range id {
			uniform = uniform && c == id[0]
		}
		if !uniform {
			return base.NodeID(id).String()
		}
	}
	return ""
}

func readID(path, uuid string) (base.NodeID, error) {
	f, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return base.NodeID{}, fmt.Errorf("%w: reading the node id: %w", base.ErrDenied, err)
		}
		return base.NodeID{}, err
	}
	defer f.Close() //nolint:errcheck // read only
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > maxIDBytes {
		return base.NodeID{}, fmt.Errorf("%w: %s is no node id file", base.ErrCorrupt, path)
	}
	fields := map[string]string{}
	sc := bufio.NewScanner(f)
	for first := true; sc.Scan(); first = false {
		if first {
			if sc.Text() != idVersion {
				return base.NodeID{}, fmt.Errorf("%w: %s begins with %.40q, not with %q; remove it only if no pool of this machine is in use",
					base.ErrCorrupt, path, sc.Text(), idVersion)
			}
			continue
		}
		k, v, _ := strings.Cut(sc.Text(), "=")
		fields[k] = v
	}
	if err := sc.Err(); err != nil {
		return base.NodeID{}, fmt.Errorf("%w: reading %s: %w", base.ErrCorrupt, path, err)
	}
	id, err := base.ParseID(fields["node"])
	if err != nil || id == [base.IDBytes]byte{} || fields["end"] != "1" {
		return base.NodeID{}, fmt.Errorf("%w: %s has no whole node id; remove it only if no pool of this machine is in use",
			base.ErrCorrupt, path)
	}
	// A process that may not read the firmware cannot compare; the daemons run as root
	// where it matters, and they do.
	if was := fields["machine"]; was != "" && uuid != "" && was != uuid {
		return base.NodeID{}, fmt.Errorf("%w: %s was made on machine %s, this one is %s (a copied image?); remove the file on the copy, "+
			"never on the first machine", base.ErrForeign, path, was, uuid)
	}
	return id, nil
}

func makeID(dir, uuid string) (base.NodeID, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return base.NodeID{}, err
	}
	path := filepath.Join(dir, idFile)
	tmp, err := os.CreateTemp(dir, ".node-id-*")
	if err != nil {
		return base.NodeID{}, err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // gone or not, the name is random
	id := base.NodeID(base.NewID())
	_, err = fmt.Fprintf(tmp, "%s\nnode=%s\nmachine=%s\nend=1\n", idVersion, id, uuid)
	// Others of this machine must read the same id.
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close())
	if err != nil {
		return base.NodeID{}, fmt.Errorf("writing %s: %w", path, err)
	}
	// link, unlike rename, never replaces: of two first starts one wins, both agree.
	if err := os.Link(tmp.Name(), path); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return readID(path, uuid)
		}
		return base.NodeID{}, err
	}
	if err := syncDir(dir); err != nil {
		return base.NodeID{}, fmt.Errorf("%w: making %s durable: %w", errNotDurable, path, err)
	}
	return id, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // read only
	// Some file systems cannot sync a directory; that is no reason to refuse to start.
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return err
	}
	return nil
}

// BootTime reads CLOCK_BOOTTIME: monotonic, goes on while the machine is suspended,
// the same for all processes of a boot. Sessions are judged by it and never by the
// wall clock (docs/PROTOCOL.md, "Session validity").
func BootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// Linux has had this clock since 2.6.39; only a sandbox that forbids it comes here,
		// and a clock that stands still would keep every session alive.
		panic("maru: CLOCK_BOOTTIME cannot be read: " + err.Error())
	}
	return time.Duration(ts.Nano())
}
