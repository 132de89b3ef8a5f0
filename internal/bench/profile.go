package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
)

// profileKey is the context's key of the directory for profiles; profileVariable tells
// it to the processes.
type profileKey struct{}

const profileVariable = "MARU_BENCH_PROFILE"

// startProfile writes a CPU profile of this process until stop.
func startProfile(dir, name string) (stop func() error, err error) {
	f, err := os.Create(filepath.Join(dir, fmt.Sprintf("%s-%d.pprof", name, os.Getpid()))) //nolint:gosec // the user's directory
	if err != nil {
		return nil, fmt.Errorf("bench: profile: %w", err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(fmt.Errorf("bench: profile: %w", err), f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}
