package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/session"
)

// Bounds of goodbyes that are said later.
const (
	// farewellCount is the most sessions of this process that wait to say one. A program
	// that opens and closes while its daemons are away must not gather goroutines.
	farewellCount = 64
	firstFarewell = 250 * time.Millisecond
	lastFarewell  = 30 * time.Second
)

// farewells counts them.
var farewells atomic.Int32

// farewell is what a drained Close could not say: nobody may listen while daemons are
// started again. The mappings are gone, so that it is true whenever it is heard; unheard,
// the session's regions would stay until the end of this process, which may live for weeks
// after one of its clients.
// Ownership: one goroutine, from Close to the last word or the end of the process. It is
// the only user of its client.
type farewell struct {
	client *Client
	told   bool // the server has heard of it
}

// sayLater says goodbye in the background, and reports whether it will.
func (c *Client) sayLater(told bool) bool {
	if c.cfg.Farewell == Off {
		return false
	}
	if farewells.Add(1) > farewellCount {
		farewells.Add(-1)
		return false
	}
	f := &farewell{client: c, told: told}
	// Links of a closed client end with their word; nothing else waits for this context.
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go f.run() // it ends by itself: see above
	return true
}

func (f *farewell) run() {
	defer farewells.Add(-1)
	defer f.client.cancel()
	c := f.client
	for wait := firstFarewell; ; wait = min(2*wait, lastFarewell) {
		time.Sleep(wait)
		err := f.say()
		if err == nil {
			c.log.Info("the end of this session was heard")
			return
		}
		c.log.Debug("the end of this session is not heard yet", "error", err, "again_seconds", min(2*wait, lastFarewell).Seconds())
	}
}

// say makes one attempt, over connections of its own: waiting costs none.
func (f *farewell) say() error {
	c := f.client
	ctx, cancel := context.WithTimeout(c.ctx, 2*(c.cfg.ConnectTimeout+c.cfg.RPCTimeout))
	defer cancel()
	holds, told := f.sayHolds(ctx), error(nil)
	if !f.told {
		told = f.sayClosed(ctx)
		f.told = told == nil
	}
	if told != nil {
		return told
	}
	return holds
}

// sayHolds gives the holds back. What is refused is not asked again: the resource manager
// has heard it.
func (f *farewell) sayHolds(ctx context.Context) error {
	c := f.client
	c.mu.Lock()
	list := c.mu.unholds
	c.mu.Unlock()
	if len(list) == 0 {
		return nil
	}
	defer c.manager.close()
	if _, err := c.manager.use(ctx, c.link.Load()); err != nil { // where the newest answer says that it is
		return err
	}
	rest, err := c.manager.unhold(ctx, list)
	if err != nil && !away(err) && !rpc.OutcomeUnknown(err) {
		c.log.Warn("giving holds back was refused", "regions", len(rest), "error", err)
		rest, err = nil, nil
	}
	c.mu.Lock()
	c.mu.unholds = rest
	c.mu.Unlock()
	return err
}

// sayClosed opens the session again, as itself, and closes it. The epoch of its last days
// may be over, and a server that was started again knows of it by its holds only: it wants
// a list before anything is closed. There is nothing left to list.
func (f *farewell) sayClosed(ctx context.Context) error {
	c := f.client
	conn, err := rpc.NewClient(c.cfg.ServerAddress, rpc.Retry{ConnectTimeout: c.cfg.ConnectTimeout}, grpc.WithContextDialer(c.door.dial(c.cfg.ServerAddress)))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	c.conn = conn
	if err := c.tryOpen(ctx); err != nil {
		return err
	}
	l := c.link.Load()
	defer l.close()
	if l.resp.GetRelist() {
		c.relist(l, &session.Snapshot{Epoch: l.epoch, ServerEpoch: l.serverEpoch})
		if l.over.Load() {
			return fmt.Errorf("%w: the empty list was not taken", base.ErrUnavailable)
		}
	}
	c.flushReleases(ctx, l)
	return c.say(ctx, l, &maruv1.CloseRequest{Drained: true})
}
