package directory

import (
	"fmt"
	"os"
	"testing"
)

// residentBytes reads the process's resident set.
func residentBytes(b *testing.B) int64 {
	b.Helper()
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(raw), &size, &resident); err != nil {
		b.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}
