package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// lookUp submits a lookup and waits for its verdicts.
func lookUp(t *testing.T, c *Client, q Lookup) []base.Code {
	t.Helper()
	id, err := c.SubmitLookup(q)
	if err != nil {
		t.Fatal(err)
	}
	return answer(t, c, id, q.Keys.Len())
}

func answer(t *testing.T, c *Client, id JobID, n int) []base.Code {
	t.Helper()
	codes := make([]base.Code, n+1)
	eventually(t, "the answer", func() bool {
		done, err := c.JobResult(id, codes)
		if err != nil {
			t.Fatal(err)
		}
		return done
	})
	if us := codes[n]; us > base.Code((10 * time.Second).Microseconds()) {
		t.Errorf("it took %d us", us)
	}
	return codes[:n]
}

// scheduler opens one whose engine has so many workers; those of the ranks that miss have
// no session.
func scheduler(t *testing.T, f *fake, workers int, miss ...int) *Client {
	t.Helper()
	f.mu.Lock()
	f.mu.workers = nil
	for rank := range workers {
		if slices.Contains(miss, rank) {
			continue
		}
		id := rankSession(rank)
		f.mu.workers = append(f.mu.workers, &maruv1.EngineWorker{SessionId: id[:], Rank: uint32(rank), WorldSize: uint32(workers), NamespaceId: make([]byte, 32)})
	}
	f.mu.Unlock()
	cfg := cxlConfig(f)
	cfg.Role, cfg.EngineID, cfg.CXLBytes, cfg.RegionBytes = base.RoleScheduler, "e", 0, 0
	c := open(t, cfg)
	c.mu.Lock()
	c.mu.workers = workersOf(f.mu.workers) // as the next heartbeat says
	c.mu.Unlock()
	return c
}

func rankSession(rank int) (id base.SessionID) {
	id[0] = byte(rank + 1)
	return id
}

func (f *fake) saw() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.mu.asked)
}

