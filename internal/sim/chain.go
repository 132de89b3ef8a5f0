package sim

import "time"

// chain is a sequence of draws. Each action of a script has its own, and so has each
// process for what it does by itself; an event draws from the chain of what caused it.
// So an action that is taken out of a script does not shift the draws of the others.
// It is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
type chain struct {
	state uint64
	calm  bool // no troubles: messages are fast and arrive once
}

const golden = 0x9e3779b97f4a7c15

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

func newChain(seed uint64, calm bool) *chain {
	c := makeChain(seed, calm)
	return &c
}

func makeChain(seed uint64, calm bool) chain { return chain{state: mix(seed + golden), calm: calm} }

// Uint64 is the next draw.
func (c *chain) Uint64() uint64 {
	c.state += golden
	return mix(c.state)
}

// Uint64N is below n. The bias of the remainder is far below what a run could show.
func (c *chain) Uint64N(n uint64) uint64 { return c.Uint64() % n }

// IntN is below n.
func (c *chain) IntN(n int) int { return int(c.Uint64() % uint64(n)) } //nolint:gosec // positive

// Float64 is in [0, 1).
func (c *chain) Float64() float64 { return float64(c.Uint64()>>11) / (1 << 53) }

func (c *chain) chance(percent float64) bool { return c.Float64()*100 < percent }

func (c *chain) between(low, high time.Duration) time.Duration {
	return low + time.Duration(c.Uint64()%uint64(high-low+1)) //nolint:gosec // positive
}
