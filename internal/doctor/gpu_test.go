package doctor

import (
	"errors"
	"fmt"
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
	if f := mps(o); f.Status != OK {
		t.Errorf("no MPS: %+v", f)
	}
	write(filepath.Join(pipe, "control"))
	t.Setenv("CUDA_MPS_PIPE_DIRECTORY", pipe)
	if f := mps(o); f.Status != Bad || !strings.Contains(f.Found, pipe) || f.Cure == "" {
		t.Errorf("MPS: %+v", f)
	}
}

func TestCUDA(t *testing.T) {
	o := Options{Root: t.TempDir()}
	if f := cuda(o); f.Status != OK || !strings.HasPrefix(f.Found, "none") {
		t.Errorf("no driver: %+v", f)
	}
	put(t, o.Root, "proc/driver/nvidia/version", "NVRM version: x")
	for version, want := range map[int]Status{13000: OK, 12080: OK, 12040: Note} {
		o.CUDA = func() (int, error) { return version, nil }
		if f := cuda(o); f.Status != want || !strings.Contains(f.Found, fmt.Sprintf("%d.%d", version/1000, version%1000/10)) {
			t.Errorf("%d: %+v", version, f)
		}
	}
	o.CUDA = func() (int, error) { return 0, errors.New("libcuda.so.1 is not there") }
	if f := cuda(o); f.Status != Bad || !strings.Contains(f.Found, "libcuda") || f.Cure == "" {
		t.Errorf("no library: %+v", f)
	}
}
