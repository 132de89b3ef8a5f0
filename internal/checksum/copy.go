package checksum

// Copy copies src to the front of dst, which must be at least as long; large copies
// go around the cache. The two must not overlap.
//
// Concurrency: when it returns, its stores are ordered like ordinary ones (K3).
// Alignment: fastest when dst is 64-byte aligned.
func Copy(dst, src []byte) {
	dst = dst[:len(src)]
	if len(src) < StreamBytes {
		copy(dst, src)
		return
	}
	k := current()
	k.copy(dst, src)
	k.fence()
}

// CopySum copies src to the front of dst, which must be at least as long, and
// appends the leaf of every piece to leaves. The two must not overlap.
//
// Concurrency: as Copy. Alignment: any; fastest when dst is 64-byte aligned and the
// piece size a multiple of 64.
func CopySum(dst, src []byte, pieceBytes int, seed uint64, leaves []uint64) []uint64 {
	var c Copier
	c.Reset(dst[:len(src)], pieceBytes, seed, leaves)
	c.Write(src)
	leaves, _ = c.Finish()
	return leaves
}

// placingAt says how to store stripes from the first byte of b on, when they are part
// of a value of that many bytes. Many short runs are a large copy as well.
func placingAt(b []byte, valueBytes int) placing {
	at := addressOf(b)
	switch {
	case valueBytes < StreamBytes || at%16 != 0:
		return cached
	case at%stripeBytes != 0:
		return offLine
	}
	return streamed
}

// Copier copies a value that comes in several runs to one place and hashes it piece
// by piece; runs and pieces need not meet. The zero value is ready for Reset, and a
// Copier can be reset for the next value.
//
// Ownership: it keeps dst and leaves until Finish. Concurrency: one goroutine.
type Copier struct {
	dst        []byte
	leaves     []uint64
	pieceBytes int
	pos        int // bytes of dst that are written
	start      int // where the piece begins
	offered    int
	piece      piece
}

// Reset begins a value that is written to dst. Leaves are appended to leaves. With a
// piece size that is not positive nothing is hashed: a gather with checksums off.
func (c *Copier) Reset(dst []byte, pieceBytes int, seed uint64, leaves []uint64) {
	c.dst, c.leaves, c.pieceBytes = dst, leaves, max(pieceBytes, 0)
	c.pos, c.start, c.offered = 0, 0, 0
	c.piece.reset(seed)
	c.next()
}

// next begins the piece at pos, if there is one.
func (c *Copier) next() {
	c.start = c.pos
	if n := min(c.pieceBytes, len(c.dst)-c.pos); n > 0 {
		c.piece.begin(n)
		c.piece.place = placingAt(c.dst[c.pos:], len(c.dst))
	}
}

// Write appends a run. Bytes that are not at a boundary of 64 may wait for the next
// Write or Finish. What does not fit in dst is not written; Finish tells.
func (c *Copier) Write(src []byte) {
	c.offered += len(src)
	p := &c.piece
	if c.pieceBytes == 0 {
		n := min(len(src), len(c.dst)-c.pos)
		if len(c.dst) >= StreamBytes {
			p.kernel.copy(c.dst[c.pos:c.pos+n], src[:n])
		} else {
			copy(c.dst[c.pos:], src[:n])
		}
		c.pos += n
		return
	}
	for len(src) > 0 && c.pos < len(c.dst) {
		if p.need == 0 {
			if p.wholeIn(len(src)) {
				leaf := p.copyWhole(c.dst[c.pos:c.pos+p.bytes], src[:p.bytes])
				c.pos += p.bytes
				src = src[p.bytes:]
				c.leaves = append(c.leaves, leaf)
				c.next()
				continue
			}
			if n := p.direct(len(src)); n > 0 {
				p.fuse(c.dst[c.pos:c.pos+n], src[:n])
				c.pos += n
				src = src[n:]
				continue
			}
			if p.endsIn(len(src)) {
				leaf := p.fuseLast(c.dst[c.pos:c.pos+stripeBytes], src[:stripeBytes])
				c.pos += stripeBytes
				src = src[stripeBytes:]
				c.leaves = append(c.leaves, leaf)
				c.next()
				continue
			}
			p.open()
		}
		n := copy(p.window[p.have:p.need], src)
		p.have += n
		src = src[n:]
		if p.have == p.need {
			c.flush()
		}
	}
}

// flush stores and hashes the full window.
func (c *Copier) flush() {
	p := &c.piece
	c.pos += copy(c.dst[c.pos:], p.window[:p.need])
	leaf, done := p.absorb()
	p.need = 0
	if done {
		c.leaves = append(c.leaves, leaf)
		c.next()
	}
}

// Finish ends the value. It returns the leaf list and the number of bytes that were
// offered: more than len(dst) says that the rest was not written. If it is less,
// the value ends there and its last piece is the shorter one.
func (c *Copier) Finish() (leaves []uint64, n int) {
	p := &c.piece
	if c.pieceBytes > 0 && c.offered < len(c.dst) {
		// The length was not known before, so that piece was begun as a longer one. It is
		// hashed again where it lies.
		c.pos += copy(c.dst[c.pos:], p.window[:p.have*min(p.need, 1)])
		p.need = 0
		if c.pos > c.start {
			p.kernel.fence()
			c.leaves = append(c.leaves, Leaf(c.dst[c.start:c.pos], p.seed))
		}
	}
	p.kernel.fence()
	leaves, n = c.leaves, c.offered
	c.dst, c.leaves = nil, nil
	return leaves, n
}
