package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/invariants"
	"github.com/xcena-dev/maru/internal/rpc"
)

func init() { benches["share"] = runShare }

// shareSizes is how much the benchmark of shared pools does.
type shareSizes struct {
	valueBytes, batch, batches, rounds int // warm loads
	cold                               int // regions that are read for the first time
	kill                               int // regions of the worker that is killed
	writers, regions, objects          int // while the server is restarted
	restarts                           int
	books                              int // objects in the books that are checked
}

func runShare(ctx context.Context, o Options) (*Report, error) {
	s := shareSizes{
		valueBytes: 2 << 20, batch: 32, batches: 4, rounds: 12, cold: 200, kill: 100, writers: 4, regions: 64, objects: 1_000_000, restarts: 5, books: 100_000,
	}
	if o.Quick {
		s.rounds, s.cold, s.objects, s.restarts = 3, 50, 100_000, 2
	}
	return s.run(ctx, o)
}

// holdCallBytes is about what a Hold of one region has, and its answer.
const holdCallBytes = 256

// Targets of shared pools.
const (
	warmTarget     = 0.95
	coldTarget     = time.Millisecond
	reclaimTarget  = 2 * time.Second
	heartbeat      = time.Second // the server's default
	hitsAgainBeats = 2
)

// shared is a resource manager and a server, each in a process of its own. The state is on
// a disk, as operators have it, and the pool in memory, as a device is.
type shared struct {
	disk, memory string
	rm, server   *process
	echoes       *restedEchoes
	address      string // of the server: its Unix socket, which a restart does not change
	manager      string
}

func startShared(ctx context.Context, poolBytes uint64) (_ *shared, err error) {
	sh := &shared{}
	defer func() {
		if err != nil {
			err = errors.Join(err, sh.close())
		}
	}()
	if sh.disk, err = diskDir(); err != nil {
		return nil, err
	}
	if sh.memory, err = os.MkdirTemp("/dev/shm", "maru-bench-"); err != nil {
		return nil, fmt.Errorf("bench: the pool lies in memory: %w", err)
	}
	var at daemonReady
	sh.rm, err = startPart(ctx, "daemon", daemonOptions{Kind: "rm", Dir: sh.disk, PoolDir: sh.memory, PoolBytes: poolBytes}, &at)
	if err != nil {
		return nil, err
	}
	if sh.echoes, err = startRestedEchoes(ctx, sh.disk); err != nil {
		return nil, err
	}
	sh.manager = at.Address
	sh.address = "unix:" + sh.disk + "/server.sock"
	return sh, sh.startServer(ctx)
}

func (sh *shared) startServer(ctx context.Context) (err error) {
	sh.server, err = startPart(ctx, "daemon", daemonOptions{Kind: "server", Dir: sh.disk, RM: sh.manager}, nil)
	if err != nil {
		return err
	}
	return waitPools(ctx, sh.address)
}

func (sh *shared) close() error {
	err := closeAll(sh.rm, sh.server)
	if sh.echoes != nil {
		err = errors.Join(err, sh.echoes.close())
	}
	for _, dir := range []string{sh.disk, sh.memory} {
		if dir != "" {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}
	return err
}

func (s shareSizes) run(ctx context.Context, o Options) (_ *Report, err error) {
	const extent = 2 << 20
	warm := s.batch * s.batches * (s.valueBytes + extent/s.batch)
	pool := warm + (s.cold+2*s.kill+2*s.regions)*extent + s.regions*extent + s.objects*128 + 256<<20
	sh, err := startShared(ctx, uint64(pool)) //nolint:gosec // positive
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sh.close()) }()
	r := NewReport("share")
	for _, part := range []func(context.Context, Options, *Report, *shared) error{s.warm, s.first, s.killed, s.restart} {
		if err := part(ctx, o, r, sh); err != nil {
			return nil, err
		}
	}
	return r, s.checked(ctx, o, r)
}

// writer starts a writer process and gives it orders.
func (sh *shared) writer(ctx context.Context, pageBytes, regionPages int, orders ...writerOrder) (p *process, session string, err error) {
	p, err = startPart(ctx, "writer", writerOptions{sh.address, uint64(pageBytes), uint64(regionPages)}, &session) //nolint:gosec // positive
	if err != nil {
		return nil, "", err
	}
	for _, o := range orders {
		if err := p.call(o, nil); err != nil {
			return nil, "", errors.Join(err, p.close())
		}
	}
	return p, session, nil
}

// firstOf keeps the keys of the parts apart.
const (
	firstWarm    = 0
	firstCold    = 1 << 24
	firstKilled  = 2 << 24
	firstRestart = 3 << 24
)

