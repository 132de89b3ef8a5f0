package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	fakegpu "github.com/xcena-dev/maru/internal/gpu/fake"
	"github.com/xcena-dev/maru/internal/obs/obstest"
)

// deviceClient is a client with one device layout, whose memory is registered.
type deviceClient struct {
	*Client
	t      *testing.T
	gpu    *fakegpu.Device
	cache  *gpuCache
	layout LayoutID
	size   int
}

const deviceRun = 16 << 10

func newDeviceClient(t *testing.T, f *fake, gpu *fakegpu.Device, change func(*Config)) *deviceClient {
	t.Helper()
	cache := newGPUCache(gpu, 4, 32, deviceRun, true)
	size := len(cache.object([]uint32{0, 1}))
	cfg := gpuConfig(f, gpu, size, deviceRun)
	cfg.DeviceCopy = engine.AlwaysStaged // nothing is measured beside the faults, which count launches
	if change != nil {
		change(&cfg)
	}
	d := &deviceClient{Client: open(t, cfg), t: t, gpu: gpu, cache: cache, size: size}
	var err error
	if d.layout, err = d.RegisterDeviceLayout(cache.layout, 0); err != nil {
		t.Fatal(err)
	}
	return d
}

func (d *deviceClient) store(n int, blocks ...uint32) base.Code {
	d.t.Helper()
	codes := make([]base.Code, 1)
	if err := d.Store(d.t.Context(), []StoreItem{{Key: key(n), Layout: d.layout, Blocks: blocks}}, codes); err != nil {
		d.t.Fatal(err)
	}
	return codes[0]
}

func (d *deviceClient) load(n int, blocks ...uint32) base.Code {
	d.t.Helper()
	codes := make([]base.Code, 1)
	if err := d.Load(d.t.Context(), []LoadItem{{Key: key(n), Layout: d.layout, Blocks: blocks}}, codes); err != nil {
		d.t.Fatal(err)
	}
	return codes[0]
}

// TestDeviceWrongBytes: what changes on its way to the device is no hit, and its object
// goes; what changes on its way to the page is found by the next reader.
func TestDeviceWrongBytes(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	var hit atomic.Uint32 // the engine measures in the background, and asks too
	hit.Store(9)
	gpu.Faults.Moved = func(d engine.Direction, stage []byte) {
		if uint32(d) == hit.Load() {
			stage[5] ^= 1
		}
	}
	d := newDeviceClient(t, f, gpu, nil)
	registered(t, d.Client)
	want(t, "store", d.store(1, 3, 4), base.CodeOK)
	want(t, "load", d.load(1, 8, 9), base.CodeOK)
	hit.Store(uint32(engine.Load))
	want(t, "load of changed bytes", d.load(1, 8, 9), base.CodeCorrupt)
	hit.Store(uint32(engine.Save))
	want(t, "store", d.store(2, 3, 4), base.CodeOK)
	hit.Store(9)
	want(t, "load of what was changed in the store", d.load(2, 8, 9), base.CodeCorrupt)
	if s := d.Stats(); s.Corrupt != 2 {
		t.Errorf("%d corrupt", s.Corrupt)
	}
}

