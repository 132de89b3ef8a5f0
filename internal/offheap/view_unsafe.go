package offheap

import "unsafe"

// View returns a slab's bytes as values of T, as many as fit whole. T must hold
// no Go pointer and need no more than 8-byte alignment; b must be of a Slab or
// of [Bytes].
// Ownership: the view shares b's memory and lives as long.
func View[T any](b []byte) []T {
	var zero T
	size := int(unsafe.Sizeof(zero))
	if len(b) < size || size == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/size)
}

// Bytes returns the memory of words as bytes.
func Bytes(words []uint64) []byte {
	if len(words) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), 8*len(words))
}
