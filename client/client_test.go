package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/session"
)

func TestMain(m *testing.M) {
	inject.Main(map[string]inject.Subject{"client": clientSubject})
	farewells.Store(farewellCount) // none but in the tests of it
	leak.Check(m)
}

const testPage = 256 << 10

// engineNamespace is a namespace that no build knows the fields of: {"x": "y"}.
var engineNamespace = []byte{0xa1, 0x61, 'x', 0x61, 'y'}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func cxlConfig(f *fake) Config {
	return Config{
		ServerAddress: f.address, Opaque: true, PageBytes: testPage,
		RegionBytes: 16 * testPage, CXLBytes: 64 * testPage, Logger: quiet,
	}
}

func open(t *testing.T, cfg Config) *Client {
	t.Helper()
	return openClock(t, cfg, node.BootTime)
}

func openClock(t *testing.T, cfg Config, clock func() time.Duration) *Client {
	t.Helper()
	c, err := openWith(t.Context(), cfg, clock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func key(n int) base.Key {
	var d base.Digest
	d[0], d[1], d[2], d[3] = byte(n), byte(n>>8), byte(n>>16), 1
	return base.MakeKey(d, 0, base.PartAllLayers)
}

func keysOf(ns ...int) hot.Keys {
	var out hot.Keys
	for _, n := range ns {
		k := key(n)
		out = append(out, k[:]...)
	}
	return out
}

func value(n, size int) []byte {
	b := make([]byte, size)
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)})
	_, _ = r.Read(b)
	return b
}

func storeOne(t *testing.T, c *Client, n int, v []byte) base.Code {
	t.Helper()
	codes := make([]base.Code, 1)
	if err := c.Store(t.Context(), []StoreItem{{Key: key(n), Runs: [][]byte{v}}}, codes); err != nil {
		t.Fatal(err)
	}
	return codes[0]
}

func loadOne(t *testing.T, c *Client, n int, dst []byte) base.Code {
	t.Helper()
	codes := make([]base.Code, 1)
	if err := c.Load(t.Context(), []LoadItem{{Key: key(n), Runs: [][]byte{dst}}}, codes); err != nil {
		t.Fatal(err)
	}
	return codes[0]
}

func want(t *testing.T, what string, got, want base.Code) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: %v, want %v", what, got, want)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s did not come", what)
}

func TestPagesRoundTrip(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	pages := make([]Page, 3)
	if n, err := c.Alloc(t.Context(), 3, pages); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	items := make([]CommitItem, 3)
	for i, p := range pages {
		v := value(i, 1000+i*70000)
		copy(p.Bytes, v)
		items[i] = CommitItem{Key: key(i), Region: p.Region, Index: p.Index, Length: uint64(len(v))}
	}
	items[2].Key = key(1) // twice in one batch
	items[2].Length = items[1].Length
	codes := make([]base.Code, 3)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.CommitPages(ended, items, codes); !errors.Is(err, context.Canceled) {
		t.Fatalf("a call that has ended: %v", err)
	}
	if s := c.Stats(); s.PagesWriting != 3 {
		t.Fatalf("the pages are the caller's still: %+v", s)
	}
	if err := c.CommitPages(t.Context(), items, codes); err != nil {
		t.Fatal(err)
	}
	want(t, "first", codes[0], base.CodeOK)
	want(t, "second", codes[1], base.CodeOK)
	want(t, "same key", codes[2], base.CodeAlreadyStored)
	if s := c.Stats(); s.PagesReady != 2 || s.PagesFree != 14 {
		t.Fatalf("%+v", s)
	}
	if r := f.records(pages[0].Region); len(r) != 2 || r[0].Key != key(0) || r[1].Length != 71000 {
		t.Fatalf("records %+v", r)
	}
	views := make([]View, 3)
	if err := c.Retrieve(t.Context(), keysOf(0, 9, 1), hot.ModeEach, views); err != nil {
		t.Fatal(err)
	}
	if views[1].ID != 0 || !bytes.Equal(views[0].Bytes, value(0, 1000)) || !bytes.Equal(views[2].Bytes, value(1, 71000)) {
		t.Fatal("views differ")
	}
	if err := c.FreePage(items[0].Region, items[0].Index); base.CodeOf(err) != base.CodeInvalid {
		t.Fatalf("freeing a stored page: %v", err)
	}
	if err := c.Delete(t.Context(), keysOf(0), codes); err != nil {
		t.Fatal(err)
	}
	want(t, "delete under a view", codes[0], base.CodePinned)
	c.ReleaseViews([]uint64{views[0].ID, views[2].ID, 99})
	eventually(t, "the release", func() bool { return f.leases() == 0 })
	if err := c.Delete(t.Context(), keysOf(0, 7), codes); err != nil {
		t.Fatal(err)
	}
	want(t, "delete", codes[0], base.CodeOK)
	want(t, "delete of nothing", codes[1], base.CodeNotFound)
	eventually(t, "the reclaim", func() bool { return c.Stats().PagesFree == 15 })
	if r := f.records(pages[0].Region); len(r) != 1 {
		t.Fatalf("records after delete: %+v", r)
	}
}

