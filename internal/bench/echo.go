package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// The echoes are what a metadata call is compared with: the same bytes, in the same
// frames, over the same kind of connection to the same process, and nothing done. A
// request's first four payload bytes say how large the answer is to be.

// appendFrame makes a frame of payloadBytes with the hot plane's header.
func appendFrame(dst []byte, op hot.Op, flags hot.Flags, id uint64, payloadBytes int) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(payloadBytes)) //nolint:gosec // at most hot.MaxPayloadBytes
	dst = append(dst, hot.Version, byte(op))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(flags))
	dst = binary.LittleEndian.AppendUint64(dst, id)
	return append(dst, make([]byte, payloadBytes)...)
}

// echoRequest is a request of frameBytes whose answer is a frame of answerBytes.
func echoRequest(frameBytes, answerBytes int) []byte {
	f := appendFrame(nil, hot.OpProbe, 0, 1, max(frameBytes-hot.HeaderBytes, 4))
	binary.LittleEndian.PutUint32(f[hot.HeaderBytes:], uint32(max(answerBytes-hot.HeaderBytes, 0))) //nolint:gosec // small
	return f
}

// frameEcho answers frames, a goroutine a connection.
type frameEcho struct {
	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		open map[net.Conn]struct{}
	}
	listeners []net.Listener
}

func newFrameEcho(listeners ...net.Listener) *frameEcho {
	e := &frameEcho{listeners: listeners}
	e.mu.open = map[net.Conn]struct{}{}
	for _, l := range listeners {
		e.wg.Go(func() { e.accept(l) })
	}
	return e
}

func (e *frameEcho) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		e.mu.Lock()
		e.mu.open[conn] = struct{}{}
		e.mu.Unlock()
		e.wg.Go(func() {
			serveEcho(conn)
			_ = conn.Close()
			e.mu.Lock()
			delete(e.mu.open, conn)
			e.mu.Unlock()
		})
	}
}

func serveEcho(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
	}
	reader := hot.NewReader(conn)
	var out []byte
	for {
		_, payload, err := reader.Next()
		if err != nil || len(payload) < 4 {
			return
		}
		size := int(min(binary.LittleEndian.Uint32(payload), hot.MaxPayloadBytes))
		if len(out) != hot.HeaderBytes+size {
			out = appendFrame(out[:0], hot.OpProbe, hot.FlagAnswer, 1, size)
		}
		if _, err := conn.Write(out); err != nil {
			return
		}
	}
}

func (e *frameEcho) close() {
	for _, l := range e.listeners {
		_ = l.Close()
	}
	e.mu.Lock()
	for c := range e.mu.open {
		_ = c.Close()
	}
	e.mu.Unlock()
	e.wg.Wait()
}

// echoConn is the client's side.
type echoConn struct {
	conn   net.Conn
	reader *hot.Reader
}

func dialEcho(ctx context.Context, a address) (*echoConn, error) {
	conn, err := a.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &echoConn{conn: conn, reader: hot.NewReader(conn)}, nil
}

func (e *echoConn) call(request []byte) error {
	if _, err := e.conn.Write(request); err != nil {
		return err
	}
	h, _, err := e.reader.Next()
	if err == nil && h.Flags != hot.FlagAnswer {
		err = fmt.Errorf("%w: an echo without the answer flag", base.ErrInternal)
	}
	return err
}

// address is "tcp" or "unix" and where.
type address struct {
	Network string `json:"network"`
	Target  string `json:"target"`
}

func (a address) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, a.Network, a.Target)
	if err != nil {
		return nil, fmt.Errorf("bench: connect: %w", err)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
	}
	return conn, nil
}

const grpcEchoMethod = "/maru.bench.Echo/Echo"

// newGRPCEcho is a unary call of bytes, as small as gRPC has it.
func newGRPCEcho(listeners ...net.Listener) (stop func() error) {
	s := grpc.NewServer()
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "maru.bench.Echo", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Echo", Handler: grpcEcho}},
	}, struct{}{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failures []error
	for _, l := range listeners {
		wg.Go(func() {
			if err := s.Serve(l); err != nil {
				mu.Lock()
				failures = append(failures, err)
				mu.Unlock()
			}
		})
	}
	return func() error {
		s.Stop()
		wg.Wait()
		return errors.Join(failures...)
	}
}

//nolint:revive // the signature is grpc.MethodHandler's
func grpcEcho(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	in := &wrapperspb.BytesValue{}
	if err := decode(in); err != nil {
		return nil, err
	}
	if len(in.Value) < 4 {
		return nil, base.ErrInvalid
	}
	return wrapperspb.Bytes(make([]byte, min(binary.LittleEndian.Uint32(in.Value), hot.MaxPayloadBytes))), nil
}

// grpcClient calls the gRPC echo.
type grpcClient struct{ conn *grpc.ClientConn }

func dialGRPC(a address) (*grpcClient, error) {
	target := "passthrough:///" + a.Target
	if a.Network == "unix" {
		target = "unix:" + a.Target
	}
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	return &grpcClient{conn}, nil
}

func (g *grpcClient) call(ctx context.Context, request []byte) error {
	var out wrapperspb.BytesValue
	return g.conn.Invoke(ctx, grpcEchoMethod, wrapperspb.Bytes(request[hot.HeaderBytes:]), &out)
}
