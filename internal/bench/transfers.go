package bench

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
)

// goTransfers is what python/bench/data.py does, through the Go client: the same
// copies of the same memory, beside Go's own copy of it.
type goTransfers struct {
	size, batch, batches   int
	client                 *client.Client
	source, target, arena  []byte
	pages                  int
	round                  uint64
	stores                 []client.StoreItem
	loads                  []client.LoadItem
	codes                  []base.Code
	sourceRuns, targetRuns [][]byte
}

func openTransfers(ctx context.Context, server, medium string, sums client.Switch, size objectSize, batch int) (_ *goTransfers, err error) {
	piece, err := keys.PieceBytes(uint64(size.bytes)) //nolint:gosec // positive
	if err != nil {
		return nil, err
	}
	page, err := keys.EnginePageBytes(uint64(size.bytes), piece) //nolint:gosec // positive
	if err != nil {
		return nil, err
	}
	ns := keys.Namespace{
		Format: keys.FormatVersion, Weights: "bench", Engine: "bench", RunBytes: []uint64{uint64(size.bytes)}, PieceBytes: piece, //nolint:gosec // positive
	}
	encoded, err := ns.Encode()
	if err != nil {
		return nil, err
	}
	t := &goTransfers{size: size.bytes, batch: batch, batches: size.batches, pages: batch * (size.batches + 1)}
	pool := uint64(t.pages) * page //nolint:gosec // positive
	cfg := client.Config{
		ServerAddress: server, InstanceID: "bench-go", Namespace: encoded, ValueBytes: uint64(size.bytes), PieceBytes: piece, //nolint:gosec // positive
		Checksums: sums, CopyThreads: 1, AutoExpand: client.Off, RPCTimeout: 30 * time.Second, Logger: discard(),
	}
	if medium == "cpu" {
		cfg.CPUBytes = pool
	} else {
		cfg.RegionBytes = pool
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	whole := size.bytes * batch
	if t.source, err = anonymous(whole, unix.MAP_PRIVATE); err != nil {
		return nil, err
	}
	if t.target, err = anonymous(whole, unix.MAP_PRIVATE); err != nil {
		return nil, err
	}
	if t.arena, err = anonymous(whole*size.batches, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	for i := range t.source {
		t.source[i] = byte(i*7 + i>>9)
	}
	for i := 0; i < len(t.arena); i += 4096 {
		t.arena[i] = 1
	}
	for i := range batch {
		t.sourceRuns = append(t.sourceRuns, t.source[i*size.bytes:(i+1)*size.bytes])
		t.targetRuns = append(t.targetRuns, t.target[i*size.bytes:(i+1)*size.bytes])
		t.stores = append(t.stores, client.StoreItem{Runs: t.sourceRuns[i : i+1]})
		t.loads = append(t.loads, client.LoadItem{Runs: t.targetRuns[i : i+1]})
	}
	t.codes = make([]base.Code, batch)
	t.client, err = client.Open(ctx, cfg)
	return t, err
}

// anonymous maps page-aligned memory.
func anonymous(size, kind int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, kind|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("%w: map %d bytes: %w", base.ErrFull, size, err)
	}
	return b, nil
}

func (t *goTransfers) key(batch, i int) base.Key {
	return keyOf(t.round<<32 | uint64(batch*t.batch+i)) //nolint:gosec // positive
}

// measure stores and loads every batch, then single objects.
func (t *goTransfers) measure(ctx context.Context) (transferTimes, error) {
	t.round++
	out := transferTimes{}
	var w stopwatch
	timed := func(name string, call func() error) {
		took := w.time(call)()
		if w.err == nil {
			out[name] = append(out[name], took)
		}
	}
	copied := func(dst, src []byte) func() error {
		return func() error { copy(dst, src); return nil }
	}
	whole := t.size * t.batch
	for b := range t.batches {
		for i := range t.stores {
			t.stores[i].Key = t.key(b, i)
		}
		timed("store memcpy", copied(t.arena[b*whole:(b+1)*whole], t.source))
		timed("store", func() error { return t.client.Store(ctx, t.stores, t.codes) })
		w.err = errors.Join(w.err, allOK("store", t.codes))
	}
	for b := range t.batches {
		for i := range t.loads {
			t.loads[i].Key = t.key(b, i)
		}
		timed("load memcpy", copied(t.target, t.arena[b*whole:(b+1)*whole]))
		clear(t.target[:4096])
		timed("load", func() error { return t.client.Load(ctx, t.loads, t.codes) })
		w.err = errors.Join(w.err, allOK("load", t.codes))
		if w.err == nil && (b == 0 || b == t.batches-1) && !bytes.Equal(t.target, t.source) {
			w.err = fmt.Errorf("%w: batch %d came back with other bytes", base.ErrInternal, b)
		}
	}
	for i := range t.batch {
		t.stores[i].Key = t.key(t.batches, i)
		timed("store one memcpy", copied(t.arena[i*t.size:(i+1)*t.size], t.sourceRuns[i]))
		timed("store one", func() error { return t.client.Store(ctx, t.stores[i:i+1], t.codes) })
		w.err = errors.Join(w.err, allOK("single store", t.codes[:1]))
	}
	for i := range t.batch {
		t.loads[i].Key = t.key(t.batches, i)
		timed("load one memcpy", copied(t.targetRuns[i], t.arena[i*t.size:(i+1)*t.size]))
		timed("load one", func() error { return t.client.Load(ctx, t.loads[i:i+1], t.codes) })
		w.err = errors.Join(w.err, allOK("single load", t.codes[:1]))
	}
	if w.err != nil {
		return nil, w.err
	}
	return out, t.empty(ctx)
}

// empty deletes all and waits until the pages are back.
func (t *goTransfers) empty(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for b := range t.batches + 1 {
		var packed hot.Keys
		for i := range t.batch {
			k := t.key(b, i)
			packed = append(packed, k[:]...)
		}
		if err := t.client.Delete(ctx, packed, t.codes); err != nil {
			return err
		}
		if err := allOK("delete", t.codes); err != nil {
			return err
		}
	}
	for t.client.Stats().PagesFree < uint64(t.pages) { //nolint:gosec // positive
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("deleted pages do not come back: %+v: %w", t.client.Stats(), err)
		}
	}
	return nil
}

func (t *goTransfers) close() error {
	var errs []error
	if t.client != nil {
		ctx, cancel := closing()
		defer cancel()
		errs = append(errs, t.client.Close(ctx))
	}
	for _, m := range [][]byte{t.source, t.target, t.arena} {
		if m != nil {
			errs = append(errs, unix.Munmap(m))
		}
	}
	return errors.Join(errs...)
}

// openOpaque opens a client of opaque values that probes.
func openOpaque(ctx context.Context, server string) (*client.Client, error) {
	return client.Open(ctx, client.Config{
		ServerAddress: server, InstanceID: "bench-go-keys", Namespace: keys.OpaqueNamespace(), Opaque: true, PageBytes: 1024,
		RegionBytes: 64 << 10, RPCTimeout: 30 * time.Second, Logger: discard(),
	})
}

// hexKeys are packed keys in JSON.
type hexKeys struct{ keys hot.Keys }

// UnmarshalJSON reads hexadecimal text.
func (h *hexKeys) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw)%base.KeyBytes != 0 {
		return fmt.Errorf("%w: %d digits are no packed keys: %w", base.ErrInvalid, len(text), err)
	}
	h.keys = raw
	return nil
}
