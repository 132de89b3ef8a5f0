package checksum

import "github.com/zeebo/xxh3"

// windowBytes holds what must be in one place to be hashed: a whole short piece, or
// the last stripe of a ragged one with the stripe before it.
const windowBytes = 256

// piece is the hash of the piece that is being copied, and the small buffer for
// bytes that cannot go straight through a loop: a stripe that lies across two runs,
// and the end of a piece.
type piece struct {
	kernel kernel
	place  placing
	at     int // number of the next stripe in its block
	seed   uint64
	acc    accumulators
	secret secret

	bytes int // length of this piece
	off   int // bytes of it that are hashed; stripes are never split
	body  int // bytes that whole stripes take in; then comes the end

	window [windowBytes]byte
	need   int // bytes that the window is to hold; 0: it is not in use
	have   int // bytes that it holds
}

func (p *piece) reset(seed uint64) {
	p.kernel, p.place, p.need, p.have = current(), cached, 0, 0
	if p.seed != seed || p.secret == (secret{}) {
		p.seed = seed
		p.secret.derive(seed)
	}
}

// begin starts a piece of n bytes, n > 0.
func (p *piece) begin(n int) {
	p.acc, p.at, p.bytes, p.off, p.body = startAccumulators, 0, n, 0, 0
	if n > shortBytes {
		// The algorithm reads the last 64 bytes apart. Of a ragged piece they overlap the
		// last whole stripe, so both wait for each other in the window.
		p.body = (n - stripeBytes) &^ (stripeBytes - 1)
	}
}

// direct returns how many of n bytes that lie in one run can go straight through the
// loop.
func (p *piece) direct(n int) int { return min(n&^(stripeBytes-1), p.body-p.off) }

// open starts to use the window: for one stripe, or for the end of the piece.
func (p *piece) open() {
	p.have, p.need = 0, stripeBytes
	if p.off == p.body {
		p.need = p.bytes - p.off
	}
}

// fuse copies and hashes whole stripes of the body.
func (p *piece) fuse(dst, src []byte) {
	p.at = p.kernel.fuse(dst, src, &p.acc, &p.secret, p.at, p.place)
	p.off += len(src)
}

// wholeIn reports whether all of the piece is better copied and then hashed by the
// library, which has vector code for processors that have no loops here.
func (p *piece) wholeIn(n int) bool { return p.kernel == portable && p.off == 0 && n >= p.bytes }

// copyWhole does that, and hashes what was stored (K2).
func (p *piece) copyWhole(dst, src []byte) uint64 {
	copy(dst, src)
	p.off = p.bytes
	return xxh3.HashSeed(dst, p.seed)
}

// endsIn reports whether the piece ends with one whole stripe that lies in a run of
// n bytes, so that it needs no window.
func (p *piece) endsIn(n int) bool {
	return n >= stripeBytes && p.off == p.body && p.bytes-p.off == stripeBytes && p.bytes > shortBytes
}

// fuseLast copies and hashes that stripe, and returns the leaf.
func (p *piece) fuseLast(dst, src []byte) uint64 {
	p.kernel.last(dst, src, &p.acc, &p.secret, p.place)
	p.off = p.bytes
	return p.acc.merge(&p.secret, uint64(p.bytes))
}

// absorb hashes the full window. It returns the leaf and true when the piece is done.
func (p *piece) absorb() (leaf uint64, done bool) {
	w := p.window[:p.need]
	switch {
	case p.bytes <= shortBytes:
		p.off = p.bytes
		return xxh3.HashSeed(w, p.seed), true
	case p.off < p.body:
		p.at = absorbPortable(w, &p.acc, &p.secret, p.at)
		p.off += stripeBytes
		return 0, false
	}
	if p.need > stripeBytes {
		absorbPortable(w[:stripeBytes], &p.acc, &p.secret, p.at)
	}
	words := stripeAt((*[stripeBytes]byte)(w[p.need-stripeBytes:]))
	p.acc.stripe(&words, &p.secret, lastAt)
	p.off = p.bytes
	return p.acc.merge(&p.secret, uint64(p.bytes)), true
}
