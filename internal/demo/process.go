package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"

	"github.com/xcena-dev/maru/internal/base"
)

// process is a worker process and the pipes to it.
type process struct {
	index int
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
	log   *tail
}

func startWorker(ctx context.Context, program string, o Options) (*process, error) {
	encoded, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	p := &process{index: o.Index, log: &tail{}}
	p.cmd = exec.CommandContext(ctx, program, Command, string(encoded)) //nolint:gosec // this program itself
	p.cmd.Stderr = p.log
	// Ctrl-C reaches the whole group; the workers end when this process closes their input.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("demo: start worker %d: %w", o.Index, err)
	}
	return p, nil
}

// send gives an order.
func (p *process) send(o order) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	_, err = p.in.Write(append(b, '\n'))
	return err
}

// next reads one line; io.EOF when the worker has ended.
func (p *process) next() (Tally, error) {
	var t Tally
	if !p.lines.Scan() {
		if err := p.lines.Err(); err != nil {
			return t, err
		}
		return t, io.EOF
	}
	err := json.Unmarshal(p.lines.Bytes(), &t)
	return t, err
}

// total reads lines up to the end of an order.
func (p *process) total() (Tally, error) {
	for {
		t, err := p.next()
		if err != nil {
			return t, p.failure(err)
		}
		if t.Done < 0 {
			if t.Error != "" {
				return t, fmt.Errorf("%w: worker %d: %s", base.ErrInternal, p.index, t.Error)
			}
			return t, nil
		}
	}
}

func (p *process) failure(err error) error {
	return fmt.Errorf("demo: worker %d ended early: %w\n%s", p.index, err, p.log)
}

// do gives an order and waits for its end.
func (p *process) do(o order) (Tally, error) {
	if err := p.send(o); err != nil {
		return Tally{}, p.failure(err)
	}
	return p.total()
}

// quit ends a worker in order.
func (p *process) quit() error {
	_ = p.send(order{Do: "quit"})
	_ = p.in.Close()
	for p.lines.Scan() { // what it still says
	}
	if err := p.cmd.Wait(); err != nil {
		return p.failure(err)
	}
	return nil
}

// kill ends a worker at once.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(os.Kill)
	for p.lines.Scan() {
	}
	_ = p.cmd.Wait()
	_ = p.in.Close()
}

// tail keeps the end of a worker's log.
type tail struct {
	mu struct {
		sync.Mutex
		b []byte
	}
}

const tailBytes = 8 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.b = append(t.mu.b, b...)
	if extra := len(t.mu.b) - tailBytes; extra > 0 {
		t.mu.b = append(t.mu.b[:0], t.mu.b[extra:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.mu.b))
}
