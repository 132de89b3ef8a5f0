package torture

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/child"
	"github.com/xcena-dev/maru/internal/rm"
)

// startTimeout bounds the start of a process, on a machine that is busy with the others.
const startTimeout = 60 * time.Second

// silence is how long a worker that is not stopped may say nothing.
const silence = 90 * time.Second

// driver runs the processes.
type driver struct {
	cfg     Config
	dir     string
	pool    rm.PoolSpec
	judge   *judge
	rm      *program
	server  *program
	workers []*program
	sums    client.Switch
	next    atomic.Uint32 // number of the newest worker process
	samples samples
	faults  faultCounts
	// forked are children of workers that may outlive them.
	forked struct {
		sync.Mutex
		pids map[int]bool
	}
}

// program is one place in the deployment: the resource manager, the server, a worker.
// Its process comes and goes. mu is held over a change of it.
type program struct {
	d     *driver
	name  string
	tidy  bool // a worker that lives as long as the run
	index int
	log   *logFile

	mu   sync.Mutex
	proc *running
}

// running is one process of a program.
type running struct {
	*child.Process
	number  uint32
	role    string
	ready   chan struct{}
	answers chan answerLine
	ended   chan struct{} // its lines have been read to the end, and it is gone
	started time.Time
	// meant: it was told to end, or killed. stopped: it has SIGSTOP.
	meant, stopped atomic.Bool
	// untold: a session of it ended while a daemon was away.
	untold atomic.Bool
	heard  atomic.Int64 // of its last line, nanoseconds since started
}

func (d *driver) path(name string) string { return filepath.Join(d.dir, name) }

// startRM, startServer and startWorker start a process; the caller holds p.mu.
func (d *driver) startDaemon(ctx context.Context, p *program) error {
	var o daemonOptions
	if p == d.rm {
		c := d.rmConfig()
		o.RM = &c
	} else {
		c := d.serverConfig()
		o.Server = &c
	}
	return p.start(ctx, DaemonCommand, o, 0)
}

func (d *driver) startWorker(ctx context.Context, p *program, seed uint64) error {
	n := d.next.Add(1)
	d.judge.started(n)
	return p.start(ctx, WorkerCommand, workerOptions{
		Server: "unix:" + d.path("server.sock"), Process: n, Seed: seed, Keys: keyCount, PageBytes: pageBytes, RegionBytes: regionBytes, Pool: d.pool.Path,
		Checksums: d.sums, Tidy: p.tidy,
	}, n)
}

func (p *program) start(ctx context.Context, command string, options any, number uint32) error {
	encoded, err := json.Marshal(options)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, p.d.cfg.Program, command, string(encoded)) //nolint:gosec // this program itself
	proc, err := child.Start(p.name, cmd, p.log)
	if err != nil {
		return err
	}
	r := &running{
		Process: proc, number: number, role: p.name, ready: make(chan struct{}), answers: make(chan answerLine, 1), ended: make(chan struct{}),
		started: time.Now(),
	}
	p.log.note("started process %d (number %d)", proc.PID(), number)
	p.proc = r
	go p.listen(r)
	return nil
}

// listen reads what a process says until it ends.
func (p *program) listen(r *running) {
	d := p.d
	once := sync.OnceFunc(func() { close(r.ready) })
	h := heard{
		ready: once, count: d.judge.count, wrong: func(text string) { d.judge.find("%s", text) },
		forked: func(pid int) {
			d.forked.Lock()
			defer d.forked.Unlock()
			d.forked.pids[pid] = true
		},
		untold: func() { r.untold.Store(true) },
		answer: func(a answerLine) {
			select {
			case r.answers <- a:
			default:
			}
		},
	}
	for {
		line, err := r.Line()
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
				d.judge.find("%s: reading its lines: %v", p.name, err)
			}
			break
		}
		r.heard.Store(int64(time.Since(r.started)))
		if r.number == 0 {
			once()
			continue
		}
		// A killed process may have been in the middle of a line.
		if err := d.judge.hear(line, r.number, h); err != nil && !r.meant.Load() {
			d.judge.find("%s: %v", p.name, err)
		}
	}
	err := r.Wait()
	r.CloseInput()
	if !r.meant.Load() {
		d.judge.find("%s (process %d) ended by itself: %v", p.name, r.PID(), r.Failure(fmt.Errorf("%v", err))) //nolint:errorlint // for people
	}
	p.log.note("process %d ended: %v", r.PID(), err)
	close(r.ended)
}