func TestStoreLoad(t *testing.T) {
	f := startFake(t)
	for _, tc := range []struct {
		name string
		cfg  func(*Config)
	}{
		{"cxl", func(*Config) {}},
		{"off", func(c *Config) { c.Checksums = Off }},
		{"cpu", func(c *Config) { c.CXLBytes, c.RegionBytes, c.CPUBytes, c.Overcommit = 0, 0, 32*testPage, On }},
		{"engine", func(c *Config) {
			c.Namespace, c.Opaque, c.PageBytes, c.ValueBytes, c.PieceBytes = engineNamespace, false, 0, 200000, 4096
			c.RegionBytes, c.CXLBytes = 16*testPage, 0
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := cxlConfig(f)
			cfg.CopyThreads = 3
			tc.cfg(&cfg)
			c := open(t, cfg)
			base0 := 1000 * len(tc.name) * int(tc.name[0])
			const n = 8
			var stores []StoreItem
			for i := range n {
				v := value(i, 200000)
				stores = append(stores, StoreItem{Key: key(base0 + i), Runs: [][]byte{v[:7], v[7:100000], v[100000:]}})
			}
			codes := make([]base.Code, n)
			if err := c.Store(t.Context(), stores, codes); err != nil {
				t.Fatal(err)
			}
			for i := range codes {
				want(t, "store", codes[i], base.CodeOK)
			}
			if err := c.Store(t.Context(), stores[:2], codes); err != nil {
				t.Fatal(err)
			}
			want(t, "again", codes[1], base.CodeAlreadyStored)
			for _, part := range []struct{ from, size int }{{0, 200000}, {0, 1}, {199999, 1}, {4096, 8192}, {65535, 65538}, {70000, 123}, {5, 199990}} {
				var loads []LoadItem
				dst := make([][]byte, n)
				for i := range n {
					dst[i] = make([]byte, part.size)
					h := part.size / 3
					loads = append(loads, LoadItem{Key: key(base0 + i), Runs: [][]byte{dst[i][:h], dst[i][h:]}, OffsetBytes: uint64(part.from)})
				}
				if err := c.Load(t.Context(), loads, codes); err != nil {
					t.Fatal(err)
				}
				for i := range n {
					want(t, "load", codes[i], base.CodeOK)
					if !bytes.Equal(dst[i], value(i, 200000)[part.from:part.from+part.size]) {
						t.Fatalf("object %d differs in part %+v", i, part)
					}
				}
			}
			want(t, "behind the end", loadPartAt(t, c, base0, 200000, 1), base.CodeInvalid)
			want(t, "a miss", loadOne(t, c, base0+99, make([]byte, 10)), base.CodeMiss)
			eventually(t, "the releases", func() bool { return f.leases() == 0 && c.Stats().Leases == 0 })
		})
	}
}

func loadPartAt(t *testing.T, c *Client, n int, from uint64, size int) base.Code {
	t.Helper()
	codes := make([]base.Code, 1)
	if err := c.Load(t.Context(), []LoadItem{{Key: key(n), Runs: [][]byte{make([]byte, size)}, OffsetBytes: from}}, codes); err != nil {
		t.Fatal(err)
	}
	return codes[0]
}

