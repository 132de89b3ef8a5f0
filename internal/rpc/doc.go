// Package rpc is the gRPC plumbing of the control plane: servers with bounds,
// errors that cross the wire as base codes, dialling, and the listeners of TCP
// ports and Unix sockets. It knows no service and no message but Problem; the
// hot plane (internal/hot) uses only its listeners and dial helpers.
//
// # Errors
//
// A handler returns errors of internal/base; the interceptors of [NewServer]
// turn them into a gRPC status with one maruv1.Problem in its details, and those
// of [NewClient] turn such a status back. A caller therefore sees base sentinels
// only, and asks with errors.Is. Whether the peer may have done the work although
// the call failed is asked with [OutcomeUnknown] (X1): an unknown outcome is never
// taken as failure.
//
// # Sockets
//
// A Unix socket has mode 0600: the kernel lets its owner and root connect, nobody
// else. Its directory is 0755 when it is /run/maru (made by root or by systemd's
// RuntimeDirectory, so that a server and an engine of an ordinary user can pass
// it on the way to their own sockets), and 0700 everywhere else. An engine of the
// same user as the daemon can therefore always connect; for engines of another
// user the daemon is given a wider mode ([WithMode]).
//
// Next to a socket lies PATH.lock, locked with flock for the life of the listener
// and removed with it. A live owner is recognised by that lock, or, when the
// socket belongs to a program without one, by a connection that is accepted. What
// is left of a dead process is replaced.
//
// Locks: none is held while another is taken.
package rpc
