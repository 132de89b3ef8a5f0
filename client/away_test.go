package client

import (
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

func TestServerAway(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	f.stop()
	began := time.Now()
	for range 50 {
		want(t, "load", loadOne(t, c, 1, make([]byte, 1000)), base.CodeMiss)
		if code := storeOne(t, c, 2, value(2, 1000)); code != base.CodeUnavailable && code != base.CodeTimeout {
			t.Fatal(code)
		}
		verdicts := make([]byte, 2)
		if n, err := c.Probe(t.Context(), ProbeQuery{Keys: keysOf(1, 2)}, verdicts); n != 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Fatalf("150 calls without a server took %v", d)
	}
	if err := c.Ping(t.Context()); err == nil {
		t.Fatal("Ping without a server")
	}
}

func TestHungServer(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.RPCTimeout = 200 * time.Millisecond
	c := open(t, cfg)
	v := value(1, 1000)
	want(t, "store", storeOne(t, c, 1, v), base.CodeOK)
	f.mu.Lock()
	f.mu.muteBeats = true
	f.mu.Unlock()
	f.hang.Store(true)
	dst := make([]byte, len(v))
	began := time.Now()
	for range 100 {
		want(t, "load", loadOne(t, c, 1, dst), base.CodeMiss)
	}
	if d := time.Since(began); d > time.Second {
		t.Fatalf("100 loads from a server that hangs took %v", d)
	}
	f.hang.Store(false)
	f.mu.Lock()
	f.mu.muteBeats = false
	f.mu.Unlock()
	eventually(t, "a load", func() bool { return loadOne(t, c, 1, dst) == base.CodeOK })
	eventually(t, "the releases", func() bool { return f.leases() == 0 })
}
