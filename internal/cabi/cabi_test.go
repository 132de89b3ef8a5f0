package cabi_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/cabi/cabitest"
	"github.com/xcena-dev/maru/internal/keys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func opaqueConfig(extra map[string]any) []byte {
	c := map[string]any{"server_address": "127.0.0.1:1", "opaque": true, "page_bytes": 4096, "region_bytes": 8 * 4096}
	for k, v := range extra {
		c[k] = v
	}
	b, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return b
}

func open(t *testing.T, l *cabi.Library, extra map[string]any) uint64 {
	t.Helper()
	h, err := l.Open(opaqueConfig(extra))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close(h, 0) })
	return h
}

func newLibrary(t *testing.T) *cabi.Library {
	l := cabi.NewLibrary(cabitest.NewStore().Open)
	t.Cleanup(func() {
		if n := l.ClientCount(); n != 0 {
			t.Errorf("%d clients are still open", n)
		}
	})
	return l
}

func key(t *testing.T, s string) []byte {
	t.Helper()
	k, err := keys.Opaque(keys.TagString, []byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return k[:]
}

func TestConfig(t *testing.T) {
	ns := keys.Namespace{Format: keys.FormatVersion, Weights: "w", Engine: "e"}
	enc, err := ns.Encode()
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{
		"server_address": "tcp://h:1", "instance_id": "i", "engine_id": "e", "role": "scheduler", "rank": 1, "world_size": 2,
		"namespace_hex": hex.EncodeToString(enc), "auto_expand": false, "checksums": true, "write_order": []string{"cxl", "cpu"},
		"rpc_timeout_ms": 1500, "go_max_procs": 3, "queue_jobs": 7, "idle_mappings": 9, "agent_socket": "/a.sock",
		"cpu_numa_node": 0, "cpu_hugepages": "1G",
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := cabi.ParseConfig(text)
	if err != nil {
		t.Fatal(err)
	}
	if c.Client.Role != base.RoleScheduler || c.Client.Rank != 1 || c.Client.WorldSize != 2 || !bytes.Equal(c.Client.Namespace, enc) ||
		c.Client.AutoExpand != client.Off || c.Client.Checksums != client.On || c.Client.Prefault != client.Default ||
		c.Client.RPCTimeout != 1500*time.Millisecond || c.GoMaxProcs != 3 || c.Client.QueueJobs != 7 || c.Client.IdleMappings != 9 || c.Client.AgentSocket != "/a.sock" ||
		c.Client.CPUNUMANode == nil || *c.Client.CPUNUMANode != 0 || c.Client.CPUHugePages != client.HugePages1G ||
		len(c.Client.WriteOrder) != 2 || c.Client.WriteOrder[0] != base.MediumCXL {
		t.Errorf("%+v", c)
	}
}

func TestConfigRefusals(t *testing.T) {
	for name, c := range map[string]struct{ text, names string }{
		"empty":        {"", "0 bytes"},
		"not JSON":     {"{", "configuration"},
		"trailing":     {`{"opaque":true} x`, "behind"},
		"unknown":      {`{"opaque":true,"colour":1}`, "colour"},
		"type":         {`{"opaque":true,"rank":"one"}`, "rank"},
		"negative":     {`{"opaque":true,"cpu_bytes":-1}`, "cpu_bytes"},
		"role":         {`{"opaque":true,"role":"boss"}`, "boss"},
		"no namespace": {`{}`, "namespace_hex"},
		"hex":          {`{"namespace_hex":"zz"}`, "namespace_hex"},
		"canonical":    {`{"namespace_hex":"80"}`, "namespace_hex"},
		"reserved":     {`{"namespace_hex":"` + hex.EncodeToString(keys.OpaqueNamespace()) + `"}`, "opaque"},
		"medium":       {`{"opaque":true,"write_order":["tape"]}`, "tape"},
		"timeout":      {`{"opaque":true,"rpc_timeout_ms":-1}`, "rpc_timeout_ms"},
		"huge pages":   {`{"opaque":true,"cpu_hugepages":"4M"}`, "cpu_hugepages"},
		"procs":        {`{"opaque":true,"go_max_procs":-1}`, "go_max_procs"},
	} {
		_, err := cabi.ParseConfig([]byte(c.text))
		if !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := cabi.ParseConfig([]byte(`{"role":"x","rpc_timeout_ms":-1}`))
	for _, field := range []string{"role", "rpc_timeout_ms", "namespace_hex"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named by %v", field, err)
		}
	}
}

func TestHandles(t *testing.T) {
	l := newLibrary(t)
	seen := map[uint64]bool{}
	for range 100 {
		h, err := l.Open(opaqueConfig(nil))
		if err != nil {
			t.Fatal(err)
		}
		if h == 0 || h>>56 != uint64(cabi.KindClient) || seen[h] {
			t.Fatalf("handle %#x (C1)", h)
		}
		seen[h] = true
		if err := l.Close(h, 0); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(h, 0); !errors.Is(err, base.ErrClosed) {
			t.Fatalf("second close: %v", err)
		}
		if err := l.Ping(h, 0); !errors.Is(err, base.ErrClosed) {
			t.Fatalf("stale handle: %v", err)
		}
	}
	for _, h := range []uint64{0, 1, 1 << 56, uint64(cabi.KindLayout)<<56 | 1, uint64(cabi.KindClient)<<56 | 1<<40, ^uint64(0)} {
		if err := l.Ping(h, 0); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%#x: %v", h, err)
		}
	}
	h := open(t, l, nil)
	if err := l.UnregisterLayout(h, 7); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a number without a kind: %v", err)
	}
	if err := l.UnregisterLayout(h, uint64(cabi.KindJob)<<56|7); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("a job as layout: %v", err)
	}
	if err := l.JobResult(h, uint64(cabi.KindJob)<<56|7, nil); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("unknown job: %v", err)
	}
}

