package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
)

const root = "../.."

func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func compiler(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is not installed, and the header cannot be tested without it (Debian: apt-get install gcc g++)", name)
	}
	return path
}

func program(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "abi")
	// The program takes function types from the header by __typeof__, an extension
	// that -std=c99 knows.
	output(t, compiler(t, "gcc"), "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-I"+root+"/include",
		"-o", bin, "testdata/abi.c", "-ldl", "-lpthread")
	return bin
}

func TestHeaderCompiles(t *testing.T) {
	for _, c := range []struct {
		compiler, suffix string
		flags            []string
	}{
		{"gcc", ".c", []string{"-std=c99"}},
		{"gcc", ".c", []string{"-std=c11"}},
		{"g++", ".cc", []string{"-std=c++17"}},
	} {
		src := filepath.Join(t.TempDir(), "header"+c.suffix)
		if err := os.WriteFile(src, []byte("#include \"maru.h\"\n#include \"maru.h\"\nint main(void) { return MARU_OK; }\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		output(t, compiler(t, c.compiler), append(c.flags, "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"+root+"/include", "-c", src, "-o", os.DevNull)...)
	}
}

func TestLayoutsAgree(t *testing.T) {
	got := map[string]uintptr{}
	for line := range strings.Lines(output(t, program(t))) {
		name, n, ok := strings.Cut(strings.TrimSpace(line), " ")
		v, err := strconv.ParseUint(n, 10, 64)
		if !ok || err != nil {
			t.Fatalf("%q", line)
		}
		got[name] = uintptr(v)
	}
	var (
		p cabi.Page
		v cabi.View
		r cabi.Run
		l cabi.Layer
	)
	for name, want := range map[string]uintptr{
		"maru_page": unsafe.Sizeof(p), "maru_page.data": unsafe.Offsetof(p.Data), "maru_page.bytes": unsafe.Offsetof(p.Bytes),
		"maru_page.region": unsafe.Offsetof(p.Region), "maru_page.index": unsafe.Offsetof(p.Index),
		"maru_view": unsafe.Sizeof(v), "maru_view.id": unsafe.Offsetof(v.ID), "maru_view.data": unsafe.Offsetof(v.Data),
		"maru_view.bytes": unsafe.Offsetof(v.Bytes), "maru_view.region": unsafe.Offsetof(v.Region), "maru_view.index": unsafe.Offsetof(v.Index),
		"maru_run": unsafe.Sizeof(r), "maru_run.data": unsafe.Offsetof(r.Data), "maru_run.bytes": unsafe.Offsetof(r.Bytes),
		"maru_layer": unsafe.Sizeof(l), "maru_layer.base": unsafe.Offsetof(l.Base), "maru_layer.block_stride_bytes": unsafe.Offsetof(l.BlockStrideBytes),
		"maru_layer.run_bytes": unsafe.Offsetof(l.RunBytes), "maru_layer.run_count": unsafe.Offsetof(l.RunCount), "maru_layer.reserved": unsafe.Offsetof(l.Reserved),
		"maru_batch": 72, "maru_batch.stream": 64, // Go sees the C struct itself; ctypes has one of its own
	} {
		if got[name] != want {
			t.Errorf("%s: C has %d, Go has %d", name, got[name], want)
		}
	}
	if unsafe.Sizeof(base.Code(0)) != 4 || unsafe.Sizeof(base.Key{}) != 32 || unsafe.Sizeof(base.Digest{}) != 28 {
		t.Error("rows of packed arrays have changed")
	}
}

// TestHeaderCodes compares every code with internal/base.
func TestHeaderCodes(t *testing.T) {
	header, err := os.ReadFile(root + "/include/maru.h")
	if err != nil {
		t.Fatal(err)
	}
	codes := map[base.Code]string{}
	for _, m := range regexp.MustCompile(`(?m)^#define (MARU_(?:OK|ERR_\w+)) (\d+)`).FindAllStringSubmatch(string(header), -1) {
		n, err := strconv.Atoi(m[2])
		if err != nil {
			t.Fatal(err)
		}
		codes[base.Code(n)] = m[1] //nolint:gosec // a small number
	}
	for c := base.CodeOK; c <= base.CodeUnproven; c++ {
		if codes[c] == "" {
			t.Errorf("code %d (%s) is not in the header", c, c)
		}
	}
	if len(codes) != int(base.CodeUnproven)+1 {
		t.Errorf("the header has %d codes", len(codes))
	}
	for _, want := range []string{
		fmt.Sprintf("MARU_ERR_FORKED %d", base.CodeForked), fmt.Sprintf("MARU_ERR_MISS %d", base.CodeMiss),
		fmt.Sprintf("MARU_ERR_ALREADY %d", base.CodeAlreadyStored), fmt.Sprintf("MARU_KEY_BYTES %d", base.KeyBytes),
	} {
		if !strings.Contains(string(header), want) {
			t.Errorf("the header has no %q", want)
		}
	}
}

// TestCProgram builds the library with clients of a store in one process, and runs
// a C program on it: round trip, errors, fork, panic.
func TestCProgram(t *testing.T) {
	if testing.Short() {
		t.Skip("links a shared library")
	}
	lib := filepath.Join(t.TempDir(), "libmaru_fake.so")
	build := exec.Command("go", "build", "-tags", "cabifake", "-buildmode=c-shared", "-o", lib, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out := output(t, program(t), "127.0.0.1:1", lib, "fake"); out != "ok\n" {
		t.Error(out)
	}
}
