package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNvidia(t *testing.T) {
	o := Options{Root: t.TempDir()}
	t.Setenv("CUDA_MPS_PIPE_DIRECTORY", "")
	if f := nvidia(o); f.Status != Note || f.Found != "no NVIDIA driver" {
		t.Errorf("no driver: %+v", f)
	}
	write := func(path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\nGCC version: 1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(o.Root, "proc/driver/nvidia/version"))
	if f := nvidia(o); f.Status != OK || !strings.Contains(f.Found, "580.1;") || !strings.Contains(f.Found, "bounce buffer") || strings.Contains(f.Found, "GCC") {
		t.Errorf("a driver: %+v", f)
	}
	pipe := filepath.Join(o.Root, "pipe")
	write(filepath.Join(pipe, "control"))
	t.Setenv("CUDA_MPS_PIPE_DIRECTORY", pipe)
	if f := nvidia(o); f.Status != Bad || !strings.Contains(f.Found, "MPS") || f.Cure == "" {
		t.Errorf("MPS: %+v", f)
	}
}
