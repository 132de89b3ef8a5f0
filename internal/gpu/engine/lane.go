package engine

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/media/mapping"
)

// waitLimit is how long one nap for the device lasts at most. Wake ends it sooner.
const waitLimit = 2 * time.Millisecond

// lane is one direction: its goroutine owns the port's slots.
type lane struct {
	e         *Engine
	direction Direction
	port      Lane
	o         LaneOptions

	chunks []chunk // one a slot
	oldest int     // slot
	flying int     // slots in flight, from oldest on
	lost   error
	silent time.Time // since when the driver does not answer; zero: it does

	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		queue      []*Transfer
		measure    []measurement
		measureNot time.Time // not before
		quit       bool
	}
	news chan struct{} // something changed under mu
}

// newLane makes a lane; start sets it going.
func (e *Engine) newLane(d Direction, o LaneOptions) (*lane, error) {
	port, err := e.device.NewLane(o)
	if err != nil {
		return nil, err
	}
	return &lane{e: e, direction: d, port: port, o: o, chunks: make([]chunk, o.SlotCount), news: make(chan struct{}, 1)}, nil
}

func (l *lane) start() { l.wg.Go(l.loop) }

// submit queues a transfer; it is closed when it has ended.
func (l *lane) submit(t *Transfer) error {
	l.mu.Lock()
	if l.mu.quit {
		l.mu.Unlock()
		return fmt.Errorf("%w: the device", base.ErrClosed)
	}
	l.mu.queue = append(l.mu.queue, t)
	l.notifyLocked() // the port lives while quit is not set
	l.mu.Unlock()
	return nil
}

func (l *lane) notifyLocked() {
	select {
	case l.news <- struct{}{}:
	default:
	}
	l.port.Wake()
}

// stop ends the goroutine after what is queued, and gives the port back.
func (l *lane) stop() error {
	l.mu.Lock()
	l.mu.quit = true
	l.notifyLocked()
	l.mu.Unlock()
	l.wg.Wait()
	return l.port.Close()
}

func (l *lane) loop() {
	// Never unlocked: a thread whose state was changed for the driver ends with this.
	runtime.LockOSThread()
	if err := l.port.Bind(); err != nil {
		l.lose(err)
	}
	for {
		l.launchAll()
		if l.flying == 0 {
			if l.measureNext() {
				continue
			}
			if !l.await() {
				return
			}
			continue
		}
		done, err := l.port.Wait(l.oldest, waitLimit)
		if err = l.unanswered(err); err != nil {
			l.lose(err)
		} else if done {
			l.land()
		}
	}
}

// askAgain is how long a lane waits after a question that was refused: the refusal comes
// at once, and the reason is somebody's who captures a graph.
const askAgain = time.Millisecond

// unanswered takes what a Wait says. A question that was refused is asked again for a
// while; the error that is returned loses the device.
func (l *lane) unanswered(err error) error {
	if !errors.Is(err, ErrUnanswered) {
		l.silent = time.Time{}
		return err
	}
	now := time.Now()
	if l.silent.IsZero() {
		l.silent = now
	}
	if now.Sub(l.silent) > l.e.cfg.AnswerTimeout {
		return fmt.Errorf("%w: asked for %v: %w", base.ErrFault, l.e.cfg.AnswerTimeout, err)
	}
	time.Sleep(askAgain)
	return nil
}

// await blocks until there is work. It returns false when there will be none.
func (l *lane) await() bool {
	for {
		l.mu.Lock()
		work, quit := len(l.mu.queue) > 0, l.mu.quit
		measure, wait := len(l.mu.measure) > 0, time.Until(l.mu.measureNot)
		l.mu.Unlock()
		switch {
		case work:
			return true
		case quit:
			return false
		case !measure:
			<-l.news
		case wait <= 0:
			return true
		default:
			timer := time.NewTimer(wait)
			select {
			case <-l.news:
			case <-timer.C:
			}
			timer.Stop()
		}
	}
}

// head is the transfer that is cut now: the first that is not cut whole.
func (l *lane) head() *Transfer {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.mu.queue {
		if !t.cut() {
			return t
		}
	}
	return nil
}

// launchAll fills every free slot.
func (l *lane) launchAll() {
	for l.flying < l.o.SlotCount {
		t := l.head()
		if t == nil {
			return
		}
		if l.lost != nil {
			t.fail(l.lost)
			l.end(t)
			continue
		}
		if !l.launch(t) {
			return
		}
	}
}

