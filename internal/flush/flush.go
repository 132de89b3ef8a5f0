// Package flush writes cache lines of this host back to memory, and drops them, for
// pools whose hosts do not snoop each other's caches (coherence "software"; CXL 2
// memory shared by several hosts).
//
// A writer stores, calls [WriteBack], and only then tells anybody. A reader learns
// that bytes are there, calls [Invalidate], and only then loads them. Both halves are
// needed: a written-back line is still stale in the cache of a host that read it
// before.
//
// It decides nothing about when: which pools need it, and in which order data, body
// and mark of a record are written, is docs/PROTOCOL.md section 2. It is no persistence
// barrier for storage, it does not reach into other hosts' caches, and msync is no
// replacement for it on device memory.
//
// There are no locks; all functions can be called by any number of goroutines.
//
// Invariants:
//
//	F1. Every line that holds a byte of a range is written back or dropped, also the two
//	    at the ends that it shares with its neighbours.
//	F2. When WriteBack returns, the bytes are on their way to memory before any later
//	    store of this thread, streaming stores of a copy before it included.
//	F3. When Invalidate returns, no later load of this thread is served by a line that
//	    was in a cache of this host before.
//
// Source: the instruction references for CLWB, CLFLUSHOPT, CLFLUSH, SFENCE and MFENCE
// of Intel and AMD; the Arm architecture reference manual, cache maintenance to the
// point of coherency.
package flush

import (
	"fmt"
	"runtime"

	"github.com/xcena-dev/maru/internal/base"
)

// Method is how lines are written back.
type Method uint8

// Methods. Of those of a processor the first that it has is taken.
const (
	None           Method = iota
	Clwb                  // x86: writes back, may keep the line
	ClflushOpt            // x86: writes back and drops, unordered among lines
	Clflush               // x86: writes back and drops, one line after the other
	CleanCoherency        // arm64: DC CVAC and DC CIVAC
)

var methodNames = [...]string{None: "none", Clwb: "clwb", ClflushOpt: "clflushopt", Clflush: "clflush", CleanCoherency: "dc cvac"}

func (m Method) String() string {
	if int(m) < len(methodNames) {
		return methodNames[m]
	}
	return fmt.Sprintf("method %d", uint8(m))
}

// processor is what this processor has, found once at start.
type processor struct {
	writeBack, invalidate Method
	lineBytes             uintptr // a power of two, or 0
}

var host = detect()

func (p processor) supported() bool { return p.writeBack != None && p.lineBytes != 0 }

// Supported reports whether this build and processor can do it. A pool that needs it
// is refused without.
func Supported() bool { return host.supported() }

// How names the methods and the line size, for `maru doctor` and logs.
func How() string {
	if !Supported() {
		return "none"
	}
	return fmt.Sprintf("write back: %v, invalidate: %v, lines of %d bytes", host.writeBack, host.invalidate, host.lineBytes)
}

func unsupported(op string) error {
	return fmt.Errorf("%w: %s: no cache line instructions on %s; pools with software coherence cannot be used here", base.ErrUnsupported, op, runtime.GOARCH)
}

// WriteBack writes all lines of the ranges back to memory, with one fence for all of
// them. Stores of other goroutines are covered if they happened before the call.
//
// Ranges should begin and end at lines that no other host writes: the whole line goes
// back. Empty ranges are nothing.
//
// Errors: base.ErrUnsupported; then nothing was done. A fault of the memory is a
// run-time panic, as a store to it is.
func WriteBack(ranges ...[]byte) error {
	if !host.supported() {
		return unsupported("write back")
	}
	orderStores()
	for _, b := range ranges {
		if first, count := host.lines(b); count > 0 {
			writeBackLines(host.writeBack, first, count, host.lineBytes)
		}
	}
	fenceWriteBack()
	return nil
}

// Invalidate drops all lines of the ranges, so that the next loads come from memory,
// with one fence for all of them.
//
// No processor lets a program drop a line without writing it back if it is dirty. The
// caller must know that this host has no unwritten stores in these lines, else they
// would go over what another host wrote: each range is written by one host, and only
// that one calls WriteBack.
//
// Errors: as WriteBack.
func Invalidate(ranges ...[]byte) error {
	if !host.supported() {
		return unsupported("invalidate")
	}
	fenceAll()
	for _, b := range ranges {
		if first, count := host.lines(b); count > 0 {
			dropLines(host.invalidate, first, count, host.lineBytes)
		}
	}
	fenceAll()
	return nil
}
