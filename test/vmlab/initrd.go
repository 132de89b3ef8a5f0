//go:build vmlab

package vmlab

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// cpio builds an archive of the "new ASCII" format that the kernel unpacks as its
// first file system. Source: Linux, Documentation/driver-api/early-userspace/
// buffer-format.rst.
type cpio struct {
	buf   bytes.Buffer
	inode int
}

func (c *cpio) add(name string, mode int, data []byte) {
	c.inode++
	fmt.Fprintf(&c.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		c.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	c.buf.WriteString(name)
	c.buf.WriteByte(0)
	c.pad()
	c.buf.Write(data)
	c.pad()
}

func (c *cpio) pad() {
	for c.buf.Len()%4 != 0 {
		c.buf.WriteByte(0)
	}
}

func (c *cpio) dir(name string)               { c.add(name, 0o040755, nil) }
func (c *cpio) link(name, target string)      { c.add(name, 0o120777, []byte(target)) }
func (c *cpio) file(name string, b []byte)    { c.add(name, 0o100644, b) }
func (c *cpio) program(name string, b []byte) { c.add(name, 0o100755, b) }

func (c *cpio) bytes() []byte {
	c.inode = -1
	c.add("TRAILER!!!", 0, nil)
	return c.buf.Bytes()
}

// wantedModules are loaded at boot, in this order, after what they depend on: the
// bus, the network and the folder of the host, the disk, then the NVDIMM up to the
// device-DAX. The checksums are what others ask for by name at run time.
var wantedModules = []string{
	"virtio_pci", "virtio_net", "9p", "9pnet_virtio",
	"crc32c_generic", "virtio_blk", "ext4",
	"crc32_generic", "nfit", "nd_pmem", "dax_pmem", "device_dax",
}

// rdmaModules are loaded on machines with soft-RoCE: RDMA verbs over the ordinary
// network card, as the kernel emulates them.
var rdmaModules = []string{"rdma_rxe", "ib_uverbs"}

// hostPrograms of RDMA go into every image, with the libraries that they need: the
// kernel's driver is of no use without its other half in user space.
var hostPrograms = []string{"rdma", "ibv_devinfo", "ibv_rc_pingpong"}

// libraryDir is where the loader of Debian looks without being told.
const libraryDir = "lib/x86_64-linux-gnu/"

// hostFile is a file of the host that goes into the image.
type hostFile struct {
	source string // on the host
	path   string // in the image
	data   []byte
}

// hostFiles collects busybox, hostPrograms and the libraries of both.
func hostFiles() ([]hostFile, error) {
	var files []hostFile
	add := func(source, path string) error {
		if slices.ContainsFunc(files, func(f hostFile) bool { return f.path == path }) {
			return nil
		}
		data, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		files = append(files, hostFile{source: source, path: path, data: data})
		return nil
	}
	program := func(name, path string) error {
		source, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		return add(source, path)
	}
	if err := program("busybox", "bin/busybox"); err != nil {
		return nil, err
	}
	for _, p := range hostPrograms {
		if err := program(p, "usr/bin/"+p); err != nil {
			return nil, err
		}
	}
	drivers, err := filepath.Glob("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav*.so")
	if err != nil || len(drivers) == 0 {
		return nil, fmt.Errorf("no soft-RoCE driver on this host (Debian package ibverbs-providers): %w", errors.Join(err, fs.ErrNotExist))
	}
	for _, d := range drivers {
		if err := add(d, strings.TrimPrefix(d, "/")); err != nil {
			return nil, err
		}
	}
	// libpthread opens this one by name, when a thread ends.
	if err := add("/"+libraryDir+"libgcc_s.so.1", libraryDir+"libgcc_s.so.1"); err != nil {
		return nil, err
	}
	for _, f := range files[1:] {
		out, err := exec.Command("ldd", f.source).Output()
		if err != nil {
			return nil, fmt.Errorf("ldd %s: %w", f.source, err)
		}
		for _, library := range libraryPath.FindAllString(string(out), -1) {
			path := libraryDir + filepath.Base(library)
			if strings.HasPrefix(filepath.Base(library), "ld-linux") {
				path = strings.TrimPrefix(library, "/")
			}
			if err := add(library, path); err != nil {
				return nil, err
			}
		}
	}
	return files, nil
}

var libraryPath = regexp.MustCompile(`/\S+\.so\S*`)

// moduleTree are the modules of one kernel, by name.
type moduleTree struct {
	files    map[string]string
	builtin  map[string]bool
	contents map[string][]byte
}

func openModules(root string) (*moduleTree, error) {
	m := &moduleTree{files: map[string]string{}, builtin: map[string]bool{}, contents: map[string][]byte{}}
	name := func(p string) string {
		base, _, _ := strings.Cut(path.Base(p), ".ko")
		return strings.ReplaceAll(base, "-", "_")
	}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.Name() == "modules.builtin":
			list, err := os.ReadFile(p)
			for _, f := range strings.Fields(string(list)) {
				m.builtin[name(f)] = true
			}
			return err
		case strings.Contains(d.Name(), ".ko"):
			m.files[name(p)] = p
		}
		return nil
	})
	return m, err
}

