//go:build amd64

package flush

import "unsafe"

// Bits of CPUID.
const (
	hasClflush    = 1 << 19 // leaf 1, EDX
	hasClflushOpt = 1 << 23 // leaf 7, EBX
	hasClwb       = 1 << 24 // leaf 7, EBX
)

func detect() processor {
	maxLeaf, _, _, _ := cpuid(0, 0)
	_, b1, _, d1 := cpuid(1, 0)
	var b7 uint32
	if maxLeaf >= 7 {
		_, b7, _, _ = cpuid(7, 0)
	}
	return methods(b1, d1, b7)
}

// methods judges CPUID: EBX and EDX of leaf 1, EBX of leaf 7.
func methods(b1, d1, b7 uint32) processor {
	var p processor
	if d1&hasClflush == 0 {
		return p
	}
	p.lineBytes = uintptr(b1>>8&0xFF) * 8
	p.writeBack, p.invalidate = Clflush, Clflush
	if b7&hasClflushOpt != 0 {
		p.writeBack, p.invalidate = ClflushOpt, ClflushOpt
	}
	if b7&hasClwb != 0 {
		p.writeBack = Clwb
	}
	return p
}

func writeBackLines(m Method, first unsafe.Pointer, count, lineBytes uintptr) {
	switch m {
	case Clwb:
		clwb(first, count, lineBytes)
	case ClflushOpt:
		clflushopt(first, count, lineBytes)
	case Clflush:
		clflush(first, count, lineBytes)
	}
}

func dropLines(m Method, first unsafe.Pointer, count, lineBytes uintptr) {
	writeBackLines(m, first, count, lineBytes)
}

// orderStores drains streaming stores first: they are weakly ordered, also against a
// write-back of the same line.
func orderStores() { sfence() }

func fenceWriteBack() { sfence() }

// fenceAll is before the loop as well: CLFLUSHOPT may pass older loads, and the load
// that said that the bytes are there must come first.
func fenceAll() { mfence() }

func cpuid(leaf, sub uint32) (a, b, c, d uint32)

// The loops touch count lines from first on. They use no stack and call nothing.

//go:noescape
func clwb(first unsafe.Pointer, count, lineBytes uintptr)

//go:noescape
func clflushopt(first unsafe.Pointer, count, lineBytes uintptr)

//go:noescape
func clflush(first unsafe.Pointer, count, lineBytes uintptr)

func sfence()

func mfence()
