package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/session"
)

// frontDoor is the one address of a service: new connections go to the server that it
// leads to now, old ones stay where they are.
type frontDoor struct {
	listener net.Listener
	target   atomic.Pointer[string]
	wg       sync.WaitGroup
}

func newFrontDoor(t *testing.T, target string) *frontDoor {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &frontDoor{listener: l}
	f.target.Store(&target)
	ctx, cancel := context.WithCancel(t.Context())
	f.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			f.wg.Go(func() { f.carry(ctx, in) })
		}
	})
	t.Cleanup(func() { cancel(); _ = l.Close(); f.wg.Wait() })
	return f
}

// openThroughDoor opens a session at a lab's server through a door of its own.
func openThroughDoor(t *testing.T, l *lab) (*Client, *frontDoor) {
	t.Helper()
	door := newFrontDoor(t, l.srv.ControlAddress())
	cfg := l.config()
	cfg.ServerAddress = door.listener.Addr().String()
	return open(t, cfg), door
}

func (f *frontDoor) carry(ctx context.Context, in net.Conn) {
	defer func() { _ = in.Close() }()
	var d net.Dialer
	out, err := d.DialContext(ctx, "tcp", *f.target.Load())
	if err != nil {
		return
	}
	defer func() { _ = out.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = in.Close(); _ = out.Close() })
	defer stop()
	done := make(chan struct{})
	go func() { defer close(done); _, _ = io.Copy(out, in); _ = out.Close() }()
	_, _ = io.Copy(in, out)
	_ = in.Close()
	<-done
}

// A rolling update: a second server with the same id starts while the first one runs. The
// first stops serving with that event, and answers every call FENCED; its clients, which
// are connected to it and live on the same machine, open at the new one by themselves.
func TestRollingUpdate(t *testing.T) {
	l := startLab(t, 256<<20)
	c, door := openThroughDoor(t, l)
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)

	// The state of the first one, as an orchestrator moves it on.
	old, next := l.srv, l.cfg
	dir := filepath.Dir(l.cfg.StateDir)
	next.StateDir, next.UnixPath, next.HotUnixPath = filepath.Join(dir, "next"), filepath.Join(dir, "c2.sock"), filepath.Join(dir, "h2.sock")
	if err := os.CopyFS(next.StateDir, os.DirFS(l.cfg.StateDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(next.StateDir, "owner-secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv, err := server.Start(context.Background(), next)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = srv.Close(ctx)
	}()
	if srv.ServerID() != old.ServerID() {
		t.Fatal("the second server has another id")
	}
	address := srv.ControlAddress()
	door.target.Store(&address)
	eventually(t, "the new one", func() bool { d, err := srv.Ready(); return err == nil && d == "" })
	eventually(t, "the fence", func() bool { _, err := old.Ready(); return errors.Is(err, base.ErrFenced) })

	dst := make([]byte, 1000)
	eventually(t, "the client at the new server, with its keys", func() bool {
		return listed(c) && loadOne(t, c, 1, dst) == base.CodeOK
	})
	if l := c.current(); l == nil || l.resp.GetControlUnixPath() != next.UnixPath {
		t.Error("it is not the new server")
	}
	want(t, "store at the new one", storeOne(t, c, 2, value(2, 1000)), base.CodeOK)
}

// listed reports whether the session is live: before its list is acknowledged it may load,
// and commits nothing.
func listed(c *Client) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.core.Phase() == session.Live
}

// A server that is started again with another Unix socket, or on another machine, is
// found by the configured address: the socket of the old one stays away for ever.
func TestRestartWithAnotherSocket(t *testing.T) {
	l := startLab(t, 256<<20)
	l.stop()
	l.cfg.Heartbeat = 300 * time.Millisecond // none is to come while it stops, and be told so
	l.start()
	c, door := openThroughDoor(t, l)
	if k := c.current(); k == nil || k.unix == nil {
		t.Fatal("the session does not use the Unix socket: nothing is tested")
	}
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	l.stop()
	l.cfg.UnixPath, l.cfg.HotUnixPath = l.cfg.UnixPath+"2", l.cfg.HotUnixPath+"2"
	l.start()
	eventually(t, "the server, with its regions", func() bool { d, err := l.srv.Ready(); return err == nil && d == "" })
	address := l.srv.ControlAddress()
	door.target.Store(&address)
	dst := make([]byte, 1000)
	eventually(t, "the client at the server, with its keys", func() bool {
		return listed(c) && loadOne(t, c, 1, dst) == base.CodeOK
	})
	if k := c.current(); k == nil || k.resp.GetControlUnixPath() != l.cfg.UnixPath || k.unix == nil {
		t.Error("the session does not use the new socket")
	}
	want(t, "store", storeOne(t, c, 2, value(2, 1000)), base.CodeOK)
}

// `maru up` that ends and is started again is another server, resource manager and pool
// behind one address. A session that has mapped the old pool cannot use the new one, and is
// told so with the cure; it reads no wrong byte.
func TestAnotherDeploymentBehindTheAddress(t *testing.T) {
	first := startLab(t, 256<<20)
	c, door := openThroughDoor(t, first)
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	first.stop()
	if err := first.rm.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(first.path)); err != nil {
		t.Fatal(err)
	}
	second := startLab(t, 256<<20)
	address := second.srv.ControlAddress()
	door.target.Store(&address)
	eventually(t, "the session at the second one", func() bool {
		k := c.current()
		return k != nil && k.resp.GetControlUnixPath() == second.cfg.UnixPath
	})
	k := c.current()
	if _, err := c.manager.use(t.Context(), k); !errors.Is(err, base.ErrForeign) || !strings.Contains(err.Error(), "start this process again") {
		t.Errorf("the other resource manager: %v", err)
	}
	// The own mapping has the bytes of before under numbers that the other one gives, too.
	dst := make([]byte, 1000)
	if got := loadOne(t, c, 1, dst); got == base.CodeOK {
		t.Error("a key of the first one is found at the second one")
	}
	other := second.config()
	other.ServerAddress = door.listener.Addr().String()
	b := open(t, other)
	want(t, "store of a new process", storeOne(t, b, 1, value(9, 1000)), base.CodeOK)
	if got := loadOne(t, c, 1, dst); got == base.CodeOK && !bytes.Equal(dst, value(9, 1000)) {
		t.Error("wrong bytes")
	}
	want(t, "load of a new process", loadOne(t, b, 1, dst), base.CodeOK)
}

// The resource manager comes up with another socket: same store, same holds, no restart of
// the client.
func TestResourceManagerWithAnotherSocket(t *testing.T) {
	l := startLab(t, 256<<20)
	c, door := openThroughDoor(t, l)
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	l.stop()
	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	l.rmCfg.UnixPath += "2"
	var err error
	if l.rm, err = rm.Start(t.Context(), l.rmCfg); err != nil {
		t.Fatal(err)
	}
	l.cfg.RMAddress = "unix:" + l.rmCfg.UnixPath
	l.cfg.UnixPath, l.cfg.HotUnixPath = l.cfg.UnixPath+"2", l.cfg.HotUnixPath+"2"
	l.start()
	address := l.srv.ControlAddress()
	door.target.Store(&address)
	b := open(t, l.config())
	dst := make([]byte, 1000)
	eventually(t, "the key of before, for another client", func() bool { return loadOne(t, b, 1, dst) == base.CodeOK })
	// What b stores lies in a region that c has to hold first.
	want(t, "store", storeOne(t, b, 2, value(2, 1000)), base.CodeOK)
	eventually(t, "a load through the new socket", func() bool { return loadOne(t, c, 2, dst) == base.CodeOK })
}
