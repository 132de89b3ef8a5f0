package client

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/server"
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
	door := newFrontDoor(t, l.srv.ControlAddress())
	cfg := l.config()
	cfg.ServerAddress = door.listener.Addr().String()
	c := open(t, cfg)
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
		return c.Connected() && loadOne(t, c, 1, dst) == base.CodeOK
	})
	if l := c.current(); l == nil || l.resp.GetControlUnixPath() != next.UnixPath {
		t.Error("it is not the new server")
	}
	want(t, "store at the new one", storeOne(t, c, 2, value(2, 1000)), base.CodeOK)
}

// A server that is started again with another Unix socket, or on another machine, is
// found by the configured address: the socket of the old one stays away for ever.
func TestRestartWithAnotherSocket(t *testing.T) {
	l := startLab(t, 256<<20)
	l.stop()
	l.cfg.Heartbeat = 300 * time.Millisecond // none is to come while it stops, and be told so
	l.start()
	door := newFrontDoor(t, l.srv.ControlAddress())
	cfg := l.config()
	cfg.ServerAddress = door.listener.Addr().String()
	c := open(t, cfg)
	if k := c.current(); k == nil || k.unix == nil {
		t.Fatal("the session does not use the Unix socket: nothing is tested")
	}
	want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
	l.stop()
	l.cfg.UnixPath, l.cfg.HotUnixPath = l.cfg.UnixPath+"2", l.cfg.HotUnixPath+"2"
	l.start()
	address := l.srv.ControlAddress()
	door.target.Store(&address)
	dst := make([]byte, 1000)
	eventually(t, "the client at the server, with its keys", func() bool {
		return c.Connected() && loadOne(t, c, 1, dst) == base.CodeOK
	})
	if k := c.current(); k == nil || k.resp.GetControlUnixPath() != l.cfg.UnixPath || k.unix == nil {
		t.Error("the session does not use the new socket")
	}
	want(t, "store", storeOne(t, c, 2, value(2, 1000)), base.CodeOK)
}
