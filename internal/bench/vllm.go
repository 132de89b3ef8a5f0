package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/xcena-dev/maru/internal/keys"
)

func init() { benches["vllm"] = runVLLM }

// vllmSizes is how much the benchmark of the vLLM connector does. It needs no vLLM: it
// calls the connector's roles as the engine does.
type vllmSizes struct {
	running, chunks int // of the requests whose steps are timed
	served          int // requests between the two measurements
	steps           int
	hashTokens      int

	layers, runBytes int // KV of one 16-token block and layer
	tensorChunks     int
	rounds           int // after one that is not counted: it touches all memory
}

func runVLLM(ctx context.Context, o Options) (*Report, error) {
	// 32 layers, 8 KV heads of 128, bf16, blocks of 16 tokens: 64 KiB a block and layer,
	// 32 MiB a chunk of 256 tokens.
	s := vllmSizes{
		running: 64, chunks: 1000, served: 20_000, steps: 250, hashTokens: 256 << 10,
		layers: 32, runBytes: 64 << 10, tensorChunks: 24, rounds: 6,
	}
	if o.Quick {
		s.served, s.tensorChunks, s.rounds = 2_000, 8, 2
	}
	return s.run(ctx, o)
}

// Targets of the connector.
const (
	stepTarget    = 200 * time.Microsecond
	tensorsWanted = 0.90
	// flatWanted is how much slower a step may be after many requests than before them.
	flatWanted = 1.25
)

func (s vllmSizes) run(ctx context.Context, o Options) (_ *Report, err error) {
	python, err := findPython(ctx)
	if err != nil {
		return nil, err
	}
	python.script = filepath.Join(filepath.Dir(python.script), "vllm.py")
	o.Progress("vllm: %s", python)
	r := NewReport("vllm")
	script, err := python.start(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, script.close()) }()
	if err := s.schedulerSteps(o, r, script); err != nil {
		return nil, err
	}
	return r, s.tensors(ctx, o, r, script)
}

// schedulerSteps measures what the scheduler role adds to a step of the engine, before
// and after many requests have come and gone.
func (s vllmSizes) schedulerSteps(o Options, r *Report, script *process) error {
	o.Progress("vllm: %d running requests of %d chunks", s.running, s.chunks)
	if err := script.call(map[string]any{"do": "open steps", "running": s.running, "chunks": s.chunks}, nil); err != nil {
		return err
	}
	var first, second, hashed transferTimes
	steps := map[string]any{"do": "steps", "count": s.steps}
	if err := script.call(steps, &first); err != nil {
		return err
	}
	if err := script.call(map[string]any{"do": "serve", "count": s.served}, nil); err != nil {
		return err
	}
	if err := script.call(steps, &second); err != nil {
		return err
	}
	if err := script.call(map[string]any{"do": "hash", "tokens": s.hashTokens}, &hashed); err != nil {
		return err
	}
	if err := script.call(map[string]any{"do": "close"}, nil); err != nil {
		return err
	}
	before, after := median(first["step"]), median(second["step"])
	label := fmt.Sprintf("scheduler role, a step of %d running requests of %d chunks", s.running, s.chunks)
	r.Add(label+", p50", microseconds(before), "us", 0).Want("< 200 us", before < stepTarget)
	r.Add(label+", p99", microseconds(quantile(first["step"], 0.99)), "us", microseconds(before))
	// The quickest tenth: other programs only ever make a step longer.
	quick, later := quantile(first["step"], 0.1), quantile(second["step"], 0.1)
	r.Add(fmt.Sprintf("%s, p50 after %d requests more", label, s.served), microseconds(after), "us", microseconds(before))
	row := r.Add(fmt.Sprintf("%s, p10 after %d requests more", label, s.served), microseconds(later), "us", microseconds(quick))
	row.Want(fmt.Sprintf("<= %.2f of before", flatWanted), row.Ratio <= flatWanted)
	r.Add("pickle of a step's orders, p50", microseconds(median(first["pickle"])), "us", 0)
	for _, by := range []string{"library", "python"} {
		perToken := float64(median(hashed[by]).Nanoseconds()) / float64(s.hashTokens)
		r.Add(fmt.Sprintf("hashing a prompt of %d tokens, %s, a token", s.hashTokens, by), perToken, "ns", 0)
	}
	return nil
}

// tensors measures loads and stores of the worker role from and into CPU tensors.
func (s vllmSizes) tensors(ctx context.Context, o Options, r *Report, script *process) (err error) {
	value := uint64(16 * s.layers * s.runBytes)       //nolint:gosec // positive
	piece, err := keys.PieceBytes(uint64(s.runBytes)) //nolint:gosec // positive
	if err != nil {
		return err
	}
	page, err := keys.EnginePageBytes(value, piece)
	if err != nil {
		return err
	}
	pool := uint64(s.tensorChunks) * page //nolint:gosec // positive
	var at serverReady
	server, err := startPart(ctx, "server", serverOptions{CXLBytes: pool + pool/4 + 96<<20}, &at)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	for _, sums := range []bool{false, true} {
		o.Progress("vllm: %d chunks of %s, checksums %v", s.tensorChunks, sizeName(int(value)), sums) //nolint:gosec // small
		err := script.call(map[string]any{
			"do": "open tensors", "server": at.Server, "layers": s.layers, "run_bytes": s.runBytes, "chunks": s.tensorChunks, "checksums": sums,
		}, nil)
		if err != nil {
			return err
		}
		times := transferTimes{}
		for i := range s.rounds + 1 {
			t := transferTimes{}
			if err := script.call(map[string]any{"do": "measure"}, &t); err != nil {
				return err
			}
			if i > 0 {
				times.add(t)
			}
		}
		if err := script.call(map[string]any{"do": "close"}, nil); err != nil {
			return err
		}
		label := fmt.Sprintf("%d chunks of %d layers x %s, cxl, checksums %v", s.tensorChunks, s.layers, sizeName(s.runBytes), sums)
		wanted := tensorsWanted
		if sums {
			wanted = 0 // the copy with checksums has its own target in `maru bench data`
		}
		for _, call := range []string{"store", "load"} {
			addSpeed(o, r, fmt.Sprintf("connector %s, %s", call, label), times, call, float64(value)*float64(s.tensorChunks), wanted)
			r.Add(fmt.Sprintf("connector %s, %s, engine's thread", call, label), microseconds(median(times[call+" submit"])), "us", 0)
		}
	}
	return nil
}
