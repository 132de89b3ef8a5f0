package mapping

import "unsafe"

// addressOf returns where a mapping starts; it is only compared with fault addresses.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
