package server

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
)

// A panic under the directory's lock neither hangs the server nor lets it go on with
// what may be half done.
func TestBugStopsServing(t *testing.T) {
	for _, plane := range []string{"control", "hot"} {
		t.Run(plane, func(t *testing.T) {
			s := startServer(t, testConfig(t))
			c := newClient(t, s.ControlAddress(), nil)
			c.connect("")
			func() {
				defer func() { _ = recover() }()
				if plane == "control" {
					_ = s.step(func(*directory.Directory, time.Duration) error { panic("a bug") })
					return
				}
				conn := &hotConn{server: s, plane: s.hot, conn: c.hot.conn, session: s.sessions.get(c.id)}
				defer func() {
					if v := recover(); v != nil && conn.holds == holdsWrite {
						s.poison()
						s.dir.Unlock()
					}
				}()
				conn.lock()
				panic("a bug")
			}()
			waitFor(t, "not serving", func() bool { _, err := s.Ready(); return errors.Is(err, base.ErrInternal) })
			if _, err := c.heartbeat(); !errors.Is(err, base.ErrInternal) {
				t.Errorf("heartbeat: %v", err)
			}
			if _, err := c.api.Open(testContext(t), workerRequest(base.NewID())); !errors.Is(err, base.ErrInternal) {
				t.Errorf("open: %v", err)
			}
			if status, body := httpGet(t, s, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "bug") {
				t.Errorf("readyz: %d %q", status, body)
			}
			if err := s.Wait(testContext(t)); !errors.Is(err, base.ErrInternal) {
				t.Errorf("wait: %v", err)
			}
		})
	}
}

// A probe in steady state allocates nothing at the server.
func TestProbeAllocatesNothing(t *testing.T) {
	cfg := testConfig(t)
	cfg.TTL = time.Hour
	s := startServer(t, cfg)
	c := newClient(t, s.ControlAddress(), nil)
	c.connect("")
	r := c.expand(maruv1.Medium_MEDIUM_CPU, 512, 4096)
	keys := testKeyRange(0, 512)
	c.commitKeys(r, c.open.GetEpoch(), keys)
	frame := hot.AppendProbe(nil, 1, &hot.ProbeRequest{Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()), Keys: hot.AppendKeys(nil, keys)})
	h, err := hot.DecodeHeader(frame)
	if err != nil {
		t.Fatal(err)
	}
	conn := &hotConn{server: s, session: s.sessions.get(c.id)}
	var out []byte
	if n := testing.AllocsPerRun(100, func() {
		if out, err = conn.dispatch(out[:0], h, frame[hot.HeaderBytes:]); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a probe of 512 keys", n)
	}
}
