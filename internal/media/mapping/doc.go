// Package mapping is one mapped range of pool memory: how it is made, touched
// ahead, guarded against bus errors and given back. Pools of dax devices and files
// (internal/media/dax) and private memory (internal/media/cpu) both hand out its
// [Mapping], so that a client has one shape for all. It opens nothing and knows no
// pool, region or page.
//
// # Faults
//
// Memory of a pool can fail under a load or store: a truncated file, a poisoned
// line, a device that went away, a write to a read-only mapping. Inside [Guard]
// such a fault becomes base.ErrFault, if its address lies in a live mapping of
// this package; any other panic goes on. Code outside Guard crashes, as it should.
// A fault in the middle of a copy leaves the destination half written: its page is
// quarantined and the load is a miss (docs/PROTOCOL.md, "Faults of memory").
//
// # Numbered invariants
//
//  1. A mapping is unmapped once; a second Unmap is an error and touches nothing (D1).
//  2. No child process inherits a mapping (MADV_DONTFORK).
//  3. Populate never touches a range that was unmapped: Unmap waits for a step in
//     flight, and none starts after it.
//
// Locks: Mapping.mu; the registry's lock inside it.
package mapping
