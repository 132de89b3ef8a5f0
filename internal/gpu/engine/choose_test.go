package engine_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/gpu/fake"
)

// costs makes a device on which a direct copy takes so long each, a staged launch so long.
func costs(d *fake.Device, direct, staged time.Duration) {
	d.Faults.Cost = func(a *engine.Launch) time.Duration {
		if a.Way == engine.Direct {
			return direct * time.Duration(a.Copies)
		}
		return staged
	}
}

// laidBlocks is a layout of blocks with one run each.
func laidBlocks(memory []byte, runBytes uint64) *engine.Layout {
	return &engine.Layout{
		BlockCount: uint32(uint64(len(memory)) / runBytes),                                                                              //nolint:gosec // small
		Layers:     []engine.Layer{{Base: fake.Address(memory), StrideBytes: int64(runBytes), RunBytes: runBytes, Offsets: []int64{0}}}, //nolint:gosec // small
	}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%s does not come", what)
		}
	}
}

// The faster way is found, and used, whatever the length says.
func TestTheFasterWayIsChosen(t *testing.T) {
	const piece = 16 << 10
	for _, c := range []struct {
		name           string
		run            uint64
		direct, staged time.Duration
		want           engine.Way
	}{
		{"short runs, copies are cheap", 16 << 10, 10 * time.Microsecond, 20 * time.Millisecond, engine.Direct},
		{"short runs, copies are dear", 16 << 10, time.Millisecond, 5 * time.Millisecond, engine.Staged},
		{"long runs, copies are cheap", 256 << 10, 10 * time.Microsecond, 20 * time.Millisecond, engine.Direct},
		{"long runs, copies are dear", 256 << 10, 20 * time.Millisecond, 5 * time.Millisecond, engine.Staged},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := fake.New()
			t.Cleanup(d.Free)
			costs(d, c.direct, c.staged)
			var mu sync.Mutex
			found := map[engine.Direction]engine.Measured{}
			e := openEngine(t, d, engine.Config{DirectRunBytes: 128 << 10, OnMeasured: func(m engine.Measured) {
				mu.Lock()
				defer mu.Unlock()
				found[m.Direction] = m
			}})
			memory := d.Alloc(1 << 20)
			layout := laidBlocks(memory, c.run)
			layout.Choice = e.Choose(layout, piece)
			if again := e.Choose(laidBlocks(memory, c.run), piece); again != layout.Choice {
				t.Error("the same runs are measured twice")
			}
			for _, dir := range []engine.Direction{engine.Save, engine.Load} {
				eventually(t, "the choice", func() bool { mu.Lock(); defer mu.Unlock(); _, ok := found[dir]; return ok })
			}
			mu.Lock()
			for dir, m := range found {
				if way, _ := layout.Choice.Way(dir); way != c.want {
					t.Errorf("%v: %v; measured %+v", dir, way, m)
				}
			}
			if m := found[engine.Save]; m.RunBytes != c.run || (m.StagedBytesPerSecond > m.DirectBytesPerSecond) != (c.want == engine.Staged) {
				t.Errorf("told of %+v", m)
			}
			mu.Unlock()

			var ways []engine.Way
			d.Faults.Cost = func(a *engine.Launch) time.Duration {
				ways = append(ways, a.Way)
				return 0
			}
			pool := host(t, 1<<20)
			if _, err := e.Register(context.Background(), pool, 1<<20, engine.ReadWrite); err != nil {
				t.Fatal(err)
			}
			fill(memory, 3)
			save := &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{{
				Host: pool, Mapped: engine.Registered, SizeBytes: 1 << 20, PieceBytes: piece, Layout: layout,
			}}}
			for b := range layout.BlockCount {
				save.Objects[0].Blocks = append(save.Objects[0].Blocks, b)
			}
			if err := e.Run(save); err != nil || save.Objects[0].Err != nil {
				t.Fatal(err, save.Objects[0].Err)
			}
			if len(ways) == 0 || ways[0] != c.want || string(pool) != string(memory) {
				t.Errorf("moved %v, want %v; bytes equal: %v", ways, c.want, string(pool) == string(memory))
			}
		})
	}
}