// warm loads what another process stored, batch by batch, beside a copy of the same bytes
// by Go out of the same mapping: how fast memory is depends on where its pages lie.
func (s shareSizes) warm(ctx context.Context, o Options, r *Report, sh *shared) (err error) {
	count := s.batch * s.batches
	w, _, err := sh.writer(ctx, s.valueBytes, count, writerOrder{"store", firstWarm, count})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	target, err := anonymous(s.valueBytes*s.batch, unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Munmap(target)) }()
	for _, sums := range []client.Switch{client.Off, client.On} {
		o.Progress("share: %d loads of %s from another process, checksums %v", s.batch, sizeName(s.valueBytes), sums)
		if err := s.warmWith(ctx, o, r, sh, sums, target); err != nil {
			return err
		}
	}
	return nil
}

// warmWith is warm for one setting of the checksums.
func (s shareSizes) warmWith(ctx context.Context, o Options, r *Report, sh *shared, sums client.Switch, target []byte) (err error) {
	cfg := pagesConfig(sh.address, "bench-reader", uint64(s.valueBytes), 1, sums) //nolint:gosec // positive
	cfg.Views = client.On
	c, err := client.Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeClient(c)) }()
	var all hot.Keys
	for i := range s.batch * s.batches {
		k := keyOf(uint64(firstWarm + i)) //nolint:gosec // positive
		all = append(all, k[:]...)
	}
	views := make([]client.View, all.Len())
	if err := c.Retrieve(ctx, all, hot.ModePrefix, views); err != nil {
		return err
	}
	var ids []uint64
	for i := range views {
		if views[i].ID == 0 {
			return fmt.Errorf("%w: object %d of another process is a miss", base.ErrInternal, i)
		}
		ids = append(ids, views[i].ID)
	}
	defer c.ReleaseViews(ids)
	loads, codes := make([]client.LoadItem, s.batch), make([]base.Code, s.batch)
	for i := range loads {
		loads[i].Runs = [][]byte{target[i*s.valueBytes : (i+1)*s.valueBytes]}
	}
	frames := framesOf(s.batch, all[:s.batch*base.KeyBytes])
	request := echoRequest(frames.acquire, frames.acquireAnswer)
	var watch stopwatch
	t, turn := transferTimes{}, 0
	copied := watch.time(func() error {
		for i := range s.batch {
			copy(target[i*s.valueBytes:], views[turn%s.batches*s.batch+i].Bytes)
		}
		return nil
	})
	loaded := watch.time(func() error {
		for i := range loads {
			loads[i].Key = all.At(turn%s.batches*s.batch + i)
		}
		if err := c.Load(ctx, loads, codes); err != nil {
			return err
		}
		return allOK("load", codes)
	})
	echoed := watch.time(func() error { return sh.echoes.frame.call(request) })
	for turn = range s.rounds * s.batches {
		// Load and echo each come after a copy: both find the other processes at rest.
		for _, x := range []struct {
			name string
			call func() time.Duration
		}{{"load memcpy", copied}, {"load", loaded}, {"load memcpy", copied}, {"echo", echoed}} {
			took := x.call()
			if turn >= s.batches { // the first round touches the mapping's pages
				t[x.name] = append(t[x.name], took)
			}
		}
	}
	if watch.err == nil && !bytes.Equal(target[:s.valueBytes], target[s.valueBytes:2*s.valueBytes]) {
		watch.err = fmt.Errorf("%w: two equal values came back differently", base.ErrInternal)
	}
	if watch.err != nil {
		return watch.err
	}
	wanted := warmTarget
	if sums == client.On {
		wanted = 0
	}
	label := fmt.Sprintf("load %dx %s of another process, mapping warm, checksums %v", s.batch, sizeName(s.valueBytes), sums)
	addSpeed(o, r, label, t, "load", float64(len(target)), wanted)
	more := microseconds(median(t["load"])) - microseconds(median(t["load memcpy"]))
	r.Add(label+", time above memcpy, by one frame echo", more, "us", microseconds(median(t["echo"])))
	return nil
}

func closeClient(c *client.Client) error {
	ctx, cancel := closing()
	defer cancel()
	return c.Close(ctx)
}

