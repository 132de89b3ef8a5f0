package bolt

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/leak"
	"github.com/xcena-dev/maru/internal/store"
)

func TestMain(m *testing.M) {
	inject.Main(map[string]inject.Subject{"store": storeSubject})
	leak.Check(m)
}

// rowsOf are the rows of one commit; they make pages split.
func rowsOf(commit int) (out []store.Change) {
	for i := range 40 {
		out = append(out, store.Change{Bucket: "rows", Key: fmt.Sprintf("%d-%02d", i, commit), Value: []byte(strings.Repeat("v", 100))})
	}
	return out
}

// storeSubject makes a store and commits to it, a second time what failed. It says which
// commits were acknowledged.
func storeSubject(_ context.Context, options json.RawMessage, in io.Reader, say func(any)) error {
	var path string
	if err := json.Unmarshal(options, &path); err != nil {
		return err
	}
	return inject.Run(in, say, func() (func() error, error) {
		if err := Create(path, Identity{Kind: "test", ID: base.NewID()}); err != nil {
			return nil, err
		}
		s, err := Open(path, "test", time.Second)
		if err != nil {
			return nil, err
		}
		var pending []store.Change
		for i := range 3 {
			pending = append(pending, rowsOf(i)...)
			for range 2 {
				if err = s.Commit(pending); err == nil {
					say(i)
					pending = nil
					break
				}
				fmt.Fprintln(os.Stderr, "level=ERROR", err)
			}
		}
		return s.Close, nil
	})
}

// Each file call of a store fails once: it is told, what was acknowledged is there, the
// rest wholly or not at all, and the store is sound (W1).
func TestEachFileCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("some dozens of processes")
	}
	inject.Walk(t, func(what string) string {
		switch {
		case strings.Contains(what, "fstatat"):
			return "a name is looked at before it is made, which fails by itself"
		case strings.Contains(what, "pread"):
			return "of the places where a meta page may lie the others are read; bbolt reads them again"
		case strings.Contains(what, "unlinkat") && strings.Contains(what, ".new"):
			return "nothing was aside"
		}
		return ""
	}, func(t *testing.T, r *inject.Round) {
		dir := t.TempDir()
		path := filepath.Join(dir, "x.db")
		p := inject.StartOrSkip(t, inject.Options{Subject: "store", Options: path, Under: []string{dir}, Fault: r.Fault})
		r.Process = p
		p.CloseInput()
		acknowledged := -1
		var end inject.End
		for {
			line, err := p.Line()
			if err != nil {
				break
			}
			var n int
			var said inject.Ready
			if json.Unmarshal(line, &n) == nil {
				acknowledged = n
			} else if err := json.Unmarshal(line, &said); err != nil {
				t.Fatalf("%q: %v", line, err)
			} else if !said.Ready {
				end = said.End
			}
		}
		if err := p.Wait(); err != nil {
			t.Fatal(p.Failure(err))
		}
		r.Surfaced = end.Start != "" || end.Close != ""
		if len(end.Left) > 0 {
			t.Errorf("left open: %v", end.Left)
		}
		verifyStore(t, path, acknowledged, end.Start != "")
	})
}

func verifyStore(t *testing.T, path string, acknowledged int, notStarted bool) {
	t.Helper()
	if _, err := os.Lstat(path); notStarted && os.IsNotExist(err) {
		if err := Create(path, Identity{Kind: "test", ID: base.NewID()}); err != nil {
			t.Fatalf("made without faults: %v", err)
		}
	}
	s, err := Open(path, "test", time.Second)
	if err != nil {
		t.Fatalf("opened without faults: %v", err)
	}
	defer func() { _ = s.Close() }()
	got, want := content(t, s), map[string]string{}
	fits := len(got) == 0 && acknowledged < 0
	for i := range 3 {
		for _, c := range rowsOf(i) {
			want[c.Bucket+"/"+c.Key] = string(c.Value)
		}
		fits = fits || i >= acknowledged && maps.Equal(got, want)
	}
	if !fits {
		t.Errorf("%d rows after acknowledged commits up to %d", len(got), acknowledged)
	}
	if err := s.Commit(rowsOf(3)); err != nil {
		t.Errorf("a commit without faults: %v", err)
	}
}
