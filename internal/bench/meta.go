package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func init() { benches["meta"] = runMeta }

// metaSizes is how much the metadata benchmark does.
type metaSizes struct {
	objects  int // in the table while batches are timed
	batch    int // keys of a timed batch
	rounds   int
	small    int // the reference of large
	large    int // "10 M objects"
	clients  int
	perProbe int // keys of a batch of the throughput rows
	turns    int
	turn     time.Duration // each client and way
}

func runMeta(ctx context.Context, o Options) (*Report, error) {
	s := metaSizes{
		objects: 1_000_000, batch: 512, rounds: 3000, small: 10_000, large: 10_000_000,
		clients: 4, perProbe: 128, turns: 3, turn: 2 * time.Second,
	}
	if o.Quick {
		s.objects, s.rounds, s.large, s.turns, s.turn = 200_000, 400, 1_000_000, 2, 400*time.Millisecond
	}
	return s.run(ctx, o)
}

func (s metaSizes) run(ctx context.Context, o Options) (*Report, error) {
	r := NewReport("meta")
	for _, step := range []func(context.Context, Options, *Report) error{s.latency, s.throughput, s.many} {
		if err := step(ctx, o, r); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// budgetBytes is a cpu budget that no count of raw objects passes. It is a number in
// the server's books; no memory is behind it.
const budgetBytes = 1 << 46

// Targets of the metadata plane.
const (
	batchTarget      = 150 * time.Microsecond
	echoFactor       = 2
	keysPerSecond    = 2e6
	residentTarget   = 2 << 30
	manyFactor       = 2
	batchTargetWords = "< 150 us and <= 2x of the frame echo"
)

// frameSizes are the frames of a batch: request and answer.
type frameSizes struct{ acquire, acquireAnswer, probe, probeAnswer int }

func framesOf(batch int, keys hot.Keys) frameSizes {
	rows := make([]byte, batch*hot.AcquireRowBytes)
	return frameSizes{
		acquire: len(hot.AppendAcquire(nil, 1, &hot.AcquireRequest{
			Kind: base.LeaseCopy, ManifestSizes: onePerManifest(batch), Keys: keys,
		})),
		acquireAnswer: len(hot.AppendAcquireAnswer(nil, 1, &hot.AcquireAnswer{Rows: rows})),
		probe:         len(hot.AppendProbe(nil, 1, &hot.ProbeRequest{Keys: keys})),
		probeAnswer:   len(hot.AppendProbeAnswer(nil, 1, &hot.ProbeAnswer{Verdicts: make([]byte, batch)})),
	}
}

// stopwatch times calls and keeps the first error.
type stopwatch struct{ err error }

func (w *stopwatch) time(call func() error) func() time.Duration {
	return func() time.Duration {
		if w.err != nil {
			return 0
		}
		began := time.Now()
		err := call()
		took := time.Since(began)
		if err != nil {
			w.err = err
		}
		return took
	}
}

// latency times batches of one client over both kinds of connection.
func (s metaSizes) latency(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("meta: %d objects, batches of %d, one client", s.objects, s.batch)
	var at serverReady
	p, err := startPart(ctx, "server", serverOptions{CPUBytes: budgetBytes}, &at)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	session, err := openRaw(ctx, at.Server, uint64(s.objects)*rawPageBytes) //nolint:gosec // positive
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, session.close()) }()
	unixHot := address{"unix", session.open.GetHotUnixPath()}
	filler, err := dialRaw(ctx, unixHot, session.id, session.open)
	if err != nil {
		return err
	}
	err = session.fill(ctx, filler, 0, s.objects)
	filler.close()
	if err != nil {
		return err
	}
	for _, t := range []struct {
		name            string
		hot, echo, grpc address
	}{{"tcp", at.HotTCP, at.EchoTCP, at.GRPCTCP}, {"unix", unixHot, at.EchoUnix, at.GRPCUnix}} {
		if err := s.transport(ctx, o, r, session, t.name, t.hot, t.echo, t.grpc); err != nil {
			return err
		}
	}
	return nil
}