// read returns the object code of a module, decompressed.
func (m *moduleTree) read(name string) ([]byte, error) {
	if b, ok := m.contents[name]; ok {
		return b, nil
	}
	file := m.files[name]
	var b []byte
	var err error
	switch filepath.Ext(file) {
	case ".ko":
		b, err = os.ReadFile(file)
	case ".xz":
		b, err = exec.Command("xz", "-dc", file).Output()
	default:
		err = fmt.Errorf("module %s is packed in a way that is not known: %s", name, file)
	}
	if err != nil {
		return nil, err
	}
	m.contents[name] = b
	return b, nil
}

// order appends name to list behind everything that it depends on.
func (m *moduleTree) order(list []string, name string) ([]string, error) {
	if m.builtin[name] || slices.Contains(list, name) {
		return list, nil
	}
	if m.files[name] == "" {
		return nil, fmt.Errorf("the kernel has no module %s, neither built in nor as a file", name)
	}
	code, err := m.read(name)
	if err != nil {
		return nil, err
	}
	object, err := elf.NewFile(bytes.NewReader(code))
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", name, err)
	}
	section := object.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("module %s says nothing about itself", name)
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", name, err)
	}
	for _, entry := range strings.Split(string(info), "\x00") {
		needs, ok := strings.CutPrefix(entry, "depends=")
		if !ok || needs == "" {
			continue
		}
		for _, need := range strings.Split(needs, ",") {
			if list, err = m.order(list, strings.ReplaceAll(need, "-", "_")); err != nil {
				return nil, fmt.Errorf("%s needs: %w", name, err)
			}
		}
	}
	return append(list, name), nil
}

// makeInitrd returns the first file system of a machine.
func makeInitrd(modules *moduleTree, files []hostFile, init []byte) ([]byte, error) {
	var c cpio
	for _, d := range []string{
		"bin", "sbin", "usr", "usr/bin", "usr/sbin", "usr/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/libibverbs",
		"etc", "etc/libibverbs.d", "lib", "lib64", strings.TrimSuffix(libraryDir, "/"), "lib/modules",
		"proc", "sys", "dev", "host", "state", "root", "tmp", "run",
	} {
		c.dir(d)
	}
	for _, f := range files {
		c.program(f.path, f.data)
	}
	c.file("etc/libibverbs.d/rxe.driver", []byte("driver rxe\n"))
	applets, err := exec.Command("busybox", "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("busybox --list: %w", err)
	}
	for _, a := range strings.Fields(string(applets)) {
		if a != "busybox" {
			c.link("bin/"+a, "busybox")
		}
	}
	// Each module once; those of RDMA in a list of their own.
	var order []string
	for _, list := range []struct {
		name string
		want []string
	}{{"modules", wantedModules}, {"modules.rdma", rdmaModules}} {
		from := len(order)
		for _, m := range list.want {
			if order, err = modules.order(order, m); err != nil {
				return nil, err
			}
		}
		var text strings.Builder
		for _, m := range order[from:] {
			b, err := modules.read(m)
			if err != nil {
				return nil, err
			}
			c.file("lib/modules/"+m+".ko", b)
			fmt.Fprintf(&text, "/lib/modules/%s.ko\n", m)
		}
		c.file("etc/"+list.name, []byte(text.String()))
	}
	c.file("etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\n"))
	c.file("etc/group", []byte("root:x:0:\n"))
	c.program("init", init)
	return c.bytes(), nil
}
