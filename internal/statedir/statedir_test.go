package statedir

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

func TestLockKeepsOthersOut(t *testing.T) {
	dir := t.TempDir()
	f, err := Lock(dir, "lock", "another one: stop it", 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(dir, "lock", "another one: stop it", 20*time.Millisecond); !errors.Is(err, base.ErrBusy) ||
		!strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "stop it") {
		t.Fatalf("a second lock: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if f, err = Lock(dir, "lock", "", 0); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(dir, "link", "", 0); err == nil {
		t.Error("a lock through a link")
	}
}

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	for _, text := range []string{"one", "another, longer", "x"} {
		if err := Replace(dir, "file", []byte(text)); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(dir, "file"))
		if err != nil || string(b) != text {
			t.Fatalf("%q, %v", b, err)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "file")); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatal(st.Mode(), err)
	}
	if err := os.Mkdir(filepath.Join(dir, "taken"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(dir, "taken", []byte("x")); err == nil {
		t.Error("a directory was replaced")
	}
	if _, err := os.Stat(filepath.Join(dir, "taken.new")); !errors.Is(err, os.ErrNotExist) {
		t.Error("something is left aside")
	}
}

func TestErrorsHaveCures(t *testing.T) {
	for err, want := range map[error]struct {
		is   error
		text string
	}{
		syscall.EACCES: {base.ErrDenied, "user that owns it"},
		syscall.EROFS:  {base.ErrUnavailable, "can be written"},
		syscall.ENOSPC: {base.ErrUnavailable, "make room"},
		syscall.EIO:    {base.ErrUnavailable, "/d"},
	} {
		if got := Error("open", "/d", err); !errors.Is(got, want.is) || !errors.Is(got, err) || !strings.Contains(got.Error(), want.text) {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := Error("open", "/d", base.ErrBusy); !errors.Is(err, base.ErrBusy) || err.Error() != base.ErrBusy.Error() {
		t.Errorf("%v: said again", err)
	}
}
