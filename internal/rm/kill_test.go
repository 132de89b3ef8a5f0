package rm

import (
	"bufio"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/killtest"
)

// child is a resource manager in a process of its own.
type child struct {
	cmd *exec.Cmd
	out io.ReadCloser
	log *strings.Builder
}

func startChild(t *testing.T, cfg Config) *child {
	t.Helper()
	cfg.Logger = nil
	return spawn(t, childEnv, cfg)
}

// startMapper starts a process that holds regions.
func startMapper(t *testing.T, s *Server, req *maruv1.HoldRequest) *child {
	t.Helper()
	raw, err := proto.Marshal(req)
	if err != nil {
		t.Fatal(err)
	}
	return spawn(t, mapperEnv, mapperJob{Socket: s.UnixPath(), Request: raw})
}

// spawn runs the test binary in another role until it says that it serves.
func spawn(t *testing.T, env string, job any) *child {
	t.Helper()
	raw, err := json.Marshal(job)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(os.Args[0]), log: &strings.Builder{}}
	c.cmd.Env = append(os.Environ(), env+"="+string(raw))
	c.cmd.Stderr = c.log
	if c.out, err = c.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	line, err := bufio.NewReader(c.out).ReadString('\n')
	if err != nil || line != "serving\n" {
		c.kill()
		t.Fatalf("the child did not start: %q, %v, %s", line, err, c.log)
	}
	return c
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill() // SIGKILL
		_ = c.cmd.Wait()
	}
}

// known is what one allocator was told.
type known struct {
	mu struct {
		sync.Mutex
		live  map[uint64]*maruv1.AllocateResponse // by operation
		freed map[uint64]bool
		// unsure operations were asked and not answered.
		unsureAllocate, unsureFree map[uint64]bool
		next                       uint64
	}
}

// SIGKILL in the middle of concurrent allocations and frees, 30 times: nothing
// acknowledged is lost, nothing is given twice, and every unanswered call has
// one outcome that its retry finds (W1, X1, E1).
func TestKill(t *testing.T) {
	if testing.Short() {
		t.Skip("30 rounds take some seconds")
	}
	f := newFixture(t)
	f.cfg.Pools[0].SizeBytes = 256 << 20
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	var o owner
	k := &known{}
	k.mu.live, k.mu.freed = map[uint64]*maruv1.AllocateResponse{}, map[uint64]bool{}
	k.mu.unsureAllocate, k.mu.unsureFree = map[uint64]bool{}, map[uint64]bool{}
	acknowledged := 0
	for round := range killtest.Rounds(30) {
		rm := startChild(t, f.cfg)
		c := client(t, "unix:"+f.cfg.UnixPath)
		if round == 0 {
			o = startOwner(t, c, newID())
		} else {
			k.verify(t, c, o)
		}
		var wg sync.WaitGroup
		stop := make(chan struct{})
		for range 4 {
			wg.Go(func() { k.work(t, c, o, stop) })
		}
		time.Sleep(time.Duration(20+r.IntN(100)) * time.Millisecond)
		rm.kill()
		close(stop)
		wg.Wait()
		k.mu.Lock()
		acknowledged = len(k.mu.live) + len(k.mu.freed)
		k.mu.Unlock()
	}
	startChild(t, f.cfg)
	k.verify(t, client(t, "unix:"+f.cfg.UnixPath), o)
	t.Logf("%d operations acknowledged", acknowledged)
	if acknowledged < 30 {
		t.Errorf("only %d operations were acknowledged in so few rounds: this test tests nothing", acknowledged)
	}
}

func small(o owner, op uint64) *maruv1.AllocateRequest {
	req := o.request(op)
	req.PageCount, req.PageSize = 4, 4096
	return req
}

// work allocates, and frees what is too much, until the first error.
func (k *known) work(t *testing.T, c maruv1.ResourceManagerClient, o owner, stop chan struct{}) {
	ctx := ctxOf(t)
	for {
		select {
		case <-stop:
			return
		default:
		}
		k.mu.Lock()
		var free uint64
		var handle *maruv1.RegionHandle
		if len(k.mu.live) > 60 {
			for op, a := range k.mu.live {
				free, handle = op, a.GetHandle()
				break
			}
			delete(k.mu.live, free)
			k.mu.unsureFree[free] = true
		} else {
			k.mu.next++
			k.mu.unsureAllocate[k.mu.next] = true
		}
		op := k.mu.next
		k.mu.Unlock()
		if handle != nil {
			if _, err := c.Free(ctx, &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: handle}); err != nil {
				return
			}
			k.mu.Lock()
			delete(k.mu.unsureFree, free)
			k.mu.freed[free] = true
			k.mu.Unlock()
			continue
		}
		a, err := c.Allocate(ctx, small(o, op))
		if err != nil {
			return
		}
		k.mu.Lock()
		delete(k.mu.unsureAllocate, op)
		k.mu.live[op] = a
		k.mu.Unlock()
	}
}

// verify compares what the resource manager lists with what was acknowledged,
// and settles what was not by asking again.
func (k *known) verify(t *testing.T, c maruv1.ResourceManagerClient, o owner) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	list, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
	if err != nil {
		t.Fatal(err)
	}
	listed := map[uint64]*maruv1.RegionInfo{}
	var extents []base.Extent
	for _, r := range list.GetRegions() {
		if listed[r.GetOperation()] != nil {
			t.Fatalf("operation %d has two regions", r.GetOperation())
		}
		listed[r.GetOperation()] = r
		e := base.Extent{Offset: r.GetPlace().GetOffset(), Length: r.GetPlace().GetExtentLength()}
		for _, other := range extents {
			if e.Overlaps(other) {
				t.Fatalf("regions %s and %s overlap", e, other)
			}
		}
		extents = append(extents, e)
	}
	for op, a := range k.mu.live {
		r := listed[op]
		if r == nil {
			t.Fatalf("acknowledged operation %d is lost", op)
		}
		if string(r.GetHandle().GetToken()) != string(a.GetHandle().GetToken()) || r.GetRegionId() != a.GetHandle().GetRegionId() ||
			r.GetPlace().GetOffset() != a.GetPlace().GetOffset() {
			t.Fatalf("operation %d: listed %v, acknowledged %v", op, r, a)
		}
	}
	for op := range k.mu.freed {
		if listed[op] != nil {
			t.Fatalf("operation %d was freed with an acknowledgement and is there again", op)
		}
	}
	for op := range k.mu.unsureFree {
		if r := listed[op]; r != nil {
			if _, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: r.GetHandle()}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Allocate(ctxOf(t), small(o, op)); base.CodeOf(err) != base.CodeStale {
			t.Fatalf("a freed operation allocates again: %v", err)
		}
		k.mu.freed[op] = true
	}
	for op := range k.mu.unsureAllocate {
		a, err := c.Allocate(ctxOf(t), small(o, op))
		if err != nil {
			t.Fatal(err)
		}
		if r := listed[op]; r != nil && r.GetRegionId() != a.GetHandle().GetRegionId() {
			t.Fatalf("operation %d got region %d and then %d", op, r.GetRegionId(), a.GetHandle().GetRegionId())
		}
		k.mu.live[op] = a
	}
	clear(k.mu.unsureFree)
	clear(k.mu.unsureAllocate)
}
