package checksum

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

func TestCheckEnginePiece(t *testing.T) {
	for _, c := range []struct {
		piece, run int
		ok         bool
	}{
		{256, 256, true}, {65536, 32768, true}, {4096, 32768, true}, {320, 960, true}, {32768, 32768, true},
		{192, 192, false}, {0, 4096, false}, {-64, 64, false}, {1000, 1000, false}, {4096, 0, false}, {4096, -1, false},
		{4096, 6144, false}, {6144, 4096, false},
	} {
		err := CheckEnginePiece(c.piece, c.run)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, base.ErrInvalid) {
			t.Errorf("piece %d run %d: %v", c.piece, c.run, err)
		}
	}
}

func TestCopyEveryAlignment(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		for _, n := range []int{0, 1, 63, 64, 65, 4096, StreamBytes - 1, StreamBytes, StreamBytes + 1, StreamBytes + 64, StreamBytes + 191, 70001} {
			for off := 0; off < 65; off++ {
				src, dst := newBuffer(n, r.IntN(64)).fill(r), newBuffer(n, off)
				Copy(dst.b, src.b)
				if !bytes.Equal(dst.b, src.b) {
					t.Fatalf("length %d at %d: bytes differ", n, off)
				}
				dst.check(t)
			}
		}
	})
}

// TestLarge has pieces as they are in use: many blocks a piece, streaming stores.
func TestLarge(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		sizes := []int{StreamBytes, 64 << 10, 256 << 10, 1<<20 + 1, 1<<20 - 63, 2 << 20}
		if raceEnabled {
			sizes = sizes[:3]
		}
		for _, n := range sizes {
			for _, piece := range []int{256, 1024, 1088, 16 << 10, 64 << 10, 1000, 2 << 20} {
				src, seed := newBuffer(n, r.IntN(64)).fill(r), r.Uint64()
				want := modelLeaves(src.b, piece, seed)
				for _, off := range []int{0, 16, 32, 48, 1} {
					dst := newBuffer(n, off)
					if got := CopySum(dst.b, src.b, piece, seed, nil); !slices.Equal(got, want) || !bytes.Equal(dst.b, src.b) {
						t.Fatalf("%d by %d at %d: leaf %d differs", n, piece, off, FirstDifference(got, want))
					}
					dst.check(t)
				}
			}
		}
	})
}

func TestRootOfManyLeaves(t *testing.T) {
	r := newRand(t)
	for n := 0; n < 700; n++ {
		leaves := make([]uint64, n)
		for i := range leaves {
			leaves[i] = r.Uint64()
		}
		length, seed := r.Uint64(), r.Uint64()
		if got, want := Root(leaves, length, seed), modelRoot(leaves, length, seed); got != want {
			t.Fatalf("%d leaves: %#x, want %#x", n, got, want)
		}
	}
}

// TestFinishEarly ends a value before its buffer is full: the last piece is shorter.
func TestFinishEarly(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		var c Copier
		for range 500 {
			room := 1 + r.IntN(5000)
			n := r.IntN(room + 1)
			piece := 1 + r.IntN(1500)
			src, seed := newBuffer(n, 0).fill(r).b, r.Uint64()
			dst := newBuffer(room, r.IntN(2))
			c.Reset(dst.b, piece, seed, nil)
			cut := r.IntN(n + 1)
			c.Write(src[:cut])
			c.Write(src[cut:])
			leaves, m := c.Finish()
			if want := modelLeaves(src, piece, seed); m != n || !slices.Equal(leaves, want) || !bytes.Equal(dst.b[:n], src) {
				t.Fatalf("%d of %d by %d cut at %d: n %d, leaf %d differs", n, room, piece, cut, m, FirstDifference(leaves, want))
			}
			for _, v := range dst.b[n:] {
				if v != 0 {
					t.Fatal("bytes after the end were written")
				}
			}
			dst.check(t)
		}
	})
}

func TestMoreThanFits(t *testing.T) {
	for _, piece := range []int{0, 64, 1000} {
		dst := newBuffer(300, 0)
		var c Copier
		c.Reset(dst.b, piece, 1, nil)
		c.Write(make([]byte, 200))
		c.Write(make([]byte, 200))
		leaves, n := c.Finish()
		var want []uint64
		if piece > 0 {
			want = modelLeaves(make([]byte, 300), piece, 1)
		}
		if n != 400 || !slices.Equal(leaves, want) {
			t.Errorf("piece %d: n %d, leaf %d differs", piece, n, FirstDifference(leaves, want))
		}
		dst.check(t)
	}
}

