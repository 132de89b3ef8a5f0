package hugetlb

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

func fake(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	all   = "sys/kernel/mm/hugepages/hugepages-2048kB/"
	node1 = "sys/devices/system/node/node1/hugepages/hugepages-2048kB/"
)

func TestCheck(t *testing.T) {
	one := 1
	for name, c := range map[string]struct {
		files map[string]string
		node  *int
		bytes uint64
		want  []string // of the error; none: it is enough
	}{
		"enough":   {map[string]string{all + "nr_hugepages": "10", all + "free_hugepages": "8"}, nil, 16 << 20, nil},
		"too few":  {map[string]string{all + "nr_hugepages": "10", all + "free_hugepages": "4"}, nil, 16 << 20, []string{"8 huge pages of 2M are needed", "10 are reserved", "4 of them are free", "echo 14 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"}},
		"promised": {map[string]string{all + "nr_hugepages": "10", all + "free_hugepages": "8", all + "resv_hugepages": "1"}, nil, 16 << 20, []string{"7 of them are free", "echo 11 >"}},
		"on demand": {map[string]string{
			all + "nr_hugepages": "1", all + "free_hugepages": "1", all + "surplus_hugepages": "1", all + "nr_overcommit_hugepages": "8",
		}, nil, 16 << 20, nil},
		"on a node": {map[string]string{
			all + "nr_hugepages": "100", all + "free_hugepages": "100", node1 + "nr_hugepages": "2", node1 + "free_hugepages": "2",
		}, &one, 16<<20 + 1, []string{"9 huge pages", "2 are reserved on NUMA node 1", "echo 9 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"}},
		"free there, promised elsewhere": {map[string]string{
			all + "nr_hugepages": "8", all + "free_hugepages": "8", all + "resv_hugepages": "8", node1 + "nr_hugepages": "8", node1 + "free_hugepages": "8",
		}, &one, 16 << 20, []string{"0 of them are free"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := Check(fake(t, c.files), Size2M, c.node, c.bytes)
			if len(c.want) == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if !errors.Is(err, base.ErrFull) {
				t.Fatalf("error %v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q is not in %v", w, err)
				}
			}
		})
	}
	if err := Check(fake(t, nil), Size1G, nil, 1); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a kernel without such pages: %v", err)
	}
}

func TestMount(t *testing.T) {
	root := fake(t, map[string]string{"proc/self/mounts": "tmpfs /dev/shm tmpfs rw 0 0"})
	if _, err := Mount(root, Size2M); !errors.Is(err, base.ErrNotFound) || !strings.Contains(err.Error(), "mount -t hugetlbfs -o pagesize=2M") {
		t.Errorf("no mount: %v", err)
	}
	// What the list calls a hugetlbfs and is none of that page size is passed over.
	root = fake(t, map[string]string{"proc/self/mounts": "none " + root + " hugetlbfs rw 0 0"})
	if dir, err := Mount(root, Size2M); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("another page size: %q, %v", dir, err)
	}
}
