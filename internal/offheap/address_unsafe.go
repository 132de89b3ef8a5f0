package offheap

import "unsafe"

// addressOf returns where a mapping starts; it is only used to align.
func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
