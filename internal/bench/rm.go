package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
)

func init() { benches["rm"] = runRM }

// rmSizes is how much the benchmark of the resource manager does.
type rmSizes struct {
	regions int // while calls are timed
	many    int // while starts are timed
	rounds  int
	callers int
	starts  int
}

func runRM(ctx context.Context, o Options) (*Report, error) {
	s := rmSizes{regions: 1000, many: 10_000, rounds: 300, callers: 32, starts: 7}
	if o.Quick {
		s.regions, s.many, s.rounds, s.starts = 500, 500, 60, 3
	}
	return s.run(ctx, o)
}

// Targets of the resource manager.
const (
	rmStartTarget = time.Second
	fsyncFactor   = 3
)

// regionExtentBytes is what a region of the benchmark takes of the pool: the smallest
// extent there is.
const regionExtentBytes = 2 << 20

// run has the state on a disk, as operators have it, and the pool in memory, as a
// device is: a pool in a file on a disk adds an msync to each allocation, which is not
// what is asked here. Only the pool of very many regions is on the disk too.
func (s rmSizes) run(ctx context.Context, o Options) (_ *Report, err error) {
	disk, err := diskDir()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(disk)) }()
	memory, err := os.MkdirTemp("/dev/shm", "maru-bench-")
	if err != nil {
		return nil, fmt.Errorf("bench: the pool lies in memory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(memory)) }()
	r := NewReport("rm")
	if err := s.calls(ctx, o, r, disk, memory); err != nil {
		return nil, err
	}
	if s.many <= s.regions {
		return r, nil
	}
	return r, s.manyRegions(ctx, o, r, disk)
}

func (s rmSizes) config(dir, pool string, regions int) rm.Config {
	return rm.Config{
		Port: rm.NoPort, HTTPPort: rm.NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "state"),
		Pools:     []rm.PoolSpec{filePool(filepath.Join(pool, "pool"), uint64(regions+8)*regionExtentBytes)}, //nolint:gosec // positive
		Discovery: rm.DiscoverNone, Logger: discard(),
	}
}

