// Package server is maru-server around its core: sockets, sessions' proofs, the
// connection to the resource manager, clocks and files. What is decided is decided
// by internal/directory; this package translates, carries out effects, and waits.
// It is no place of bytes: objects never pass through it (GEN-04).
//
// # Planes
//
// The control plane (control*.go) is gRPC on TCP and on a Unix socket, RFC 0002.
// The hot plane (hotplane.go, hotconn.go) is frames of internal/hot, RFC 0003: a
// goroutine a connection, no allocation a request in steady state.
//
// # Locks
//
// Server.dir (the directory) before sessionTable.mu before session.mu before
// hotPlane.mu. boundTable.mu, flights.mu, workQueue.mu, deleteWaiters.mu,
// readTokens.mu and rmLink.mu are leaves. None is held over I/O or while waiting;
// effects are taken under the directory's lock and carried out after it.
//
// # Invariants
//
//  1. Nothing is acknowledged before it is in the ledger (W1): an allocation at the
//     resource manager is followed by one goroutine until its outcome is known,
//     whoever waits for it.
//  2. A session belongs to one process: once bound to the peer of a Unix socket it
//     never moves. The end of that process is the only proof that this server gives
//     by itself (the pidfd).
//  3. Of a session one epoch is current. Connections of older ones are cut when the
//     new one is made.
//  4. A server that has stopped serving (fenced, dropped, or broken by a bug under the
//     directory's lock) answers no request that changes or reads the directory's objects.
//
// Source: docs/PROTOCOL.md sections 1 and 3; docs/rfcs/0002 and 0003.
package server
