package client

import (
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// The answer to the first Open is lost: the server knows the session, and its secret is
// nowhere. The client comes in under another id, whether it waits for the server or not.
func TestFirstOpenAnswerIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		later Switch
		lost  int32
	}{
		"now": {Off, 1}, "later": {On, 1}, "later, three times": {On, 3},
	} {
		t.Run(name, func(t *testing.T) {
			f := startFake(t)
			f.loseOpens.Store(c.lost)
			cfg := cxlConfig(f)
			cfg.ConnectLater, cfg.RPCTimeout, cfg.ConnectTimeout = c.later, 200*time.Millisecond, 200*time.Millisecond
			client := open(t, cfg)
			eventually(t, "the session", client.Connected)
			eventually(t, "the region", func() bool { return len(client.OwnedRegions()) == 1 })
			want(t, "store", storeOne(t, client, 1, value(1, 10)), base.CodeOK)
			f.mu.Lock()
			_, known := f.mu.sessions[client.Session()]
			n := len(f.mu.sessions)
			f.mu.Unlock()
			if !known || n != int(c.lost)+1 {
				t.Fatalf("%d sessions at the server, ours among them: %v", n, known)
			}
		})
	}
}

// A server that knows the id, from an answer that was lost, denies it: a new one helps.
func TestFirstOpenIsDenied(t *testing.T) {
	f := startFake(t)
	f.denyOpens.Store(1)
	cfg := cxlConfig(f)
	client := open(t, cfg)
	want(t, "store", storeOne(t, client, 1, value(1, 10)), base.CodeOK)
	if n := f.callCount("open"); n != 1 {
		t.Fatalf("%d sessions were opened", n)
	}
}

// A list of holds longer than the resource manager takes in one call is split.
func TestUnholdInParts(t *testing.T) {
	f := startFake(t)
	for range 5 {
		open(t, cxlConfig(f))
	}
	cfg := cxlConfig(f)
	cfg.EagerMap = On
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if n := f.holdCount(); n != 5+6 {
		t.Fatalf("%d holds", n)
	}
	f.unholdCount.Store(2)
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := f.holdCount(); n != 5 {
		t.Fatalf("%d holds after the close", n)
	}
}
