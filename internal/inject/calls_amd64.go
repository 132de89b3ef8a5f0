package inject

import "golang.org/x/sys/unix"

const (
	sysFstatat = unix.SYS_NEWFSTATAT
	auditArch  = unix.AUDIT_ARCH_X86_64
)
