package demo

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/client"
)

// arena is a worker's stand-in for an engine's KV tensors: one tensor a layer,
// [block][run], outside the Go heap so that it has an address.
type arena struct {
	shape  Shape
	blocks int
	mem    []byte
}

func newArena(s Shape, blocks int) (*arena, error) {
	mem, err := unix.Mmap(-1, 0, s.Layers*blocks*s.RunBytes(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("demo: map %d bytes for KV tensors: %w", s.Layers*blocks*s.RunBytes(), err)
	}
	return &arena{shape: s, blocks: blocks, mem: mem}, nil
}

func (a *arena) close() error { return unix.Munmap(a.mem) }

// run is block b of a layer.
func (a *arena) run(layer, b int) []byte {
	at := (layer*a.blocks + b) * a.shape.RunBytes()
	return a.mem[at : at+a.shape.RunBytes()]
}

// layout describes the tensors to the client.
func (a *arena) layout() client.Layout {
	l := client.Layout{BlockCount: uint32(a.blocks)} //nolint:gosec // a small count
	for layer := range a.shape.Layers {
		l.Layers = append(l.Layers, client.LayerLayout{
			Base:             uintptr(unsafe.Pointer(&a.run(layer, 0)[0])),
			BlockStrideBytes: int64(a.shape.RunBytes()),
			RunOffsets:       []int64{0},
			RunBytes:         uint64(a.shape.RunBytes()), //nolint:gosec // positive
		})
	}
	return l
}