func (s metaSizes) transport(ctx context.Context, o Options, r *Report, session *rawSession, name string, at, echoAt, grpcAt address) error {
	conn, err := dialRaw(ctx, at, session.id, session.open)
	if err != nil {
		return err
	}
	defer conn.close()
	echo, err := dialEcho(ctx, echoAt)
	if err != nil {
		return err
	}
	defer func() { _ = echo.conn.Close() }()
	g, err := dialGRPC(grpcAt)
	if err != nil {
		return err
	}
	defer func() { _ = g.conn.Close() }()
	batches := randomBatches(1, s.objects, s.batch)
	sizes, turn := onePerManifest(s.batch), 0
	f := framesOf(s.batch, batches[0])
	acquireEcho, probeEcho := echoRequest(f.acquire, f.acquireAnswer), echoRequest(f.probe, f.probeAnswer)
	var leased base.Sequence
	var w stopwatch
	calls := []func() time.Duration{
		w.time(func() error { return echo.call(acquireEcho) }),
		w.time(func() error {
			op := session.next()
			leased = op.Sequence
			// Half a round away from what the last probe has brought into the caches.
			return conn.acquire(op, sizes, batches[(turn+len(batches)/2)%len(batches)])
		}),
		w.time(func() error { return conn.release(hot.Operation{}, leased) }),
		w.time(func() error { return echo.call(probeEcho) }),
		w.time(func() error {
			turn++
			return conn.probe(batches[turn%len(batches)])
		}),
	}
	interleave(s.rounds/10+1, calls...) // warm
	times := interleave(s.rounds, calls...)
	// gRPC runs apart: what its goroutines still do after a call would slow the frames
	// behind it, the reference first.
	foreign := []func() time.Duration{
		w.time(func() error { return g.call(ctx, acquireEcho) }), w.time(func() error { return g.call(ctx, probeEcho) }),
	}
	interleave(s.rounds/10+1, foreign...)
	times = append(times, interleave(s.rounds/2+1, foreign...)...)
	if w.err != nil {
		return w.err
	}
	us := func(i int, q float64) float64 { return microseconds(quantile(times[i], q)) }
	for _, row := range []struct {
		what                string
		mine, echo, foreign int
	}{{"acquire", 1, 0, 5}, {"probe", 4, 3, 6}} {
		label := fmt.Sprintf("%s %d of %d, %s", row.what, s.batch, s.objects, name)
		v := us(row.mine, 0.5)
		r.Add(label+", p50", v, "us", us(row.echo, 0.5)).Want(batchTargetWords, withinBatch(v, us(row.echo, 0.5)))
		r.Add(label+", p99", us(row.mine, 0.99), "us", us(row.echo, 0.99))
		r.Add(fmt.Sprintf("grpc echo of the same bytes as %s %d, %s, p50", row.what, s.batch, name), us(row.foreign, 0.5), "us", us(row.echo, 0.5))
		o.Progress("meta: %s: p50 by tenths of the run %s us", label, tenths(times[row.mine]))
	}
	r.Add(fmt.Sprintf("release %d, %s, p50", s.batch, name), us(2, 0.5), "us", 0)
	return nil
}

func withinBatch(value, echo float64) bool {
	return value < microseconds(batchTarget) && value <= echoFactor*echo
}

// tenths shows how steady a series was: least and largest median of its tenths.
func tenths(d []time.Duration) string {
	lo, hi := time.Duration(math.MaxInt64), time.Duration(0)
	for i := range 10 {
		part := d[len(d)*i/10 : len(d)*(i+1)/10]
		if len(part) > 0 {
			lo, hi = min(lo, median(part)), max(hi, median(part))
		}
	}
	return fmt.Sprintf("%.0f to %.0f", microseconds(lo), microseconds(hi))
}

