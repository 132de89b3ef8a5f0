package engine

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Choice is how runs of one length move, in each direction: as a measurement on this
// device found. Concurrency: safe for concurrent use.
type Choice struct {
	runBytes, pieceBytes uint64
	way                  [2]atomic.Uint32 // 1 + Way; 0: not measured
}

// Way returns what was found; false while nothing was.
func (c *Choice) Way(d Direction) (Way, bool) {
	if c == nil {
		return Staged, false
	}
	w := c.way[d].Load()
	return Way(w - 1), w != 0 //nolint:gosec // an enum
}

// Measured is one measurement, for the log.
type Measured struct {
	Direction Direction
	RunBytes  uint64
	// StagedBytesPerSecond and DirectBytesPerSecond are the best of some rounds.
	StagedBytesPerSecond, DirectBytesPerSecond float64
	Way                                        Way
}

const (
	// measureBytes is what one launch of a measurement moves: as long as a nap of a lane
	// counts for little, as short as the engine does not notice.
	measureBytes = 8 << 20
	// measureRounds times each way are timed, measureLaunches launches a round.
	measureRounds, measureLaunches = 4, 6
	// measureLimit ends a lane's measurement early.
	measureLimit = 30 * time.Millisecond
	// measureRetry and measureTries: while the engine works, it is tried again.
	measureRetry, measureTries = 100 * time.Millisecond, 100
	// measureIdle is what an event in an idle stream takes at most.
	measureIdle = time.Millisecond
	// measureMargin is how much better the other way must be than the rule's: less is noise.
	measureMargin = 1.05
)

// Choose has it measured, in the background and once a length, which way is the better for
// a layout's runs. It is nil where there is nothing to choose: the rule is forced, or
// pieces do not lie in one run. Until it is measured, DirectRunBytes decides.
func (e *Engine) Choose(l *Layout, pieceBytes uint64) *Choice {
	if e.cfg.Rule != Auto || len(l.Layers) == 0 || pieceBytes == 0 {
		return nil
	}
	run := l.Layers[0].RunBytes
	for i := range l.Layers {
		if l.Layers[i].RunBytes%pieceBytes != 0 {
			return nil
		}
		// Of several lengths the shortest: where copies by themselves pay, they do for longer ones.
		run = min(run, l.Layers[i].RunBytes)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.mu.choices {
		if c.runBytes == run && c.pieceBytes == pieceBytes {
			return c
		}
	}
	c := &Choice{runBytes: run, pieceBytes: pieceBytes}
	e.mu.choices = append(e.mu.choices, c)
	for _, lane := range e.lanes {
		if run <= lane.room() { // a longer one cannot be tried
			lane.measureLater(c)
		}
	}
	return c
}

// measurement waits for its lane to have nothing else to do.
type measurement struct {
	choice *Choice
	tries  int
}

func (l *lane) measureLater(c *Choice) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.quit {
		l.mu.measure = append(l.mu.measure, measurement{choice: c})
		l.notifyLocked()
	}
}

// errBusy ends a measurement for now.
var errBusy = errors.New("the GPU or the lane has other work")

