package client

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/flush"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/obs/obstest"
)

// kvCache is a small engine cache of two layers: K and V of a block lie apart.
type kvCache struct {
	layers [2][]byte
	layout Layout
}

const (
	kvBlocks   = 16
	kvRunBytes = 1536
)

func newKVCache() *kvCache {
	k := &kvCache{layout: Layout{BlockCount: kvBlocks}}
	for i := range k.layers {
		// [2, blocks, run]: V lies behind all K.
		k.layers[i] = value(i, 2*kvBlocks*kvRunBytes)
		k.layout.Layers = append(k.layout.Layers, LayerLayout{
			Base: address(k.layers[i]), BlockStrideBytes: kvRunBytes, RunBytes: kvRunBytes,
			RunOffsets: []int64{0, kvBlocks * kvRunBytes},
		})
	}
	return k
}

// object is what blocks look like in an object: [block][layer][run].
func (k *kvCache) object(blocks []uint32) []byte {
	var out []byte
	for _, b := range blocks {
		for i := range k.layers {
			for _, off := range k.layout.Layers[i].RunOffsets {
				at := int(b)*kvRunBytes + int(off)
				out = append(out, k.layers[i][at:at+kvRunBytes]...)
			}
		}
	}
	return out
}

func TestLayoutTransfers(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	blocks := []uint32{3, 0, 15, 7}
	cfg.Namespace, cfg.Opaque, cfg.PageBytes = engineNamespace, false, 0
	cfg.ValueBytes, cfg.PieceBytes = uint64(len(blocks)*2*2*kvRunBytes), 512
	c := open(t, cfg)
	src, dst := newKVCache(), newKVCache()
	from, err := c.RegisterLayout(src.layout)
	if err != nil {
		t.Fatal(err)
	}
	to, err := c.RegisterLayout(dst.layout)
	if err != nil {
		t.Fatal(err)
	}
	codes := make([]base.Code, 4)
	err = c.Store(t.Context(), []StoreItem{
		{Key: key(1), Layout: from, Blocks: blocks},
		{Key: key(2), Layout: from, Blocks: []uint32{16}},
		{Key: key(3), Layout: 99, Blocks: blocks},
		{Key: key(4), Layout: from, Blocks: append(blocks, 1)},
	}, codes)
	if err != nil {
		t.Fatal(err)
	}
	for i, code := range []base.Code{base.CodeOK, base.CodeInvalid, base.CodeNotFound, base.CodeInvalid} {
		want(t, "store", codes[i], code)
	}
	whole := make([]byte, cfg.ValueBytes)
	want(t, "load", loadOne(t, c, 1, whole), base.CodeOK)
	if !bytes.Equal(whole, src.object(blocks)) {
		t.Fatal("the object is not [block][layer][run]")
	}
	// The last two blocks only, into other places.
	for i := range dst.layers {
		clear(dst.layers[i])
	}
	err = c.Load(t.Context(), []LoadItem{{Key: key(1), Layout: to, Blocks: []uint32{1, 2}, OffsetBytes: 2 * 4 * kvRunBytes}}, codes)
	if err != nil || codes[0] != base.CodeOK {
		t.Fatal(err, codes[0])
	}
	if !bytes.Equal(dst.object([]uint32{1, 2}), src.object(blocks[2:])) {
		t.Fatal("a part differs")
	}
	if !bytes.Equal(dst.object([]uint32{0, 3}), make([]byte, 2*4*kvRunBytes)) {
		t.Fatal("blocks were written that were not named")
	}
	if err := c.UnregisterLayout(from); err != nil {
		t.Fatal(err)
	}
	if err := c.UnregisterLayout(from); base.CodeOf(err) != base.CodeNotFound {
		t.Fatal(err)
	}
	for _, bad := range []Layout{
		{}, {BlockCount: 1}, {BlockCount: 2, Layers: []LayerLayout{{Base: 1, RunOffsets: []int64{0}, RunBytes: 1}}},
		{BlockCount: 1, Layers: []LayerLayout{{RunOffsets: []int64{0}, RunBytes: 1}}},
	} {
		if _, err := c.RegisterLayout(bad); base.CodeOf(err) != base.CodeInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

func TestSoftwareCoherence(t *testing.T) {
	if !flush.Supported() {
		t.Skip("no cache line instructions here")
	}
	f := startFake(t)
	f.coherence = maruv1.Coherence_COHERENCE_SOFTWARE
	cfg := cxlConfig(f)
	cfg.Checksums = Off // has no say on such a pool
	a, b := open(t, cfg), open(t, cfg)
	v := value(1, 100000)
	want(t, "store", storeOne(t, a, 1, v), base.CodeOK)
	f.mu.Lock()
	row := f.mu.objects[key(1)].row
	f.mu.Unlock()
	if row.Checksum == 0 {
		t.Fatal("no checksum on a software-coherent pool")
	}
	dst := make([]byte, len(v))
	want(t, "load", loadOne(t, b, 1, dst), base.CodeOK)
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes differ")
	}
	a.region(row.Region).data[row.Offset] ^= 1
	views := make([]View, 1)
	if err := b.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID != 0 {
		t.Fatal("a view of corrupt bytes was handed out", err)
	}
	f.coherence = maruv1.Coherence_COHERENCE_UNSPECIFIED
	if _, err := Open(t.Context(), cfg); base.CodeOf(err) != base.CodeUnsupported {
		t.Fatalf("unknown coherence: %v", err)
	}
}

func TestEagerMap(t *testing.T) {
	f := startFake(t)
	a := open(t, cxlConfig(f))
	cfg := cxlConfig(f)
	cfg.EagerMap = On
	b := open(t, cfg)
	if b.region(a.OwnedRegions()[0]) == nil || b.Stats().RegionsMapped != 1 {
		t.Fatal("the other client's region is not mapped")
	}
	if n, err := b.RegionPageCount(a.OwnedRegions()[0]); n != 16 || err != nil {
		t.Fatal(n, err)
	}
}

func TestUnreachableRegion(t *testing.T) {
	f := startFake(t)
	a, b := open(t, cxlConfig(f)), open(t, cxlConfig(f))
	want(t, "store", storeOne(t, a, 1, value(1, 100)), base.CodeOK)
	f.mu.Lock()
	delete(f.mu.regions, a.OwnedRegions()[0])
	f.mu.Unlock()
	want(t, "load", loadOne(t, b, 1, make([]byte, 100)), base.CodeMiss)
	f.mu.Lock()
	reported := len(f.mu.unreachable)
	f.mu.Unlock()
	if s := b.Stats(); reported != 1 || s.MissesUnmapped != 1 {
		t.Fatalf("%d reports, %+v", reported, s)
	}
	eventually(t, "the release", func() bool { return f.leases() == 0 })
}

// TestOnRegionCalls lets the callback use the client, also while it is being closed.
func TestOnRegionCalls(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.RegionBytes, cfg.CXLBytes, cfg.ExpandBytes = testPage, 3*testPage, testPage
	var c *Client
	seen := 0
	cfg.OnRegion = func(r base.RegionID, n uint64) {
		seen++
		if c != nil {
			if b, writable, err := c.RegionView(r, 0, testPage); err != nil || !writable || len(b) != testPage {
				t.Error(err)
			}
			_ = c.ReleaseRegionView(r)
		}
	}
	c = open(t, cfg)
	if n, err := c.Alloc(t.Context(), 4, make([]Page, 4)); n != 3 || base.CodeOf(err) != base.CodeFull || seen != 3 {
		t.Fatal(n, err, seen)
	}
}

func TestOneLinePerOutage(t *testing.T) {
	f := startFake(t)
	var out obstest.Text
	cfg := cxlConfig(f)
	cfg.Logger = slog.New(slog.NewTextHandler(&out, nil))
	c := open(t, cfg)
	before := c.Epoch()
	f.restart(400 * time.Millisecond)
	eventually(t, "the session", func() bool { return c.Connected() && c.Epoch() != before })
	eventually(t, "the line", func() bool { return strings.Contains(out.String(), "the server is back") })
	if n := strings.Count(out.String(), "the server is away"); n != 1 {
		t.Fatalf("%d lines:\n%s", n, out.String())
	}
}

func TestValidate(t *testing.T) {
	good := Config{ServerAddress: "h:1", Opaque: true, PageBytes: 100, CPUBytes: 1000}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"ServerAddress": func(c *Config) { c.ServerAddress = "nonsense" },
		"Role":          func(c *Config) { c.Role = 9 },
		"Rank":          func(c *Config) { c.Rank, c.WorldSize = 2, 2 },
		"Namespace":     func(c *Config) { c.Namespace = []byte("no cbor") },
		"PageBytes":     func(c *Config) { c.PageBytes = 0 },
		"CPUBytes":      func(c *Config) { c.CPUBytes = 99 },
		"CPUNUMANode":   func(c *Config) { node := -1; c.CPUNUMANode = &node },
		"CPUHugePages":  func(c *Config) { c.CPUHugePages = 9 },
		"SegmentBytes":  func(c *Config) { c.CPUHugePages, c.SegmentBytes = HugePages1G, 2<<20 },
		"no cpu pool":   func(c *Config) { c.CPUBytes, c.RegionBytes, c.CPUHugePages = 0, 1000, HugePagesOff },
		"ExpandBytes":   func(c *Config) { c.RegionBytes, c.ExpandBytes, c.AutoExpand = 100, 100, Off },
		"RegionBytes":   func(c *Config) { c.CXLBytes, c.RegionBytes = 100, 200 },
		"WriteOrder":    func(c *Config) { c.WriteOrder = []base.Medium{base.MediumCXL} },
		"ReadOrder":     func(c *Config) { c.ReadOrder = []base.Medium{base.MediumSSD} },
		"IdleMappings":  func(c *Config) { c.IdleMappings = -1 },
		"CopyThreads":   func(c *Config) { c.CopyThreads = -1 },
		"QueueJobs":     func(c *Config) { c.QueueJobs = maxQueueJobs + 1 },
		"RPCTimeout":    func(c *Config) { c.RPCTimeout = -1 },
		"scheduler":     func(c *Config) { c.Role = base.RoleScheduler },
		"PieceBytes":    func(c *Config) { c.PieceBytes = 4096 },
		"ValueBytes":    func(c *Config) { c.ValueBytes = 5 },
	} {
		t.Run(name, func(t *testing.T) {
			c := good
			change(&c)
			err := c.Validate()
			if base.CodeOf(err) != base.CodeInvalid || !strings.Contains(err.Error(), name) {
				t.Fatalf("%v", err)
			}
		})
	}
	err := (&Config{Rank: 5, QueueJobs: -1}).Validate()
	for _, field := range []string{"ServerAddress", "Rank", "Namespace", "ValueBytes", "QueueJobs"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not in %v", field, err)
		}
	}
}
