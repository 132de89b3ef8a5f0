// Package vmlab boots virtual machines that have a real /dev/dax0.0, for the
// tests that no emulation can stand in for: what the kernel says of a device-DAX
// in sysfs, which system calls it refuses, what survives a crash of the host. The
// machines run under QEMU without KVM, boot in seconds and need no hardware; the
// host has to be root only to install packages.
//
// It is not a performance lab: memory runs at the speed of emulation, 10 to 50
// MB/s. It is not proof of cache flushes either: the host's page cache is the
// memory of the pool, and it is coherent whatever the guest flushes.
//
// A machine is Debian's kernel and an initial file system of busybox, the kernel
// modules of device-DAX and a job agent (guest/init). The pool is a sparse file
// that QEMU shows as an NVDIMM; a block that we write into it (pool.go) makes the
// kernel take it as a device-DAX at boot, so the guest needs no tools to set it
// up. The file outlives the machine: Crash and Start on it are the loss and the
// return of a host. Programs come from the host: a folder of it is mounted at
// /host, and static Go programs (Program) are copied from there into the memory of
// the machine. A job is a file in that folder and a line on the second serial port,
// so that an idle machine costs the host nothing.
//
// BootPair gives two machines on one pool with a network between them: two hosts
// that share CXL memory. With SoftRoCE the network has RDMA verbs.
//
// TestWatcher uses that for a node without a resource manager: its agent vouches for
// engines in pid namespaces of their own.
//
// Build tag: vmlab. Run it by `make vmlab`.
//
// Facts measured here, which tests may lean on:
//  1. /sys/bus/dax/devices/dax0.0 has size 266338304 for a pool of 256 MiB, align
//     2097152, target_node 0; /sys/dev/char/MAJOR:MINOR leads to it; there is no
//     /sys/class/dax; minors change from boot to boot.
//  2. A device-DAX has a stat size of 0; pread, pwrite, ftruncate, fsync and msync
//     give EINVAL, so do MAP_PRIVATE and unaligned lengths or offsets.
//  3. A mapping past the end succeeds, its use is SIGBUS; unbinding the driver
//     under a mapping is SIGBUS as well.
//     Binding it again while anything has the device open makes every later open
//     ENXIO until the next boot.
//  4. MADV_HWPOISON of a mapped page is SIGBUS (BUS_MCEERR_AR) to its caller, in
//     the middle of the system call. The page is not remembered as bad: other
//     mappings, old and new, read on. So the lab cannot show a memory error.
//  5. /proc/sys/kernel/random/boot_id differs from machine to machine and from
//     boot to boot.
//  6. With `-smp 1` alone QEMU makes locked instructions non-atomic between
//     machines that share a pool; `-smp 1,maxcpus=2` does not.
package vmlab
