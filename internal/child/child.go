package child

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// maxLineBytes bounds a line: some thousand durations of a benchmark.
const maxLineBytes = 16 << 20

// waitDelay bounds how long pipes are waited for that somebody inherited.
const waitDelay = 5 * time.Second

// Process is a running child and the pipes to it. Ownership: who started it calls
// Close or Kill.
type Process struct {
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
	log   *Tail
	wait  func() error
}

// Start starts a command as a child. Its log goes to log as well as into the tail that
// Failure shows; nil: only there. The child is killed when this process dies.
func Start(name string, cmd *exec.Cmd, log io.Writer) (*Process, error) {
	p := &Process{name: name, cmd: cmd, log: &Tail{}}
	p.wait = sync.OnceValue(cmd.Wait)
	cmd.Stderr = p.log
	if log != nil {
		cmd.Stderr = io.MultiWriter(p.log, log)
	}
	// Ctrl-C reaches the whole group; children end when their input ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = waitDelay
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewScanner(out)
	p.lines.Buffer(nil, maxLineBytes)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// PID is the child's.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Send gives an order.
func (p *Process) Send(order any) error {
	b, err := json.Marshal(order)
	if err != nil {
		return err
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		return p.Failure(err)
	}
	return nil
}

// Line reads one line, valid until the next call; io.EOF when the child says no more.
func (p *Process) Line() ([]byte, error) {
	if !p.lines.Scan() {
		if err := p.lines.Err(); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	return p.lines.Bytes(), nil
}

// Next reads one line into v; io.EOF when the child says no more.
func (p *Process) Next(v any) error {
	line, err := p.Line()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(line, v); err != nil {
		return fmt.Errorf("line %.80q: %w", line, err)
	}
	return nil
}

// Failure says which child had a problem, with the end of its log.
func (p *Process) Failure(err error) error {
	if log := p.log.String(); log != "" {
		return fmt.Errorf("process %s: %w\n%s", p.name, err, log)
	}
	return fmt.Errorf("process %s: %w", p.name, err)
}

// Signal sends a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// CloseInput tells the child that no order comes any more.
func (p *Process) CloseInput() { _ = p.in.Close() }

// Wait waits for the end of a child whose lines have been read to their end. It may
// be called more than once. Errors: those of exec.Cmd.Wait.
func (p *Process) Wait() error { return p.wait() }

// Close ends the child in order.
func (p *Process) Close() error {
	p.CloseInput()
	for p.lines.Scan() { // what it still says
	}
	if err := p.wait(); err != nil {
		return p.Failure(err)
	}
	return nil
}

// Kill ends the child at once. Lines that it had written before can still be read
// until Reap.
func (p *Process) Kill() error { return p.Signal(os.Kill) }

// Reap reads what a killed child had said to its end and waits for it.
func (p *Process) Reap() {
	for p.lines.Scan() {
	}
	_ = p.wait()
	_ = p.in.Close()
}

// End kills and reaps a child that may have ended already.
func (p *Process) End() {
	if err := p.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return
	}
	p.Reap()
}

// Tail is a writer that keeps the end of a log.
type Tail struct {
	mu struct {
		sync.Mutex
		b []byte
	}
}

const tailBytes = 8 << 10

// Write keeps the end of b.
func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.b = append(t.mu.b, b...)
	if extra := len(t.mu.b) - tailBytes; extra > 0 {
		t.mu.b = append(t.mu.b[:0], t.mu.b[extra:]...)
	}
	return len(b), nil
}

// String returns what was kept.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.mu.b))
}
