package up

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/media/hugetlb"
	"github.com/xcena-dev/maru/internal/media/hugetlb/hugetlbtest"
	"github.com/xcena-dev/maru/internal/media/numa"
)

func TestMain(m *testing.M) { leak.Check(m) }

func start(t *testing.T, o Options) *Up {
	t.Helper()
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	u, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func stop(t *testing.T, u *Up) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := u.Close(ctx); err != nil {
		t.Error(err)
	}
}

// Two deployments in one process, each used, each gone without a trace.
func TestUpServesAndLeavesNothingBehind(t *testing.T) {
	parent := t.TempDir()
	var dirs []string
	for _, name := range []string{"a", "b"} {
		dir := filepath.Join(parent, name)
		dirs = append(dirs, dir)
		const usable = 16 << 20
		u := start(t, Options{Dir: dir, CXLBytes: usable})
		a := u.Addresses()
		if a.Dir != dir || a.RM == "" || a.HTTP == "" {
			t.Errorf("addresses %+v", a)
		}
		c, err := client.Open(t.Context(), client.Config{
			ServerAddress: a.Server, Namespace: keys.OpaqueNamespace(), Opaque: true, PageBytes: 4096, RegionBytes: usable,
		})
		if err != nil {
			t.Fatal(err)
		}
		pages := make([]client.Page, 1)
		if n, err := c.Alloc(t.Context(), 1, pages); n != 1 || err != nil {
			t.Fatalf("alloc: %d, %v", n, err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
		cancel()
		defer stop(t, u)
	}
	t.Cleanup(func() {
		for _, dir := range dirs {
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", dir, err)
			}
		}
	})
}

func TestUpKeepsWhatIsNotItsOwn(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	if err := os.WriteFile(mine, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	u := start(t, Options{Dir: dir})
	if a := u.Addresses(); a.RM != "" {
		t.Errorf("without a cxl pool there is a resource manager at %s", a.RM)
	}
	if _, err := Start(t.Context(), Options{Dir: dir, Listen: "127.0.0.1:0"}); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second one in the same directory: %v", err)
	}
	stop(t, u)
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "mine" {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestUpRefusesAndLeavesNothing(t *testing.T) {
	parent := t.TempDir()
	u := start(t, Options{Dir: filepath.Join(parent, "first")})
	defer stop(t, u)
	taken := strings.TrimPrefix(u.Addresses().Server, "tcp://")
	for _, c := range []struct {
		name string
		o    Options
		is   error
		says string
	}{
		{"no port", Options{Listen: "localhost"}, base.ErrInvalid, "HOST:PORT"},
		{"bad port", Options{Listen: "localhost:x"}, base.ErrInvalid, "port"},
		{"port taken", Options{Listen: taken}, base.ErrBusy, taken[strings.LastIndex(taken, ":")+1:]},
		{"other hosts reach it", Options{Listen: "0.0.0.0:0"}, base.ErrInvalid, "insecure"},
		{"pool larger than memory", Options{Listen: "127.0.0.1:0", CXLBytes: 1 << 50}, base.ErrFull, "pool"},
	} {
		dir := filepath.Join(parent, strings.ReplaceAll(c.name, " ", "-"))
		c.o.Dir = dir
		got, err := Start(t.Context(), c.o)
		if err == nil {
			stop(t, got)
		}
		if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %v that says %q", c.name, err, c.is, c.says)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the directory is left: %v", c.name, err)
		}
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	u := start(t, Options{Dir: filepath.Join(t.TempDir(), "d"), HTTP: HTTPOff})
	defer stop(t, u)
	if a := u.Addresses(); a.HTTP != "" {
		t.Errorf("HTTP is at %s although it is off", a.HTTP)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- u.Wait(ctx) }()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The pool on one node and on huge pages: used like any other, gone without a trace.
func TestUpOnANodeAndHugePages(t *testing.T) {
	zero, far := 0, 900
	if _, err := numa.Nodes(""); err != nil {
		t.Skip(err)
	}
	if _, err := Start(t.Context(), Options{Listen: "127.0.0.1:0", CXLBytes: 4 << 20, NUMANode: &far}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a node that is not there: %v", err)
	}
	if _, err := Start(t.Context(), Options{Listen: "127.0.0.1:0", NUMANode: &zero}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a node for no pool: %v", err)
	}
	store := func(o Options) {
		t.Helper()
		u := start(t, o)
		defer stop(t, u)
		c, err := client.Open(t.Context(), client.Config{
			ServerAddress: u.Addresses().Server, Opaque: true, PageBytes: 4096, RegionBytes: 4 << 20,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close(context.Background()) }()
		pages := make([]client.Page, 1)
		if n, err := c.Alloc(t.Context(), 1, pages); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		copy(pages[0].Bytes, "on a node")
	}
	store(Options{CXLBytes: 4 << 20, NUMANode: &zero})

	const bytes = 4<<20 + 4<<20 // with records, region line and header
	hugetlbtest.Reserve(t, bytes/(2<<20))
	mount, err := hugetlb.Mount("", hugetlb.Size2M)
	if err != nil {
		mount = t.TempDir()
		if err := unix.Mount("none", mount, "hugetlbfs", 0, "pagesize=2M"); err != nil {
			t.Skip("no hugetlbfs is mounted, and mounting one needs root: ", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(mount, 0) })
	}
	if _, err := Start(t.Context(), Options{Listen: "127.0.0.1:0", CXLBytes: 1 << 40, Pages: PagesHuge2M}); !errors.Is(err, base.ErrFull) || !strings.Contains(err.Error(), "nr_hugepages") {
		t.Errorf("more than is reserved: %v", err)
	}
	store(Options{CXLBytes: 4 << 20, NUMANode: &zero, Pages: PagesHuge2M})
	if left, _ := filepath.Glob(filepath.Join(mount, "maru-up-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
