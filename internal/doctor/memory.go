package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/media/cpu"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/hugetlb"
	"github.com/xcena-dev/maru/internal/media/memlimit"
	"github.com/xcena-dev/maru/internal/media/numa"
	"github.com/xcena-dev/maru/internal/settings"
)

func memory(o Options) Finding {
	f := Finding{Name: "memory", Status: OK}
	a, err := memlimit.ReadOn(o.Root, o.Node)
	if err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "mount /proc and /sys, and name a NUMA node that is there"}
	}
	f.Found = fmt.Sprintf("%s available (%s)", settings.AboutSize(a.Bytes), a.Source) + fits(o.PoolBytes, a.Bytes)
	if o.PoolBytes > a.Bytes && o.Pages != cpu.HugePages2M && o.Pages != cpu.HugePages1G {
		f.Status = Bad
		f.Cure = fmt.Sprintf("a pool of %s does not fit: make it smaller, raise the limit, or try all the same with --overcommit of `maru up` and maru-resource-manager", settings.AboutSize(o.PoolBytes))
	}
	return f
}

// container looks at what a container may ever have, whatever is used of it now.
func container(o Options) Finding {
	f := Finding{Name: "container limit", Status: OK}
	limit, ok := memlimit.Limit(o.Root)
	if !ok {
		f.Found = "no memory limit of a control group"
		return f
	}
	f.Found = fmt.Sprintf("%s (%s)", settings.AboutSize(limit.Bytes), limit.Source)
	// An engine beside its pool needs room as well; what it needs nobody knows here.
	switch {
	case o.PoolBytes >= limit.Bytes:
		f.Status = Bad
		f.Cure = fmt.Sprintf("a pool of %s ends by the kernel killing a process: raise the limit (containers: --memory; systemd: MemoryMax=; Kubernetes: resources.limits.memory) above pool and engine together, or make the pool smaller",
			settings.AboutSize(o.PoolBytes))
	case o.PoolBytes > limit.Bytes/4*3:
		f.Status = Note
		f.Cure = fmt.Sprintf("a pool of %s leaves %s to the engine: memory on /dev/shm and of cpu pools counts against the limit too",
			settings.AboutSize(o.PoolBytes), settings.AboutSize(limit.Bytes-o.PoolBytes))
	}
	return f
}

func memlock(o Options) Finding {
	f := Finding{Name: "locked memory", Status: OK}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return Finding{Name: f.Name, Status: Note, Found: err.Error()}
	}
	return judgeMemlock(f, r.Cur, o.PoolBytes)
}

func judgeMemlock(f Finding, limit, pool uint64) Finding {
	if limit == unix.RLIM_INFINITY {
		f.Found = "unlimited"
		return f
	}
	f.Found = settings.AboutSize(limit)
	if pool != 0 && pool <= limit {
		f.Found += fits(pool, limit)
		return f
	}
	f.Status = Note
	f.Cure = "registering a pool with a NIC locks it: `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1)"
	return f
}

