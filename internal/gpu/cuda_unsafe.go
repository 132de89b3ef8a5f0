//go:build cgo && linux

package gpu

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	_ "embed"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

//go:embed kernels.ptx
var kernels []byte

// Driver is the CUDA driver of this machine.
type Driver struct{}

// failed turns a result into an error. what it was for goes in front.
func failed(r C.mg_result, kind error, what string) error {
	if r.code == 0 {
		return nil
	}
	call := C.GoString(r.call)
	switch r.code {
	case C.MG_CAPTURING:
		return fmt.Errorf("%w: %s: the stream is being captured into a CUDA graph; submit outside of the capture", base.ErrUnsupported, what)
	case C.MG_NO_MEMORY:
		return fmt.Errorf("%w: %s: out of host memory", base.ErrLimit, what)
	case 2:
		return fmt.Errorf("%w: %s: %s: the GPU is out of memory; lower the engine's share of it (gpu_memory_utilization) or device_staging_bytes", base.ErrLimit, what, call)
	}
	return fmt.Errorf("%w: %s: %s: %s (CUDA error %d)", kind, what, call, C.GoString(C.mg_name(r.code)), int(r.code))
}

// Load looks for the driver. Errors: ErrUnsupported.
func Load() error {
	var text [512]C.char
	r := C.mg_load(&text[0], C.size_t(len(text)))
	switch {
	case r.code == 0:
		return nil
	case r.code == C.MG_NO_LIBRARY:
		return fmt.Errorf("%w: no CUDA driver on this machine (%s); install NVIDIA's driver, or use tensors of host memory", base.ErrUnsupported, C.GoString(&text[0]))
	case r.code == C.MG_OLD_DRIVER:
		return fmt.Errorf("%w: the CUDA driver is too old: %s", base.ErrUnsupported, C.GoString(&text[0]))
	}
	return failed(r, base.ErrUnsupported, "starting the CUDA driver")
}

// Version says which CUDA the driver of this machine is for: 12080 is 12.8. Errors: those
// of Load.
func Version() (int, error) {
	if err := Load(); err != nil {
		return 0, err
	}
	var v C.int
	r := C.mg_version(&v)
	return int(v), failed(r, base.ErrUnsupported, "asking the CUDA driver for its version")
}

