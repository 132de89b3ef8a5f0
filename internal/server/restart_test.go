package server

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// relistPages lists the committed pages of a region.
func relistPages(r *maruv1.ExpandResponse, keys []base.Key, results hot.CommitResults, firstCounter uint32) []byte {
	var pages []byte
	for i, k := range keys {
		pages = hot.AppendRelistPage(pages, &hot.RelistPage{
			CommitRow: hot.CommitRow{
				Key: k, Pool: r.GetPoolNumber(), Region: base.RegionID(r.GetHandle().GetRegionId()), Offset: uint64(i) * r.GetPlace().GetPageSize(),
				Length: r.GetPlace().GetPageSize(), Generation: base.MakeGeneration(r.GetHandle().GetIncarnation(), firstCounter+uint32(i)), Checksum: 1,
			},
			Order: results.At(i).Order, State: hot.RelistReady,
		})
	}
	return pages
}

// Rule "Server restart": the old epoch is fenced, sessions come back and list what
// they hold, and no page is free before every holder has opened here.
func TestServerRestart(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	rmAPI := l.rmClient()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	writer := newClient(t, s.UnixPath(), cxlRequest)
	writer.connect(s.HotUnixPath())
	l.prove(writer)
	reader := newClient(t, s.UnixPath(), cxlRequest)
	reader.connect(s.HotUnixPath())
	l.prove(reader)
	r := writer.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	l.hold(rmAPI, writer, false, 1, r.GetHandle())
	l.hold(rmAPI, reader, true, 1, r.GetHandle())
	keys := testKeyRange(0, 8)
	results := writer.commitKeys(r, r.GetHandle().GetIncarnation(), keys)
	if n := reader.probeHits(keys); n != 8 {
		t.Fatalf("%d hits", n)
	}
	oldCtx := writer.ctx()
	incarnation, id, epoch := writer.open.GetOwnerIncarnation(), s.ServerID(), s.Epoch()
	stopServer(t, s)

	s = startServer(t, l.cfg)
	waitReady(t, s)
	if s.ServerID() != id || s.Epoch() == epoch {
		t.Fatalf("server id %v was %v, epoch %x was %x", s.ServerID(), id, s.Epoch(), epoch)
	}
	for _, c := range []*client{writer, reader} {
		c.conn = dialControl(t, s.UnixPath())
		c.api = maruv1.NewMetadataServerClient(c.conn)
	}
	if _, err := writer.api.Heartbeat(oldCtx, &maruv1.HeartbeatRequest{Sequence: 99}); !errors.Is(err, base.ErrStale) {
		t.Errorf("a heartbeat of before the restart: %v", err)
	}
	tcp := maruv1.NewMetadataServerClient(dialControl(t, s.ControlAddress()))
	stolen := workerRequest(writer.id)
	cxlRequest(stolen)
	if _, err := tcp.Open(testContext(t), stolen); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a session of before the restart opened over TCP: %v", err)
	}
	if err := writer.reopen(cxlRequest); err != nil {
		t.Fatalf("reopen: %v", err)
	}
	if !writer.open.GetRelist() || writer.open.GetOwnerIncarnation() <= incarnation || writer.open.GetEpoch() != 2 {
		t.Fatalf("reopened: %v", writer.open)
	}
	writer.connect(s.HotUnixPath())
	l.prove(writer)
	if n := writer.probeHits(keys); n != 0 {
		t.Errorf("%d hits before anything was listed", n)
	}
	_, err := writer.hot.commit(&hot.CommitRequest{Operation: writer.next(), Namespace: base.NamespaceNumber(writer.open.GetNamespaceNumber())})
	if !errors.Is(err, base.ErrBusy) {
		t.Errorf("a commit before the list: %v", err)
	}
	a, err := writer.hot.relist(&hot.RelistRequest{Operation: writer.next(), Last: true, Pages: relistPages(r, keys, results, 1)})
	if err != nil || len(a.Results) != 8 || hot.RelistResult(a.Results[0]) != hot.RelistKept {
		t.Fatalf("relist: %v %v", a, err)
	}
	if u := s.usage(); u.Waiting != 1 {
		t.Errorf("%d regions wait, want 1: the reader's views are out", u.Waiting)
	}
	if done, err := s.sweepOnce(testContext(t)); err != nil {
		t.Errorf("sweep: %v %v", done, err)
	}
	// A live session keeps its hits: what it listed is found again, and is not stored twice.
	if n := writer.probeHits(keys); n != 8 {
		t.Errorf("%d hits of the listed pages", n)
	}
	r2 := writer.expand(maruv1.Medium_MEDIUM_CXL, 8, 65536)
	writer.counter = 100
	if n := writer.commitKeys(r2, r2.GetHandle().GetIncarnation(), keys); n.At(0).Code != base.CodeAlreadyStored || n.At(0).Order != results.At(0).Order {
		t.Fatalf("commit of a listed key: %+v, older %+v", n.At(0), results.At(0))
	}
	writer.counter = 200
	if n := writer.commitKeys(r2, r2.GetHandle().GetIncarnation(), testKeyRange(8, 9)); n.At(0).Code != base.CodeOK || n.At(0).Order <= results.At(7).Order {
		t.Fatalf("commit after the restart: %+v, older %+v", n.At(0), results.At(7))
	}
	if err := reader.reopen(cxlRequest); err != nil {
		t.Fatalf("the reader opens: %v", err)
	}
	reader.connect(s.HotUnixPath())
	l.prove(reader)
	if _, err := reader.hot.relist(&hot.RelistRequest{Operation: reader.next(), Last: true}); err != nil {
		t.Fatal(err)
	}
	if u := s.usage(); u.Waiting != 0 {
		t.Errorf("%d regions wait although everybody is back", u.Waiting)
	}
	if n := reader.probeHits(keys); n != 8 {
		t.Errorf("%d hits for the reader", n)
	}
	// Deleted, the listed pages come back one by one: retire, mark cleared, reclaim, free.
	deleted := make(chan error, 1)
	request := &maruv1.DeleteRequest{Operation: uint64(reader.next().Sequence), Keys: keyBytes(keys)}
	go func() {
		_, err := reader.api.Delete(reader.ctx(), request)
		deleted <- err
	}()
	drain(t, writer, 8)
	if err := <-deleted; err != nil {
		t.Errorf("delete: %v", err)
	}
	if u := s.usage(); u.Pools[0].QuarantinedBytes+u.Pools[0].RetiringBytes != 0 {
		t.Errorf("after reclaiming: %+v", u.Pools[0])
	}
}

