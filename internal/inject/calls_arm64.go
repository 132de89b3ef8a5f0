package inject

import "golang.org/x/sys/unix"

const (
	sysFstatat = unix.SYS_FSTATAT
	auditArch  = unix.AUDIT_ARCH_AARCH64
)
