package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/xcena-dev/maru/internal/base"
)

// Options of a run.
type Options struct {
	// Quick makes it smaller and shorter: under 30 s, figures less exact.
	Quick bool
	// Progress is told what is measured next, for people.
	Progress func(format string, args ...any)
	// ProfileDir, when it is not empty, gets a CPU profile of every Go process of the
	// benchmark: where the time goes when a target is missed.
	ProfileDir string
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
func Run(ctx context.Context, name string, o Options) (_ *Report, err error) {
	b, ok := benches[name]
	if !ok {
		return nil, fmt.Errorf("%w: benchmark %q, there are %v", base.ErrInvalid, name, Names())
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	if o.ProfileDir != "" {
		if o.ProfileDir, err = filepath.Abs(o.ProfileDir); err != nil {
			return nil, fmt.Errorf("bench: profile directory: %w", err)
		}
		if err := os.MkdirAll(o.ProfileDir, 0o700); err != nil {
			return nil, fmt.Errorf("bench: profile directory: %w", err)
		}
		stop, err := startProfile(o.ProfileDir, name)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, stop()) }()
		ctx = context.WithValue(ctx, profileKey{}, o.ProfileDir)
	}
	return b(ctx, o)
}
