package client

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func TestCloseDrained(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	codes := make([]base.Code, 2)
	if err := c.Pin(t.Context(), keysOf(1, 2), hot.ModePrefix, codes); err != nil {
		t.Fatal(err)
	}
	want(t, "pin", codes[0], base.CodeOK)
	want(t, "pin of nothing", codes[1], base.CodeMiss)
	if err := c.Pin(t.Context(), keysOf(1), hot.ModeEach, codes); err != nil || f.leases() != 1 {
		t.Fatal(err, f.leases())
	}
	if err := c.Unpin(t.Context(), keysOf(1, 2), codes); err != nil {
		t.Fatal(err)
	}
	want(t, "unpin", codes[0], base.CodeOK)
	want(t, "unpin of nothing", codes[1], base.CodeNotFound)
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.closes) != 1 || !f.mu.closes[0].GetDrained() || len(f.mu.holds) != 0 {
		t.Fatalf("closes %v, holds %v", f.mu.closes, f.mu.holds)
	}
}

// A Close while the session is being opened anew tells the new epoch: a server that has
// not heard of it would keep the regions until this process is gone.
func TestCloseBetweenEpochs(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	c.lose(c.link.Load())
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.mu.closes) != 1 || !f.mu.closes[0].GetDrained() || len(f.mu.holds) != 0 {
		t.Fatalf("closes %v, holds %v", f.mu.closes, f.mu.holds)
	}
}

func TestCorruptByte(t *testing.T) {
	f := startFake(t)
	a, b := open(t, cxlConfig(f)), open(t, cxlConfig(f))
	v := value(1, 100000)
	for i := 1; i <= 2; i++ {
		want(t, "store", storeOne(t, a, i, v), base.CodeOK)
		f.mu.Lock()
		row := f.mu.objects[key(i)].row
		f.mu.Unlock()
		a.region(row.Region).data[row.Offset+77777] ^= 1
	}
	want(t, "load", loadOne(t, b, 1, make([]byte, len(v))), base.CodeCorrupt)
	want(t, "a part", loadPartAt(t, a, 2, 10, 10), base.CodeCorrupt)
	eventually(t, "the delete", func() bool { return f.callCount("delete") > 0 })
	eventually(t, "the miss", func() bool { return loadOne(t, b, 1, make([]byte, len(v))) == base.CodeMiss })
	if s := b.Stats(); s.Corrupt == 0 || s.Loads != 0 {
		t.Fatalf("%+v", s)
	}
}

func TestJobs(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.QueueJobs = 4
	c := open(t, cfg)
	v := value(1, 100000)
	j, err := c.SubmitStore([]StoreItem{{Key: key(1), Runs: [][]byte{v}}})
	if err != nil {
		t.Fatal(err)
	}
	waitJob(t, c, j, 1, base.CodeOK)
	dst := make([]byte, len(v))
	for i := range 20 {
		if j, err = c.SubmitLoad([]LoadItem{{Key: key(1), Runs: [][]byte{dst}}, {Key: key(5), Runs: [][]byte{dst[:1]}}}); err != nil {
			t.Fatal(i, err)
		}
		waitJob(t, c, j, 2, base.CodeOK, base.CodeMiss)
	}
	if !bytes.Equal(dst, v) {
		t.Fatal("bytes differ")
	}
	var last error
	for range 5 {
		_, last = c.SubmitLoad([]LoadItem{{Key: key(1), Runs: [][]byte{dst}}})
	}
	if base.CodeOf(last) != base.CodeBusy {
		t.Fatal(last)
	}
	if _, err := c.JobResult(999, nil); base.CodeOf(err) != base.CodeNotFound {
		t.Fatal(err)
	}
}

// The memory of a store is the caller's as soon as it was read, and its outcome comes when
// the server has given it.
func TestJobCopied(t *testing.T) {
	f := startFake(t)
	c := open(t, cxlConfig(f))
	v := value(1, 100000)
	kept := bytes.Clone(v)
	f.hangCommit.Store(true)
	defer f.hangCommit.Store(false)
	j, err := c.SubmitStore([]StoreItem{{Key: key(1), Runs: [][]byte{v}}})
	if err != nil {
		t.Fatal(err)
	}
	for copied := false; !copied; {
		poll(t, c.EventFD())
		if n := c.Completed(make([]JobID, 1)); n != 0 {
			t.Fatal("the job is over before its commit")
		}
		if copied, err = c.JobCopied(j); err != nil {
			t.Fatal(err)
		}
	}
	if done, err := c.JobResult(j, make([]base.Code, 1)); done || err != nil {
		t.Fatalf("done %v, %v", done, err)
	}
	clear(v)
	f.hangCommit.Store(false)
	waitJob(t, c, j, 1, base.CodeOK)
	if _, err := c.JobCopied(j); base.CodeOf(err) != base.CodeNotFound {
		t.Errorf("of a job that was forgotten: %v", err)
	}
	dst := make([]byte, len(v))
	want(t, "load", loadOne(t, c, 1, dst), base.CodeOK)
	if !bytes.Equal(dst, kept) {
		t.Error("what was stored is what came later")
	}
}

func waitJob(t *testing.T, c *Client, j JobID, n int, wants ...base.Code) {
	t.Helper()
	done := make([]JobID, 4)
	for k := 0; k == 0; { // the descriptor also tells of a store that was copied
		poll(t, c.EventFD())
		if k = c.Completed(done); k > 1 || k == 1 && done[0] != j {
			t.Fatalf("completed %v", done[:k])
		}
	}
	if k := c.Completed(done); k != 0 {
		t.Fatal("a job was handed out twice")
	}
	codes := make([]base.Code, n)
	ok, err := c.JobResult(j, codes)
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	for i := range wants {
		want(t, "job", codes[i], wants[i])
	}
	if _, err := c.JobResult(j, codes); base.CodeOf(err) != base.CodeNotFound {
		t.Fatal("a result was given twice")
	}
}

// A server that was started again a moment ago has not heard of the session: Close asks
// before it says goodbye, and comes back as itself to say it.
func TestRealCloseAfterRestart(t *testing.T) {
	l := startLab(t, 64<<20)
	l.stop()
	l.cfg.Heartbeat = 2 * time.Second // nothing notices by itself
	l.start()
	l.cfg.Port, l.cfg.HotPort = portOf(t, l.srv.ControlAddress()), portOf(t, l.srv.HotAddress())
	c := open(t, l.config())
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	l.stop()
	// The connection was refused some times, and is not tried again for a while.
	for range 5 {
		if err := c.Ping(t.Context()); !errors.Is(err, base.ErrUnavailable) {
			t.Fatalf("a ping of nobody: %v", err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	l.start()
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := l.holds(c.Session()); n != 0 {
		t.Errorf("%d holds are left", n)
	}
	// Its object stays, in a region that is kept: the server knows that its writer has gone.
	other := open(t, l.config())
	eventually(t, "a load", func() bool { return loadOne(t, other, 1, make([]byte, 1000)) == base.CodeOK })
}
