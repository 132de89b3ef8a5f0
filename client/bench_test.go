package client

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/server"
)

// benchServer is a cpu-only server, and a client on it with pages for n objects.
func benchClient(b *testing.B, objectBytes, n int, change func(*Config)) *Client {
	b.Helper()
	dir, err := os.MkdirTemp("", "maru-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	srv, err := server.Start(context.Background(), server.Config{
		Port: server.AnyPort, HTTPPort: server.NoPort, StateDir: filepath.Join(dir, "state"), CPUOnly: true,
		UnixPath: filepath.Join(dir, "c.sock"), HotUnixPath: filepath.Join(dir, "h.sock"),
		Node: node.Options{Dir: dir}, CPUBudgetBytes: 4 << 30, Log: quiet,
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = srv.Close(context.Background()) })
	cfg := Config{
		ServerAddress: srv.ControlAddress(), Namespace: engineNamespace, ValueBytes: uint64(objectBytes), PieceBytes: 16 << 10,
		Overcommit: On, Logger: quiet, CopyThreads: 1,
	}
	cfg.CPUBytes = cfg.pageBytes() * uint64(n)
	change(&cfg)
	c, err := Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close(context.Background()) })
	if err := c.cpu.Populate(b.Context(), 1); err != nil {
		b.Fatal(err)
	}
	return c
}

func BenchmarkTransfer(b *testing.B) {
	const batch = 32
	for _, size := range []struct {
		name  string
		bytes int
	}{{"2MiB", 2 << 20}, {"256KiB", 256 << 10}, {"64KiB", 64 << 10}} {
		b.Run(size.name+"/memcpy", func(b *testing.B) {
			src, dst := value(1, size.bytes*batch), make([]byte, size.bytes*batch)
			b.SetBytes(int64(len(src)))
			for b.Loop() {
				checksum.Copy(dst, src)
			}
		})
		for _, sums := range []Switch{On, Off} {
			b.Run(size.name+"/load/checksums="+sums.String(), func(b *testing.B) {
				c := benchClient(b, size.bytes, batch, func(cfg *Config) { cfg.Checksums = sums })
				src, dst := value(1, size.bytes*batch), make([]byte, size.bytes*batch)
				var stores []StoreItem
				var loads []LoadItem
				for i := range batch {
					stores = append(stores, StoreItem{Key: key(i), Runs: [][]byte{src[i*size.bytes : (i+1)*size.bytes]}})
					loads = append(loads, LoadItem{Key: key(i), Runs: [][]byte{dst[i*size.bytes : (i+1)*size.bytes]}})
				}
				codes := make([]base.Code, batch)
				if err := c.Store(b.Context(), stores, codes); err != nil || codes[batch-1] != base.CodeOK {
					b.Fatal(err, codes)
				}
				b.SetBytes(int64(len(src)))
				b.ReportAllocs()
				for b.Loop() {
					if err := c.Load(b.Context(), loads, codes); err != nil || codes[0] != base.CodeOK || codes[batch-1] != base.CodeOK {
						b.Fatal(err, codes)
					}
				}
			})
		}
		b.Run(size.name+"/store", func(b *testing.B) {
			c := benchClient(b, size.bytes, 4*batch, func(*Config) {})
			src := value(1, size.bytes*batch)
			stores := make([]StoreItem, batch)
			codes := make([]base.Code, batch)
			var all hot.Keys
			b.SetBytes(int64(len(src)))
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				all = all[:0]
				for i := range batch {
					k := key(n*batch + i)
					stores[i] = StoreItem{Key: k, Runs: [][]byte{src[i*size.bytes : (i+1)*size.bytes]}}
					all = append(all, k[:]...)
				}
				if err := c.Store(b.Context(), stores, codes); err != nil || codes[0] != base.CodeOK || codes[batch-1] != base.CodeOK {
					b.Fatal(err, codes)
				}
				b.StopTimer()
				if err := c.Delete(b.Context(), all, codes); err != nil {
					b.Fatal(err)
				}
				for c.Stats().PagesFree < batch {
				}
				b.StartTimer()
			}
		})
	}
}

func BenchmarkProbe512(b *testing.B) {
	c := benchClient(b, 4096, 16, func(*Config) {})
	var q ProbeQuery
	for i := range 512 {
		k := key(i)
		q.Keys = append(q.Keys, k[:]...)
	}
	verdicts := make([]byte, 512)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Probe(b.Context(), q, verdicts); err != nil {
			b.Fatal(err)
		}
	}
}
