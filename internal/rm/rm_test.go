package rm

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rpc"
)

// fixture is one resource manager's place: it survives Close.
type fixture struct {
	t   testing.TB
	cfg Config
}

func newFixture(t testing.TB) *fixture {
	dir := t.TempDir()
	return &fixture{t: t, cfg: Config{
		Port: AnyPort, HTTPPort: NoPort, UnixPath: filepath.Join(dir, "rm.sock"), StateDir: filepath.Join(dir, "state"),
		Pools:     []PoolSpec{{Kind: dax.KindFile, Path: filepath.Join(dir, "pool"), SizeBytes: 64 << 20, Name: "p"}},
		Discovery: DiscoverNone, Node: node.Options{Dir: dir}, Overcommit: true,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) { w.t.Logf("%s", b); return len(b), nil }

func (f *fixture) start() *Server {
	f.t.Helper()
	s, err := Start(f.t.Context(), f.cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = s.Close() })
	return s
}

// client talks to a resource manager over its Unix socket, or TCP.
func client(t testing.TB, address string) maruv1.ResourceManagerClient {
	t.Helper()
	c, err := rpc.NewClient(address, rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return maruv1.NewResourceManagerClient(c)
}

func over(s *Server) string { return "unix:" + s.UnixPath() }

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func newID() []byte { id := base.NewID(); return id[:] }

type owner struct {
	id    []byte
	inc   uint32
	token []byte
}

// secretOf is the secret of an owner of these tests.
func secretOf(id []byte) []byte { s := sha256.Sum256(id); return s[:] }

func startOwner(t testing.TB, c maruv1.ResourceManagerClient, id []byte) owner {
	t.Helper()
	r, err := c.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: id, Name: "test", OwnerSecret: secretOf(id)})
	if err != nil {
		t.Fatal(err)
	}
	return owner{id, r.GetIncarnation(), r.GetOwnerToken()}
}

func (o owner) request(op uint64) *maruv1.AllocateRequest {
	return &maruv1.AllocateRequest{
		OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Operation: op, PageCount: 16, PageSize: 65536, PieceSize: 65536,
		NamespaceDigest: make([]byte, 32), WriterSession: append([]byte(nil), o.id...),
	}
}

func (o owner) allocate(t testing.TB, c maruv1.ResourceManagerClient, op uint64) *maruv1.AllocateResponse {
	t.Helper()
	r, err := c.Allocate(ctxOf(t), o.request(op))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The answer to Allocate has the read capability, a repeated one too: it is what MintRead
// gives, and no more.
func TestAllocateGivesReadCapability(t *testing.T) {
	s := newFixture(t).start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	for range 2 {
		a := o.allocate(t, c, 1)
		minted, err := c.MintRead(ctxOf(t), &maruv1.MintReadRequest{Handles: []*maruv1.RegionHandle{a.GetHandle()}})
		if err != nil {
			t.Fatal(err)
		}
		if read := a.GetReadHandle(); !read.GetReadOnly() || !proto.Equal(read, minted.GetHandles()[0]) {
			t.Fatalf("read capability %v, minted %v", read, minted.GetHandles()[0])
		}
		_, err = c.MintRead(ctxOf(t), &maruv1.MintReadRequest{Handles: []*maruv1.RegionHandle{a.GetReadHandle()}})
		if !errors.Is(err, base.ErrDenied) {
			t.Fatalf("a read capability is as good as a write capability: %v", err)
		}
	}
}

func TestLifeOverRestart(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	b := o.allocate(t, c, 2)
	session := newID()
	hold, err := c.Hold(ctxOf(t), &maruv1.HoldRequest{SessionId: session, ServerId: o.id, OwnerIncarnation: o.inc, Sequence: 1, Handles: []*maruv1.RegionHandle{a.GetHandle()}})
	if err != nil {
		t.Fatal(err)
	}
	if !hold.GetProvable() {
		t.Errorf("a Unix peer is not provable: %s", hold.GetReason())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = f.start()
	c = client(t, over(s))
	again := o.allocate(t, c, 1)
	if string(again.GetHandle().GetToken()) != string(a.GetHandle().GetToken()) || again.GetPlace().GetOffset() != a.GetPlace().GetOffset() {
		t.Errorf("a retry after a restart gives another region: %v, %v", again, a)
	}
	list, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
	if err != nil || len(list.GetRegions()) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	free, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()})
	if err != nil || !free.GetDraining() {
		t.Fatalf("free of a held region: %v, %v", free, err)
	}
	if free, err = c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: b.GetHandle()}); err != nil || free.GetDraining() {
		t.Fatalf("free: %v, %v", free, err)
	}
	un, err := c.Unhold(ctxOf(t), &maruv1.UnholdRequest{SessionId: session, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}})
	if err != nil || len(un.GetFreedRegionIds()) != 1 {
		t.Fatalf("unhold: %v, %v", un, err)
	}
	d, err := c.Describe(ctxOf(t), &maruv1.DescribeRequest{})
	if err != nil || len(d.GetPools()) != 1 || d.GetPools()[0].GetAllocatedBytes() != 0 {
		t.Fatalf("%v, %v", d, err)
	}
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFileAt(t testing.TB, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(b, at)
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}
