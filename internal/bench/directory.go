package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/offheap"
)

// batchCount is how many batches of random keys a measurement goes round: enough that
// their objects do not stay in a cache.
const batchCount = 256

// randomBatches packs batches of random keys among the first count objects, each key
// once a batch where there are enough.
func randomBatches(seed uint64, count, batch int) []hot.Keys {
	rng := rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // a benchmark
	out := make([]hot.Keys, batchCount)
	for i := range out {
		for range batch {
			k := keyOf(rng.Uint64N(uint64(count))) //nolint:gosec // positive
			out[i] = append(out[i], k[:]...)
		}
	}
	return out
}

// onePerManifest are the manifest sizes of n keys.
func onePerManifest(n int) []byte {
	var sizes []byte
	for range n {
		sizes = hot.AppendManifestSize(sizes, 1)
	}
	return sizes
}

// loneDirectory is internal/directory with the objects of one worker and nothing around
// it: no frames, no lock, no connection.
type loneDirectory struct {
	dir   *directory.Directory
	who   directory.Caller
	seq   base.Sequence
	out   []byte
	sizes []byte
	keys  []hot.Keys
	turn  int
}

const loneNow = time.Second

func newLoneDirectory(ctx context.Context, count, batch int) (_ *loneDirectory, err error) {
	l := &loneDirectory{sizes: onePerManifest(batch)}
	l.dir, err = directory.New(directory.Config{
		ServerEpoch: 1, HashSeed: 7, Memory: offheap.OS{}, TTL: time.Hour, CPUBudgetBytes: budgetBytes,
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.dir.Free())
		}
	}()
	id := base.NewID()
	res, err := l.dir.Open(loneNow, &directory.OpenRequest{
		Session: id, Secret: directory.Secret{1}, Role: base.RoleWorker, Namespace: base.NamespaceID{1}, Opaque: true, PieceBytes: 64 << 10,
		Node: base.NodeID{1}, CPUBytes: uint64(count) * rawPageBytes, //nolint:gosec // positive
		WriteOrder: []base.Medium{base.MediumCPU}, ReadOrder: []base.Medium{base.MediumCPU},
	})
	if err != nil {
		return nil, err
	}
	l.who = directory.Caller{Session: id, Epoch: res.Epoch}
	l.seq++
	g, _, err := l.dir.ExpandBegin(loneNow, l.who, &directory.ExpandRequest{
		Operation: l.seq, Medium: base.MediumCPU, Bytes: uint64(count) * rawPageBytes, PageBytes: rawPageBytes, PieceBytes: 64 << 10, //nolint:gosec // positive
	})
	if err != nil {
		return nil, err
	}
	var rows hot.CommitRows
	for done := 0; done < count && ctx.Err() == nil; {
		n := min(hot.MaxKeys, count-done)
		rows = rows[:0]
		for i := done; i < done+n; i++ {
			at := uint64(i)                                                                              //nolint:gosec // positive
			row := objectRow(at, at*rawPageBytes, base.MakeGeneration(uint32(l.who.Epoch), uint32(i)+1)) //nolint:gosec // below 2^32
			row.Pool, row.Region = g.Pool, g.Region
			rows = hot.AppendCommitRow(rows, &row)
		}
		l.seq++
		l.out, err = l.dir.Commit(loneNow, l.who, &hot.CommitRequest{
			Operation: hot.Operation{Sequence: l.seq, Watermark: l.seq}, Namespace: res.Namespace, Rows: rows,
		}, l.out[:0])
		if err != nil {
			return nil, err
		}
		if code := hot.CommitResults(l.out).At(0).Code; code != base.CodeOK {
			return nil, base.ErrorOf(code)
		}
		done += n
	}
	l.keys = randomBatches(11, count, batch)
	return l, ctx.Err()
}

// acquire leases one batch, timed, and releases it.
func (l *loneDirectory) acquire() (time.Duration, error) {
	batch := l.keys[l.turn%len(l.keys)]
	l.turn++
	l.seq++
	req := hot.AcquireRequest{
		Operation: hot.Operation{Sequence: l.seq, Watermark: l.seq}, Namespace: 1, Kind: base.LeaseCopy, Mode: hot.ModePrefix,
		ManifestSizes: l.sizes, Keys: batch,
	}
	began := time.Now()
	out, leased, err := l.dir.Acquire(loneNow, l.who, &req, l.out[:0])
	took := time.Since(began)
	l.out = out
	if err != nil {
		return 0, err
	}
	if int(leased) != batch.Len() {
		return 0, fmt.Errorf("%w: %d of %d acquired keys hit", base.ErrInternal, leased, batch.Len())
	}
	rows := hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: l.seq, Count: hot.ReleaseAll})
	l.out, err = l.dir.Release(loneNow, l.who, &hot.ReleaseRequest{Rows: rows}, l.out[:0])
	return took, err
}

// directoryOptions of the process that holds two directories, the small one the
// reference of the large one.
type directoryOptions struct {
	Small int `json:"small"`
	Large int `json:"large"`
	Batch int `json:"batch"`
}

type directoryReady struct {
	ResidentBytes uint64        `json:"resident_bytes"` // of the large one
	FillTime      time.Duration `json:"fill_time"`
}

type directoryOrder struct {
	Rounds int `json:"rounds"`
}

// acquireTimes are p50s.
type acquireTimes struct {
	Small time.Duration `json:"small"`
	Large time.Duration `json:"large"`
}

type directoryPart struct {
	small, large *loneDirectory
	at           directoryReady
}

func startDirectoryPart(ctx context.Context, raw json.RawMessage) (part, error) {
	var o directoryOptions
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	p := &directoryPart{}
	var err error
	if p.small, err = newLoneDirectory(ctx, o.Small, o.Batch); err != nil {
		return nil, err
	}
	runtime.GC()
	before, err := used()
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	began := time.Now()
	if p.large, err = newLoneDirectory(ctx, o.Large, o.Batch); err != nil {
		return nil, errors.Join(err, p.close())
	}
	p.at.FillTime = time.Since(began)
	after, err := used()
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	p.at.ResidentBytes = after.ResidentBytes - min(before.ResidentBytes, after.ResidentBytes)
	return p, nil
}

func (p *directoryPart) ready() any { return p.at }

func (p *directoryPart) do(_ context.Context, raw json.RawMessage) (any, error) {
	var o directoryOrder
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	var failed error
	timed := func(l *loneDirectory) func() time.Duration {
		return func() time.Duration {
			d, err := l.acquire()
			failed = errors.Join(failed, err)
			return d
		}
	}
	times := interleave(o.Rounds, timed(p.small), timed(p.large))
	return acquireTimes{median(times[0]), median(times[1])}, failed
}

func (p *directoryPart) close() error {
	var errs []error
	for _, l := range []*loneDirectory{p.small, p.large} {
		if l != nil {
			errs = append(errs, l.dir.Free())
		}
	}
	return errors.Join(errs...)
}
