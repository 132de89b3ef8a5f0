package checksum

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

// The model: the definition, written down without any of the package's code.

func modelLeaves(data []byte, pieceBytes int, seed uint64) (leaves []uint64) {
	for at := 0; at < len(data); at += pieceBytes {
		leaves = append(leaves, xxh3.HashSeed(data[at:min(at+pieceBytes, len(data))], seed))
	}
	return leaves
}

func modelRoot(leaves []uint64, length, seed uint64) uint64 {
	var b []byte
	for _, l := range leaves {
		b = binary.LittleEndian.AppendUint64(b, l)
	}
	return xxh3.HashSeed(binary.LittleEndian.AppendUint64(b, length), seed)
}

// with runs a test under each set of loops that this processor has.
func with(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	was := current()
	defer chosen.Store(uint32(was))
	for _, k := range kernels() {
		chosen.Store(uint32(k))
		t.Run(k.String(), f)
	}
}

func newRand(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("random seed %#x", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// buffer returns n random bytes that begin `off` bytes past a 64-byte boundary, with
// guard bytes around them that check looks at.
type buffer struct {
	all, b []byte
	at     int
}

const guardBytes = 192

func newBuffer(n, off int) *buffer {
	all := make([]byte, n+off+2*guardBytes+64)
	at := guardBytes + int(-(addressOf(all)+guardBytes)%64) + off
	if at < guardBytes {
		at += 64
	}
	b := &buffer{all, all[at : at+n : at+n], at}
	copy(b.all[:at], guard)
	copy(b.all[at+n:], guard)
	return b
}

// guard is as long as what can lie on one side of a buffer.
var guard = bytes.Repeat([]byte{0xA5}, 2*guardBytes+128)

func (b *buffer) fill(r *rand.Rand) *buffer {
	for at := 0; at < len(b.b); at += 8 {
		var w [8]byte
		binary.LittleEndian.PutUint64(w[:], r.Uint64())
		copy(b.b[at:], w[:])
	}
	return b
}

func (b *buffer) check(t *testing.T) {
	t.Helper()
	before, after := b.all[:b.at], b.all[b.at+len(b.b):]
	if !bytes.Equal(before, guard[:len(before)]) || !bytes.Equal(after, guard[:len(after)]) {
		t.Fatalf("bytes around a buffer of %d were written", len(b.b))
	}
}

func TestCopySumEveryLength(t *testing.T) {
	step := 1
	if raceEnabled {
		step = 7 // the detector does not see into the loops; other builds take every length
	}
	with(t, func(t *testing.T) {
		r := newRand(t)
		for n := 0; n <= 5000; n += step {
			src := newBuffer(n, r.IntN(64)).fill(r)
			dst := newBuffer(n, 16*r.IntN(5)+r.IntN(2)*r.IntN(64))
			seed := r.Uint64() * uint64(r.IntN(4))
			got := CopySum(dst.b, src.b, 8192, seed, nil)
			if want := modelLeaves(src.b, 8192, seed); !slices.Equal(got, want) {
				t.Fatalf("length %d seed %#x: leaves %x, want %x", n, seed, got, want)
			}
			if !bytes.Equal(dst.b, src.b) {
				t.Fatalf("length %d: bytes differ", n)
			}
			dst.check(t)
		}
	})
}

// TestRuns cuts values into random runs and pieces, both ways.
func TestRuns(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		rounds := 1500
		if testing.Short() || raceEnabled {
			rounds = 200
		}
		for range rounds {
			n := r.IntN(1 << (4 + r.IntN(15)))
			piece := 1 + r.IntN(1<<(1+r.IntN(17)))
			if r.IntN(2) == 0 {
				piece = (piece + 63) &^ 63
			}
			unit := 1
			if r.IntN(2) == 0 {
				unit = 64
			}
			seed := r.Uint64()
			checkRuns(t, r, n, piece, unit, seed)
		}
	})
}

func checkRuns(t *testing.T, r *rand.Rand, n, piece, unit int, seed uint64) {
	t.Helper()
	name := fmt.Sprintf("n %d piece %d unit %d seed %#x", n, piece, unit, seed)
	src := newBuffer(n, r.IntN(2)*r.IntN(64)).fill(r)
	want := modelLeaves(src.b, piece, seed)
	var cuts []int
	for left := n; left > 0; {
		c := min(left, unit*(1+r.IntN(1<<r.IntN(14))))
		cuts = append(cuts, c)
		left -= c
	}

	dst := newBuffer(n, 16*r.IntN(4)+r.IntN(2)*r.IntN(16))
	var c Copier
	c.Reset(dst.b, piece, seed, nil)
	at := 0
	for _, k := range cuts {
		run := slices.Clone(src.b[at : at+k])
		c.Write(run)
		clear(run) // a Copier must not come back to a run
		at += k
	}
	leaves, m := c.Finish()
	if m != n || !slices.Equal(leaves, want) || !bytes.Equal(dst.b, src.b) {
		t.Fatalf("Copier, %s: %d bytes, leaves equal %v, bytes equal %v", name, m, slices.Equal(leaves, want), bytes.Equal(dst.b, src.b))
	}
	dst.check(t)

	var s Scatterer
	s.Reset(src.b, piece, seed, nil)
	var got []byte
	for _, k := range cuts {
		run := newBuffer(k, 16*r.IntN(4)+r.IntN(2)*r.IntN(16))
		if m := s.Read(run.b); m != k {
			t.Fatalf("Scatterer, %s: %d bytes of %d", name, m, k)
		}
		run.check(t)
		got = append(got, run.b...)
	}
	if s.Read(make([]byte, 1)) != 0 {
		t.Fatalf("Scatterer, %s: bytes after the end", name)
	}
	leaves, m = s.Finish()
	if m != n || !slices.Equal(leaves, want) || !bytes.Equal(got, src.b) {
		t.Fatalf("Scatterer, %s: %d bytes, leaves equal %v, bytes equal %v", name, m, slices.Equal(leaves, want), bytes.Equal(got, src.b))
	}
}

func TestSumAndRoot(t *testing.T) {
	r := newRand(t)
	for _, piece := range []int{1, 8, 63, 64, 256, 4096, OpaquePieceBytes} {
		for _, n := range []int{0, 1, 7, 8, 63, 64, 65, 240, 241, 1000, 4096, 4097, 70000} {
			data := newBuffer(n, r.IntN(64)).fill(r).b
			seed := r.Uint64()
			leaves := modelLeaves(data, piece, seed)
			want := modelRoot(leaves, uint64(n), seed)
			if got := Sum(data, piece, seed); got != want {
				t.Errorf("Sum of %d by %d: %#x, want %#x", n, piece, got, want)
			}
			if got := Root(Leaves(nil, data, piece, seed), uint64(n), seed); got != want {
				t.Errorf("Root of %d by %d: %#x, want %#x", n, piece, got, want)
			}
			if !VerifySum(data, piece, seed, want) || VerifySum(data, piece, seed, want+1) || VerifySum(data, 0, seed, want) {
				t.Errorf("VerifySum of %d by %d", n, piece)
			}
			if got := PieceCount(uint64(n), piece); got != len(leaves) {
				t.Errorf("PieceCount(%d, %d) = %d, want %d", n, piece, got, len(leaves))
			}
			if n > 0 {
				data[r.IntN(n)] ^= 1 << r.IntN(8)
				if VerifySum(data, piece, seed, want) {
					t.Errorf("a flipped bit in %d bytes by %d was not seen", n, piece)
				}
			}
		}
	}
}
