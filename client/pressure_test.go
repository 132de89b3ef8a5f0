package client

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/obs/obstest"
)

// A reader that never gives its views back comes to the bound of its leases: it is told so,
// its loads are misses, and nobody else notices. What it holds cannot be deleted, and comes
// back with its release.
func TestRealViewsAreNeverDropped(t *testing.T) {
	l := startLab(t, 64<<20)
	l.stop()
	const most = 16
	l.cfg.Limits.MaxLeases = most
	l.start()
	log := &obstest.Text{}
	cfg := l.config()
	writer := open(t, cfg)
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	reader := open(t, cfg)
	for i := range most + 4 {
		want(t, "store", storeOne(t, writer, i, value(i, 5000)), base.CodeOK)
	}
	var ids []uint64
	views := make([]View, 1)
	for i := range most {
		if err := reader.Retrieve(t.Context(), keysOf(i), hot.ModeEach, views); err != nil || views[0].ID == 0 {
			t.Fatal(i, err)
		}
		ids = append(ids, views[0].ID)
	}
	for range 50 {
		if err := reader.Retrieve(t.Context(), keysOf(most), hot.ModeEach, views); err != nil || views[0].ID != 0 {
			t.Fatalf("one view more: %v, %+v", err, views)
		}
	}
	dst := make([]byte, 5000)
	want(t, "a load of the reader", loadOne(t, reader, most, dst), base.CodeMiss)
	want(t, "a load of another", loadOne(t, writer, most, dst), base.CodeOK)
	codes := make([]base.Code, 1)
	if err := writer.Delete(t.Context(), keysOf(3), codes); err != nil {
		t.Fatal(err)
	}
	want(t, "delete under a view", codes[0], base.CodePinned)
	if text := log.String(); strings.Count(text, "max_leases") != 1 || strings.Count(text, "\n") > 5 {
		t.Errorf("log:\n%s", text)
	}
	if s := reader.Stats(); s.MissesRefused != 51 || s.MissesAway != 0 {
		t.Errorf("%+v", s)
	}
	reader.ReleaseViews(ids)
	eventually(t, "a load of the reader", func() bool { return loadOne(t, reader, most, dst) == base.CodeOK })
	if !bytes.Equal(dst, value(most, 5000)) {
		t.Error("bytes differ")
	}
	eventually(t, "the delete", func() bool { return writer.Delete(t.Context(), keysOf(3), codes) == nil && codes[0] == base.CodeOK })
}

// More sessions than max-sessions: the next Open says which setting, and succeeds when one
// has closed.
func TestRealSessionLimit(t *testing.T) {
	l := startLab(t, 64<<20)
	l.stop()
	l.cfg.Limits.MaxSessions = 2
	l.start()
	cfg := l.config()
	a, _ := open(t, cfg), open(t, cfg)
	if _, err := Open(t.Context(), cfg); !errors.Is(err, base.ErrLimit) || !strings.Contains(err.Error(), "max-sessions") {
		t.Fatalf("a third session: %v", err)
	}
	if err := a.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	open(t, cfg)
}

// A pool that is smaller than one region of the client is refused at its start, by both
// sizes; one that has only grown full is not: its stores are skipped, and what others stored
// is read all the same.
func TestRealPoolIsTooSmall(t *testing.T) {
	l := startLab(t, 16<<20)
	writer := open(t, l.config())
	want(t, "store", storeOne(t, writer, 1, value(1, 5000)), base.CodeOK)
	cfg := l.config()
	cfg.RegionBytes, cfg.CXLBytes = 64<<20, 0
	if _, err := Open(t.Context(), cfg); !errors.Is(err, base.ErrPermanent) || !strings.Contains(err.Error(), "67108864") || !strings.Contains(err.Error(), "14680064") {
		t.Fatalf("a region larger than the pool: %v", err)
	}
	cfg.RegionBytes = 12 << 20 // fits the pool, and not what is free of it
	log := &obstest.Text{}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	big, err := Open(t.Context(), cfg)
	if err != nil {
		if !errors.Is(err, base.ErrFull) {
			t.Fatal(err)
		}
		return
	}
	t.Cleanup(func() { _ = big.Close(context.Background()) })
	for i := range 50 {
		want(t, "store without a region", storeOne(t, big, 2+i, value(2, 5000)), base.CodeFull)
	}
	dst := make([]byte, 5000)
	want(t, "load", loadOne(t, big, 1, dst), base.CodeOK)
	if s := big.Stats(); s.StoresFull != 50 || s.Regions != 0 {
		t.Errorf("%+v", s)
	}
	if text := log.String(); strings.Count(text, "\n") > 8 {
		t.Errorf("log:\n%s", text)
	}
}
