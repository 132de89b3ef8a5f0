package doctor

import (
	"fmt"
	"os"
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
	if control := gpu.MPSControl(o.Root); control != "" {
		f.Status = Bad
		f.Found += fmt.Sprintf("; CUDA MPS runs (%s)", control)
		f.Cure = "under MPS another process owns the copies, and nobody can prove that they have ended: engines with Maru refuse it; stop it by `echo quit | nvidia-cuda-mps-control`"
		return f
	}
	if o.Root == "" {
		if err := gpu.Load(); err != nil {
			f.Status, f.Cure = Note, err.Error()
			return f
		}
	}
	f.Found += "; pools on dax devices, hugetlbfs and tmpfs are registered, one in a file on a disk goes through a bounce buffer"
	return f
}
