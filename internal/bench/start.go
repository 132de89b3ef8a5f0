package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

func init() { benches["start"] = runStart }

// startSizes is how much the benchmark of starting and idling does.
type startSizes struct {
	poolBytes uint64
	objectKiB int
	starts    int
	settle    time.Duration // before an idle process is measured
	idle      time.Duration
}

func runStart(ctx context.Context, o Options) (*Report, error) {
	s := startSizes{poolBytes: 64 << 30, objectKiB: 2048, starts: 5, settle: 3 * time.Second, idle: 20 * time.Second}
	if o.Quick {
		s.starts, s.settle, s.idle = 3, 2*time.Second, 5*time.Second
	}
	return s.run(ctx, o)
}

// Targets of starting and idling.
const (
	readyTarget = 5 * time.Second
	idlePercent = 1
)

func (s startSizes) run(ctx context.Context, o Options) (*Report, error) {
	r := NewReport("start")
	if err := s.pools(ctx, o, r); err != nil {
		return nil, err
	}
	return r, s.daemons(ctx, o, r)
}

// pools opens clients with a large private pool that nothing has touched.
func (s startSizes) pools(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("start: a cpu pool of %d GiB, untouched, %d times", s.poolBytes>>30, s.starts)
	var at serverReady
	server, err := startPart(ctx, "server", serverOptions{CPUBytes: s.poolBytes, CXLBytes: 64 << 20}, &at)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	var opened, stored []time.Duration
	for i := range s.starts {
		open, store, err := s.onePool(ctx, at.Server, i)
		if err != nil {
			return err
		}
		opened, stored = append(opened, open), append(stored, store)
	}
	ready := median(stored)
	label := fmt.Sprintf("cpu pool of %d GiB, overcommit, untouched", s.poolBytes>>30)
	r.Add(label+", open to the first object stored", ready.Seconds(), "s", 0).Want("< 5 s", ready < readyTarget)
	r.Add(label+", open", median(opened).Seconds(), "s", 0)
	r.Add("maru up with an emulated pool of 64 MiB, to ready", at.UpSeconds, "s", 0)
	return nil
}

func (s startSizes) onePool(ctx context.Context, server string, turn int) (open, store time.Duration, err error) {
	value := uint64(s.objectKiB) << 10 //nolint:gosec // positive
	run := make([]byte, value)
	began := time.Now()
	c, err := client.Open(ctx, client.Config{
		ServerAddress: server, InstanceID: "bench-pool", Namespace: keys.OpaqueNamespace(), Opaque: true, PageBytes: value,
		CPUBytes: s.poolBytes, Overcommit: client.On, Prefault: client.Off, Logger: discard(),
	})
	if err != nil {
		return 0, 0, err
	}
	open = time.Since(began)
	codes := make([]base.Code, 1)
	err = c.Store(ctx, []client.StoreItem{{Key: keyOf(uint64(turn)), Runs: [][]byte{run}}}, codes) //nolint:gosec // positive
	store = time.Since(began)
	if err == nil {
		err = allOK("store", codes)
	}
	return open, store, errors.Join(err, c.Close(ctx))
}

// daemons measures what idle processes use: a resource manager, a server, a client
// with memory in both media, each in a process of its own.
func (s startSizes) daemons(ctx context.Context, o Options, r *Report) (err error) {
	o.Progress("start: idle processes for %v", s.idle)
	dir, err := shortDir()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var procs []*process
	defer func() { err = errors.Join(closeAll(procs...), err) }()
	opt := daemonOptions{Dir: dir, PoolBytes: 64 << 20}
	for _, kind := range []string{"rm", "server", "client"} {
		var at daemonReady
		opt.Kind = kind
		p, err := startPart(ctx, "daemon", opt, &at)
		if err != nil {
			return err
		}
		procs = append(procs, p)
		switch kind {
		case "rm":
			opt.RM = at.Address
		case "server":
			opt.Server = at.Address
			if err := waitPools(ctx, at.Address); err != nil {
				return err
			}
		}
	}
	if err := sleep(ctx, s.settle); err != nil {
		return err
	}
	before, after := make([]use, len(procs)), make([]use, len(procs))
	for i, p := range procs {
		if err := p.call(struct{}{}, &before[i]); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := sleep(ctx, s.idle); err != nil {
		return err
	}
	for i, p := range procs {
		if err := p.call(struct{}{}, &after[i]); err != nil {
			return err
		}
	}
	took := time.Since(began)
	for i, name := range []string{"maru-resource-manager", "maru-server", "client"} {
		percent := 100 * (after[i].CPU - before[i].CPU).Seconds() / took.Seconds()
		r.Add(fmt.Sprintf("idle %s", name), percent, "% of a core", 0).Want("< 1 %", percent < idlePercent)
	}
	return nil
}

// shortDir is where sockets fit.
func shortDir() (string, error) {
	dir, err := os.MkdirTemp("", "maru-bench-")
	if err == nil && len(filepath.Join(dir, "server.sock.lock")) > 107 {
		err = fmt.Errorf("%w: %s is too long for sockets; set TMPDIR to a shorter directory", base.ErrInvalid, dir)
		_ = os.Remove(dir)
	}
	return dir, err
}

// waitPools waits until a server has its pools from the resource manager.
func waitPools(ctx context.Context, server string) error {
	for {
		c, err := openSmall(ctx, server, "bench-wait", 64<<10)
		if err == nil {
			_, err = c.Alloc(ctx, 1, make([]client.Page, 1))
			if err = errors.Join(err, c.Close(ctx)); err == nil {
				return nil
			}
		}
		if waiting := sleep(ctx, 20*time.Millisecond); waiting != nil {
			return errors.Join(waiting, err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
