package server

import (
	"io"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// benchObjects is how many objects the directory holds while 512 of them are asked for.
const (
	benchObjects = 1 << 20
	benchKeys    = 512
)

// fill commits count objects of one page each.
func fill(b testing.TB, c *client, count int) {
	b.Helper()
	const pageSize = 4096
	r := c.expand(maruv1.Medium_MEDIUM_CPU, uint64(count), pageSize)
	var rows []byte
	for i := 0; i < count; {
		rows = rows[:0]
		for n := 0; n < hot.MaxKeys && i < count; n++ {
			c.counter++
			rows = hot.AppendCommitRow(rows, &hot.CommitRow{
				Key: benchKey(i), Pool: r.GetPoolNumber(), Region: base.RegionID(r.GetHandle().GetRegionId()), Offset: uint64(i) * pageSize,
				Length: pageSize, Generation: base.MakeGeneration(c.open.GetEpoch(), c.counter), Checksum: 1,
			})
			i++
		}
		results, err := c.hot.commit(&hot.CommitRequest{
			Operation: c.next(), Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()), Rows: rows,
		})
		if err != nil || results.At(0).Code != base.CodeOK {
			b.Fatalf("fill: %v", err)
		}
	}
}

func benchKey(i int) base.Key {
	var d base.Digest
	x := uint64(i)*0x9e3779b97f4a7c15 + 1
	for j := range d {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		d[j] = byte(x >> 32)
	}
	return base.MakeKey(d, 0, base.PartAllLayers)
}

// percentiles runs f and reports p50 and p99 beside the mean that go test prints.
func percentiles(b *testing.B, f func(i int)) {
	b.Helper()
	took := make([]time.Duration, b.N)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		begin := time.Now()
		f(i)
		took[i] = time.Since(begin)
	}
	b.StopTimer()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}

// BenchmarkHot measures a batch of 512 keys among 2^20 objects against a bare echo of
// frames of the same sizes, in the same run (docs/ARCHITECTURE.md, design points).
func BenchmarkHot(b *testing.B) {
	cfg := testConfig(b)
	cfg.CPUBudgetBytes = 16 << 30
	cfg.TTL = time.Hour
	s := startServer(b, cfg)
	c := newClient(b, s.ControlAddress(), func(m *maruv1.OpenRequest) { m.CpuBytes = 8 << 30 })
	c.connect("")
	fill(b, c, benchObjects)
	ns := base.NamespaceNumber(c.open.GetNamespaceNumber())
	batches := make([][]byte, 64)
	var sizes []byte
	for range benchKeys {
		sizes = hot.AppendManifestSize(sizes, 1)
	}
	for i := range batches {
		for k := range benchKeys {
			batches[i] = hot.AppendKeys(batches[i], []base.Key{benchKey((i*7919 + k*2053) % benchObjects)})
		}
	}
	probeSizes := [2]int{
		len(hot.AppendProbe(nil, 1, &hot.ProbeRequest{Keys: batches[0]})),
		len(hot.AppendProbeAnswer(nil, 1, &hot.ProbeAnswer{Verdicts: make([]byte, benchKeys)})),
	}
	acquireSizes := [2]int{
		len(hot.AppendAcquire(nil, 1, &hot.AcquireRequest{ManifestSizes: sizes, Keys: batches[0]})),
		len(hot.AppendAcquireAnswer(nil, 1, &hot.AcquireAnswer{Rows: make([]byte, benchKeys*hot.AcquireRowBytes)})),
	}
	for _, network := range []struct{ name, address string }{{"tcp", s.HotAddress()}, {"unix", s.HotUnixPath()}} {
		b.Run(network.name+"/echo-probe", func(b *testing.B) { benchEcho(b, network.name, probeSizes) })
		c.connect(network.address)
		b.Run(network.name+"/probe", func(b *testing.B) {
			percentiles(b, func(i int) {
				a, err := c.hot.probe(&hot.ProbeRequest{Namespace: ns, Keys: batches[i%len(batches)]})
				if err != nil || a.LeadingHits != benchKeys {
					b.Fatalf("probe: %v, %d hits", err, a.LeadingHits)
				}
			})
		})
		b.Run(network.name+"/echo-acquire", func(b *testing.B) { benchEcho(b, network.name, acquireSizes) })
		b.Run(network.name+"/acquire", func(b *testing.B) {
			b.ReportAllocs()
			took := make([]time.Duration, b.N)
			for i := range b.N {
				op := c.next()
				begin := time.Now()
				a, err := c.hot.acquire(&hot.AcquireRequest{
					Operation: op, Namespace: ns, Kind: base.LeaseCopy, ManifestSizes: sizes, Keys: batches[i%len(batches)],
				})
				took[i] = time.Since(begin)
				if err != nil || a.Manifests != benchKeys {
					b.Fatalf("acquire: %v, %d manifests", err, a.Manifests)
				}
				_, err = c.hot.release(&hot.ReleaseRequest{
					Operation: hot.Operation{Watermark: op.Sequence},
					Rows:      hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: op.Sequence, Count: hot.ReleaseAll}),
				})
				if err != nil {
					b.Fatalf("release: %v", err)
				}
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}

// benchEcho is the reference: frames of these sizes there and back, and nothing else.
func benchEcho(b *testing.B, network string, sizes [2]int) {
	b.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(b.TempDir(), "e")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		in, out := make([]byte, sizes[0]), make([]byte, sizes[1])
		for {
			if _, err := io.ReadFull(conn, in); err != nil {
				return
			}
			if _, err := conn.Write(out); err != nil {
				return
			}
		}
	}()
	conn, err := net.Dial(network, l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	in, out := make([]byte, sizes[1]), make([]byte, sizes[0])
	percentiles(b, func(int) {
		if _, err := conn.Write(out); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(conn, in); err != nil {
			b.Fatal(err)
		}
	})
	_ = conn.Close()
	_ = l.Close()
	<-done
}
