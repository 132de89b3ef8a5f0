// Package bolt is the store of one machine: a bbolt file. It adds to bbolt what
// a daemon needs to trust what it loads: who made the file and for whom, a check
// over everything in it, and clear errors where a damaged file would make bbolt
// panic or fault.
//
// bbolt checks its two meta pages only. Here each value ends in a check of 8
// bytes over bucket, key and value, and the meta bucket holds the number of all
// values and the sum of their checks, changed in the same transaction: a value
// that is flipped, lost, or left over from another time does not pass Load.
//
// The free list is not written (NoFreelistSync): it is found again at start from
// the tree, which was verified by then, and a commit writes one page less. The
// file is opened read-only first and walked in the calling goroutine, where
// panics and bus errors are caught, before bbolt may write to it.
//
// Concurrency: one caller at a time. bbolt's own lock on the file keeps other
// processes out. No goroutines.
//
// Source: decision D3 of the architecture; RM-06, W1.
package bolt