func TestOpenFailures(t *testing.T) {
	l := newLibrary(t)
	if h, err := l.Open(opaqueConfig(map[string]any{"instance_id": "away"})); h != 0 || !errors.Is(err, base.ErrUnavailable) {
		t.Errorf("%#x, %v", h, err)
	}
	if h, err := l.Open(opaqueConfig(map[string]any{"region_bytes": 1})); h != 0 || !errors.Is(err, base.ErrInvalid) {
		t.Errorf("%#x, %v", h, err)
	}
	panics := cabi.NewLibrary(func(context.Context, client.Config) (cabi.Client, error) { panic("in open") })
	if h, err := panics.Open(opaqueConfig(nil)); h != 0 || !errors.Is(err, base.ErrInternal) {
		t.Errorf("%#x, %v", h, err)
	}
}

func TestPanicIsContainedAndPoisons(t *testing.T) {
	l := newLibrary(t)
	bad, good := open(t, l, map[string]any{"instance_id": "panic:probe"}), open(t, l, nil)
	_, err := l.Probe(bad, key(t, "k"), 0, nil, 0, make([]byte, 1), 0)
	if !errors.Is(err, base.ErrInternal) || !strings.Contains(err.Error(), "told to panic in probe") {
		t.Fatalf("%v", err)
	}
	if err := l.Ping(bad, 0); !errors.Is(err, base.ErrInternal) || !strings.Contains(err.Error(), "panic in probe") {
		t.Errorf("a poisoned client answers %v", err)
	}
	if err := l.Ping(good, 0); err != nil {
		t.Errorf("another client: %v", err)
	}
	if err := l.Close(bad, 0); err != nil {
		t.Errorf("close: %v", err)
	}
	worse := open(t, l, map[string]any{"instance_id": "panic:close"})
	if err := l.Close(worse, 0); !errors.Is(err, base.ErrInternal) {
		t.Errorf("close that panics: %v", err)
	}
	if err := l.Close(worse, 0); !errors.Is(err, base.ErrClosed) {
		t.Errorf("the handle is not gone: %v", err)
	}
}

