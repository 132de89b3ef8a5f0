package demo

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/killtest"
	"github.com/xcena-dev/maru/internal/up"
)

// A worker is killed in the middle of storing, 30 times, over a pool that holds the
// regions of a few of them only: what was acknowledged is read by another worker,
// every byte checked, and the regions of the dead go back when room is needed (MS-10).
func TestWorkersKilledWhileTheyStore(t *testing.T) {
	if testing.Short() {
		t.Skip("30 rounds of processes")
	}
	rounds := killtest.Rounds(30)
	cfg, err := Config{Workers: 2, Scale: 32, Chains: 2, Shared: 1, Own: 2}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	u, err := up.Start(t.Context(), up.Options{
		Listen: "127.0.0.1:0", Dir: filepath.Join(t.TempDir(), "up"), CXLBytes: 96 << 20, HTTP: up.HTTPOff,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := u.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	begin := func(i int) *process {
		p, err := startWorker(t.Context(), program, Options{
			Server: u.Addresses().Server, Index: i, Scale: cfg.Scale, RegionBytes: cfg.regionBytes(), Batch: 2,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.total(); err != nil {
			t.Fatal(err)
		}
		return p
	}
	reader := begin(0)
	seed := time.Now().UnixNano()
	rng := rand.New(rand.NewPCG(uint64(seed), 1)) //nolint:gosec // a test's choice, not a secret
	objects := 0
	for round := range rounds {
		victim := begin(1 + round)
		chains := make([]Chain, 12)
		for i := range chains {
			chains[i] = Chain{ID: 1000*round + i, Shared: 1, Own: 2}
		}
		if err := victim.Send(order{Do: "store", Chains: chains}); err != nil {
			t.Fatal(err)
		}
		var acked []Chain
		take := func() bool {
			line, err := victim.next()
			if err != nil || line.Done < 0 {
				return false
			}
			acked = append(acked, chains[line.Chain-1000*round])
			return true
		}
		for range 1 + rng.IntN(6) {
			if !take() {
				t.Fatalf("seed %d, round %d: %v", seed, round, victim.failure(os.ErrClosed))
			}
		}
		time.Sleep(time.Duration(rng.IntN(3000)) * time.Microsecond)
		_ = victim.Kill()
		for take() { // lines written before the end
		}
		victim.Reap()
		got, err := reader.do(order{Do: "load", Chains: acked})
		if err != nil {
			t.Fatal(err)
		}
		if want := 3 * len(acked); got.Objects != want || got.WrongBytes != 0 {
			t.Fatalf("seed %d, round %d: %d of %d acknowledged objects, %d misses, %d failed, %d wrong bytes",
				seed, round, got.Objects, want, got.Misses, got.Failed, got.WrongBytes)
		}
		objects += got.Objects
	}
	t.Logf("%d kills, %d acknowledged objects read", rounds, objects)
	if err := reader.quit(); err != nil {
		t.Error(err)
	}
}
