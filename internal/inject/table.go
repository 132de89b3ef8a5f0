package inject

import (
	"golang.org/x/sys/unix"
)

// kindOf says how a call names its file.
type kindOf uint8

const (
	byFD     kindOf = iota // the first argument is a descriptor
	byPath                 // the first argument is a path
	byAt                   // directory descriptor, path
	byTwoAt                // directory descriptor, path, directory descriptor, path
	byMap                  // the fifth argument is a descriptor
	byNobody               // it counts whatever it is about
)

// Variant is one way in which a call fails.
type Variant struct {
	Errno unix.Errno
	// Short writes one half and says so.
	Short bool
}

func (v Variant) String() string {
	if v.Short {
		return "short"
	}
	return unix.ErrnoName(v.Errno)
}

// call is one system call that can be failed.
type call struct {
	name     string
	kind     kindOf
	variants []Variant
}

func errnos(list ...unix.Errno) (out []Variant) {
	for _, e := range list {
		out = append(out, Variant{Errno: e})
	}
	return out
}

// calls are all that a program of ours uses on files, on every architecture.
var calls = func() map[uint32]call {
	io, made := errnos(unix.EIO), errnos(unix.ENOSPC, unix.EIO)
	write := append(errnos(unix.ENOSPC, unix.EIO), Variant{Short: true})
	return map[uint32]call{
		unix.SYS_OPENAT:       {"openat", byAt, errnos(unix.EMFILE, unix.EIO)},
		unix.SYS_MKDIRAT:      {"mkdirat", byAt, made},
		unix.SYS_UNLINKAT:     {"unlinkat", byAt, io},
		unix.SYS_RENAMEAT:     {"renameat", byTwoAt, made},
		unix.SYS_LINKAT:       {"linkat", byTwoAt, made},
		unix.SYS_READLINKAT:   {"readlinkat", byAt, io},
		unix.SYS_STATX:        {"statx", byAt, io},
		sysFstatat:            {"fstatat", byAt, io},
		unix.SYS_FSTAT:        {"fstat", byFD, io},
		unix.SYS_STATFS:       {"statfs", byPath, io},
		unix.SYS_FSTATFS:      {"fstatfs", byFD, io},
		unix.SYS_READ:         {"read", byFD, io},
		unix.SYS_PREAD64:      {"pread", byFD, io},
		unix.SYS_WRITE:        {"write", byFD, write},
		unix.SYS_PWRITE64:     {"pwrite", byFD, write},
		unix.SYS_FSYNC:        {"fsync", byFD, io},
		unix.SYS_FDATASYNC:    {"fdatasync", byFD, io},
		unix.SYS_FTRUNCATE:    {"ftruncate", byFD, made},
		unix.SYS_FALLOCATE:    {"fallocate", byFD, made},
		unix.SYS_FLOCK:        {"flock", byFD, errnos(unix.ENOLCK)},
		unix.SYS_LSEEK:        {"lseek", byFD, io},
		unix.SYS_GETDENTS64:   {"getdents", byFD, io},
		unix.SYS_FCHMOD:       {"fchmod", byFD, io},
		unix.SYS_MMAP:         {"mmap", byMap, errnos(unix.ENOMEM)},
		unix.SYS_MSYNC:        {"msync", byNobody, io},
		unix.SYS_MADVISE:      {"madvise(DONTFORK)", byNobody, errnos(unix.ENOMEM)},
		unix.SYS_MEMFD_CREATE: {"memfd_create", byNobody, errnos(unix.EMFILE, unix.ENOMEM)},
	}
}()

// writes says which calls a disk that stays full or broken goes on to fail.
func writes(nr uint32) bool {
	switch nr {
	case unix.SYS_WRITE, unix.SYS_PWRITE64, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_FALLOCATE, unix.SYS_FTRUNCATE, unix.SYS_MSYNC,
		unix.SYS_RENAMEAT, unix.SYS_LINKAT, unix.SYS_MKDIRAT:
		return true
	}
	return false
}

// program is the filter: the calls of the table go to the listener, mmap with a descriptor
// only, madvise with MADV_DONTFORK only.
func program() []unix.SockFilter {
	const (
		offNR, offArch = 0, 4
		offAdvice      = 16 + 2*8
		offMapFD       = 16 + 4*8 // the low half: little-endian
	)
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	ret := func(v uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v} }
	// equal runs the next instruction when it is k, else skips it.
	equal := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 1, K: k}
	}
	differs := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, Jf: 0, K: k}
	}
	out := []unix.SockFilter{load(offArch), differs(auditArch), ret(unix.SECCOMP_RET_ALLOW), load(offNR)}
	for nr := range calls {
		if nr != unix.SYS_MMAP && nr != unix.SYS_MADVISE {
			out = append(out, equal(nr), ret(unix.SECCOMP_RET_USER_NOTIF))
		}
	}
	guarded := func(nr, arg uint32, test unix.SockFilter) {
		// nr differs: skip the four behind.
		out = append(out, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 4, K: nr},
			load(arg), test, ret(unix.SECCOMP_RET_USER_NOTIF), ret(unix.SECCOMP_RET_ALLOW))
	}
	guarded(unix.SYS_MMAP, offMapFD, differs(^uint32(0)))
	guarded(unix.SYS_MADVISE, offAdvice, equal(unix.MADV_DONTFORK))
	return append(out, ret(unix.SECCOMP_RET_ALLOW))
}