// TestOff is a gather and a scatter without checksums.
func TestOff(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		src, dst := newBuffer(100_000, 3).fill(r), newBuffer(100_000, 0)
		var c Copier
		c.Reset(dst.b, 0, 1, nil)
		var s Scatterer
		back := newBuffer(100_000, 5)
		for at := 0; at < 100_000; {
			n := min(1+r.IntN(30_000), 100_000-at)
			c.Write(src.b[at : at+n])
			at += n
		}
		leaves, n := c.Finish()
		s.Reset(dst.b, -1, 1, nil)
		for at := 0; at < 100_000; {
			k := min(1+r.IntN(30_000), 100_000-at)
			at += s.Read(back.b[at : at+k])
		}
		leaves2, n2 := s.Finish()
		if len(leaves)+len(leaves2) != 0 || n != 100_000 || n2 != n || !bytes.Equal(back.b, src.b) {
			t.Errorf("leaves %d %d, n %d %d", len(leaves), len(leaves2), n, n2)
		}
		back.check(t)
		dst.check(t)
	})
}

// TestPartialLoad reads a part of a value, and compares it with a part of the leaf list.
func TestPartialLoad(t *testing.T) {
	r := newRand(t)
	data := newBuffer(10*1024, 0).fill(r).b
	list := Leaves(nil, data, 1024, 9)
	var s Scatterer
	s.Reset(data[3*1024:7*1024], 1024, 9, nil)
	a, b := make([]byte, 3000), make([]byte, 1096)
	s.Read(a)
	s.Read(b)
	got, n := s.Finish()
	if n != 4096 || FirstDifference(got, list[3:7]) != -1 || !bytes.Equal(append(a, b...), data[3*1024:7*1024]) {
		t.Fatalf("n %d, leaf %d differs", n, FirstDifference(got, list[3:7]))
	}
	if FirstDifference(got, list[3:6]) != 3 || FirstDifference(got[:2], list[4:6]) != 0 {
		t.Error("FirstDifference sees no difference")
	}
	// Stopped inside the third piece.
	s.Reset(data, 1024, 9, nil)
	s.Read(make([]byte, 2500))
	if got, n := s.Finish(); n != 2500 || !slices.Equal(got, list[:2]) {
		t.Errorf("n %d, %d leaves", n, len(got))
	}
}

// TestSourceChangesBetweenReads: what a later Read gives was loaded before, or is
// hashed as it is then (K2).
func TestSourceChangesBetweenReads(t *testing.T) {
	with(t, func(t *testing.T) {
		r := newRand(t)
		for range 300 {
			n, piece, seed := 1+r.IntN(6000), 1+r.IntN(2000), r.Uint64()
			src := newBuffer(n, 0).fill(r)
			var s Scatterer
			s.Reset(src.b, piece, seed, nil)
			var got []byte
			for len(got) < n {
				run := make([]byte, 1+r.IntN(300))
				m := s.Read(run)
				got = append(got, run[:m]...)
				src.fill(r)
			}
			leaves, _ := s.Finish()
			if want := modelLeaves(got, piece, seed); !slices.Equal(leaves, want) {
				t.Fatalf("%d by %d: leaf %d is not of what was stored", n, piece, FirstDifference(leaves, want))
			}
		}
	})
}

func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools")
	}
	with(t, func(t *testing.T) {
		src, dst := newBuffer(16<<20, 0).b, newBuffer(16<<20, 0).b
		leaves := make([]uint64, 0, 4096)
		var c Copier
		var s Scatterer
		for name, f := range map[string]func(){
			"Copy":    func() { Copy(dst[:64<<10], src) },
			"CopySum": func() { leaves = CopySum(dst, src[:64<<10], 4096, 5, leaves[:0]) },
			"Sum":     func() { Sum(src[:64<<10], 1024, 5) },
			"Sum, many pieces": func() {
				Sum(src[:1<<20], 1024, 5)
			},
			"Copier": func() {
				c.Reset(dst[:100_000], 4096, 5, leaves[:0])
				c.Write(src[:77_777])
				c.Write(src[:22_223])
				leaves, _ = c.Finish()
			},
			"Scatterer": func() {
				s.Reset(src[:100_000], 4096, 5, leaves[:0])
				s.Read(dst[:77_777])
				s.Read(dst[:22_223])
				leaves, _ = s.Finish()
			},
		} {
			if n := testing.AllocsPerRun(20, f); n != 0 {
				t.Errorf("%s allocates %v times", name, n)
			}
		}
	})
}

// TestAgrees: the check at start sees loops that are wrong.
func TestAgrees(t *testing.T) {
	for _, k := range kernels() {
		if !agrees(k) {
			t.Errorf("%v does not agree with the portable loops", k)
		}
	}
	if Kernel() != choose().String() || Kernel() == "" {
		t.Errorf("kernel %q, chosen %q", Kernel(), choose())
	}
}
