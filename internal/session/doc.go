// Package session is the pure core of a client: what its session may do now, what
// each of its pages holds, which leases and pins are out, which operations have no
// answer yet. It decides; the shell around it (package client) talks, maps and copies.
//
// It is no transport and no clock: times come in with the call and are CLOCK_BOOTTIME.
// It has no lock, no goroutine and no I/O: the shell serialises all calls under one
// mutex, and one more per region for marks (see MayMark).
//
// # Life of a page
//
//	FREE -> WRITING -> COMMITTING -> READY -> RETIRING -> FREE
//	                        |-> FREE          refused, aborted, or another was first
//	                        |-> QUARANTINED   no answer: free or ready when there is one
//	WRITING -> QUARANTINED                    a memory fault: it comes back with its region
//	any -> LEFT                               the session has left; nothing is reused
//
// # Invariants (docs/PROTOCOL.md section 4; asserted under -tags invariants)
//
//	R2. A page is written in WRITING only.
//	R3. A page becomes free only from WRITING, by a result of its own Commit, or by a
//	    reclaim of its very generation; never while a view lease lies on it.
//	R4. Leases are counted up and down once each; counts never go below zero.
//	R5. In each region free + writing + committing + ready + retiring + quarantined =
//	    pages.
//	R7. A mark is allowed only for a READY page of the asked generation in the current
//	    epoch; a retire, even one that comes before the Commit's answer, forbids it for good.
//	S1. An answer or event of another epoch, operation or generation changes nothing.
//	D1. A region is given to unmap only when no lease, view or page in writing is on it.
//	X1. A Commit without an answer is neither success nor failure.
//
// Source: docs/PROTOCOL.md sections 1 and 3.
package session