// TestDeviceLost: items in flight fail, pages that may still be written are quarantined
// and stay mapped, everything later is refused at once; host copies go on.
func TestDeviceLost(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	d := newDeviceClient(t, f, gpu, nil)
	registered(t, d.Client)
	want(t, "store", d.store(1, 1, 2), base.CodeOK)
	release := gpu.Hold(7)
	job, err := d.SubmitStoreAfter([]StoreItem{{Key: key(2), Layout: d.layout, Blocks: []uint32{3, 4}}}, 7)
	if err != nil {
		t.Fatal(err)
	}
	before := gpu.Launches()
	eventually(t, "the copy is in flight", func() bool { return gpu.Launches() > before || gpu.Launches() == 2 })
	gpu.Lose()
	waitJob(t, d.Client, job, 1, base.CodeFault)
	if s := d.Stats(); s.PagesQuarantined != 1 {
		t.Errorf("%d pages are quarantined", s.PagesQuarantined)
	}
	free := d.Stats().PagesFree
	want(t, "store after the loss", d.store(3, 5, 6), base.CodeFault)
	want(t, "load after the loss", d.load(1, 5, 6), base.CodeMiss)
	if s := d.Stats(); s.PagesFree != free || s.PagesQuarantined != 1 {
		t.Errorf("%d pages free, %d before; %d quarantined", s.PagesFree, free, s.PagesQuarantined)
	}
	want(t, "load on the host", loadOne(t, d.Client, 1, make([]byte, d.size)), base.CodeOK)
	if _, err := d.RegisterDeviceLayout(d.cache.layout, 0); !errors.Is(err, base.ErrFault) {
		t.Errorf("a layout on a lost device: %v", err)
	}
	m := d.region(d.OwnedRegions()[0])
	release()
	_ = d.Close(context.Background())
	if m.mapping.Bytes() == nil {
		t.Error("memory that the device may still write to was unmapped")
	}
	_ = m.mapping.Unmap() // what the end of the process does
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.mu.closes); n != 1 || !f.mu.closes[0].GetLeft() {
		t.Errorf("the session closed with %v", f.mu.closes)
	}
}

// TestDeviceRefusedLaunch: a copy that was not started leaves its page free.
func TestDeviceRefusedLaunch(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	refuse := false
	gpu.Faults.Launch = func(int) (bool, error) {
		if refuse {
			return false, fmt.Errorf("%w: injected", base.ErrFault)
		}
		return true, nil
	}
	d := newDeviceClient(t, f, gpu, nil)
	want(t, "store", d.store(1, 1, 2), base.CodeOK)
	free := d.Stats().PagesFree
	refuse = true
	want(t, "store", d.store(2, 1, 2), base.CodeFault)
	want(t, "load", d.load(1, 5, 6), base.CodeMiss)
	if s := d.Stats(); s.PagesFree != free || s.PagesQuarantined != 0 {
		t.Errorf("%d free of %d, %d quarantined", s.PagesFree, free, s.PagesQuarantined)
	}
	refuse = false
	want(t, "store", d.store(2, 1, 2), base.CodeOK)
	want(t, "load", d.load(2, 5, 6), base.CodeOK)
	if !bytes.Equal(d.cache.object([]uint32{5, 6}), d.cache.object([]uint32{1, 2})) {
		t.Error("bytes differ")
	}
}

// TestDeviceBounce: memory that the driver refuses is said once and works.
func TestDeviceBounce(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	gpu.Faults.Register = func([]byte) error { return fmt.Errorf("%w: a file on a disk", base.ErrUnsupported) }
	log := &obstest.Text{}
	d := newDeviceClient(t, f, gpu, func(c *Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
		c.CPUBytes, c.SegmentBytes = 8<<20, 2<<20
	})
	eventually(t, "it is refused", func() bool { return strings.Contains(log.String(), "bounce buffer") })
	time.Sleep(20 * time.Millisecond)
	for i := range 20 { // fills the cpu segments and goes on in the cxl region
		want(t, "store", d.store(100+i, uint32(i), uint32(i+1)), base.CodeOK)
		want(t, "load", d.load(100+i, 30, 31), base.CodeOK)
		if !bytes.Equal(d.cache.object([]uint32{30, 31}), d.cache.object([]uint32{uint32(i), uint32(i + 1)})) {
			t.Fatal("bytes differ")
		}
	}
	if n := strings.Count(log.String(), "bounce buffer"); n != 1 {
		t.Errorf("said %d times", n)
	}
	if _, counts, ok := d.DeviceInfo(); !ok || counts.RegisteredBytes != 0 || counts.RefusedBytes == 0 || counts.BouncedBytes == 0 {
		t.Errorf("%+v", counts)
	}
	if err := errors.Join(d.Close(context.Background()), gpu.Idle()); err != nil {
		t.Error(err)
	}
}

