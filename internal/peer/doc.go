// Package peer knows the process behind a Unix socket and proves its end. It is no
// authentication of sessions (a secret does that) and never judges by time, by a lost
// connection or by the state that /proc shows.
//
// # The proof
//
// A pidfd is readable when the last thread of its process is gone, and only then. A
// leader that is a zombie while its threads still write, and a process stuck in a
// driver, are not readable: they are not gone (docs/PROTOCOL.md, "Proof that a mapper
// is gone").
//
// The pidfd comes from the kernel with the connection (SO_PEERPIDFD, Linux 6.5). On
// older kernels it is opened from the pid in SO_PEERCRED; the socket is then checked
// again, since a pid can only have been given to another process after the peer ended.
// What remains there is a peer that handed its connection to a child, ended, and had its
// pid reused, all between connect and accept.
//
// After a restart of the watcher (pid, pid namespace, start time, boot id) finds the same
// process again ([Reopen]), in the same pid namespace only: a pid means nothing in another.
//
// A pid that is free, or another process's, proves an end only in the namespace in which
// it was recorded. The kernel may give a namespace's inode to a later one, but only after
// every process in the first has ended, so that an equal inode never proves too much. The
// host's own namespace keeps its inode over all restarts of a watcher; one that runs in
// another is as a rule restarted in a new one, and its mappers are then lost (they may
// live or not): [Ends] says so, and their holds stay.
//
// [Watcher] is the mechanism; [Ends] is what a node watcher does with it, the same for the
// resource manager and for the agent of a node without one (internal/agent).
//
// # Numbered invariants
//
//  1. A callback of [Watcher] runs at most once per Watch, and only after its pidfd was
//     seen readable.
//  2. No callback runs after Close of the watcher has returned.
//  3. [Reopen] says gone only if the process cannot exist: the kernel was booted again, its
//     pid is free, or its pid belongs to a process of another start time.
//
// Locks: Watcher.mu; Peer.mu inside it. Neither is held while a callback runs.
//
// Source: man 2 pidfd_open, kernel fs/pidfs.c (pidfd_poll), net/core/sock.c (sk_getsockopt).
package peer
