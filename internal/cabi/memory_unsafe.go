package cabi

import (
	"fmt"
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
)

// lowestAddress is below every mapping of a process; a smaller pointer is a bug of
// the caller, and the Go runtime would abort on it.
const lowestAddress = 4096

// addressOf returns where a slice's bytes lie. They must be a mapping's, never the
// Go heap's.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// memoryAt makes a slice of a caller's range.
//
// Errors: ErrInvalid for what cannot be a range of this process.
func memoryAt(r Run) ([]byte, error) {
	if r.Bytes == 0 {
		return nil, nil
	}
	if r.Data < lowestAddress || r.Bytes > base.MaxObjectBytes || r.Data+uintptr(r.Bytes) < r.Data {
		return nil, fmt.Errorf("%w: %d bytes at %#x are no range of memory", base.ErrInvalid, r.Bytes, r.Data)
	}
	// The address is C's or a mapping's, not one of Go's heap: nothing moves it.
	p := *(*unsafe.Pointer)(unsafe.Pointer(&r.Data))
	return unsafe.Slice((*byte)(p), r.Bytes), nil
}