// Open takes a device by its number in this process, on its primary context, which
// PyTorch uses as well. Errors: ErrUnsupported (no driver, no such device, MPS), ErrLimit.
func (Driver) Open(ordinal int) (engine.Device, error) {
	d, err := OpenDevice(ordinal)
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Device is a CUDA device.
type Device struct {
	d    *C.mg_device
	info engine.Info
	// readOnly: read-only mappings can be registered.
	readOnly bool
	can      bool
	close    sync.Once
	closed   error
}

var _ engine.Device = (*Device)(nil)

// OpenDevice is Driver.Open with the device's own type.
func OpenDevice(ordinal int) (*Device, error) {
	if err := Load(); err != nil {
		return nil, err
	}
	text := C.CBytes(append(append([]byte(nil), kernels...), 0)) // the driver wants a zero at the end
	defer C.free(text)
	var info C.mg_info
	d := &Device{}
	pipe := C.int(0)
	if MPSControl("") != "" {
		pipe = 1
	}
	r := C.mg_open(C.int(ordinal), (*C.char)(text), pipe, &d.d, &info)
	if r.code != 0 {
		return nil, failed(r, base.ErrUnsupported, fmt.Sprintf("opening GPU %d", ordinal))
	}
	if info.mps != 0 {
		return nil, fmt.Errorf("%w: GPU %d is shared through CUDA MPS, where another process owns the copies: nobody could prove that they have ended; stop the MPS daemon (echo quit | nvidia-cuda-mps-control)", base.ErrUnsupported, ordinal)
	}
	d.info = engine.Info{
		Ordinal: ordinal, Name: C.GoString(&info.name[0]), DriverVersion: int(info.driver_version),
		MemoryBytes: uint64(info.memory_bytes), BatchCopy: info.batch_copy != 0,
	}
	d.can, d.readOnly = info.register_supported != 0, info.register_read_only_supported != 0
	return d, nil
}

// Info is of engine.Device, as the others.
func (d *Device) Info() engine.Info { return d.info }

// Check walks the allocations that a range lies in.
func (d *Device) Check(address, size uint64) error {
	if size == 0 || address+size < address {
		return fmt.Errorf("%w: %d bytes at %#x are no range", base.ErrInvalid, size, address)
	}
	for at := address; at < address+size; {
		var is C.int
		var start, n C.uint64_t
		if r := C.mg_range(d.d, C.uint64_t(at), &is, &start, &n); r.code != 0 {
			return failed(r, base.ErrFault, "asking for an address")
		}
		if is == 0 || uint64(start)+uint64(n) <= at {
			return fmt.Errorf("%w: %#x, of %d bytes at %#x, is not memory of GPU %d", base.ErrInvalid, at, size, address, d.info.Ordinal)
		}
		at = uint64(start) + uint64(n)
	}
	return nil
}

// Register takes mapped host memory.
func (d *Device) Register(mem []byte, access engine.Access) error {
	readOnly := C.int(0)
	if access == engine.ReadOnly {
		if !d.readOnly {
			return fmt.Errorf("%w: this GPU or driver cannot register read-only memory", base.ErrUnsupported)
		}
		readOnly = 1
	}
	if !d.can {
		return fmt.Errorf("%w: this GPU or driver cannot register host memory", base.ErrUnsupported)
	}
	r := C.mg_register(d.d, unsafe.Pointer(unsafe.SliceData(mem)), C.size_t(len(mem)), readOnly)
	return failed(r, base.ErrUnsupported, "registering host memory")
}

// Unregister gives it back.
func (d *Device) Unregister(mem []byte) error {
	return failed(C.mg_unregister(d.d, unsafe.Pointer(unsafe.SliceData(mem))), base.ErrFault, "unregistering host memory")
}

// Record makes an event.
func (d *Device) Record(s engine.Stream) (engine.Event, error) {
	var e C.uint64_t
	if r := C.mg_record(d.d, C.uint64_t(s), &e); r.code != 0 {
		return 0, failed(r, base.ErrFault, "marking the engine's stream")
	}
	return engine.Event(e), nil
}

// Passed asks for an event.
func (d *Device) Passed(e engine.Event) (bool, error) {
	var passed C.int
	r := C.mg_passed(d.d, C.uint64_t(e), &passed)
	return passed != 0, failed(r, base.ErrFault, "asking for the engine's stream")
}

// Forget keeps the event for the next Record.
func (d *Device) Forget(e engine.Event) { C.mg_forget(d.d, C.uint64_t(e)) }

// Close releases the primary context.
func (d *Device) Close() error {
	d.close.Do(func() { d.closed = failed(C.mg_close(d.d), base.ErrFault, "closing the GPU") })
	return d.closed
}

// lane implements engine.Lane.
type lane struct {
	l     *C.mg_lane
	slots []engine.Slot
	stage uint64
}

// NewLane makes streams and memory of one direction.
func (d *Device) NewLane(o engine.LaneOptions) (engine.Lane, error) {
	l := &lane{stage: o.StageBytes}
	r := C.mg_lane_open(d.d, C.int(o.SlotCount), C.uint64_t(o.StageBytes), C.int(o.PieceCount), C.int(o.FragmentCount),
		C.int(o.CopyCount), C.int(o.BlockCount), &l.l)
	if r.code != 0 {
		return nil, failed(r, base.ErrFault, "making the streams of a GPU")
	}
	for i := range o.SlotCount {
		var s C.mg_slot
		C.mg_lane_slot(l.l, C.int(i), &s)
		l.slots = append(l.slots, engine.Slot{
			StageAddress: uint64(s.stage),
			Pieces:       unsafe.Slice((*engine.Piece)(s.pieces), o.PieceCount),
			Fragments:    unsafe.Slice((*engine.Fragment)(s.fragments), o.FragmentCount),
			Copies:       unsafe.Slice((*engine.Copy)(unsafe.Pointer(s.copies)), o.CopyCount),
			Hashes:       unsafe.Slice((*uint64)(s.hashes), o.PieceCount),
			Tails:        unsafe.Slice((*byte)(s.tails), engine.TailCount*engine.TailBytes),
		})
	}
	return l, nil
}

// The kernels and the shim have these structs too.
var (
	_ [C.MG_PIECE_BYTES]byte           = [unsafe.Sizeof(engine.Piece{})]byte{}
	_ [C.MG_FRAGMENT_BYTES]byte        = [unsafe.Sizeof(engine.Fragment{})]byte{}
	_ [unsafe.Sizeof(C.mg_copy{})]byte = [unsafe.Sizeof(engine.Copy{})]byte{}
	_ [C.MG_TAIL_BYTES]byte            = [engine.TailBytes]byte{}
	_ [C.MG_TAILS]byte                 = [engine.TailCount]byte{}
)

func (l *lane) Bind() error {
	return failed(C.mg_lane_bind(l.l), base.ErrFault, "taking the GPU's context")
}

func (l *lane) Slot(i int) *engine.Slot { return &l.slots[i] }

func (l *lane) Bounce(i int) ([]byte, error) {
	var p unsafe.Pointer
	if r := C.mg_lane_bounce(l.l, C.int(i), &p); r.code != 0 {
		return nil, failed(r, base.ErrLimit, "making a bounce buffer")
	}
	return unsafe.Slice((*byte)(p), l.stage), nil
}

func (l *lane) Launch(i int, a *engine.Launch) (bool, error) {
	var started C.int
	r := C.mg_lane_launch(l.l, C.int(i), C.int(a.Direction), C.int(a.Way), C.uint64_t(a.After), C.int(a.Pieces),
		C.int(a.Copies), &started)
	return started != 0, failed(r, base.ErrFault, "starting a copy")
}

func (l *lane) Wait(i int, limit time.Duration) (bool, error) {
	var done C.int
	r := C.mg_lane_wait(l.l, C.int(i), C.int(limit.Microseconds()), &done)
	if r.code != 0 {
		return false, waitFailed(int(r.code), C.GoString(r.call), C.GoString(C.mg_name(r.code)))
	}
	return done != 0, nil
}

func (l *lane) Settle(i int) bool { return C.mg_lane_settle(l.l, C.int(i)) != 0 }

func (l *lane) Wake() { C.mg_lane_wake(l.l) }

func (l *lane) Close() error {
	return failed(C.mg_lane_close(l.l), base.ErrFault, "closing the streams of a GPU")
}

// Alloc takes device memory, for benchmarks. Ownership: the caller's, until Release.
func (d *Device) Alloc(size uint64) (uint64, error) {
	var at C.uint64_t
	if r := C.mg_alloc(d.d, C.size_t(size), &at); r.code != 0 {
		return 0, failed(r, base.ErrLimit, "taking device memory")
	}
	return uint64(at), nil
}

// Release gives it back.
func (d *Device) Release(address uint64) error {
	return failed(C.mg_release(d.d, C.uint64_t(address)), base.ErrFault, "giving device memory back")
}

// CopyNow makes one copy between registered memory and the device, waits for it and says
// how many seconds it took: what benchmarks compare with.
func (d *Device) CopyNow(dir engine.Direction, address uint64, host []byte) (float64, error) {
	var seconds C.double
	r := C.mg_copy_now(d.d, C.int(dir), C.uint64_t(address), unsafe.Pointer(unsafe.SliceData(host)), C.size_t(len(host)), &seconds)
	return float64(seconds), failed(r, base.ErrFault, "copying")
}
