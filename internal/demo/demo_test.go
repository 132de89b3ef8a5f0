package demo

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/up"
)

// TestMain makes the test program a worker when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == Command {
		if err := RunWorker(context.Background(), os.Args[2], os.Stdin, os.Stdout); err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestDemo(t *testing.T) {
	cfg := Config{Workers: 2, Scale: 32, Chains: 1, Shared: 1, Own: 2}
	pool, err := cfg.PoolBytes()
	if err != nil {
		t.Fatal(err)
	}
	u, err := up.Start(t.Context(), up.Options{
		Listen: "127.0.0.1:0", Dir: filepath.Join(t.TempDir(), "up"), CXLBytes: pool, HTTP: up.HTTPOff,
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
	cfg.Server = u.Addresses().Server
	r, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !r.OK || r.KilledAcknowledged < 3+3 || !r.Rows[0].Killed || r.Rows[1].OfKilled.Objects < 3 {
		t.Errorf("result %+v", r)
	}
	var out strings.Builder
	if err := r.Print(&out); err != nil || !strings.Contains(out.String(), "0 (killed)") {
		t.Errorf("table %v:\n%s", err, out.String())
	}
}

// The judge must find what it is there for.
func TestJudgeFindsFaults(t *testing.T) {
	good := func() *run {
		cfg, err := Config{Workers: 2, Scale: 32, Chains: 1, Shared: 1, Own: 2, Program: "x"}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		rows := []WorkerRow{
			{Killed: true, Stored: Tally{Objects: 3}, Loaded: Tally{Objects: 6}},
			{Stored: Tally{Objects: 2, Already: 1}, Loaded: Tally{Objects: 6}, OfKilled: Tally{Objects: 3}},
		}
		return &run{cfg: cfg, result: &Result{Rows: rows}}
	}
	r := good()
	if r.judge(); !r.result.OK {
		t.Fatalf("a good result has problems: %v", r.result.Problems)
	}
	for name, spoil := range map[string]func(rows []WorkerRow){
		"wrong byte":     func(rows []WorkerRow) { rows[1].OfKilled.WrongBytes = 1 },
		"lost object":    func(rows []WorkerRow) { rows[1].Loaded.Objects--; rows[1].Loaded.Misses++ },
		"lost of killed": func(rows []WorkerRow) { rows[1].OfKilled.Objects-- },
		"not stored":     func(rows []WorkerRow) { rows[1].Stored.Already-- },
		"stored twice":   func(rows []WorkerRow) { rows[0].Stored.Objects++ },
	} {
		r := good()
		spoil(r.result.Rows)
		if r.judge(); r.result.OK {
			t.Errorf("%s: nothing was found", name)
		}
	}
}

func TestContentIsCheckedByteByByte(t *testing.T) {
	key := base.MakeKey(base.Digest{1}, 0, base.PartAllLayers)
	b := make([]byte, 4096)
	fill(b, key, 3, 1)
	if n := wrong(b, key, 3, 1); n != 0 {
		t.Fatalf("%d wrong bytes in what fill wrote", n)
	}
	b[100] ^= 1
	b[4095] ^= 0x80
	if n := wrong(b, key, 3, 1); n != 2 {
		t.Errorf("%d wrong bytes, 2 were changed", n)
	}
	for name, n := range map[string]int{"key": wrong(b, base.MakeKey(base.Digest{2}, 0, 0), 3, 1), "block": wrong(b, key, 2, 1), "layer": wrong(b, key, 3, 0)} {
		if n < len(b)/2 {
			t.Errorf("content of another %s differs in %d bytes only", name, n)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{Workers: 1}, {Workers: 33}, {Scale: 3}, {Scale: 64}, {Chains: -1}, {Own: 65}} {
		if _, err := c.PoolBytes(); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := newWorker(t.Context(), "{"); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("options that are no JSON: %v", err)
	}
}
