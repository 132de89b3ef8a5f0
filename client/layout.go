package client

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

// layout is a registered Layout with what is derived from it.
type layout struct {
	Layout
	device     *device // whose memory it is; nil: of the host
	deviceRuns engine.Layout
	blockBytes uint64
	runCount   int // a block
	users      sync.WaitGroup
}

// RegisterLayout makes a layout known to transfers. Errors: ErrInvalid.
func (c *Client) RegisterLayout(l Layout) (LayoutID, error) {
	if err := c.enter(context.Background()); err != nil {
		return 0, err
	}
	defer c.leave()
	own, err := newLayout(l)
	if err != nil {
		return 0, err
	}
	return c.addLayout(own), nil
}

func (c *Client) addLayout(l *layout) LayoutID {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.lastLayout++
	c.mu.layouts[c.mu.lastLayout] = l
	return c.mu.lastLayout
}

// newLayout checks a layout and takes a copy of it.
func newLayout(l Layout) (*layout, error) {
	own := &layout{Layout: Layout{BlockCount: l.BlockCount, Layers: make([]LayerLayout, len(l.Layers))}}
	if len(l.Layers) == 0 || l.BlockCount == 0 {
		return nil, fmt.Errorf("%w: layout with %d layers and %d blocks", base.ErrInvalid, len(l.Layers), l.BlockCount)
	}
	for i, layer := range l.Layers {
		if layer.Base == 0 || layer.RunBytes == 0 || layer.RunBytes > math.MaxInt64/2 || len(layer.RunOffsets) == 0 {
			return nil, fmt.Errorf("%w: layer %d: base %#x, %d runs of %d bytes", base.ErrInvalid, i, layer.Base, len(layer.RunOffsets), layer.RunBytes)
		}
		if layer.BlockStrideBytes == 0 && l.BlockCount > 1 {
			return nil, fmt.Errorf("%w: layer %d: stride 0 with %d blocks", base.ErrInvalid, i, l.BlockCount)
		}
		own.Layers[i] = layer
		own.Layers[i].RunOffsets = append([]int64(nil), layer.RunOffsets...)
		own.blockBytes += layer.RunBytes * uint64(len(layer.RunOffsets))
		own.runCount += len(layer.RunOffsets)
	}
	return own, nil
}

// UnregisterLayout forgets a layout. It returns after the last transfer that uses it.
// Errors: ErrNotFound.
func (c *Client) UnregisterLayout(id LayoutID) error {
	c.mu.Lock()
	l := c.mu.layouts[id]
	delete(c.mu.layouts, id)
	c.mu.Unlock()
	if l == nil {
		return fmt.Errorf("%w: layout %d", base.ErrNotFound, id)
	}
	l.users.Wait()
	return nil
}

// useLayout takes a layout for the time of a transfer, nil when it is unknown; done gives
// it back.
func (c *Client) useLayout(id LayoutID) *layout {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.mu.layouts[id]
	if l != nil {
		l.users.Add(1)
	}
	return l
}

// sizeOf returns the bytes of blocks. Errors: ErrInvalid for a block out of range.
func (l *layout) sizeOf(blocks []uint32) (uint64, error) {
	for _, b := range blocks {
		if b >= l.BlockCount {
			return 0, fmt.Errorf("%w: block %d of a layout with %d", base.ErrInvalid, b, l.BlockCount)
		}
	}
	return l.blockBytes * uint64(len(blocks)), nil
}

// runs calls use for every run of blocks in their order in an object: [block][layer][run].
func (l *layout) runs(blocks []uint32, use func(run []byte)) {
	for _, b := range blocks {
		for i := range l.Layers {
			layer := &l.Layers[i]
			at := layer.Base + uintptr(int64(b)*layer.BlockStrideBytes)
			for _, off := range layer.RunOffsets {
				use(bytesAt(at+uintptr(off), layer.RunBytes))
			}
		}
	}
}
