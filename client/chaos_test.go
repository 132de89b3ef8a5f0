package client

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// TestRealRestartsUnderLoad restarts the server while threads of two clients store, load,
// view and delete. Every byte that is handed out is checked; at the end everything comes
// back (L1).
func TestRealRestartsUnderLoad(t *testing.T) {
	l := startLab(t, 256<<20)
	l.cfg.Port, l.cfg.HotPort = portOf(t, l.srv.ControlAddress()), portOf(t, l.srv.HotAddress())
	cfg := l.config()
	cfg.CPUBytes, cfg.Overcommit = 8*testPage, On
	cfg.WriteOrder = []base.Medium{base.MediumCXL, base.MediumCPU}
	cfg.RPCTimeout = 500 * time.Millisecond
	clients := []*Client{open(t, cfg), open(t, cfg)}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var good, viewed atomic.Int64
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for g := range 4 {
		wg.Go(func() {
			c := clients[g%2]
			r := rand.New(rand.NewPCG(seed, uint64(g)))
			dst := make([]byte, 30000)
			codes := make([]base.Code, 1)
			views := make([]View, 1)
			for !stop.Load() {
				n := r.IntN(30)
				v := value(n, 30000)
				switch r.IntN(4) {
				case 0:
					_ = storeOne(t, c, n, v)
				case 1:
					if loadOne(t, c, n, dst) == base.CodeOK {
						good.Add(1)
						if !bytes.Equal(dst, v) {
							t.Errorf("object %d differs", n)
						}
					}
				case 2:
					if err := c.Retrieve(t.Context(), keysOf(n), hot.ModeEach, views); err != nil {
						t.Error(err)
					}
					if views[0].ID != 0 {
						viewed.Add(1)
						time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
						if !bytes.Equal(views[0].Bytes, v) {
							t.Errorf("the view of object %d differs", n)
						}
						c.ReleaseViews([]uint64{views[0].ID})
					}
				case 3:
					if r.IntN(16) == 0 {
						_ = c.Delete(t.Context(), keysOf(n), codes)
					}
				}
			}
		})
	}
	for range 2 {
		time.Sleep(400 * time.Millisecond)
		began := time.Now()
		l.stop()
		time.Sleep(100 * time.Millisecond)
		l.start()
		ready, before := time.Now(), good.Load()
		eventually(t, "a load after the restart", func() bool { return good.Load() > before })
		t.Logf("stop and start took %v, the first load came %v later", ready.Sub(began), time.Since(ready))
	}
	eventually(t, "loads after the last restart", func() bool {
		before := good.Load()
		time.Sleep(50 * time.Millisecond)
		return good.Load() > before
	})
	stop.Store(true)
	wg.Wait()
	t.Logf("%d loads and %d views were right", good.Load(), viewed.Load())
	for _, c := range clients {
		eventually(t, "quiet", func() bool {
			s := c.Stats()
			return s.Leases == 0 && s.PagesRetiring == 0 && s.PagesQuarantined == 0 && s.PagesWriting == 0
		})
	}
}
