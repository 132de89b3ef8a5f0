package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	maruclient "github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/killtest"
)

const (
	torturePage = 64 << 10
	tortureKeys = 96
)

// tortureValue is what every writer stores under a key: whoever reads it can tell.
func tortureValue(n int) []byte {
	v := make([]byte, 20000+n*400)
	rng := rand.New(rand.NewPCG(uint64(n), 7))
	for i := range v {
		v[i] = byte(rng.Uint32())
	}
	return v
}

// SIGKILL of the real server under real clients that share a pool: no wrong byte, no
// failed call, hits again after each restart, and at the end every region comes back.
func TestKilledServerUnderClients(t *testing.T) {
	if testing.Short() {
		t.Skip("30 rounds; not with -short")
	}
	l := newLab(t, 256<<20)
	l.startRM()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	raw, _ := json.Marshal(map[string]any{
		"Dir": filepath.Dir(l.cfg.StateDir), "StateDir": l.cfg.StateDir, "Unix": l.cfg.UnixPath, "HotUnix": l.cfg.HotUnixPath,
		"TTL": 5 * time.Second, "Heartbeat": 100 * time.Millisecond, "Margin": 500 * time.Millisecond, "RM": l.cfg.RMAddress,
	})
	start := func() *child {
		c := startChild(t, "server", "MARU_TEST_CONFIG="+string(raw))
		c.line(t)
		return c
	}
	srv := start()
	var clients []*maruclient.Client
	for i := range 2 {
		c, err := maruclient.Open(testContext(t), maruclient.Config{
			ServerAddress: "unix:" + l.cfg.UnixPath, Opaque: true, PageBytes: torturePage, RegionBytes: 32 * torturePage,
			CXLBytes: 128 * torturePage, Logger: testLog(), InstanceID: fmt.Sprint("torture", i),
		})
		if err != nil {
			t.Fatalf("open: %v", err)
		}
		clients = append(clients, c)
	}
	var hits, stores atomic.Uint64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i, c := range clients {
		for g := range 2 {
			wg.Go(func() { tortureWork(t, c, uint64(2*i+g), stop, &hits, &stores) })
		}
	}
	rounds := killtest.Rounds(30)
	for round := range rounds {
		waitForHits(t, round, &hits)
		time.Sleep(time.Duration(rng.IntN(60)) * time.Millisecond)
		srv.kill()
		time.Sleep(time.Duration(rng.IntN(40)) * time.Millisecond)
		srv = start()
	}
	waitForHits(t, rounds, &hits)
	close(stop)
	wg.Wait()
	t.Logf("%d hits, %d stores", hits.Load(), stores.Load())
	for _, c := range clients {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := c.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		cancel()
	}
	// E1: no two regions share a byte. L1: those that nobody needs come back.
	api := l.rmClient()
	checkDisjoint(t, api)
	srv.kill()
	start()
	waitFor(t, "every region goes back", func() bool {
		r, err := api.ListRegions(testContext(t), &maruv1.ListRegionsRequest{Limit: 1000})
		return err == nil && len(r.GetRegions()) == 0
	})
}

func waitForHits(t *testing.T, round int, hits *atomic.Uint64) {
	t.Helper()
	from := hits.Load()
	waitFor(t, fmt.Sprintf("hits in round %d", round), func() bool { return hits.Load() > from+5 })
}

func checkDisjoint(t *testing.T, api maruv1.ResourceManagerClient) {
	t.Helper()
	r, err := api.ListRegions(testContext(t), &maruv1.ListRegionsRequest{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	var extents []base.Extent
	for _, x := range r.GetRegions() {
		e := base.Extent{Offset: x.GetPlace().GetOffset(), Length: x.GetPlace().GetExtentLength()}
		for _, o := range extents {
			if o.Overlaps(e) {
				t.Fatalf("regions overlap: %v and %v", o, e)
			}
		}
		extents = append(extents, e)
	}
}

// tortureWork stores, loads and deletes. A server that is away is a miss or a skipped
// store, never an error of the call.
func tortureWork(t *testing.T, c *maruclient.Client, seed uint64, stop <-chan struct{}, hits, stores *atomic.Uint64) {
	rng := rand.New(rand.NewPCG(seed, 3))
	dst := make([]byte, torturePage)
	codes := make([]base.Code, 1)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n := rng.IntN(tortureKeys)
		v := tortureValue(n)
		key := testKey(5000 + n)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		switch rng.IntN(10) {
		case 0:
			_ = c.Delete(ctx, hot.AppendKeys(nil, []base.Key{key}), codes)
		case 1, 2, 3:
			if err := c.Store(ctx, []maruclient.StoreItem{{Key: key, Runs: [][]byte{v}}}, codes); err != nil {
				t.Errorf("store: %v", err)
			} else if codes[0] == base.CodeOK {
				stores.Add(1)
			}
		default:
			got := dst[:len(v)]
			clear(got)
			if err := c.Load(ctx, []maruclient.LoadItem{{Key: key, Runs: [][]byte{got}}}, codes); err != nil {
				t.Errorf("load: %v", err)
			}
			if codes[0] == base.CodeOK {
				hits.Add(1)
				if !bytes.Equal(got, v) {
					t.Errorf("object %d: wrong bytes", n)
				}
			}
			if codes[0] == base.CodeCorrupt {
				t.Errorf("object %d: corrupt", n)
			}
		}
		cancel()
	}
}
