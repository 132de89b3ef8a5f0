package checksum

import (
	"encoding/binary"
	"math/bits"
)

// XXH3-64 for inputs of more than 240 bytes, as a state that is fed stripe by
// stripe: the form that a copy loop can carry along. Shorter inputs have another
// algorithm and go to the library.
const (
	shortBytes  = 240  // the longest input of the short algorithms
	stripeBytes = 64   // one step of the accumulators, and one cache line
	blockBytes  = 1024 // stripes between two scrambles
	secretBytes = 192

	// Where the parts of the algorithm read the secret.
	scrambleAt = secretBytes - stripeBytes
	lastAt     = secretBytes - stripeBytes - 7
	mergeAt    = 11

	prime32x1 = 0x9E3779B1
	prime32x2 = 0x85EBCA77
	prime32x3 = 0xC2B2AE3D
	prime64x1 = 0x9E3779B185EBCA87
	prime64x2 = 0xC2B2AE3D27D4EB4F
	prime64x3 = 0x165667B19E3779F9
	prime64x4 = 0x85EBCA77C2B2AE63
	prime64x5 = 0x27D4EB2F165667C5

	stripesPerBlock = blockBytes / stripeBytes
)

// kSecret is the default secret of the XXH3 specification as little-endian words.
var kSecret = [secretBytes / 8]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
	0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
	0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
	0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
	0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
}

// accumulators are the eight lanes of the long algorithm.
type accumulators [8]uint64

var startAccumulators = accumulators{
	prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2, prime64x5, prime32x1,
}

// secret is the default secret with a seed mixed in.
type secret [secretBytes]byte

func (s *secret) derive(seed uint64) {
	for i := 0; i < len(kSecret); i += 2 {
		binary.LittleEndian.PutUint64(s[8*i:], kSecret[i]+seed)
		binary.LittleEndian.PutUint64(s[8*i+8:], kSecret[i+1]-seed)
	}
}

func (s *secret) word(at int) uint64 { return binary.LittleEndian.Uint64(s[at:]) }

// stripe takes eight words in, with the secret read from byte at.
func (a *accumulators) stripe(w *[8]uint64, s *secret, at int) {
	key := (*[stripeBytes]byte)(s[at:])
	for i, v := range w {
		k := v ^ binary.LittleEndian.Uint64(key[8*i:])
		a[i^1] += v
		a[i] += uint64(uint32(k)) * (k >> 32)
	}
}

func (a *accumulators) scramble(s *secret) {
	for i := range a {
		v := a[i]
		a[i] = (v ^ v>>47 ^ s.word(scrambleAt+8*i)) * prime32x1
	}
}

// merge folds the lanes into the hash of an input of n bytes.
func (a *accumulators) merge(s *secret, n uint64) uint64 {
	h := n * prime64x1
	for i := 0; i < len(a); i += 2 {
		hi, lo := bits.Mul64(a[i]^s.word(mergeAt+8*i), a[i+1]^s.word(mergeAt+8*i+8))
		h += hi ^ lo
	}
	h ^= h >> 37
	h *= 0x165667919E3779F9
	return h ^ h>>32
}

// stripeAt reads eight words.
func stripeAt(p *[stripeBytes]byte) (w [8]uint64) {
	for i := range w {
		w[i] = binary.LittleEndian.Uint64(p[8*i:])
	}
	return w
}

// absorbPortable hashes whole stripes of p, the first of which is number at of its
// block, and returns the number that comes next. The lanes are locals, so that the
// compiler keeps them in registers.
func absorbPortable(p []byte, a *accumulators, s *secret, at int) int {
	a0, a1, a2, a3, a4, a5, a6, a7 := a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
	for len(p) >= stripeBytes {
		w, key := (*[stripeBytes]byte)(p), (*[stripeBytes]byte)(s[8*at:])
		a0, a1 = lanes(a0, a1, (*[16]byte)(w[0:]), (*[16]byte)(key[0:]))
		a2, a3 = lanes(a2, a3, (*[16]byte)(w[16:]), (*[16]byte)(key[16:]))
		a4, a5 = lanes(a4, a5, (*[16]byte)(w[32:]), (*[16]byte)(key[32:]))
		a6, a7 = lanes(a6, a7, (*[16]byte)(w[48:]), (*[16]byte)(key[48:]))
		p = p[stripeBytes:]
		if at++; at == stripesPerBlock {
			*a = accumulators{a0, a1, a2, a3, a4, a5, a6, a7}
			a.scramble(s)
			a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
			at = 0
		}
	}
	*a = accumulators{a0, a1, a2, a3, a4, a5, a6, a7}
	return at
}

// lanes is one step of two lanes that exchange their words.
func lanes(a, b uint64, w, key *[16]byte) (uint64, uint64) {
	v, u := binary.LittleEndian.Uint64(w[:]), binary.LittleEndian.Uint64(w[8:])
	k, l := v^binary.LittleEndian.Uint64(key[:]), u^binary.LittleEndian.Uint64(key[8:])
	return a + u + uint64(uint32(k))*(k>>32), b + v + uint64(uint32(l))*(l>>32)
}

// rootLong is Root for more leaves than the short algorithms take. The message is a
// list of words, so it needs no buffer: leaf i is lane i mod 8 of stripe i / 8.
func rootLong(leaves []uint64, length uint64, seed uint64) uint64 {
	var s secret
	s.derive(seed)
	a := startAccumulators
	words := len(leaves) + 1
	word := func(i int) uint64 {
		if i == len(leaves) {
			return length
		}
		return leaves[i]
	}
	var w [8]uint64
	for n := range (words*8 - 1) / stripeBytes {
		if 8*n+8 <= len(leaves) {
			a.stripe((*[8]uint64)(leaves[8*n:]), &s, 8*(n%stripesPerBlock))
		} else {
			for i := range w {
				w[i] = word(8*n + i)
			}
			a.stripe(&w, &s, 8*(n%stripesPerBlock))
		}
		if n%stripesPerBlock == stripesPerBlock-1 {
			a.scramble(&s)
		}
	}
	for i := range w {
		w[i] = word(words - 8 + i)
	}
	a.stripe(&w, &s, lastAt)
	return a.merge(&s, uint64(words)*8)
}