func TestTwoClientsShare(t *testing.T) {
	f := startFake(t)
	a, b := open(t, cxlConfig(f)), open(t, cxlConfig(f))
	v := value(1, 100000)
	want(t, "store", storeOne(t, a, 1, v), base.CodeOK)
	dst := make([]byte, len(v))
	want(t, "load elsewhere", loadOne(t, b, 1, dst), base.CodeOK)
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes differ")
	}
	want(t, "a duplicate", storeOne(t, b, 1, v), base.CodeAlreadyStored)
	region := a.OwnedRegions()[0]
	if _, writable, err := b.RegionView(region, 0, 10); err != nil || writable {
		t.Fatalf("foreign view: writable %v, %v", writable, err)
	}
	if err := b.ReleaseRegionView(region); err != nil {
		t.Fatal(err)
	}
	// Gone for everybody when the writer says so; the foreign mapping stays until drained.
	f.mu.Lock()
	f.mu.sessions[b.Session()].tell(drainEvent(f, region))
	f.mu.Unlock()
	eventually(t, "the unmapping", func() bool { return b.region(region) == nil })
	eventually(t, "the unhold", func() bool { return f.holdCount() == 2 })
	want(t, "load maps it again", loadOne(t, b, 1, dst), base.CodeOK)
}

// A Hold whose answer is lost may be on record, and is given back.
func TestLostHold(t *testing.T) {
	f := startFake(t)
	w := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, w, 1, value(1, 1000)), base.CodeOK)
	own := w.OwnedRegions()
	if len(own) != 1 || f.holdCount() != 1 {
		t.Fatal(own, f.holdCount())
	}
	cfg := cxlConfig(f)
	cfg.AutoExpand = Off
	reader := open(t, cfg)
	eventually(t, "the reader's region", func() bool { return f.holdCount() == 2 })
	// One loss is made good by the same call again; two are not.
	proofs := f.callCount("prove")
	f.loseHolds.Store(2)
	want(t, "load without a hold", loadOne(t, reader, 1, make([]byte, 1000)), base.CodeMiss)
	eventually(t, "the end of the reader's hold", func() bool { return f.holdCount() == 2 })
	want(t, "load", loadOne(t, reader, 1, make([]byte, 1000)), base.CodeOK)
	if f.holdCount() != 3 {
		t.Fatalf("%d holds", f.holdCount())
	}
	eventually(t, "the domains proved again: the region was only lost for a while", func() bool { return f.callCount("prove") > proofs })
	second := open(t, cfg)
	eventually(t, "its region", func() bool { return f.holdCount() == 4 })
	f.loseHolds.Store(1)
	want(t, "load with a hold whose first answer was lost", loadOne(t, second, 1, make([]byte, 1000)), base.CodeOK)
	third := cxlConfig(f)
	third.EagerMap = On
	f.loseHolds.Store(8) // twice each: its own; then those of all others in one list, and two of them alone
	last := open(t, third)
	eventually(t, "the losses", func() bool { return f.loseHolds.Load() < 0 })
	eventually(t, "the end of the lost holds", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		for id := range f.mu.regions {
			if f.mu.holds[holdKey(last.sessionID(), uint32(id))] && last.region(id) == nil {
				return false
			}
		}
		return true
	})
}

// A first region that cannot be held is asked for once a heartbeat, though each attempt
// makes an event.
func TestRefusedHoldBacksOff(t *testing.T) {
	f := startFake(t)
	f.refuseHolds.Store(true)
	c := open(t, cxlConfig(f))
	time.Sleep(500 * time.Millisecond)
	if n := f.callCount("expand"); n < 2 || n > 12 {
		t.Fatalf("%d attempts in ten heartbeats", n)
	}
	f.refuseHolds.Store(false)
	eventually(t, "the region", func() bool { return len(c.OwnedRegions()) == 1 })
}

// A growth whose answer is lost is asked for again also when nobody stores any more: its
// operation must not stay open under all that come after it.
func TestLostGrowthIsFinished(t *testing.T) {
	for _, restart := range []bool{false, true} {
		f := startFake(t)
		cfg := cxlConfig(f)
		cfg.RegionBytes, cfg.CXLBytes, cfg.ExpandBytes = testPage, 2*testPage, testPage
		c := open(t, cfg)
		want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
		f.loseExpands.Store(2)
		want(t, "store without a page", storeOne(t, c, 2, value(2, 1000)), base.CodeFull)
		if restart {
			f.loseExpands.Store(1 << 20) // the new server knows nothing of it
			f.restart(20 * time.Millisecond)
			eventually(t, "the session", c.Connected)
		}
		eventually(t, "the end of the operation", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			last, err := c.mu.core.Begin()
			if err != nil {
				t.Fatal(err)
			}
			c.mu.core.End(last)
			return c.mu.core.Watermark() > last
		})
		if !restart {
			eventually(t, "the region", func() bool { return len(c.OwnedRegions()) == 2 })
		}
	}
}

