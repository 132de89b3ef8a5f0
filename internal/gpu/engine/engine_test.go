package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/gpu/fake"
	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

func host(t interface{ Fatal(...any) }, n int) []byte {
	b, err := unix.Mmap(-1, 0, (n+4095)&^4095, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	return b[:n:n]
}

func fill(b []byte, seed byte) { _, _ = rand.NewChaCha8([32]byte{seed}).Read(b) }

type testRun struct{ Address, Bytes uint64 }

// laid is a layout of one block with a layer for each run.
func laid(runs ...testRun) *engine.Layout {
	l := &engine.Layout{BlockCount: 1}
	for _, r := range runs {
		l.Layers = append(l.Layers, engine.Layer{Base: r.Address - 16, RunBytes: r.Bytes, Offsets: []int64{16}})
	}
	return l
}

func openEngine(t *testing.T, d *fake.Device, cfg engine.Config) *engine.Engine {
	t.Helper()
	if cfg.StagingBytes == 0 {
		cfg.StagingBytes = 4 << 20
	}
	e, err := engine.Open(d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil && e.Lost() == nil {
			t.Error(err)
		}
	})
	return e
}

// shape is one object of a drawn layout.
type shape struct {
	value, skip, size, piece uint64
	runs                     []testRun
	mapped                   engine.Mapped
}

// draw cuts device memory into runs that cover [skip, skip+size) of a value.
func draw(t *rapid.T, d *fake.Device, memory []byte, i int) shape {
	unit := func(name string, most int) uint64 {
		return 16 * uint64(rapid.IntRange(1, most).Draw(t, fmt.Sprint(name, i))) //nolint:gosec // small
	}
	s := shape{piece: 64 * uint64(rapid.IntRange(4, 300).Draw(t, fmt.Sprint("piece", i)))} //nolint:gosec // small
	s.value = unit("value", 5000)
	s.skip = min(unit("skip", 200)-16, s.value-16) / 16 * 16
	if rapid.Bool().Draw(t, fmt.Sprint("whole", i)) {
		s.skip = 0
	}
	s.size = s.value - s.skip
	s.mapped = engine.Mapped(rapid.IntRange(0, 1).Draw(t, fmt.Sprint("mapped", i))) //nolint:gosec // an enum
	run := unit("run", 1500) + 1024
	at := fake.Address(memory)
	for left := s.size; left > 0; {
		n := min(run, left)
		s.runs = append(s.runs, testRun{Address: at, Bytes: n})
		at += n + 16 // a gap, which nobody may touch
		left -= n
	}
	return s
}