// drain does what a client does of its events until want pages were reclaimed.
func drain(t *testing.T, c *client, want int) {
	t.Helper()
	var last uint64
	reclaimed := 0
	waitFor(t, "pages are reclaimed", func() bool {
		c.beat++
		h, err := c.api.Heartbeat(c.ctx(), &maruv1.HeartbeatRequest{Sequence: c.beat, LastEvent: last, Watermark: uint64(c.seq)})
		if err != nil {
			t.Fatalf("heartbeat: %v", err)
		}
		ack := &maruv1.AcknowledgeRequest{}
		for _, e := range h.GetEvents().GetEvents() {
			last = max(last, e.GetNumber())
			if p := e.GetRetire(); p != nil {
				ack.MarksCleared = append(ack.MarksCleared, p)
			}
			if p := e.GetReclaim(); p != nil {
				ack.Reclaimed = append(ack.Reclaimed, p)
				reclaimed++
			}
		}
		if _, err := c.api.Acknowledge(c.ctx(), ack); err != nil {
			t.Fatalf("acknowledge: %v", err)
		}
		return reclaimed >= want
	})
}

// Regions whose writers and holders have all gone while the server was down go back.
func TestRestartWithoutClients(t *testing.T) {
	l := newLab(t, 16<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	for range 3 {
		c.expand(maruv1.Medium_MEDIUM_CXL, 40, 65536) // never held
	}
	stopServer(t, s)
	s = startServer(t, l.cfg)
	waitReady(t, s)
	api := l.rmClient()
	waitFor(t, "the regions go back", func() bool {
		r, err := api.ListRegions(testContext(t), &maruv1.ListRegionsRequest{Limit: 100})
		if err != nil {
			t.Fatal(err)
		}
		return len(r.GetRegions()) == 0
	})
	fresh := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(fresh)
	for range 3 {
		fresh.expand(maruv1.Medium_MEDIUM_CXL, 40, 65536)
	}
}

// A newer incarnation of the same server id, started with its secret, fences this one.
func TestFenced(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	c.connect("")
	stream, err := c.api.Events(c.ctx(), &maruv1.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	id := s.ServerID()
	if _, err := l.rmClient().StartOwner(testContext(t), &maruv1.StartOwnerRequest{OwnerId: id[:], Name: "newer", OwnerSecret: s.state.secret.Bytes()}); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.Failed():
		if !errors.Is(err, base.ErrFenced) {
			t.Errorf("failed with %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("not fenced")
	}
	if status, body := httpGet(t, s, "/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "fenced") {
		t.Errorf("readyz: %d %q", status, body)
	}
	if status, _ := httpGet(t, s, "/healthz"); status != http.StatusOK {
		t.Errorf("healthz: %d", status)
	}
	if _, err := c.heartbeat(); !errors.Is(err, base.ErrFenced) {
		t.Errorf("heartbeat: %v", err)
	}
	if _, err := c.api.Open(testContext(t), workerRequest(base.NewID())); !errors.Is(err, base.ErrFenced) {
		t.Errorf("open: %v", err)
	}
	for {
		batch, err := stream.Recv()
		if err != nil {
			t.Fatalf("no fence event: %v", err)
		}
		if e := batch.GetEvents(); e[len(e)-1].GetFence() != nil {
			break
		}
	}
	if h, err := dialHot(s.HotAddress()); err == nil {
		defer h.close()
		if err := h.prove(c.id, base.Epoch(c.open.GetEpoch()), c.open.GetSecret(), nil); !errors.Is(err, base.ErrFenced) {
			t.Errorf("hello: %v", err)
		}
	}
}

// A copied state directory has the server's id but not its place: it must not count
// as the same directory.
func TestCopiedStateDirectory(t *testing.T) {
	dir := filepath.Dir(testConfig(t).StateDir)
	a, err := openStateDir(filepath.Join(dir, "a"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Close() }()
	if err := os.MkdirAll(filepath.Join(dir, "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{stateFile, secretFile} {
		bytes, err := os.ReadFile(filepath.Join(dir, "a", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "b", name), bytes, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b, err := openStateDir(filepath.Join(dir, "b"), "")
	if err != nil {
		t.Fatal(err)
	}
	_ = b.Close()
	if b.server != a.server || b.directory == a.directory {
		t.Errorf("copy: server %v of %v, directory equal: %v", b.server, a.server, b.directory == a.directory)
	}
	again, err := openStateDir(filepath.Join(dir, "b"), "named")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = again.Close() }()
	if again.directory != b.directory || again.name != "named" {
		t.Errorf("opened again: %+v", again)
	}
	if _, err := openStateDir(filepath.Join(dir, "b"), ""); !errors.Is(err, base.ErrBusy) {
		t.Errorf("opened twice: %v", err)
	}
}

// An operator's drop-owner ends a server, whether it is connected at that moment or not.
func TestDroppedOwner(t *testing.T) {
	for _, connected := range []bool{true, false} {
		l := newLab(t, 64<<20)
		l.startRM()
		s := startServer(t, l.cfg)
		waitReady(t, s)
		id := s.ServerID()
		if connected {
			if _, err := l.rmClient().DropOwner(testContext(t), &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true}); err != nil {
				t.Fatal(err)
			}
		} else {
			// The server cannot reach the resource manager where that now listens.
			if err := l.rm.Close(); err != nil {
				t.Fatal(err)
			}
			path := l.rmCfg.UnixPath
			l.rmCfg.UnixPath = path + "2"
			l.startRM()
			if _, err := l.rmClient().DropOwner(testContext(t), &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true}); err != nil {
				t.Fatal(err)
			}
			if err := l.rm.Close(); err != nil {
				t.Fatal(err)
			}
			l.rmCfg.UnixPath = path
			l.startRM()
		}
		waitFor(t, "it is fenced", func() bool { _, err := s.Ready(); return errors.Is(err, base.ErrFenced) })
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Wait(ctx) }()
		select {
		case err := <-done:
			t.Errorf("a fenced server ended by itself: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		cancel()
		if err := <-done; !errors.Is(err, base.ErrFenced) {
			t.Errorf("wait: %v", err)
		}
	}
}
