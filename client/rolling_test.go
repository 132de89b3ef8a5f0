package client

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
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
