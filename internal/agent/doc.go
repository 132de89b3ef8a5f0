// Package agent is maru-remote-cxl-agent with --watch-only: the watcher of a node that
// has no resource manager. It vouches for the mappers there: a process shows itself at
// its Unix socket, the agent binds the session to that process at the resource manager,
// and tells when the process has ended. It maps no pool memory, but for writing a dead
// mapper's cache lines back on software-coherent pools, and registers nothing with a NIC:
// the agent that does is a later issue.
//
// # What it may say
//
// An agent ends only sessions that it bound itself, and binds a session only when its
// secret is shown, or when nobody has used its id yet. It is so no matter to others
// whose agent it really is (docs/rfcs/0009-node-watcher.md).
//
// # Order
//
//  1. A session is recorded here durably before its process is watched, and that before
//     it is bound at the resource manager: an end that follows is reported, whatever
//     crashes in between.
//  2. A record goes only after the resource manager acknowledged the end of its process,
//     or refused to bind it. So the queue of what is to be reported is a part of the
//     records, and is bounded with them.
//  3. An end is told with proof only: [peer.Ends] decides. A process that cannot be found
//     any more is told as such, and its holds stay.
//
// # Goroutines and locks
//
// The link (run) has one connection to the resource manager and makes all reports;
// gRPC handlers bind sessions over the same connection; the watcher has a goroutine of
// its own and only leaves word. Agent.mu is a leaf, never held over I/O; Agent.writing
// serializes the store and is taken before it.
//
// Invariants: R3 and L1 with the resource manager's; W1: what BindSession acknowledges is
// durable here and there.
//
// Source: docs/PROTOCOL.md, "Proof that a mapper is gone".
package agent
