// Package sim runs the pure cores of the resource manager (internal/rm/core), the server
// (internal/directory) and the client (internal/session), as they are shipped, in one
// thread under a virtual clock and a virtual network, and checks the numbered invariants
// of docs/PROTOCOL.md after every event.
//
// Its actors are the shells without their I/O: they make the same calls in the same
// order, wait for the same answers and keep the same state between them. A message may
// be late, lost, delivered twice or out of order; a program may be stopped for longer
// than its session lives, killed between any two of its events, or started again from
// what is durable. Pages are two words each, written and copied one after the other, so
// that a torn or wrong read can be seen.
//
// It is no test of the shells, of the codecs (rows are packed by internal/hot, frames
// are not made) or of several hosts: there is one node, one pool, one namespace.
//
// # Determinism
//
// All choices come from one PCG of the seed, and nothing depends on a map's order, a
// clock or a goroutine: a seed replays its run, event by event. Result.Digest covers
// the trace.
//
// # What is checked
//
//   - E1, E2 regions are disjoint, aligned, inside the pool, and their sum is what the
//     pool says is allocated.
//   - W1 what the resource manager acknowledged is there after each of its restarts.
//   - R1 a page is whole when it is published. R2, R3 what a view or a read that counts
//     shows is what was committed; no region is given out over a live mapping; a mapping
//     has its hold on record.
//   - R4 to R6, S1 by Directory.CheckInvariants and, under -tags invariants, by the
//     assertions of the cores.
//   - R7 what was retired or deleted with acknowledgement is never found again, and no
//     mark of it is on the device, in any region that does not drain: a rebuild would
//     read none.
//   - L1 when faults stop, nothing stays retiring, quarantined, suspect or draining, and
//     when all have closed or died every byte is free.
//
// A Fault plants an error into an actor, to show that the checks find it.
//
// Source: docs/PROTOCOL.md; the shells internal/rm, internal/server, client.
package sim
