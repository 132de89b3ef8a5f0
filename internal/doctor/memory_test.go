package doctor

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/media/cpu"
)

func TestContainer(t *testing.T) {
	v2 := map[string]string{
		"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "8589934592\n", "sys/fs/cgroup/a/memory.current": "1\n",
		"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "1\n",
	}
	v1 := map[string]string{
		"proc/self/cgroup": "4:memory:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "8589934592\n",
		"sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1\n",
	}
	for name, files := range map[string]map[string]string{"v2": v2, "v1": v1} {
		o := Options{Root: t.TempDir()}
		if f := container(o); f.Status != OK || !strings.Contains(f.Found, "no memory limit") {
			t.Errorf("no limit: %+v", f)
		}
		for path, text := range files {
			put(t, o.Root, path, text)
		}
		for pool, want := range map[uint64]Status{0: OK, 4 << 30: OK, 7 << 30: Note, 8 << 30: Bad, 9 << 30: Bad} {
			o.PoolBytes = pool
			if f := container(o); f.Status != want || !strings.Contains(f.Found, "8GiB") || (f.Cure == "") != (want == OK) {
				t.Errorf("%s, pool %d: %+v", name, pool, f)
			}
		}
	}
}

func TestMemlock(t *testing.T) {
	for _, c := range []struct {
		limit, pool uint64
		want        Status
	}{{unix.RLIM_INFINITY, 1 << 40, OK}, {8 << 20, 0, Note}, {8 << 20, 4 << 20, OK}, {8 << 20, 16 << 20, Note}} {
		if f := judgeMemlock(Finding{Status: OK}, c.limit, c.pool); f.Status != c.want || f.Found == "" || (f.Cure == "") != (c.want == OK) {
			t.Errorf("%+v: %+v", c, f)
		}
	}
}

func TestHugePages(t *testing.T) {
	o := Options{Root: t.TempDir()}
	const dir = "sys/kernel/mm/hugepages/hugepages-2048kB/"
	put(t, o.Root, dir+"nr_hugepages", "10\n")
	put(t, o.Root, dir+"free_hugepages", "4\n")
	put(t, o.Root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
	if f := hugePages(o); f.Status != Note || !strings.Contains(f.Found, "2M: 10 reserved, 4 free; no pages of 1G; transparent ones of shared memory: never") {
		t.Errorf("%+v", f)
	}
	put(t, o.Root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
	if f := hugePages(o); f.Status != OK {
		t.Errorf("advise: %+v", f)
	}
	o.Pages, o.PoolBytes = cpu.HugePages2M, 8<<20
	if f := hugePages(o); f.Status != OK {
		t.Errorf("enough: %+v", f)
	}
	o.PoolBytes = 10 << 20
	if f := hugePages(o); f.Status != Bad || !strings.Contains(f.Cure, "echo 11 > ") {
		t.Errorf("too few: %+v", f)
	}
	o.Pages = cpu.HugePages1G
	if f := hugePages(o); f.Status != Bad {
		t.Errorf("a size that is not there: %+v", f)
	}
}

// twoSockets fakes nodes 0 and 1 with processors, 2 of CXL memory beside 1, a GPU on 1.
func twoSockets(t *testing.T) Options {
	t.Helper()
	o := Options{Root: t.TempDir()}
	for path, text := range map[string]string{
		"node/has_memory": "0-2\n", "node/online": "0-2\n", "node/node0/distance": "10 21 31\n", "node/node1/distance": "21 10 14\n",
	} {
		put(t, o.Root, "sys/devices/system/"+path, text)
	}
	for path, text := range map[string]string{
		"0000:3b:00.0/vendor": "0x10de\n", "0000:3b:00.0/class": "0x030200\n", "0000:3b:00.0/numa_node": "1\n",
		"0000:3c:00.0/vendor": "0x10de\n", "0000:3c:00.0/class": "0x068000\n", "0000:3c:00.0/numa_node": "0\n", // a switch
		"0000:02:00.0/vendor": "0x1a03\n", "0000:02:00.0/class": "0x030000\n", "0000:02:00.0/numa_node": "0\n", // of the board
	} {
		put(t, o.Root, "sys/bus/pci/devices/"+path, text)
	}
	return o
}

func TestDistances(t *testing.T) {
	o := twoSockets(t)
	if f := distances(o); f.Status != OK || f.Found != "GPU 0000:3b:00.0 on node 1" {
		t.Errorf("a GPU: %+v", f)
	}
	for node, want := range map[int]string{0: "distance 21", 1: "distance 10"} {
		o.Node = &node
		f := distances(o)
		if !strings.Contains(f.Found, want) || (f.Status == OK) != (node == 1) || (f.Cure == "") != (node == 1) {
			t.Errorf("pool on node %d: %+v", node, f)
		}
	}
	seven := 7
	o.Node = &seven
	if f := distances(o); f.Status != Bad || !strings.Contains(f.Found, "nodes with memory: 0, 1, 2") {
		t.Errorf("a node that is not there: %+v", f)
	}

	o = twoSockets(t)
	for name, text := range map[string]string{"size": "1073741824\n", "target_node": "2\n", "numa_node": "1\n"} {
		put(t, o.Root, "sys/bus/dax/devices/dax0.0/"+name, text)
	}
	link(t, o.Root, "sys/bus/dax/devices/dax0.0/driver", "device_dax")
	if f := distances(o); f.Status != OK || !strings.Contains(f.Found, "dax0.0 at distance 14") {
		t.Errorf("a device beside the GPU: %+v", f)
	}
	put(t, o.Root, "sys/bus/dax/devices/dax0.0/numa_node", "0\n")
	if f := distances(o); f.Status != Note || !strings.Contains(f.Cure, "maru_cpu_numa_node") {
		t.Errorf("a device of the other socket: %+v", f)
	}

	one := Options{Root: t.TempDir()}
	put(t, one.Root, "sys/devices/system/node/has_memory", "0\n")
	if f := distances(one); f.Status != OK || !strings.Contains(f.Found, "one node") {
		t.Errorf("one node: %+v", f)
	}
}
