package cabi_test

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/cabi/cabitest"
	"github.com/xcena-dev/maru/internal/hot"
)

// memory is what a caller of the C ABI has: not of the Go heap.
func memory(t *testing.T, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func run(b []byte) cabi.Run {
	return cabi.Run{Data: uintptr(unsafe.Pointer(unsafe.SliceData(b))), Bytes: uint64(len(b))}
}

func TestTransfers(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, map[string]any{"queue_jobs": 2})
	mem := memory(t, 1<<16)
	copy(mem, "first object")
	copy(mem[100:], "second")
	ks := append(key(t, "a"), key(t, "b")...)
	codes := make([]base.Code, 2)
	store := &cabi.Batch{Keys: ks, Ends: []uint64{2, 3}, Runs: []cabi.Run{run(mem[:6]), run(mem[6:12]), run(mem[100:106])}}
	if err := l.Store(h, store, codes, 0); err != nil || codes[0] != base.CodeOK || codes[1] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	load := &cabi.Batch{Keys: ks, Ends: []uint64{1, 2}, Runs: []cabi.Run{run(mem[200:206]), run(mem[300:303])}, Offsets: []uint64{6, 3}}
	if err := l.Load(h, load, codes, 0); err != nil || string(mem[200:206]) != "object" || string(mem[300:303]) != "ond" {
		t.Fatalf("%v %v %q", codes, err, mem[200:303])
	}

	fd, err := l.EventFD(h)
	if err != nil {
		t.Fatal(err)
	}
	readable := func() bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	}
	if readable() {
		t.Error("readable without a job")
	}
	clear(mem[200:400])
	job, err := l.SubmitLoad(h, load)
	if err != nil || job>>56 != uint64(cabi.KindJob) {
		t.Fatalf("%#x %v", job, err)
	}
	other, err := l.SubmitStore(h, store)
	if err != nil || other == job {
		t.Fatalf("%#x %v", other, err)
	}
	if _, err := l.SubmitStore(h, store); !errors.Is(err, base.ErrBusy) {
		t.Errorf("a full queue: %v", err)
	}
	if !readable() {
		t.Error("not readable although jobs are done")
	}
	jobs := make([]uint64, 4)
	if n, err := l.Completed(h, jobs); n != 2 || err != nil || jobs[0] != job || jobs[1] != other {
		t.Fatalf("%#x %d %v", jobs, n, err)
	}
	if readable() {
		t.Error("readable although every job was handed out")
	}
	if err := l.JobResult(h, job, codes[:1]); !errors.Is(err, base.ErrLimit) {
		t.Errorf("short: %v", err)
	}
	if err := l.JobResult(h, job, codes); err != nil || string(mem[200:206]) != "object" {
		t.Errorf("%v", err)
	}
	if err := l.JobResult(h, job, codes); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("asked twice: %v", err)
	}
	if err := l.JobResult(h, other, codes); err != nil || codes[0] != base.CodeAlreadyStored {
		t.Errorf("%v %v", codes, err)
	}
}

