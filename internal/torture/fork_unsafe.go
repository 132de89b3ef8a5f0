package torture

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sleepAndExit is all that a forked child does.
//
//go:nosplit
//go:norace
func sleepAndExit(life *unix.Timespec) {
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, 0, 0, 0)
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, 1, 0, 0)
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, 2, 0, 0)
	_, _, _ = syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(life)), 0, 0)
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
}
