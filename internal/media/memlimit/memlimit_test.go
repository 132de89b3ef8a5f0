package memlimit

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

func root(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestRead(t *testing.T) {
	const mem = "MemTotal:       24683656 kB\nMemAvailable:   1000 kB\n"
	cases := []struct {
		name  string
		files map[string]string
		want  uint64
	}{
		{"machine only", map[string]string{"proc/meminfo": mem}, 1000 << 10},
		{"v2, own group", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "100000\n",
		}, 400000},
		{"v2, cache goes first", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "0::/a\n",
			"sys/fs/cgroup/a/memory.max": "500000\n", "sys/fs/cgroup/a/memory.current": "100000\n",
			"sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 60000\n",
		}, 460000},
		{"v2, the parent is tighter", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "1\n",
			"sys/fs/cgroup/a/memory.max": "300\n", "sys/fs/cgroup/a/memory.current": "400\n",
		}, 0},
		{"v2, path of the host", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "0::/docker/x\n",
			"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "1000\n",
		}, 4000},
		{"v1", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/j\n",
			"sys/fs/cgroup/memory/j/memory.limit_in_bytes": "5000\n", "sys/fs/cgroup/memory/j/memory.usage_in_bytes": "2000\n",
			"sys/fs/cgroup/memory/j/memory.stat":         "inactive_file 7\ntotal_inactive_file 500\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
		}, 3500},
		{"nonsense", map[string]string{
			"proc/meminfo": mem, "proc/self/cgroup": "\n:\nx:y\n0::/../../..\n",
			"sys/fs/cgroup/memory.max": "x",
		}, 1000 << 10},
	}
	for _, c := range cases {
		got, err := Read(root(t, c.files))
		if err != nil || got.Bytes != c.want || got.Source == "" {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
	if _, err := Read(t.TempDir()); !errors.Is(err, base.ErrUnavailable) {
		t.Errorf("nothing known: %v", err)
	}
	if got, err := Read(""); err != nil || got.Bytes == 0 {
		t.Errorf("this machine: %+v, %v", got, err)
	}
}