// awaitReady waits for a process's first word.
func (p *program) awaitReady(ctx context.Context) error {
	p.mu.Lock()
	r := p.proc
	p.mu.Unlock()
	select {
	case <-r.ready:
		return nil
	case <-r.ended:
		return fmt.Errorf("torture: %s ended before it was ready", p.name)
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(startTimeout):
		return fmt.Errorf("torture: %s was not ready after %v", p.name, startTimeout)
	}
}

// end sends a signal that ends the process and waits for it; mu is held. SIGKILL comes
// after the other when that does not help, which is a finding.
func (p *program) endLocked(s syscall.Signal) {
	r := p.proc
	r.meant.Store(true)
	_ = r.Signal(s)
	if r.stopped.Swap(false) {
		_ = r.Signal(syscall.SIGCONT)
	}
	select {
	case <-r.ended:
		return
	case <-time.After(startTimeout):
	}
	p.d.judge.find("%s (process %d) did not end within %v of %v", p.name, r.PID(), startTimeout, s)
	_ = r.Signal(syscall.SIGQUIT) // its stacks go to its log
	select {
	case <-r.ended:
	case <-time.After(5 * time.Second):
		_ = r.Signal(syscall.SIGKILL)
		<-r.ended
	}
}

// ask gives an order to a worker and waits for the answer.
func (p *program) ask(o order, wait time.Duration) (answerLine, error) {
	p.mu.Lock()
	r := p.proc
	p.mu.Unlock()
	select { // an answer of before that nobody waited for
	case <-r.answers:
	default:
	}
	if err := r.Send(o); err != nil {
		return answerLine{}, err
	}
	select {
	case a := <-r.answers:
		if a.Error != "" {
			return a, fmt.Errorf("%w: %s: %s", base.ErrInternal, p.name, a.Error)
		}
		return a, nil
	case <-r.ended:
		return answerLine{}, fmt.Errorf("torture: %s ended before it answered %s", p.name, o.Do)
	case <-time.After(wait):
		return answerLine{}, fmt.Errorf("%w: %s did not answer %s within %v", base.ErrTimeout, p.name, o.Do, wait)
	}
}

// each runs f for every worker at once.
func (d *driver) each(f func(p *program) error) error {
	errs := make([]error, len(d.workers))
	var wait sync.WaitGroup
	for i, p := range d.workers {
		wait.Go(func() { errs[i] = f(p) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

// logFile takes a program's log and what is done to it. A line that a bug wrote is a finding.
type logFile struct {
	name  string
	judge *judge
	mu    struct {
		sync.Mutex
		f    *os.File
		rest []byte
	}
}

// bugs are what no program may say.
var bugs = [][]byte{[]byte("please report"), []byte("panic:"), []byte("maru: invariant"), []byte("fatal error:"), []byte("DATA RACE")}

func newLog(dir, name string, j *judge) (*logFile, error) {
	f, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		return nil, err
	}
	l := &logFile{name: name, judge: j}
	l.mu.f = f
	return l, nil
}

func (l *logFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.rest = append(l.mu.rest, b...)
	for {
		at := bytes.IndexByte(l.mu.rest, '\n')
		if at < 0 {
			break
		}
		for _, bug := range bugs {
			if bytes.Contains(l.mu.rest[:at], bug) {
				l.judge.find("%s says: %.600s", l.name, l.mu.rest[:at])
			}
		}
		l.mu.rest = l.mu.rest[at+1:]
	}
	return l.mu.f.Write(b)
}

func (l *logFile) note(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = fmt.Fprintf(l.mu.f, "-- %s "+format+"\n", append([]any{time.Now().Format("15:04:05.000")}, args...)...)
}

func (l *logFile) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.f.Close()
}

// nap waits a drawn time; false when the run ends meanwhile.
func nap(ctx context.Context, rng *rand.Rand, least, most time.Duration) bool {
	d := least + time.Duration(rng.Int64N(int64(most-least)+1))
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
