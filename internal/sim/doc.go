// Package sim runs the pure cores of the resource manager (internal/rm/core), the server
// (internal/directory) and the client (internal/session), as they are shipped, in one
// thread under a virtual clock and a virtual network, and checks the numbered invariants
// of docs/PROTOCOL.md after every event.
//
// Its actors are the shells without their I/O: they make the same calls in the same
// order, wait for the same answers and keep the same state between them. What they meet:
//
//   - Messages late, lost, delivered twice or out of order; partitions of one pair of
//     programs; broken connections.
//   - Programs stopped for longer than a session lives, killed between any two of their
//     events, started again from what is durable. The store's last transaction is lost
//     whole; the header's slot is not written, or torn.
//   - A store that cannot be written, a device that cannot.
//   - Clocks of all processes off by up to 0.1 %; the whole machine standing still, its
//     clock too or not; remote mappers on a machine of their own, whose clock stands still
//     with it and whose end only its agent can tell, or, without one, an operator.
//   - Agents: most remote machines have a watcher that vouches for the mappers there. It is
//     killed and started again with its record, cut off from the resource manager, booted
//     again with its machine, dropped by an operator; mappers die while they are bound, or
//     while their hold is under way.
//   - Rolling updates: two servers with one id, the older one fenced, at once or after a
//     partition. Forks. Sessions that come back from being suspect, or leave with views.
//
// Pages are two words each, written and copied one after the other, so that a torn or
// wrong read can be seen.
//
// It is no test of the shells or of the codecs (rows are packed by internal/hot, frames
// are not made): there is one resource manager, one pool, one namespace. Agents are
// modelled by their contract (docs/rfcs/0009): internal/agent has no core of its own; a
// process that an agent cannot find any more, and cache lines to be written back, are not
// modelled. No client opens again by its secret alone: one on another machine that a
// restarted server refuses is started anew.
//
// # Determinism
//
// A seed is made into a Script: the world, and a list of actions each with its own draws.
// An event draws from the chain of what caused it, so that an action that is taken out
// shifts none of the others; nothing depends on a map's order, a clock or a goroutine. A
// script replays its run, event by event, and its text is a whole description:
// Result.Digest covers the events and the draws. Shrink makes a failing script short.
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
//   - Of a server that was fenced and cannot hear of it less: the bytes of its hits and the
//     reads that count (R2, R3), not that its keys are the newer one's (R7), that a late
//     Commit there publishes what its page still shows (R1), or that "not found" of a
//     delete means what the newer one has. No server is held to know another one's private
//     pools. docs/rfcs/0010 says why.
//   - L1 when faults stop, nothing stays retiring, quarantined, suspect or draining, no
//     fenced server goes on, and when all have closed or died every byte is free, and the
//     resource manager knows no session any more. What an agent has vouched for comes back
//     without an operator, unless one dropped that agent.
//
// After each event the parts are checked that it can have changed: a directory that was
// called, the resource manager's regions when its core, a mapping or an acknowledgement
// changed, marks when one was written or a delete acknowledged, views when their page was
// written, a client when its process ran. Everything is checked after every 64 events and
// at the end. Events are put into words only for somebody who reads them.
//
// # Planted errors
//
// A Fault plants an error into an actor, to show that the checks find it: one for each
// defect BUG-01, 03, 04 and CTX-20, 22 to 25, at least one for each rule of section 3, and
// six for agents.
// `maru sim --faults` says how many seeds each took.
//
// Source: docs/PROTOCOL.md; the shells internal/rm, internal/server, client, internal/agent.
package sim