// launch starts the next chunk of t in the next free slot. A transfer without bytes ends
// here. It returns false when nothing more can be started now.
func (l *lane) launch(t *Transfer) bool {
	i := (l.oldest + l.flying) % l.o.SlotCount
	c, slot := &l.chunks[i], l.port.Slot(i)
	filled, needBounce := c.fill(t, slot, &l.o, l.e.cfg.Rule, l.e.cfg.DirectRunBytes, nil)
	var bounce []byte
	if needBounce {
		var err error
		if bounce, err = l.port.Bounce(i); err != nil {
			t.fail(fmt.Errorf("%w: %w", base.ErrFault, err))
			l.end(t)
			return true
		}
		filled, _ = c.fill(t, slot, &l.o, l.e.cfg.Rule, l.e.cfg.DirectRunBytes, bounce)
	}
	if !filled {
		if !t.cut() {
			t.fail(fmt.Errorf("%w: a piece is larger than the stage, or has too many runs", base.ErrInvalid))
		}
		l.end(t)
		return true
	}
	if t.Direction == Load {
		c.bounceIn(bounce)
	}
	started, err := l.port.Launch(i, &c.launch)
	if err != nil {
		t.fail(fmt.Errorf("%w: %w", base.ErrFault, err))
		c.failed = t.failed
		if !started {
			l.end(t)
			return true
		}
	}
	l.e.count.chunks[t.Direction].Add(1)
	t.pending++
	l.flying++
	return true
}

// land takes the oldest slot's results.
func (l *lane) land() {
	i := l.oldest
	c := &l.chunks[i]
	l.oldest, l.flying = (i+1)%l.o.SlotCount, l.flying-1
	c.t.pending--
	if c.failed == nil && c.t.failed == nil {
		if err := l.collect(i, c); err != nil {
			c.t.fail(err)
		}
	}
	l.end(c.t)
}

// collect appends the leaves of a chunk that is done, and brings a bounced save home.
func (l *lane) collect(i int, c *chunk) error {
	slot := l.port.Slot(i)
	for _, sp := range c.spans {
		obj := &c.t.Objects[sp.object]
		if obj.Err != nil {
			continue
		}
		for k := sp.firstPiece; k < sp.firstPiece+sp.pieceCount; k++ {
			p := &slot.Pieces[k]
			leaf := slot.Hashes[k]
			if p.Tail != 0 {
				tail := slot.Tails[(p.Tail-1)*TailBytes:]
				leaf = checksum.Leaf(tail[:p.Bytes], p.Seed)
			}
			obj.Leaves = append(obj.Leaves, leaf)
		}
		if c.t.Direction == Save && obj.Mapped == Bounced {
			bounce, err := l.port.Bounce(i)
			if err != nil {
				return err
			}
			n := sp.hostTo - sp.hostFrom
			if err := mapping.Guard(func() {
				copy(obj.Host[sp.hostFrom:sp.hostTo], bounce[sp.stageFrom:sp.stageFrom+n])
			}); err != nil {
				obj.Err, obj.Faulted = err, true // the others are well
				continue
			}
			l.e.count.bounced.Add(n)
		}
		if sp.hostTo == uint64(len(obj.Host)) && c.t.Arrived != nil {
			c.t.Arrived(sp.object)
		}
	}
	return nil
}

// bounceIn brings the bytes of a load's bounced objects into the slot's buffer. Those of
// an object that faults are whatever was there: it is no hit any more.
func (c *chunk) bounceIn(bounce []byte) {
	for _, sp := range c.spans {
		obj := &c.t.Objects[sp.object]
		if obj.Mapped != Bounced || obj.Err != nil {
			continue
		}
		if err := mapping.Guard(func() {
			copy(bounce[sp.stageFrom:], obj.Host[sp.hostFrom:sp.hostTo])
		}); err != nil {
			obj.Err, obj.Faulted = err, true
		}
	}
}

// end closes a transfer that is cut whole and of which nothing is in flight.
func (l *lane) end(t *Transfer) {
	if !t.cut() || t.pending > 0 {
		return
	}
	l.mu.Lock()
	if i := slices.Index(l.mu.queue, t); i >= 0 {
		l.mu.queue = slices.Delete(l.mu.queue, i, i+1)
	}
	l.mu.Unlock()
	l.e.ended(t)
}

// lose gives up what is in flight: nobody may ever know when it has ended. What is queued
// fails with nothing started.
func (l *lane) lose(err error) {
	if !errors.Is(err, base.ErrFault) {
		err = fmt.Errorf("%w: %w", base.ErrFault, err)
	}
	l.lost = err
	l.e.lose(err)
	for ; l.flying > 0; l.flying-- {
		c, ended := &l.chunks[l.oldest], l.port.Settle(l.oldest)
		l.oldest = (l.oldest + 1) % l.o.SlotCount
		c.t.fail(err)
		for _, sp := range c.spans {
			if !ended {
				c.t.Objects[sp.object].Running = true
			}
		}
		c.t.pending--
		l.end(c.t)
	}
}