func TestFullPoolSkips(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.RegionBytes, cfg.CXLBytes = 2*testPage, 4*testPage
	c := open(t, cfg)
	for i := range 4 {
		want(t, "store", storeOne(t, c, i, value(i, 1000)), base.CodeOK)
	}
	want(t, "full", storeOne(t, c, 4, value(4, 1000)), base.CodeFull)
	want(t, "the hits stay", loadOne(t, c, 2, make([]byte, 1000)), base.CodeOK)
	calls := f.callCount("expand")
	want(t, "full again", storeOne(t, c, 4, value(4, 1000)), base.CodeFull)
	if n := f.callCount("expand"); n != calls || n != 2 {
		t.Fatalf("%d calls of Expand", n)
	}
	if _, err := c.Alloc(t.Context(), 1, make([]Page, 1)); base.CodeOf(err) != base.CodeFull {
		t.Fatal(err)
	}
}

func TestSplitPrefix(t *testing.T) {
	for _, order := range [][]base.Medium{{base.MediumCPU, base.MediumCXL}, {base.MediumCXL, base.MediumCPU}} {
		t.Run(order[0].String(), func(t *testing.T) {
			f := startFake(t)
			cfg := cxlConfig(f)
			cfg.CPUBytes, cfg.CXLBytes, cfg.RegionBytes = 3*testPage, 3*testPage, 3*testPage
			cfg.WriteOrder, cfg.Overcommit = order, On
			c := open(t, cfg)
			for i := range 6 {
				want(t, "store", storeOne(t, c, i, value(i, testPage)), base.CodeOK)
			}
			want(t, "both full", storeOne(t, c, 6, value(6, 10)), base.CodeFull)
			f.mu.Lock()
			for i := range 6 {
				private := f.mu.objects[key(i)].row.Region >= base.FirstPrivateRegion
				if i < 3 && private != (order[0] == base.MediumCPU) || i >= 3 && private == (order[0] == base.MediumCPU) {
					t.Errorf("object %d is in the wrong medium", i)
				}
			}
			f.mu.Unlock()
			verdicts := make([]byte, 7)
			if n, err := c.Probe(t.Context(), ProbeQuery{Keys: keysOf(0, 1, 2, 3, 4, 5, 6), Mode: hot.ModePrefix}, verdicts); n != 6 || err != nil {
				t.Fatal(n, err)
			}
			for i := range 6 {
				dst := make([]byte, testPage)
				want(t, "load", loadOne(t, c, i, dst), base.CodeOK)
				if !bytes.Equal(dst, value(i, testPage)) {
					t.Fatalf("object %d differs", i)
				}
			}
		})
	}
}

func TestLostCommitAnswer(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "warm", storeOne(t, c, 0, value(0, 1000)), base.CodeOK)
	f.drop[hot.OpCommit].Store(1)
	want(t, "retried on another connection", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	f.drop[hot.OpCommit].Store(2)
	f.drop[hot.OpResolve].Store(2)
	want(t, "lost", storeOne(t, c, 2, value(2, 1000)), base.CodeUnknown)
	if s := c.Stats(); s.PagesQuarantined != 1 && s.Resolved == 0 {
		t.Fatalf("%+v", s)
	}
	eventually(t, "the resolve", func() bool { s := c.Stats(); return s.PagesQuarantined == 0 && s.PagesReady == 3 })
	dst := make([]byte, 1000)
	want(t, "load", loadOne(t, c, 2, dst), base.CodeOK)
	eventually(t, "the mark", func() bool { return len(f.records(c.OwnedRegions()[0])) == 3 })
	// An Acquire whose answer is lost leaks no lease.
	f.drop[hot.OpAcquire].Store(2)
	want(t, "lost acquire", loadOne(t, c, 2, dst), base.CodeMiss)
	eventually(t, "the release by name", func() bool { return f.leases() == 0 })
	eventually(t, "the watermark", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		a, err := c.mu.core.Begin()
		if err != nil {
			return false
		}
		low := c.mu.core.Watermark()
		c.mu.core.End(a)
		return low == a
	})
}

