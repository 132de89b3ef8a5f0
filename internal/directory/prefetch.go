//go:build amd64 || arm64

package directory

// Prefetches ask for a cache line and wait for nothing: where a loop of loads has as
// many misses under way as fit into the processor's reorder buffer, a loop of
// prefetches has as many as it has miss registers. They are hints: they change
// nothing and fault on nothing.

// prefetchSlot asks for the line of a slot.
//
//go:noescape
func prefetchSlot(p *uint64)

// prefetchHead asks for the first line of an object.
//
//go:noescape
func prefetchHead(p *object)

// prefetchObject asks for both lines of an object.
//
//go:noescape
func prefetchObject(p *object)
