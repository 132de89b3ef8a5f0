package directory

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/offheap"
)

// filled is a directory with count objects of one worker, through the real calls.
func filled(b *testing.B, count int) (*Directory, Caller, time.Duration) {
	b.Helper()
	now := time.Second
	d, err := New(Config{
		ServerEpoch: 1, Owner: 1, HashSeed: 7, Memory: offheap.OS{}, Limits: Limits{MaxOperations: 64},
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = d.Free() })
	if err := d.SetPools(now, []Pool{{
		ID: poolA, Medium: base.MediumCXL, Coherence: base.CoherenceHardware, CapacityBytes: 1 << 50, Online: true,
	}}); err != nil {
		b.Fatal(err)
	}
	res, err := d.Open(now, openReq(1))
	if err != nil {
		b.Fatal(err)
	}
	who := Caller{sid(1), res.Epoch}
	if err := d.ProveDomains(now, who, []base.PoolID{poolA}); err != nil {
		b.Fatal(err)
	}
	var seq base.Sequence
	req := hot.CommitRequest{Namespace: res.Namespace}
	var out []byte
	const perRegion = 1 << 20
	for done := 0; done < count; {
		pages := min(perRegion, count-done)
		seq++
		_, ticket, err := d.ExpandBegin(now, who, &ExpandRequest{
			Operation: seq, Medium: base.MediumCXL, Bytes: uint64(pages) * testPage, PageBytes: testPage, PieceBytes: testPiece, //nolint:gosec // positive
		})
		if err != nil {
			b.Fatal(err)
		}
		n := uint64(pages) //nolint:gosec // positive
		g, err := d.ExpandFinish(now, ticket, &RegionGrant{
			Region: base.RegionID(1 + done/perRegion), Incarnation: base.Incarnation(1 + done/perRegion), //nolint:gosec // small
			Place: Place{ExtentBytes: extentBytes(testPage, n), PageBytes: testPage, PageCount: n, PieceBytes: testPiece},
		}, nil)
		if err != nil {
			b.Fatal(err)
		}
		for p := 0; p < pages; p += 4096 {
			req.Rows = req.Rows[:0]
			for i := p; i < min(p+4096, pages); i++ {
				row := rowOf(g, uint64(i), 1, testKey(uint64(done+i))) //nolint:gosec // positive
				req.Rows = hot.AppendCommitRow(req.Rows, &row)
			}
			seq++
			req.Operation = hot.Operation{Sequence: seq, Watermark: seq}
			if out, err = d.Commit(now, who, &req, out[:0]); err != nil {
				b.Fatal(err)
			}
			if c := hot.CommitResults(out).At(0).Code; c != base.CodeOK {
				b.Fatal(c)
			}
		}
		done += pages
	}
	return d, who, now
}

var benchCounts = []int{10_000, 1_000_000, 10_000_000}

// randomBatch packs 512 keys of the table, or of none.
func randomBatch(rng *rand.Rand, dst []byte, count int) []byte {
	dst = dst[:0]
	for range 512 {
		k := testKey(rng.Uint64N(uint64(count))) //nolint:gosec // positive
		dst = append(dst, k[:]...)
	}
	return dst
}

// median is what a shared machine says most reliably.
func median(times []time.Duration) float64 {
	slices.Sort(times)
	return float64(times[len(times)/2].Nanoseconds())
}

const benchBatches = 256

func batches(count int) [][]byte {
	rng := rand.New(rand.NewPCG(1, 2))
	out := make([][]byte, benchBatches)
	for i := range out {
		out[i] = randomBatch(rng, nil, count)
	}
	return out
}

func BenchmarkProbe512(b *testing.B) {
	for _, n := range benchCounts {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d, who, now := filled(b, n)
			keys := batches(n)
			var out []byte
			var times []time.Duration
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				var err error
				start := time.Now()
				if out, _, err = d.Probe(now, who, &hot.ProbeRequest{Namespace: 1, Keys: keys[i%benchBatches]}, out[:0]); err != nil {
					b.Fatal(err)
				}
				times = append(times, time.Since(start))
			}
			b.ReportMetric(median(times)/512, "p50-ns/key")
		})
	}
}

func BenchmarkAcquireRelease512(b *testing.B) {
	for _, n := range benchCounts {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d, who, now := filled(b, n)
			keys := batches(n)
			var sizes []byte
			for range 512 {
				sizes = hot.AppendManifestSize(sizes, 1)
			}
			var out []byte
			seq := base.Sequence(1 << 32)
			b.ReportAllocs()
			b.ResetTimer()
			var times []time.Duration
			for i := range b.N {
				seq++
				var m uint32
				var err error
				start := time.Now()
				out, m, err = d.Acquire(now, who, &hot.AcquireRequest{
					Operation: hot.Operation{Sequence: seq, Watermark: seq}, Namespace: 1, Kind: base.LeaseCopy, Mode: hot.ModePrefix,
					ManifestSizes: sizes, Keys: keys[i%benchBatches],
				}, out[:0])
				times = append(times, time.Since(start))
				if err != nil || m != 512 {
					b.Fatal(m, err)
				}
				rel := hot.ReleaseRequest{Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: seq, Count: hot.ReleaseAll})}
				if out, err = d.Release(now, who, &rel, out[:0]); err != nil || out[0] != 1 {
					b.Fatal(out, err)
				}
			}
			b.ReportMetric(median(times)/512, "p50-acquire-ns/key")
		})
	}
}

// BenchmarkFill reports what an object costs, resident, and how long a commit takes.
func BenchmarkFill(b *testing.B) {
	for _, n := range benchCounts {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for range b.N {
				before := residentBytes(b)
				start := time.Now()
				d, _, _ := filled(b, n)
				b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(n), "commit-ns/key")
				b.ReportMetric(float64(d.store.committedBytes())/float64(n), "table-B/object")
				runtime.GC()
				b.ReportMetric(float64(residentBytes(b)-before)/float64(n), "resident-B/object")
			}
		})
	}
}
