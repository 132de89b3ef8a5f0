package gpu

import (
	"os"
	"path/filepath"
)

// MPSControl finds the pipe of a CUDA MPS daemon, where it is by default or where the
// environment says; "" when there is none. root is put in front of the default place,
// for tests.
func MPSControl(root string) string {
	dir := os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	if dir == "" {
		dir = filepath.Join("/", root, os.TempDir(), "nvidia-mps")
	}
	control := filepath.Join(dir, "control")
	if _, err := os.Stat(control); err != nil {
		return ""
	}
	return control
}
