package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/hot"
)

// wireFault is what happens to one call on its way.
type wireFault uint8

const (
	wireWell       wireFault = iota
	wireLoseCall             // it never arrives
	wireLoseAnswer           // it is carried out, and nobody hears of it
	wireLate                 // it arrives after its caller gave up
	wireTwice                // it arrives twice
	wireReset                // it is carried out, and the connection breaks
	wireFaults
)

func (f wireFault) String() string {
	return [...]string{"well", "lost", "answer lost", "late", "twice", "reset"}[f]
}

// wire is what lies between clients, server and resource manager: one counter over the
// calls of all of its proxies.
type wire struct {
	timeout time.Duration // of the callers
	mu      struct {
		sync.Mutex
		armed bool
		call  int // which call is meant; the first is 1
		fault wireFault
		count int
		hit   string
	}
}

func (w *wire) arm(call int, fault wireFault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.armed, w.mu.call, w.mu.fault, w.mu.count, w.mu.hit = true, call, fault, 0, ""
}

// disarm returns what was hit.
func (w *wire) disarm() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.armed = false
	return w.mu.hit
}

func (w *wire) next(what string) wireFault {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.mu.armed {
		return wireWell
	}
	w.mu.count++
	if w.mu.count != w.mu.call {
		return wireWell
	}
	w.mu.hit = fmt.Sprintf("call %d, %s: %s", w.mu.count, what, w.mu.fault)
	return w.mu.fault
}

// rawCodec carries messages as they are.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), b...)
	return nil
}
func (rawCodec) Name() string { return "proto" }
func isStream(method string) bool {
	return strings.Contains("Events WatchSession WatchOwner", path.Base(method))
}
func gone(ctx context.Context, most time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(most):
	}
}

// grpcProxy serves a Unix socket and passes calls on to another one. rewrite may change
// answers.
func (w *wire) grpcProxy(t *testing.T, socket, backend, name string, rewrite func(method string, b []byte) []byte) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+backend, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	handle := func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		md, _ := metadata.FromIncomingContext(s.Context())
		ctx := metadata.NewOutgoingContext(s.Context(), md.Copy())
		var req []byte
		if err := s.RecvMsg(&req); err != nil {
			return err
		}
		if isStream(method) {
			return pump(ctx, conn, method, &req, s)
		}
		call := func(ctx context.Context) ([]byte, error) {
			var resp []byte
			err := conn.Invoke(ctx, method, &req, &resp, grpc.ForceCodec(rawCodec{}), grpc.WaitForReady(true))
			return resp, err
		}
		fault := w.next(name + " " + path.Base(method))
		switch fault {
		case wireLoseCall:
			gone(s.Context(), 4*w.timeout)
			return status.Error(codes.Unavailable, "lost on the way")
		case wireLate:
			gone(s.Context(), 2*w.timeout)
			ctx = context.WithoutCancel(ctx)
		case wireTwice:
			_, _ = call(ctx)
		case wireLoseAnswer, wireReset:
			ctx = context.WithoutCancel(ctx)
		}
		cctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		resp, err := call(cctx)
		switch {
		case fault == wireLoseAnswer:
			gone(s.Context(), 4*w.timeout)
			return status.Error(codes.Unavailable, "the answer was lost")
		case fault == wireReset:
			return status.Error(codes.Unavailable, "connection reset by peer")
		case err != nil:
			return err
		}
		resp = rewrite(method, resp)
		return s.SendMsg(&resp)
	}
	g := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.UnknownServiceHandler(handle))
	done := make(chan struct{})
	go func() { defer close(done); _ = g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		<-done
		_ = conn.Close()
	})
}

func pump(ctx context.Context, conn *grpc.ClientConn, method string, req *[]byte, s grpc.ServerStream) error {
	up, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method, grpc.ForceCodec(rawCodec{}))
	if err != nil {
		return err
	}
	if err := errors.Join(up.SendMsg(req), up.CloseSend()); err != nil {
		return err
	}
	for {
		var b []byte
		if err := up.RecvMsg(&b); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := s.SendMsg(&b); err != nil {
			return err
		}
	}
}

