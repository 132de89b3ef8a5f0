package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"net/http"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm"
)

// lab is a resource manager with one file pool, and the configuration of a server on it.
type lab struct {
	t     testing.TB
	rmCfg rm.Config
	rm    *rm.Server
	cfg   Config
	pool  string
}

func newLab(t testing.TB, poolBytes uint64) *lab {
	t.Helper()
	cfg := testConfig(t)
	dir := filepath.Dir(cfg.StateDir)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	if os.Getenv("MARU_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("program", "rm")
	}
	l := &lab{t: t, pool: filepath.Join(dir, "pool")}
	l.rmCfg = rm.Config{
		Port: rm.AnyPort, HTTPPort: rm.NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "rm"),
		Pools:     []rm.PoolSpec{{Kind: dax.KindFile, Path: l.pool, SizeBytes: poolBytes, Name: "p"}},
		Discovery: rm.DiscoverNone, Node: cfg.Node, Overcommit: true, Logger: log,
	}
	cfg.CPUOnly, cfg.RMAddress = false, "unix:"+l.rmCfg.UnixPath
	cfg.RMCallTimeout = 5 * time.Second
	l.cfg = cfg
	return l
}

func (l *lab) startRM() {
	l.t.Helper()
	s, err := rm.Start(testContext(l.t), l.rmCfg)
	if err != nil {
		l.t.Fatalf("resource manager: %v", err)
	}
	l.rm = s
	l.t.Cleanup(func() { _ = s.Close() })
}

func (l *lab) rmClient() maruv1.ResourceManagerClient {
	return maruv1.NewResourceManagerClient(dialControl(l.t, l.rmCfg.UnixPath))
}

func waitFor(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("timed out: %s", what)
}

func waitReady(t testing.TB, s *Server) {
	t.Helper()
	waitFor(t, "the server gets its resource manager", func() bool { d, err := s.Ready(); return err == nil && d == "" })
}

func cxlRequest(m *maruv1.OpenRequest) {
	m.Capabilities = []string{"cpu_storage_v1", "cxl_storage_v1", "mixed_storage_v1"}
	m.Views = true
}

// prove shows the RM a nonce of every pool, as a client that maps them does.
func (l *lab) prove(c *client) {
	l.t.Helper()
	api := l.rmClient()
	for _, p := range c.open.GetPools() {
		if p.GetInfo().GetMedium() != maruv1.Medium_MEDIUM_CXL {
			continue
		}
		l.provePool(api, c, p.GetInfo())
	}
	answer, err := c.api.ProveDomains(c.ctx(), &maruv1.ProveDomainsRequest{})
	if err != nil || len(answer.GetProvedPoolIds()) == 0 {
		l.t.Fatalf("prove domains: %v %v", answer, err)
	}
}

func (l *lab) provePool(api maruv1.ResourceManagerClient, c *client, info *maruv1.PoolInfo) {
	l.t.Helper()
	ctx := testContext(l.t)
	start, err := api.StartDomainProof(ctx, &maruv1.StartDomainProofRequest{SessionId: c.id[:], PoolId: info.GetPoolId()})
	if err != nil {
		l.t.Fatalf("start proof: %v", err)
	}
	f, err := os.Open(info.GetPath())
	if err != nil {
		l.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, poolfmt.NonceSlotBytes)
	if _, err := f.ReadAt(b, int64(poolfmt.NonceOffset(start.GetSlot()))); err != nil {
		l.t.Fatal(err)
	}
	_, err = api.FinishDomainProof(ctx, &maruv1.FinishDomainProofRequest{
		SessionId: c.id[:], PoolId: info.GetPoolId(), Slot: start.GetSlot(), Nonce: b[:32],
	})
	if err != nil {
		l.t.Fatalf("finish proof: %v", err)
	}
}

// hold maps a region as far as the RM is concerned.
func (l *lab) hold(api maruv1.ResourceManagerClient, c *client, views bool, seq uint64, handles ...*maruv1.RegionHandle) {
	l.t.Helper()
	_, err := api.Hold(testContext(l.t), &maruv1.HoldRequest{
		SessionId: c.id[:], ServerId: c.open.GetServerId(), OwnerIncarnation: c.open.GetOwnerIncarnation(), Views: views, Sequence: seq,
		Handles: handles, NodeId: c.open.GetNodeId(), BootId: c.open.GetBootId(),
	})
	if err != nil {
		l.t.Fatalf("hold: %v", err)
	}
}

