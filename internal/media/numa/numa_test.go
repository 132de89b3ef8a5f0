package numa

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

// twoNodes fakes a machine with nodes 0 and 2.
func twoNodes(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"has_memory": "0,2\n", "online": "0,2\n", "node0/distance": "10 21\n", "node2/distance": "21 10\n",
	} {
		p := filepath.Join(root, "sys/devices/system/node", name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestCheck(t *testing.T) {
	root := twoNodes(t)
	if err := Check(root, 2); err != nil {
		t.Error(err)
	}
	if err := Check(root, 1); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "node 1 has no memory or is not there; nodes with memory: 0, 2") {
		t.Errorf("node 1: %v", err)
	}
	if err := Check(t.TempDir(), 0); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("no nodes: %v", err)
	}
}

func TestDistance(t *testing.T) {
	root := twoNodes(t)
	if d, err := Distance(root, 0, 2); d != 21 || err != nil {
		t.Errorf("0 to 2: %d, %v", d, err)
	}
	if d, err := Distance(root, 2, 2); d != 10 || err != nil {
		t.Errorf("2 to 2: %d, %v", d, err)
	}
	for _, c := range [][2]int{{0, 1}, {1, 0}} {
		if _, err := Distance(root, c[0], c[1]); !errors.Is(err, base.ErrUnavailable) {
			t.Errorf("%v: %v", c, err)
		}
	}
}

func TestParseList(t *testing.T) {
	for text, want := range map[string][]int{"0": {0}, "0-1,4": {0, 1, 4}, "": nil, "3-1": nil, "a": nil, "0-": nil, "-1": nil, "0-99999": nil} {
		got, err := parseList(text)
		if !slices.Equal(got, want) || (err == nil) != (want != nil || text == "") {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// policy is what the kernel says of the mapping at the address of data.
func policy(t *testing.T, data []byte) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/numa_maps")
	if err != nil {
		t.Skip("the kernel shows no policies: ", err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == addressText(data) {
			return f[1]
		}
	}
	return ""
}

func needNodes(t *testing.T) {
	t.Helper()
	if _, err := Nodes(""); err != nil {
		t.Skip(err)
	}
}

func TestBind(t *testing.T) {
	needNodes(t)
	data, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(data) }()
	if p := policy(t, data); p != "default" {
		t.Errorf("before: %q", p)
	}
	if err := Bind(data, 0); err != nil {
		t.Fatal(err)
	}
	if p := policy(t, data); p != "bind:0" {
		t.Errorf("bound: %q", p)
	}
	for _, node := range []int{-1, MaxNode, MaxNode + 1} {
		if err := Bind(data, node); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("node %d: %v", node, err)
		}
	}
}

// What fn allocates is under the policy; nobody else's thread ever has it.
func TestWith(t *testing.T) {
	needNodes(t)
	fault := errors.New("what fn says")
	mode := func() string {
		b, err := os.ReadFile("/proc/thread-self/numa_maps")
		if err != nil {
			t.Skip("the kernel shows no policies: ", err)
		}
		f := strings.Fields(string(b))
		return f[1]
	}
	var inside string
	if err := With(0, func() error { inside = mode(); return fault }); !errors.Is(err, fault) {
		t.Error(err)
	}
	if inside != "bind:0" {
		t.Errorf("inside: %q", inside)
	}
	for range 20 {
		done := make(chan string)
		go func() { done <- mode() }()
		if outside := <-done; outside != "default" {
			t.Fatalf("outside: %q", outside)
		}
	}
	ran := false
	if err := With(MaxNode, func() error { ran = true; return nil }); !errors.Is(err, base.ErrInvalid) || ran {
		t.Errorf("a node that is not there: %v, ran %v", err, ran)
	}
}
