package numa

import (
	"fmt"
	"unsafe"
)

func addressText(data []byte) string {
	return fmt.Sprintf("%x", uintptr(unsafe.Pointer(unsafe.SliceData(data))))
}