// calls times allocations, and the start when it is not to be timed with more regions.
func (s rmSizes) calls(ctx context.Context, o Options, r *Report, disk, memory string) (err error) {
	dir := filepath.Join(disk, "calls")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	cfg := s.config(dir, memory, s.regions)
	m, err := startManager(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	if err := s.fill(ctx, o, r, m, s.regions, "pool in memory"); err != nil {
		return err
	}
	if err := s.oneByOne(ctx, o, r, m, dir); err != nil {
		return err
	}
	if s.many > s.regions {
		return nil
	}
	return s.restart(ctx, o, r, m, cfg, s.regions)
}

// manyRegions times the start with the large count.
func (s rmSizes) manyRegions(ctx context.Context, o Options, r *Report, disk string) (err error) {
	dir := filepath.Join(disk, "many")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	poolBytes := uint64(s.many+8) * regionExtentBytes //nolint:gosec // positive
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("statfs %s: %w", dir, err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < poolBytes+poolBytes/8 { //nolint:gosec // positive
		return fmt.Errorf("%w: a pool with room for %d regions takes %d bytes, %s has %d; set TMPDIR to a directory on a larger disk",
			base.ErrFull, s.many, poolBytes, dir, free)
	}
	cfg := s.config(dir, dir, s.many)
	m, err := startManager(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	if err := s.fill(ctx, o, r, m, s.many, "pool in a file on disk"); err != nil {
		return err
	}
	return s.restart(ctx, o, r, m, cfg, s.many)
}

// diskDir makes a directory on a file system that writes to something: an fsync of
// tmpfs costs nothing and compares with nothing.
func diskDir() (string, error) {
	const tmpfsMagic = 0x01021994
	var refused []string
	for _, parent := range []string{os.TempDir(), "/var/tmp"} {
		var st unix.Statfs_t
		if err := unix.Statfs(parent, &st); err != nil || int64(st.Type) == tmpfsMagic { //nolint:unconvert // another type on other machines
			refused = append(refused, parent)
			continue
		}
		return os.MkdirTemp(parent, "maru-bench-")
	}
	return "", fmt.Errorf("%w: %v are not on a disk; set TMPDIR to a directory that is", base.ErrUnsupported, refused)
}

// manager is a resource manager, a connection to its Unix socket, and an owner there.
type manager struct {
	server    *rm.Server
	conn      *grpc.ClientConn
	api       maruv1.ResourceManagerClient
	owner     [base.IDBytes]byte
	inc       uint32
	token     []byte
	operation atomic.Uint64
}

func startManager(ctx context.Context, cfg rm.Config) (_ *manager, err error) {
	m := &manager{owner: base.NewID()}
	if err := m.start(ctx, cfg); err != nil {
		return nil, errors.Join(err, m.close())
	}
	secret := base.NewOwnerSecret()
	answer, err := m.api.StartOwner(ctx, &maruv1.StartOwnerRequest{OwnerId: m.owner[:], Name: "bench", OwnerSecret: secret.Bytes()})
	if err != nil {
		return nil, errors.Join(err, m.close())
	}
	m.inc, m.token = answer.GetIncarnation(), answer.GetOwnerToken()
	return m, nil
}

// start returns when the resource manager has answered a call.
func (m *manager) start(ctx context.Context, cfg rm.Config) (err error) {
	if m.server, err = rm.Start(ctx, cfg); err != nil {
		return err
	}
	if m.conn, err = rpc.Dial(ctx, "unix:"+m.server.UnixPath()); err != nil {
		return err
	}
	m.api = maruv1.NewResourceManagerClient(m.conn)
	_, err = m.api.Describe(ctx, &maruv1.DescribeRequest{})
	return err
}

func (m *manager) close() error {
	var errs []error
	if m.conn != nil {
		errs = append(errs, m.conn.Close())
	}
	if m.server != nil {
		errs = append(errs, m.server.Close())
	}
	m.conn, m.server = nil, nil
	return errors.Join(errs...)
}

func (m *manager) allocate(ctx context.Context) (*maruv1.RegionHandle, error) {
	answer, err := m.api.Allocate(ctx, &maruv1.AllocateRequest{
		OwnerId: m.owner[:], Incarnation: m.inc, OwnerToken: m.token, Operation: m.operation.Add(1), PageCount: 16, PageSize: 64 << 10, PieceSize: 64 << 10,
		NamespaceDigest: make([]byte, base.NamespaceBytes), WriterSession: m.owner[:],
	})
	return answer.GetHandle(), err
}

func (m *manager) free(ctx context.Context, h *maruv1.RegionHandle) error {
	_, err := m.api.Free(ctx, &maruv1.FreeRequest{OwnerId: m.owner[:], Incarnation: m.inc, OwnerToken: m.token, Handle: h})
	return err
}

// fill allocates all regions with concurrent callers.
func (s rmSizes) fill(ctx context.Context, o Options, r *Report, m *manager, regions int, where string) error {
	o.Progress("rm: %d regions, %d callers, %s", regions, s.callers, where)
	var wg sync.WaitGroup
	var left atomic.Int64
	left.Store(int64(regions))
	failures := make([]error, s.callers)
	began := time.Now()
	for i := range s.callers {
		wg.Go(func() {
			for left.Add(-1) >= 0 && failures[i] == nil {
				_, failures[i] = m.allocate(ctx)
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	if err := errors.Join(failures...); err != nil {
		return err
	}
	r.Add(fmt.Sprintf("allocations, %d concurrent callers, up to %d regions, %s", s.callers, regions, where), float64(regions)/took.Seconds(), "1/s", 0)
	return nil
}

// fsyncBytes is what the reference writes before each fsync: a page, over the same
// page again, so that it asks the file system for as little as it can.
const fsyncBytes = 4096

// oneByOne times one caller's allocations beside an fsync of the same file system.
func (s rmSizes) oneByOne(ctx context.Context, o Options, r *Report, m *manager, dir string) (err error) {
	o.Progress("rm: allocate and fsync in turn, in %s", dir)
	f, err := os.Create(filepath.Join(dir, "fsync")) //nolint:gosec // our own directory
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	page := make([]byte, fsyncBytes)
	bare, err := newBareCommit(filepath.Join(dir, "bare"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bare.file.Close()) }()
	var handle *maruv1.RegionHandle
	var w stopwatch
	calls := []func() time.Duration{
		w.time(func() error {
			if _, err := f.WriteAt(page, 0); err != nil {
				return err
			}
			return f.Sync()
		}),
		w.time(func() (err error) { handle, err = m.allocate(ctx); return err }),
		w.time(bare.commit),
		w.time(func() error { return m.free(ctx, handle) }),
	}
	interleave(s.rounds/10+1, calls...) // warm
	times := interleave(s.rounds, calls...)
	if w.err != nil {
		return w.err
	}
	fsync, allocate := median(times[0]), median(times[1])
	r.Add(fmt.Sprintf("allocate with %d regions, p50", s.regions), microseconds(allocate), "us", microseconds(fsync)).
		Want("<= 3x of one fsync", allocate <= fsyncFactor*fsync)
	r.Add(fmt.Sprintf("allocate with %d regions, p99", s.regions), microseconds(quantile(times[1], 0.99)), "us", microseconds(quantile(times[0], 0.99)))
	r.Add("writes and syncs of one commit of the store, bare, p50", microseconds(median(times[2])), "us", microseconds(fsync))
	r.Add(fmt.Sprintf("free with %d regions, p50", s.regions), microseconds(median(times[3])), "us", microseconds(fsync))
	o.Progress("rm: p50 by tenths of the run: fsync %s us, allocate %s us", tenths(times[0]), tenths(times[1]))
	return nil
}

// bareCommit does to a file what a commit of the store does, and nothing else: some
// pages and a sync, then the page that makes them count and a sync. What an allocation
// takes above it is the resource manager's own.
type bareCommit struct {
	file *os.File
	page []byte
	turn int64
}

// commitPages is how many pages a small commit of the store writes before its first sync.
const commitPages = 3

func newBareCommit(path string) (*bareCommit, error) {
	f, err := os.Create(path) //nolint:gosec // our own directory
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(make([]byte, 64*fsyncBytes)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &bareCommit{file: f, page: make([]byte, fsyncBytes)}, f.Sync()
}

func (b *bareCommit) commit() error {
	b.turn ^= 1
	first := 2 + commitPages*b.turn
	for i := range int64(commitPages) {
		if _, err := b.file.WriteAt(b.page, (first+i)*fsyncBytes); err != nil {
			return err
		}
	}
	fd := int(b.file.Fd())
	if err := unix.Fdatasync(fd); err != nil {
		return err
	}
	if _, err := b.file.WriteAt(b.page, b.turn*fsyncBytes); err != nil {
		return err
	}
	return unix.Fdatasync(fd)
}

// restart times from Start to the first answer.
func (s rmSizes) restart(ctx context.Context, o Options, r *Report, m *manager, cfg rm.Config, regions int) error {
	o.Progress("rm: start with %d regions, %d times", regions, s.starts)
	var times []time.Duration
	for range s.starts {
		if err := m.close(); err != nil {
			return err
		}
		began := time.Now()
		if err := m.start(ctx, cfg); err != nil {
			return err
		}
		times = append(times, time.Since(began))
	}
	list, err := m.api.Describe(ctx, &maruv1.DescribeRequest{})
	if err != nil {
		return err
	}
	var allocated uint64
	for _, p := range list.GetPools() {
		allocated += p.GetAllocatedBytes()
	}
	if want := uint64(regions) * regionExtentBytes; allocated != want { //nolint:gosec // positive
		return fmt.Errorf("%w: %d bytes are allocated after the restarts, want %d", base.ErrInternal, allocated, want)
	}
	took := median(times)
	r.Add(fmt.Sprintf("start with %d regions, to the first answer", regions), took.Seconds(), "s", 0).
		Want("< 1 s at 10000", took < rmStartTarget*time.Duration(regions)/10_000)
	o.Progress("rm: starts %v", times)
	return nil
}