func TestSharedPool(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	writer := newClient(t, s.ControlAddress(), cxlRequest)
	writer.connect(s.HotUnixPath())
	if writer.open.GetOwnerIncarnation() == 0 || writer.open.GetRmUnixPath() != l.rmCfg.UnixPath || len(writer.open.GetPools()) != 2 {
		t.Fatalf("open: %v", writer.open)
	}
	_, err := writer.api.Expand(writer.ctx(), &maruv1.ExpandRequest{
		Operation: uint64(writer.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: 1 << 20, PageSize: 65536, PieceSize: 65536,
	})
	if !errors.Is(err, base.ErrDenied) {
		t.Fatalf("expand without a proved domain: %v", err)
	}
	l.prove(writer)
	r := writer.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	if len(r.GetHandle().GetToken()) < 16 || r.GetPlace().GetPageCount() != 16 || r.GetPlace().GetExtentLength() == 0 {
		t.Fatalf("grant: %v", r)
	}
	keys := testKeyRange(0, 16)
	for i, n := 0, writer.commitKeys(r, r.GetHandle().GetIncarnation(), keys); i < n.Len(); i++ {
		if n.At(i).Code != base.CodeOK || n.At(i).Order.Owner() == 0 {
			t.Fatalf("commit %d: %+v", i, n.At(i))
		}
	}
	reader := newClient(t, s.ControlAddress(), cxlRequest)
	reader.connect("")
	if n := reader.probeHits(keys); n != 0 {
		t.Fatalf("%d hits without a proved domain", n)
	}
	l.prove(reader)
	if n := reader.probeHits(keys); n != 16 {
		t.Fatalf("%d hits, want 16", n)
	}
	for range 2 { // the second answer comes from the cache
		d, err := reader.api.DescribeRegions(reader.ctx(), &maruv1.DescribeRegionsRequest{RegionIds: []uint32{r.GetHandle().GetRegionId(), 999}})
		if err != nil || len(d.GetRegions()) != 2 {
			t.Fatalf("describe: %v %v", d, err)
		}
		got := d.GetRegions()[0]
		if !got.GetHandle().GetReadOnly() || bytes.Equal(got.GetHandle().GetToken(), r.GetHandle().GetToken()) || len(got.GetHandle().GetToken()) < 16 {
			t.Fatalf("read capability: %v", got)
		}
		if code := d.GetRegions()[1].GetProblem().GetCode(); base.Code(code) != base.CodeNotFound {
			t.Fatalf("unknown region: %v", d.GetRegions()[1])
		}
	}
	if _, err := reader.api.ReportUnreachable(reader.ctx(), &maruv1.ReportUnreachableRequest{PoolNumber: r.GetPoolNumber(), Reason: "no such file"}); err != nil {
		t.Fatal(err)
	}
	if n := reader.probeHits(keys); n != 0 {
		t.Fatalf("%d hits in a pool that was reported as out of reach", n)
	}
	l.prove(reader)
	if n := reader.probeHits(keys); n != 16 {
		t.Fatalf("%d hits after a new proof", n)
	}
	// The writer leaves; its region stays readable, and goes back when it is returned by nobody else.
	if _, err := writer.api.Close(writer.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
		t.Fatal(err)
	}
	if n := reader.probeHits(keys); n != 16 {
		t.Fatalf("%d hits after the writer closed", n)
	}
}

// RPC-21: what no pool can ever hold is refused for good, and the text says both sizes.
func TestTooLargeIsPermanent(t *testing.T) {
	l := newLab(t, 16<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	largest := c.open.GetLimits().GetLargestRegionBytes()
	for _, size := range []uint64{1 << 30, 14 << 20, 14<<20 - 4096} {
		_, err := c.api.Expand(c.ctx(), &maruv1.ExpandRequest{
			Operation: uint64(c.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: size, PageSize: 4096, PieceSize: 65536,
		})
		if !errors.Is(err, base.ErrPermanent) || !strings.Contains(err.Error(), fmt.Sprint(14<<20)) {
			t.Errorf("expand %d of largest %d: %v", size, largest, err)
		}
	}
}

// TestDeleteOfALeftWriter: a writer that closed with exports out holds its region for as
// long as its process lives, and writes no more: a delete there waits for the RM only.
func TestDeleteOfALeftWriter(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	writer, other := newClient(t, s.ControlAddress(), cxlRequest), newClient(t, s.ControlAddress(), cxlRequest)
	writer.connect("")
	l.prove(writer)
	l.prove(other)
	r := writer.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	l.hold(l.rmClient(), writer, true, 1, r.GetHandle())
	keys := testKeyRange(0, 4)
	writer.commitKeys(r, r.GetHandle().GetIncarnation(), keys)
	if _, err := writer.api.Close(writer.ctx(), &maruv1.CloseRequest{Left: true}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(other.ctx(), 5*time.Second)
	defer cancel()
	answer, err := other.api.Delete(ctx, &maruv1.DeleteRequest{Operation: uint64(other.next().Sequence), Keys: [][]byte{keys[0][:], keys[1][:]}})
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range answer.GetResults() {
		if base.Code(p.GetCode()) != base.CodeOK {
			t.Errorf("key %d: %v", i, p)
		}
	}
}

// MS-10: a full pool gives back the kept region that was read longest ago.
func TestKeptRegionsGoBack(t *testing.T) {
	l := newLab(t, 16<<20) // 14 MiB: three regions of 4 MiB
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	var all [][]base.Key
	for i := range 3 {
		c := newClient(t, s.ControlAddress(), cxlRequest)
		c.connect("")
		l.prove(c)
		r := c.expand(maruv1.Medium_MEDIUM_CXL, 40, 65536)
		keys := testKeyRange(100*i, 100*i+40)
		c.commitKeys(r, r.GetHandle().GetIncarnation(), keys)
		all = append(all, keys)
		if _, err := c.api.Close(c.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
			t.Fatal(err)
		}
	}
	c := newClient(t, s.ControlAddress(), cxlRequest)
	c.connect("")
	l.prove(c)
	c.acquireAll(base.LeaseCopy, all[0][:1]) // read last; and leased
	c.expand(maruv1.Medium_MEDIUM_CXL, 40, 65536)
	if n := c.probeHits(all[1]); n != 0 {
		t.Errorf("%d hits in the region read longest ago", n)
	}
	if n := c.probeHits(all[0]) + c.probeHits(all[2]); n != 80 {
		t.Errorf("%d hits in the others, want 80", n)
	}
	// The next takes region 2; then only the leased one is left, which must not go.
	c.expand(maruv1.Medium_MEDIUM_CXL, 40, 65536)
	if n := c.probeHits(all[0]); n != 40 {
		t.Errorf("%d hits in the leased region", n)
	}
}

// A session whose process nobody can watch dies before its first hold: no event of the
// resource manager will ever name it, and its region goes back all the same.
func TestSuspectWithoutHold(t *testing.T) {
	l := newLab(t, 16<<20)
	l.cfg.TTL, l.cfg.Margin, l.cfg.Heartbeat, l.cfg.SweepInterval = time.Second, 100*time.Millisecond, 100*time.Millisecond, 300*time.Millisecond
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), func(m *maruv1.OpenRequest) { cxlRequest(m); m.CpuBytes = 0 })
	c.connect("")
	l.prove(c)
	c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
	waitFor(t, "the region goes back", func() bool {
		answer, err := l.rmClient().ListRegions(testContext(t), &maruv1.ListRegionsRequest{})
		return err == nil && len(answer.GetRegions()) == 0
	})
}

// Without its resource manager a server serves cpu pools and says so; it picks the RM
// up when it comes, survives its restart, and tells its sessions.
func TestResourceManagerComesAndGoes(t *testing.T) {
	l := newLab(t, 64<<20)
	s := startServer(t, l.cfg)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	c.connect("")
	if !c.open.GetDegraded() || c.open.GetReason() == "" || c.open.GetOwnerIncarnation() != 0 {
		t.Fatalf("open without an RM: %v", c.open)
	}
	if status, body := httpGet(t, s, "/readyz"); status != http.StatusOK || !strings.Contains(body, "degraded") {
		t.Errorf("readyz: %d %q", status, body)
	}
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 4, 4096)
	c.commitKeys(r, c.open.GetEpoch(), testKeyRange(0, 4))
	_, err := c.api.Expand(c.ctx(), &maruv1.ExpandRequest{
		Operation: uint64(c.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: 1 << 20, PageSize: 65536, PieceSize: 65536,
	})
	if !errors.Is(err, base.ErrUnavailable) && !errors.Is(err, base.ErrPermanent) {
		t.Errorf("cxl without an RM: %v", err)
	}
	l.startRM()
	waitReady(t, s)
	waitFor(t, "the pools event", func() bool {
		h, err := c.heartbeat()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range h.GetEvents().GetEvents() {
			if p := e.GetPools(); p != nil && len(p.GetPools()) == 2 && p.GetOwnerIncarnation() != 0 {
				c.open.Pools = p.GetPools()
				return true
			}
		}
		return false
	})
	if status, body := httpGet(t, s, "/readyz"); status != http.StatusOK || strings.Contains(body, "degraded") {
		t.Errorf("readyz: %d %q", status, body)
	}
	l.prove(c)
	c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
	incarnation, _ := s.rm.status()
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "degraded", func() bool { d, _ := s.Ready(); return d != "" })
	_, err = c.api.Expand(c.ctx(), &maruv1.ExpandRequest{
		Operation: uint64(c.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: 1 << 20, PageSize: 65536, PieceSize: 65536,
	})
	if err == nil || errors.Is(err, base.ErrPermanent) {
		t.Errorf("cxl while the RM is away: %v", err)
	}
	if n := c.probeHits(testKeyRange(0, 4)); n != 4 {
		t.Errorf("%d cpu hits while the RM is away", n)
	}
	l.startRM()
	waitReady(t, s)
	if again, _ := s.rm.status(); again != incarnation {
		t.Errorf("incarnation %d after the RM's restart, was %d", again, incarnation)
	}
	l.prove(c)
	c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
}

func httpGet(t testing.TB, s *Server, path string) (int, string) {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := client.Get("http://" + s.HTTPAddress() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	b, _ := io.ReadAll(r.Body)
	return r.StatusCode, string(b)
}
