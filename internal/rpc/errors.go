package rpc

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
)

// maxTextBytes bounds the text of an error on the wire. It travels in a trailer,
// twice (status message and Problem), and trailers are small by custom.
const maxTextBytes = 2048

// statusCodes maps base codes to those of gRPC. The Problem in the details is what
// a peer of ours reads; the gRPC code serves proxies, generic tools and logs.
var statusCodes = map[base.Code]codes.Code{
	base.CodeInvalid:       codes.InvalidArgument,
	base.CodeNotFound:      codes.NotFound,
	base.CodeExists:        codes.AlreadyExists,
	base.CodeFull:          codes.ResourceExhausted,
	base.CodeLimit:         codes.ResourceExhausted,
	base.CodePermanent:     codes.FailedPrecondition,
	base.CodeStale:         codes.FailedPrecondition,
	base.CodeFenced:        codes.FailedPrecondition,
	base.CodeDenied:        codes.PermissionDenied,
	base.CodeBusy:          codes.Aborted,
	base.CodeUnavailable:   codes.Unavailable,
	base.CodeUnknown:       codes.Unknown,
	base.CodeAborted:       codes.Aborted,
	base.CodeRetired:       codes.FailedPrecondition,
	base.CodePinned:        codes.FailedPrecondition,
	base.CodeCorrupt:       codes.DataLoss,
	base.CodeMismatch:      codes.FailedPrecondition,
	base.CodeUnsupported:   codes.Unimplemented,
	base.CodeExhausted:     codes.OutOfRange,
	base.CodeClosed:        codes.FailedPrecondition,
	base.CodeTimeout:       codes.DeadlineExceeded,
	base.CodeFault:         codes.DataLoss,
	base.CodeDraining:      codes.FailedPrecondition,
	base.CodeForked:        codes.FailedPrecondition,
	base.CodeInternal:      codes.Internal,
	base.CodeForeign:       codes.FailedPrecondition,
	base.CodeOffline:       codes.FailedPrecondition,
	base.CodePending:       codes.FailedPrecondition,
	base.CodeMiss:          codes.NotFound,
	base.CodeAlreadyStored: codes.AlreadyExists,
	base.CodeUnproven:      codes.PermissionDenied,
}

// ToStatus turns an error into a gRPC status error that carries its base code. An
// error that has a status already is given back as it is, nil stays nil.
//
// The end of the handler's own context becomes CodeTimeout, also when it was a
// cancellation: what the handler had done by then is not known to its caller, and
// CodeAborted would promise that nothing was changed.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	var has interface{ GRPCStatus() *status.Status }
	if errors.As(err, &has) {
		return err
	}
	code := base.CodeOf(err)
	if errors.Is(err, context.Canceled) && code == base.CodeAborted && !errors.Is(err, base.ErrAborted) {
		code = base.CodeTimeout
	}
	text := err.Error()
	if len(text) > maxTextBytes {
		text = text[:maxTextBytes] + " ..."
	}
	text = strings.ToValidUTF8(text, "?")
	grpcCode, ok := statusCodes[code]
	if !ok {
		grpcCode = codes.Unknown
	}
	s := status.New(grpcCode, text)
	detailed, detailErr := s.WithDetails(&maruv1.Problem{Code: uint32(code), Text: text})
	if detailErr != nil {
		return s.Err()
	}
	return detailed.Err()
}

// callError is what a call gave back. It hides the gRPC status on purpose: a server
// that hands on the error of another server answers with its base code, not with a
// status that a third party made.
type callError struct {
	err      error // wraps a sentinel of base, and a context error where there is one
	answered bool  // the peer's handler said so, in a Problem
}

func (e *callError) Error() string { return e.err.Error() }
func (e *callError) Unwrap() error { return e.err }

// FromStatus turns the error of a call into one that wraps a sentinel of base and
// keeps the peer's text. Without a Problem in the details, which means that no
// handler of ours answered, the gRPC code decides: the end of the caller's context
// gives ErrTimeout (it wraps the context's error too), a lost or refused
// connection ErrUnavailable. An error that is no status stays as it is.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	var done *callError
	if errors.As(err, &done) {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &callError{err: fmt.Errorf("%w: %w", base.ErrTimeout, context.DeadlineExceeded)}
	case errors.Is(err, context.Canceled):
		return &callError{err: fmt.Errorf("%w: %w", base.ErrTimeout, context.Canceled)}
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range s.Details() {
		if p, ok := d.(*maruv1.Problem); ok && p.GetCode() != uint32(base.CodeOK) {
			return &callError{err: base.Errorf(base.Code(p.GetCode()), p.GetText()), answered: true}
		}
	}
	wrap := func(e error) error { return &callError{err: fmt.Errorf("%w: %s", e, s.Message())} }
	switch s.Code() {
	case codes.OK:
		return nil
	case codes.DeadlineExceeded:
		return &callError{err: fmt.Errorf("%w: %w: %s", base.ErrTimeout, context.DeadlineExceeded, s.Message())}
	case codes.Canceled:
		return &callError{err: fmt.Errorf("%w: %w: %s", base.ErrTimeout, context.Canceled, s.Message())}
	case codes.Unavailable:
		return wrap(base.ErrUnavailable)
	case codes.Unimplemented:
		return wrap(base.ErrUnsupported)
	case codes.InvalidArgument, codes.OutOfRange:
		return wrap(base.ErrInvalid)
	case codes.NotFound:
		return wrap(base.ErrNotFound)
	case codes.AlreadyExists:
		return wrap(base.ErrExists)
	case codes.PermissionDenied, codes.Unauthenticated:
		return wrap(base.ErrDenied)
	case codes.ResourceExhausted:
		return wrap(base.ErrLimit)
	case codes.FailedPrecondition, codes.Aborted, codes.Unknown, codes.Internal, codes.DataLoss:
		return wrap(base.ErrUnknown)
	}
	return wrap(base.ErrUnknown)
}

// OutcomeUnknown reports whether the peer may have done what the call asked for
// although the call failed (X1): nobody answered, or the answer itself says so.
// Of what gRPC itself refuses only an unknown method is sure to have done nothing:
// "message too large" may mean the answer.
func OutcomeUnknown(err error) bool {
	if err == nil {
		return false
	}
	var c *callError
	if errors.As(err, &c) && !c.answered {
		return !errors.Is(err, base.ErrUnsupported)
	}
	switch base.CodeOf(err) {
	case base.CodeUnknown, base.CodeTimeout, base.CodeInternal:
		return true
	}
	return false
}
