package rm

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/rpc"
)

// rmSubject is a resource manager whose file calls fail.
func rmSubject(ctx context.Context, options json.RawMessage, in io.Reader, say func(any)) error {
	var cfg Config
	if err := json.Unmarshal(options, &cfg); err != nil {
		return err
	}
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	return inject.Run(in, say, func() (func() error, error) {
		s, err := Start(ctx, cfg)
		if err != nil {
			return nil, err
		}
		return s.Close, nil
	})
}

// told is what a resource manager acknowledged before it stopped.
type told struct {
	incarnation uint32
	live        map[uint64]*maruv1.AllocateResponse // by operation
	freed       []uint64
}

// work makes the calls of a server and a mapper, and takes down what was acknowledged.
// Calls that fail are tried once more: the fault is over, or goes on.
func work(t *testing.T, r *inject.Round, address string, id []byte) told {
	out := told{live: map[uint64]*maruv1.AllocateResponse{}}
	conn, err := rpc.NewClient(address, rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	c := maruv1.NewResourceManagerClient(conn)
	twice := func(call func(ctx context.Context) error) bool {
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			err := r.See(call(ctx))
			cancel()
			if err == nil {
				return true
			}
		}
		return false
	}
	o := owner{id: id}
	if !twice(func(ctx context.Context) error {
		r, err := c.StartOwner(ctx, &maruv1.StartOwnerRequest{OwnerId: id, Name: "test", OwnerSecret: secretOf(id)})
		if err == nil {
			o.inc, o.token, out.incarnation = r.GetIncarnation(), r.GetOwnerToken(), r.GetIncarnation()
		}
		return err
	}) {
		return out
	}
	for op := range uint64(3) {
		twice(func(ctx context.Context) error {
			a, err := c.Allocate(ctx, small(o, op+1))
			if err == nil {
				out.live[op+1] = a
			}
			return err
		})
	}
	session := newID()
	if a := out.live[1]; a != nil {
		sequence := uint64(0)
		held := twice(func(ctx context.Context) error {
			sequence++
			_, err := c.Hold(ctx, &maruv1.HoldRequest{
				SessionId: session, ServerId: o.id, OwnerIncarnation: o.inc, Sequence: sequence, Handles: []*maruv1.RegionHandle{a.GetHandle()},
			})
			return err
		})
		if held {
			twice(func(ctx context.Context) error {
				sequence++
				_, err := c.Unhold(ctx, &maruv1.UnholdRequest{SessionId: session, Sequence: sequence, Handles: []*maruv1.RegionHandle{a.GetHandle()}})
				return err
			})
		}
	}
	if a := out.live[2]; a != nil {
		delete(out.live, 2) // whatever is answered now, it may be gone
		if twice(func(ctx context.Context) error {
			_, err := c.Free(ctx, &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()})
			return err
		}) {
			out.freed = append(out.freed, 2)
		}
	}
	return out
}

// Each file, mapping and lock call of a resource manager fails once, from its first start
// on: it is seen, nothing that was acknowledged is lost, nothing is left open, and with
// the fault gone everything works again (W1, E1).
func TestEachFileCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("some hundred processes")
	}
	inject.Walk(t, mayFail, func(t *testing.T, r *inject.Round) {
		f := newFixture(t)
		f.cfg.Pools[0].SizeBytes = 16 << 20
		cfg := f.cfg
		cfg.Logger = nil
		p := inject.StartOrSkip(t, inject.Options{Subject: "rm", Options: cfg, Under: []string{f.cfg.Node.Dir, "/proc/sys/kernel/random"}, Fault: r.Fault})
		r.Process = p
		ready, err := p.Await()
		if err != nil {
			t.Fatal(err)
		}
		id := newID()
		var acknowledged told
		end := ready.End
		if ready.Ready {
			acknowledged = work(t, r, "unix:"+f.cfg.UnixPath, id)
			p.CloseInput()
			e, err := p.Await()
			if err != nil {
				t.Fatal(err)
			}
			end = e.End
		}
		r.Surfaced = r.Surfaced || end.Start != "" || end.Close != ""
		if len(end.Left) > 0 {
			what, _ := p.Hit()
			t.Errorf("%s: left open: %v", what, end.Left)
		}
		p.Release()
		verifyTold(t, f, id, acknowledged)
	})
}

// verifyTold starts a resource manager without faults on what the other one left.
func verifyTold(t *testing.T, f *fixture, id []byte, k told) {
	t.Helper()
	s, err := Start(t.Context(), f.cfg)
	if err != nil {
		t.Fatalf("a start without faults: %v", err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}()
	c := client(t, over(s))
	list, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	listed := map[uint64]*maruv1.RegionInfo{}
	var extents []base.Extent
	for _, x := range list.GetRegions() {
		listed[x.GetOperation()] = x
		e := base.Extent{Offset: x.GetPlace().GetOffset(), Length: x.GetPlace().GetExtentLength()}
		for _, other := range extents {
			if e.Overlaps(other) {
				t.Errorf("regions %s and %s overlap", e, other)
			}
		}
		extents = append(extents, e)
	}
	for op, a := range k.live {
		if x := listed[op]; x == nil || x.GetPlace().GetOffset() != a.GetPlace().GetOffset() {
			t.Errorf("acknowledged allocation %d at %d is lost: %v", op, a.GetPlace().GetOffset(), x)
		}
	}
	for _, op := range k.freed {
		if x := listed[op]; x != nil {
			t.Errorf("allocation %d was freed with an acknowledgement and is there: %v", op, x)
		}
	}
	o := startOwner(t, c, id)
	if o.inc <= k.incarnation {
		t.Errorf("incarnation %d after %d", o.inc, k.incarnation)
	}
	if _, err := c.Allocate(ctxOf(t), small(o, 100)); err != nil {
		t.Errorf("an allocation without faults: %v", err)
	}
}

// mayFail says which calls a resource manager goes on without, and why.
func mayFail(what string) string {
	for _, x := range []struct{ call, path, why string }{
		{"fstat ", "boot_id", "the size is a hint to the reader"},
		{"fstat ", "/secret", "as above"},
		{"fstat ", "/format", "as above"},
		{"fstatat ", "", "names are looked at before they are made or replaced, which then fails by itself"},
		{"unlinkat ", ".node-id-", "a file that was linked under its name keeps a second one"},
		{"unlinkat ", ".new", "what is aside is made anew by the next start"},
		{"pread ", "/rm.db", "of the places where a meta page may lie the others are read; bbolt reads them again"},
		{"statx ", "", "without an answer a file is no dax file"},
		{"fstatfs ", "/#", "the standard library asks for the kind of the file system"},
		{"fstat ", ".sock.lock", "what is in a socket's lock file is for people"},
		{"ftruncate ", ".sock.lock", "as above"},
		{"pwrite ", ".sock.lock", "as above"},
		{"unlinkat ", ".sock", "the next start takes a socket over that nobody serves"},
	} {
		if strings.Contains(what, ", "+x.call) && strings.Contains(what, x.path) {
			return x.why
		}
	}
	return ""
}
