// Package statedir is what every daemon does with its state directory: it keeps a second
// instance out, replaces small files whole, and says what an operator can do when the
// directory refuses. What lies in the directory is its daemon's.
package statedir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// Error says what was done with which file, and the cure. An error that has a code of its
// own already is returned as it is.
func Error(operation, path string, err error) error {
	if base.CodeOf(err) != base.CodeInternal {
		return err
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %s %s: %w: run as the user that owns it, or give another --state-dir", base.ErrDenied, operation, path, err)
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: %s %s: %w: give a --state-dir that can be written", base.ErrUnavailable, operation, path, err)
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w: %s %s: %w: make room there, or give another --state-dir", base.ErrUnavailable, operation, path, err)
	}
	return fmt.Errorf("%w: %s %s: %w", base.ErrUnavailable, operation, path, err)
}

// Lock takes the lock file of a directory for as long as the file is open, also against
// another instance in this process. It waits so long for one that is about to end; busy
// says, behind the directory's path, who has it and what to do.
// Ownership: the caller closes the file. Errors: ErrBusy, those of [Error].
func Lock(dir, name, busy string, wait time.Duration) (*os.File, error) {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, Error("open", path, err)
	}
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%w: state directory %s is in use by %s", base.ErrBusy, dir, busy)
			}
			return nil, Error("lock", path, err)
		}
	}
}

// Replace writes a small file of mode 0600 whole and durably: after a crash there is the
// old one or the new one. Errors: those of the system; nothing is left aside.
func Replace(dir, name string, content []byte) error {
	path := filepath.Join(dir, name)
	aside := path + ".new"
	err := write(aside, content)
	if err == nil {
		err = os.Rename(aside, path)
	}
	if err != nil {
		_ = os.Remove(aside)
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}

func write(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
