package rm

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// BenchmarkAllocate is one caller's allocate over the Unix socket, against one
// write and fdatasync of 4 KiB on the state directory's file system, in turns.
func BenchmarkAllocate(b *testing.B) {
	f := newFixture(b)
	f.cfg.Logger = nil
	f.cfg.Pools[0] = PoolSpec{Kind: dax.KindFile, Path: fmt.Sprintf("/dev/shm/maru-bench-%d", os.Getpid()), SizeBytes: 512 << 20}
	b.Cleanup(func() { _ = os.Remove(f.cfg.Pools[0].Path) })
	s := f.start()
	c := client(b, over(s))
	o := startOwner(b, c, newID())
	ref, err := os.Create(filepath.Join(f.cfg.StateDir, "reference"))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = ref.Close() }()
	// Blocks that are there already: the reference pays for one sync, not for space.
	if _, err := ref.Write(make([]byte, 1<<20)); err != nil {
		b.Fatal(err)
	}
	if err := ref.Sync(); err != nil {
		b.Fatal(err)
	}
	var allocate, sync []time.Duration
	page := make([]byte, 4096)
	op := uint64(0)
	ctx := b.Context()
	for b.Loop() {
		op++
		start := time.Now()
		a, err := c.Allocate(ctx, small(o, op))
		allocate = append(allocate, time.Since(start))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.Free(ctx, &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()}); err != nil {
			b.Fatal(err)
		}
		start = time.Now()
		if _, err := ref.WriteAt(page, int64(op%256)*4096); err != nil {
			b.Fatal(err)
		}
		if err := ref.Sync(); err != nil {
			b.Fatal(err)
		}
		sync = append(sync, time.Since(start))
	}
	slices.Sort(allocate)
	slices.Sort(sync)
	p50, ref50 := allocate[len(allocate)/2], sync[len(sync)/2]
	b.ReportMetric(float64(p50.Microseconds()), "allocate-p50-µs")
	b.ReportMetric(float64(ref50.Microseconds()), "fsync-p50-µs")
	b.ReportMetric(float64(p50)/float64(ref50), "ratio")
}

// BenchmarkStart starts with 10 000 regions, each held, until it serves.
func BenchmarkStart(b *testing.B) {
	const regions = 10_000
	f := newFixture(b)
	f.cfg.Logger = nil
	f.cfg.Pools[0].SizeBytes = (regions + 1) * 2 << 20
	populate(b, f, regions)
	for b.Loop() {
		s := f.start()
		b.StopTimer()
		if n := s.core.RegionCount(); n != regions {
			b.Fatalf("%d regions", n)
		}
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// populate fills a pool with held regions, in one batch: their tables are not
// what a start reads.
func populate(b *testing.B, f *fixture, regions int) {
	b.Helper()
	s := f.start()
	err := s.do(b.Context(), &job{run: func(batch *core.Batch) error {
		o, err := s.core.StartOwner(batch, 1, core.StartOwner{Owner: base.OwnerID{1}, Secret: base.NewOwnerSecret()})
		for op := range regions {
			if err != nil {
				return err
			}
			var a core.Allocated
			a, err = s.core.Allocate(batch, 1, core.Allocate{
				Claim: core.Claim{Owner: base.OwnerID{1}, Incarnation: o.Incarnation, Token: o.Token[:]}, Operation: uint64(op) + 1, PageCount: 16, PageBytes: 65536, PieceBytes: 65536,
			})
			if err == nil {
				_, err = s.core.Hold(batch, 1, core.Hold{
					Session: base.SessionID{1}, Server: base.OwnerID{1}, Incarnation: o.Incarnation, Sequence: 1, Handles: []core.Handle{a.Handle},
				})
			}
		}
		return err
	}})
	if err != nil {
		b.Fatal(err)
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
}
