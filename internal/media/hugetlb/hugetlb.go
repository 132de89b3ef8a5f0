// Package hugetlb says what huge pages an operator has reserved on this machine, and
// where a file system of them is mounted. It reserves none: that is a setting of the
// machine. Transparent huge pages are no matter of it. There are no goroutines and no
// locks.
//
// Source: the kernel's Documentation/admin-guide/mm/hugetlbpage.rst.
package hugetlb

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// Size is a size of huge pages in bytes.
type Size uint64

// Sizes that pools can be made of.
const (
	Size2M Size = 2 << 20
	Size1G Size = 1 << 30
)

func (s Size) String() string {
	switch s {
	case Size2M:
		return "2M"
	case Size1G:
		return "1G"
	}
	return strconv.FormatUint(uint64(s), 10)
}

// Pages counts reserved huge pages of one size, of the machine or of one node.
type Pages struct {
	// ReservedCount is what the operator has set aside.
	ReservedCount uint64
	// AvailableCount is what nobody has yet, with what the machine may add on demand.
	AvailableCount uint64
}

// Read counts the pages of a size, of one node or, with nil, of the machine. root is put
// in front of /sys ("" outside tests). Errors: ErrUnsupported when the kernel has no
// huge pages of this size.
func Read(root string, size Size, node *int) (Pages, error) {
	dir := pagesDir(root, size, node)
	total, ok := number(dir, "nr_hugepages")
	free, ok2 := number(dir, "free_hugepages")
	if !ok || !ok2 {
		return Pages{}, fmt.Errorf("%w: this kernel has no huge pages of %s (%s)", base.ErrUnsupported, size, dir)
	}
	surplus, _ := number(dir, "surplus_hugepages")
	p := Pages{ReservedCount: total - min(surplus, total), AvailableCount: free}
	if node == nil {
		// Promised to mappings that have not touched them yet; only the machine counts these.
		promised, _ := number(dir, "resv_hugepages")
		overcommit, _ := number(dir, "nr_overcommit_hugepages")
		p.AvailableCount = free - min(promised, free) + overcommit - min(surplus, overcommit)
	}
	return p, nil
}

func pagesDir(root string, size Size, node *int) string {
	name := fmt.Sprintf("hugepages-%dkB", uint64(size)>>10)
	if node == nil {
		return filepath.Join("/", root, "sys/kernel/mm/hugepages", name)
	}
	return filepath.Join("/", root, "sys/devices/system/node", "node"+strconv.Itoa(*node), "hugepages", name)
}

func number(dir, name string) (uint64, bool) {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}

// Check says whether bytes can be had in pages of a size, on a node or with nil
// anywhere. Errors: ErrFull says how many pages there are and the command that reserves
// what is missing; those of Read.
func Check(root string, size Size, node *int, bytes uint64) error {
	need := (bytes + uint64(size) - 1) / uint64(size)
	p, err := Read(root, size, node)
	if err == nil && node != nil && p.AvailableCount >= need {
		// What is free on the node may be promised to somebody already.
		var all Pages
		if all, err = Read(root, size, nil); err == nil && all.AvailableCount < need {
			p.AvailableCount = all.AvailableCount
		}
	}
	if err != nil {
		return err
	}
	if p.AvailableCount >= need {
		return nil
	}
	where := "are reserved"
	if node != nil {
		where = fmt.Sprintf("are reserved on NUMA node %d", *node)
	}
	return fmt.Errorf("%w: %d huge pages of %s are needed, %d %s and %d of them are free; reserve more as root: %s",
		base.ErrFull, need, size, p.ReservedCount, where, p.AvailableCount, Command(size, node, p.ReservedCount+need-p.AvailableCount))
}

// Command is what an operator types so that count pages of a size are reserved in all.
func Command(size Size, node *int, count uint64) string {
	return fmt.Sprintf("echo %d > %s/nr_hugepages", count, pagesDir("", size, node))
}

// Mount finds a mounted file system of huge pages of one size that this user may write
// to. Errors: ErrNotFound says how to mount one.
func Mount(root string, size Size) (string, error) {
	b, err := os.ReadFile(filepath.Join("/", root, "proc/self/mounts"))
	if err != nil {
		return "", fmt.Errorf("%w: mounts of this process: %w", base.ErrUnavailable, err)
	}
	var closed []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 4 || f[2] != "hugetlbfs" {
			continue
		}
		dir := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\134`, `\`).Replace(f[1])
		var fsys unix.Statfs_t
		if unix.Statfs(dir, &fsys) != nil || uint64(fsys.Bsize) != uint64(size) { //nolint:gosec // a block size is positive
			continue
		}
		if unix.Access(dir, unix.W_OK|unix.X_OK) != nil {
			closed = append(closed, dir)
			continue
		}
		return dir, nil
	}
	if len(closed) > 0 {
		return "", fmt.Errorf("%w: this user may not write to %s; mount one with -o pagesize=%s,uid=%d", base.ErrDenied, strings.Join(closed, ", "), size, os.Getuid())
	}
	const dir = "/dev/hugepages"
	return "", fmt.Errorf("%w: no file system of huge pages of %s is mounted; as root: mkdir -p %s && mount -t hugetlbfs -o pagesize=%s,uid=%d none %s",
		base.ErrNotFound, size, dir, size, os.Getuid(), dir)
}
