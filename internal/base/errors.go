package base

import (
	"context"
	"errors"
	"fmt"
)

// Code is an error as a number: stable on the wire and in the C ABI, append-only.
// 0 is success.
type Code uint32

// Codes. Each has one sentinel below.
const (
	CodeOK            Code = 0
	CodeInvalid       Code = 1
	CodeNotFound      Code = 2
	CodeExists        Code = 3
	CodeFull          Code = 4
	CodeLimit         Code = 5
	CodePermanent     Code = 6
	CodeStale         Code = 7
	CodeFenced        Code = 8
	CodeDenied        Code = 9
	CodeBusy          Code = 10
	CodeUnavailable   Code = 11
	CodeUnknown       Code = 12
	CodeAborted       Code = 13
	CodeRetired       Code = 14
	CodePinned        Code = 15
	CodeCorrupt       Code = 16
	CodeMismatch      Code = 17
	CodeUnsupported   Code = 18
	CodeExhausted     Code = 19
	CodeClosed        Code = 20
	CodeTimeout       Code = 21
	CodeFault         Code = 22
	CodeDraining      Code = 23
	CodeForked        Code = 24
	CodeInternal      Code = 25
	CodeForeign       Code = 26
	CodeOffline       Code = 27
	CodePending       Code = 28
	CodeMiss          Code = 29
	CodeAlreadyStored Code = 30
	CodeUnproven      Code = 31
)

type sentinel struct {
	code Code
	text string
}

func (s *sentinel) Error() string { return "maru: " + s.text }

// Sentinels. Wrap them with %w and the operation; ask with errors.Is.
var (
	// ErrInvalid: an argument, setting or message is outside what is allowed.
	ErrInvalid error = &sentinel{CodeInvalid, "invalid"}
	// ErrNotFound: no such region, session, namespace or operation.
	ErrNotFound error = &sentinel{CodeNotFound, "not found"}
	// ErrExists: it is there already, and is another one.
	ErrExists error = &sentinel{CodeExists, "exists"}
	// ErrFull: no capacity now; skip the store, keep the hits (POL-07).
	ErrFull error = &sentinel{CodeFull, "full"}
	// ErrLimit: a bound of a ledger, batch or count would be passed; the text names its setting (RPC-13).
	ErrLimit error = &sentinel{CodeLimit, "limit"}
	// ErrPermanent: no retry can succeed (RPC-21).
	ErrPermanent error = &sentinel{CodePermanent, "refused for good"}
	// ErrStale: an epoch, generation, incarnation or operation that is not current (S1).
	ErrStale error = &sentinel{CodeStale, "stale"}
	// ErrFenced: a newer incarnation of this server id exists.
	ErrFenced error = &sentinel{CodeFenced, "fenced"}
	// ErrDenied: the capability or the proof does not allow it.
	ErrDenied error = &sentinel{CodeDenied, "denied"}
	// ErrBusy: somebody else has it now; the text says until when.
	ErrBusy error = &sentinel{CodeBusy, "busy"}
	// ErrUnavailable: the peer does not answer now; a retry may succeed.
	ErrUnavailable error = &sentinel{CodeUnavailable, "unavailable"}
	// ErrUnknown: the outcome is unknown: neither success nor failure (X1).
	ErrUnknown error = &sentinel{CodeUnknown, "outcome unknown"}
	// ErrAborted: the operation is closed and changed nothing.
	ErrAborted error = &sentinel{CodeAborted, "aborted"}
	// ErrRetired: the replica was committed and has been retired since.
	ErrRetired error = &sentinel{CodeRetired, "retired"}
	// ErrPinned: a view lease protects it.
	ErrPinned error = &sentinel{CodePinned, "pinned"}
	// ErrCorrupt: a checksum or a format does not hold.
	ErrCorrupt error = &sentinel{CodeCorrupt, "corrupt"}
	// ErrMismatch: namespace, geometry or format differ (ID-08).
	ErrMismatch error = &sentinel{CodeMismatch, "mismatch"}
	// ErrUnsupported: this build or this peer cannot do it.
	ErrUnsupported error = &sentinel{CodeUnsupported, "unsupported"}
	// ErrExhausted: a counter is at its end; it is refused, never wrapped.
	ErrExhausted error = &sentinel{CodeExhausted, "exhausted"}
	// ErrClosed: the handle, session or connection is closed.
	ErrClosed error = &sentinel{CodeClosed, "closed"}
	// ErrTimeout: the deadline passed; what the peer did is not known.
	ErrTimeout error = &sentinel{CodeTimeout, "timed out"}
	// ErrFault: memory of a pool could not be read or written (SIGBUS).
	ErrFault error = &sentinel{CodeFault, "memory fault"}
	// ErrDraining: the region is going back; no new holds.
	ErrDraining error = &sentinel{CodeDraining, "draining"}
	// ErrForked: the library was opened in the parent process.
	ErrForked error = &sentinel{CodeForked, "used after fork"}
	// ErrInternal: a bug here; please report it.
	ErrInternal error = &sentinel{CodeInternal, "internal error"}
	// ErrForeign: a device, store or file that belongs to somebody else.
	ErrForeign error = &sentinel{CodeForeign, "foreign"}
	// ErrOffline: a known device that cannot be used until an operator acts.
	ErrOffline error = &sentinel{CodeOffline, "offline"}
	// ErrPending: it is on its way; ask again.
	ErrPending error = &sentinel{CodePending, "pending"}
	// ErrMiss: no replica that this requester can read.
	ErrMiss error = &sentinel{CodeMiss, "miss"}
	// ErrAlreadyStored: the key has a READY replica in this domain; the first value stays (DM-07).
	ErrAlreadyStored error = &sentinel{CodeAlreadyStored, "already present"}
	// ErrUnproven: the caller did not prove that it is the owner it names (SEC-01).
	ErrUnproven error = &sentinel{CodeUnproven, "owner not proved"}
)

