package sim

import (
	"fmt"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// Fault is an error that a run plants into one actor.
type Fault uint8

// Faults. Each breaks one rule of docs/PROTOCOL.md.
const (
	NoFault             Fault = iota
	FreeIgnoresHolds          // the RM frees a region that somebody holds
	AckBeforeCommit           // the RM answers before the store has it
	TimeoutIsAbort            // a client takes a Commit without answer for aborted
	ReuseAtRetire             // a writer takes a page back when it is retired, not when it is reclaimed
	ExpiryIsProof             // the server takes an expired session for gone
	ReadIgnoresExpiry         // a reader counts what it read after its session ended
	MarkWithoutAsking         // a writer writes marks without the page's lock and state
	UnholdBeforeUnmap         // a mapper gives its hold back and unmaps later
	PublishBeforeWrite        // a writer commits before the last byte
	ForgetHolders             // a restarted server waits for no reader of the RM's list
	AckDeleteAtOnce           // the server acknowledges a delete before the marks are cleared
	ReleaseWhileListing       // a client's releases overtake its list after a restart
	SchedulerDenied           // the server refuses the empty list of a scheduler after a restart
	RecoverHeldOnly           // a restarted server does not take over regions that nobody holds
	OwnerNotAwaited           // a server that is no owner yet takes nothing to be left of older ones
	faultCount
)

var faultNames = [...]string{
	"none", "free-ignores-holds", "ack-before-commit", "timeout-is-abort", "reuse-at-retire", "expiry-is-proof",
	"read-ignores-expiry", "mark-without-asking", "unhold-before-unmap", "publish-before-write", "forget-holders", "ack-delete-at-once",
	"release-while-listing", "scheduler-denied", "recover-held-only", "owner-not-awaited",
}

func (f Fault) String() string {
	if int(f) < len(faultNames) {
		return faultNames[f]
	}
	return fmt.Sprintf("fault(%d)", uint8(f))
}

// Faults lists all that can be planted.
func Faults() []Fault {
	var out []Fault
	for f := NoFault + 1; f < faultCount; f++ {
		out = append(out, f)
	}
	return out
}

// FaultNames lists the names of all faults.
func FaultNames() string { return strings.Join(faultNames[:], ", ") }

// ParseFault reads a name. Errors: base.ErrInvalid.
func ParseFault(name string) (Fault, error) {
	for i, n := range faultNames {
		if n == name {
			return Fault(i), nil //nolint:gosec // a few
		}
	}
	return NoFault, fmt.Errorf("%w: fault %q is unknown, allowed: %s", base.ErrInvalid, name, FaultNames())
}
