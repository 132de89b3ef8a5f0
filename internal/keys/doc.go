// Package keys computes identities: of namespaces, of chunks of a prompt, of
// opaque values. Every engine, every language and the server get the same bytes
// for the same content from here or from its twin python/maru/keys.py; the file
// testdata/identity_vectors.json keeps the two equal.
//
// It is pure: no I/O, no clock, no goroutine, no state beyond a Chain. It knows
// nothing of replicas, pages or sessions.
//
// Invariants:
//
//  1. A namespace has exactly one encoding: RFC 8949 section 4.2.1, every field
//     present. What another encoder made differently is refused, never repaired,
//     because its SHA-256 is the identity (ID-02, ID-08).
//  2. Inputs to a hash are separated by domain and cannot be cut elsewhere: the
//     fixed prefix names the use, lengths that could shift are hashed too.
//  3. A chunk's digest covers the namespace, the salt and every token and extra
//     key before it (ID-03, ID-04).
//  4. Keys of different types never collide by spelling: 5, "5" and b"5" differ.
//
// Source: docs/PROTOCOL.md section 1 "Object key", docs/rfcs/0005-object-identity.md.
package keys
