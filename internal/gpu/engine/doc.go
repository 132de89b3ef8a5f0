// Package engine moves objects between blocks of an engine's KV cache on a GPU and pages
// of host memory, and computes the checksums of their pieces on the device meanwhile. It
// is pure Go over a small interface ([Device]); internal/gpu has the CUDA driver behind
// it, internal/gpu/fake has host memory and every fault.
//
// It is no policy and knows no session, lease or key: a caller names host ranges, runs
// on the device and seeds, and gets leaves. It never frees or reuses a range; it says
// whether the device may still write to one.
//
// # How bytes move
//
// Each direction is a lane: one goroutine on a thread of its own, a few slots, each with
// a stream, a staging buffer and lists. A transfer is cut into chunks of at most one
// slot; while one chunk is packed, the one before is copied. Runs can be copied one by
// one instead; a kernel then only hashes them. Which is the better is measured once a
// length of runs, while lane and engine are idle, with memory of the lane alone; before,
// and where nothing can be measured, it is runs of DirectRunBytes and more. Memory that the
// driver cannot register goes through a registered bounce buffer, a slot at a time.
//
// # Goroutines and locks
//
// Two lanes from Open to Close. Locks: lane.mu (its queue) and Engine.mu (registrations),
// both leaves. Engine.measuring is only tried for, by lanes.
//
// # Invariants
//
//	G1. A piece lies in one chunk, and a chunk in one slot.
//	G2. No kernel and no copy touches device memory outside of the ranges that Check has
//	    passed: runs come from a layout that was checked whole.
//	G3. A transfer ends once nothing of it runs any more; only with Running set, after
//	    the device was lost, may that be unknown.
//	G4. A slot's lists are not touched between Launch and the Wait that says done.
//	G5. After a failure no later chunk of the same transfer is started.
//	G6. A lost device stays lost: every later transfer fails at once, with nothing started.
//
// Source: docs/rfcs/0008-gpu-copies.md.
package engine
