package doctor

import (
	"fmt"
	stdmaps "maps"
	"os"
	"slices"
	"strings"

	"github.com/xcena-dev/maru/internal/gpu"
)

// nvidia looks for the driver that copies of GPU memory need, and for what stands in
// their way.
func nvidia(o Options) Finding {
	f := Finding{Name: "GPU", Status: OK}
	version, err := os.ReadFile(o.path("proc/driver/nvidia/version"))
	if err != nil {
		return Finding{Name: f.Name, Status: Note, Found: "no NVIDIA driver", Cure: "none is needed for tensors of host memory"}
	}
	f.Found, _, _ = strings.Cut(strings.TrimSpace(string(version)), "\n")
	f.Found = strings.TrimPrefix(f.Found, "NVRM version: ")
	f.Found += "; pools on dax devices, hugetlbfs and tmpfs are registered, one in a file on a disk goes through a bounce buffer"
	return f
}

// cuda looks at the driver's library, which the copies are made by.
func cuda(o Options) Finding {
	f := Finding{Name: "CUDA driver", Status: OK}
	if _, err := os.Stat(o.path("proc/driver/nvidia/version")); err != nil {
		f.Found = "none, and no GPU that needs one"
		return f
	}
	ask := o.CUDA
	if ask == nil {
		ask = gpu.Version
	}
	version, err := ask()
	if err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: err.Error(), Cure: "containers need the driver's libraries (--gpus all); else install the driver's user part, libcuda.so.1 of CUDA 12.0 (driver 525) or later"}
	}
	f.Found = fmt.Sprintf("for CUDA %d.%d", version/1000, version%1000/10)
	if version < batchVersion {
		f.Status, f.Cure = Note, "from CUDA 12.8 (driver 570) on many copies are one call; before, runs of 2 MiB and more are copied one by one"
	}
	return f
}

// batchVersion is the first CUDA with batches of copies.
const batchVersion = 12080

func mps(o Options) Finding {
	f := Finding{Name: "CUDA MPS", Status: OK, Found: "not running"}
	if control := gpu.MPSControl(o.Root); control != "" {
		f.Status, f.Found = Bad, "runs ("+control+")"
		f.Cure = "under MPS another process owns the copies, and nobody can prove that they have ended: engines with Maru refuse it; stop it by `echo quit | nvidia-cuda-mps-control`"
	}
	return f
}

func sortedKeys(m map[string]int) []string { return slices.Sorted(stdmaps.Keys(m)) }
