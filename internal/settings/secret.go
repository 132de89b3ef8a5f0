package settings

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/xcena-dev/maru/internal/base"
)

// maxSecretBytes bounds a secret; a key file has some dozens.
const maxSecretBytes = 64 << 10

// ReadSecretFile reads a secret: a regular file of this user (or root) that nobody else can
// read or write, mode 0600 or less. One newline at its end is left out. The error never
// shows the content. Errors: ErrNotFound, ErrDenied (mode, owner), ErrInvalid.
func ReadSecretFile(path string) ([]byte, error) {
	// A FIFO must not hold the program.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fileError(path, err)
	}
	defer f.Close() //nolint:errcheck // read only
	// Of the open file: what the name stands for could be exchanged meanwhile.
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, fileError(path, err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%w: secret %s is no file", base.ErrInvalid, path)
	case info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("%w: secret %s has mode %04o and could be read by others; chmod 600 %s",
			base.ErrDenied, path, info.Mode().Perm(), path)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%w: secret %s belongs to user %d; it must belong to this one (%d) or to root",
			base.ErrDenied, path, st.Uid, os.Geteuid())
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	switch {
	case err != nil:
		return nil, fileError(path, err)
	case len(b) > maxSecretBytes:
		return nil, fmt.Errorf("%w: secret %s has more than %s", base.ErrInvalid, path, FormatSize(maxSecretBytes))
	}
	b = bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
	if len(b) == 0 {
		return nil, fmt.Errorf("%w: secret %s is empty", base.ErrInvalid, path)
	}
	return b, nil
}