func TestPagesAndViews(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, map[string]any{"auto_expand": false})
	pages := make([]cabi.Page, 9)
	n, err := l.Alloc(h, pages, 0)
	if n != 8 || !errors.Is(err, base.ErrFull) {
		t.Fatalf("%d pages, %v", n, err)
	}
	ks := append(key(t, "a"), key(t, "b")...)
	codes := make([]base.Code, 2)
	err = l.Commit(h, ks, nil, []uint32{pages[0].Region, 99}, []uint32{pages[0].Index, 0}, []uint64{10, 1}, codes, 0)
	if err != nil || codes[0] != base.CodeOK || codes[1] != base.CodeNotFound {
		t.Fatalf("%v %v", codes, err)
	}
	if err := l.Free(h, []uint32{pages[0].Region, pages[1].Region}, []uint32{pages[0].Index, pages[1].Index}, codes); err != nil ||
		codes[0] != base.CodeInvalid || codes[1] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	views := make([]cabi.View, 2)
	if err := l.Retrieve(h, ks, 0, views, 0); err != nil || views[0].ID == 0 || views[0].Bytes != 10 || views[0].Data != pages[0].Data || views[1] != (cabi.View{}) {
		t.Fatalf("%+v %v", views, err)
	}
	if err := l.Delete(h, ks, codes, 0); err != nil || codes[0] != base.CodePinned || codes[1] != base.CodeNotFound {
		t.Fatalf("%v %v", codes, err)
	}
	if err := l.ReleaseViews(h, []uint64{views[0].ID, 12345}); err != nil {
		t.Fatal(err)
	}
	if err := l.Delete(h, ks, codes, 0); err != nil || codes[0] != base.CodeOK {
		t.Fatalf("%v %v", codes, err)
	}
	if err := l.Retrieve(h, ks, 2, views, 0); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("mode 2: %v", err)
	}
	if err := l.Retrieve(h, ks[:31], 0, views, 0); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("31 bytes of keys: %v", err)
	}
	if _, err := l.Probe(h, ks, 0, nil, 0, make([]byte, 2), -1); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("negative timeout: %v", err)
	}
	if err := l.ReleaseViews(h, make([]uint64, cabi.MaxBatchCount+1)); !errors.Is(err, base.ErrLimit) {
		t.Errorf("too many: %v", err)
	}
}

func TestRegions(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	cursor, region, pages, err := l.NextRegion(h, 0)
	if err != nil || cursor != 1 || pages != 8 {
		t.Fatalf("%d %d %d %v", cursor, region, pages, err)
	}
	if _, _, _, err := l.NextRegion(h, cursor); !errors.Is(err, base.ErrNotFound) {
		t.Fatal(err)
	}
	if _, err := l.Alloc(h, make([]cabi.Page, 9), 0); err != nil {
		t.Fatal(err)
	}
	_, second, _, err := l.NextRegion(h, cursor)
	if err != nil || second == region {
		t.Fatalf("region %d: %v", second, err)
	}
	if n, err := l.OwnedRegions(h, make([]uint32, 1)); n != 2 || !errors.Is(err, base.ErrLimit) {
		t.Errorf("short: %d %v", n, err)
	}
	out := make([]uint32, 2)
	if n, err := l.OwnedRegions(h, out); n != 2 || err != nil || out[0] != region || out[1] != second {
		t.Errorf("%v %d %v", out, n, err)
	}
	if free, err := l.RegionFreeCount(h, region); err != nil || free != 0 {
		t.Errorf("%d %v", free, err)
	}
	data, writable, err := l.RegionView(h, region, 4096, 10)
	if err != nil || data == 0 || !writable {
		t.Errorf("%v", err)
	}
	if err := l.ReleaseRegionView(h, region); err != nil {
		t.Error(err)
	}
	if err := l.ReleaseRegionView(h, region); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("released twice: %v", err)
	}
	if _, _, err := l.RegionView(h, region, 8*4096, 1); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("out of range: %v", err)
	}
	if _, err := l.RegionPageCount(h, 999); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

func TestShortBuffers(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, nil)
	for name, f := range map[string]func([]byte) (int, error){
		"info":  func(b []byte) (int, error) { return l.Info(h, b) },
		"stats": func(b []byte) (int, error) { return l.Stats(h, b) },
		"usage": func(b []byte) (int, error) { return l.Usage(h, 0, b) },
		"log":   func(b []byte) (int, error) { return l.WaitLog(h, 1000, b) },
	} {
		n, err := f(nil)
		if !errors.Is(err, base.ErrLimit) || n == 0 {
			t.Errorf("%s: %d, %v", name, n, err)
		}
		buf := bytes.Repeat([]byte{'x'}, n)
		if _, err := f(buf); !errors.Is(err, base.ErrLimit) || !bytes.Equal(buf, bytes.Repeat([]byte{'x'}, n)) {
			t.Errorf("%s: one byte short: %v, %q", name, err, buf)
		}
		buf = make([]byte, n+1)
		if m, err := f(buf); err != nil || m != n || buf[n] != 0 || !json.Valid(buf[:n]) {
			t.Errorf("%s: %d of %d, %v, %q", name, m, n, err, buf)
		}
	}
	var info map[string]any
	buf := make([]byte, 4096)
	n, err := l.Info(h, buf)
	if err != nil || json.Unmarshal(buf[:n], &info) != nil || info["page_bytes"] != 4096.0 || info["role"] != "worker" {
		t.Errorf("%v %v", info, err)
	}
	n, err = l.Stats(h, buf)
	if err != nil || json.Unmarshal(buf[:n], &info) != nil || info["pages_free"] != 8.0 {
		t.Errorf("%v %v", info, err)
	}
}

