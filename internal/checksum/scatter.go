package checksum

// Scatterer copies a value that lies in one place to several runs and hashes it
// piece by piece; runs and pieces need not meet. The zero value is ready for Reset.
// The caller compares the leaves, or their root, after the copy: until then the
// runs hold unverified bytes.
//
// Ownership: it keeps src and leaves until Finish. Concurrency: one goroutine.
type Scatterer struct {
	src        []byte
	leaves     []uint64
	pieceBytes int
	taken      int // bytes of src that were loaded
	given      int // bytes that are in runs
	piece      piece
	from, to   int // bytes of the window that wait for a run
}

// Reset begins a value, or a part of one that begins with a piece, at src. Leaves of
// pieces that were read to their end are appended to leaves. With a piece size that
// is not positive nothing is hashed.
func (s *Scatterer) Reset(src []byte, pieceBytes int, seed uint64, leaves []uint64) {
	s.src, s.leaves, s.pieceBytes = src, leaves, max(pieceBytes, 0)
	s.taken, s.given, s.from, s.to = 0, 0, 0, 0
	s.piece.reset(seed)
	s.next()
}

func (s *Scatterer) next() {
	if n := min(s.pieceBytes, len(s.src)-s.taken); n > 0 {
		s.piece.begin(n)
	}
}

// Read copies the next bytes to dst and returns how many: less than len(dst) only
// at the end of src.
func (s *Scatterer) Read(dst []byte) int {
	p := &s.piece
	if s.pieceBytes == 0 {
		n := min(len(dst), len(s.src)-s.taken)
		if len(s.src) >= StreamBytes {
			p.kernel.copy(dst[:n], s.src[s.taken:s.taken+n])
		} else {
			copy(dst, s.src[s.taken:])
		}
		s.taken += n
		s.given += n
		return n
	}
	total := 0
	for len(dst) > 0 {
		if s.from < s.to {
			n := copy(dst, p.window[s.from:s.to])
			s.from += n
			dst = dst[n:]
			total += n
			continue
		}
		if s.taken == len(s.src) {
			break
		}
		n := p.direct(len(dst))
		switch {
		case p.wholeIn(len(dst)):
			n = p.bytes
			s.leaves = append(s.leaves, p.copyWhole(dst[:n], s.src[s.taken:s.taken+n]))
		case n > 0:
			p.place = placingAt(dst, len(s.src))
			p.fuse(dst[:n], s.src[s.taken:s.taken+n])
		case p.endsIn(len(dst)):
			n = stripeBytes
			p.place = placingAt(dst, len(s.src))
			s.leaves = append(s.leaves, p.fuseLast(dst[:n], s.src[s.taken:s.taken+n]))
		default:
			s.fill()
			continue
		}
		s.taken += n
		dst = dst[n:]
		total += n
		if p.off == p.bytes {
			s.next()
		}
	}
	s.given += total
	return total
}

// fill loads and hashes a window: a stripe that lies across two runs, or the end of
// a piece. It is loaded once, and the runs get what was hashed (K2).
func (s *Scatterer) fill() {
	p := &s.piece
	p.open()
	copy(p.window[:p.need], s.src[s.taken:])
	s.taken += p.need
	s.from, s.to = 0, p.need
	leaf, done := p.absorb()
	p.need = 0
	if done {
		s.leaves = append(s.leaves, leaf)
		s.next()
	}
}

// Finish ends the value. It returns the leaf list and the number of bytes that were
// given to runs. A piece of which less than that was read has no leaf; the end of one
// can be hashed before all of it is given.
func (s *Scatterer) Finish() (leaves []uint64, n int) {
	s.piece.kernel.fence()
	leaves, n = s.leaves, s.given
	s.src, s.leaves = nil, nil
	return leaves, n
}
