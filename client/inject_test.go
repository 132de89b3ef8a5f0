package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/inject"
)

// clientJob is what the subject's client does: it stores keys, and reads one of another.
type clientJob struct {
	Server  string
	Keys    []int
	Foreign int
}

// clientReport is what it was told.
type clientReport struct {
	Open   string // why there is no session
	Stored []int  // keys
	Failed int    // stores, loads and views that were not what they should be
	Wrong  int    // loads and views with wrong bytes
}

const injectBytes = 100 << 10

// clientSubject is a client whose file, mapping and memory calls fail.
func clientSubject(ctx context.Context, options json.RawMessage, in io.Reader, say func(any)) error {
	var job clientJob
	if err := json.Unmarshal(options, &job); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	return inject.Run(in, say, func() (func() error, error) {
		c, err := Open(ctx, Config{
			ServerAddress: job.Server, Opaque: true, PageBytes: testPage, CPUBytes: 2 * testPage, SegmentBytes: testPage,
			RegionBytes: testPage, ExpandBytes: testPage, CXLBytes: 4 * testPage, Logger: log, RPCTimeout: 5 * time.Second,
			WriteOrder: []base.Medium{base.MediumCXL}, Overcommit: On,
		})
		if err != nil {
			return nil, err
		}
		say(job.play(ctx, c))
		return func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			return c.Close(ctx)
		}, nil
	})
}

func (j clientJob) play(ctx context.Context, c *Client) (r clientReport) {
	codes := make([]base.Code, 1)
	for _, k := range j.Keys {
		for range 2 { // what failed is tried once more
			err := c.Store(ctx, []StoreItem{{Key: key(k), Runs: [][]byte{value(k, injectBytes)}}}, codes)
			if err == nil && (codes[0] == base.CodeOK || codes[0] == base.CodeAlreadyStored) {
				r.Stored = append(r.Stored, k)
				break
			}
			r.Failed++
		}
	}
	for _, k := range append([]int{j.Foreign}, r.Stored...) {
		dst := make([]byte, injectBytes)
		switch err := c.Load(ctx, []LoadItem{{Key: key(k), Runs: [][]byte{dst}}}, codes); {
		case err != nil || codes[0] != base.CodeOK:
			r.Failed++
		case !bytes.Equal(dst, value(k, injectBytes)):
			r.Wrong++
		}
	}
	var view [1]View
	err := c.Retrieve(ctx, hot.AppendKeys(nil, []base.Key{key(j.Foreign)}), hot.ModeEach, view[:])
	switch {
	case err != nil || view[0].ID == 0:
		r.Failed++
	case !bytes.Equal(view[0].Bytes, value(j.Foreign, injectBytes)):
		r.Wrong++
	}
	c.ReleaseViews([]uint64{view[0].ID})
	return r
}

// Each file, mapping and memory call of a client fails once: it is a session that was not
// opened, a store that was refused or a miss, never a wrong byte; what was stored can be
// read by others, and nothing is left open.
func TestEachFileCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("some dozens of processes")
	}
	l := startLab(t, 256<<20)
	other := open(t, l.config())
	const foreign = 900
	want(t, "store", storeOne(t, other, foreign, value(foreign, injectBytes)), base.CodeOK)
	next := 1000
	inject.Walk(t, func(what string) string {
		switch {
		case strings.Contains(what, ", fstat "):
			return "the size is a hint to the reader"
		case strings.Contains(what, "node-id"), strings.Contains(what, "product_uuid"):
			return "another place has it, or it is optional"
		case strings.Contains(what, ", statx "):
			return "without an answer a file is no dax file"
		case strings.Contains(what, ", fstatfs "):
			return "the standard library asks for the kind of the file system"
		}
		return ""
	}, func(t *testing.T, r *inject.Round) {
		job := clientJob{Server: "unix:" + l.srv.UnixPath(), Foreign: foreign}
		for range 3 { // a region each
			job.Keys = append(job.Keys, next)
			next++
		}
		p := inject.StartOrSkip(t, inject.Options{
			Subject: "client", Options: job, Fault: r.Fault, Under: []string{l.path, "/proc/sys/kernel/random", "/var/lib/maru", "/memfd:"},
		})
		r.Process = p
		var report clientReport
		line, err := p.Line()
		if err != nil {
			t.Fatal(p.Failure(err))
		}
		var first inject.Ready
		if err := errors.Join(json.Unmarshal(line, &report), json.Unmarshal(line, &first)); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		end := first.End
		if first.Start == "" {
			if ready, err := p.Await(); err != nil || !ready.Ready {
				t.Fatal(ready, err)
			}
			readByOther(t, other, report)
			p.CloseInput()
			e, err := p.Await()
			if err != nil {
				t.Fatal(err)
			}
			end = e.End
		}
		r.Surfaced = end.Start != "" || end.Close != "" || report.Failed > 0
		if report.Wrong > 0 {
			t.Errorf("%d loads with wrong bytes", report.Wrong)
		}
		if len(end.Left) > 0 {
			what, _ := p.Hit()
			t.Errorf("%s: left open: %v", what, end.Left)
		}
		p.Release()
	})
}

// readByOther reads what the subject was told is stored.
func readByOther(t *testing.T, other *Client, r clientReport) {
	t.Helper()
	for _, k := range r.Stored {
		dst := make([]byte, injectBytes)
		switch code := loadOne(t, other, k, dst); {
		case code != base.CodeOK:
			t.Errorf("key %d was stored and is %v", k, code)
		case !bytes.Equal(dst, value(k, injectBytes)):
			t.Errorf("key %d: wrong bytes", k)
		}
	}
}
