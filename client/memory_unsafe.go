package client

import (
	"sync/atomic"
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// storeMark writes a record's mark with one aligned store (docs/PROTOCOL.md section 2):
// a reader after a crash sees the old mark or the new one. record is 64-byte aligned in
// its mapping.
func storeMark(record []byte, order base.CommitOrder) {
	_ = record[poolfmt.MarkOffset+7]
	(*atomic.Uint64)(unsafe.Pointer(&record[poolfmt.MarkOffset])).Store(uint64(order))
}

// bytesAt is a run of an engine's memory. The caller of RegisterLayout keeps it mapped.
func bytesAt(address uintptr, n uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&address))), n)
}
