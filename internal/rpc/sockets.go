package rpc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// systemSocketDir is where a machine's daemons have their sockets.
const systemSocketDir = "/run/maru"

// socketDirs are the candidates, best first.
func socketDirs() []string {
	dirs := []string{systemSocketDir}
	if d := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(d) {
		dirs = append(dirs, filepath.Join(d, "maru"))
	}
	return append(dirs, filepath.Join(os.TempDir(), "maru-"+strconv.Itoa(os.Getuid())))
}

// SocketPath returns where a daemon puts its socket: in /run/maru when that can be
// written, else in $XDG_RUNTIME_DIR/maru, else in a private directory under the
// temporary one. It makes the directory. Errors: ErrInvalid, ErrDenied.
func SocketPath(name string) (string, error) {
	if err := checkSocketName(name); err != nil {
		return "", err
	}
	var problems []error
	for _, dir := range socketDirs() {
		err := makeSocketDir(dir)
		if err == nil {
			err = unix.Access(dir, unix.W_OK|unix.X_OK)
		}
		if err == nil {
			path := filepath.Join(dir, name)
			return path, checkUnixPath(path)
		}
		problems = append(problems, fmt.Errorf("%s: %w", dir, err))
	}
	return "", fmt.Errorf("%w: no directory for socket %s: %w", base.ErrDenied, name, errors.Join(problems...))
}

// FindSocket returns the socket of that name in the first of the default
// directories that has one, for a client that was told no path. Errors: ErrInvalid, ErrNotFound.
func FindSocket(name string) (string, error) {
	if err := checkSocketName(name); err != nil {
		return "", err
	}
	dirs := socketDirs()
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: socket %s is in none of %s", base.ErrNotFound, name, strings.Join(dirs, ", "))
}

func checkSocketName(name string) error {
	if name == "" || name != filepath.Base(name) || name == "." || name == ".." {
		return fmt.Errorf("%w: socket name %q must be a plain file name", base.ErrInvalid, name)
	}
	return nil
}

// makeSocketDir makes a directory whose entries nobody else can replace: a stranger
// who could would sit between a daemon and its clients.
func makeSocketDir(dir string) error {
	mode := fs.FileMode(0o700)
	if dir == systemSocketDir {
		mode = 0o755
	}
	if dir != systemSocketDir || os.Getuid() == 0 {
		err := os.Mkdir(dir, mode)
		if errors.Is(err, fs.ErrNotExist) {
			if err = os.MkdirAll(filepath.Dir(dir), 0o755); err == nil {
				err = os.Mkdir(dir, mode)
			}
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return pathError("making socket directory "+dir, err)
		}
		if err == nil {
			// The umask must not close a directory that others have to pass.
			if err := os.Chmod(dir, mode); err != nil {
				return pathError("making socket directory "+dir, err)
			}
		}
	}
	if link, err := os.Lstat(dir); err == nil && link.Mode().Type() == fs.ModeSymlink {
		if st, ok := link.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Getuid() {
			return fmt.Errorf("%w: socket directory %s is a link made by user %d", base.ErrDenied, dir, st.Uid)
		}
	}
	info, err := os.Stat(dir)
	if err != nil {
		return pathError("looking at socket directory "+dir, err)
	}
	if !info.IsDir() {
		return fmt.Errorf("%w: %s is no directory", base.ErrForeign, dir)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	if st.Uid != 0 && int(st.Uid) != os.Getuid() {
		return fmt.Errorf("%w: socket directory %s belongs to user %d", base.ErrDenied, dir, st.Uid)
	}
	if info.Mode().Perm()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0 {
		return fmt.Errorf("%w: socket directory %s can be written by others (mode %o); use chmod 755 or another directory",
			base.ErrDenied, dir, info.Mode().Perm())
	}
	return nil
}
