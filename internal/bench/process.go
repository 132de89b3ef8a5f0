package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/child"
)

// Command is the hidden word behind `maru bench` that makes a process a part of a
// benchmark: `maru bench process KIND OPTIONS`.
const Command = "process"

// part is what a process of a benchmark does. Orders come one at a time.
type part interface {
	// ready is the first line of the process: what the parent has to know.
	ready() any
	// do carries out one order and returns the answer.
	do(ctx context.Context, order json.RawMessage) (any, error)
	close() error
}

// parts are the kinds of processes. A child that gets no more orders ends.
var parts = map[string]func(context.Context, json.RawMessage) (part, error){
	"server":    startServerPart,
	"prober":    startProberPart,
	"directory": startDirectoryPart,
	"daemon":    startDaemonPart,
	"writer":    startWriterPart,
}

// answer is one line of a process.
type answer struct {
	Error string          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// maxLineBytes bounds a line between the processes: some thousand durations.
const maxLineBytes = 16 << 20

// RunProcess is the body of a process of a benchmark. It ends with its input.
func RunProcess(ctx context.Context, kind, options string, in io.Reader, out io.Writer) (err error) {
	start := parts[kind]
	if start == nil {
		return fmt.Errorf("%w: no process of a benchmark is called %q", base.ErrInvalid, kind)
	}
	if dir := os.Getenv(profileVariable); dir != "" {
		stop, profileErr := startProfile(dir, kind)
		if profileErr != nil {
			return profileErr
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	encode := json.NewEncoder(out)
	say := func(v any, err error) error {
		var a answer
		if err != nil {
			a.Error = err.Error()
		} else if a.Value, err = json.Marshal(v); err != nil {
			return err
		}
		return encode.Encode(a)
	}
	p, err := start(ctx, json.RawMessage(options))
	if err != nil {
		return say(nil, err)
	}
	if err := say(p.ready(), nil); err != nil {
		return errors.Join(err, p.close())
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLineBytes)
	for lines.Scan() && ctx.Err() == nil {
		if err := say(p.do(ctx, json.RawMessage(lines.Bytes()))); err != nil {
			return errors.Join(err, p.close())
		}
	}
	return errors.Join(lines.Err(), p.close())
}

// process is a child that answers each order with one line.
type process struct {
	*child.Process
	name string
}

// startPart starts a process of a kind and waits for its first line.
func startPart(ctx context.Context, kind string, options, ready any) (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(options)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, "bench", Command, kind, string(text)) //nolint:gosec // this program itself
	if dir, ok := ctx.Value(profileKey{}).(string); ok {
		cmd.Env = append(os.Environ(), profileVariable+"="+dir)
	}
	return startProcess(kind, cmd, ready)
}

// startProcess starts a program that speaks in lines and waits for its first.
func startProcess(name string, cmd *exec.Cmd, ready any) (*process, error) {
	c, err := child.Start(name, cmd, nil)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	p := &process{c, name}
	if err := p.answer(ready); err != nil {
		p.End()
		return nil, err
	}
	return p, nil
}

// answer reads one answer.
func (p *process) answer(value any) error {
	var a answer
	if err := p.Next(&a); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("bench: %w", p.Failure(err))
	}
	if a.Error != "" {
		return fmt.Errorf("%w: process %s: %s", base.ErrInternal, p.name, a.Error)
	}
	if value == nil || len(a.Value) == 0 {
		return nil
	}
	return json.Unmarshal(a.Value, value)
}

// call gives an order and reads the answer.
func (p *process) call(order, value any) error {
	if err := p.Send(order); err != nil {
		return err
	}
	return p.answer(value)
}

// close ends the process in order.
func (p *process) close() error { return p.Close() }

// kill ends the process at once.
func (p *process) kill() { p.End() }

// closeAll ends processes, the last first, and keeps the first error.
func closeAll(ps ...*process) error {
	var errs []error
	for i := len(ps) - 1; i >= 0; i-- {
		if ps[i] != nil {
			errs = append(errs, ps[i].close())
		}
	}
	return errors.Join(errs...)
}
