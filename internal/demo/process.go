package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/child"
)

// process is a worker process.
type process struct {
	*child.Process
	index int
}

func startWorker(ctx context.Context, program string, o Options) (*process, error) {
	encoded, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	p, err := child.Start(fmt.Sprintf("worker %d", o.Index), exec.CommandContext(ctx, program, Command, string(encoded)), nil) //nolint:gosec // this program itself
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	return &process{Process: p, index: o.Index}, nil
}

// next reads one line; io.EOF when the worker has ended.
func (p *process) next() (t Tally, err error) {
	err = p.Next(&t)
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
	return p.Failure(fmt.Errorf("demo: ended early: %w", err))
}

// do gives an order and waits for its end.
func (p *process) do(o order) (Tally, error) {
	if err := p.Send(o); err != nil {
		return Tally{}, err
	}
	return p.total()
}

// quit ends a worker in order.
func (p *process) quit() error {
	_ = p.Send(order{Do: "quit"})
	return p.Close()
}
