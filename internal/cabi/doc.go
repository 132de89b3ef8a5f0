// Package cabi is what stands behind the exports of libmaru.so: the table of
// handles, the checks of every argument, the configuration in JSON, the texts and
// the codes. It is pure Go and is tested without cgo; cmd/libmaru only turns C
// pointers into slices and calls it.
//
// It is no second client: it adds no cache, no retry and no thread. It speaks to a
// client through the interface Client, which *client.Client satisfies; tests put
// others in its place.
//
// Lock order: Library.mu, then entry.mu or logRing.mu; none is held over a call of
// a client.
//
// Invariants:
//
//  1. (C1) A handle is never 0, has its kind in the top byte and is never used
//     again; one that is closed or foreign is an error and never reaches a client.
//  2. A panic below ends in ErrInternal and poisons that client: what it holds is
//     in an unknown state, so every later call but Close is refused with the same
//     text.
//  3. Nothing is kept of the caller's memory after a call has returned, except the
//     ranges that a submitted transfer names.
//  4. Nothing here prints, exits, installs a signal handler or holds state of the
//     process.
//
// Source: include/maru.h, docs/rfcs/0006-c-abi.md.
package cabi
