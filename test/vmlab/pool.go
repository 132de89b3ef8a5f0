//go:build vmlab

package vmlab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

const (
	// DefaultPoolBytes is the size of the NVDIMM of a machine.
	DefaultPoolBytes = 256 << 20
	// PoolDataOffset is where offset 0 of /dev/dax0.0 lies in the pool file: the
	// kernel keeps what is before it for its information block.
	PoolDataOffset = 2 << 20

	diskBytes     = 128 << 20
	daxAlignBytes = 2 << 20
	pageBytes     = 4096
)

// daxInfo is the block that says "this namespace is a device-DAX", at offset 4096
// of the namespace.
//
// Source: Linux, drivers/nvdimm/pfn.h, struct nd_pfn_sb, version 1.4.
type daxInfo struct {
	Signature       [16]byte
	UUID            [16]byte
	ParentUUID      [16]byte
	Flags           uint32
	VersionMajor    uint16
	VersionMinor    uint16
	DataOffset      uint64
	PageCount       uint64
	Mode            uint32 // 1: the page structs are in ordinary memory
	StartPad        uint32
	EndTruncate     uint32
	AlignBytes      uint32
	PageBytes       uint32
	PageStructBytes uint16
	Padding         [3994]byte
	Checksum        uint64
}

// makePool writes a sparse pool file of sizeBytes whose only content is the
// information block. The UUID is fixed: a machine has one pool.
func makePool(path string, sizeBytes int64) error {
	info := daxInfo{
		UUID:            [16]byte{0x6d, 0x61, 0x72, 0x75, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 1},
		VersionMajor:    1,
		VersionMinor:    4,
		DataOffset:      PoolDataOffset,
		PageCount:       uint64(sizeBytes-PoolDataOffset) / pageBytes,
		Mode:            1,
		AlignBytes:      daxAlignBytes,
		PageBytes:       pageBytes,
		PageStructBytes: 64,
	}
	copy(info.Signature[:], "NVDIMM_DAX_INFO")
	block, err := binary.Append(nil, binary.LittleEndian, &info)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(block[len(block)-8:], fletcher64(block))

	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := f.Truncate(sizeBytes); err != nil {
		f.Close()
		return err
	}
	if _, err := f.WriteAt(block, 4096); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// makeDisk writes an empty file system for /state of a machine.
func makeDisk(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(diskBytes), f.Close()); err != nil {
		return err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", path).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	return nil
}

// fletcher64 is the checksum of the kernel's NVDIMM blocks, over 32-bit words and
// with the checksum's own field as zero.
func fletcher64(block []byte) uint64 {
	var lo, hi uint32
	for ; len(block) >= 4; block = block[4:] {
		lo += binary.LittleEndian.Uint32(block)
		hi += lo
	}
	return uint64(hi)<<32 | uint64(lo)
}