// throughput has several client processes probe the objects of another one, in a
// shared cxl pool; before that, the batches of one Go client on the same objects.
func (s metaSizes) throughput(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("meta: %d objects in a cxl pool, %d client processes, batches of %d", s.objects, s.clients, s.perProbe)
	region := uint64(s.objects) * smallPageBytes //nolint:gosec // positive
	var at serverReady
	server, err := startPart(ctx, "server", serverOptions{CXLBytes: 2*region + 64<<20}, &at)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	c, err := openSmall(ctx, at.Server, "bench-filler", region)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := closing()
		defer cancel()
		err = errors.Join(err, c.Close(ctx))
	}()
	if err := fillClient(ctx, c, 0, s.objects); err != nil {
		return err
	}
	if err := s.goClient(ctx, o, r, c, at); err != nil {
		return err
	}
	return s.processes(ctx, o, r, server, at)
}

// fillClient commits count objects from first on through a client, page by page.
func fillClient(ctx context.Context, c *client.Client, first, count int) error {
	pages := make([]client.Page, hot.MaxKeys)
	items := make([]client.CommitItem, hot.MaxKeys)
	codes := make([]base.Code, hot.MaxKeys)
	for done := 0; done < count; {
		n := min(hot.MaxKeys, count-done)
		if _, err := c.Alloc(ctx, n, pages); err != nil {
			return err
		}
		for i := range n {
			at := uint64(first + done + i) //nolint:gosec // positive
			items[i] = client.CommitItem{Key: keyOf(at), Region: pages[i].Region, Index: pages[i].Index, Length: 8}
			if at%chainLength != 0 {
				items[i].Parent = keyOf(at - 1).Digest()
			}
		}
		if err := c.CommitPages(ctx, items[:n], codes); err != nil {
			return err
		}
		if err := allOK("commit", codes[:n]); err != nil {
			return err
		}
		done += n
	}
	return nil
}

// releasePause is longer than the server needs for a batch of releases.
const releasePause = 500 * time.Microsecond

// goClient times the public client's calls beside an echo of the same bytes.
func (s metaSizes) goClient(ctx context.Context, o Options, r *Report, c *client.Client, at serverReady) error {
	echo, err := dialEcho(ctx, at.EchoUnix)
	if err != nil {
		return err
	}
	defer func() { _ = echo.conn.Close() }()
	batches := randomBatches(3, s.objects, s.batch)
	f := framesOf(s.batch, batches[0])
	acquireEcho, probeEcho := echoRequest(f.acquire, f.acquireAnswer), echoRequest(f.probe, f.probeAnswer)
	verdicts, views := make([]byte, s.batch), make([]client.View, s.batch)
	ids, turn := make([]uint64, s.batch), 0
	var w stopwatch
	probes := []func() time.Duration{
		w.time(func() error { return echo.call(probeEcho) }),
		w.time(func() error {
			turn++
			hits, err := c.Probe(ctx, client.ProbeQuery{Keys: batches[turn%len(batches)]}, verdicts)
			if err == nil && hits != s.batch {
				err = fmt.Errorf("%w: %d of %d probed keys hit", base.ErrInternal, hits, s.batch)
			}
			return err
		}),
	}
	// Released views go to the server behind the caller's back: the pause keeps that
	// out of the reference that comes next.
	viewCalls := []func() time.Duration{
		w.time(func() error { return sleep(ctx, releasePause) }),
		w.time(func() error { return echo.call(acquireEcho) }),
		w.time(func() error {
			turn++
			return c.Retrieve(ctx, batches[turn%len(batches)], hot.ModeEach, views)
		}),
		w.time(func() error {
			for i := range views {
				if ids[i] = views[i].ID; ids[i] == 0 {
					return fmt.Errorf("%w: key %d of a batch of stored ones was a miss", base.ErrInternal, i)
				}
			}
			c.ReleaseViews(ids)
			return nil
		}),
	}
	interleave(s.rounds/10+1, probes...) // warm
	times := interleave(s.rounds, probes...)
	interleave(s.rounds/10+1, viewCalls...)
	times = append(times, interleave(s.rounds/2+1, viewCalls...)[1:]...)
	if w.err != nil {
		return w.err
	}
	us := func(i int) float64 { return microseconds(median(times[i])) }
	r.Add(fmt.Sprintf("probe %d of %d, Go client, unix, p50", s.batch, s.objects), us(1), "us", us(0)).
		Want(batchTargetWords, withinBatch(us(1), us(0)))
	r.Add(fmt.Sprintf("retrieve %d views of %d, Go client, unix, p50", s.batch, s.objects), us(3), "us", us(2))
	r.Add(fmt.Sprintf("release %d views, Go client, p50", s.batch), us(4), "us", 0)
	o.Progress("meta: Go client: p50 of a probe by tenths of the run %s us", tenths(times[1]))
	return nil
}

