package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/gpu"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

func init() { benches["copy"] = copyBench }

// Sizes of the copy benchmark.
const (
	copyObjectBytes = 32 << 20
	copyShare       = 0.95
	copyPieceBytes  = 64 << 10
)

// copyBench moves objects between scattered blocks of a GPU and registered memory, hashed,
// in turns with one contiguous copy of as many bytes. What it costs the engine's own
// kernels is measured by test/gpu/copy_check.py, which has them.
func copyBench(ctx context.Context, o Options) (_ *Report, err error) {
	dev, err := gpu.OpenDevice(0)
	if err != nil {
		return nil, fmt.Errorf("bench copy needs an NVIDIA GPU: %w", err)
	}
	e, err := engine.Open(dev, engine.Config{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	total, rounds := uint64(1<<30), 9
	if o.Quick {
		total, rounds = 256<<20, 5
	}
	info := e.Info()
	report := NewReport("copy")
	report.Host = fmt.Sprintf("%s; %s, driver %d", report.Host, info.Name, info.DriverVersion)

	// Twice the bytes on the device, so that blocks lie apart.
	blocks, err := dev.Alloc(2 * total)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dev.Release(blocks)) }()
	pool, err := anonymous(int(total), unix.MAP_SHARED|unix.MAP_POPULATE) //nolint:gosec // a constant
	if err != nil {
		return nil, err
	}
	reg, err := e.Register(ctx, pool, copyObjectBytes, engine.ReadWrite)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(pool))
	}
	defer func() {
		if cerr := reg.Close(); cerr != nil {
			err = errors.Join(err, cerr) // it may still be reached: it stays mapped
			return
		}
		err = errors.Join(err, unix.Munmap(pool))
	}()
	for _, run := range []uint64{16 << 10, 64 << 10, 256 << 10, 2 << 20} {
		for _, dir := range []engine.Direction{engine.Save, engine.Load} {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			o.Progress("%s, runs of %d KiB", dir, run>>10)
			row, err := copyRow(dev, e, dir, run, total, rounds, blocks, pool)
			if err != nil {
				return nil, err
			}
			report.Rows = append(report.Rows, *row)
		}
	}
	return report, nil
}

// copyRow measures one direction and run size.
func copyRow(dev *gpu.Device, e *engine.Engine, dir engine.Direction, run, total uint64, rounds int, blocks uint64, pool []byte) (*Row, error) {
	layout := &engine.Layout{BlockCount: uint32(2 * total / run), Layers: []engine.Layer{{Base: blocks, StrideBytes: int64(run), RunBytes: run, Offsets: []int64{0}}}} //nolint:gosec // a constant
	order := rand.Perm(int(2 * total / run))                                                                                                                           //nolint:gosec // a constant
	t := &engine.Transfer{Direction: dir}
	for i := uint64(0); i < total/copyObjectBytes; i++ {
		var ids []uint32
		for _, b := range order[i*copyObjectBytes/run : (i+1)*copyObjectBytes/run] {
			ids = append(ids, uint32(b)) //nolint:gosec // a block
		}
		t.Objects = append(t.Objects, engine.Object{
			Host: pool[i*copyObjectBytes : (i+1)*copyObjectBytes], Mapped: engine.Registered, SizeBytes: copyObjectBytes,
			PieceBytes: min(run, copyPieceBytes), Seed: i, Layout: layout, Blocks: ids,
		})
	}
	var ours, plain []float64
	for i := range rounds + 1 {
		began := time.Now()
		if err := e.Run(t); err != nil {
			return nil, err
		}
		took := time.Since(began).Seconds()
		for k := range t.Objects {
			if t.Objects[k].Err != nil {
				return nil, t.Objects[k].Err
			}
		}
		one, err := dev.CopyNow(dir, blocks, pool)
		if err != nil {
			return nil, err
		}
		if i > 0 { // the first warms up
			ours, plain = append(ours, float64(total)/took/1e9), append(plain, float64(total)/one/1e9)
		}
	}
	slices.Sort(ours)
	slices.Sort(plain)
	name := map[engine.Direction]string{engine.Save: "device to host", engine.Load: "host to device"}[dir]
	row := NewReport("copy").Add(fmt.Sprintf("%s, runs of %d KiB", name, run>>10), ours[rounds/2], "GB/s", plain[rounds/2])
	row.Want(fmt.Sprintf("at least %.0f %% of one contiguous copy", 100*copyShare), row.Ratio >= copyShare)
	return row, nil
}
