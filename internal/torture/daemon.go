package torture

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/store"
)

// DaemonCommand is the first argument of a daemon process: the same code as behind
// maru-resource-manager and maru-server, with a store that fails when it is told.
const DaemonCommand = "torture-daemon"

// daemonOptions of a process, on its command line as one JSON argument. One of both is set.
type daemonOptions struct {
	RM     *rm.Config     `json:"rm,omitempty"`
	Server *server.Config `json:"server,omitempty"`
}

// storeFault is an order to a resource manager: its next commits fail.
type storeFault struct {
	Kind  faultKind `json:"kind"`
	Count int64     `json:"count"`
}

type faultKind string

const (
	// faultFull: no space, and nothing is durable.
	faultFull faultKind = "full"
	// faultIO: an I/O error behind a commit that is durable all the same.
	faultIO faultKind = "io"
	// faultFile: the store's file itself cannot be written for the time of the commits:
	// bbolt sees the kernel's error (a limit of the process, EFBIG).
	faultFile faultKind = "file"
)

// failingStore fails as it was told last.
type failingStore struct {
	store.Store
	kind atomic.Pointer[faultKind]
	left atomic.Int64
}

func (s *failingStore) set(f storeFault) {
	s.kind.Store(&f.Kind)
	s.left.Store(f.Count)
}

// Commit is store.Store's.
func (s *failingStore) Commit(changes []store.Change) error {
	if s.left.Add(-1) < 0 {
		s.left.Store(0)
		return s.Store.Commit(changes)
	}
	switch *s.kind.Load() {
	case faultFull:
		return fmt.Errorf("%w: write store: %w", base.ErrUnavailable, unix.ENOSPC)
	case faultFile:
		var was unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
			return err
		}
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
			return err
		}
		err := s.Store.Commit(changes)
		return errors.Join(err, unix.Setrlimit(unix.RLIMIT_FSIZE, &was))
	}
	if err := s.Store.Commit(changes); err != nil {
		return err
	}
	return fmt.Errorf("%w: write store: %w", base.ErrUnavailable, unix.EIO)
}

// RunDaemon is the body of a daemon process. It ends with SIGTERM.
func RunDaemon(ctx context.Context, optionsJSON string, in io.Reader, out io.Writer) error {
	var o daemonOptions
	if err := json.Unmarshal([]byte(optionsJSON), &o); err != nil {
		return fmt.Errorf("%w: options of a torture daemon: %w", base.ErrInvalid, err)
	}
	// A write over the limit of faultFile is an error and not this process's end.
	signal.Ignore(syscall.SIGXFSZ)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	switch {
	case o.RM != nil:
		return runRM(ctx, *o.RM, in, out)
	case o.Server != nil:
		return runServer(ctx, *o.Server, out)
	}
	return fmt.Errorf("%w: a torture daemon is a resource manager or a server", base.ErrInvalid)
}

func runRM(ctx context.Context, cfg rm.Config, in io.Reader, out io.Writer) error {
	failing := &failingStore{}
	cfg.WrapStore = func(s store.Store) store.Store {
		failing.Store = s
		return failing
	}
	cfg.Logger = slog.Default()
	s, err := rm.Start(ctx, cfg)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, "{}"); err != nil {
		return errors.Join(err, s.Close())
	}
	go func() { // until the input ends, which is with the driver or this process
		for lines := bufio.NewScanner(in); lines.Scan(); {
			var f storeFault
			if json.Unmarshal(lines.Bytes(), &f) == nil {
				failing.set(f)
			}
		}
	}()
	select {
	case <-ctx.Done():
	case err = <-s.Failed():
	}
	return errors.Join(err, s.Close())
}

func runServer(ctx context.Context, cfg server.Config, out io.Writer) error {
	cfg.Log = slog.Default()
	s, err := server.Start(ctx, cfg)
	if err != nil {
		return err
	}
	if _, err = fmt.Fprintln(out, "{}"); err == nil {
		err = s.Wait(ctx)
	}
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(err, s.Close(closing))
}
