package dax

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// Driver says who has a dax device.
type Driver uint8

// Drivers of a dax device.
const (
	DriverNone   Driver = iota // nobody: neither a device file nor memory
	DriverDevice               // device_dax: /dev/daxX.Y, what a pool needs
	DriverKmem                 // kmem: it is system memory now
	DriverOther
)

func (d Driver) String() string {
	switch d {
	case DriverNone:
		return "none"
	case DriverDevice:
		return "device_dax"
	case DriverKmem:
		return "kmem"
	case DriverOther:
		return "other"
	}
	return fmt.Sprintf("driver(%d)", uint8(d))
}

// Device is a dax device as sysfs shows it.
type Device struct {
	Name       string // dax0.0
	Path       string // /dev/dax0.0
	SizeBytes  uint64
	AlignBytes uint64
	TargetNode int // NUMA node that its memory would be online as; -1 unknown
	NUMANode   int // NUMA node next to it; -1 unknown
	Driver     Driver
}

const (
	busDir = "bus/dax/devices"
	// defaultAlignBytes is what nearly all dax devices have, where sysfs does not say.
	defaultAlignBytes = 2 << 20
)

// Discover lists the dax devices of a machine, by name. sysfsRoot is "/sys" outside
// tests. A machine without any gives an empty list. Errors: ErrUnavailable.
func Discover(sysfsRoot string) ([]Device, error) {
	dir := filepath.Join(sysfsRoot, busDir)
	entries, err := os.ReadDir(dir)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: listing dax devices: %w", base.ErrUnavailable, err)
	}
	var out []Device
	for _, e := range entries {
		d, err := readDevice(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // it went away meanwhile, or is not set up
		}
		d.Name, d.Path = e.Name(), "/dev/"+e.Name()
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

func readDevice(dir string) (Device, error) {
	d := Device{TargetNode: -1, NUMANode: -1, AlignBytes: defaultAlignBytes}
	var err error
	if d.SizeBytes, err = readUint(filepath.Join(dir, "size")); err != nil {
		return d, err
	}
	if a, err := readUint(filepath.Join(dir, "align")); err == nil && a > 0 {
		d.AlignBytes = a
	}
	d.TargetNode = readNode(filepath.Join(dir, "target_node"))
	d.NUMANode = readNode(filepath.Join(dir, "numa_node"))
	if link, err := os.Readlink(filepath.Join(dir, "driver")); err == nil {
		switch filepath.Base(link) {
		case "device_dax":
			d.Driver = DriverDevice
		case "kmem":
			d.Driver = DriverKmem
		default:
			d.Driver = DriverOther
		}
	}
	return d, nil
}

func readUint(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 0, 64)
}

func readNode(path string) int {
	b, err := os.ReadFile(path)
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return -1
	}
	return n
}
