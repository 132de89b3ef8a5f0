package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

// Command is the first argument of a worker process.
const Command = "demo-worker"

// Options of a worker process, on its command line as one JSON argument.
type Options struct {
	Server      string `json:"server"`
	Index       int    `json:"index"`
	Scale       int    `json:"scale"`
	RegionBytes uint64 `json:"region_bytes"`
	Batch       int    `json:"batch"` // objects a call
}

// order is one line to a worker.
type order struct {
	Do     string  `json:"do"` // store, load, quit
	Chains []Chain `json:"chains"`
}

// Tally is a worker's answer to an order.
type Tally struct {
	Objects    int     `json:"objects"`
	Bytes      int64   `json:"bytes"`
	Seconds    float64 `json:"seconds"` // in store and load calls
	Already    int     `json:"already"`
	Misses     int     `json:"misses"`
	Failed     int     `json:"failed"`
	WrongBytes int     `json:"wrong_bytes"`
	Error      string  `json:"error,omitempty"`
	// Chain and Done say which chain of a store order this line is about; the last
	// line of an order has Done -1.
	Chain int `json:"chain"`
	Done  int `json:"done"`
}

func (t *Tally) add(o Tally) {
	t.Objects += o.Objects
	t.Bytes += o.Bytes
	t.Seconds += o.Seconds
	t.Already += o.Already
	t.Misses += o.Misses
	t.Failed += o.Failed
	t.WrongBytes += o.WrongBytes
}

type worker struct {
	opt    Options
	shape  Shape
	ns     base.NamespaceID
	arena  *arena
	client *client.Client
	layout client.LayoutID
}

// RunWorker is the body of a worker process: it obeys orders from in until quit or
// the end of in.
func RunWorker(ctx context.Context, optionsJSON string, in io.Reader, out io.Writer) error {
	w, err := newWorker(ctx, optionsJSON)
	if err != nil {
		return err
	}
	encode := json.NewEncoder(out)
	if err := encode.Encode(Tally{Done: -1}); err != nil {
		return err
	}
	err = w.obey(ctx, in, encode)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	return errors.Join(err, w.client.Close(closing), w.arena.close())
}

func newWorker(ctx context.Context, optionsJSON string) (*worker, error) {
	w := &worker{}
	if err := json.Unmarshal([]byte(optionsJSON), &w.opt); err != nil {
		return nil, fmt.Errorf("%w: options of a demo worker: %w", base.ErrInvalid, err)
	}
	var err error
	if w.shape, err = Llama31(w.opt.Scale); err != nil {
		return nil, err
	}
	piece, err := keys.PieceBytes(uint64(w.shape.RunBytes())) //nolint:gosec // positive
	if err != nil {
		return nil, err
	}
	ns := w.shape.namespace(piece)
	encoded, err := ns.Encode()
	if err != nil {
		return nil, err
	}
	w.ns = base.NamespaceOf(encoded)
	if w.arena, err = newArena(w.shape, w.opt.Batch*w.shape.ChunkBlocks()); err != nil {
		return nil, err
	}
	w.client, err = client.Open(ctx, client.Config{
		ServerAddress: w.opt.Server, InstanceID: fmt.Sprintf("demo-worker-%d", w.opt.Index),
		Role: base.RoleWorker, Namespace: encoded,
		ValueBytes: uint64(w.shape.ChunkBytes()), PieceBytes: piece, //nolint:gosec // positive
		RegionBytes: w.opt.RegionBytes, WriteOrder: []base.Medium{base.MediumCXL}, Logger: slog.Default(),
	})
	if err != nil {
		return nil, errors.Join(err, w.arena.close())
	}
	w.layout, err = w.client.RegisterLayout(w.arena.layout())
	return w, err
}

func (w *worker) obey(ctx context.Context, in io.Reader, out *json.Encoder) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("%w: order of a demo worker: %w", base.ErrInvalid, err)
		}
		if o.Do == "quit" {
			return nil
		}
		total := Tally{Done: -1, Chain: -1}
		for _, c := range o.Chains {
			t, err := w.chain(ctx, o.Do, c)
			total.add(t)
			if err != nil {
				total.Error = err.Error()
				break
			}
			// What is said here was acknowledged: a killed worker's line is a promise.
			t.Chain, t.Done = c.ID, c.Shared+c.Own
			if err := out.Encode(t); err != nil {
				return err
			}
		}
		if err := out.Encode(total); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (w *worker) chain(ctx context.Context, do string, c Chain) (Tally, error) {
	links, err := w.shape.links(w.ns, c)
	if err != nil {
		return Tally{}, err
	}
	var total Tally
	for len(links) > 0 {
		n := min(w.opt.Batch, len(links))
		var t Tally
		switch do {
		case "store":
			t, err = w.store(ctx, links[:n])
		case "load":
			t, err = w.load(ctx, links[:n])
		default:
			return total, fmt.Errorf("%w: order %q", base.ErrInvalid, do)
		}
		total.add(t)
		if err != nil {
			return total, err
		}
		links = links[n:]
	}
	return total, nil
}

// blocksOf are the arena's blocks of object i of a batch.
func (w *worker) blocksOf(i int) []uint32 {
	n := w.shape.ChunkBlocks()
	out := make([]uint32, n)
	for b := range out {
		out[b] = uint32(i*n + b) //nolint:gosec // small counts
	}
	return out
}

func (w *worker) each(i int, do func(run []byte, block, layer int)) {
	for b, at := range w.blocksOf(i) {
		for layer := range w.shape.Layers {
			do(w.arena.run(layer, int(at)), b, layer)
		}
	}
}

func (w *worker) store(ctx context.Context, links []link) (Tally, error) {
	items := make([]client.StoreItem, len(links))
	for i, l := range links {
		w.each(i, func(run []byte, block, layer int) { fill(run, l.key, block, layer) })
		items[i] = client.StoreItem{Key: l.key, Parent: l.parent, Layout: w.layout, Blocks: w.blocksOf(i)}
	}
	codes := make([]base.Code, len(items))
	start := time.Now()
	err := w.client.Store(ctx, items, codes)
	t := Tally{Seconds: time.Since(start).Seconds()}
	if err != nil {
		return t, err
	}
	for i, code := range codes {
		switch code {
		case base.CodeOK:
			t.Objects++
			t.Bytes += int64(w.shape.ChunkBytes())
		case base.CodeAlreadyStored:
			t.Already++
		default:
			t.Failed++
			return t, fmt.Errorf("store of chunk %s: %w", links[i].key, base.ErrorOf(code))
		}
	}
	return t, nil
}

func (w *worker) load(ctx context.Context, links []link) (Tally, error) {
	items := make([]client.LoadItem, len(links))
	for i, l := range links {
		w.each(i, func(run []byte, _, _ int) { clear(run) })
		items[i] = client.LoadItem{Key: l.key, Layout: w.layout, Blocks: w.blocksOf(i)}
	}
	codes := make([]base.Code, len(items))
	start := time.Now()
	err := w.client.Load(ctx, items, codes)
	t := Tally{Seconds: time.Since(start).Seconds()}
	if err != nil {
		return t, err
	}
	for i, code := range codes {
		switch code {
		case base.CodeOK:
			t.Objects++
			t.Bytes += int64(w.shape.ChunkBytes())
			w.each(i, func(run []byte, block, layer int) { t.WrongBytes += wrong(run, links[i].key, block, layer) })
		case base.CodeMiss:
			t.Misses++
		default:
			t.Failed++
		}
	}
	return t, nil
}
