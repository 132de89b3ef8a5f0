// Package memlimit says how much memory this process can still take: of the machine
// (MemAvailable), of one of its NUMA nodes, and of its control groups (v1 and v2, at
// every level). It limits nothing itself. There are no goroutines and no locks.
package memlimit

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// Available is an amount of memory and who bounds it.
type Available struct {
	Bytes uint64
	// Source is the file that holds the bound, for the operator.
	Source string
	// limit is the bound of a control group as it is set.
	limit uint64
}

// Read returns what can be had now. root is put in front of all paths ("" outside
// tests). Errors: ErrUnavailable when the kernel tells nothing.
func Read(root string) (Available, error) { return ReadOn(root, nil) }

// ReadOn is Read for memory that comes from one NUMA node alone; nil: from any. Errors:
// those of Read, and ErrUnavailable when the kernel tells nothing of the node.
func ReadOn(root string, node *int) (Available, error) {
	best := Available{Bytes: math.MaxUint64}
	meminfo := filepath.Join("/", root, "proc/meminfo")
	if b, err := os.ReadFile(meminfo); err == nil {
		if kb, ok := field(b, "MemAvailable:"); ok {
			best = Available{Bytes: kb << 10, Source: "MemAvailable in /proc/meminfo"}
		}
	}
	others := cgroups(root)
	if node != nil {
		a, err := readNode(root, *node)
		if err != nil {
			return a, err
		}
		others = append(others, a)
	}
	for _, a := range others {
		if a.Bytes < best.Bytes {
			best = a
		}
	}
	if best.Bytes == math.MaxUint64 {
		return best, fmt.Errorf("%w: %s tells no MemAvailable", base.ErrUnavailable, meminfo)
	}
	return best, nil
}

// Limit returns the smallest bound that a control group of this process has, whatever of
// it is used; false when there is none. root is put in front of all paths.
func Limit(root string) (Available, bool) {
	var best Available
	for _, a := range cgroups(root) {
		if best.Source == "" || a.limit < best.Bytes {
			best = Available{Bytes: a.limit, Source: a.Source}
		}
	}
	return best, best.Source != ""
}

// readNode estimates MemAvailable of a node, which the kernel counts for the machine
// only: what is free, and half of the clean cache, as it does.
func readNode(root string, node int) (Available, error) {
	dir := filepath.Join("/", root, "sys/devices/system/node", "node"+strconv.Itoa(node))
	b, err := os.ReadFile(filepath.Join(dir, "meminfo"))
	if err != nil {
		return Available{}, fmt.Errorf("%w: memory of NUMA node %d: %w", base.ErrUnavailable, node, err)
	}
	prefix := fmt.Sprintf("Node %d ", node)
	b = bytes.ReplaceAll(b, []byte(prefix), nil)
	free, ok := field(b, "MemFree:")
	if !ok {
		return Available{}, fmt.Errorf("%w: %s/meminfo tells no MemFree", base.ErrUnavailable, dir)
	}
	active, _ := field(b, "Active(file):")
	inactive, _ := field(b, "Inactive(file):")
	return Available{Bytes: (free + (active+inactive)/2) << 10, Source: dir + "/meminfo"}, nil
}

// field finds "name value ..." on a line of its own.
func field(b []byte, name string) (uint64, bool) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		f := strings.Fields(sc.Text())
		if len(f) >= 2 && f[0] == name {
			n, err := strconv.ParseUint(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// group is one hierarchy: where it is mounted and what its files are called.
type group struct {
	mount, limit, usage, cache string
}

var (
	groupV2 = group{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"}
	groupV1 = group{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}
)

func cgroups(root string) []Available {
	b, err := os.ReadFile(filepath.Join("/", root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	var out []Available
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case f[0] == "0" && f[1] == "":
			out = append(out, groupV2.levels(root, f[2])...)
		case isMemory(f[1]):
			out = append(out, groupV1.levels(root, f[2])...)
		}
	}
	return out
}

func isMemory(controllers string) bool {
	for c := range strings.SplitSeq(controllers, ",") {
		if c == "memory" {
			return true
		}
	}
	return false
}

// levels goes from the process's group up to the mount: each level bounds those below.
// In a container the path may be the host's and missing here; then the mount itself is
// the process's group, and it is the last level anyway.
func (g group) levels(root, path string) []Available {
	var out []Available
	mount := filepath.Join("/", root, g.mount)
	for p := filepath.Clean("/" + path); ; p = filepath.Dir(p) {
		if a, ok := g.read(filepath.Join(mount, p)); ok {
			out = append(out, a)
		}
		if p == "/" {
			return out
		}
	}
}

func (g group) read(dir string) (Available, bool) {
	limit, ok := number(filepath.Join(dir, g.limit))
	// v1 says "no limit" by a number near the largest.
	if !ok || limit >= math.MaxInt64/2 {
		return Available{}, false
	}
	usage, ok := number(filepath.Join(dir, g.usage))
	if !ok {
		return Available{}, false
	}
	// Clean cache counts as used but goes as soon as memory is wanted.
	if b, err := os.ReadFile(filepath.Join(dir, "memory.stat")); err == nil {
		if cache, ok := field(b, g.cache); ok {
			usage -= min(cache, usage)
		}
	}
	return Available{Bytes: limit - min(usage, limit), Source: filepath.Join(dir, g.limit), limit: limit}, true
}

func number(path string) (uint64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}