// A lost Commit is resolved also when as many operations as there may be have come behind
// it, while the server did not answer: nothing could begin any more else.
func TestResolveBehindAFullWindow(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	f.drop[hot.OpResolve].Store(1 << 30)
	f.drop[hot.OpCommit].Store(2)
	want(t, "lost", storeOne(t, c, 0, value(0, 1000)), base.CodeUnknown)
	for full := false; !full; {
		c.mu.Lock()
		seq, err := c.mu.core.Begin()
		c.mu.core.End(seq)
		c.mu.Unlock()
		full = err != nil
	}
	f.drop[hot.OpResolve].Store(0)
	eventually(t, "the resolve", func() bool { return c.Stats().PagesQuarantined == 0 })
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	want(t, "load", loadOne(t, c, 0, make([]byte, 1000)), base.CodeOK)
}

// The first delivery of a Commit is executed and its answer lost; the second comes when
// the epoch is over. Stale is no refusal then: the page shows its object.
func TestStaleSecondDelivery(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "warm", storeOne(t, c, 0, value(0, 1000)), base.CodeOK)
	f.endOnDrop.Store(true)
	f.drop[hot.OpCommit].Store(1)
	want(t, "ended", storeOne(t, c, 1, value(1, 1000)), base.CodeUnknown)
	eventually(t, "the resolve", func() bool { s := c.Stats(); return s.PagesQuarantined == 0 && s.PagesReady == 2 })
	want(t, "load", loadOne(t, c, 1, make([]byte, 1000)), base.CodeOK)
}

func TestStaleSession(t *testing.T) {
	f := startFake(t)
	var skew atomic.Int64
	c := openClock(t, cxlConfig(f), func() time.Duration { return node.BootTime() + time.Duration(skew.Load()) })
	v := value(1, 1000)
	want(t, "store", storeOne(t, c, 1, v), base.CodeOK)
	dst := make([]byte, len(v))
	want(t, "load", loadOne(t, c, 1, dst), base.CodeOK)
	f.mu.Lock()
	f.mu.muteBeats = true
	f.mu.Unlock()
	time.Sleep(60 * time.Millisecond)
	skew.Store(int64(time.Hour)) // the process was stopped for an hour
	if c.Connected() {
		t.Fatal("the session is valid an hour after its last heartbeat")
	}
	want(t, "load of an expired session", loadOne(t, c, 1, dst), base.CodeMiss)
	if s := c.Stats(); s.MissesExpired != 1 {
		t.Fatalf("%+v", s)
	}
	f.mu.Lock()
	f.mu.muteBeats = false
	f.mu.Unlock()
	eventually(t, "the session", c.Connected)
	want(t, "load", loadOne(t, c, 1, dst), base.CodeOK)
}

func TestServerRestart(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.CPUBytes, cfg.Overcommit = 4*testPage, On
	cfg.WriteOrder = []base.Medium{base.MediumCXL, base.MediumCPU}
	c := open(t, cfg)
	for i := range 3 {
		want(t, "store", storeOne(t, c, i, value(i, 1000)), base.CodeOK)
	}
	views := make([]View, 1)
	if err := c.Retrieve(t.Context(), keysOf(2), hot.ModeEach, views); err != nil || views[0].ID == 0 {
		t.Fatal(err, views)
	}
	before := c.Epoch()
	f.restart(200 * time.Millisecond)
	eventually(t, "the session", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return c.Connected() && c.Epoch() != before && len(f.mu.relisted) > 0
	})
	f.mu.Lock()
	pages, leases := len(f.mu.relisted), len(f.mu.relistLease)
	f.mu.Unlock()
	if pages != 3 || leases != 1 {
		t.Fatalf("%d pages and %d leases were listed", pages, leases)
	}
	eventually(t, "the quarantine", func() bool { return c.Stats().PagesQuarantined == 3 })
	s := c.Stats()
	if s.Reconnects != 1 || s.Outages != 1 {
		t.Fatalf("%+v", s)
	}
	if !bytes.Equal(views[0].Bytes, value(2, 1000)) {
		t.Fatal("a view changed over a restart")
	}
	want(t, "cold", loadOne(t, c, 1, make([]byte, 1000)), base.CodeMiss)
	eventually(t, "the end of the listing", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.mu.core.Phase() == session.Live
	})
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	want(t, "load", loadOne(t, c, 1, make([]byte, 1000)), base.CodeOK)
	eventually(t, "the cpu segments", func() bool { return c.Stats().Regions == 2 })
	// The server frees what it kept in quarantine.
	f.mu.Lock()
	for _, p := range f.mu.relisted {
		f.mu.sessions[c.Session()].tell(reclaimEvent(p))
	}
	f.mu.Unlock()
	// One of them lies under a view of ours and waits for it, whatever the server says.
	eventually(t, "the reclaim", func() bool { s := c.Stats(); return s.PagesQuarantined == 0 && s.PagesRetiring == 1 })
	if !bytes.Equal(views[0].Bytes, value(2, 1000)) {
		t.Fatal("a view changed under a reclaim")
	}
	c.ReleaseViews([]uint64{views[0].ID})
	eventually(t, "the page under the view", func() bool { return c.Stats().PagesRetiring == 0 })
}

