package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func find(t *testing.T, all []Finding, name string) Finding {
	t.Helper()
	for _, f := range all {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no finding %q in %+v", name, all)
	return Finding{}
}

func TestThisMachine(t *testing.T) {
	for _, f := range Examine(t.Context(), Options{}) {
		if f.Name == "" || f.Found == "" || (f.Status != OK && f.Status != Note && f.Status != Bad) {
			t.Errorf("finding %+v", f)
		}
		if f.Status == Bad && f.Cure == "" {
			t.Errorf("%s is bad and has no cure", f.Name)
		}
	}
}

func TestAPoolThatDoesNotFit(t *testing.T) {
	all := Examine(t.Context(), Options{PoolBytes: 1 << 50})
	for _, name := range []string{"/dev/shm", "memory"} {
		f := find(t, all, name)
		if f.Status != Bad || !strings.Contains(f.Cure, "1024TiB") && !strings.Contains(f.Cure, "1PiB") {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

func put(t *testing.T, root, path, text string) {
	t.Helper()
	full := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAMachineMadeUp(t *testing.T) {
	root := t.TempDir()
	o := Options{Root: root}
	if f := memory(o); f.Status != Bad {
		t.Errorf("no /proc: %+v", f)
	}
	if f := devices(o); f.Status != Note || f.Found != "none" {
		t.Errorf("no devices: %+v", f)
	}
	put(t, root, "proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
	if f := memory(Options{Root: root, PoolBytes: 3 << 20}); f.Status != Bad || !strings.Contains(f.Cure, "overcommit") {
		t.Errorf("3 MiB of 2: %+v", f)
	}
	put(t, root, "proc/sys/vm/max_map_count", "1000\n")
	if f := maps(o); f.Status != Note || !strings.Contains(f.Found, "1000") {
		t.Errorf("few mappings: %+v", f)
	}
	put(t, root, "proc/sys/vm/max_map_count", "262144\n")
	if f := maps(o); f.Status != OK {
		t.Errorf("many mappings: %+v", f)
	}
}

func TestKernelVersions(t *testing.T) {
	for release, want := range map[string][2]int{"6.18.44-x": {6, 18}, "5.4": {5, 4}, "6.1-rc3": {6, 1}, "odd": {0, 0}} {
		if major, minor := version(release); [2]int{major, minor} != want {
			t.Errorf("%s is %d.%d", release, major, minor)
		}
	}
}

func link(t *testing.T, root, path, target string) {
	t.Helper()
	full := filepath.Join(root, path)
	if err := os.Symlink(target, full); err != nil {
		t.Fatal(err)
	}
}
