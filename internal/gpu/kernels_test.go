package gpu

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/checksum"
)

type kernelCase struct {
	bytes    int
	seed     uint64
	fragment int // 0: one range
}

func (c kernelCase) leaf() uint64 {
	b := make([]byte, c.bytes)
	x := uint64(c.bytes)
	for i := range b {
		x = x*6364136223846793005 + 1442695040888963407
		b[i] = byte(x >> 56)
	}
	return checksum.Leaf(b, c.seed)
}

// TestKernels runs the kernels' source on the processor, step by step, and compares
// bytes and hashes with internal/checksum.
func TestKernels(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles C++")
	}
	compiler, err := exec.LookPath("g++")
	if err != nil {
		t.Skip("no g++")
	}
	bin := filepath.Join(t.TempDir(), "emulate")
	if out, err := exec.Command(compiler, "-std=c++17", "-O2", "-w", "-o", bin, "testdata/emulate.cc").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	seed := rand.Uint64()
	t.Logf("random seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	var cases []kernelCase
	for _, n := range []int{16, 64, 240, 256, 272, 512, 1008, 1024, 1040, 1088, 2048, 4080, 4096, 4112, 4160, 8192, 8208, 16384, 65536} {
		cases = append(cases, kernelCase{n, 0, 0}, kernelCase{n, ^uint64(0), 0}, kernelCase{n, r.Uint64(), 16 * (1 + r.IntN(64))})
	}
	for range 60 {
		cases = append(cases, kernelCase{16 * (1 + r.IntN(1200)), r.Uint64(), 16 * r.IntN(100)})
	}
	var in strings.Builder
	for _, c := range cases {
		fmt.Fprintln(&in, c.bytes, c.seed, c.fragment)
	}
	cmd := exec.Command(bin)
	cmd.Stdin, cmd.Stderr = strings.NewReader(in.String()), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(cases) {
		t.Fatalf("%d answers for %d cases", len(lines), len(cases))
	}
	for i, c := range cases {
		var ok int
		var pack, unpack, hash uint64
		if _, err := fmt.Sscan(lines[i], &ok, &pack, &unpack, &hash); err != nil {
			t.Fatal(err)
		}
		want := uint64(0) // of short pieces the host computes it
		if c.bytes > 240 {
			want = c.leaf()
		}
		if ok != 1 || pack != want || unpack != want || hash != want {
			t.Errorf("%+v: bytes %d, pack %#x, unpack %#x, hash %#x, want %#x", c, ok, pack, unpack, hash, want)
		}
	}
}
