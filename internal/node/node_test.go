package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

const (
	uuidA = "01234567-89ab-cdef-0123-456789abcdef"
	uuidB = "11111111-89ab-cdef-0123-456789abcdef"
)

// machine makes a root with a boot id and, if not empty, a DMI UUID.
func machine(t *testing.T, uuid string) Options {
	t.Helper()
	root := t.TempDir()
	write(t, filepath.Join(root, "proc/sys/kernel/random/boot_id"), "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee\n")
	if uuid != "" {
		write(t, filepath.Join(root, "sys/class/dmi/id/product_uuid"), uuid+"\n")
	}
	return Options{Root: root}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestReadTwice(t *testing.T) {
	o := machine(t, uuidA)
	a, err := Read(o)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Read(o)
	if err != nil || a != b || a.Node == (base.NodeID{}) || a.Boot == (base.BootID{}) {
		t.Fatalf("%v, then %v, %v", a, b, err)
	}
	left, err := filepath.Glob(filepath.Join(o.Root, "var/lib/maru/.node-id-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestCopiedToAnotherMachine(t *testing.T) {
	a, b := machine(t, uuidA), machine(t, uuidB)
	if _, err := a.NodeID(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(a.Root, "var/lib/maru/node-id"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(b.Root, "var/lib/maru/node-id"), string(text))
	if _, err := b.NodeID(); !errors.Is(err, base.ErrForeign) || !strings.Contains(err.Error(), uuidA) || !strings.Contains(err.Error(), uuidB) {
		t.Errorf("a copied id: %v", err)
	}
	// An ordinary user cannot read the firmware; the id is the same for him.
	c := machine(t, "")
	write(t, filepath.Join(c.Root, "var/lib/maru/node-id"), string(text))
	if _, err := c.NodeID(); err != nil {
		t.Error(err)
	}
	// Placeholders of firmware say nothing.
	for _, u := range []string{strings.Repeat("0", 32), strings.Repeat("f", 32), "Not Settable"} {
		d := machine(t, u)
		write(t, filepath.Join(d.Root, "var/lib/maru/node-id"), string(text))
		if _, err := d.NodeID(); err != nil {
			t.Errorf("placeholder %q: %v", u, err)
		}
	}
}

func TestDamagedFile(t *testing.T) {
	for _, text := range []string{
		"", "maru-node-id-1\n", "maru-node-id-2\nnode=" + uuidA + "\nend=1\n", "maru-node-id-1\nnode=" + uuidA + "\n",
		"maru-node-id-1\nnode=00000000-0000-0000-0000-000000000000\nend=1\n", strings.Repeat("x", 5000),
	} {
		o := machine(t, "")
		path := filepath.Join(o.Root, "var/lib/maru/node-id")
		write(t, path, text)
		if _, err := o.NodeID(); !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), path) {
			t.Errorf("%.30q: %v", text, err)
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != text {
			t.Errorf("%.30q was changed to %.30q, %v", text, now, err)
		}
	}
}

func TestFallbackDirectory(t *testing.T) {
	o := machine(t, "")
	t.Setenv("XDG_STATE_HOME", "/state")
	// A file where the directory should be cannot be written by anybody, not even root.
	write(t, filepath.Join(o.Root, "var/lib"), "")
	id, err := o.NodeID()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(o.Root, "state/maru/node-id")); err != nil {
		t.Error(err)
	}
	if again, err := o.NodeID(); err != nil || again != id {
		t.Errorf("%v, then %v, %v", id, again, err)
	}
	write(t, filepath.Join(o.Root, "nowhere"), "")
	o.Dir = "/nowhere/x"
	if _, err := o.NodeID(); !errors.Is(err, base.ErrDenied) {
		t.Errorf("nowhere to write: %v", err)
	}
}

func TestConcurrentFirstStart(t *testing.T) {
	o := machine(t, uuidA)
	ids := make([]base.NodeID, 16)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			var err error
			if ids[i], err = o.NodeID(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two ids of one machine: %v and %v", id, ids[0])
		}
	}
}

func TestBootID(t *testing.T) {
	if _, err := (Options{Root: t.TempDir()}).BootID(); !errors.Is(err, base.ErrUnavailable) {
		t.Errorf("no boot id: %v", err)
	}
	o := machine(t, "")
	write(t, filepath.Join(o.Root, "proc/sys/kernel/random/boot_id"), "00000000-0000-0000-0000-000000000000")
	if _, err := Read(o); !errors.Is(err, base.ErrUnavailable) {
		t.Errorf("zero boot id: %v", err)
	}
	a, err := BootID()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := BootID(); err != nil || a != b {
		t.Errorf("%v, then %v, %v", a, b, err)
	}
}

func TestBootTimeRises(t *testing.T) {
	a := BootTime()
	time.Sleep(2 * time.Millisecond)
	if d := BootTime() - a; d < 2*time.Millisecond || d > time.Minute {
		t.Errorf("rose by %v", d)
	}
}
