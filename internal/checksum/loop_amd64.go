package checksum

import "golang.org/x/sys/cpu"

const (
	avx2   kernel = 1
	avx512 kernel = 2
)

// kernels lists what this processor can run, the best last.
func kernels() []kernel {
	list := []kernel{portable}
	if cpu.X86.HasAVX2 {
		list = append(list, avx2)
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasAVX512F {
		list = append(list, avx512)
	}
	return list
}

// choose takes the best loops that give the bits of the portable ones on a sample.
// AVX-512 is taken from the generations on whose multiplications do not slow the clock
// of the whole core; VBMI2 came with them. Before, AVX2 is at the speed of memory too.
// The tests cover that on the processors they run on; the sample covers the others,
// since a wrong hash would be in pools for ever.
func choose() kernel {
	list := kernels()
	for i := len(list) - 1; i > 0; i-- {
		if list[i] == avx512 && !cpu.X86.HasAVX512VBMI2 {
			continue
		}
		if agrees(list[i]) {
			return list[i]
		}
	}
	return portable
}

func (k kernel) String() string {
	switch k {
	case avx2:
		return "avx2"
	case avx512:
		return "avx512"
	}
	return "portable"
}

func (k kernel) fuse(dst, src []byte, a *accumulators, s *secret, at int, p placing) int {
	n := len(src) / stripeBytes
	if n == 0 {
		return at
	}
	dst = dst[:len(src)]
	switch {
	case k != portable && p == offLine:
		fuseStream16AVX2(&dst[0], &src[0], n, at, a, &s[0])
	case k == avx512 && p == streamed:
		fuseStreamAVX512(&dst[0], &src[0], n, at, a, &s[0])
	case k == avx512:
		fuseCachedAVX512(&dst[0], &src[0], n, at, a, &s[0])
	case k == avx2 && p == streamed:
		fuseStreamAVX2(&dst[0], &src[0], n, at, a, &s[0])
	case k == avx2:
		fuseCachedAVX2(&dst[0], &src[0], n, at, a, &s[0])
	default:
		return fusePortable(dst, src, a, s, at)
	}
	return (at + n) % stripesPerBlock
}

// last needs no loop of its own: one stripe, with the secret read from another place.
// One stripe from number 0 never scrambles.
func (k kernel) last(dst, src []byte, a *accumulators, s *secret, p placing) {
	dst, src = dst[:stripeBytes], src[:stripeBytes]
	switch {
	case k != portable && p == offLine:
		fuseStream16AVX2(&dst[0], &src[0], 1, 0, a, &s[lastAt])
	case k == avx512 && p == streamed:
		fuseStreamAVX512(&dst[0], &src[0], 1, 0, a, &s[lastAt])
	case k == avx512:
		fuseCachedAVX512(&dst[0], &src[0], 1, 0, a, &s[lastAt])
	case k == avx2 && p == streamed:
		fuseStreamAVX2(&dst[0], &src[0], 1, 0, a, &s[lastAt])
	case k == avx2:
		fuseCachedAVX2(&dst[0], &src[0], 1, 0, a, &s[lastAt])
	default:
		lastPortable(dst, src, a, s)
	}
}

// copy streams the 64-byte lines of dst and copies what is around them plainly.
func (k kernel) copy(dst, src []byte) {
	if k == portable {
		copy(dst, src)
		return
	}
	head := min(int(-addressOf(dst)%stripeBytes), len(src))
	copy(dst[:head], src)
	dst, src = dst[head:], src[head:]
	lines := len(src) / stripeBytes
	if lines > 0 {
		streamAVX2(&dst[0], &src[0], lines)
	}
	copy(dst[lines*stripeBytes:], src[lines*stripeBytes:])
}

func (k kernel) fence() {
	if k != portable {
		storeFence()
	}
}

// The loops of loop_amd64.s. They use no stack and call nothing, so that a bus error
// in one unwinds like one in Go code.

// streamAVX2 copies lines of 64 bytes; dst is 64-byte aligned.
//
//go:noescape
func streamAVX2(dst, src *byte, lines int)

// fuseStreamAVX2 copies stripes to dst, which is 64-byte aligned, and takes them into
// acc; the first is number at of its block.
//
//go:noescape
func fuseStreamAVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)

// fuseStream16AVX2 is the same for a dst that is 16-byte aligned.
//
//go:noescape
func fuseStream16AVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)

// fuseCachedAVX2 is the same with ordinary stores, to any alignment.
//
//go:noescape
func fuseCachedAVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)

//go:noescape
func fuseStreamAVX512(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)

//go:noescape
func fuseCachedAVX512(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)

func storeFence()
