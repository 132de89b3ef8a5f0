package inject

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) {
	Main(map[string]Subject{"file": fileSubject})
	leak.Check(m)
}

var forgotten *os.File

// fileSubject writes a file and reads it again, and leaves it open when it is told so.
func fileSubject(_ context.Context, options json.RawMessage, in io.Reader, say func(any)) error {
	var dir string
	if err := json.Unmarshal(options, &dir); err != nil {
		return err
	}
	return Run(in, say, func() (func() error, error) {
		path := filepath.Join(dir, "x")
		f, err := os.Create(path)
		if err != nil {
			return nil, err
		}
		_, err = f.WriteString("0123456789")
		if err == nil {
			err = f.Sync()
		}
		if err != nil {
			forgotten = f // a leak, which the test must see
			return nil, err
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		b, err := os.ReadFile(path)
		if err == nil && string(b) != "0123456789" {
			err = errors.New("the file is not whole")
		}
		return func() error { return os.Remove(path) }, err
	})
}

func TestEachCallFailsOnce(t *testing.T) {
	seen := map[string]bool{}
	for call := 1; ; call++ {
		dir := t.TempDir()
		p := StartOrSkip(t, Options{Subject: "file", Options: dir, Under: []string{dir}, Fault: Fault{Call: call}})
		r, err := p.Await()
		if err != nil {
			t.Fatal(err)
		}
		end := r
		if r.Ready {
			p.CloseInput()
			if end, err = p.Await(); err != nil {
				t.Fatal(err)
			}
		}
		what, _ := p.Hit()
		p.Release()
		if what == "" {
			if end.Start+end.Close != "" {
				t.Errorf("nothing was failed, and it says %+v", end)
			}
			break
		}
		name, _, _ := strings.Cut(what[strings.Index(what, ", ")+2:], " ")
		seen[name] = true
		t.Logf("%s: start %q, close %q, left %v", what, end.Start, end.Close, end.Left)
		if leaked := len(end.Left) > 0; leaked != (name == "write" || name == "fsync") {
			t.Errorf("%s: left open: %v", what, end.Left)
		}
		if end.Start+end.Close == "" && name != "fstat" { // the size is a hint to ReadFile
			t.Errorf("%s: nothing was said", what)
		}
	}
	for _, name := range []string{"openat", "write", "fsync", "read", "unlinkat"} {
		if !seen[name] {
			t.Errorf("%s was never failed: %v", name, seen)
		}
	}
}

func TestShortWriteAndStickyFault(t *testing.T) {
	dir := t.TempDir()
	p := StartOrSkip(t, Options{Subject: "file", Options: dir, Under: []string{dir}})
	if r, err := p.Await(); err != nil || !r.Ready {
		t.Fatal(r, err)
	}
	at := 0
	for i, c := range p.Calls() {
		if strings.HasPrefix(c, "write ") {
			at = i + 1
		}
	}
	p.Release()
	p = StartOrSkip(t, Options{Subject: "file", Options: dir, Under: []string{dir}, Fault: Fault{Call: at, Variant: 2}})
	if r, err := p.Await(); err != nil || !r.Ready || !p.Harmless() {
		t.Errorf("a write of one half: %+v, %v", r, err)
	}
	n := 0
	for _, c := range p.Calls() {
		if strings.HasPrefix(c, "write ") {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d writes, the second writes the other half", n)
	}
	p.Release()
	p = StartOrSkip(t, Options{Subject: "file", Options: dir, Under: []string{dir}, Fault: Fault{Call: 1, Sticky: true}})
	if r, err := p.Await(); err != nil || !strings.Contains(r.Start, unix.EMFILE.Error()) {
		t.Errorf("%+v, %v", r, err)
	}
}
