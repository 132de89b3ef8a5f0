package bolt

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
)

func mustOpen(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(path, "test", 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func newStore(t testing.TB) (string, *Store) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.db")
	if err := Create(path, Identity{Kind: "test", ID: base.NewID(), Attributes: map[string]string{"a": "b"}}); err != nil {
		t.Fatal(err)
	}
	return path, mustOpen(t, path)
}

func content(t testing.TB, s *Store) map[string]string {
	t.Helper()
	got := map[string]string{}
	if err := s.Load(func(b, k string, v []byte) error { got[b+"/"+k] = string(v); return nil }); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestAgainstMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		path := filepath.Join(t.TempDir(), fmt.Sprint(rand.Uint64()))
		if err := Create(path, Identity{Kind: "test", ID: base.NewID()}); err != nil {
			rt.Fatal(err)
		}
		s := mustOpen(t, path)
		want := map[string]string{}
		for range rapid.IntRange(1, 5).Draw(rt, "commits") {
			var batch []store.Change
			for range rapid.IntRange(0, 20).Draw(rt, "changes") {
				c := store.Change{
					Bucket: rapid.SampledFrom([]string{"p", "q"}).Draw(rt, "bucket"),
					Key:    rapid.StringN(1, 3, 10).Draw(rt, "key"),
					Value:  rapid.SliceOfN(rapid.Byte(), 0, 3).Draw(rt, "value"),
				}
				batch = append(batch, c)
				if len(c.Value) == 0 {
					delete(want, c.Bucket+"/"+c.Key)
				} else {
					want[c.Bucket+"/"+c.Key] = string(c.Value)
				}
			}
			if err := s.Commit(batch); err != nil {
				rt.Fatal(err)
			}
		}
		if got := content(t, s); !maps.Equal(got, want) {
			rt.Fatalf("%q, want %q", got, want)
		}
		if err := s.Close(); err != nil {
			rt.Fatal(err)
		}
		if got := content(t, mustOpen(t, path)); !maps.Equal(got, want) {
			rt.Fatalf("after opening again: %q, want %q", got, want)
		}
	})
}

func TestIdentity(t *testing.T) {
	path, s := newStore(t)
	if id := s.Identity(); id.Kind != "test" || id.Attributes["a"] != "b" || id.ID == ([16]byte{}) {
		t.Fatalf("%+v", id)
	}
	if _, err := Open(path, "test", 20*time.Millisecond); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), path) {
		t.Fatalf("a second user: %v", err)
	}
	_ = s.Close()
	if _, err := Open(path, "other", time.Second); !errors.Is(err, base.ErrForeign) {
		t.Fatalf("another kind: %v", err)
	}
	if err := Create(path, Identity{}); !errors.Is(err, base.ErrExists) {
		t.Fatalf("made twice: %v", err)
	}
	if _, err := Open(path+"x", "test", time.Second); !errors.Is(err, base.ErrNotFound) || !strings.Contains(err.Error(), path+"x") {
		t.Fatalf("missing: %v", err)
	}
	if err := s.Commit(nil); !errors.Is(err, base.ErrClosed) {
		t.Fatalf("closed: %v", err)
	}
}

// Whatever happens to the file, Open and Load never panic and never give less
// than was written without an error.
func TestDamage(t *testing.T) {
	path, s := newStore(t)
	var batch []store.Change
	for i := range 2000 {
		batch = append(batch, store.Change{Bucket: "rows", Key: fmt.Sprintf("key-%06d", i), Value: []byte(strings.Repeat("v", 30+i%50))})
	}
	for i := 0; i < len(batch); i += 500 {
		if err := s.Commit(batch[i : i+500]); err != nil {
			t.Fatal(err)
		}
	}
	want := content(t, s)
	_ = s.Close()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// What lies behind the last used page is not the store.
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	used := uint64(0)
	for _, at := range metaPlaces() {
		if m, ok := readMeta(f, at); ok {
			used = max(used, m.pages*uint64(m.pageSize))
		}
	}
	good = good[:used]
	try := func(t *testing.T, what string, b []byte) (noticed bool) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "damaged.db")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(file, "test", time.Second)
		if err != nil {
			if !strings.Contains(err.Error(), file) {
				t.Errorf("%s: the error does not name the file: %v", what, err)
			}
			return true
		}
		defer func() { _ = s.Close() }()
		if got := content(t, s); !maps.Equal(got, want) {
			t.Errorf("%s: %d rows instead of %d, and no error", what, len(got), len(want))
		}
		return false
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	noticed := 0
	for i := range 60 {
		b := append([]byte(nil), good...)
		switch i % 3 {
		case 0: // truncated
			b = b[:r.IntN(len(b))]
		case 1: // one page blank, another's or random
			p := 4096 * (2 + r.IntN(len(b)/4096-2))
			switch r.IntN(3) {
			case 0:
				clear(b[p : p+4096])
			case 1:
				copy(b[p:p+4096], good[4096*r.IntN(len(good)/4096):][:4096])
			default:
				for j := range 4096 {
					b[p+j] = byte(r.Uint32())
				}
			}
		default: // one bit
			b[8192+r.IntN(len(b)-8192)] ^= 1 << r.IntN(8)
		}
		if try(t, fmt.Sprint("case ", i), b) {
			noticed++
		}
	}
	if noticed < 15 {
		t.Errorf("only %d of 60 damages were noticed: does this test still hit what is used?", noticed)
	}
	for _, b := range [][]byte{{}, []byte("hello"), make([]byte, 1<<16)} {
		if !try(t, fmt.Sprintf("%d bytes", len(b)), b) {
			t.Errorf("%d bytes pass for a store", len(b))
		}
	}
}

func BenchmarkCommit(b *testing.B) {
	_, s := newStore(b)
	i := 0
	for b.Loop() {
		i++
		if err := s.Commit([]store.Change{{Bucket: "x", Key: fmt.Sprint(i % 10000), Value: make([]byte, 150)}}); err != nil {
			b.Fatal(err)
		}
	}
}
