package checksum

import "sync/atomic"

// StreamBytes is the size from which copies go around the cache with streaming
// stores; smaller ones are likely to be read again soon, and stay in it.
const StreamBytes = 16 << 10

// placing says how a loop stores.
type placing uint8

const (
	cached   placing = iota // ordinary stores, any alignment
	streamed                // non-temporal stores, to whole lines: 64-byte aligned
	// offLine is streamed at a multiple of 16 that is no line: memory from malloc (large
	// blocks of the C library lie 16 bytes past a page).
	offLine
)

// kernel is a set of inner loops for one kind of processor. It is an enum, not a
// table of functions: arguments of an indirect call escape to the heap (K4).
// Its methods, in loop_*.go:
//
//	copy   copies len(src) bytes with streaming stores, unfenced
//	fuse   copies whole stripes and hashes the bytes that it stores; `at` is the first
//	       stripe's number in its block, the number after the last is returned
//	last   is fuse for the one stripe that ends a piece
//	fence  orders streaming stores before later stores (K3)
type kernel uint8

// portable is the reference of all others (K1).
const portable kernel = 0

// chosen is set once, before main; tests put others in.
var chosen atomic.Uint32

func init() { chosen.Store(uint32(choose())) }

func current() kernel { return kernel(chosen.Load()) }

// Kernel names the loops that this processor uses, for `maru doctor` and logs.
func Kernel() string { return current().String() }

// fusePortable hashes what was stored (K2), from the cache by steps of 8 KiB.
func fusePortable(dst, src []byte, a *accumulators, s *secret, at int) int {
	const step = 8 << 10
	for len(src) > 0 {
		n := copy(dst[:min(step, len(src))], src)
		at = absorbPortable(dst[:n], a, s, at)
		dst, src = dst[n:], src[n:]
	}
	return at
}

func lastPortable(dst, src []byte, a *accumulators, s *secret) {
	copy(dst[:stripeBytes], src)
	w := stripeAt((*[stripeBytes]byte)(dst))
	a.stripe(&w, s, lastAt)
}

// agrees compares the loops of k with the portable ones: both placings, more than a
// block, a start inside a block, and the last stripe.
func agrees(k kernel) bool {
	const n = 3 * blockBytes
	var from, to [n + 2*stripeBytes]byte
	line := int(-addressOf(to[:]) % stripeBytes)
	for i := range from {
		from[i] = byte(i*i>>3 ^ i)
	}
	var s secret
	s.derive(prime64x5)
	for _, p := range []placing{cached, streamed, offLine} {
		want, got := startAccumulators, startAccumulators
		at := absorbPortable(from[:n-stripeBytes], &want, &s, 5)
		w := stripeAt((*[stripeBytes]byte)(from[n-stripeBytes:]))
		want.stripe(&w, &s, lastAt)
		clear(to[:])
		out := to[line : line+n]
		if p == offLine {
			out = to[line+16 : line+16+n]
		}
		if k.fuse(out, from[:n-stripeBytes], &got, &s, 5, p) != at {
			return false
		}
		k.last(out[n-stripeBytes:], from[n-stripeBytes:n], &got, &s, p)
		k.fence()
		if got != want || [n]byte(out) != [n]byte(from[:n]) {
			return false
		}
	}
	clear(to[:])
	k.copy(to[1:1+n], from[:n])
	k.fence()
	return [n]byte(to[1:1+n]) == [n]byte(from[:n])
}
