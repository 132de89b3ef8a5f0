package engine

import "unsafe"

// addressOf is where a mapping's bytes lie; they are not of the Go heap.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
