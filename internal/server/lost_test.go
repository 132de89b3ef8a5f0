package server

import (
	"context"
	"errors"
	"path"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
)

// lossy loses calls to the resource manager, or their answers after they were carried out.
type lossy struct {
	mu      sync.Mutex
	answers map[string]int // method: so many answers are lost
	calls   map[string]int // method: so many calls never arrive
	seen    map[string]int
}

func newLossy() *lossy {
	return &lossy{answers: map[string]int{}, calls: map[string]int{}, seen: map[string]int{}}
}

func (l *lossy) set(method string, calls, answers int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls[method], l.answers[method] = calls, answers
}

func (l *lossy) count(method string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen[method]
}

func take(m map[string]int, method string) bool {
	if m[method] == 0 {
		return false
	}
	m[method]--
	return true
}

func (l *lossy) option() grpc.DialOption {
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, full string, req, reply any, cc *grpc.ClientConn,
		call grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		method := path.Base(full)
		l.mu.Lock()
		l.seen[method]++
		lostCall := take(l.calls, method)
		l.mu.Unlock()
		if lostCall {
			return status.Error(codes.Unavailable, "lost on the way")
		}
		err := call(ctx, full, req, reply, cc, opts...)
		l.mu.Lock()
		defer l.mu.Unlock()
		if err == nil && take(l.answers, method) {
			return status.Error(codes.Unavailable, "the answer was lost")
		}
		return err
	})
}

func regionsAt(t *testing.T, api maruv1.ResourceManagerClient) []*maruv1.RegionInfo {
	t.Helper()
	r, err := api.ListRegions(testContext(t), &maruv1.ListRegionsRequest{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetRegions()
}

// An allocation whose answer is lost is asked for again with the same operation: one
// region at the resource manager, one grant here, whoever waited (W1, X1).
func TestLostAllocation(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	lost := newLossy()
	l.cfg.rmOptions = []grpc.DialOption{lost.option()}
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	api := l.rmClient()

	lost.set("Allocate", 0, 3)
	r := c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
	if n := regionsAt(t, api); len(n) != 1 || n[0].GetRegionId() != r.GetHandle().GetRegionId() {
		t.Fatalf("after lost answers: %v, granted %v", n, r)
	}
	if lost.count("Allocate") != 4 {
		t.Errorf("%d allocations were asked for, want 4", lost.count("Allocate"))
	}

	// The caller gives up first: UNKNOWN, and the same operation gives the region.
	lost.set("Allocate", 0, 6)
	m := &maruv1.ExpandRequest{
		Operation: uint64(c.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: 4 * 65536, PageSize: 65536, PieceSize: 65536,
	}
	ctx, cancel := withDeadline(c.ctx(), 150*time.Millisecond)
	_, err := c.api.Expand(ctx, m)
	cancel()
	if !errors.Is(err, base.ErrUnknown) && !errors.Is(err, base.ErrTimeout) {
		t.Fatalf("an expand that waits too long: %v", err)
	}
	answers := make(chan *maruv1.ExpandResponse, 2)
	for range 2 {
		go func() {
			r, err := c.api.Expand(c.ctx(), m)
			if err != nil {
				t.Errorf("asked again: %v", err)
			}
			answers <- r
		}()
	}
	a, b := <-answers, <-answers
	if a.GetHandle().GetRegionId() == 0 || a.GetHandle().GetRegionId() != b.GetHandle().GetRegionId() {
		t.Errorf("one operation, two regions: %v %v", a, b)
	}
	if n := regionsAt(t, api); len(n) != 2 {
		t.Errorf("%d regions, want 2", len(n))
	}

	// A session that ends while its allocation is on the way: the region goes back.
	lost.set("Allocate", 0, 8)
	m = &maruv1.ExpandRequest{
		Operation: uint64(c.next().Sequence), Medium: maruv1.Medium_MEDIUM_CXL, Bytes: 4 * 65536, PageSize: 65536, PieceSize: 65536,
	}
	ctx, cancel = withDeadline(c.ctx(), 100*time.Millisecond)
	_, _ = c.api.Expand(ctx, m)
	cancel()
	if _, err := c.api.Close(c.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the regions of a closed session go back", func() bool { return len(regionsAt(t, api)) == 0 && s.usage().Regions == 0 })
}

// A region is freed until the resource manager has confirmed it.
func TestLostFree(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	lost := newLossy()
	l.cfg.rmOptions = []grpc.DialOption{lost.option()}
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	r := c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
	lost.set("Free", 1, 1)
	m := &maruv1.ReturnRequest{Operation: uint64(c.next().Sequence), PoolNumber: r.GetPoolNumber(), RegionId: r.GetHandle().GetRegionId()}
	for range 2 { // a repeated return succeeds
		if _, err := c.api.Return(c.ctx(), m); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "the region is free", func() bool { return s.usage().Regions == 0 })
	if n := regionsAt(t, l.rmClient()); len(n) != 0 || lost.count("Free") < 3 {
		t.Errorf("regions %v after %d frees", n, lost.count("Free"))
	}
}

// A lost answer to StartOwner costs a number, and nothing else.
func TestLostStartOwner(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	lost := newLossy()
	lost.set("StartOwner", 0, 2)
	l.cfg.rmOptions = []grpc.DialOption{lost.option()}
	s := startServer(t, l.cfg)
	waitReady(t, s)
	if incarnation, _ := s.rm.status(); incarnation != 3 {
		t.Errorf("incarnation %d, want 3", incarnation)
	}
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	c.expand(maruv1.Medium_MEDIUM_CXL, 4, 65536)
}
