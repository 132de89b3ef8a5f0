package cabi_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"testing"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
	fakegpu "github.com/xcena-dev/maru/internal/gpu/fake"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/up"
)

// TestDeviceEndToEnd: two engines with real clients at a real server, one with tensors on
// a fake GPU and one in host memory, load what the other has stored.
func TestDeviceEndToEnd(t *testing.T) {
	u, err := up.Start(t.Context(), up.Options{Listen: "127.0.0.1:0", CXLBytes: 32 << 20, CPUBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := u.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	gpu := fakegpu.New()
	l := cabi.NewLibrary(func(ctx context.Context, cfg client.Config) (cabi.Client, error) {
		cfg.Devices = fakegpu.Driver{Device: gpu}
		return cabi.OpenClient(ctx, cfg)
	})
	const runBytes, blocks, piece = 4096, 16, 1024
	value := uint64(4 * 2 * runBytes) // four blocks of two layers
	ns, err := (&keys.Namespace{Format: keys.FormatVersion, Weights: "w", Engine: "test", RunBytes: []uint64{runBytes}, PieceBytes: piece}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	openOne := func() uint64 {
		config, err := json.Marshal(map[string]any{
			"server_address": u.Addresses().Server, "namespace_hex": hex.EncodeToString(ns), "value_bytes": value, "piece_bytes": piece,
			"region_bytes": 4 << 20, "cxl_bytes": 8 << 20, "device_staging_bytes": 4 << 20,
		})
		if err != nil {
			t.Fatal(err)
		}
		h, err := l.Open(config)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	device, host := openOne(), openOne()
	tensors := map[uint64][]byte{device: gpu.Alloc(2 * blocks * runBytes), host: memory(t, 2*blocks*runBytes)}
	layouts := map[uint64]uint64{}
	for h, mem := range tensors {
		layers := []cabi.Layer{
			{Base: run(mem).Data, BlockStrideBytes: runBytes, RunBytes: runBytes, RunCount: 1},
			{Base: run(mem).Data + blocks*runBytes, BlockStrideBytes: runBytes, RunBytes: runBytes, RunCount: 1},
		}
		if h == device {
			layouts[h], err = l.RegisterDeviceLayout(h, 0, layers, []int64{0, 0}, blocks)
		} else {
			layouts[h], err = l.RegisterLayout(h, layers, []int64{0, 0}, blocks)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	codes := make([]base.Code, 2)
	for i, way := range [][2]uint64{{device, host}, {host, device}} {
		from, to := way[0], way[1]
		for k := range tensors[from] {
			tensors[from][k] = byte(k*7 + k>>8 + i)
		}
		clear(tensors[to])
		var ks []byte
		for k := range 2 {
			sum := sha256.Sum256([]byte{byte(i), byte(k)})
			ks = append(append(ks, sum[:28]...), 0, 0, 0, 0)
		}
		b := &cabi.Batch{Keys: ks, Ends: []uint64{4, 8}, Layout: layouts[from], Blocks: []uint32{0, 1, 2, 3, 9, 4, 15, 5}}
		if from == device {
			b.Stream = 3
		}
		if err := l.Store(from, b, codes, 0); err != nil || codes[0] != base.CodeOK || codes[1] != base.CodeOK {
			t.Fatalf("store: %v %v", codes, err)
		}
		b.Layout, b.Stream = layouts[to], 0
		if err := l.Load(to, b, codes, 0); err != nil || codes[0] != base.CodeOK || codes[1] != base.CodeOK {
			t.Fatalf("load: %v %v", codes, err)
		}
		for _, block := range b.Blocks {
			for layer := range 2 {
				at := layer*blocks*runBytes + int(block)*runBytes
				if !bytes.Equal(tensors[from][at:at+runBytes], tensors[to][at:at+runBytes]) {
					t.Fatalf("block %d of layer %d differs", block, layer)
				}
			}
		}
	}
	for _, h := range []uint64{device, host} {
		if err := l.Close(h, 0); err != nil {
			t.Error(err)
		}
	}
	if err := gpu.Idle(); err != nil {
		t.Error(err)
	}
}
