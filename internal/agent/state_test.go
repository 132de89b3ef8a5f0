package agent

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/store"
)

var update = flag.Bool("update", false, "write the golden files anew")

func hexOf(b []byte) string { return hex.EncodeToString(b) }

func changes(c ...store.Change) []store.Change { return c }

// The golden file is the format of the rows: a change here is a change of format, which
// takes a new version and a page (docs/rfcs/0009-node-watcher.md).
func TestRowsGolden(t *testing.T) {
	p := peer.Process{PID: 4711, PIDNamespace: 0xEFFFFFFC, StartTicks: 99, BootID: base.BootID{3}}
	var s strings.Builder
	for _, c := range changes(putSession(rowOf(base.SessionID{1}, p, 1_700_000_000_000)), store.Change{Bucket: bucketManager, Key: managerKey, Value: encode(managerRow{base.StoreID{2}})}) {
		_, _ = fmt.Fprintf(&s, "%s %x %x\n", c.Bucket, c.Key, c.Value)
	}
	path := filepath.Join("testdata", "rows-v1.golden")
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(s.String()), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if s.String() != string(want) {
		t.Errorf("rows are\n%s\nthe golden file has\n%s", s.String(), want)
	}
	// What is read is what was written.
	var st state
	for line := range strings.Lines(string(want)) {
		f := strings.Fields(line)
		key, err1 := hex.DecodeString(f[1])
		value, err2 := hex.DecodeString(f[2])
		if err := errors.Join(err1, err2, st.row(f[0], string(key), value)); err != nil {
			t.Fatal(err)
		}
	}
	if len(st.sessions) != 1 || st.sessions[0].process() != p || st.manager != (base.StoreID{2}) {
		t.Errorf("%+v", st)
	}
}

func FuzzRow(f *testing.F) {
	p := peer.Process{PID: 1, PIDNamespace: 2, StartTicks: 3, BootID: base.BootID{4}}
	c := putSession(rowOf(base.SessionID{1}, p, 5))
	f.Add(c.Bucket, c.Key, c.Value)
	f.Add(bucketManager, managerKey, encode(managerRow{base.StoreID{1}}))
	f.Fuzz(func(t *testing.T, bucket, key string, value []byte) {
		var s state
		if err := s.row(bucket, key, value); err == nil && bucket == bucketSessions {
			if r := s.sessions[0]; r.process().BootID == (base.BootID{}) || r.PID <= 0 {
				t.Errorf("%+v", r)
			}
		}
	})
}

// A state directory that lost a part, is another machine's, or is mixed of two is refused
// by name with its cure; a first start that was cut short is made again.
func TestStateDirectory(t *testing.T) {
	here := base.NodeID{1}
	open := func(t *testing.T, dir string, node base.NodeID) error {
		t.Helper()
		s, err := openState(dir, node, 50*time.Millisecond)
		if err == nil {
			err = s.close()
		}
		return err
	}
	for name, c := range map[string]struct {
		spoil func(dir, other string) error
		node  base.NodeID
		want  error
		text  string
	}{
		"whole":              {func(string, string) error { return nil }, here, nil, ""},
		"no mark":            {func(d, _ string) error { return os.Remove(filepath.Join(d, markFile)) }, here, nil, ""},
		"no store":           {func(d, _ string) error { return os.Remove(filepath.Join(d, storeFile)) }, here, base.ErrNotFound, "drop-agent"},
		"no secret":          {func(d, _ string) error { return os.Remove(filepath.Join(d, secretFile)) }, here, base.ErrNotFound, "drop-agent"},
		"an open secret":     {func(d, _ string) error { return os.Chmod(filepath.Join(d, secretFile), 0o644) }, here, base.ErrDenied, "chmod 600"},
		"half a secret":      {func(d, _ string) error { return os.WriteFile(filepath.Join(d, secretFile), []byte("ab\n"), 0o600) }, here, base.ErrCorrupt, "drop-agent"},
		"another's secret":   {func(d, o string) error { return replace(d, o, secretFile) }, here, base.ErrForeign, "drop-agent"},
		"another's store":    {func(d, o string) error { return replace(d, o, storeFile) }, here, base.ErrForeign, "drop-agent"},
		"a mark of nothing":  {func(d, _ string) error { return os.WriteFile(filepath.Join(d, markFile), []byte("x"), 0o600) }, here, base.ErrCorrupt, "which agent"},
		"a damaged store":    {func(d, _ string) error { return os.Truncate(filepath.Join(d, storeFile), 100) }, here, base.ErrCorrupt, ""},
		"on another machine": {func(string, string) error { return nil }, base.NodeID{2}, base.ErrForeign, "copied image"},
		"first start was cut": {func(d, _ string) error {
			return errors.Join(os.Remove(filepath.Join(d, markFile)), os.Remove(filepath.Join(d, storeFile)))
		}, here, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir, other := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
			if err := errors.Join(open(t, dir, here), open(t, other, here)); err != nil {
				t.Fatal(err)
			}
			if err := c.spoil(dir, other); err != nil {
				t.Fatal(err)
			}
			err := open(t, dir, c.node)
			if !errors.Is(err, c.want) || c.want == nil && err != nil || c.want != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %v with %q", err, c.want, c.text)
			}
		})
	}
}

func replace(dir, from, name string) error {
	b, err := os.ReadFile(filepath.Join(from, name))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), b, 0o600)
}

// Without --watch-only there is nothing: the error says what does not exist.
func TestSettings(t *testing.T) {
	s := DefaultSettings()
	s.RM = "127.0.0.1:9850"
	if _, err := s.Config(io.Discard, "test"); !errors.Is(err, base.ErrUnsupported) || !strings.Contains(err.Error(), "RDMA") || !strings.Contains(err.Error(), "--watch-only") {
		t.Errorf("without --watch-only: %v", err)
	}
	s.WatchOnly = true
	if _, err := s.Config(io.Discard, "test"); err != nil {
		t.Error(err)
	}
	s.RM, s.SocketMode, s.HTTPPort, s.ReportInterval, s.MaxSessions = "", "9", -7, time.Hour, -1
	_, err := s.Config(io.Discard, "test")
	for _, part := range []string{"rm is empty", "socket_mode", "http_port -7", "report_interval 1h", "max_session_count -1"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not said: %v", part, err)
		}
	}
}
