package server

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// A store and a load over real sockets, on TCP and on the Unix socket.
func TestStoreAndLoad(t *testing.T) {
	s := startServer(t, testConfig(t))
	for _, network := range []struct{ name, control, hot string }{
		{"tcp", s.ControlAddress(), s.HotAddress()}, {"unix", s.UnixPath(), s.HotUnixPath()},
	} {
		t.Run(network.name, func(t *testing.T) {
			c := newClient(t, network.control, nil)
			c.connect(network.hot)
			if got := c.hot.welcome.Provable; got != (network.name == "unix") {
				t.Errorf("provable over %s: %v", network.name, got)
			}
			r := c.expand(maruv1.Medium_MEDIUM_CPU, 64, 4096)
			keys := testKeyRange(0, 64)
			for i, n := 0, c.commitKeys(r, c.open.GetEpoch(), keys); i < n.Len(); i++ {
				if n.At(i).Code != base.CodeOK {
					t.Fatalf("commit %d: %v", i, n.At(i).Code)
				}
			}
			if n := c.probeHits(append(keys, testKey(1000))); n != 64 {
				t.Fatalf("%d hits, want 64", n)
			}
			a, seq := c.acquireAll(base.LeaseCopy, keys)
			if a.Manifests != 64 || a.Rows.Len() != 64 {
				t.Fatalf("acquired %d manifests, %d rows", a.Manifests, a.Rows.Len())
			}
			if row := a.Rows.At(3); row.Offset != 3*4096 || row.Checksum != 4 || row.Length != 4096 || row.Verdict.Medium() != base.MediumCPU {
				t.Fatalf("row 3: %+v", row)
			}
			held, err := c.hot.release(&hot.ReleaseRequest{
				Operation: c.next(), Rows: hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: seq, Count: hot.ReleaseAll}),
			})
			if err != nil || len(held.Held) != 1 || held.Held[0] != 1 {
				t.Fatalf("release: %v %v", held, err)
			}
			if _, err := c.heartbeat(); err != nil {
				t.Fatalf("heartbeat: %v", err)
			}
			if _, err := c.api.Close(c.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
				t.Fatalf("close: %v", err)
			}
			if _, err := c.heartbeat(); !errors.Is(err, base.ErrStale) {
				t.Fatalf("heartbeat after close: %v", err)
			}
		})
	}
	if u := s.usage(); len(u.Pools) != 0 || u.Objects != 0 {
		t.Errorf("after drained closes: %+v", u)
	}
}

// What a person and a scraper see: bounded labels, no ids in metrics, markup escaped.
func TestHTTP(t *testing.T) {
	s := startServer(t, testConfig(t))
	c := newClient(t, s.ControlAddress(), func(m *maruv1.OpenRequest) { m.EngineId, m.InstanceId = "engine-x", "<script>alert(1)</script>" })
	c.connect("")
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 4, 4096)
	c.commitKeys(r, c.open.GetEpoch(), testKeyRange(0, 4))
	status, page := httpGet(t, s, "/")
	if status != http.StatusOK || !strings.Contains(page, c.id.String()) || strings.Contains(page, "<script>") {
		t.Errorf("status page: %d %s", status, page)
	}
	status, body := httpGet(t, s, "/metrics")
	for _, want := range []string{
		`maru_server_objects 4`, `maru_server_sessions{state="live"} 1`, `maru_server_hot_requests_total{op="commit"} 1`,
		`maru_server_pool_bytes{medium="cpu",state="ready"} 16384`, `maru_server_degraded 0`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("metrics lack %q", want)
		}
	}
	if status != http.StatusOK || strings.Contains(body, c.id.String()) || strings.Contains(body, "engine-x") {
		t.Errorf("metrics: %d, or an id in a label", status)
	}
	if status, body := httpGet(t, s, "/healthz"); status != http.StatusOK || body != "ok\n" {
		t.Errorf("healthz: %d %q", status, body)
	}
	if status, body := httpGet(t, s, "/readyz"); status != http.StatusOK || body != "ok\n" {
		t.Errorf("readyz: %d %q", status, body)
	}
}
