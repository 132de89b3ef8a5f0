package fake

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

// Driver hands out one device, whatever the ordinal.
type Driver struct{ Device *Device }

// Open is of engine.Driver. Each call gives the same device: it survives its Close.
func (d Driver) Open(int) (engine.Device, error) {
	if err := d.Device.Faults.Open; err != nil {
		return nil, err
	}
	d.Device.opens.Add(1)
	return d.Device, nil
}

// Faults are what goes wrong. They are set before the work that they hit.
type Faults struct {
	Open     error
	Register func(mem []byte) error
	// Launch is asked before a launch; an error with started false refuses it whole.
	Launch func(n int) (started bool, err error)
	// Moved is called with the stage of a launch between its copies and its kernel (load)
	// or between kernel and copies (save), to change bytes on their way.
	Moved func(d engine.Direction, stage []byte)
	// Wait is asked at each wait; an error loses the lane, not the device.
	Wait func() error
	// Delay is what each launch takes.
	Delay time.Duration
	// Cost is what a launch takes by the device's clock (Clock); nil: a microsecond. It is
	// counted, not slept.
	Cost func(a *engine.Launch) time.Duration
}

// Device is a GPU of host memory.
type Device struct {
	Faults Faults

	spent    atomic.Int64 // nanoseconds by the device's clock
	opens    atomic.Int64
	launches atomic.Int64
	lost     atomic.Bool

	mu struct {
		sync.Mutex
		memory     []span // of Alloc and of lanes
		registered []registered
		streams    map[engine.Stream]*stream
		events     map[engine.Event]chan struct{}
		lastEvent  engine.Event
		lanes      int
	}
}

type span struct {
	mem []byte
}

type registered struct {
	span
	access engine.Access
}

type stream struct {
	gate      chan struct{} // closed: open
	capturing bool
}

// New makes a device.
func New() *Device {
	d := &Device{}
	d.mu.streams = map[engine.Stream]*stream{}
	d.mu.events = map[engine.Event]chan struct{}{}
	return d
}

// Clock is the sum of what launches have cost (engine.Clocked).
func (d *Device) Clock() time.Duration { return time.Duration(d.spent.Load()) }

// Alloc returns device memory, which tests read and write as it is.
func (d *Device) Alloc(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(fmt.Sprintf("%d bytes for a fake GPU: %v", n, err))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.memory = append(d.mu.memory, span{b})
	return b
}

// Free unmaps all that Alloc gave out. The device is not to be used any more.
func (d *Device) Free() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.mu.memory {
		_ = unix.Munmap(s.mem)
	}
	d.mu.memory = nil
}

// Address is where memory lies.
func Address(b []byte) uint64 { return addressOf(b) }

// Hold stops a stream: events recorded from now on do not come until release.
func (d *Device) Hold(s engine.Stream) (release func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	gate := make(chan struct{})
	d.stream(s).gate = gate
	return func() { close(gate) }
}

// Capture says that a stream is being captured.
func (d *Device) Capture(s engine.Stream, on bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stream(s).capturing = on
}

func (d *Device) stream(s engine.Stream) *stream {
	x := d.mu.streams[s]
	if x == nil {
		x = &stream{gate: make(chan struct{})}
		close(x.gate)
		d.mu.streams[s] = x
	}
	return x
}

// Lose makes the device lost: every call fails from now on.
func (d *Device) Lose() { d.lost.Store(true) }

// Launches counts launches.
func (d *Device) Launches() int { return int(d.launches.Load()) }

// RegisteredCount counts what is registered now, for leak checks.
func (d *Device) RegisteredCount() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.mu.registered)
}

// Idle reports whether every event and lane was given back.
func (d *Device) Idle() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mu.events) > 0 || d.mu.lanes > 0 || len(d.mu.registered) > 0 {
		return fmt.Errorf("%w: %d events, %d lanes and %d registrations are out", base.ErrInternal, len(d.mu.events), d.mu.lanes, len(d.mu.registered))
	}
	return nil
}

func (d *Device) check() error {
	if d.lost.Load() {
		return fmt.Errorf("%w: the fake GPU is lost", base.ErrFault)
	}
	return nil
}

// Info is of engine.Device, as the others.
func (d *Device) Info() engine.Info {
	return engine.Info{Name: "fake", DriverVersion: 13000, MemoryBytes: 1 << 30, BatchCopy: true}
}

// Check refuses what Alloc has not made.
func (d *Device) Check(address, size uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.inside(address, size) {
		return fmt.Errorf("%w: %d bytes at %#x are not memory of the fake GPU", base.ErrInvalid, size, address)
	}
	return nil
}

