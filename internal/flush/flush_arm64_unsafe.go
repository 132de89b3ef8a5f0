//go:build arm64 && linux

package flush

import "unsafe"

// The kernel of Linux allows DC CVAC and DC CIVAC in user mode on every arm64
// processor, and emulates the read of CTR_EL0 where the hardware does not allow it.
// Other systems promise neither.
func detect() processor { return processor{CleanCoherency, CleanCoherency, 4 << (ctr() >> 16 & 0xF)} }

func writeBackLines(_ Method, first unsafe.Pointer, count, lineBytes uintptr) {
	clean(first, count, lineBytes)
}

func dropLines(_ Method, first unsafe.Pointer, count, lineBytes uintptr) {
	cleanInvalidate(first, count, lineBytes)
}

func orderStores() { barrier() }

func fenceWriteBack() { barrier() }

func fenceAll() { barrier() }

// ctr reads CTR_EL0; bits 16 to 19 are log2 of the words in the smallest data line.
func ctr() uint64

//go:noescape
func clean(first unsafe.Pointer, count, lineBytes uintptr)

//go:noescape
func cleanInvalidate(first unsafe.Pointer, count, lineBytes uintptr)

// barrier is DSB SY: it waits for loads, stores and cache maintenance, of the whole
// system and not only of the inner domain, since the other host is outside of that.
func barrier()