// TestDeviceOrder: jobs wait for the stream, the other direction and the host do not; a
// stream that is being captured, and one without a device, are refused.
func TestDeviceOrder(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	d := newDeviceClient(t, f, gpu, nil)
	want(t, "store", d.store(1, 1, 2), base.CodeOK)
	release := gpu.Hold(3)
	var held []JobID
	for i := range 4 {
		job, err := d.SubmitStoreAfter([]StoreItem{{Key: key(10 + i), Layout: d.layout, Blocks: []uint32{7, 8}}}, 3)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, job)
	}
	want(t, "load meanwhile", d.load(1, 5, 6), base.CodeOK)
	want(t, "host meanwhile", storeOne(t, d.Client, 2, value(1, d.size)), base.CodeOK)
	codes := make([]base.Code, 1)
	for _, job := range held {
		if done, err := d.JobResult(job, codes); done || err != nil {
			t.Fatal("a job ended before its stream", err)
		}
	}
	for i := range d.cache.layers {
		clear(d.cache.layers[i][7*deviceRun : 9*deviceRun]) // what the engine wrote before the event
	}
	release()
	for i, job := range held {
		eventually(t, "the job ends", func() bool {
			done, err := d.JobResult(job, codes)
			return done && err == nil
		})
		want(t, "store", codes[0], base.CodeOK)
		got := make([]byte, d.size)
		want(t, "load", loadOne(t, d.Client, 10+i, got), base.CodeOK)
		if !bytes.Equal(got, d.cache.object([]uint32{7, 8})) {
			t.Fatal("a store did not wait for its stream")
		}
	}
	gpu.Capture(4, true)
	if _, err := d.SubmitStoreAfter([]StoreItem{{Key: key(30), Layout: d.layout, Blocks: []uint32{7, 8}}}, 4); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a captured stream: %v", err)
	}
	if err := d.LoadAfter(t.Context(), []LoadItem{{Key: key(1), Layout: d.layout, Blocks: []uint32{7, 8}}}, codes, 4); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a captured stream: %v", err)
	}
	if err := d.StoreAfter(t.Context(), []StoreItem{{Key: key(31), Runs: [][]byte{value(1, d.size)}}}, codes, 4); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a stream and host memory: %v", err)
	}
	if err := errors.Join(d.Close(context.Background()), gpu.Idle()); err != nil {
		t.Error(err)
	}
}

func TestDeviceLayoutIsChecked(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	d := newDeviceClient(t, f, gpu, nil)
	mem := uintptr(fakegpu.Address(d.cache.layers[0]))
	good := LayerLayout{Base: mem, BlockStrideBytes: 4096, RunBytes: 4096, RunOffsets: []int64{0}}
	for name, x := range map[string]struct {
		change func(*LayerLayout)
		want   error
	}{
		"base":      {func(y *LayerLayout) { y.Base += 8 }, base.ErrUnsupported},
		"stride":    {func(y *LayerLayout) { y.BlockStrideBytes = 4104 }, base.ErrUnsupported},
		"run":       {func(y *LayerLayout) { y.RunBytes = 4088 }, base.ErrUnsupported},
		"offset":    {func(y *LayerLayout) { y.RunOffsets = []int64{8} }, base.ErrUnsupported},
		"behind":    {func(y *LayerLayout) { y.RunOffsets = []int64{0, 1 << 40} }, base.ErrInvalid},
		"before":    {func(y *LayerLayout) { y.RunOffsets = []int64{-4096} }, base.ErrInvalid},
		"stride up": {func(y *LayerLayout) { y.BlockStrideBytes = 1 << 30 }, base.ErrInvalid},
		"elsewhere": {func(y *LayerLayout) { y.Base = address(make([]byte, 1<<16)) &^ 15 }, base.ErrInvalid},
	} {
		y := good
		x.change(&y)
		if _, err := d.RegisterDeviceLayout(Layout{BlockCount: 8, Layers: []LayerLayout{y}}, 0); !errors.Is(err, x.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := d.RegisterDeviceLayout(Layout{BlockCount: 8, Layers: []LayerLayout{good}}, 0); err != nil {
		t.Error(err)
	}
	if _, err := d.RegisterDeviceLayout(Layout{BlockCount: 8, Layers: []LayerLayout{good}}, 1); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a second device: %v", err)
	}
	c := open(t, cxlConfig(f))
	if _, err := c.RegisterDeviceLayout(Layout{BlockCount: 8, Layers: []LayerLayout{good}}, 0); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("without a driver: %v", err)
	}
}

