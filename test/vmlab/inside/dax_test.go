//go:build vmguest

package inside

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

const (
	device     = "/dev/dax0.0"
	deviceName = "dax0.0"
	alignBytes = 2 << 20
	// deviceBytes is what the kernel leaves of a pool file of 256 MiB.
	deviceBytes = 266338304
)

func open(t *testing.T, o dax.OpenOptions) *dax.File {
	t.Helper()
	f, err := dax.Open(device, dax.KindDevdax, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func mapRange(t *testing.T, f *dax.File, offset, length uint64, access mapping.Access) *mapping.Mapping {
	t.Helper()
	m, err := f.Map(offset, length, access)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Unmap(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestDAXDiscover(t *testing.T) {
	devices, err := dax.Discover("/sys")
	if err != nil {
		t.Fatal(err)
	}
	if len(devices) != 1 {
		t.Fatalf("%d devices, want one: %+v", len(devices), devices)
	}
	d := devices[0]
	if d.Name != deviceName || d.Path != device || d.SizeBytes != deviceBytes || d.AlignBytes != alignBytes || d.Driver != dax.DriverDevice {
		t.Errorf("found %+v", d)
	}
}

func TestDAXOpen(t *testing.T) {
	owner := open(t, dax.OpenOptions{Lock: dax.LockExclusive})
	if owner.Kind() != dax.KindDevdax || owner.SizeBytes() != deviceBytes || owner.AlignBytes() != alignBytes {
		t.Errorf("%s, %d bytes, alignment %d", owner.Kind(), owner.SizeBytes(), owner.AlignBytes())
	}
	if _, err := dax.Open(device, dax.KindAuto, dax.OpenOptions{Lock: dax.LockExclusive}); !errors.Is(err, base.ErrBusy) {
		t.Errorf("a second owner: %v, want ErrBusy", err)
	}
	open(t, dax.OpenOptions{}) // a mapper beside the owner
	if _, err := dax.Open(device, dax.KindFile, dax.OpenOptions{}); !errors.Is(err, base.ErrMismatch) {
		t.Errorf("a device as a file: %v, want ErrMismatch", err)
	}
	if _, err := dax.Open(device, dax.KindAuto, dax.OpenOptions{SizeBytes: deviceBytes + 1}); !errors.Is(err, base.ErrMismatch) {
		t.Errorf("more than the device has: %v, want ErrMismatch", err)
	}
	if _, err := dax.Open("/dev/null", dax.KindAuto, dax.OpenOptions{}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("another character device: %v, want ErrInvalid", err)
	}
}

func TestDAXMap(t *testing.T) {
	f := open(t, dax.OpenOptions{})
	const at = 4 * alignBytes
	writer := mapRange(t, f, at, alignBytes, mapping.ReadWrite)
	reader := mapRange(t, open(t, dax.OpenOptions{ReadOnly: true}), at, alignBytes, mapping.ReadOnly)
	pattern := bytes.Repeat([]byte("device-DAX"), 100)
	if err := writer.Guard(func() { copy(writer.Bytes()[12345:], pattern) }); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(pattern))
	if err := reader.Guard(func() { copy(got, reader.Bytes()[12345:]) }); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, pattern) {
		t.Error("the second mapping has other bytes than the first")
	}
	if err := reader.Guard(func() { reader.Bytes()[0] = 1 }); !errors.Is(err, base.ErrFault) {
		t.Errorf("a write through a mapping for reading: %v, want ErrFault", err)
	}
	for _, c := range []struct{ offset, length uint64 }{
		{4096, alignBytes}, {0, 4096}, {0, 0}, {deviceBytes, alignBytes}, {0, deviceBytes + alignBytes}, {1 << 63, alignBytes},
	} {
		if _, err := f.Map(c.offset, c.length, mapping.ReadWrite); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("map %d bytes at %d: %v, want ErrInvalid", c.length, c.offset, err)
		}
	}
	mapRange(t, f, deviceBytes-alignBytes, alignBytes, mapping.ReadWrite) // the end itself
}

// TestDAXFlush: a software-coherent pool is written back and dropped by cache lines;
// the processor of the lab has the instructions, and the lines of a device-DAX
// take them.
func TestDAXFlush(t *testing.T) {
	if !flush.Supported() {
		t.Fatal("the processor of the lab cannot write cache lines back")
	}
	m := mapRange(t, open(t, dax.OpenOptions{}), 12*alignBytes, alignBytes, mapping.ReadWrite)
	part := m.Bytes()[100:5000]
	if err := m.Guard(func() {
		for i := range part {
			part[i] = byte(i)
		}
		if err := flush.WriteBack(part); err != nil {
			t.Error(err)
		}
		if err := flush.Invalidate(part); err != nil {
			t.Error(err)
		}
		for i := range part {
			if part[i] != byte(i) {
				t.Fatalf("byte %d is %#x after write back and invalidate", i, part[i])
			}
		}
	}); err != nil {
		t.Error(err)
	}
}

// TestDAXDriverGoes: the device goes away under a mapping. That is an error of the
// access, not the end of the process, and the bytes are there when it is back.
// Nothing may have the device open when the driver takes it again: the kernel
// then answers every later open with ENXIO, until the next boot.
func TestDAXDriverGoes(t *testing.T) {
	const at = 8 * alignBytes
	f, err := dax.Open(device, dax.KindDevdax, dax.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := f.Map(at, alignBytes, mapping.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Guard(func() { m.Bytes()[7] = 0x5a }); err != nil {
		t.Fatal(err)
	}
	driver(t, "unbind")
	if err := m.Guard(func() { m.Bytes()[7] = 1 }); !errors.Is(err, base.ErrFault) {
		t.Errorf("a write without the device: %v, want ErrFault", err)
	}
	if again, err := f.Map(at, alignBytes, mapping.ReadWrite); !errors.Is(err, base.ErrOffline) {
		t.Errorf("mapping a device without a driver: %v, want ErrOffline", err)
		if err == nil {
			again.Close()
		}
	}
	if devices, err := dax.Discover("/sys"); err != nil || len(devices) != 1 || devices[0].Driver != dax.DriverNone {
		t.Errorf("found %+v, %v; want the device, without a driver", devices, err)
	}
	if err := errors.Join(m.Unmap(), f.Close()); err != nil {
		t.Error(err)
	}
	if _, err := dax.Open(device, dax.KindAuto, dax.OpenOptions{}); !errors.Is(err, base.ErrOffline) && !errors.Is(err, base.ErrNotFound) {
		t.Errorf("opening a device without a driver: %v, want ErrOffline or ErrNotFound", err)
	}
	driver(t, "bind")
	back := mapRange(t, open(t, dax.OpenOptions{}), at, alignBytes, mapping.ReadOnly)
	var got byte
	if err := back.Guard(func() { got = back.Bytes()[7] }); err != nil || got != 0x5a {
		t.Errorf("after the device came back: %#x, %v; want 0x5a", got, err)
	}
}

func driver(t *testing.T, verb string) {
	t.Helper()
	if err := os.WriteFile("/sys/bus/dax/drivers/device_dax/"+verb, []byte(deviceName), 0); err != nil {
		t.Fatalf("%s: %v", verb, err)
	}
}