// hotProxy does the same with frames of the hot plane.
func (w *wire) hotProxy(t *testing.T, socket, backend string) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	wg.Go(func() {
		for {
			down, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("unix", backend)
			if err != nil {
				_ = down.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, down, up)
			mu.Unlock()
			x := &hotPipe{w: w, down: down, up: up, drop: map[uint64]int{}}
			wg.Go(x.requests)
			wg.Go(x.answers)
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
}

// hotPipe is one connection through the proxy.
type hotPipe struct {
	w        *wire
	down, up net.Conn
	mu       sync.Mutex
	drop     map[uint64]int // answers of a request that do not come through
}

func (x *hotPipe) close() {
	_ = x.down.Close()
	_ = x.up.Close()
}

func readFrame(c net.Conn) (hot.Header, []byte, error) {
	b := make([]byte, hot.HeaderBytes)
	if _, err := io.ReadFull(c, b); err != nil {
		return hot.Header{}, nil, err
	}
	h, err := hot.DecodeHeader(b)
	if err != nil {
		return h, nil, err
	}
	b = append(b, make([]byte, h.PayloadBytes)...)
	_, err = io.ReadFull(c, b[hot.HeaderBytes:])
	return h, b, err
}

func (x *hotPipe) requests() {
	defer x.close()
	for {
		h, b, err := readFrame(x.down)
		if err != nil {
			return
		}
		fault := x.w.next("hot " + h.Op.String())
		lose := func(n int) {
			x.mu.Lock()
			x.drop[h.RequestID] += n
			x.mu.Unlock()
		}
		switch fault {
		case wireLoseCall:
			continue
		case wireLoseAnswer:
			lose(1)
		case wireLate:
			time.Sleep(2 * x.w.timeout)
		case wireTwice:
			lose(1) // the first of two
			if _, err := x.up.Write(b); err != nil {
				return
			}
		}
		if _, err := x.up.Write(b); err != nil || fault == wireReset {
			time.Sleep(10 * time.Millisecond) // it is carried out
			return
		}
	}
}

func (x *hotPipe) answers() {
	defer x.close()
	for {
		h, b, err := readFrame(x.up)
		if err != nil {
			return
		}
		x.mu.Lock()
		lost := x.drop[h.RequestID] > 0 && h.Flags&hot.FlagAnswer != 0
		if lost {
			x.drop[h.RequestID]--
		}
		x.mu.Unlock()
		if lost {
			continue
		}
		if _, err := x.down.Write(b); err != nil {
			return
		}
	}
}

// between puts a wire between the clients, the server and the resource manager of a lab,
// and returns the address that clients use.
func (l *lab) between(w *wire) string {
	dir := filepath.Dir(l.path)
	at := func(name string) string { return filepath.Join(dir, name) }
	well := func(_ string, b []byte) []byte { return b }
	w.grpcProxy(l.t, at("s-rm"), l.rmCfg.UnixPath, "server to rm", well)
	w.grpcProxy(l.t, at("c-rm"), l.rmCfg.UnixPath, "client to rm", well)
	l.stop()
	l.cfg.RMAddress = "unix:" + at("s-rm")
	l.cfg.RMCallTimeout = w.timeout
	l.start()
	w.hotProxy(l.t, at("c-hot"), l.cfg.HotUnixPath)
	w.grpcProxy(l.t, at("c-srv"), l.cfg.UnixPath, "client to server", func(method string, b []byte) []byte {
		if path.Base(method) != "Open" {
			return b
		}
		var m maruv1.OpenResponse
		if err := proto.Unmarshal(b, &m); err != nil {
			l.t.Error(err)
			return b
		}
		m.ControlUnixPath, m.HotUnixPath, m.RmUnixPath, m.RmAddresses = at("c-srv"), at("c-hot"), at("c-rm"), nil
		b, err := proto.Marshal(&m)
		if err != nil {
			l.t.Error(err)
		}
		return b
	})
	return "unix:" + at("c-srv")
}