// TestAnyLayout moves drawn layouts both ways and compares bytes and leaves with what the
// host computes.
func TestAnyLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := fake.New()
		defer d.Free()
		rule := engine.Rule(rapid.IntRange(0, 2).Draw(t, "rule")) //nolint:gosec // an enum
		e, err := engine.Open(d, engine.Config{StagingBytes: 4 << 20, Rule: rule, DirectRunBytes: 8192})
		if err != nil {
			t.Fatal(err)
		}
		n := rapid.IntRange(1, 5).Draw(t, "objects")
		const room = 256 << 10
		pool, memory := host(t, n*room), d.Alloc(n*room)
		reg, err := e.Register(context.Background(), pool, room, engine.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		var objects []engine.Object
		var shapes []shape
		for i := range n {
			s := draw(t, d, memory[i*room:(i+1)*room], i)
			shapes = append(shapes, s)
			h := pool[i*room : i*room+int(s.value)] //nolint:gosec // small
			if s.mapped == engine.Bounced {         // of memory that is not registered
				h = host(t, int(s.value)) //nolint:gosec // small
			} else if !reg.Covers(h) {
				t.Fatal("not covered")
			}
			objects = append(objects, engine.Object{
				Host: h, Mapped: s.mapped, SkipBytes: s.skip, SizeBytes: s.size, PieceBytes: s.piece, Seed: uint64(i) * 77, Layout: laid(s.runs...), Blocks: []uint32{0}, //nolint:gosec // small
			})
		}
		// Load: the host's bytes into the runs, the rest of the device untouched.
		fill(memory, 1)
		was := bytes.Clone(memory)
		for i := range objects {
			fill(objects[i].Host, byte(i+2))
		}
		load := &engine.Transfer{Direction: engine.Load, Objects: objects}
		if err := e.Run(load); err != nil {
			t.Fatal(err)
		}
		want := bytes.Clone(was)
		for i := range objects {
			o := &objects[i]
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			at := o.SkipBytes
			for _, r := range shapes[o.Seed/77].runs {
				copy(want[r.Address-fake.Address(memory):][:r.Bytes], o.Host[at:at+r.Bytes])
				at += r.Bytes
			}
			compareLeaves(t, o)
		}
		if !bytes.Equal(memory, want) {
			t.Fatal("bytes on the device differ")
		}
		// Save: whole values only.
		var whole []engine.Object
		for i := range objects {
			if objects[i].SkipBytes == 0 {
				whole = append(whole, objects[i])
				clear(objects[i].Host)
			}
		}
		if err := e.Run(&engine.Transfer{Direction: engine.Save, Objects: whole}); err != nil {
			t.Fatal(err)
		}
		for i := range whole {
			o := &whole[i]
			if o.Err != nil {
				t.Fatal(o.Err)
			}
			at := uint64(0)
			for _, r := range shapes[o.Seed/77].runs {
				if !bytes.Equal(o.Host[at:at+r.Bytes], want[r.Address-fake.Address(memory):][:r.Bytes]) {
					t.Fatal("bytes on the host differ")
				}
				at += r.Bytes
			}
			compareLeaves(t, o)
		}
		if !bytes.Equal(memory, want) {
			t.Fatal("a save changed the device")
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if err := d.Idle(); err != nil {
			t.Fatal(err)
		}
	})
}

func compareLeaves(t *rapid.T, o *engine.Object) {
	want := checksum.Leaves(nil, o.Host, int(o.PieceBytes), o.Seed) //nolint:gosec // small
	if i := checksum.FirstDifference(o.Leaves, want); i >= 0 {
		t.Fatalf("leaf %d of %d differs", i, len(want))
	}
}

// simple is one registered object of n bytes in one run.
func simple(t *testing.T, e *engine.Engine, d *fake.Device, n int) (engine.Object, *engine.Registration) {
	t.Helper()
	h, m := host(t, n), d.Alloc(n)
	fill(m, 3)
	reg, err := e.Register(context.Background(), h, uint64(n), engine.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	return engine.Object{
		Host: h, Mapped: engine.Registered, SizeBytes: uint64(n), PieceBytes: 4096, Seed: 9,
		Layout: laid(testRun{fake.Address(m), uint64(n)}), Blocks: []uint32{0},
	}, reg
}

func TestLanesAreIndependent(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{})
	o, _ := simple(t, e, d, 8<<20)
	release := d.Hold(1)
	ev, err := e.Record(1)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	held := &engine.Transfer{Direction: engine.Save, After: ev, Objects: []engine.Object{o}}
	wg.Go(func() { _ = e.Run(held) })
	// A load ends while the save waits for the engine's stream.
	l, _ := simple(t, e, d, 8<<20)
	if err := e.Run(&engine.Transfer{Direction: engine.Load, Objects: []engine.Object{l}}); err != nil {
		t.Fatal(err)
	}
	if held.Objects[0].Host[0] != 0 || held.Objects[0].Host[8<<20-1] != 0 {
		t.Fatal("a save began before its event")
	}
	release()
	wg.Wait()
	e.Forget(ev)
	if held.Objects[0].Err != nil || held.Objects[0].Host[0] == 0 && held.Objects[0].Host[1] == 0 {
		t.Fatalf("the save: %v", held.Objects[0].Err)
	}
}