// TestReopenAtSameServer ends the session at the server, which keeps what it knows.
func TestReopenAtSameServer(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	views := make([]View, 1)
	if err := c.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID == 0 {
		t.Fatal(err)
	}
	before := c.Epoch()
	f.mu.Lock()
	f.mu.sessions[c.Session()].tell(&maruv1.Event{Event: &maruv1.Event_Fence{Fence: &maruv1.FenceEvent{Reason: "test"}}})
	f.mu.Unlock()
	eventually(t, "the session", func() bool { return c.Connected() && c.Epoch() == before+1 })
	dst := make([]byte, 1000)
	want(t, "load", loadOne(t, c, 1, dst), base.CodeOK)
	if s := c.Stats(); s.PagesReady != 1 || s.Regions != 1 || s.PagesQuarantined != 0 {
		t.Fatalf("%+v", s)
	}
	f.mu.Lock()
	if len(f.mu.relisted) != 0 {
		t.Error("pages were listed at the same server")
	}
	f.mu.Unlock()
	c.ReleaseViews([]uint64{views[0].ID})
	eventually(t, "the release", func() bool { return f.leases() == 0 })
}

func TestConnectLater(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	control, hotAddress := f.address, f.hotLn.Addr().String()
	f.stop()
	if _, err := Open(t.Context(), cfg); base.CodeOf(err) != base.CodeUnavailable {
		t.Fatalf("Open without a server: %v", err)
	}
	cfg.ConnectLater = On
	c := open(t, cfg)
	want(t, "store", storeOne(t, c, 1, value(1, 10)), base.CodeUnavailable)
	f.listen(control, hotAddress)
	eventually(t, "the session", c.Connected)
	eventually(t, "the region", func() bool { return len(c.OwnedRegions()) == 1 })
	want(t, "store", storeOne(t, c, 1, value(1, 10)), base.CodeOK)
}

func TestCloseWithExports(t *testing.T) {
	f := startFake(t)
	c, err := Open(t.Context(), cxlConfig(f))
	if err != nil {
		t.Fatal(err)
	}
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	views := make([]View, 1)
	if err := c.Retrieve(t.Context(), keysOf(1), hot.ModeEach, views); err != nil || views[0].ID == 0 {
		t.Fatal(err)
	}
	region := c.region(views[0].Region)
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(views[0].Bytes, value(1, 1000)) {
		t.Fatal("the view changed")
	}
	f.mu.Lock()
	if n := len(f.mu.closes); n != 1 || !f.mu.closes[0].GetLeft() || f.mu.closes[0].GetDrained() {
		t.Errorf("closes %v", f.mu.closes)
	}
	f.mu.Unlock()
	if f.holdCount() != 1 {
		t.Fatal("the hold went although a view is out")
	}
	if err := c.Store(t.Context(), nil, nil); base.CodeOf(err) != base.CodeClosed {
		t.Fatal(err)
	}
	c.ReleaseViews([]uint64{views[0].ID})
	_ = region.mapping.Unmap() // what the end of the process does; for the leak check
}
