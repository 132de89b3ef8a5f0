//go:build vmlab

package vmlab

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

//go:embed guest/init
var guestInit []byte

// image is what a machine boots from. Both files are in the cache and never
// change once they are there.
type image struct {
	kernel string
	initrd string
}

// prerequisites are the programs of the host that the lab calls.
// scripts/install.sh knows their packages.
var prerequisites = []string{"qemu-system-x86_64", "busybox", "xz", "dpkg-deb", "apt-get", "rdma", "ibv_rc_pingpong", "mkfs.ext4"}

// prepare makes the image, or finds it in the cache. It skips the test only when
// a prerequisite is missing that it may not install, and names it.
func prepare(t testing.TB) image {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skipf("vmlab: the machines of the lab are amd64 and this host is %s", runtime.GOARCH)
	}
	if missing := missingPrograms(); len(missing) > 0 {
		if os.Getuid() != 0 {
			t.Skipf("vmlab: %s missing; install them as root by: bash scripts/install.sh vmlab", strings.Join(missing, ", "))
		}
		cmd := exec.Command("bash", filepath.Join(treeRoot(t), "scripts", "install.sh"), "vmlab")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("vmlab: %s missing and installing them failed: %v\n%s", strings.Join(missing, ", "), err, out)
		}
	}
	img, err := buildImage()
	if err != nil {
		t.Fatalf("vmlab: %v", err)
	}
	return img
}

func missingPrograms() []string {
	var missing []string
	for _, p := range prerequisites {
		if _, err := exec.LookPath(p); err != nil {
			missing = append(missing, p)
		}
	}
	return missing
}

// treeRoot returns the root of the source tree.
func treeRoot(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatalf("vmlab: go env GOMOD: %v", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out)))
}

// cacheDir is where the image lives: beside the tools that scripts/env.sh keeps.
func cacheDir() (string, error) {
	root := os.Getenv("MARU_CACHE")
	if root == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		root = filepath.Join(user, "maru")
	}
	dir := filepath.Join(root, "vmlab")
	return dir, os.MkdirAll(dir, 0o755)
}

// buildImage makes kernel and initial file system once per kernel and per content
// of this package. Runs of several trees take turns.
func buildImage() (image, error) {
	dir, err := cacheDir()
	if err != nil {
		return image{}, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return image{}, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return image{}, fmt.Errorf("lock %s: %w", lock.Name(), err)
	}

	root, err := fetchKernel(dir)
	if err != nil {
		return image{}, err
	}
	files, err := hostFiles()
	if err != nil {
		return image{}, err
	}
	sum := sha256.New()
	sum.Write(guestInit)
	fmt.Fprintln(sum, wantedModules, rdmaModules)
	for _, f := range files {
		fmt.Fprintln(sum, f.path, len(f.data))
		sum.Write(f.data)
	}
	img := image{
		kernel: filepath.Join(root, "vmlinux"),
		initrd: filepath.Join(root, "initrd-"+hex.EncodeToString(sum.Sum(nil)[:8])+".cpio"),
	}
	if exists(img.kernel) && exists(img.initrd) {
		return img, nil
	}

	// Unpacked the kernel's package is six times as large, so only the package stays.
	unpacked, err := os.MkdirTemp(root, "unpacked-")
	if err != nil {
		return image{}, err
	}
	defer os.RemoveAll(unpacked)
	if out, err := exec.Command("dpkg-deb", "-x", filepath.Join(root, kernelDeb), unpacked).CombinedOutput(); err != nil {
		return image{}, fmt.Errorf("unpack %s in %s: %w\n%s", kernelDeb, root, err, out)
	}
	if err := unpackKernel(unpacked, img.kernel); err != nil {
		return image{}, err
	}
	modules, err := openModules(unpacked)
	if err != nil {
		return image{}, err
	}
	archive, err := makeInitrd(modules, files, guestInit)
	if err != nil {
		return image{}, err
	}
	return img, writeWhole(img.initrd, archive)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// kernelDeb is the name of the kernel's package in the cache.
const kernelDeb = "kernel.deb"

// kernelPackage matches the package that the meta package of the distribution
// depends on: the kernel that is current.
var kernelPackage = regexp.MustCompile(`Depends: (linux-image-[0-9][^\s]*)`)

// fetchKernel returns the folder of a kernel, with its package in it. A kernel
// that is in the cache is used whatever is current: the tests do not depend on
// its version, and a run needs no network then.
func fetchKernel(dir string) (string, error) {
	if have, _ := filepath.Glob(filepath.Join(dir, "linux-image-*", kernelDeb)); len(have) > 0 {
		return filepath.Dir(have[len(have)-1]), nil
	}
	name, err := currentKernel()
	if err != nil {
		return "", err
	}
	root := filepath.Join(dir, name)
	if err := os.RemoveAll(root); err != nil {
		return "", err
	}
	if err := os.MkdirAll(root, 0o755); err != nil {
		return "", err
	}
	get := exec.Command("apt-get", "download", name)
	get.Dir = root
	if out, err := get.CombinedOutput(); err != nil {
		return "", fmt.Errorf("apt-get download %s: %w\n%s", name, err, out)
	}
	debs, err := filepath.Glob(filepath.Join(root, "linux-image-*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get download %s left %d packages in %s", name, len(debs), root)
	}
	return root, os.Rename(debs[0], filepath.Join(root, kernelDeb))
}

// currentKernel asks apt for the name of the current kernel package, and brings
// apt's lists up when it does not know (a fresh machine has none).
func currentKernel() (string, error) {
	ask := func() (string, error) {
		out, err := exec.Command("apt-cache", "depends", "linux-image-amd64").CombinedOutput()
		if m := kernelPackage.FindSubmatch(out); err == nil && m != nil {
			return string(m[1]), nil
		}
		return "", fmt.Errorf("apt-cache depends linux-image-amd64 names no kernel: %w\n%s", errors.Join(err), out)
	}
	name, err := ask()
	if err == nil || os.Getuid() != 0 {
		return name, err
	}
	if out, err := exec.Command("apt-get", "-o", "DPkg::Lock::Timeout=300", "update", "-qq").CombinedOutput(); err != nil {
		return "", fmt.Errorf("apt-get update: %w\n%s", err, out)
	}
	return ask()
}

// unpackKernel writes the plain ELF kernel. QEMU enters that one directly, where
// the packed one unpacks itself first: seconds, when every instruction is
// emulated. A kernel that is packed in another way is used as it is.
func unpackKernel(unpacked, out string) error {
	packed, err := filepath.Glob(filepath.Join(unpacked, "boot", "vmlinuz-*"))
	if err != nil || len(packed) != 1 {
		return fmt.Errorf("%d kernels in the package, want one", len(packed))
	}
	code, err := os.ReadFile(packed[0])
	if err != nil {
		return err
	}
	magic := []byte("\xfd7zXZ\x00")
	for at := bytes.Index(code, magic); at >= 0; {
		cmd := exec.Command("xz", "-dc", "--single-stream")
		cmd.Stdin = bytes.NewReader(code[at:])
		// What follows the stream in the file is no fault of it.
		plain, _ := cmd.Output()
		if bytes.HasPrefix(plain, []byte("\x7fELF")) {
			return writeWhole(out, plain)
		}
		next := bytes.Index(code[at+1:], magic)
		if next < 0 {
			break
		}
		at += 1 + next
	}
	return writeWhole(out, code)
}

// writeWhole puts a file in place whole or not at all.
func writeWhole(path string, data []byte) error {
	if err := os.WriteFile(path+".part", data, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".part", path)
}
