package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
)

// checkRows wants each prefix to begin the name of exactly want rows, and every row to
// be a figure; timing is not judged.
func checkRows(t *testing.T, r *Report, want map[string]int) {
	t.Helper()
	var out bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var decoded struct {
		Bench string
		Host  string
		Rows  []map[string]any
	}
	if err := json.Unmarshal(out.Bytes(), &decoded); err != nil {
		t.Fatalf("%v: %s", err, out.Bytes())
	}
	if decoded.Bench != r.Bench || decoded.Host == "" {
		t.Errorf("bench %q, host %q", decoded.Bench, decoded.Host)
	}
	counts := map[string]int{}
	seen := map[string]bool{}
	for _, row := range decoded.Rows {
		for _, field := range []string{"name", "value", "unit", "reference", "ratio", "target", "met"} {
			if _, ok := row[field]; !ok {
				t.Errorf("row %v has no %s", row["name"], field)
			}
		}
		name, _ := row["name"].(string)
		if seen[name] {
			t.Errorf("two rows are called %q", name)
		}
		seen[name] = true
		if v, ok := row["value"].(float64); !ok || v == 0 && !strings.HasPrefix(name, "idle") {
			t.Errorf("row %q has value %v", name, row["value"])
		}
		if (row["target"] != "") != (row["met"] != nil) {
			t.Errorf("row %q: target %q, met %v", name, row["target"], row["met"])
		}
		for prefix := range want {
			if strings.HasPrefix(name, prefix) {
				counts[prefix]++
			}
		}
	}
	for prefix, n := range want {
		if counts[prefix] != n {
			t.Errorf("%d rows begin with %q, want %d", counts[prefix], prefix, n)
		}
	}
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil || !strings.Contains(table.String(), decoded.Rows[0]["name"].(string)) {
		t.Errorf("table: %v\n%s", err, table.String())
	}
	if t.Failed() {
		t.Log(table.String())
	}
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func logged(t *testing.T) Options { return Options{Quick: true, Progress: t.Logf} }

func TestMeta(t *testing.T) {
	s := metaSizes{
		objects: 3000, batch: 64, rounds: 20, small: 1000, large: 9000, clients: 2, perProbe: 16, turns: 1, turn: 20 * time.Millisecond,
	}
	r, err := s.run(testContext(t), logged(t))
	if err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{
		"acquire 64 of 3000, tcp, p50": 1, "acquire 64 of 3000, unix, p50": 1, "probe 64 of 3000, tcp, p50": 1, "probe 64 of 3000, unix, p50": 1,
		"acquire 64 of 3000, unix, p99": 1, "grpc echo": 4, "probe 64 of 3000, Go client": 1, "retrieve 64 views": 1,
		"probe throughput, 2 processes": 2, "server cpu of a key": 2,
		"resident bytes of 9000 objects": 2, "acquire 64 of 9000 against of 1000": 2,
	})
}

func TestRM(t *testing.T) {
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skipf("the pool lies in memory: %v", err)
	}
	dir, err := diskDir()
	if err != nil {
		t.Skipf("no directory on a disk: %v", err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	s := rmSizes{regions: 6, many: 10, rounds: 5, callers: 3, starts: 2}
	r, err := s.run(testContext(t), logged(t))
	if err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{
		"allocations, 3 concurrent callers, up to 6 regions, pool in memory": 1, "allocations, 3 concurrent callers, up to 10 regions": 1,
		"allocate with 6 regions": 2, "free with 6 regions": 1, "writes and syncs of one commit": 1, "start with 10 regions, to the first answer": 1,
	})
	s.many = s.regions
	if r, err = s.run(testContext(t), logged(t)); err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{"allocate with 6 regions": 2, "start with 6 regions, to the first answer": 1})
}

func TestShare(t *testing.T) {
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skipf("the pool lies in memory: %v", err)
	}
	s := shareSizes{
		valueBytes: 64 << 10, batch: 4, batches: 2, rounds: 2, cold: 3, kill: 6, writers: 2, regions: 4, objects: 4000, restarts: 1, books: 1000,
	}
	r, err := s.run(testContext(t), logged(t))
	if err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{
		"load 4x 64 KiB of another process": 4, "first read of a cold region": 3, "reclaim after SIGKILL of a worker with 6 regions": 1,
		"server restart with 4000 objects": 2, "acquire 512 in the directory alone": 1, "one walk over the books of 1000 objects": 1,
	})
}

func TestStart(t *testing.T) {
	s := startSizes{poolBytes: 64 << 20, objectKiB: 64, starts: 1, settle: 10 * time.Millisecond, idle: 50 * time.Millisecond}
	r, err := s.run(testContext(t), logged(t))
	if err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{"cpu pool of 0 GiB": 2, "maru up": 1, "idle maru-resource-manager": 1, "idle maru-server": 1, "idle client": 1})
}

