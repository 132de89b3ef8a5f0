package checksum

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

// FuzzCopySum compares the copies with the definition under all loops.
func FuzzCopySum(f *testing.F) {
	f.Add([]byte("abc"), uint32(64), uint64(0), uint64(1), uint16(3))
	f.Add(bytes.Repeat([]byte{1, 2, 3}, 700), uint32(256), uint64(7), uint64(2), uint16(1))
	f.Add(bytes.Repeat([]byte{9}, 4096), uint32(1024), uint64(1<<63), uint64(3), uint16(77))
	f.Fuzz(func(t *testing.T, data []byte, piece uint32, seed, order uint64, times uint16) {
		size := 1 + int(piece%(128<<10))
		// Long values come from short inputs, so that the loops get to their blocks.
		data = bytes.Repeat(data, 1+int(times)%32)
		data = data[:min(len(data), 40<<10)]
		was := current()
		defer chosen.Store(uint32(was))
		want := modelLeaves(data, size, seed)
		for _, k := range kernels() {
			chosen.Store(uint32(k))
			r := rand.New(rand.NewPCG(order, 1))
			dst := newBuffer(len(data), int(order%3)*int(order>>8%64))
			if got := CopySum(dst.b, data, size, seed, nil); !slices.Equal(got, want) || !bytes.Equal(dst.b, data) {
				t.Fatalf("%v: CopySum of %d by %d", k, len(data), size)
			}
			dst.check(t)
			checkRuns(t, r, len(data), size, 1, seed)
			if got, root := Sum(data, size, seed), modelRoot(want, uint64(len(data)), seed); got != root {
				t.Fatalf("Sum of %d by %d: %#x, want %#x", len(data), size, got, root)
			}
		}
	})
}
