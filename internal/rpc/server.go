package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/invariants"
)

// Limits bounds what a peer can make a server do. Zero fields mean their default.
type Limits struct {
	// MaxReceiveBytes bounds one message from a peer. Default 4 MiB: the largest
	// control message is a DescribeRegions or ReadRecords answer.
	MaxReceiveBytes int
	// MaxSendBytes bounds one message to a peer. Default 64 MiB.
	MaxSendBytes int
	// MaxHeaderBytes bounds the metadata of one call. Default 16 KiB.
	MaxHeaderBytes uint32
	// MaxStreamCount bounds the calls in flight on one connection. Default 256.
	MaxStreamCount uint32
	// KeepaliveMinInterval is how often a client may ping; faster ones are cut off.
	// Default 5 s.
	KeepaliveMinInterval time.Duration
	// KeepaliveInterval is how long a connection may be silent before the server
	// pings it. Default 30 s.
	KeepaliveInterval time.Duration
	// KeepaliveTimeout is how long an answer to such a ping may take. Default 10 s.
	KeepaliveTimeout time.Duration
	// HandshakeTimeout bounds the opening of a connection. Default 5 s.
	HandshakeTimeout time.Duration
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

func (l Limits) withDefaults() Limits {
	l.MaxReceiveBytes = orDefault(l.MaxReceiveBytes, 4<<20)
	l.MaxSendBytes = orDefault(l.MaxSendBytes, 64<<20)
	l.MaxHeaderBytes = orDefault(l.MaxHeaderBytes, 16<<10)
	l.MaxStreamCount = orDefault(l.MaxStreamCount, 256)
	l.KeepaliveMinInterval = orDefault(l.KeepaliveMinInterval, 5*time.Second)
	l.KeepaliveInterval = orDefault(l.KeepaliveInterval, 30*time.Second)
	l.KeepaliveTimeout = orDefault(l.KeepaliveTimeout, 10*time.Second)
	l.HandshakeTimeout = orDefault(l.HandshakeTimeout, 5*time.Second)
	return l
}

// ServerOption changes how a server is built.
type ServerOption func(*serverConfig)

type serverConfig struct {
	log     *slog.Logger
	onPanic func(method string)
	grpc    []grpc.ServerOption
	unary   []grpc.UnaryServerInterceptor
	stream  []grpc.StreamServerInterceptor
}

// WithLogger names the logger of recovered panics; the default is slog's.
func WithLogger(l *slog.Logger) ServerOption { return func(c *serverConfig) { c.log = l } }

// WithPanicMetric is called once for each recovered panic, with the full method.
func WithPanicMetric(f func(method string)) ServerOption {
	return func(c *serverConfig) { c.onPanic = f }
}

// WithCredentials sets the transport credentials, for instance those of internal/peer.
func WithCredentials(cr credentials.TransportCredentials) ServerOption {
	return func(c *serverConfig) { c.grpc = append(c.grpc, grpc.Creds(cr)) }
}

// WithUnary adds interceptors; they run inside the recovery and error mapping, so
// they see base errors and may return them.
func WithUnary(i ...grpc.UnaryServerInterceptor) ServerOption {
	return func(c *serverConfig) { c.unary = append(c.unary, i...) }
}

// WithStream is WithUnary for streams.
func WithStream(i ...grpc.StreamServerInterceptor) ServerOption {
	return func(c *serverConfig) { c.stream = append(c.stream, i...) }
}

// WithGRPC adds raw options.
func WithGRPC(o ...grpc.ServerOption) ServerOption {
	return func(c *serverConfig) { c.grpc = append(c.grpc, o...) }
}

// ServerOptions gives the options of a server with bounds: message and header
// sizes, streams a connection, keepalive enforcement, recovery of panics and the
// mapping of base errors.
func ServerOptions(l Limits, opts ...ServerOption) []grpc.ServerOption {
	l = l.withDefaults()
	c := &serverConfig{log: slog.Default(), onPanic: func(string) {}}
	for _, o := range opts {
		o(c)
	}
	unary := append([]grpc.UnaryServerInterceptor{c.unaryGuard}, c.unary...)
	stream := append([]grpc.StreamServerInterceptor{c.streamGuard}, c.stream...)
	return append([]grpc.ServerOption{
		grpc.MaxRecvMsgSize(l.MaxReceiveBytes),
		grpc.MaxSendMsgSize(l.MaxSendBytes),
		grpc.MaxHeaderListSize(l.MaxHeaderBytes),
		grpc.MaxConcurrentStreams(l.MaxStreamCount),
		grpc.ConnectionTimeout(l.HandshakeTimeout),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             l.KeepaliveMinInterval,
			PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time:    l.KeepaliveInterval,
			Timeout: l.KeepaliveTimeout,
		}),
		grpc.ChainUnaryInterceptor(unary...),
		grpc.ChainStreamInterceptor(stream...),
	}, c.grpc...)
}

// NewServer builds a server with [ServerOptions]. Ownership: the caller's; it stops
// with Stop or [Shutdown].
func NewServer(l Limits, opts ...ServerOption) *grpc.Server {
	return grpc.NewServer(ServerOptions(l, opts...)...)
}

// Shutdown lets calls in flight end until ctx is done, then cuts the rest. Event
// streams do not end by themselves: whoever serves them ends them first.
func Shutdown(ctx context.Context, s *grpc.Server) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.GracefulStop()
	}()
	select {
	case <-done:
	case <-ctx.Done():
		s.Stop()
		<-done
	}
}

// recovered turns a panic of a handler into an error. A broken invariant is not
// recovered in invariant builds: a test must see it.
func (c *serverConfig) recovered(method string, value any) error {
	if text, ok := value.(string); ok && invariants.Enabled && strings.HasPrefix(text, "maru: invariant ") {
		panic(value)
	}
	c.onPanic(method)
	c.log.Error("a handler panicked; please report this", "method", method,
		"panic", fmt.Sprint(value), "stack", string(debug.Stack()))
	return fmt.Errorf("%w in %s; the cause is in the log of this daemon, please report it", base.ErrInternal, method)
}

func (c *serverConfig) unaryGuard(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (resp any, err error) {
	defer func() {
		if v := recover(); v != nil {
			resp, err = nil, ToStatus(c.recovered(info.FullMethod, v))
		}
	}()
	resp, err = handler(ctx, req)
	return resp, ToStatus(err)
}

func (c *serverConfig) streamGuard(
	srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = ToStatus(c.recovered(info.FullMethod, v))
		}
	}()
	return ToStatus(handler(srv, ss))
}