// TestDeviceUnregistersBeforeUnmap: a region that goes is unregistered first.
func TestDeviceUnregistersBeforeUnmap(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	d := newDeviceClient(t, f, gpu, nil)
	registered(t, d.Client)
	id := d.OwnedRegions()[0]
	n := gpu.RegisteredCount()
	if n == 0 {
		t.Fatal("nothing is registered")
	}
	f.mu.Lock()
	f.mu.sessions[d.Session()].tell(drainEvent(f, id))
	f.mu.Unlock()
	eventually(t, "the region goes", func() bool { return d.region(id) == nil })
	eventually(t, "it is unregistered", func() bool { return gpu.RegisteredCount() < n })
	if err := errors.Join(d.Close(context.Background()), gpu.Idle()); err != nil {
		t.Error(err)
	}
}

// TestDeviceCloseIsBounded: a job behind a stream that does not get on keeps its memory,
// not the caller.
func TestDeviceCloseIsBounded(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	d := newDeviceClient(t, f, gpu, nil)
	registered(t, d.Client)
	m := d.region(d.OwnedRegions()[0])
	release := gpu.Hold(3)
	if _, err := d.SubmitStoreAfter([]StoreItem{{Key: key(1), Layout: d.layout, Blocks: []uint32{7, 8}}}, 3); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the copy waits", func() bool { return gpu.Launches() > 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := d.Close(ctx); !errors.Is(err, base.ErrTimeout) {
		t.Fatal(err)
	}
	f.mu.Lock()
	if n := len(f.mu.closes); n != 1 || !f.mu.closes[0].GetLeft() {
		t.Errorf("the session closed with %v", f.mu.closes)
	}
	f.mu.Unlock()
	if m.mapping.Bytes() == nil || gpu.RegisteredCount() == 0 {
		t.Error("memory under a copy was unmapped or unregistered")
	}
	// What the end of the process does.
	release()
	eventually(t, "the job ends", func() bool { return d.transfers.drain(t.Context()) })
	d.transfers.stop()
	if !d.closeDevice() {
		t.Error("the device does not close")
	}
	if err := errors.Join(m.mapping.Unmap(), gpu.Idle()); err != nil {
		t.Error(err)
	}
}

// TestDeviceFaultingPage: a bounced page whose memory faults is quarantined alone.
func TestDeviceFaultingPage(t *testing.T) {
	f, gpu := startFake(t), fakegpu.New()
	gpu.Faults.Register = func([]byte) error { return fmt.Errorf("%w: a file on a disk", base.ErrUnsupported) }
	d := newDeviceClient(t, f, gpu, nil)
	m := d.region(d.OwnedRegions()[0])
	eventually(t, "it is refused", func() bool { _, n, _ := d.DeviceInfo(); return n.RefusedBytes > 0 })
	want(t, "store", d.store(1, 1, 2), base.CodeOK)
	want(t, "store", d.store(2, 1, 2), base.CodeOK)
	// The file is cut behind the first page.
	if err := os.Truncate(f.path, int64(2<<20+m.info.PageBytes)&^4095); err != nil {
		t.Fatal(err)
	}
	codes := make([]base.Code, 2)
	load := []LoadItem{{Key: key(1), Layout: d.layout, Blocks: []uint32{5, 6}}, {Key: key(2), Layout: d.layout, Blocks: []uint32{7, 8}}}
	if err := d.Load(t.Context(), load, codes); err != nil {
		t.Fatal(err)
	}
	if codes[0] != base.CodeOK || codes[1] != base.CodeFault {
		t.Errorf("%v", codes)
	}
	quarantined := d.Stats().PagesQuarantined
	want(t, "store into a page that faults", d.store(3, 1, 2), base.CodeFault)
	if n := d.Stats().PagesQuarantined; n != quarantined+1 {
		t.Errorf("%d pages are quarantined, %d before", n, quarantined)
	}
	if _, n, _ := d.DeviceInfo(); n.Lost {
		t.Error("the device is lost")
	}
}
