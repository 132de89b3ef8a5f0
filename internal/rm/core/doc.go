// Package core is the resource manager without its surroundings: pools, regions,
// owners, sessions, holds and capabilities, and what each request changes. It is
// a pure core: no I/O, no clock, no goroutine, no lock. It opens no device,
// knows no socket and writes no store; a request adds what must become durable
// to a Batch, and the shell (internal/rm) carries it out in this order:
//
//  1. commit the batch to the store (one fsync for all requests in it);
//  2. write region lines and record tables of new regions;
//  3. write and flush the slot of each pool that the batch touched;
//  4. answer, and publish the batch's events.
//
// When the commit fails, the core's memory stays ahead of the store (RM-07): the
// batch is kept, every request in it answers an error, and the next commit
// carries it again, so that a retry finds its result and acknowledges it only
// after it is durable (RM-06, W1).
//
// Each request either changes nothing and returns an error, or adds all of its
// changes: checks come first.
//
// # Sequences
//
// A pool's row has a sequence, and so has its slot on the device. Seal gives all
// touched pools the slot's sequence plus one, however often a batch has to be
// committed: so the store is never more than one ahead. At Attach equal is
// accepted if all numbers are equal too, one ahead writes the slot first, and
// anything else is refused. A pool that is offline cannot have its slot written.
// Only releases (unhold, free, proofs) are then recorded, without raising the
// sequence: an older store that is taken for the current one would only forget
// releases, which leaks but never gives a range twice.
//
// # Operations
//
// Allocate is idempotent by (owner, incarnation, operation). While the region
// lives it is found through the region. When it was freed, the operation's number
// goes to the owner's ledger of closed operations and a retry is refused as
// stale. The ledger holds spans of consecutive numbers and lives as long as the
// owner's incarnation: an owner that counts its operations needs about one span
// for each region it has now. A full ledger stops admission of that owner
// (Limits.MaxSpanCount) and forgets nothing.
//
// # Holds
//
// A row (session, region) keeps the highest sequence and what it did, also after
// an unhold, until the session ends or the region is freed; ids are never
// reused, so nothing can come back for a freed region. A session is bound at its
// first hold: to its process when that is known, and to a hold token.
// A session without a process ends when its last row goes.
//
// # Owners
//
// A row keeps a digest of the secret that the owner's first start showed; a later
// start must show the same. Each start is answered with a token, an HMAC under the
// store's secret over owner, incarnation and digest, which all calls of the owner
// carry: it is checked without being kept, so it is good after a restart of the
// resource manager and worthless after the next start. Hold takes no token: a
// mapper is no owner, and its capability is its proof.
//
// Invariants: E1, E2 (internal/extent), R3 (an extent is free only after the
// last hold ended by unhold or by proof), S1, W1 (with the shell), L1.
//
// Source: docs/PROTOCOL.md, sections 2 to 4.
package core
