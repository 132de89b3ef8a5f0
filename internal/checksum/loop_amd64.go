package checksum

func choose() kernel { return portable }

func kernels() []kernel { return []kernel{portable} }

func (k kernel) String() string { return "portable" }

func (k kernel) copy(dst, src []byte) { copy(dst, src) }

func (k kernel) fuse(dst, src []byte, a *accumulators, s *secret, at int, _ placing) int {
	return fusePortable(dst, src, a, s, at)
}

func (k kernel) last(dst, src []byte, a *accumulators, s *secret, _ placing) {
	lastPortable(dst, src, a, s)
}

func (k kernel) fence() {}
