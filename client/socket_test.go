package client

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// socketPair is a socket and its peer.
func socketPair(t *testing.T, network string) (*socket, net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	dialed, err := net.Dial(network, l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSocket(dialed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close(); _ = peer.Close() })
	s.setDeadline(time.Now().Add(time.Minute))
	return s, peer
}

func TestSocket(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			t.Run("carries bytes both ways", func(t *testing.T) {
				s, peer := socketPair(t, network)
				// More than a socket's buffers: the write goes on where it stopped.
				sent := make([]byte, 8<<20)
				for i := range sent {
					sent[i] = byte(i * 31)
				}
				done := make(chan error, 1)
				go func() {
					// Without the types of the two sockets: between those the copy would go
					// through a pipe that the runtime keeps until some later collection.
					_, err := io.CopyN(struct{ io.Writer }{peer}, struct{ io.Reader }{peer}, int64(len(sent)))
					done <- err
				}()
				go func() { _, _ = s.Write(sent) }()
				got := make([]byte, len(sent))
				if _, err := io.ReadFull(s, got); err != nil {
					t.Fatal(err)
				}
				if string(got) != string(sent) {
					t.Fatal("other bytes came back")
				}
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			})
			t.Run("ends at the deadline", func(t *testing.T) {
				s, _ := socketPair(t, network)
				s.setDeadline(time.Now().Add(15 * time.Millisecond))
				if _, err := s.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("read: %v", err)
				}
				// A write that cannot go on, too; and a later deadline serves again.
				s.setDeadline(time.Now().Add(15 * time.Millisecond))
				var err error
				for err == nil {
					_, err = s.Write(make([]byte, 1<<20))
				}
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Fatalf("write: %v", err)
				}
			})
			t.Run("ends with the peer", func(t *testing.T) {
				s, peer := socketPair(t, network)
				_ = peer.Close()
				if _, err := s.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
					t.Fatalf("read: %v", err)
				}
				var err error
				for err == nil { // TCP learns it with the answer to the first bytes
					_, err = s.Write(make([]byte, 1<<10))
				}
			})
			t.Run("Close wakes a read", func(t *testing.T) {
				s, _ := socketPair(t, network)
				began := make(chan struct{})
				go func() {
					<-began
					s.Close()
				}()
				close(began)
				if _, err := s.Read(make([]byte, 1)); err == nil {
					t.Fatal("read something")
				}
				s.Close()
				if _, err := s.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
					t.Fatalf("read after close: %v", err)
				}
				if _, err := s.Write([]byte{1}); !errors.Is(err, net.ErrClosed) {
					t.Fatalf("write after close: %v", err)
				}
			})
		})
	}
}

// TestCancelledCall: a caller that gives up is not kept until the call's limit, and the
// next one is served.
func TestCancelledCall(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	cfg.RPCTimeout = time.Minute
	c := open(t, cfg)
	v := value(1, 1000)
	want(t, "store", storeOne(t, c, 1, v), base.CodeOK)
	f.hang.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	verdicts := make([]byte, 1)
	if hits, err := c.Probe(ctx, ProbeQuery{Keys: keysOf(1)}, verdicts); hits != 0 || err != nil {
		t.Fatalf("a probe that was given up: %d hits, %v", hits, err)
	}
	f.hang.Store(false)
	if hits, err := c.Probe(t.Context(), ProbeQuery{Keys: keysOf(1)}, verdicts); hits != 1 || err != nil {
		t.Fatalf("the probe behind it: %d hits, %v", hits, err)
	}
}