var sentinels = []error{
	ErrInvalid, ErrNotFound, ErrExists, ErrFull, ErrLimit, ErrPermanent, ErrStale, ErrFenced, ErrDenied, ErrBusy,
	ErrUnavailable, ErrUnknown, ErrAborted, ErrRetired, ErrPinned, ErrCorrupt, ErrMismatch, ErrUnsupported,
	ErrExhausted, ErrClosed, ErrTimeout, ErrFault, ErrDraining, ErrForked, ErrInternal, ErrForeign, ErrOffline,
	ErrPending, ErrMiss, ErrAlreadyStored, ErrUnproven,
}

// CodeOf returns the number of an error: the outermost sentinel in its chain,
// CodeTimeout for a context's deadline, CodeAborted for its cancellation,
// CodeOK for nil and CodeInternal for anything else.
func CodeOf(err error) Code {
	if err == nil {
		return CodeOK
	}
	var s *sentinel
	if errors.As(err, &s) {
		return s.code
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return CodeTimeout
	case errors.Is(err, context.Canceled):
		return CodeAborted
	}
	return CodeInternal
}

// ErrorOf returns the sentinel of a code, nil for CodeOK. A code of a newer peer
// becomes ErrInternal that names the number.
func ErrorOf(c Code) error {
	if c == CodeOK {
		return nil
	}
	for _, e := range sentinels {
		if e.(*sentinel).code == c { //nolint:errorlint // the list holds sentinels only
			return e
		}
	}
	return fmt.Errorf("%w: code %d of a newer peer", ErrInternal, c)
}

// Errorf wraps the sentinel of a code that came from a peer with the peer's text.
func Errorf(c Code, text string) error {
	err := ErrorOf(c)
	if err == nil || text == "" {
		return err
	}
	return &peerError{err: err, text: text}
}

// peerError keeps a peer's text, which holds the sentinel's own words already.
type peerError struct {
	err  error
	text string
}

func (e *peerError) Error() string { return e.text }
func (e *peerError) Unwrap() error { return e.err }

func (c Code) String() string {
	if c == CodeOK {
		return "ok"
	}
	for _, e := range sentinels {
		if s := e.(*sentinel); s.code == c { //nolint:errorlint // the list holds sentinels only
			return s.text
		}
	}
	return fmt.Sprintf("code %d", uint32(c))
}
