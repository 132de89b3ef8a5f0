// Package rm is the resource manager as a program: its state directory, devices,
// sockets and watches around the pure core (internal/rm/core). It decides
// nothing about regions and holds; it carries out what the core says, in the
// order that the core's package comment gives. It is embeddable: Start serves
// until Close, and two of them can live in one process.
//
// # Goroutines
//
// One goroutine, the committer, owns the core, the store and all writes to
// devices. gRPC handlers give it jobs and wait; while one batch is being
// synced the next one gathers, so concurrent callers share an fsync. The peer
// watcher has a goroutine of its own and only leaves word for the committer.
// gRPC and HTTP have theirs. Close stops them in that order: streams, servers,
// watcher, committer.
//
// # Locks
//
// hub.mu (event streams) and Server.gone (ended processes) are leaves: nothing is
// locked or waited for under them. The committer takes both, one at a time.
//
// Invariants: W1 an answer leaves only after its batch is in the store and the
// slots are flushed. S1, R3, E1, E2 are the core's.
//
// Source: docs/PROTOCOL.md, sections 2 and 3; docs/rfcs/0001-device-format.md.
package rm