// measureNext measures what waits first, with nothing of the lane in flight. It returns
// false when there is nothing to measure now.
func (l *lane) measureNext() bool {
	l.mu.Lock()
	if len(l.mu.measure) == 0 || len(l.mu.queue) > 0 || l.mu.quit || time.Now().Before(l.mu.measureNot) {
		l.mu.Unlock()
		return false
	}
	m := l.mu.measure[0]
	l.mu.Unlock()

	err := errBusy
	if l.e.measuring.TryLock() { // one lane at a time: they share the host's memory
		err = l.measure(m.choice)
		l.e.measuring.Unlock()
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.measure = slices.Delete(l.mu.measure, 0, 1)
	if m.tries++; errors.Is(err, errBusy) && m.tries < measureTries {
		l.mu.measure = append(l.mu.measure, m)
		l.mu.measureNot = time.Now().Add(measureRetry)
	}
	return true
}

// measure times both ways with memory of the lane's own: the bounce buffer of the first
// slot, and the stage of the last one in place of blocks. Errors: errBusy; others mean
// that the rule stays.
func (l *lane) measure(c *Choice) error {
	if l.lost != nil {
		return l.lost
	}
	if !l.e.idle() {
		return errBusy
	}
	host, err := l.port.Bounce(0)
	if err != nil {
		return err
	}
	blocks := l.port.Slot(l.o.SlotCount - 1).StageAddress
	count := max(l.room()/c.runBytes, 1)
	total := count * c.runBytes
	objects := make([]Object, l.o.SlotCount-1) // one a slot, each with memory of its own
	for i := range objects {
		at := uint64(i) * total
		o := Object{
			Host: host[at:][:total:total], Mapped: Registered, SizeBytes: total, PieceBytes: c.pieceBytes,
			Layout: &Layout{
				BlockCount: uint32(count),                                                                                           //nolint:gosec // bounded by the stage
				Layers:     []Layer{{Base: blocks + at, StrideBytes: int64(c.runBytes), RunBytes: c.runBytes, Offsets: []int64{0}}}, //nolint:gosec // bounded by the stage
			},
		}
		for b := range o.Layout.BlockCount { // backwards: neighbours would be one copy
			o.Blocks = append(o.Blocks, o.Layout.BlockCount-1-b)
		}
		objects[i] = o
	}
	began := l.e.clock()
	var best [2]float64
	for round := range 1 + measureRounds { // the first one warms up
		for _, way := range []Way{Staged, Direct} {
			rate, err := l.round(objects, way)
			if err != nil {
				return err
			}
			if round > 0 {
				best[way] = max(best[way], rate)
			}
		}
		if round > 0 && l.e.clock()-began > measureLimit {
			break
		}
	}
	if !l.e.idle() { // what was measured was the engine's work too
		return errBusy
	}
	found := Measured{
		Direction: l.direction, RunBytes: c.runBytes, StagedBytesPerSecond: best[Staged], DirectBytesPerSecond: best[Direct],
		Way: better(best, c.runBytes >= l.e.cfg.DirectRunBytes),
	}
	c.way[l.direction].Store(1 + uint32(found.Way))
	if l.e.cfg.OnMeasured != nil {
		l.e.cfg.OnMeasured(found)
	}
	return nil
}

// room is what one launch of a measurement may move.
func (l *lane) room() uint64 { return min(l.o.StageBytes/uint64(l.o.SlotCount-1), measureBytes) } //nolint:gosec // small

// better is the way with more bytes a second; the rule's where they are about the same.
func better(rate [2]float64, long bool) Way {
	if long {
		if rate[Staged] > rate[Direct]*measureMargin {
			return Staged
		}
		return Direct
	}
	if rate[Direct] > rate[Staged]*measureMargin {
		return Direct
	}
	return Staged
}

// round moves the objects some times over, each in a slot, and returns bytes a second. Errors: errBusy when a transfer came; ErrFault, the lane is lost then.
func (l *lane) round(objects []Object, way Way) (float64, error) {
	rule := AlwaysStaged
	if way == Direct {
		rule = AlwaysDirect
	}
	slots := len(objects)
	var bytes uint64
	var failed error
	launched, landed := 0, 0
	began := l.e.clock()
	for landed < launched || launched < measureLaunches && failed == nil {
		if launched < measureLaunches && launched-landed < slots && failed == nil {
			if l.wanted() {
				failed = errBusy
				continue
			}
			i := launched % slots
			c, t := &l.chunks[i], &Transfer{Direction: l.direction, Objects: objects[i : i+1]}
			if filled, _ := c.fill(t, l.port.Slot(i), &l.o, rule, 0, nil); !filled {
				failed = base.ErrInvalid
				continue
			}
			started, err := l.port.Launch(i, &c.launch)
			failed = err
			if started {
				launched++
				bytes += c.spans[0].hostTo
			}
			continue
		}
		done, err := l.port.Wait(landed%slots, waitLimit)
		if err = l.unanswered(err); err != nil {
			// The next transfer finds it out by itself, and nothing of one is in flight here.
			l.lose(err)
			return 0, err
		}
		if done {
			landed++
		}
	}
	if failed != nil {
		return 0, failed
	}
	return float64(bytes) / max(l.e.clock()-began, time.Nanosecond).Seconds(), nil
}

// Clocked is a device with a clock of its own. A fake counts what its launches cost, so
// that what is measured does not depend on what else its machine does.
type Clocked interface{ Clock() time.Duration }

// started is where the host's clock begins.
var started = time.Now()

func (e *Engine) clock() time.Duration {
	if c, ok := e.device.(Clocked); ok {
		return c.Clock()
	}
	return time.Since(started)
}

// wanted reports whether a transfer waits, or the end.
func (l *lane) wanted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.queue) > 0 || l.mu.quit
}

// idle reports whether the engine's stream has nothing to do: the one of the last
// transfer, before the first the device's default stream.
func (e *Engine) idle() bool {
	ev, err := e.device.Record(Stream(e.stream.Load()))
	if err != nil {
		return false // captured, or lost
	}
	defer e.device.Forget(ev)
	for until := time.Now().Add(measureIdle); ; time.Sleep(20 * time.Microsecond) {
		passed, err := e.device.Passed(ev)
		if err != nil || passed {
			return passed && err == nil
		}
		if time.Now().After(until) {
			return false
		}
	}
}