func TestLookupJobs(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	ks := append(key(t, "here"), key(t, "not here")...)
	page, codes := make([]cabi.Page, 1), make([]base.Code, 3)
	if _, err := l.Alloc(h, page, 0); err != nil {
		t.Fatal(err)
	}
	if err := l.Commit(h, ks[:base.KeyBytes], nil, []uint32{page[0].Region}, []uint32{page[0].Index}, []uint64{5}, codes[:1], 0); err != nil {
		t.Fatal(err)
	}
	job, err := l.SubmitLookup(h, ks, 1, 1, 7, 100)
	if err != nil || job>>56 != uint64(cabi.KindJob) {
		t.Fatalf("%#x %v", job, err)
	}
	if n, err := l.Completed(h, make([]uint64, 4)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if err := l.JobResult(h, job, codes[:2]); !errors.Is(err, base.ErrLimit) {
		t.Errorf("two codes of three: %v", err)
	}
	want := []base.Code{base.Code(hot.MakeHit(base.MediumCXL)), base.Code(hot.Miss), 1}
	if err := l.JobResult(h, job, codes); err != nil || !slices.Equal(codes, want) {
		t.Errorf("%v %v, want %v", codes, err, want)
	}
	for _, action := range []uint32{cabi.RequestsRefresh, cabi.RequestsEnd} {
		if err := l.SubmitRequests(h, action, []uint64{7}); err != nil {
			t.Error(err)
		}
	}
	if err := l.SubmitRequests(h, 3, []uint64{7}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("action 3: %v", err)
	}
	for name, submit := range map[string]func() (uint64, error){
		"half a key":         func() (uint64, error) { return l.SubmitLookup(h, ks[:40], 1, 1, 0, 0) },
		"no workers":         func() (uint64, error) { return l.SubmitLookup(h, ks, 0, 1, 0, 0) },
		"workers":            func() (uint64, error) { return l.SubmitLookup(h, ks, math.MaxUint32, 1, 0, 0) },
		"replicas":           func() (uint64, error) { return l.SubmitLookup(h, ks, 1, math.MaxUint32, 0, 0) },
		"a negative timeout": func() (uint64, error) { return l.SubmitLookup(h, ks, 1, 1, 0, -1) },
		"a key too many": func() (uint64, error) {
			job, err := l.SubmitLookup(h, make([]byte, base.KeyBytes*cabi.MaxBatchCount), 1, 1, 0, 0)
			if errors.Is(err, base.ErrLimit) {
				err = base.ErrInvalid
			}
			return job, err
		},
		"no client": func() (uint64, error) { return l.SubmitLookup(job, ks, 1, 1, 0, 0) },
	} {
		if job, err := submit(); !errors.Is(err, base.ErrInvalid) || job != 0 {
			t.Errorf("%s: %#x %v", name, job, err)
		}
	}
}

func TestLayouts(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	mem := memory(t, 1<<16)
	for i := range mem {
		mem[i] = byte(i / 16)
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	layers := []cabi.Layer{
		{Base: at, BlockStrideBytes: 64, RunBytes: 16, RunCount: 2},
		{Base: at + 8192, BlockStrideBytes: 64, RunBytes: 16, RunCount: 1},
	}
	offsets := []int64{0, 32, 16}
	layout, err := l.RegisterLayout(h, layers, offsets, 16)
	if err != nil || layout>>56 != uint64(cabi.KindLayout) {
		t.Fatalf("%#x %v", layout, err)
	}
	codes := make([]base.Code, 1)
	if err := l.Store(h, &cabi.Batch{Keys: key(t, "k"), Ends: []uint64{2}, Layout: layout, Blocks: []uint32{1, 0}}, codes, 0); err != nil || codes[0] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	got := memory(t, 4096)[:96]
	if err := l.Load(h, &cabi.Batch{Keys: key(t, "k"), Ends: []uint64{1}, Runs: []cabi.Run{run(got)}}, codes, 0); err != nil || codes[0] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	var want []byte
	for _, start := range []int{64, 96, 8192 + 64 + 16, 0, 32, 8192 + 16} {
		want = append(want, mem[start:start+16]...)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	for name, f := range map[string]func() error{
		"too few offsets":  func() error { _, err := l.RegisterLayout(h, layers, offsets[:2], 16); return err },
		"too many offsets": func() error { _, err := l.RegisterLayout(h, layers, append(offsets, 1), 16); return err },
		"reserved": func() error {
			_, err := l.RegisterLayout(h, []cabi.Layer{{Base: at, RunBytes: 1, RunCount: 1, Reserved: 1}}, []int64{0}, 1)
			return err
		},
	} {
		if err := f(); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := l.UnregisterLayout(h, layout); err != nil {
		t.Error(err)
	}
	if err := l.UnregisterLayout(h, layout); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

func TestBatchRefusals(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	mem := memory(t, 4096)
	k, r := key(t, "k"), run(mem)
	codes := make([]base.Code, 2)
	for name, b := range map[string]*cabi.Batch{
		"no keys":     {Ends: []uint64{}},
		"odd keys":    {Keys: k[:31], Ends: []uint64{1}, Runs: []cabi.Run{r}},
		"ends":        {Keys: k, Ends: []uint64{1, 2}, Runs: []cabi.Run{r, r}},
		"no run":      {Keys: k, Ends: []uint64{0}, Runs: []cabi.Run{}},
		"beyond":      {Keys: k, Ends: []uint64{2}, Runs: []cabi.Run{r}},
		"falling":     {Keys: append(bytes.Clone(k), k...), Ends: []uint64{2, 1}, Runs: []cabi.Run{r, r}},
		"both":        {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{r}, Layout: uint64(cabi.KindLayout)<<56 | 1},
		"bad layout":  {Keys: k, Ends: []uint64{1}, Layout: 5, Blocks: []uint32{1}},
		"null":        {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{{Data: 0, Bytes: 1}}},
		"low":         {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{{Data: 8, Bytes: 1}}},
		"huge":        {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{{Data: r.Data, Bytes: 1 << 50}}},
		"wraps":       {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{{Data: ^uintptr(0) - 10, Bytes: 100}}},
		"load offset": {Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{r}, Offsets: []uint64{1}},
	} {
		if err := l.Store(h, b, codes, 0); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := l.Load(h, &cabi.Batch{Keys: k, Ends: []uint64{1}, Runs: []cabi.Run{r}, Parents: make([]byte, 28)}, codes, 0); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("parents of a load: %v", err)
	}
}

// TestDeviceLayouts: a device layout and its stream reach the client, and what does not
// fit together is refused.
func TestDeviceLayouts(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, map[string]any{"device_copy": "staged", "device_staging_bytes": 8 << 20})
	mem := memory(t, 1<<12)
	copy(mem, "0123456789abcdef")
	layers := []cabi.Layer{{Base: uintptr(unsafe.Pointer(unsafe.SliceData(mem))), BlockStrideBytes: 16, RunBytes: 16, RunCount: 1}}
	if _, err := l.DeviceInfo(h, nil); !errors.Is(err, base.ErrNotFound) {
		t.Error(err)
	}
	layout, err := l.RegisterDeviceLayout(h, 0, layers, []int64{0}, 4)
	if err != nil || layout>>56 != uint64(cabi.KindLayout) {
		t.Fatalf("%#x %v", layout, err)
	}
	if n, err := l.DeviceInfo(h, make([]byte, 4096)); n == 0 || err != nil {
		t.Error(n, err)
	}
	codes := make([]base.Code, 1)
	b := &cabi.Batch{Keys: key(t, "k"), Ends: []uint64{1}, Layout: layout, Blocks: []uint32{0}, Stream: 77}
	if err := l.Store(h, b, codes, 0); err != nil || codes[0] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	b.Blocks = []uint32{3}
	if err := l.Load(h, b, codes, 0); err != nil || codes[0] != base.CodeOK || string(mem[48:64]) != "0123456789abcdef" {
		t.Fatalf("%v %v %q", codes, err, mem[48:64])
	}
	b.Stream = uint64(cabitest.CapturedStream)
	if _, err := l.SubmitStore(h, b); !errors.Is(err, base.ErrUnsupported) {
		t.Error(err)
	}
	if err := l.Store(h, &cabi.Batch{Keys: key(t, "r"), Ends: []uint64{1}, Runs: []cabi.Run{run(mem[:16])}, Stream: 1}, codes, 0); !errors.Is(err, base.ErrInvalid) {
		t.Error(err)
	}
	if _, err := l.RegisterDeviceLayout(h, 5000, layers, []int64{0}, 4); !errors.Is(err, base.ErrInvalid) {
		t.Error(err)
	}
	if _, err := cabi.ParseConfig([]byte(`{"server_address":"a:1","opaque":true,"device_copy":"fast"}`)); !errors.Is(err, base.ErrInvalid) {
		t.Error(err)
	}
}
