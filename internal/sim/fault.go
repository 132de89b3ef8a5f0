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
	NoFault Fault = iota
	FreeIgnoresHolds
	AckBeforeCommit
	TimeoutIsAbort
	ReuseAtRetire
	ExpiryIsProof
	ReadIgnoresExpiry
	MarkWithoutAsking
	UnholdBeforeUnmap
	PublishBeforeWrite
	ForgetHolders
	AckDeleteAtOnce
	ReleaseWhileListing
	SchedulerDenied
	RecoverHeldOnly
	OwnerNotAwaited
	ReadersTakeNoHold
	UnholdDropped
	RetryWithoutSync
	CommitErrorIgnored
	WatchListForgotten
	CrashNotTold
	ReapWithServer
	ForeignPidIsDead
	LeakOnError
	UnknownIsAbort
	ReleaseBeforeCopied
	ViewExpires
	ValidFromAnswer
	RemoteClockTrusted
	DisconnectIsProof
	FencedGoesOn
	FenceStartsTTL
	ClearedUnwritten
	SweepBlind
	RecordNotKept
	ReportedIsDone
	AgentRestartIsProof
	VouchUnnumbered
	HoldOutlivesProcess
	DropAgentIsProof
	ViewUnconfirmed
	faultCount
)

// faultTable is the name of each, and what it breaks.
var faultTable = [faultCount]struct{ name, rule string }{
	NoFault:             {"none", ""},
	FreeIgnoresHolds:    {"free-ignores-holds", "Holds: the RM frees a region that somebody holds"},
	AckBeforeCommit:     {"ack-before-commit", "W1: the RM answers before the store has it"},
	TimeoutIsAbort:      {"timeout-is-abort", "X1: a client takes a Commit without answer for aborted"},
	ReuseAtRetire:       {"reuse-at-retire", "Eviction: a writer takes a page back when it is retired, not when it is reclaimed"},
	ExpiryIsProof:       {"expiry-is-proof", "Proof: the server takes an expired session for gone"},
	ReadIgnoresExpiry:   {"read-ignores-expiry", "Session validity: a reader counts what it read after its session ended"},
	MarkWithoutAsking:   {"mark-without-asking", "Order of writes: a writer writes marks without the page's lock and state"},
	UnholdBeforeUnmap:   {"unhold-before-unmap", "Holds: a mapper gives its hold back and unmaps later"},
	PublishBeforeWrite:  {"publish-before-write", "Store: a writer commits before the last byte"},
	ForgetHolders:       {"forget-holders", "Server restart: a restarted server waits for no reader of the RM's list"},
	AckDeleteAtOnce:     {"ack-delete-at-once", "Delete: the server acknowledges before the marks are cleared"},
	ReleaseWhileListing: {"release-while-listing", "Server restart: a client's releases overtake its list"},
	SchedulerDenied:     {"scheduler-denied", "Server restart: the empty list of a scheduler is refused"},
	RecoverHeldOnly:     {"recover-held-only", "Server restart: regions that nobody holds are not taken over"},
	OwnerNotAwaited:     {"owner-not-awaited", "Server restart: a server that is no owner yet takes nothing to be left of older ones"},
	ReadersTakeNoHold:   {"readers-take-no-hold", "BUG-01: only the writer's hold keeps a range, a reader maps without one"},
	UnholdDropped:       {"unhold-dropped", "BUG-03: a queued unhold is dropped before the hold that replaces it is confirmed"},
	RetryWithoutSync:    {"retry-without-sync", "BUG-04: what a failed commit had in it is answered by a retry and never written"},
	CommitErrorIgnored:  {"commit-error-ignored", "CTX-20: the RM ignores that the store could not be written"},
	WatchListForgotten:  {"watch-list-forgotten", "CTX-22: a restarted RM watches none of the processes that it knew"},
	CrashNotTold:        {"crash-not-told", "CTX-23: the server is not told that a process crashed"},
	ReapWithServer:      {"reap-with-server", "CTX-24: the RM takes a server's regions back when its process dies, mapped or not"},
	ForeignPidIsDead:    {"foreign-pid-is-dead", "CTX-24: a process of another pid namespace looks dead to the RM"},
	LeakOnError:         {"leak-on-error", "CTX-25: an allocation that ended in an error keeps its extent"},
	UnknownIsAbort:      {"unknown-is-abort", "Store: a Commit of an older server epoch is taken for aborted"},
	ReleaseBeforeCopied: {"release-before-copied", "Load: a reader releases its leases before the last byte is copied"},
	ViewExpires:         {"view-expires", "Leases: a view's lease ends with the session"},
	ValidFromAnswer:     {"valid-from-answer", "Session validity: it counts from a heartbeat's answer, not from its sending"},
	RemoteClockTrusted:  {"remote-clock-trusted", "Session validity: a reader on another machine trusts its clock alone"},
	DisconnectIsProof:   {"disconnect-is-proof", "Proof: a broken connection is taken for a process that ended"},
	FencedGoesOn:        {"fenced-goes-on", "Owners: an older incarnation is not fenced"},
	FenceStartsTTL:      {"fence-starts-ttl", "Server restart: a fence alone starts the wait for readers"},
	SweepBlind:          {"sweep-blind", "Proof: the server asks only at its connection who holds nothing any more"},
	ClearedUnwritten:    {"cleared-unwritten", "Delete: a writer acknowledges marks that it has not cleared"},
	RecordNotKept:       {"record-not-kept", "Proof: an agent binds a session that its store does not have"},
	ReportedIsDone:      {"reported-is-done", "Proof: an agent forgets an end when it has told it, not when it is acknowledged"},
	AgentRestartIsProof: {"agent-restart-is-proof", "Proof: a restarted agent takes the processes on record for gone"},
	VouchUnnumbered:     {"vouch-unnumbered", "Proof: an agent's word for a process that a report of its end overtook counts"},
	HoldOutlivesProcess: {"hold-outlives-process", "Holds: a hold that was under way when its vouched process ended makes the session anew"},
	DropAgentIsProof:    {"drop-agent-is-proof", "Proof: the RM takes what a dropped agent vouched for to be gone"},
	ViewUnconfirmed:     {"view-unconfirmed", "Leases: a view counts although its region's hold came after the session's end"},
}

func (f Fault) String() string {
	if f < faultCount {
		return faultTable[f].name
	}
	return fmt.Sprintf("fault(%d)", uint8(f))
}

// Rule says what it breaks.
func (f Fault) Rule() string {
	if f < faultCount {
		return faultTable[f].rule
	}
	return ""
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
func FaultNames() string {
	names := make([]string, 0, faultCount)
	for _, f := range faultTable {
		names = append(names, f.name)
	}
	return strings.Join(names, ", ")
}

// ParseFault reads a name. Errors: base.ErrInvalid.
func ParseFault(name string) (Fault, error) {
	for i, f := range faultTable {
		if f.name == name {
			return Fault(i), nil //nolint:gosec // a few
		}
	}
	return NoFault, fmt.Errorf("%w: fault %q is unknown, allowed: %s", base.ErrInvalid, name, FaultNames())
}
