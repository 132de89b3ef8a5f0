package checksum

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// Each benchmark reports the ratio of the speed of copying objects to that of one
// plain copy of a page-aligned window of the same memory. The two take turns window by
// window, and the medians of many turns are reported, in processor time of the thread:
// the loops make no system calls, so that is the time they take, without what other
// processes take away.

const (
	benchBytes  = 512 << 20
	windowSize  = 32 << 20
	benchRounds = 15 // windows at least; a median of fewer says little
)

var benchMemory [2][]byte

func benchMemfd(b *testing.B) (dst, src []byte) {
	b.Helper()
	for i := range benchMemory {
		if benchMemory[i] != nil {
			continue
		}
		fd, err := unix.MemfdCreate("checksum-bench", unix.MFD_CLOEXEC)
		if err != nil {
			b.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, benchBytes); err != nil {
			b.Fatal(err)
		}
		m, err := unix.Mmap(fd, 0, benchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			b.Fatal(err)
		}
		for at := 0; at < len(m); at += 64 {
			m[at], m[at+9] = byte(at>>6), byte(at>>14)
		}
		benchMemory[i] = m
	}
	return benchMemory[0], benchMemory[1]
}

func threadNanos() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) != nil {
		return 0
	}
	return ts.Nano()
}

// compare times one(dst, src) over objects of a window against copy of the window. The
// source begins shift bytes past a page.
func compare(b *testing.B, object, shift int, one func(dst, src []byte)) {
	dst, src := benchMemfd(b)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	window := func() int { return rand.IntN(benchBytes/windowSize) * windowSize }
	plain := func() float64 {
		d, s := window(), window()
		t := threadNanos()
		copy(dst[d:d+windowSize], src[s:s+windowSize])
		return float64(threadNanos() - t)
	}
	var ratios, speeds []float64
	rounds := 0
	for b.Loop() {
		for range benchRounds {
			before := plain()
			d, s := window(), window()
			t := threadNanos()
			for at := 0; at+object+shift <= windowSize; at += object {
				one(dst[d+at:d+at+object], src[s+at+shift:s+at+shift+object])
			}
			took := float64(threadNanos()-t) * windowSize / float64(windowSize-windowSize%object)
			ratios = append(ratios, (before+plain())/2/took)
			speeds = append(speeds, windowSize/took)
			rounds++
		}
	}
	slices.Sort(ratios)
	slices.Sort(speeds)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ratios[rounds/2], "ratio")
	b.ReportMetric(ratios[rounds/4], "ratio-q1")
	b.ReportMetric(ratios[rounds*3/4], "ratio-q3")
	b.ReportMetric(speeds[rounds/2], "GB/s")
}

// benchKernels runs f under each set of loops; the portable one is what the others gain on.
func benchKernels(b *testing.B, f func(b *testing.B)) {
	was := current()
	defer chosen.Store(uint32(was))
	for _, k := range kernels() {
		chosen.Store(uint32(k))
		b.Run(k.String(), f)
	}
}

var sizes = []struct {
	name  string
	bytes int
}{{"2MiB", 2 << 20}, {"256KiB", 256 << 10}, {"64KiB", 64 << 10}}

// BenchmarkMemmove is what copies by objects cost without loops of our own.
func BenchmarkMemmove(b *testing.B) {
	for _, s := range sizes {
		b.Run(s.name, func(b *testing.B) { compare(b, s.bytes, 0, func(dst, src []byte) { copy(dst, src) }) })
	}
}

func BenchmarkCopy(b *testing.B) {
	for _, s := range sizes {
		b.Run(s.name, func(b *testing.B) {
			benchKernels(b, func(b *testing.B) { compare(b, s.bytes, 0, Copy) })
		})
	}
}

func BenchmarkCopySum(b *testing.B) {
	for _, s := range sizes {
		b.Run(s.name, func(b *testing.B) {
			benchKernels(b, func(b *testing.B) {
				var leaves []uint64
				seed := uint64(0)
				compare(b, s.bytes, 0, func(dst, src []byte) {
					seed++
					leaves = CopySum(dst, src, OpaquePieceBytes, seed, leaves[:0])
					benchSink = Root(leaves, uint64(len(src)), seed)
				})
			})
		})
	}
}

var benchSink uint64

// BenchmarkHashThenStream is the alternative: a part of a piece is hashed out of memory
// into the cache and then streamed from there.
func BenchmarkHashThenStream(b *testing.B) {
	k := current()
	for _, part := range []int{4 << 10, 16 << 10} {
		b.Run(fmt.Sprintf("64KiB/part=%dKiB", part>>10), func(b *testing.B) {
			var s secret
			s.derive(1)
			compare(b, 64<<10, 0, func(dst, src []byte) {
				for at := 0; at < len(src); at += part {
					benchSink += Leaf(src[at:at+part], 1)
					k.copy(dst[at:at+part], src[at:at+part])
				}
				k.fence()
			})
		})
	}
}

// BenchmarkRuns copies objects of 2 MiB run by run: a store gathers, a load scatters.
func BenchmarkRuns(b *testing.B) {
	for _, run := range []int{4 << 10, 16 << 10, 32 << 10} {
		for _, piece := range []int{0, 16 << 10, 64 << 10} {
			name := fmt.Sprintf("run=%dKiB/piece=%dKiB", run>>10, piece>>10)
			b.Run("gather/"+name, func(b *testing.B) {
				var c Copier
				var leaves []uint64
				compare(b, 2<<20, 0, func(dst, src []byte) {
					c.Reset(dst, piece, 7, leaves[:0])
					for at := 0; at < len(src); at += run {
						c.Write(src[at : at+run])
					}
					leaves, _ = c.Finish()
				})
			})
			b.Run("scatter/"+name, func(b *testing.B) {
				var s Scatterer
				var leaves []uint64
				compare(b, 2<<20, 0, func(dst, src []byte) {
					s.Reset(src, piece, 7, leaves[:0])
					for at := 0; at < len(dst); at += run {
						s.Read(dst[at : at+run])
					}
					leaves, _ = s.Finish()
				})
			})
		}
	}
}

// BenchmarkUnaligned has the source, or the destination, off a page border and off a
// line.
func BenchmarkUnaligned(b *testing.B) {
	var leaves []uint64
	for _, shift := range []int{0, 8, 64, 2048 + 20} {
		b.Run(fmt.Sprintf("src+%d", shift), func(b *testing.B) {
			compare(b, 256<<10, shift, func(dst, src []byte) {
				leaves = CopySum(dst, src, OpaquePieceBytes, 7, leaves[:0])
			})
		})
	}
	for _, shift := range []int{16, 32, 48, 1} {
		b.Run(fmt.Sprintf("dst+%d", shift), func(b *testing.B) {
			compare(b, 256<<10, shift, func(src, dst []byte) {
				leaves = CopySum(dst, src, OpaquePieceBytes, 7, leaves[:0])
			})
		})
		b.Run(fmt.Sprintf("plain/dst+%d", shift), func(b *testing.B) {
			compare(b, 256<<10, shift, func(src, dst []byte) { Copy(dst, src) })
		})
	}
}
