package main

/*
#cgo CFLAGS: -I${SRCDIR}/../../include -std=gnu11 -O2 -Wall
#cgo LDFLAGS: -lpthread
#include "maru.h"

void maru_shim_set_error(const char *text, size_t n);
*/
import "C"

import (
	"fmt"
	"math"
	"runtime/debug"
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
)

// maxErrorBytes bounds a text: a stack is longer than anybody reads.
const maxErrorBytes = 16 << 10

// args turns pointers into slices and remembers the first that cannot be one, so
// that an export is checked once.
type args struct{ err error }

// contain is deferred by every export: nothing panics into C.
func contain(rc *C.int32_t) {
	if p := recover(); p != nil {
		*rc = status(fmt.Errorf("%w: panic at the boundary: %v\n%s", base.ErrInternal, p, debug.Stack()))
	}
}

// status is the code of an error; its text becomes the thread's last error.
func status(err error) C.int32_t {
	if err == nil {
		return C.MARU_OK
	}
	text := err.Error()
	if len(text) > maxErrorBytes {
		text = text[:maxErrorBytes]
	}
	if text != "" {
		C.maru_shim_set_error((*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.size_t(len(text)))
	}
	return C.int32_t(base.CodeOf(err)) //nolint:gosec // codes are small
}

func (a *args) fail(format string, v ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, v...)...)
	}
}

// array makes a slice over n items that C has at p. NULL is good only when n is 0.
func array[T, P any](a *args, name string, p *P, n uint64) []T {
	if n == 0 {
		return nil
	}
	if p == nil {
		a.fail("%s is NULL", name)
		return nil
	}
	var t T
	size := uint64(unsafe.Sizeof(t))
	if n > math.MaxInt64/size || uintptr(unsafe.Pointer(p))%unsafe.Alignof(t) != 0 {
		a.fail("%s: %d items at %p, which is no array in memory", name, n, p)
		return nil
	}
	if a.err != nil {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(p)), n)
}

// optional is array for what may be NULL.
func optional[T, P any](a *args, name string, p *P, n uint64) []T {
	if p == nil {
		return nil
	}
	return array[T](a, name, p, n)
}

// count bounds the items of a batch before anything is multiplied by them.
func (a *args) count(n uint64) uint64 {
	if n > cabi.MaxBatchCount && a.err == nil {
		a.err = fmt.Errorf("%w: %d items in one call, at most %d are allowed", base.ErrLimit, n, cabi.MaxBatchCount)
	}
	return n
}

// need refuses a missing place for a result.
func (a *args) need(name string, missing bool) {
	if missing {
		a.fail("%s is NULL", name)
	}
}

// text gives a buffer for text; NULL with cap 0 asks for the size alone.
func (a *args) text(buf *C.char, limit C.size_t, needed *C.size_t) []byte {
	a.need("needed", needed == nil)
	return array[byte](a, "buf", buf, uint64(limit))
}

func batchOf(a *args, b *C.maru_batch) *cabi.Batch {
	a.need("batch", b == nil)
	if a.err != nil {
		return nil
	}
	// A caller of an older header has a shorter struct: what is behind it is not read.
	if size := uint64(b.struct_bytes); size != uint64(unsafe.Sizeof(*b)) && size != uint64(unsafe.Offsetof(b.stream)) {
		a.fail("batch.struct_bytes is %d, this library has %d; caller and library differ in version", b.struct_bytes, unsafe.Sizeof(*b))
		return nil
	}
	n := a.count(uint64(b.count))
	if a.err != nil {
		return nil
	}
	out := &cabi.Batch{
		Keys:    array[byte](a, "batch.keys", b.keys, n*base.KeyBytes),
		Parents: optional[byte](a, "batch.parents", b.parents, n*base.DigestBytes),
		Ends:    array[uint64](a, "batch.ends", b.ends, n),
		Layout:  uint64(b.layout),
		Offsets: optional[uint64](a, "batch.offsets", b.offsets, n),
	}
	if a.err != nil {
		return nil
	}
	last := uint64(0)
	if n > 0 {
		last = out.Ends[n-1]
	}
	if last > cabi.MaxParts {
		a.fail("batch.ends: %d runs or blocks in one call, at most %d are allowed", last, cabi.MaxParts)
		return nil
	}
	if b.runs != nil && b.layout != 0 {
		a.fail("batch: runs and layout are both given, exactly one is allowed")
	}
	if b.layout != 0 {
		out.Blocks = array[uint32](a, "batch.blocks", b.blocks, last)
	} else {
		out.Runs = array[cabi.Run](a, "batch.runs", b.runs, last)
	}
	if a.err != nil {
		return nil
	}
	if uint64(b.struct_bytes) > uint64(unsafe.Offsetof(b.stream)) {
		out.Stream = uint64(b.stream)
	}
	return out
}
