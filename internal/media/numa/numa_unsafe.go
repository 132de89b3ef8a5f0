package numa

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const maskBits = 1024

// mbind is the system call, which x/sys has no function for.
func mbind(data []byte, node int) error {
	var mask [maskBits / 64]uint64
	mask[node/64] = 1 << (node % 64)
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(unsafe.SliceData(data))), uintptr(len(data)),
		unix.MPOL_BIND, uintptr(unsafe.Pointer(&mask[0])), maskBits, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