// first reads one object of each of many regions that the reader has not mapped: it
// describes, holds (durable before it is acknowledged) and maps each.
func (s shareSizes) first(ctx context.Context, o Options, r *Report, sh *shared) (err error) {
	const page = 64 << 10
	o.Progress("share: first reads of %d regions", s.cold)
	w, _, err := sh.writer(ctx, page, 1, writerOrder{"store", firstCold, s.cold})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	c, err := openPages(ctx, sh.address, "bench-cold", page, 1, client.On)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeClient(c)) }()
	commit, err := newBareCommit(filepath.Join(sh.disk, "commit"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, commit.file.Close()) }()
	dst, codes := make([]byte, page), make([]base.Code, 1)
	var watch stopwatch
	read := func(i int) func() error {
		return func() error {
			item := client.LoadItem{Key: keyOf(uint64(firstCold + i)), Runs: [][]byte{dst}} //nolint:gosec // positive
			if err := c.Load(ctx, []client.LoadItem{item}, codes); err != nil {
				return err
			}
			return allOK("load", codes)
		}
	}
	var cold, warm, bare, call []time.Duration
	request := echoRequest(hot.HeaderBytes+holdCallBytes, hot.HeaderBytes+holdCallBytes)
	for i := range s.cold {
		bare = append(bare, watch.time(commit.commit)())
		call = append(call, watch.time(func() error { return sh.echoes.grpc.call(ctx, request) })())
		cold = append(cold, watch.time(read(i))())
	}
	for i := range s.cold {
		warm = append(warm, watch.time(read(i))())
	}
	if watch.err != nil {
		return watch.err
	}
	p50 := median(cold)
	r.Add("first read of a cold region (hold, map), p50", microseconds(p50), "us", microseconds(median(warm))).Want("< 1 ms", p50 < coldTarget)
	r.Add("first read of a cold region (hold, map), p99", microseconds(quantile(cold, 0.99)), "us", microseconds(quantile(warm, 0.99)))
	needed := median(bare) + median(call)
	r.Add("first read of a cold region by the writes and syncs of one commit and a gRPC echo", microseconds(p50), "us", microseconds(needed))
	return nil
}

// killed kills a worker with many regions, half of them without a key, and waits until
// these are given back and the others kept.
func (s shareSizes) killed(ctx context.Context, o Options, r *Report, sh *shared) (err error) {
	const page, pages = 64 << 10, 2
	o.Progress("share: a worker with %d regions is killed", s.kill)
	orders := []writerOrder{{"store", firstKilled, s.kill * pages}}
	for i := 0; i < s.kill; i += 2 {
		orders = append(orders, writerOrder{"delete", firstKilled + i*pages, pages})
	}
	w, session, err := sh.writer(ctx, page, pages, orders...)
	if err != nil {
		return err
	}
	list, err := sh.lister(ctx)
	if err != nil {
		w.kill()
		return err
	}
	defer func() { err = errors.Join(err, list.close()) }()
	before, err := list.regions(ctx, session)
	if err != nil || before.regions != s.kill || before.held != s.kill {
		w.kill()
		return errors.Join(err, fmt.Errorf("%w: the worker has %d regions and %d holds, want %d: a region was given back early", base.ErrInternal, before.regions, before.held, s.kill))
	}
	began := time.Now()
	w.kill()
	kept := s.kill - (s.kill+1)/2
	for {
		now, err := list.regions(ctx, session)
		if err != nil {
			return err
		}
		if now.regions < kept {
			return fmt.Errorf("%w: %d of %d regions with keys are left: one was given back early", base.ErrInternal, now.regions, kept)
		}
		if now.regions == kept && now.held == 0 {
			break
		}
		if err := sleep(ctx, 2*time.Millisecond); err != nil {
			return fmt.Errorf("the regions of a killed worker: %d of %d are left, %d held: %w", now.regions, kept, now.held, err)
		}
	}
	took := time.Since(began)
	r.Add(fmt.Sprintf("reclaim after SIGKILL of a worker with %d regions: given back or kept", s.kill), took.Seconds(), "s", 0).
		Want("< 2 s, none early", took < reclaimTarget)
	return nil
}

// regionLister asks the resource manager for what a session has written and holds.
type regionLister struct {
	api   maruv1.ResourceManagerClient
	close func() error
}

type regionCount struct{ regions, held int }

func (sh *shared) lister(ctx context.Context) (*regionLister, error) {
	conn, err := rpc.Dial(ctx, sh.manager)
	if err != nil {
		return nil, err
	}
	return &regionLister{maruv1.NewResourceManagerClient(conn), conn.Close}, nil
}

func (l *regionLister) regions(ctx context.Context, session string) (n regionCount, err error) {
	for after := uint32(0); ; {
		list, err := l.api.ListRegions(ctx, &maruv1.ListRegionsRequest{AfterRegionId: after, Limit: 1000})
		if err != nil {
			return n, err
		}
		for _, g := range list.GetRegions() {
			after = g.GetRegionId()
			id, err := base.IDFromBytes("session", g.GetWriterSession())
			if err != nil || base.SessionID(id).String() != session {
				continue
			}
			n.regions++
			if len(g.GetHolders()) > 0 {
				n.held++
			}
		}
		if !list.GetMore() || len(list.GetRegions()) == 0 {
			return n, nil
		}
	}
}

