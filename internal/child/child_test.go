package child

import (
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

func sh(t *testing.T, script string, log io.Writer) *Process {
	t.Helper()
	p, err := Start("shell", exec.Command("sh", "-c", script), log)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestOrdersAndAnswers(t *testing.T) {
	var log strings.Builder
	p := sh(t, `echo a note >&2; while read -r line; do echo "$line"; done`, &log)
	for _, want := range []string{"one", "two"} {
		if err := p.Send(want); err != nil {
			t.Fatal(err)
		}
		var got string
		if err := p.Next(&got); err != nil || got != want {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if log.String() != "a note\n" {
		t.Errorf("log %q", log.String())
	}
	var v any
	if err := p.Next(&v); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	p.End() // once more does no harm
}

func TestFailureShowsTheLog(t *testing.T) {
	p := sh(t, `echo because >&2; exit 3`, nil)
	err := p.Close()
	if err == nil || !strings.Contains(err.Error(), "because") || !strings.Contains(err.Error(), "shell") {
		t.Errorf("%v", err)
	}
	if _, err := Start("none", exec.Command("no-such-program-anywhere"), nil); err == nil {
		t.Error("a program that is not there was started")
	}
}

func TestKilledChildHasSaidSomething(t *testing.T) {
	p := sh(t, `echo '"said"'; exec sleep 100`, nil)
	var got string
	if err := p.Next(&got); err != nil || got != "said" {
		t.Fatalf("%q, %v", got, err)
	}
	p.End()
	if err := p.Wait(); err == nil {
		t.Error("it ended by itself")
	}
}

func TestTailKeepsTheEnd(t *testing.T) {
	var l Tail
	for range 3 {
		_, _ = l.Write([]byte(strings.Repeat("x", tailBytes)))
	}
	_, _ = l.Write([]byte("the end\n"))
	if s := l.String(); len(s) > tailBytes || !strings.HasSuffix(s, "xthe end") {
		t.Errorf("%d bytes, end %q", len(s), s[len(s)-10:])
	}
}