// TestChunksGrow: the first chunks of a save and the last of a load are small, the others
// fill a slot.
func TestChunksGrow(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{StagingBytes: 16 << 20}) // slots of 4 MiB
	o, _ := simple(t, e, d, 32<<20)
	for _, dir := range []engine.Direction{engine.Save, engine.Load} {
		before := d.Launches()
		tr := &engine.Transfer{Direction: dir, Objects: []engine.Object{o}}
		if err := e.Run(tr); err != nil || tr.Objects[0].Err != nil {
			t.Fatal(err, tr.Objects[0].Err)
		}
		// 1 + 1 + 2 + 7 x 4 MiB, or the other way round.
		if n := d.Launches() - before; n != 10 {
			t.Errorf("%v: %d chunks", dir, n)
		}
	}
}

func TestCapturedStreamIsRefused(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{})
	d.Capture(4, true)
	if _, err := e.Record(4); !errors.Is(err, base.ErrUnsupported) {
		t.Fatal(err)
	}
}

// TestLaunchFails: a launch that was refused, or started in part, fails its transfer and
// no other, and nothing runs any more when it has ended.
func TestLaunchFails(t *testing.T) {
	for _, started := range []bool{false, true} {
		t.Run(fmt.Sprint("started=", started), func(t *testing.T) {
			d := fake.New()
			d.Faults.Launch = func(n int) (bool, error) {
				if n == 2 {
					return started, fmt.Errorf("%w: injected", base.ErrFault)
				}
				return true, nil
			}
			e := openEngine(t, d, engine.Config{})
			o, _ := simple(t, e, d, 8<<20) // eight chunks
			tr := &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{o}}
			if err := e.Run(tr); err != nil {
				t.Fatal(err)
			}
			if got := tr.Objects[0]; !errors.Is(got.Err, base.ErrFault) || got.Running {
				t.Fatalf("%v, running %v", got.Err, got.Running)
			}
			if e.Lost() != nil {
				t.Fatal("one refused launch is no lost device")
			}
			if err := e.Run(tr); err != nil || tr.Objects[0].Err != nil {
				t.Fatal(err, tr.Objects[0].Err)
			}
		})
	}
}

// TestLostDevice: what is in flight may still run, what is queued was not begun, and all
// that comes later fails at once.
func TestLostDevice(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{})
	a, _ := simple(t, e, d, 1<<20)
	b, _ := simple(t, e, d, 1<<20)
	release := d.Hold(1)
	defer release()
	ev, err := e.Record(1)
	if err != nil {
		t.Fatal(err)
	}
	first := &engine.Transfer{Direction: engine.Save, After: ev, Objects: []engine.Object{a}}
	var wg sync.WaitGroup
	wg.Go(func() { _ = e.Run(first) })
	for d.Launches() == 0 {
		time.Sleep(time.Millisecond)
	}
	d.Lose()
	wg.Wait()
	if o := first.Objects[0]; !errors.Is(o.Err, base.ErrFault) || !o.Running {
		t.Fatalf("in flight: %v, running %v", o.Err, o.Running)
	}
	if err := e.Run(&engine.Transfer{Direction: engine.Load, Objects: []engine.Object{b}}); !errors.Is(err, base.ErrFault) {
		t.Fatalf("after the loss: %v", err)
	}
	if _, err := e.Record(1); !errors.Is(err, base.ErrFault) {
		t.Fatal(err)
	}
	if _, err := e.Register(context.Background(), host(t, 4096), 4096, engine.ReadWrite); !errors.Is(err, base.ErrFault) {
		t.Fatal(err)
	}
}