// Leases of a request are ended behind the lookups that take them, whatever else is
// under way, and a later lookup of the same request comes behind that end.
func TestLookupsOfARequestKeepTheirOrder(t *testing.T) {
	f := startFake(t)
	c := scheduler(t, f, 1)
	f.hang.Store(true)
	var jobs []JobID
	submit := func(request uint64) {
		id, err := c.SubmitLookup(Lookup{Keys: keysOf(1), Workers: 1, Replicas: 1, RequestID: request})
		if err != nil {
			t.Fatal(err)
		}
		jobs = append(jobs, id)
	}
	end := func(ids ...uint64) {
		if err := c.SubmitRequests(hot.RequestsEnd, ids); err != nil {
			t.Fatal(err)
		}
	}
	submit(5)
	end(5, 6, 5)
	submit(5)
	end(5)
	others := 2 * c.cfg.HotConnections // more than are asked at once
	for i := range others {
		submit(uint64(100 + i)) //nolint:gosec // small
	}
	f.hang.Store(false)
	for _, id := range jobs {
		if got := answer(t, c, id, 1); got[0] != base.Code(hot.Miss) {
			t.Errorf("job %d: %d", id, got[0])
		}
	}
	eventually(t, "the last end", func() bool { return len(f.saw()) == 2+3+others })
	var of5 []string
	for _, s := range f.saw() {
		if s == "probe 5" || s == fmt.Sprintf("%d 5", hot.RequestsEnd) {
			of5 = append(of5, s)
		}
	}
	if want := []string{"probe 5", "2 5", "probe 5", "2 5"}; !slices.Equal(of5, want) {
		t.Errorf("%q, want %q", of5, want)
	}
	if err := c.SubmitRequests(hot.RequestsRefresh, []uint64{7}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the refresh", func() bool { return slices.Contains(f.saw(), fmt.Sprintf("%d 7", hot.RequestsRefresh)) })
	eventually(t, "nothing is kept", func() bool {
		c.lookups.mu.Lock()
		defer c.lookups.mu.Unlock()
		return len(c.lookups.mu.behind) == 0 && len(c.lookups.mu.ready) == 0 && c.lookups.mu.workers == 0
	})
}

// A hit is one for every rank that reads the shard.
func TestLookupsAskEveryReplica(t *testing.T) {
	f := startFake(t)
	c := scheduler(t, f, 4)
	w := open(t, cxlConfig(f))
	for i := range 3 {
		want(t, "store", storeOne(t, w, i, value(i, 1000)), base.CodeOK)
	}
	q := Lookup{Keys: keysOf(0, 1, 2), Workers: 4, Replicas: 2}
	leading := func() int {
		got := lookUp(t, c, q)
		return slices.IndexFunc(append(got, base.Code(hot.Miss)), func(v base.Code) bool { return hot.Verdict(v).Status() != hot.Hit })
	}
	if n := leading(); n != 3 {
		t.Errorf("%d leading hits, want 3", n)
	}
	f.mu.Lock()
	f.mu.hides = map[base.SessionID]map[base.Key]bool{rankSession(3): {key(1): true}} // the second rank of shard 1
	f.mu.Unlock()
	if n := leading(); n != 1 {
		t.Errorf("%d leading hits where rank 3 cannot read the second, want 1", n)
	}
	for name, q := range map[string]Lookup{
		"no keys":     {Workers: 1, Replicas: 1},
		"half a key":  {Keys: keysOf(1)[:16], Workers: 1, Replicas: 1},
		"no workers":  {Keys: keysOf(1), Replicas: 1},
		"no replicas": {Keys: keysOf(1), Workers: 1},
		"3 of 2":      {Keys: keysOf(1), Workers: 3, Replicas: 2},
		"timeout":     {Keys: keysOf(1), Workers: 1, Replicas: 1, Timeout: -1},
		"too many":    {Keys: keysOf(1), Workers: 2 * hot.MaxShards, Replicas: 2},
	} {
		if _, err := c.SubmitLookup(q); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without an answer every lookup says so, however many are under way, and those behind
// them do not wait for another one. What was to be ended meanwhile is ended when the
// server answers again.
func TestLookupsOfAServerThatHangs(t *testing.T) {
	f := startFake(t)
	c := scheduler(t, f, 2)
	q := Lookup{Keys: keysOf(1, 2), Workers: 2, Replicas: 1, RequestID: 1, Timeout: 50 * time.Millisecond}
	away := []base.Code{LookupAway, LookupAway}
	burst := func() {
		t.Helper()
		f.hang.Store(true)
		var jobs []JobID
		for range 3 * c.cfg.HotConnections {
			q.RequestID++
			id, err := c.SubmitLookup(q)
			if err != nil {
				t.Fatal(err)
			}
			jobs = append(jobs, id)
		}
		for _, id := range jobs {
			if got := answer(t, c, id, 2); !slices.Equal(got, away) {
				t.Errorf("a server that hangs: %v", got)
			}
		}
		eventually(t, "all workers have said what they heard", func() bool {
			c.lookups.mu.Lock()
			defer c.lookups.mu.Unlock()
			return c.lookups.mu.workers == 0
		})
		f.hang.Store(false)
	}
	pause := func(d time.Duration) { // however slow this machine is
		c.lookups.mu.Lock()
		defer c.lookups.mu.Unlock()
		c.lookups.mu.away = time.Now().Add(d)
	}
	burst()
	c.lookups.mu.Lock()
	if c.lookups.mu.away.IsZero() {
		t.Error("no pause after calls without an answer")
	}
	c.lookups.mu.Unlock()
	asked := len(f.saw())
	pause(time.Minute)
	for range 3 {
		if got := lookUp(t, c, q); !slices.Equal(got, away) {
			t.Errorf("at once: %v", got)
		}
	}
	if n := len(f.saw()); n > asked+c.cfg.HotConnections { // those that hung may be heard late
		t.Errorf("%d calls were made within the pause", n-asked)
	}
	end := fmt.Sprintf("%d 5", hot.RequestsEnd)
	if err := c.SubmitRequests(hot.RequestsEnd, []uint64{5}); err != nil {
		t.Fatal(err)
	}
	many := make([]uint64, 3*mostLate)
	for i := range many {
		many[i] = uint64(1000 + i) //nolint:gosec // small
	}
	if err := c.SubmitRequests(hot.RequestsEnd, many); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what waits is bounded", func() bool {
		c.lookups.mu.Lock()
		defer c.lookups.mu.Unlock()
		return len(c.lookups.mu.behind) == 0 && len(c.lookups.mu.late) == mostLate
	})
	pause(0)
	q.Timeout = 0
	eventually(t, "it is asked again", func() bool { return lookUp(t, c, q)[0] == base.Code(hot.Miss) })
	eventually(t, "the end of a request that ended in the pause", func() bool { return slices.Contains(f.saw(), end) })
	q.Timeout = 50 * time.Millisecond
	burst()
	if n := c.Completed(make([]JobID, 8)); n != 0 {
		t.Errorf("%d jobs are handed out whose results were taken", n)
	}
}

// A worker that is missing is no hit, and no reason to leave the others alone.
func TestLookupsWithoutAWorker(t *testing.T) {
	f := startFake(t)
	c := scheduler(t, f, 2)
	q := Lookup{Keys: keysOf(1), Workers: 4, Replicas: 1}
	if got := lookUp(t, c, q); got[0] != LookupAway {
		t.Errorf("two of four workers: %v", got)
	}
	if len(f.saw()) != 0 {
		t.Errorf("the server was asked: %q", f.saw())
	}
	q.Workers = 2
	if got := lookUp(t, c, q); got[0] != base.Code(hot.Miss) {
		t.Errorf("at once with both: %v", got)
	}
	other := startFake(t)
	if got := lookUp(t, scheduler(t, other, 2, 0), q); got[0] != LookupAway {
		t.Errorf("without rank 0: %v", got)
	}
	if len(other.saw()) != 0 {
		t.Errorf("the server was asked: %q", other.saw())
	}
	if err := c.SubmitRequests(0, []uint64{1}); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("no action: %v", err)
	}
}

// A client that closes answers what is queued, and takes no more.
func TestCloseWithLookups(t *testing.T) {
	f := startFake(t)
	c := scheduler(t, f, 1)
	f.hang.Store(true)
	for i := range uint64(3 * c.cfg.HotConnections) { //nolint:gosec // small
		if _, err := c.SubmitLookup(Lookup{Keys: keysOf(1), Workers: 1, Replicas: 1, RequestID: i}); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	if err := c.Close(ctx); err != nil {
		t.Log(err) // it may not have told the server
	}
	t.Log("Close took", time.Since(began))
	if n := c.Completed(make([]JobID, 99)); n != 3*c.cfg.HotConnections {
		t.Errorf("%d lookups were answered", n)
	}
	f.hang.Store(false)
	if _, err := c.SubmitLookup(Lookup{Keys: keysOf(1), Workers: 1, Replicas: 1}); !errors.Is(err, base.ErrClosed) {
		t.Errorf("a lookup after Close: %v", err)
	}
	if err := c.SubmitRequests(hot.RequestsEnd, []uint64{1}); !errors.Is(err, base.ErrClosed) {
		t.Errorf("an end after Close: %v", err)
	}
}