func TestLogs(t *testing.T) {
	l := newLibrary(t)
	var log *slog.Logger
	store := cabitest.NewStore()
	wrapped := cabi.NewLibrary(func(ctx context.Context, cfg client.Config) (cabi.Client, error) {
		log = cfg.Logger
		return store.Open(ctx, cfg)
	})
	_ = l
	h, err := wrapped.Open(opaqueConfig(nil))
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	next := func(ms int64) (map[string]any, error) {
		n, err := wrapped.WaitLog(h, ms, buf)
		if err != nil {
			return nil, err
		}
		var r map[string]any
		if err := json.Unmarshal(buf[:n], &r); err != nil {
			t.Fatal(err)
		}
		return r, nil
	}
	if r, err := next(1000); err != nil || r["msg"] != "fake client is open" || r["level"] != "INFO" {
		t.Fatalf("%v %v", r, err)
	}
	if _, err := next(1); !errors.Is(err, base.ErrPending) {
		t.Fatal(err)
	}
	log.Debug("not this")
	log.With("a", 1).WithGroup("g").Warn("grouped", "b", 2, slog.Group("h", "c", 3))
	r, err := next(1000)
	if err != nil {
		t.Fatal(err)
	}
	if attrs := r["attrs"].(map[string]any); attrs["a"] != "1" || attrs["g.b"] != "2" || attrs["g.h.c"] != "3" || len(attrs) != 3 {
		t.Errorf("%v", attrs)
	}
	for range 300 {
		log.Info("flood")
	}
	log.Info("last")
	for n := 0; ; n++ {
		r, err := next(10)
		if err != nil {
			t.Fatalf("after %d records: %v", n, err)
		}
		if r["msg"] == "last" {
			if n != 255 || r["attrs"].(map[string]any)["records_dropped"] == nil {
				t.Errorf("%d records before it, attributes %v", n, r["attrs"])
			}
			break
		}
	}
	// A waiter gets the last lines of a client that is being closed, then the end.
	var wg sync.WaitGroup
	wg.Go(func() {
		if r, err := next(10_000); err != nil || r["msg"] != "fake client is closed" {
			t.Errorf("%v %v", r, err)
		}
	})
	if err := wrapped.Close(h, 0); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if _, err := next(10_000); !errors.Is(err, base.ErrClosed) {
		t.Error(err)
	}
}

func TestTimeouts(t *testing.T) {
	l := newLibrary(t)
	h := open(t, l, map[string]any{"instance_id": "slow"})
	if err := l.Ping(h, 20); base.CodeOf(err) != base.CodeTimeout {
		t.Errorf("%v", err)
	}
}

