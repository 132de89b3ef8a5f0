// Package base holds the words of the project: identifiers, locations, states
// and sentinel errors. It imports nothing of ours, so that every other package
// can share one vocabulary (docs/ARCHITECTURE.md; the law is docs/PROTOCOL.md).
//
// Words: a pool is cut into regions, a region into pages. An object is logical
// KV content with an identity ([Key] in a namespace); a replica is one copy of
// it at a [Location]. A session is one client process's registration, with an
// epoch. A lease protects a replica for a reader; a hold protects a region for a
// mapper; a grant is capacity that a session may use.
//
// All integers on the wire and on a device are little-endian. A big-endian build
// is refused at compile time (endian_big.go).
package base
