package client

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	fakegpu "github.com/xcena-dev/maru/internal/gpu/fake"
)

// gpuCache is an engine cache on a fake GPU: per layer one tensor [2, blocks, run].
type gpuCache struct {
	layers [][]byte
	layout Layout
	run    int
	blocks int
}

func newGPUCache(d *fakegpu.Device, layers, blocks, run int, fill bool) *gpuCache {
	k := &gpuCache{run: run, blocks: blocks, layout: Layout{BlockCount: uint32(blocks)}}
	for i := range layers {
		mem := d.Alloc(2 * blocks * run)
		if fill {
			copy(mem, value(i+1, len(mem)))
		}
		k.layers = append(k.layers, mem)
		k.layout.Layers = append(k.layout.Layers, LayerLayout{
			Base: uintptr(fakegpu.Address(mem)), BlockStrideBytes: int64(run), RunBytes: uint64(run),
			RunOffsets: []int64{0, int64(blocks * run)},
		})
	}
	return k
}

func (k *gpuCache) object(blocks []uint32) []byte {
	var out []byte
	for _, b := range blocks {
		for i := range k.layers {
			for _, off := range []int{0, k.blocks * k.run} {
				at := int(b)*k.run + off
				out = append(out, k.layers[i][at:at+k.run]...)
			}
		}
	}
	return out
}

func gpuConfig(f *fake, d *fakegpu.Device, valueBytes, piece int) Config {
	cfg := cxlConfig(f)
	cfg.Namespace, cfg.Opaque, cfg.PageBytes = engineNamespace, false, 0
	cfg.ValueBytes, cfg.PieceBytes = uint64(valueBytes), uint32(piece)
	cfg.Devices = fakegpu.Driver{Device: d}
	cfg.DeviceStagingBytes, cfg.RegionBytes, cfg.CXLBytes = 4<<20, 8<<20, 64<<20
	return cfg
}

// registered waits until the client's memory is registered.
func registered(t *testing.T, c *Client) {
	t.Helper()
	for range 2000 {
		done := true
		for _, m := range *c.maps.Load() {
			done = done && m.registration.Load() != nil
		}
		if done {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("memory is not registered")
}

func TestDeviceTransfers(t *testing.T) {
	for _, x := range []struct{ run, piece int }{{16 << 10, 16 << 10}, {4096, 16 << 10}, {16 << 10, 4096}, {1536, 512}, {48, 768}} {
		t.Run(fmt.Sprintf("run=%d/piece=%d", x.run, x.piece), func(t *testing.T) {
			f, d := startFake(t), fakegpu.New()
			blocks := []uint32{3, 0, 15, 7}
			src := newGPUCache(d, 3, 16, x.run, true)
			size := len(src.object(blocks))
			cfg := gpuConfig(f, d, size, x.piece)
			c := open(t, cfg)
			dst := newGPUCache(d, 3, 16, x.run, false)
			from, err := c.RegisterDeviceLayout(src.layout, 0)
			if err != nil {
				t.Fatal(err)
			}
			to, err := c.RegisterDeviceLayout(dst.layout, 0)
			if err != nil {
				t.Fatal(err)
			}
			codes := make([]base.Code, 2)
			if err := c.StoreAfter(t.Context(), []StoreItem{{Key: key(1), Layout: from, Blocks: blocks}}, codes, 5); err != nil {
				t.Fatal(err)
			}
			want(t, "store", codes[0], base.CodeOK)
			whole := make([]byte, size)
			want(t, "load on the host", loadOne(t, c, 1, whole), base.CodeOK)
			if !bytes.Equal(whole, src.object(blocks)) {
				t.Fatal("the object is not [block][layer][run]")
			}
			registered(t, c)
			load := []LoadItem{{Key: key(1), Layout: to, Blocks: []uint32{1, 2}, OffsetBytes: uint64(size / 2)}}
			if err := c.LoadAfter(t.Context(), load, codes, 5); err != nil {
				t.Fatal(err)
			}
			want(t, "load", codes[0], base.CodeOK)
			if !bytes.Equal(dst.object([]uint32{1, 2}), src.object(blocks[2:])) {
				t.Fatal("a part differs")
			}
			if !bytes.Equal(dst.object([]uint32{0, 3}), make([]byte, size/2)) {
				t.Fatal("blocks were written that were not named")
			}
			// Stored by the host, loaded by the device.
			want(t, "store on the host", storeOne(t, c, 2, value(9, size)), base.CodeOK)
			load = []LoadItem{{Key: key(2), Layout: to, Blocks: blocks}}
			if err := c.LoadAfter(t.Context(), load, codes, 0); err != nil {
				t.Fatal(err)
			}
			want(t, "load", codes[0], base.CodeOK)
			if !bytes.Equal(dst.object(blocks), value(9, size)) {
				t.Fatal("an object of the host differs on the device")
			}
			if err := c.Close(context.Background()); err != nil {
				t.Fatal(err)
			}
			if err := d.Idle(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// A layout has the way of its runs measured; another one of the same runs shares it.
func TestDeviceWayIsMeasured(t *testing.T) {
	f, d := startFake(t), fakegpu.New()
	d.Faults.Cost = func(a *engine.Launch) time.Duration {
		if a.Way == engine.Staged {
			return 20 * time.Millisecond
		}
		return 0
	}
	const run = 16 << 10
	cache := newGPUCache(d, 3, 16, run, true)
	blocks := []uint32{3, 0}
	c := open(t, gpuConfig(f, d, len(cache.object(blocks)), run))
	var ids [2]LayoutID
	for i := range ids {
		var err error
		if ids[i], err = c.RegisterDeviceLayout(cache.layout, 0); err != nil {
			t.Fatal(err)
		}
	}
	c.mu.Lock()
	choice, other := c.mu.layouts[ids[0]].deviceRuns.Choice, c.mu.layouts[ids[1]].deviceRuns.Choice
	c.mu.Unlock()
	if choice == nil || choice != other {
		t.Fatalf("choices %p and %p", choice, other)
	}
	for _, dir := range []engine.Direction{engine.Save, engine.Load} {
		eventually(t, "the choice", func() bool { way, ok := choice.Way(dir); return ok && way == engine.Direct })
	}
	codes := make([]base.Code, 1)
	if err := c.StoreAfter(t.Context(), []StoreItem{{Key: key(1), Layout: ids[0], Blocks: blocks}}, codes, 5); err != nil {
		t.Fatal(err)
	}
	want(t, "store", codes[0], base.CodeOK)
	got := make([]byte, len(cache.object(blocks)))
	want(t, "load", loadOne(t, c, 1, got), base.CodeOK)
	if !bytes.Equal(got, cache.object(blocks)) {
		t.Error("bytes differ")
	}
}