func hugePages(o Options) Finding {
	f := Finding{Name: "huge pages", Status: OK}
	var found []string
	for _, size := range []hugetlb.Size{hugetlb.Size2M, hugetlb.Size1G} {
		p, err := hugetlb.Read(o.Root, size, o.Node)
		if err != nil {
			found = append(found, fmt.Sprintf("no pages of %s", size))
			continue
		}
		found = append(found, fmt.Sprintf("%s: %d reserved, %d free", size, p.ReservedCount, p.AvailableCount))
	}
	shmem := chosen(o.path("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
	found = append(found, "transparent ones of shared memory: "+shmem)
	f.Found = strings.Join(found, "; ")
	switch o.Pages {
	case cpu.HugePages2M, cpu.HugePages1G:
		size := hugetlb.Size(o.Pages.GranuleBytes())
		if err := hugetlb.Check(o.Root, size, o.Node, o.PoolBytes); err != nil {
			f.Status, f.Cure = Bad, err.Error()
		}
	case cpu.HugePagesAdvise:
		if shmem == "never" || shmem == "deny" || shmem == "unknown" {
			f.Status = Note
			f.Cure = "cpu pools are made of small pages here, which cost a GPU's or NIC's registration and large copies time: `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or reserve pages and set maru_cpu_hugepages"
		}
	case cpu.HugePagesNone:
	}
	return f
}

// chosen is the word in brackets of a setting in sysfs.
func chosen(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	_, rest, _ := strings.Cut(string(b), "[")
	word, _, ok := strings.Cut(rest, "]")
	if !ok {
		return "unknown"
	}
	return word
}

func maps(o Options) Finding {
	f := Finding{Name: "mappings a process", Status: OK}
	b, err := os.ReadFile(o.path("proc/sys/vm/max_map_count"))
	if err != nil {
		return Finding{Name: f.Name, Status: Note, Found: err.Error()}
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	f.Found = fmt.Sprintf("at most %d (vm.max_map_count)", n)
	const few = 65530 // the kernel's default
	// One a region at the least; torch and the CUDA runtime take some thousands.
	want := max(uint64(few), 2*o.PoolBytes/minRegionBytes)
	if n < want {
		f.Status, f.Cure = Note, fmt.Sprintf("each mapped region takes one: `sysctl vm.max_map_count=%d`", want)
	}
	return f
}

// minRegionBytes is the smallest region that a client asks for by itself.
const minRegionBytes = 64 << 20

// nvidiaDevices lists the display and 3D controllers of NVIDIA in sysfs with their nodes,
// -1 where there is one node only.
func nvidiaDevices(o Options) map[string]int {
	const vendor, controllers = "0x10de", "0x03"
	found := map[string]int{}
	dirs, _ := filepath.Glob(o.path("sys/bus/pci/devices/*"))
	for _, dir := range dirs {
		if word(dir, "vendor") != vendor || !strings.HasPrefix(word(dir, "class"), controllers) {
			continue
		}
		node, err := strconv.Atoi(word(dir, "numa_node"))
		if err != nil {
			node = -1
		}
		found[filepath.Base(dir)] = node
	}
	return found
}

func word(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// place is where a pool may lie.
type place struct {
	name string
	node int
	// near is the node with processors beside it; that of CXL memory has none.
	near int
}

// distances looks at how far the GPUs are from where pools lie.
func distances(o Options) Finding {
	f := Finding{Name: "NUMA", Status: OK}
	nodes, err := numa.Nodes(o.Root)
	if err != nil {
		return Finding{Name: f.Name, Status: Note, Found: err.Error()}
	}
	if o.Node != nil {
		if err := numa.Check(o.Root, *o.Node); err != nil {
			return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "name a node that has memory"}
		}
	}
	devices := nvidiaDevices(o)
	places := places(o, nodes)
	if len(nodes) == 1 && len(places) == 1 {
		f.Found = fmt.Sprintf("one node (%d): all memory is equally far", nodes[0])
		return f
	}
	var found []string
	for _, gpu := range sortedKeys(devices) {
		from := devices[gpu]
		if from < 0 {
			found = append(found, fmt.Sprintf("GPU %s: node unknown", gpu))
			continue
		}
		text := fmt.Sprintf("GPU %s on node %d", gpu, from)
		for _, p := range places {
			if d, err := numa.Distance(o.Root, from, p.node); err == nil {
				text += fmt.Sprintf(", %s at distance %d", p.name, d)
			} else {
				text += fmt.Sprintf(", %s on node %d", p.name, p.node)
			}
			if p.near != from {
				f.Status = Note
			}
		}
		found = append(found, text)
	}
	if len(devices) == 0 {
		for _, p := range places {
			found = append(found, fmt.Sprintf("%s on node %d", p.name, p.node))
		}
		found = append(found, "no GPU")
	}
	f.Found = strings.Join(found, "; ")
	if f.Status == Note {
		f.Cure = "copies between a GPU and memory of another socket share the link between them: maru_cpu_numa_node takes a node for each rank (`maru up --numa-node` one for its pool), and a device serves the GPUs of its own socket best"
	}
	return f
}

// places are the node that was named, else all nodes with memory, and the devices.
func places(o Options, nodes []int) []place {
	var out []place
	if o.Node != nil {
		out = append(out, place{fmt.Sprintf("the pool (node %d)", *o.Node), *o.Node, *o.Node})
	} else if len(nodes) == 1 {
		out = append(out, place{fmt.Sprintf("node %d", nodes[0]), nodes[0], nodes[0]})
	}
	devices, _ := dax.Discover(o.path("sys"))
	for _, d := range devices {
		node := d.TargetNode
		if node < 0 {
			node = d.NUMANode
		}
		if d.Driver == dax.DriverDevice && node >= 0 {
			near := d.NUMANode
			if near < 0 {
				near = node
			}
			out = append(out, place{d.Name, node, near})
		}
	}
	return out
}
