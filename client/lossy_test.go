package client

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/inject"
)

// lossyRound is what a client was told over a wire that fails once.
type lossyRound struct {
	stored, deleted []int
	untold          bool // its end was not heard of
	opened          bool
}

const lossyBytes = 100 << 10

// play opens a session, stores, loads, takes a view, deletes and closes.
func (r *lossyRound) play(t *testing.T, cfg Config, keys []int, foreign int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := Open(ctx, cfg)
	if err != nil {
		return
	}
	r.opened = true
	codes := make([]base.Code, 1)
	for _, k := range keys {
		for range 3 {
			if err := c.Store(ctx, []StoreItem{{Key: key(k), Runs: [][]byte{value(k, lossyBytes)}}}, codes); err != nil {
				t.Errorf("store: %v", err)
			}
			if codes[0] == base.CodeOK || codes[0] == base.CodeAlreadyStored {
				r.stored = append(r.stored, k)
				break
			}
		}
	}
	for _, k := range append([]int{foreign}, r.stored...) {
		dst := make([]byte, lossyBytes)
		if err := c.Load(ctx, []LoadItem{{Key: key(k), Runs: [][]byte{dst}}}, codes); err != nil {
			t.Errorf("load: %v", err)
		}
		switch {
		case codes[0] == base.CodeOK && !bytes.Equal(dst, value(k, lossyBytes)), codes[0] == base.CodeCorrupt:
			t.Errorf("key %d: wrong bytes", k)
		}
	}
	var view [1]View
	if err := c.Retrieve(ctx, keysOf(foreign), hot.ModeEach, view[:]); err != nil {
		t.Errorf("retrieve: %v", err)
	}
	if view[0].ID != 0 && !bytes.Equal(view[0].Bytes, value(foreign, lossyBytes)) {
		t.Error("a view of wrong bytes")
	}
	c.ReleaseViews([]uint64{view[0].ID})
	if len(r.stored) > 0 {
		gone := r.stored[0]
		if err := c.Delete(ctx, keysOf(gone), codes); err == nil && (codes[0] == base.CodeOK || codes[0] == base.CodeNotFound) {
			r.deleted = append(r.deleted, gone)
		}
		r.stored = r.stored[1:] // whatever the answer was
	}
	r.untold = c.Close(ctx) != nil
	if ctx.Err() != nil {
		t.Error("the calls took longer than 20 s")
	}
}

// Each call between a client, its server and the resource manager is lost, answered to
// nobody, late, carried out twice, or ends with a broken connection: no byte is wrong, what
// was acknowledged is there or gone, calls end in time, and everything comes to rest (X1,
// R7, L1).
func TestEachCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("some hundred sessions")
	}
	l := startLab(t, 512<<20)
	w := &wire{timeout: 200 * time.Millisecond}
	address := l.between(w)
	other := open(t, l.config())
	const foreign = 900
	want(t, "store", storeOne(t, other, foreign, value(foreign, lossyBytes)), base.CodeOK)
	seed := rand.Uint64()
	all := os.Getenv(inject.Everything) != ""
	next, hits, rounds := 10000, 0, 0
	for call := 1; ; call++ {
		reached := false
		for fault := wireLoseCall; fault < wireFaults; fault++ {
			if !all && (seed+uint64(call))%uint64(wireFaults-1) != uint64(fault-1) {
				continue
			}
			rounds++
			keys := []int{next, next + 1, next + 2}
			next += 3
			r := &lossyRound{}
			before := unrest(t, other)
			w.arm(call, fault)
			r.play(t, Config{
				ServerAddress: address, Opaque: true, PageBytes: testPage, RegionBytes: testPage, ExpandBytes: testPage, CXLBytes: 4 * testPage,
				Logger: l.log, RPCTimeout: w.timeout, ConnectTimeout: 2 * time.Second,
			}, keys, foreign)
			what := w.disarm()
			reached = reached || what != ""
			if what != "" {
				hits++
			}
			if !r.opened && what == "" {
				t.Fatal("a session cannot be opened although nothing was failed")
			}
			verifyRound(t, other, r, what, before)
			if t.Failed() {
				t.Fatalf("seed %d, %s", seed, what)
			}
		}
		if !reached {
			break
		}
	}
	t.Logf("%d calls were failed in %d rounds", hits, rounds)
	if hits < 20 {
		t.Errorf("only %d calls were failed: this test tests nothing", hits)
	}
}

// unrest is what waits for somebody at the server, in bytes and leases. A session whose end
// nobody heard of leaves some until this process ends.
func unrest(t *testing.T, other *Client) (n uint64) {
	t.Helper()
	u, err := other.Usage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range u.GetL1Storage().GetPools() {
		n += p.GetRetiringBytes() + p.GetQuarantinedBytes() + p.GetLeases()
	}
	return n
}

func verifyRound(t *testing.T, other *Client, r *lossyRound, what string, before uint64) {
	t.Helper()
	for _, k := range r.stored {
		dst := make([]byte, lossyBytes)
		eventually(t, "a hit on what was stored ("+what+")", func() bool { return loadOne(t, other, k, dst) == base.CodeOK })
		if !bytes.Equal(dst, value(k, lossyBytes)) {
			t.Errorf("%s: key %d: wrong bytes", what, k)
		}
	}
	for _, k := range r.deleted {
		if code := loadOne(t, other, k, make([]byte, lossyBytes)); code != base.CodeMiss {
			t.Errorf("%s: key %d was deleted and is %v", what, k, code)
		}
	}
	if r.untold || !r.opened {
		return // what it had comes back with this process
	}
	eventually(t, "rest ("+what+")", func() bool { return unrest(t, other) <= before })
}
