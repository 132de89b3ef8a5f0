package base

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestKeyParts(t *testing.T) {
	var d Digest
	for i := range d {
		d[i] = byte(i + 1)
	}
	k := MakeKey(d, 0x1234, PartAllLayers)
	if k.Digest() != d || k.Shard() != 0x1234 || k.Part() != PartAllLayers || k.IsZero() {
		t.Fatalf("parts of %x: %x %d %d", k, k.Digest(), k.Shard(), k.Part())
	}
	// The bytes are the format: little-endian behind the digest.
	if got := hex.EncodeToString(k[28:]); got != "3412ffff" {
		t.Errorf("shard and part are %s", got)
	}
	if w := k.WithShard(7); w.Shard() != 7 || w.Digest() != d || w.Part() != k.Part() || k.Shard() != 0x1234 {
		t.Errorf("WithShard gave %x and left %x", w, k)
	}
	if strings.Contains(k.String(), hex.EncodeToString(d[:])) {
		t.Errorf("%s shows the whole digest", k)
	}
}

func TestGenerationAndOrder(t *testing.T) {
	g := MakeGeneration(0xffffff, 0xfffffffe)
	if g.High() != 0xffffff || g.Counter() != 0xfffffffe || g.String() != "16777215.4294967294" {
		t.Errorf("generation %s", g)
	}
	o, err := MakeCommitOrder(5, 9)
	if err != nil || o.Owner() != 5 || o.Counter() != 9 {
		t.Fatalf("order %d, %v", o, err)
	}
	later, _ := MakeCommitOrder(6, 0)
	if later <= o {
		t.Error("a newer owner incarnation must order behind every older commit")
	}
	last, err := MakeCommitOrder(MaxIncarnation, MaxCommitCounter)
	if err != nil || last.Owner() != MaxIncarnation || last.Counter() != MaxCommitCounter {
		t.Errorf("last order %d, %v", last, err)
	}
	for _, bad := range []struct {
		owner   Incarnation
		counter uint64
	}{{MaxIncarnation + 1, 0}, {0, MaxCommitCounter + 1}} {
		if _, err := MakeCommitOrder(bad.owner, bad.counter); !errors.Is(err, ErrExhausted) {
			t.Errorf("order %v: %v, must be refused and never wrap", bad, err)
		}
	}
}

func TestIDs(t *testing.T) {
	a, b := NewID(), NewID()
	if a == b {
		t.Error("two new ids are equal")
	}
	text := PoolID(a).String()
	back, err := ParseID(text)
	if err != nil || back != a {
		t.Errorf("%s reads as %x, %v", text, back, err)
	}
	if back, err = ParseID(strings.ReplaceAll(text, "-", "")); err != nil || back != a {
		t.Errorf("without dashes: %x, %v", back, err)
	}
	for _, bad := range []string{"", "12", text + "0", strings.Repeat("z", 32)} {
		if _, err := ParseID(bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseID(%q): %v", bad, err)
		}
	}
	if _, err := IDFromBytes("pool_id", a[:15]); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "pool_id") {
		t.Errorf("15 bytes: %v", err)
	}
	if got, err := IDFromBytes("pool_id", a[:]); err != nil || got != a {
		t.Errorf("16 bytes: %x, %v", got, err)
	}
}

func TestExtents(t *testing.T) {
	e := Extent{Offset: 10, Length: 5}
	for _, c := range []struct {
		o                  Extent
		overlaps, contains bool
	}{
		{Extent{15, 1}, false, false},
		{Extent{9, 1}, false, false},
		{Extent{14, 1}, true, true},
		{Extent{9, 2}, true, false},
		{Extent{10, 5}, true, true},
		{Extent{8, 20}, true, false},
	} {
		if e.Overlaps(c.o) != c.overlaps || c.o.Overlaps(e) != c.overlaps || e.Contains(c.o) != c.contains {
			t.Errorf("%s and %s: overlaps %t, contains %t", e, c.o, e.Overlaps(c.o), e.Contains(c.o))
		}
	}
}

func TestEnumsReadWhatTheyShow(t *testing.T) {
	for _, m := range []Medium{MediumCPU, MediumCXL, MediumSSD} {
		if got, err := ParseMedium(m.String()); err != nil || got != m {
			t.Errorf("%s reads as %s, %v", m, got, err)
		}
	}
	for _, c := range []Coherence{CoherenceHardware, CoherenceSoftware} {
		if got, err := ParseCoherence(c.String()); err != nil || got != c {
			t.Errorf("%s reads as %s, %v", c, got, err)
		}
	}
	for _, bad := range []string{"", "none", "unknown", "CPU"} {
		if _, err := ParseMedium(bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("medium %q: %v", bad, err)
		}
		if _, err := ParseCoherence(bad); !errors.Is(err, ErrInvalid) {
			t.Errorf("coherence %q: %v", bad, err)
		}
	}
	if s := Medium(9).String(); s != "medium(9)" {
		t.Errorf("an unknown medium shows as %s", s)
	}
}

// Codes are on the wire and in the C ABI: a number never changes its meaning.
func TestCodesAreStable(t *testing.T) {
	want := []string{
		"ok", "invalid", "not found", "exists", "full", "limit", "refused for good", "stale", "fenced", "denied", "busy",
		"unavailable", "outcome unknown", "aborted", "retired", "pinned", "corrupt", "mismatch", "unsupported", "exhausted",
		"closed", "timed out", "memory fault", "draining", "used after fork", "internal error", "foreign", "offline", "pending",
		"miss", "already present", "owner not proved",
	}
	for i, text := range want {
		c := Code(i) //nolint:gosec // a small index
		if c.String() != text {
			t.Errorf("code %d is %q, was %q", i, c, text)
		}
		if err := ErrorOf(c); CodeOf(err) != c {
			t.Errorf("code %d comes back as %d", i, CodeOf(err))
		}
	}
	if len(sentinels) != len(want)-1 {
		t.Errorf("%d sentinels for %d codes", len(sentinels), len(want)-1)
	}
}

func TestCodeOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want Code
	}{
		{nil, CodeOK},
		{fmt.Errorf("op: %w", ErrFull), CodeFull},
		{fmt.Errorf("%w: %w", ErrTimeout, context.DeadlineExceeded), CodeTimeout},
		{context.DeadlineExceeded, CodeTimeout},
		{context.Canceled, CodeAborted},
		{errors.New("foreign"), CodeInternal},
		{Errorf(CodePinned, "peer says so"), CodePinned},
		{Errorf(9999, "newer"), CodeInternal},
	} {
		if got := CodeOf(c.err); got != c.want {
			t.Errorf("CodeOf(%v) = %d, want %d", c.err, got, c.want)
		}
	}
	if err := Errorf(CodePinned, "maru: pinned: key x"); err.Error() != "maru: pinned: key x" || !errors.Is(err, ErrPinned) {
		t.Errorf("a peer's text became %v", err)
	}
	if Errorf(CodeOK, "text") != nil || !errors.Is(Errorf(CodeBusy, ""), ErrBusy) {
		t.Error("success is no error, and an error needs no text")
	}
}
