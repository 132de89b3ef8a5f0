// Command daxprobe writes a pattern to a device-DAX through a mapping, or checks
// that it is there. It runs in the machines of the lab (test/vmlab), where it is
// the smallest program that does what Maru does to a pool.
//
//	daxprobe write|check DEVICE OFFSET_BYTES LENGTH_BYTES SEED
package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "daxprobe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 5 || (args[0] != "write" && args[0] != "check") {
		return fmt.Errorf("usage: daxprobe write|check DEVICE OFFSET_BYTES LENGTH_BYTES SEED")
	}
	var n [3]int64
	for i, a := range args[2:] {
		v, err := strconv.ParseInt(a, 0, 64)
		if err != nil {
			return err
		}
		n[i] = v
	}
	offset, length, seed := n[0], n[1], uint64(n[2])
	fd, err := unix.Open(args[1], unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", args[1], err)
	}
	defer unix.Close(fd)
	m, err := unix.Mmap(fd, offset, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %d bytes at %d of %s: %w", length, offset, args[1], err)
	}
	defer func() { _ = unix.Munmap(m) }()

	for i := 0; i+8 <= len(m); i += 8 {
		want := mix(seed + uint64(i))
		if args[0] == "write" {
			binary.LittleEndian.PutUint64(m[i:], want)
		} else if got := binary.LittleEndian.Uint64(m[i:]); got != want {
			return fmt.Errorf("byte %d: %#x, want %#x", offset+int64(i), got, want)
		}
	}
	fmt.Printf("%s %d bytes at %d: ok\n", args[0], length, offset)
	return nil
}

// mix spreads a counter over 64 bits, so that no two places hold equal words.
// Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators
// (2014), the finalizer.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