// processes measures the keys a second of several client processes.
func (s metaSizes) processes(ctx context.Context, o Options, r *Report, server *process, at serverReady) (err error) {
	var probers []*process
	defer func() { err = errors.Join(err, closeAll(probers...)) }()
	for i := range s.clients {
		p, err := startPart(ctx, "prober", proberOptions{
			Server: at.Server, Echo: at.EchoUnix, Objects: s.objects, Batch: s.perProbe, Seed: uint64(100 + i), //nolint:gosec // small
		}, nil)
		if err != nil {
			return err
		}
		probers = append(probers, p)
	}
	ways := []string{"echo", "client", "frames"}
	rates, cpus := map[string][]float64{}, map[string][]float64{}
	for range s.turns {
		for _, way := range ways {
			rate, cpu, err := s.oneTurn(server, probers, way)
			if err != nil {
				return err
			}
			rates[way], cpus[way] = append(rates[way], rate), append(cpus[way], cpu)
		}
	}
	label := fmt.Sprintf("%d processes, batches of %d of %d", s.clients, s.perProbe, s.objects)
	echo := middle(rates["echo"])
	target := fmt.Sprintf("> %.0f keys/s", float64(keysPerSecond))
	for _, way := range []struct{ key, name string }{{"client", "Go client"}, {"frames", "bare frames"}} {
		v := middle(rates[way.key])
		r.Add(fmt.Sprintf("probe throughput, %s, %s", label, way.name), v, "keys/s", echo).Want(target, v > keysPerSecond)
		r.Add(fmt.Sprintf("server cpu of a key, %s, %s", label, way.name), middle(cpus[way.key]), "ns", middle(cpus["echo"]))
		o.Progress("meta: %s: %s keys/s by turns", way.name, each(rates[way.key]))
	}
	return nil
}

// oneTurn lets all probers go at once and returns keys a second and the server's
// nanoseconds a key.
func (s metaSizes) oneTurn(server *process, probers []*process, way string) (rate, cpu float64, err error) {
	var before, after use
	if err := server.call(struct{}{}, &before); err != nil {
		return 0, 0, err
	}
	for _, p := range probers {
		if err := p.Send(probeOrder{Through: way, Duration: s.turn}); err != nil {
			return 0, 0, err
		}
	}
	total := 0
	for _, p := range probers {
		var c probeCount
		if err := p.answer(&c); err != nil {
			return 0, 0, err
		}
		total += c.Keys
		rate += float64(c.Keys) / c.Duration.Seconds()
	}
	if err := server.call(struct{}{}, &after); err != nil {
		return 0, 0, err
	}
	return rate, float64(after.CPU-before.CPU) / float64(total), nil
}

