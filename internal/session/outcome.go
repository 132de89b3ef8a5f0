package session

import "github.com/xcena-dev/maru/internal/base"

// Refused reports whether the error that a server answered to a Commit or an Acquire
// proves that the operation changed nothing. These are the errors that a server gives
// after it has looked the operation up in the session's ledger, and those that depend on
// the request's bytes alone. Any other (the epoch is over, the server is fenced or has a
// bug) can be the answer to a second delivery of what was executed before, so it leaves
// the outcome unknown (X1): the operation is lost, and resolved or released by name.
func Refused(err error) bool {
	switch base.CodeOf(err) {
	case base.CodeInvalid, base.CodeMismatch, base.CodeDenied, base.CodeLimit, base.CodeBusy, base.CodeAborted:
		return true
	}
	return false
}

// growthRefused reports whether the error that a server answered to an Expand proves that
// the operation has made no region and will make none. The ledger is looked up for a
// session whose epoch is current, by a server that serves: who refuses before that knows
// nothing of a first delivery.
func growthRefused(err error) bool {
	switch base.CodeOf(err) {
	case base.CodeStale, base.CodeFenced, base.CodeClosed, base.CodePending, base.CodeUnknown, base.CodeTimeout, base.CodeInternal:
		return false
	}
	return true
}
