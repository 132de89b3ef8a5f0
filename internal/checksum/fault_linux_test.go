package checksum

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

func mapFile(t *testing.T, fileBytes, mapBytes int) []byte {
	t.Helper()
	fd, err := unix.MemfdCreate("checksum-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(fileBytes)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, mapBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// TestBusErrorIsAPanic: a copy from or to memory behind the end of its file panics
// like Go code does, also in the middle of a loop, and the goroutine goes on.
func TestBusErrorIsAPanic(t *testing.T) {
	with(t, func(t *testing.T) {
		const good, all = 128 << 10, 256 << 10
		bad := mapFile(t, good, all)
		fine := mapFile(t, all, all)
		fault := func(f func()) (fell bool) {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() {
				if r := recover(); r != nil {
					_, fell = r.(runtime.Error)
				}
			}()
			f()
			return false
		}
		for name, f := range map[string]func(){
			"Copy from":    func() { Copy(fine, bad) },
			"Copy to":      func() { Copy(bad, fine) },
			"CopySum from": func() { CopySum(fine, bad, OpaquePieceBytes, 1, nil) },
			"CopySum to":   func() { CopySum(bad, fine, OpaquePieceBytes, 1, nil) },
			"CopySum, cached": func() {
				CopySum(fine[1:], bad[:all-1], OpaquePieceBytes, 1, nil)
			},
			"Sum": func() { Sum(bad, OpaquePieceBytes, 1) },
			"Scatterer": func() {
				var s Scatterer
				s.Reset(bad, OpaquePieceBytes, 1, nil)
				for at := 0; at < all; at += 10_000 {
					s.Read(fine[at:min(at+10_000, all)])
				}
			},
		} {
			for range 20 {
				if !fault(f) {
					t.Fatalf("%s: no panic", name)
				}
				// The stack must still be whole.
				runtime.GC()
			}
		}
		want := modelLeaves(fine, OpaquePieceBytes, 1)
		if got := CopySum(mapFile(t, all, all), fine, OpaquePieceBytes, 1, nil); !slices.Equal(got, want) {
			t.Error("wrong leaves after the faults")
		}
	})
}

// TestSourceLoadedOnce is K2: while another thread writes to the source, the leaves
// are still those of the bytes that were stored.
func TestSourceLoadedOnce(t *testing.T) {
	with(t, func(t *testing.T) {
		const n = 100_003
		src := mapFile(t, n, n)
		var stop atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			for v := byte(1); !stop.Load(); v++ {
				for i := range src {
					src[i] = v
				}
			}
		}()
		defer func() { stop.Store(true); <-done }()
		r := newRand(t)
		torn := 0
		rounds := 60
		if raceEnabled {
			rounds = 15
		}
		dst := mapFile(t, n, n)
		for _, x := range []struct{ piece, run int }{
			{64, 9000}, {200, 9000}, {1000, 9000}, {4096, 9000}, {8192, 9000}, {65536, 9000},
			// These go through the window, where the time between two loads would be short.
			{200, 300}, {200, 300}, {200, 300}, {1000, 70}, {1000, 70}, {64, 30}, {64, 30},
		} {
			piece := x.piece
			for range rounds {
				var c Copier
				c.Reset(dst, piece, 3, nil)
				for at := 0; at < n; {
					k := min(n-at, 1+r.IntN(x.run))
					c.Write(src[at : at+k])
					at += k
				}
				leaves, _ := c.Finish()
				if want := modelLeaves(dst, piece, 3); !slices.Equal(leaves, want) {
					t.Fatalf("Copier by %d: leaf %d is not of what was stored", piece, FirstDifference(leaves, want))
				}
				var s Scatterer
				s.Reset(src, piece, 3, nil)
				for at := 0; at < n; {
					k := min(n-at, 1+r.IntN(x.run))
					s.Read(dst[at : at+k])
					at += k
				}
				leaves, _ = s.Finish()
				if want := modelLeaves(dst, piece, 3); !slices.Equal(leaves, want) {
					t.Fatalf("Scatterer by %d: leaf %d is not of what was stored", piece, FirstDifference(leaves, want))
				}
				if dst[0] != dst[n-1] {
					torn++
				}
			}
		}
		t.Logf("%d copies were torn", torn)
	})
}
