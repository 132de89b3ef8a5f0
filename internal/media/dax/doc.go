// Package dax opens and maps what pools of CXL memory are made of: devdax devices,
// files on a file system mounted with dax, and plain files (tmpfs, as an emulated
// pool). It reads and writes no header and no region: internal/poolfmt knows those. It
// does not flush CPU caches either.
//
// A file that is made is allocated in full, so that a full disk or a full /dev/shm is an
// error at the start and not a bus error in the middle of a copy. It appears under its
// name only when it is whole.
//
// # Numbered invariants
//
//  1. A file that was there is never truncated, extended over its size, or replaced.
//  2. A file that could not be made in full is not left behind.
//  3. At most one opener with LockExclusive has a device or file, by flock; it lasts until
//     Close or the end of the process.
//     The lock is on the inode: two device nodes of one device (a container with a /dev of
//     its own) have two, and there the store id and sequence in the pool's header are what
//     refuses a second owner.
//  4. Every mapping lies inside the size that the device or file has at that moment.
//
// There are no goroutines; locks are those of the mappings.
//
// Source: Linux drivers/dax/bus.c (sysfs attributes), drivers/dax/device.c (mmap rules).
package dax