// inside is called with mu.
func (d *Device) inside(address, size uint64) bool {
	for _, s := range d.mu.memory {
		if a := addressOf(s.mem); address >= a && address+size <= a+uint64(len(s.mem)) {
			return true
		}
	}
	return false
}

// Register notes a range.
func (d *Device) Register(mem []byte, access engine.Access) error {
	if err := d.check(); err != nil {
		return err
	}
	if d.Faults.Register != nil {
		if err := d.Faults.Register(mem); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.registered = append(d.mu.registered, registered{span{mem}, access})
	return nil
}

// Unregister forgets it.
func (d *Device) Unregister(mem []byte) error {
	if err := d.check(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, r := range d.mu.registered {
		if addressOf(r.mem) == addressOf(mem) {
			d.mu.registered = append(d.mu.registered[:i], d.mu.registered[i+1:]...)
			return nil
		}
	}
	return fmt.Errorf("%w: %#x is not registered", base.ErrFault, addressOf(mem))
}

// Record makes an event that comes when the stream's gate is open.
func (d *Device) Record(s engine.Stream) (engine.Event, error) {
	if err := d.check(); err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	x := d.stream(s)
	if x.capturing {
		return 0, fmt.Errorf("%w: stream %d is being captured", base.ErrUnsupported, s)
	}
	d.mu.lastEvent++
	d.mu.events[d.mu.lastEvent] = x.gate
	return d.mu.lastEvent, nil
}

// Passed reports whether the gate of an event is open.
func (d *Device) Passed(e engine.Event) (bool, error) {
	if err := d.check(); err != nil {
		return false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	gate := d.mu.events[e]
	if gate == nil {
		return false, fmt.Errorf("%w: event %d is nobody's", base.ErrInvalid, e)
	}
	select {
	case <-gate:
		return true, nil
	default:
		return false, nil
	}
}

// Forget ends an event.
func (d *Device) Forget(e engine.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mu.events, e)
}

// Close does nothing: the device is the test's.
func (d *Device) Close() error { return nil }

// lane is one direction: a goroutine a launch.
type lane struct {
	d     *Device
	o     engine.LaneOptions
	slots []engine.Slot
	stage [][]byte
	bound [][]byte // bounce
	done  []chan struct{}
	wake  chan struct{}
}

// NewLane makes a lane.
func (d *Device) NewLane(o engine.LaneOptions) (engine.Lane, error) {
	if err := d.check(); err != nil {
		return nil, err
	}
	l := &lane{d: d, o: o, wake: make(chan struct{}, 1), bound: make([][]byte, o.SlotCount), done: make([]chan struct{}, o.SlotCount)}
	for range o.SlotCount {
		stage := d.Alloc(int(o.StageBytes)) //nolint:gosec // a test's size
		l.stage = append(l.stage, stage)
		l.slots = append(l.slots, engine.Slot{
			StageAddress: addressOf(stage), Pieces: make([]engine.Piece, o.PieceCount), Fragments: make([]engine.Fragment, o.FragmentCount),
			Copies: make([]engine.Copy, o.CopyCount), Hashes: make([]uint64, o.PieceCount), Tails: make([]byte, engine.TailCount*engine.TailBytes),
		})
	}
	d.mu.Lock()
	d.mu.lanes++
	d.mu.Unlock()
	return l, nil
}

func (l *lane) Bind() error             { return l.d.check() }
func (l *lane) Slot(i int) *engine.Slot { return &l.slots[i] }

func (l *lane) Bounce(i int) ([]byte, error) {
	if l.bound[i] == nil {
		l.bound[i] = make([]byte, l.o.StageBytes)
	}
	return l.bound[i], nil
}

func (l *lane) Launch(i int, a *engine.Launch) (bool, error) {
	if err := l.d.check(); err != nil {
		return false, err
	}
	n := int(l.d.launches.Add(1))
	if l.d.Faults.Launch != nil {
		if started, err := l.d.Faults.Launch(n); err != nil {
			if started {
				l.done[i] = make(chan struct{})
				close(l.done[i])
			}
			return started, err
		}
	}
	s := &l.slots[i]
	if err := l.refuse(s, a); err != nil {
		return false, err
	}
	var gate chan struct{}
	if a.After != 0 {
		l.d.mu.Lock()
		gate = l.d.mu.events[a.After]
		l.d.mu.Unlock()
		if gate == nil {
			return false, fmt.Errorf("%w: event %d is nobody's", base.ErrInvalid, a.After)
		}
	}
	launch, done := *a, make(chan struct{})
	l.done[i] = done
	go func() {
		defer close(done)
		if gate != nil {
			<-gate
		}
		time.Sleep(l.d.Faults.Delay)
		cost := time.Microsecond
		if l.d.Faults.Cost != nil {
			cost += l.d.Faults.Cost(&launch)
		}
		l.d.spent.Add(int64(cost))
		if l.d.lost.Load() {
			return
		}
		l.move(i, s, &launch)
	}()
	return true, nil
}

// refuse checks every address of a launch.
func (l *lane) refuse(s *engine.Slot, a *engine.Launch) error {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range s.Pieces[:a.Pieces] {
		if p.Address != 0 && !d.inside(p.Address, uint64(p.Bytes)) || !d.inside(p.Stage, uint64(p.Bytes)) || p.Bytes%engine.AlignBytes != 0 {
			return fmt.Errorf("%w: piece %+v", base.ErrInvalid, p)
		}
	}
	for _, f := range s.Fragments[:a.Fragments] {
		if !d.inside(f.Address, uint64(f.Bytes)) || !d.inside(f.Stage, uint64(f.Bytes)) || f.Bytes%engine.AlignBytes != 0 {
			return fmt.Errorf("%w: fragment %+v", base.ErrInvalid, f)
		}
	}
	for _, c := range s.Copies[:a.Copies] {
		if !d.inside(c.Device, c.Bytes) || !l.reachable(c, a.Direction) {
			return fmt.Errorf("%w: copy %+v", base.ErrInvalid, c)
		}
	}
	return nil
}

// reachable is called with Device.mu: a copy lies in one registration, or in a bounce
// buffer of the lane.
func (l *lane) reachable(c engine.Copy, way engine.Direction) bool {
	in := func(mem []byte) bool {
		a := addressOf(mem)
		return c.Host >= a && c.Host+c.Bytes <= a+uint64(len(mem))
	}
	for _, r := range l.d.mu.registered {
		if in(r.mem) {
			return way == engine.Load || r.access == engine.ReadWrite
		}
	}
	for _, b := range l.bound {
		if b != nil && in(b) {
			return true
		}
	}
	return false
}

func (l *lane) move(i int, s *engine.Slot, a *engine.Launch) {
	transfer := func() {
		for _, c := range s.Copies[:a.Copies] {
			if a.Direction == engine.Load {
				copy(at(c.Device, c.Bytes), at(c.Host, c.Bytes))
			} else {
				copy(at(c.Host, c.Bytes), at(c.Device, c.Bytes))
			}
		}
	}
	moved := func() {
		if l.d.Faults.Moved != nil {
			l.d.Faults.Moved(a.Direction, l.stage[i])
		}
	}
	if a.Direction == engine.Load {
		transfer()
		moved()
		kernel(s, a)
		return
	}
	kernel(s, a)
	moved()
	transfer()
}

// kernel is what kernels.cu does.
func kernel(s *engine.Slot, a *engine.Launch) {
	for k := range s.Pieces[:a.Pieces] {
		p := &s.Pieces[k]
		stage := at(p.Stage, uint64(p.Bytes))
		hashed := stage
		if a.Way == engine.Direct {
			hashed = at(p.Address, uint64(p.Bytes))
		} else if a.Direction == engine.Save {
			each(s, p, func(block, stage []byte) { copy(stage, block) })
		}
		if p.Bytes > engine.ShortBytes {
			s.Hashes[k] = checksum.Leaf(hashed, p.Seed)
		} else if p.Tail != 0 {
			copy(s.Tails[(p.Tail-1)*engine.TailBytes:], hashed)
		}
		if a.Way == engine.Staged && a.Direction == engine.Load {
			each(s, p, func(block, stage []byte) { copy(block, stage) })
		}
	}
}

func each(s *engine.Slot, p *engine.Piece, move func(block, stage []byte)) {
	if p.Count == 0 {
		move(at(p.Address, uint64(p.Bytes)), at(p.Stage, uint64(p.Bytes)))
	}
	for _, f := range s.Fragments[p.First : p.First+p.Count] {
		move(at(f.Address, uint64(f.Bytes)), at(f.Stage, uint64(f.Bytes)))
	}
}

func (l *lane) Wait(i int, limit time.Duration) (bool, error) {
	if l.d.Faults.Wait != nil {
		if err := l.d.Faults.Wait(); err != nil {
			return false, err
		}
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-l.done[i]:
		return true, l.d.check()
	case <-l.wake:
	case <-timer.C:
	}
	return false, l.d.check()
}

// Settle waits for the slot, unless the device is lost.
func (l *lane) Settle(i int) bool {
	if l.d.lost.Load() {
		return false
	}
	<-l.done[i]
	return true
}

func (l *lane) Wake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *lane) Close() error {
	for _, done := range l.done {
		if done != nil && !l.d.lost.Load() {
			<-done
		}
	}
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	l.d.mu.lanes--
	return nil
}
