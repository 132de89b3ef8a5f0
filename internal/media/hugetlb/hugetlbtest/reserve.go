// Package hugetlbtest reserves huge pages of this machine for a test, one test at a
// time in all processes, and gives them back.
package hugetlbtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/media/hugetlb"
)

const path = "/proc/sys/vm/nr_hugepages"

// Reserve has count pages of 2 MiB free until the test's end, and skips it where that
// cannot be: without root, or on a machine that has no memory in one piece for them.
func Reserve(t testing.TB, count uint64) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "maru-test-hugepages.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Skip("huge pages of the machine are not to be had for this test: ", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() })
	before, err := os.ReadFile(path)
	if err != nil {
		t.Skip("this kernel has no huge pages: ", err)
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(before)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := write(n + count); err != nil {
		t.Skip("reserving huge pages needs root: ", err)
	}
	t.Cleanup(func() {
		if err := write(n); err != nil {
			t.Error(err)
		}
	})
	if p, err := hugetlb.Read("", hugetlb.Size2M, nil); err != nil || p.AvailableCount < count {
		t.Skipf("the machine gave %d of %d huge pages: %v", p.AvailableCount, count, err)
	}
}

func write(n uint64) error { return os.WriteFile(path, fmt.Appendf(nil, "%d\n", n), 0o600) }