// TestGoTransfers runs what the rows of the Go client run; the Python ones are checked
// where Python and the library are.
func TestGoTransfers(t *testing.T) {
	ctx := testContext(t)
	var at serverReady
	server, err := startPart(ctx, "server", serverOptions{CPUBytes: 64 << 20, CXLBytes: 32 << 20}, &at)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := server.close(); err != nil {
			t.Error(err)
		}
	}()
	for _, medium := range []string{"cpu", "cxl"} {
		for _, sums := range []client.Switch{client.Off, client.On} {
			size := objectSize{bytes: 16 << 10, batches: 2}
			g, err := openTransfers(ctx, at.Server, medium, sums, size, 4)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				times, err := g.measure(ctx)
				if err != nil {
					t.Fatalf("%s, checksums %v: %v", medium, sums, err)
				}
				for name, want := range map[string]int{"store": 2, "load": 2, "store one": 4, "load one": 4} {
					if len(times[name]) != want || len(times[name+" memcpy"]) != want {
						t.Errorf("%s: %d times, %d of memcpy, want %d", name, len(times[name]), len(times[name+" memcpy"]), want)
					}
				}
			}
			if err := g.close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestData(t *testing.T) {
	ctx := testContext(t)
	if _, err := findPython(ctx); err != nil {
		if !errors.Is(err, base.ErrUnsupported) {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	s := dataSizes{
		objects: []objectSize{{8 << 10, 2, 0.75, 0.65}}, media: []string{"cpu", "cxl"}, batch: 4, rounds: 1, probe: 32, turns: 1, probes: 3,
	}
	r, err := s.run(ctx, logged(t))
	if err != nil {
		t.Fatal(err)
	}
	checkRows(t, r, map[string]int{
		"store 4x 8 KiB, cpu, checksums off, Python": 1, "load 4x 8 KiB, cxl, checksums on, Python": 1, "store 1x 8 KiB": 8, "load 4x 8 KiB": 8,
		"probe 32 keys, Go client": 2, "Python overhead of a batch of 32 packed keys": 1, "Python overhead of a batch of 32 str keys": 1,
	})
}

// TestDataNamesTheCure wants errors that say what to do.
func TestDataNamesTheCure(t *testing.T) {
	t.Setenv(pythonVariable, "no-such-python")
	_, err := Run(testContext(t), "data", Options{Quick: true})
	if !errors.Is(err, base.ErrUnsupported) || !strings.Contains(err.Error(), pythonVariable) {
		t.Errorf("without Python: %v", err)
	}
	python, lookErr := exec.LookPath("python3")
	if lookErr != nil {
		t.Skipf("no python3: %v", lookErr)
	}
	t.Setenv(pythonVariable, python)
	t.Setenv(libraryVariable, "/nowhere/libmaru.so")
	if _, err = Run(testContext(t), "data", Options{Quick: true}); !errors.Is(err, base.ErrUnsupported) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("without the library: %v", err)
	}
}

func TestRunRefusesUnknownNames(t *testing.T) {
	if _, err := Run(testContext(t), "speed", Options{}); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "meta") {
		t.Errorf("%v", err)
	}
	var out bytes.Buffer
	if err := RunProcess(testContext(t), "teapot", "{}", strings.NewReader(""), &out); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("%v", err)
	}
}

// TestProcessFailure wants the child's own words in the parent's error.
func TestProcessFailure(t *testing.T) {
	_, err := startPart(testContext(t), "daemon", daemonOptions{Kind: "teapot"}, nil)
	if err == nil || !strings.Contains(err.Error(), "teapot") {
		t.Errorf("a process that cannot start: %v", err)
	}
	_, err = startPart(testContext(t), "prober", proberOptions{Server: "nowhere"}, nil)
	if err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Errorf("a client without a server: %v", err)
	}
}

func TestEchoFrames(t *testing.T) {
	for _, sizes := range [][2]int{{100, 5000}, {20000, 64}, {20, 16}} {
		f := echoRequest(sizes[0], sizes[1])
		if len(f) < sizes[0] {
			t.Errorf("request of %d bytes, want %d", len(f), sizes[0])
		}
	}
}

func TestKeysOfObjectsDiffer(t *testing.T) {
	seen := map[base.Key]uint64{}
	for i := range uint64(100_000) {
		k := keyOf(i)
		if other, ok := seen[k]; ok {
			t.Fatalf("objects %d and %d have one key", i, other)
		}
		seen[k] = i
	}
}