func TestIdentity(t *testing.T) {
	out := make([]byte, 96)
	packed := []byte("ab5")
	if err := cabi.OpaqueKeys(packed, []uint64{1, 2, 3}, []byte("sbi"), out); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out[:32], key(t, "a")) || bytes.Equal(out[32:64], key(t, "b")) {
		t.Errorf("%x", out)
	}
	for name, c := range map[string]struct {
		ends []uint64
		tags string
	}{
		"falling": {[]uint64{2, 1, 3}, "sss"}, "beyond": {[]uint64{1, 2, 4}, "sss"}, "empty": {[]uint64{1, 1, 3}, "sss"},
		"tag": {[]uint64{1, 2, 3}, "sxs"}, "no integer": {[]uint64{1, 2, 3}, "iss"},
	} {
		if err := cabi.OpaqueKeys(packed, c.ends, []byte(c.tags), out); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}

	ns := keys.Namespace{Format: 1, Weights: "w", Engine: "e"}
	want, err := ns.Encode()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, len(want))
	if n, err := cabi.EncodeNamespace([]byte(`{"format":1,"weights":"w","engine":"e"}`), buf[:10]); n != len(want) || !errors.Is(err, base.ErrLimit) {
		t.Errorf("%d %v", n, err)
	}
	if _, err := cabi.EncodeNamespace([]byte(`{"format":1,"weights":"w","engine":"e"}`), buf); err != nil || !bytes.Equal(buf, want) {
		t.Errorf("%v", err)
	}
	if _, err := cabi.EncodeNamespace([]byte(`{"format":1,"weights":"w","engine":"e","x":1}`), buf); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("%v", err)
	}

	link := make([]byte, 32)
	id := base.NamespaceOf(want)
	if err := cabi.Root(id[:], nil, link); err != nil || !bytes.Equal(link, id[:]) {
		t.Fatal(err)
	}
	extras, err := keys.EncodeExtras([]keys.Extra{{Kind: "mm", ID: []byte("x")}})
	if err != nil {
		t.Fatal(err)
	}
	chunks := cabi.Chunks{
		Tokens: []byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0}, TokenEnds: []uint64{2, 3},
		Extras: extras, ExtraEnds: []uint64{0, uint64(len(extras))}, Shard: 4, Part: base.PartAllLayers,
	}
	outKeys, parents, links := make([]byte, 64), bytes.Repeat([]byte{7}, 56), make([]byte, 64)
	if err := cabi.ChainKeys(link, chunks, outKeys, parents, links); err != nil {
		t.Fatal(err)
	}
	chain := keys.NewChain(keys.Link(id))
	for i, c := range []struct {
		tokens []uint32
		extras []byte
	}{{[]uint32{1, 2}, nil}, {[]uint32{3}, extras}} {
		l, err := chain.Next(c.tokens, c.extras)
		if err != nil {
			t.Fatal(err)
		}
		k, p := l.Key(4, base.PartAllLayers), chain.Parent()
		if !bytes.Equal(outKeys[32*i:32*i+32], k[:]) || !bytes.Equal(parents[28*i:28*i+28], p[:]) || !bytes.Equal(links[32*i:32*i+32], l[:]) {
			t.Errorf("chunk %d differs", i)
		}
	}
	if !bytes.Equal(link, links[32:]) {
		t.Error("link was not moved on")
	}
	// Going on from a known link gives the parent that the chain had.
	again, parent := bytes.Clone(links[:32]), make([]byte, 28)
	second := cabi.Chunks{Tokens: chunks.Tokens[8:], TokenEnds: []uint64{1}, Extras: extras, ExtraEnds: []uint64{uint64(len(extras))}, First: 1, Shard: 4, Part: base.PartAllLayers}
	if err := cabi.ChainKeys(again, second, nil, parent, nil); err != nil || !bytes.Equal(again, link) || !bytes.Equal(parent, parents[28:]) {
		t.Errorf("resumed: %v", err)
	}
	before := bytes.Clone(link)
	for name, bad := range map[string]cabi.Chunks{
		"no tokens": {TokenEnds: []uint64{0}}, "beyond": {Tokens: chunks.Tokens, TokenEnds: []uint64{4}},
		"falling": {Tokens: chunks.Tokens, TokenEnds: []uint64{2, 1}},
		"extras":  {Tokens: chunks.Tokens, TokenEnds: []uint64{1}, Extras: extras, ExtraEnds: []uint64{uint64(len(extras)) + 1}},
		"no CBOR": {Tokens: chunks.Tokens, TokenEnds: []uint64{1}, Extras: []byte{0x18, 1}, ExtraEnds: []uint64{2}},
	} {
		if err := cabi.ChainKeys(link, bad, nil, nil, nil); !errors.Is(err, base.ErrInvalid) || !bytes.Equal(link, before) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(opaqueConfig(nil))
	f.Add([]byte(`{"namespace_hex":"a0","write_order":["cpu"],"auto_expand":null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := cabi.ParseConfig(text)
		if err == nil && keys.CheckCanonical(c.Client.Namespace) != nil {
			t.Fatalf("accepted %q", text)
		}
		if err != nil && !errors.Is(err, base.ErrInvalid) {
			t.Fatal(err)
		}
	})
}

func FuzzOpaqueKeys(f *testing.F) {
	f.Add([]byte("ab5"), uint64(1), uint64(3), []byte("si"))
	f.Fuzz(func(t *testing.T, packed []byte, a, b uint64, tags []byte) {
		if len(tags) < 2 {
			return
		}
		err := cabi.OpaqueKeys(packed, []uint64{a, b}, tags, make([]byte, 64))
		if err == nil && (a > b || b > uint64(len(packed))) {
			t.Fatal("ends out of order were accepted")
		}
	})
}