// many fills one server with the small count and one with the large, through the hot
// plane, and times the same batch in both; then the same of the directory alone.
func (s metaSizes) many(ctx context.Context, o Options, r *Report) error {
	if err := s.manyServed(ctx, o, r); err != nil {
		return err
	}
	return s.manyAlone(ctx, o, r)
}

func (s metaSizes) manyServed(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("meta: %d objects through the hot plane", s.large)
	var procs []*process
	defer func() { err = errors.Join(err, closeAll(procs...)) }()
	var calls []func() time.Duration
	var w stopwatch
	var resident float64
	for _, count := range []int{s.small, s.large} {
		var at serverReady
		p, err := startPart(ctx, "server", serverOptions{CPUBytes: budgetBytes}, &at)
		if err != nil {
			return err
		}
		procs = append(procs, p)
		session, err := openRaw(ctx, at.Server, uint64(count)*rawPageBytes) //nolint:gosec // positive
		if err != nil {
			return err
		}
		// A session of 10^7 objects takes a while to end; the server ends with its process.
		defer func() { session.stop(); session.wg.Wait(); _ = session.control.Close() }()
		conn, err := dialRaw(ctx, address{"unix", session.open.GetHotUnixPath()}, session.id, session.open)
		if err != nil {
			return err
		}
		defer conn.close()
		var before, after use
		if err := p.call(struct{}{}, &before); err != nil {
			return err
		}
		if err := session.fill(ctx, conn, 0, count); err != nil {
			return err
		}
		if err := p.call(struct{}{}, &after); err != nil {
			return err
		}
		resident = float64(after.ResidentBytes) - float64(before.ResidentBytes)
		batches, sizes, turn := randomBatches(5, count, s.batch), onePerManifest(s.batch), 0
		var leased base.Sequence
		calls = append(calls, w.time(func() error {
			turn++
			op := session.next()
			leased = op.Sequence
			return conn.acquire(op, sizes, batches[turn%len(batches)])
		}), w.time(func() error { return conn.release(hot.Operation{}, leased) }))
	}
	r.Add(fmt.Sprintf("resident bytes of %d objects with parents, server process", s.large), resident, "bytes", 0).
		Want("< 2 GiB at 10000000", resident < residentTarget*float64(s.large)/1e7)
	r.Add(fmt.Sprintf("resident bytes an object, %d objects, server process", s.large), resident/float64(s.large), "bytes", 0)
	interleave(s.rounds/10+1, calls...) // warm
	times := interleave(s.rounds, calls...)
	if w.err != nil {
		return w.err
	}
	s.addMany(r, "unix", median(times[2]), median(times[0]))
	return nil
}

func (s metaSizes) addMany(r *Report, where string, large, small time.Duration) {
	r.Add(fmt.Sprintf("acquire %d of %d against of %d, %s, p50", s.batch, s.large, s.small, where), microseconds(large), "us", microseconds(small)).
		Want("<= 2x of 10000", large <= manyFactor*small)
}

func (s metaSizes) manyAlone(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("meta: %d objects in the directory alone", s.large)
	var at directoryReady
	p, err := startPart(ctx, "directory", directoryOptions{Small: s.small, Large: s.large, Batch: s.batch}, &at)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	var t acquireTimes
	if err := p.call(directoryOrder{Rounds: s.rounds/10 + 1}, &t); err != nil { // warm
		return err
	}
	if err := p.call(directoryOrder{Rounds: s.rounds}, &t); err != nil {
		return err
	}
	resident := float64(at.ResidentBytes)
	r.Add(fmt.Sprintf("resident bytes of %d objects with parents, directory alone", s.large), resident, "bytes", 0).
		Want("< 2 GiB at 10000000", resident < residentTarget*float64(s.large)/1e7)
	r.Add(fmt.Sprintf("commit of an object, %d objects, directory alone", s.large), float64(at.FillTime.Nanoseconds())/float64(s.large), "ns", 0)
	s.addMany(r, "directory alone", t.Large, t.Small)
	return nil
}
