//go:build armbe || arm64be || m68k || mips || mips64 || mips64p32 || ppc || ppc64 || s390 || s390x || shbe || sparc || sparc64

package base

// Formats on devices and on the wire are little-endian and are read in place; a
// big-endian build would read them wrongly.
var _ = maruIsLittleEndianOnly
