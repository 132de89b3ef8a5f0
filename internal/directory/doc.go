// Package directory is the pure core of maru-server: it knows every session,
// pool, region, object, replica and lease, and decides what is visible to whom
// and what may be reused. It does no I/O, reads no clock and starts no goroutine:
// every method takes now, a monotonic duration since an arbitrary start, and
// leaves [Effect] values for the shell to carry out (D4).
//
// It is not the place of bytes (they never come here), of pages that are being
// written (workers keep them until commit, INV-02) or of durable state (the
// resource manager has it).
//
// Concurrency: a Directory has no lock. Its shell guards it by one RWMutex:
// [Directory.Probe], [Directory.Usage], [Directory.PendingEvents],
// [Directory.Secret], [Directory.DescribeRegions], [Directory.DeleteStatus] and
// the other methods that say so write nothing and may run together under the
// read lock; every other method needs the write lock. After a method under the
// write lock the shell takes the effects with [Directory.AppendEffects] before it
// unlocks, and carries them out after.
//
// A replica's life here: READY -> RETIRING -> freed, or QUARANTINED -> RETIRING
// -> freed for what was uncertain at a server restart. RETIRING needs two things in any order: its
// mark is cleared (the writer acknowledges, or the resource manager did it for a
// region whose writer is gone or left), and its leases drain. Then the writer is
// told to reclaim, and its acknowledgement frees the page (INV-08). Replicas of a
// suspect session stay READY and are only not visible.
//
// Pending is never answered in this version: a key whose only replicas are
// retiring, hidden or quarantined is a Miss. None of them becomes visible soon
// without a new commit, and an engine that is told to wait would wait for nothing.
//
// Invariants (docs/PROTOCOL.md, section 4): R1 to R7, S1 and the directory's part
// of L1; [Directory.CheckInvariants] checks them whole.
//
// Source: docs/PROTOCOL.md sections 1 and 3; D2a, D4.
package directory
