package flush

import "unsafe"

// lines returns a pointer into the first line of b and the number of lines that hold
// its bytes (F1). The pointer is to b's own first byte, so that it stays inside its
// object; the instructions take any address of a line.
func (p processor) lines(b []byte) (first unsafe.Pointer, count uintptr) {
	if len(b) == 0 {
		return nil, 0
	}
	first = unsafe.Pointer(unsafe.SliceData(b))
	at := uintptr(first) & (p.lineBytes - 1)
	return first, (at + uintptr(len(b)) + p.lineBytes - 1) / p.lineBytes
}
