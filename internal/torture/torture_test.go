package torture

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
	"github.com/xcena-dev/maru/internal/store/bolt"
)

// TestMain makes the test program a process of a run when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		var run func(context.Context) error
		switch os.Args[1] {
		case WorkerCommand:
			run = func(ctx context.Context) error { return RunWorker(ctx, os.Args[2], os.Stdin, os.Stdout) }
		case DaemonCommand:
			run = func(ctx context.Context) error { return RunDaemon(ctx, os.Args[2], os.Stdin, os.Stdout) }
		}
		if run != nil {
			if err := run(context.Background()); err != nil {
				_, _ = os.Stderr.WriteString(err.Error() + "\n")
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

// A short run finds nothing, gives everything back and leaves nothing behind.
func TestShortRun(t *testing.T) {
	if testing.Short() {
		t.Skip("a run of some seconds with processes")
	}
	parent := t.TempDir()
	r, err := Run(t.Context(), Config{Duration: 8 * time.Second, Seed: 3, Workers: 3, Parent: parent, Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	if !r.OK || r.Counts.Loads == 0 || r.PoolBytes == 0 {
		t.Errorf("%d problems: %s", r.ProblemSum, strings.Join(r.Problems, "\n"))
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) != 0 {
		t.Errorf("a run that found nothing left %v, %v", left, err)
	}
	var out strings.Builder
	if err := r.Print(&out); err != nil || !strings.Contains(out.String(), "wrong bytes") {
		t.Errorf("table %v:\n%s", err, out.String())
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, c := range []Config{{Workers: 1}, {Workers: 65}, {Duration: time.Millisecond}, {Pool: "1M"}, {Pool: "x"}, {Pool: "/no/such/pool"}} {
		c.Parent = t.TempDir()
		if _, err := Run(t.Context(), c); !errors.Is(err, base.ErrInvalid) && !errors.Is(err, base.ErrNotFound) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestContentTellsStoresApart(t *testing.T) {
	const page = 8 << 10
	key, g := uint32(7), makeGeneration(3, 9)
	b := make([]byte, lengthOf(key, page))
	fill(b, key, g, nil)
	if got, wrong := inspect(b, key); got != g || wrong != 0 {
		t.Fatalf("generation %x with %d wrong bytes in what fill wrote", got, wrong)
	}
	other := append([]byte(nil), b...)
	fill(other, key, makeGeneration(3, 10), nil)
	torn := append(append([]byte(nil), b[:len(b)/2]...), other[len(b)/2:]...)
	if _, wrong := inspect(torn, key); wrong < len(b)/3 {
		t.Errorf("a torn value has %d wrong bytes only", wrong)
	}
	b[100] ^= 1
	if _, wrong := inspect(b, key); wrong != 1 {
		t.Errorf("%d wrong bytes, 1 was changed", wrong)
	}
	b[100] ^= 1
	if _, wrong := inspect(b, 8); wrong < 8 {
		t.Errorf("the value of another key has %d wrong bytes only", wrong)
	}
	if _, wrong := inspect(nil, key); wrong == 0 {
		t.Error("nothing passes for a value")
	}
	for k := range uint32(5000) {
		if n := lengthOf(k, page); n < headerBytes || n > page || n%8 != 0 {
			t.Fatalf("key %d has length %d", k, n)
		}
	}
}

// The judge must find what it is there for, in whatever order it hears of it, and nothing else.
func TestJudge(t *testing.T) {
	g := makeGeneration(1, 1)
	at := func(a, b time.Duration) interval { return interval{a * time.Second, b * time.Second} }
	stored := func(j *judge) { j.stored(5, g, at(1, 2)) }
	seenEarly := func(j *judge) { j.loaded(5, g, at(2, 3), 2) }
	deleted := func(j *judge) { j.deleted(5, at(4, 6)) }
	beside := func(j *judge) { j.loaded(5, g, at(5, 8), 2) } // began before the acknowledgement
	after := func(j *judge) { j.loaded(5, g, at(7, 8), 2) }
	again := func(j *judge) { j.stored(5, makeGeneration(1, 2), at(5, 7)) } // may follow the delete
	seenAgain := func(j *judge) { j.loaded(5, makeGeneration(1, 2), at(9, 10), 2) }
	for name, c := range map[string]struct {
		steps []func(*judge)
		want  int
	}{
		"good":                      {[]func(*judge){stored, seenEarly, deleted, beside, again, seenAgain}, 0},
		"good, heard late":          {[]func(*judge){seenAgain, again, beside, deleted, seenEarly, stored}, 0},
		"read after delete":         {[]func(*judge){stored, deleted, after}, 1},
		"heard backwards":           {[]func(*judge){after, deleted, stored}, 1},
		"killed writer, seen early": {[]func(*judge){after, deleted, seenEarly}, 1},
		"commit not known":          {[]func(*judge){deleted, after}, 0},
		"nobody stored it":          {[]func(*judge){func(j *judge) { j.loaded(5, makeGeneration(9, 1), at(1, 2), 2) }}, 1},
		"another key's":             {[]func(*judge){stored, func(j *judge) { j.loaded(6, g, at(3, 4), 2) }}, 1},
		"wrong bytes":               {[]func(*judge){func(j *judge) { j.count(Counts{WrongBytes: 1}) }}, 1},
	} {
		j := newJudge()
		j.started(2)
		for _, s := range c.steps {
			s(j)
		}
		if list, n := j.findings(); n != c.want {
			t.Errorf("%s: %d findings %q, want %d", name, n, list, c.want)
		}
	}
}

func TestLinesComeThrough(t *testing.T) {
	var out bytes.Buffer
	s := newSpeaker(3, &out)
	s.ready()
	g := makeGeneration(3, 1)
	s.say(func(c *Counts) { c.Stores++ }, 'S', 5, uint64(g), 10, 20)
	s.say(func(c *Counts) { c.Loads++ }, 'L', 5, uint64(g), 30, 40)
	s.say(func(c *Counts) { c.Deletes++ }, 'D', 5, 21, 25)
	s.say(func(c *Counts) { c.Forks++ }, 'F', 77)
	s.say(nil, 'U')
	s.wrong("two\nlines")
	s.answer(answerLine{Order: "rest", Left: 1})
	j := newJudge()
	j.started(3)
	var pid, ready, untold int
	var texts []string
	var answer answerLine
	h := heard{
		ready: func() { ready++ }, count: j.count, wrong: func(s string) { texts = append(texts, s) }, forked: func(p int) { pid = p },
		answer: func(a answerLine) { answer = a }, untold: func() { untold++ },
	}
	for l := range bytes.Lines(out.Bytes()) {
		if err := j.hear(bytes.TrimSpace(l), 3, h); err != nil {
			t.Errorf("%q: %v", l, err)
		}
	}
	if c := j.counts(); c.Stores != 1 || c.Loads != 1 || c.Deletes != 1 || c.Forks != 1 || ready != 1 || untold != 1 || pid != 77 || len(texts) != 1 || answer.Left != 1 {
		t.Errorf("%+v, ready %d, pid %d, %q, %+v", c, ready, pid, texts, answer)
	}
	if _, n := j.findings(); n != 1 {
		t.Errorf("%d findings; the delete from 21 to 25 was read at 30", n)
	}
	for _, l := range []string{"", "S 1 2", "S a b c d", "Q", "C {", "A 1x"} {
		if err := j.hear([]byte(l), 3, h); err == nil {
			t.Errorf("line %q is taken", l)
		}
	}
}

func TestLogShowsBugs(t *testing.T) {
	j := newJudge()
	l, err := newLog(t.TempDir(), "x", j)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []string{"all is well\n", "recovered from a bug; ple", "ase report this\n", "maru: invariant R3: broken\n"} {
		if _, err := l.Write([]byte(b)); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.close(); err != nil {
		t.Error(err)
	}
	if list, n := j.findings(); n != 2 {
		t.Errorf("%d findings: %q", n, list)
	}
}

// The store of the torture fails as it is told, and nothing is lost by it.
func TestFailingStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	if err := bolt.Create(path, bolt.Identity{Kind: "test", ID: base.NewID()}); err != nil {
		t.Fatal(err)
	}
	b, err := bolt.Open(path, "test", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close() }()
	s := &failingStore{Store: b}
	commit := func(key string) error {
		return s.Commit([]store.Change{{Bucket: "b", Key: key, Value: []byte("v")}})
	}
	for _, kind := range []faultKind{faultFull, faultIO, faultFile} {
		s.set(storeFault{Kind: kind, Count: 1})
		if err := commit(string(kind)); !errors.Is(err, base.ErrUnavailable) {
			t.Errorf("%s: %v", kind, err)
		}
		if err := commit(string(kind)); err != nil {
			t.Errorf("%s: the commit behind it: %v", kind, err)
		}
	}
	n := 0
	if err := s.Load(func(string, string, []byte) error { n++; return nil }); err != nil || n != 3 {
		t.Errorf("%d rows, %v", n, err)
	}
}

func TestSeriesThatGrow(t *testing.T) {
	x := &samples{byRole: map[string][]sample{}}
	for i := range 90 {
		s := sample{at: time.Duration(i) * time.Second, memory: 10 << 20, descriptors: 20, mappings: 50}
		if i > 60 {
			s.descriptors = 60
		}
		x.byRole["server"] = append(x.byRole["server"], s)
	}
	x.byRole["young"] = x.byRole["server"][:5]
	grown := 0
	for _, s := range x.compare(90 * time.Second) {
		if s.Role != "server" {
			t.Errorf("%s has too few samples", s.Role)
		}
		if s.grew() {
			grown++
			if s.What != "open_files" {
				t.Errorf("%+v", s)
			}
		}
	}
	if grown != 1 {
		t.Errorf("%d series grew, one did", grown)
	}
	if s, err := look(os.Getpid()); err != nil || s.memory == 0 || s.descriptors == 0 || s.mappings == 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
