// Package numa puts memory on one NUMA node of this machine and says what the machine's
// nodes are. Binding is strict (MPOL_BIND): memory that the node does not have is an
// error or a bus error inside mapping.Guard, never memory of another node. It allocates
// nothing and chooses no node. There are no locks; With owns the one goroutine it makes
// and waits for it.
//
// Source: the kernel's Documentation/admin-guide/mm/numa_memory_policy.rst.
package numa

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// MaxNode bounds node numbers: a mask of 1024 bits, of which the kernel takes one less.
const MaxNode = 1022

// Nodes returns the nodes that have memory, in their order. root is put in front of
// /sys ("" outside tests). Errors: ErrUnsupported when the kernel tells of none.
func Nodes(root string) ([]int, error) {
	path := filepath.Join("/", root, "sys/devices/system/node/has_memory")
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: this kernel tells of no NUMA nodes: %w", base.ErrUnsupported, err)
	}
	nodes, err := parseList(strings.TrimSpace(string(b)))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", base.ErrUnsupported, path, err)
	}
	return nodes, nil
}

// Check says whether memory can be bound to a node. Errors: ErrInvalid names the node
// and the ones that there are; those of Nodes.
func Check(root string, node int) error {
	nodes, err := Nodes(root)
	if err != nil {
		return fmt.Errorf("NUMA node %d: %w", node, err)
	}
	for _, n := range nodes {
		if n == node {
			return nil
		}
	}
	return fmt.Errorf("%w: NUMA node %d has no memory or is not there; nodes with memory: %s", base.ErrInvalid, node, formatList(nodes))
}

// Distance is the kernel's distance from one node to another: 10 is the node itself, 20
// twice as far. Errors: ErrUnavailable.
func Distance(root string, from, to int) (int, error) {
	path := filepath.Join("/", root, "sys/devices/system/node", "node"+strconv.Itoa(from), "distance")
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("%w: distance of node %d: %w", base.ErrUnavailable, from, err)
	}
	// One number a node that is online, in their order.
	online, err := os.ReadFile(filepath.Join("/", root, "sys/devices/system/node/online"))
	if err != nil {
		return 0, fmt.Errorf("%w: nodes online: %w", base.ErrUnavailable, err)
	}
	nodes, err := parseList(strings.TrimSpace(string(online)))
	if err != nil {
		return 0, fmt.Errorf("%w: nodes online: %w", base.ErrUnavailable, err)
	}
	columns := strings.Fields(string(b))
	for i, n := range nodes {
		if n == to && i < len(columns) {
			d, err := strconv.Atoi(columns[i])
			if err != nil {
				return 0, fmt.Errorf("%w: %s: %w", base.ErrUnavailable, path, err)
			}
			return d, nil
		}
	}
	return 0, fmt.Errorf("%w: %s tells no distance to node %d", base.ErrUnavailable, path, to)
}

// Bind has the pages of a mapping taken from one node; pages that are there already stay
// where they are. data begins at a page. Errors: ErrDenied (containers without
// CAP_SYS_NICE), ErrInvalid (the node is not allowed to this process), ErrUnsupported.
func Bind(data []byte, node int) error {
	if node < 0 || node > MaxNode {
		return fmt.Errorf("%w: NUMA node %d; allowed: 0 to %d", base.ErrInvalid, node, MaxNode)
	}
	return bindError(node, mbind(data, node))
}

func bindError(node int, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: binding memory to NUMA node %d: %w; containers need --cap-add SYS_NICE for it", base.ErrDenied, node, err)
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%w: binding memory to NUMA node %d: %w; this kernel knows no NUMA nodes", base.ErrUnsupported, node, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: binding memory to NUMA node %d: %w; is it in Mems_allowed_list of /proc/self/status (cpuset.mems)?", base.ErrInvalid, node, err)
	}
	return fmt.Errorf("%w: binding memory to NUMA node %d: %w", base.ErrUnavailable, node, err)
}

// With runs fn so that whatever memory the kernel allocates for it, also that of files
// on tmpfs and hugetlbfs, comes from one node. fn runs in a goroutine of its own, on a
// thread that ends with it: no other code ever sees the thread's policy. Errors: those
// of Bind, and fn's.
func With(node int, fn func() error) error {
	if node < 0 || node > MaxNode {
		return fmt.Errorf("%w: NUMA node %d; allowed: 0 to %d", base.ErrInvalid, node, MaxNode)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		var mask unix.CPUSet   // a bit a node; as wide as the kernel takes
		mask.Set(node)
		err := bindError(node, unix.SetMemPolicy(unix.MPOL_BIND, &mask))
		if err == nil {
			err = fn()
		}
		done <- err
	}()
	return <-done
}

// parseList reads "0-1,4".
func parseList(s string) ([]int, error) {
	var out []int
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		first, last, ranged := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		if err != nil {
			return nil, fmt.Errorf("%w: list of nodes %q", base.ErrInvalid, s)
		}
		b := a
		if ranged {
			if b, err = strconv.Atoi(last); err != nil {
				return nil, fmt.Errorf("%w: list of nodes %q", base.ErrInvalid, s)
			}
		}
		if a < 0 || b < a || b > MaxNode {
			return nil, fmt.Errorf("%w: list of nodes %q", base.ErrInvalid, s)
		}
		for ; a <= b; a++ {
			out = append(out, a)
		}
	}
	return out, nil
}

func formatList(nodes []int) string {
	if len(nodes) == 0 {
		return "none"
	}
	text := make([]string, len(nodes))
	for i, n := range nodes {
		text[i] = strconv.Itoa(n)
	}
	return strings.Join(text, ", ")
}