// A forced rule, and runs that cannot be copied by themselves, are no matter of choice.
func TestNothingToChoose(t *testing.T) {
	d := fake.New()
	t.Cleanup(d.Free)
	memory := d.Alloc(1 << 20)
	for _, rule := range []engine.Rule{engine.AlwaysStaged, engine.AlwaysDirect} {
		if e := openEngine(t, d, engine.Config{Rule: rule}); e.Choose(laidBlocks(memory, 64<<10), 16<<10) != nil {
			t.Errorf("rule %d is measured", rule)
		}
	}
	e := openEngine(t, d, engine.Config{})
	if e.Choose(laidBlocks(memory, 16<<10), 64<<10) != nil {
		t.Error("pieces of several runs are measured")
	}
	if way, ok := (*engine.Choice)(nil).Way(engine.Save); ok {
		t.Errorf("no choice says %v", way)
	}
	if d.Launches() != 0 {
		t.Errorf("%d launches", d.Launches())
	}
}

// While the engine's stream works nothing is measured, and transfers do not wait for it.
func TestMeasuringWaitsForTheEngine(t *testing.T) {
	d := fake.New()
	t.Cleanup(d.Free)
	costs(d, time.Microsecond, 20*time.Millisecond)
	e := openEngine(t, d, engine.Config{})
	release := d.Hold(0)
	memory := d.Alloc(1 << 20)
	layout := laidBlocks(memory, 64<<10)
	layout.Choice = e.Choose(layout, 64<<10)
	time.Sleep(50 * time.Millisecond)
	if n := d.Launches(); n != 0 {
		t.Errorf("%d launches beside the engine's work", n)
	}
	pool := host(t, 64<<10)
	if _, err := e.Register(context.Background(), pool, 64<<10, engine.ReadWrite); err != nil {
		t.Fatal(err)
	}
	save := &engine.Transfer{Direction: engine.Save, Objects: []engine.Object{{
		Host: pool, Mapped: engine.Registered, SizeBytes: 64 << 10, PieceBytes: 64 << 10, Layout: layout, Blocks: []uint32{0},
	}}}
	if err := e.Run(save); err != nil || save.Objects[0].Err != nil {
		t.Fatal(err, save.Objects[0].Err)
	}
	release()
	for _, dir := range []engine.Direction{engine.Save, engine.Load} {
		eventually(t, "the choice", func() bool { way, ok := layout.Choice.Way(dir); return ok && way == engine.Direct })
	}
}

// A device that is lost while it is measured is lost as ever, and a refused launch leaves
// the rule.
func TestMeasuringFails(t *testing.T) {
	d := fake.New()
	t.Cleanup(d.Free)
	d.Faults.Launch = func(int) (bool, error) { return false, base.ErrInvalid }
	e := openEngine(t, d, engine.Config{})
	c := e.Choose(laidBlocks(d.Alloc(1<<20), 64<<10), 64<<10)
	eventually(t, "the tries", func() bool { return d.Launches() >= 2 })
	if _, ok := c.Way(engine.Save); ok {
		t.Error("something was measured")
	}
	if err := e.Lost(); err != nil {
		t.Error(err)
	}

	lost := fake.New()
	t.Cleanup(lost.Free)
	lost.Faults.Wait = func() error { return base.ErrFault }
	e = openEngine(t, lost, engine.Config{})
	e.Choose(laidBlocks(lost.Alloc(1<<20), 64<<10), 64<<10)
	eventually(t, "the loss", func() bool { return e.Lost() != nil })
	if err := e.Run(&engine.Transfer{Objects: make([]engine.Object, 1)}); !errors.Is(err, base.ErrFault) {
		t.Error(err)
	}
}
