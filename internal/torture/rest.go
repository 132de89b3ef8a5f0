package torture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
)

// restTimeout is how long everything may take to come to rest when the faults are over:
// a session's end, a lease's and a sweep, many times over.
const restTimeout = 60 * time.Second

// rest ends the run in order and looks for what is stuck: with the faults over, all
// programs come to rest, stores and loads work, and every byte goes back (L1).
func (d *driver) rest(ctx context.Context, r *Result) error {
	began := time.Now()
	for _, p := range []*program{d.rm, d.server} {
		if err := p.awaitReady(ctx); err != nil {
			return err
		}
	}
	if err := d.each(func(p *program) error { return p.awaitReady(ctx) }); err != nil {
		return err
	}
	conn, err := d.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.close()
	if err := d.each(func(p *program) error { return d.settle(ctx, p) }); err != nil {
		return err
	}
	if err := await(ctx, "the programs are not at rest", func() (string, error) { return conn.unrest(ctx, len(d.workers)) }); err != nil {
		return err
	}
	r.RestSeconds = time.Since(began).Seconds()
	if err := d.checkWork(ctx, conn); err != nil {
		return err
	}
	return d.freeAll(ctx, conn, r)
}

// settle makes a worker rest. One that has left something behind ends, it goes with it,
// and another one comes.
func (d *driver) settle(ctx context.Context, p *program) error {
	for {
		a, err := p.ask(order{Do: "rest"}, 2*restTimeout)
		if err != nil || a.Left == 0 && !a.Untold {
			return err
		}
		if err := p.quit(); err != nil {
			return err
		}
		p.mu.Lock()
		err = d.startWorker(context.WithoutCancel(ctx), p, uint64(p.index)) //nolint:gosec // an index
		p.mu.Unlock()
		if err == nil {
			err = p.awaitReady(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// quit ends a worker in order, which must work.
func (p *program) quit() error {
	p.mu.Lock()
	r := p.proc
	p.mu.Unlock()
	r.meant.Store(true)
	_ = r.Send(order{Do: "quit"})
	select {
	case <-r.ended:
	case <-time.After(restTimeout):
		_ = r.Signal(syscall.SIGQUIT)
		return fmt.Errorf("%w: %s did not end when it was told to", base.ErrTimeout, p.name)
	}
	if err := r.Wait(); err != nil {
		return r.Failure(fmt.Errorf("it did not end in order: %w", err))
	}
	return nil
}

// connections to both daemons, as an operator has them.
type connections struct {
	rmConn, serverConn *grpc.ClientConn
	rm                 maruv1.ResourceManagerClient
	server             maruv1.MetadataServerClient
}

func (d *driver) connect(ctx context.Context) (*connections, error) {
	c := &connections{}
	var err error
	if c.rmConn, err = rpc.Dial(ctx, "unix:"+d.path("rm.sock")); err != nil {
		return nil, err
	}
	if c.serverConn, err = rpc.Dial(ctx, "unix:"+d.path("server.sock")); err != nil {
		return nil, errors.Join(err, c.rmConn.Close())
	}
	c.rm, c.server = maruv1.NewResourceManagerClient(c.rmConn), maruv1.NewMetadataServerClient(c.serverConn)
	return c, nil
}

func (c *connections) close() {
	_ = c.rmConn.Close()
	_ = c.serverConn.Close()
}

// await waits until why is empty. The last reason is the error's.
func await(ctx context.Context, what string, why func() (string, error)) error {
	reason := ""
	for end := time.Now().Add(restTimeout); ; time.Sleep(100 * time.Millisecond) {
		var err error
		if reason, err = why(); err == nil && reason == "" {
			return nil
		}
		if err != nil {
			reason = err.Error()
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return fmt.Errorf("%w: %s after %v: %s", base.ErrTimeout, what, restTimeout, reason)
		}
	}
}

// unrest says what is not at rest yet.
func (c *connections) unrest(ctx context.Context, workers int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	u, err := c.server.Usage(ctx, &maruv1.UsageRequest{})
	if err != nil {
		return "", err
	}
	var why []string
	if u.GetDegraded() {
		why = append(why, "the server is degraded: "+u.GetReason())
	}
	live := 0
	for _, s := range u.GetSessions() {
		switch {
		case s.GetState() == "live" && s.GetLeases() == 0:
			live++
		case s.GetState() != "kept" || s.GetLeases() != 0: // what a killed worker left to be read is at rest
			why = append(why, fmt.Sprintf("session %x of %s is %s with %d leases", s.GetSessionId(), s.GetInstanceId(), s.GetState(), s.GetLeases()))
		}
	}
	if live != workers {
		why = append(why, fmt.Sprintf("%d live sessions for %d workers", live, workers))
	}
	for _, p := range u.GetL1Storage().GetPools() {
		if p.GetRetiringBytes() != 0 || p.GetQuarantinedBytes() != 0 || p.GetWritingBytes() != 0 || p.GetLeases() != 0 {
			why = append(why, fmt.Sprintf("pool %s has %d bytes writing, %d retiring, %d quarantined and %d leases", p.GetPool().GetName(),
				p.GetWritingBytes(), p.GetRetiringBytes(), p.GetQuarantinedBytes(), p.GetLeases()))
		}
	}
	pools, err := c.rm.ListPools(ctx, &maruv1.ListPoolsRequest{})
	if err != nil {
		return "", err
	}
	for _, p := range pools.GetPools() {
		if p.GetState() != maruv1.PoolState_POOL_STATE_ONLINE || p.GetDrainingBytes() != 0 {
			why = append(why, fmt.Sprintf("pool %s is %v with %d bytes draining: %s", p.GetName(), p.GetState(), p.GetDrainingBytes(), p.GetReason()))
		}
	}
	return strings.Join(why, "; "), nil
}

// checkWork stores keys that nobody has stored and reads them in every worker.
func (d *driver) checkWork(ctx context.Context, conn *connections) error {
	// Room for them: the pool may be full.
	if err := d.deleteAll(ctx, conn, "with the workers at rest"); err != nil {
		return err
	}
	// Whoever has regions has room; regions of the dead go back for the others.
	at := 0
	err := await(ctx, "new keys cannot be stored", func() (string, error) {
		p := d.workers[at%len(d.workers)]
		at++
		a, err := p.ask(order{Do: "store", First: keyCount, Count: checkKeys}, restTimeout)
		if err != nil || a.Stored == checkKeys {
			return "", err
		}
		return fmt.Sprintf("%s stored %d of %d, or found them there", p.name, a.Stored, checkKeys), nil
	})
	if err != nil {
		return err
	}
	for _, p := range d.workers {
		a, err := p.ask(order{Do: "load", First: keyCount, Count: checkKeys}, restTimeout)
		if err != nil {
			return err
		}
		if a.Hits != checkKeys {
			return fmt.Errorf("%w: at rest, %s read %d of %d keys that were stored", base.ErrInternal, p.name, a.Hits, checkKeys)
		}
	}
	return nil
}

// deleteAll deletes the namespace as an operator. Everything is at rest: a view that is out
// is one that came back, and who has it is said.
func (d *driver) deleteAll(ctx context.Context, conn *connections, when string) error {
	ctx, cancel := context.WithTimeout(ctx, restTimeout)
	defer cancel()
	ns := base.NamespaceOf(keys.OpaqueNamespace())
	_, err := conn.server.DeleteNamespace(ctx, &maruv1.DeleteNamespaceRequest{NamespaceId: ns[:]})
	switch {
	case err == nil || errors.Is(err, base.ErrNotFound):
		return nil
	case errors.Is(err, base.ErrPinned):
		who, unknown := conn.unrest(ctx, len(d.workers))
		return errors.Join(fmt.Errorf("delete the namespace, %s: %w; now %s", when, err, who), unknown)
	}
	return fmt.Errorf("delete the namespace, %s: %w", when, err)
}

// freeAll ends the workers, deletes the namespace, waits until every byte is free at the
// resource manager, and ends the daemons.
func (d *driver) freeAll(ctx context.Context, conn *connections, r *Result) error {
	if err := d.each((*program).quit); err != nil {
		return err
	}
	// What they forked has no part in the pool: it may live on.
	began := time.Now()
	if err := d.deleteAll(ctx, conn, "with the workers ended"); err != nil {
		return err
	}
	err := await(ctx, "not every byte went back", func() (string, error) { return conn.used(ctx, r) })
	if err != nil {
		return err
	}
	r.FreeSeconds = time.Since(began).Seconds()
	for _, p := range []*program{d.server, d.rm} {
		p.mu.Lock()
		p.endLocked(syscall.SIGTERM)
		err := p.proc.Wait()
		p.mu.Unlock()
		if err != nil {
			return p.proc.Failure(fmt.Errorf("it did not end in order: %w", err))
		}
	}
	return d.givePoolBack(ctx)
}

// givePoolBack takes the header off a device that the run did not make.
func (d *driver) givePoolBack(ctx context.Context) error {
	if d.pool.SizeBytes != 0 {
		return os.Remove(d.pool.Path)
	}
	_, err := rm.ClearDevice(ctx, rm.DeviceOptions{StateDir: d.path("rm"), Path: d.pool.Path, Kind: d.pool.Kind})
	return err
}

// used says what the resource manager still has on record.
func (c *connections) used(ctx context.Context, r *Result) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	pools, err := c.rm.ListPools(ctx, &maruv1.ListPoolsRequest{})
	if err != nil {
		return "", err
	}
	var why []string
	r.PoolBytes = 0
	for _, p := range pools.GetPools() {
		r.PoolBytes += p.GetCapacityBytes()
		if p.GetAllocatedBytes() != 0 || p.GetRegionCount() != 0 || p.GetLargestFreeBytes() != p.GetCapacityBytes() {
			why = append(why, fmt.Sprintf("pool %s has %d of %d bytes in %d regions, %d draining, largest free piece %d", p.GetName(), p.GetAllocatedBytes(),
				p.GetCapacityBytes(), p.GetRegionCount(), p.GetDrainingBytes(), p.GetLargestFreeBytes()))
		}
	}
	holds, err := c.rm.ListHolds(ctx, &maruv1.ListHoldsRequest{Limit: 1000})
	if err != nil {
		return "", err
	}
	for i, h := range holds.GetHolds() {
		if i == 5 {
			why = append(why, fmt.Sprintf("%d holds in all", len(holds.GetHolds())))
			break
		}
		why = append(why, fmt.Sprintf("session %x of pid %d holds region %d: %s", h.GetSessionId(), h.GetProcess().GetPid(), h.GetRegionId(), h.GetCure()))
	}
	return strings.Join(why, "; "), nil
}