// restart kills the server, starts it again, and waits until the objects of live sessions
// are hits: the last one that each of them lists.
func (s shareSizes) restart(ctx context.Context, o Options, r *Report, sh *shared) (err error) {
	o.Progress("share: %d objects in %d regions of %d live processes, the server is killed %d times", s.objects, s.regions, s.writers, s.restarts)
	each, pages := s.objects/s.writers, s.objects/s.regions
	var writers []*process
	defer func() { err = errors.Join(err, closeAll(writers...)) }()
	var last hot.Keys
	regions := 0
	for i := range s.writers {
		w, _, err := sh.writer(ctx, smallPageBytes, pages)
		if err != nil {
			return err
		}
		writers = append(writers, w)
		var n int
		if err := w.call(writerOrder{"commit", firstRestart + i*each, each}, &n); err != nil {
			return err
		}
		regions += n
		for g := pages; g <= each; g += pages {
			k := keyOf(uint64(firstRestart + i*each + g - 1)) //nolint:gosec // positive
			last = append(last, k[:]...)
		}
	}
	c, err := openSmall(ctx, sh.address, "bench-prober", 64<<10)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeClient(c)) }()
	var up, ready []time.Duration
	for range s.restarts {
		sh.server.kill()
		killed := time.Now()
		sh.server, err = startPart(ctx, "daemon", daemonOptions{Kind: "server", Dir: sh.disk, RM: sh.manager}, nil)
		if err != nil {
			sh.server = nil
			return err
		}
		began := time.Now()
		if err := waitHits(ctx, c, last); err != nil {
			return err
		}
		up, ready = append(up, time.Since(killed)), append(ready, time.Since(began))
		if err := s.allHits(ctx, c); err != nil {
			return err
		}
	}
	worst := quantile(ready, 1)
	label := fmt.Sprintf("server restart with %d objects in %d regions", s.objects, regions)
	r.Add(label+", from ready to all hits, worst", worst.Seconds(), "s", hitsAgainBeats*heartbeat.Seconds()).
		Want("<= 2 heartbeats", worst <= hitsAgainBeats*heartbeat)
	r.Add(label+", from SIGKILL to all hits, median", median(up).Seconds(), "s", 0)
	return nil
}

// waitHits probes until every key is a hit. While the server is away everything misses.
func waitHits(ctx context.Context, c *client.Client, packed hot.Keys) error {
	verdicts := make([]byte, packed.Len())
	for {
		hits, err := c.Probe(ctx, client.ProbeQuery{Keys: packed}, verdicts)
		if err == nil && hits == packed.Len() {
			return nil
		}
		if err := sleep(ctx, 2*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d keys are hits again: %w", hits, packed.Len(), err)
		}
	}
}

// allHits wants every object back.
func (s shareSizes) allHits(ctx context.Context, c *client.Client) error {
	verdicts := make([]byte, hot.MaxKeys)
	for first := 0; first < s.objects; first += hot.MaxKeys {
		var packed hot.Keys
		for i := first; i < min(first+hot.MaxKeys, s.objects); i++ {
			k := keyOf(uint64(firstRestart + i)) //nolint:gosec // positive
			packed = append(packed, k[:]...)
		}
		hits, err := c.Probe(ctx, client.ProbeQuery{Keys: packed}, verdicts[:packed.Len()])
		if err != nil {
			return err
		}
		if hits != packed.Len() {
			return fmt.Errorf("%w: of the objects from %d on %d of %d are hits after the restart", base.ErrInternal, first, hits, packed.Len())
		}
	}
	return nil
}

// checked prices the checks of the numbered invariants: the assertions within each call,
// compiled in with the build tag only, by the time of a call in this build, and one walk
// over the server's whole books.
func (s shareSizes) checked(ctx context.Context, o Options, r *Report) (err error) {
	const batch, rounds = 512, 200
	o.Progress("share: invariants over %d objects", s.books)
	l, err := newLoneDirectory(ctx, s.books, batch)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.dir.Free()) }()
	var calls, walks []time.Duration
	for i := range rounds {
		took, err := l.acquire()
		if err != nil {
			return err
		}
		calls = append(calls, took)
		if i%(rounds/5) != 0 {
			continue
		}
		began := time.Now()
		if err := l.dir.CheckInvariants(loneNow); err != nil {
			return err
		}
		walks = append(walks, time.Since(began))
	}
	build := "off in this build"
	if invariants.Enabled {
		build = "on in this build"
	}
	r.Add(fmt.Sprintf("acquire %d in the directory alone, assertions %s", batch, build), microseconds(median(calls)), "us", 0)
	r.Add(fmt.Sprintf("one walk over the books of %d objects by the invariant checker", s.books), microseconds(median(walks)), "us", microseconds(median(calls)))
	return nil
}
