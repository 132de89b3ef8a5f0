package bench

import (
	"context"
	"fmt"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// Options of a run.
type Options struct {
	// Quick makes it smaller and shorter: under 30 s, figures less exact.
	Quick bool
	// Progress is told what is measured next, for people.
	Progress func(format string, args ...any)
}

// benches are the benchmarks by name.
var benches = map[string]func(context.Context, Options) (*Report, error){}

// Names lists the benchmarks.
func Names() []string {
	var names []string
	for n := range benches {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Run runs one benchmark. Errors: ErrInvalid for a name that is none.
func Run(ctx context.Context, name string, o Options) (*Report, error) {
	b, ok := benches[name]
	if !ok {
		return nil, fmt.Errorf("%w: benchmark %q, there are %v", base.ErrInvalid, name, Names())
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	return b(ctx, o)
}