func TestRegistrationIsCutAtObjects(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{RegistrationBytes: 64 << 10})
	const object = 5 << 12
	mem := host(t, 40*object)
	reg, err := e.Register(context.Background(), mem, object, engine.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	if n := d.RegisteredCount(); n != 14 { // three objects a window
		t.Errorf("%d windows", n)
	}
	for i := range 40 {
		if !reg.Covers(mem[i*object : (i+1)*object]) {
			t.Errorf("object %d lies across a border", i)
		}
	}
	if reg.Covers(mem[2*object:4*object]) || reg.Covers(host(t, 4096)) || (*engine.Registration)(nil).Covers(mem[:1]) {
		t.Error("what is across a border, or elsewhere, is covered")
	}
	if err := errors.Join(reg.Close(), reg.Close()); err != nil || d.RegisteredCount() != 0 {
		t.Errorf("%v, %d left", err, d.RegisteredCount())
	}
	// Objects that are no multiple of a page: windows are whole pages all the same.
	odd := host(t, 4096*1000)
	if reg, err = e.Register(context.Background(), odd, 4096*3/2, engine.ReadWrite); err != nil || reg.Close() != nil {
		t.Fatal(err)
	}
}

func TestPartialRegistrationIsUndone(t *testing.T) {
	d := fake.New()
	n := 0
	d.Faults.Register = func([]byte) error {
		if n++; n == 3 {
			return fmt.Errorf("%w: injected", base.ErrUnsupported)
		}
		return nil
	}
	e := openEngine(t, d, engine.Config{RegistrationBytes: 64 << 10})
	if _, err := e.Register(context.Background(), host(t, 1<<20), 64<<10, engine.ReadWrite); !errors.Is(err, base.ErrUnsupported) {
		t.Fatal(err)
	}
	if d.RegisteredCount() != 0 {
		t.Errorf("%d windows stayed", d.RegisteredCount())
	}
}

// TestReadOnlyIsRespected: the fake refuses a copy into memory that was registered for
// reading, as the driver does.
func TestReadOnlyIsRespected(t *testing.T) {
	d := fake.New()
	e := openEngine(t, d, engine.Config{})
	h, m := host(t, 4096), d.Alloc(4096)
	if _, err := e.Register(context.Background(), h, 4096, engine.ReadOnly); err != nil {
		t.Fatal(err)
	}
	for dir, fails := range map[engine.Direction]bool{engine.Save: true, engine.Load: false} {
		tr := &engine.Transfer{Direction: dir, Objects: []engine.Object{{
			Host: h, Mapped: engine.Registered, SizeBytes: 4096, PieceBytes: 4096, Layout: laid(testRun{fake.Address(m), 4096}), Blocks: []uint32{0},
		}}}
		if err := e.Run(tr); err != nil || (tr.Objects[0].Err != nil) != fails {
			t.Errorf("%v: %v", dir, tr.Objects[0].Err)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []engine.Config{{StagingBytes: 1}, {StagingBytes: 1 << 40}, {SaveBlocks: -1}, {LoadBlocks: 5000}, {Rule: 9}} {
		if _, err := engine.Open(fake.New(), cfg); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

// TestLaneIsLostButEnds: a wait that fails loses the lane; what was in flight is known to
// have ended when the device still says so, and block numbers are checked as they are used.
func TestLaneIsLostButEnds(t *testing.T) {
	d := fake.New()
	broken := false
	d.Faults.Wait = func() error {
		if broken {
			return fmt.Errorf("%w: injected", base.ErrFault)
		}
		return nil
	}
	e := openEngine(t, d, engine.Config{})
	o, _ := simple(t, e, d, 8<<20)
	o.Blocks = []uint32{1}
	tr := &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{o}}
	if err := e.Run(tr); err != nil || !errors.Is(tr.Objects[0].Err, base.ErrInvalid) {
		t.Fatal(err, tr.Objects[0].Err)
	}
	o.Blocks, broken = []uint32{0}, true
	tr = &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{o}}
	if err := e.Run(tr); err != nil {
		t.Fatal(err)
	}
	if got := tr.Objects[0]; !errors.Is(got.Err, base.ErrFault) || got.Running {
		t.Fatalf("%v, running %v", got.Err, got.Running)
	}
	if e.Lost() == nil {
		t.Error("the device is not lost")
	}
}
