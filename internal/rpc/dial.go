package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/xcena-dev/maru/internal/base"
)

// maxUnixPathBytes is what sun_path holds less its final zero.
const maxUnixPathBytes = 107

// Address is where a daemon listens.
type Address struct {
	Network string // "tcp" or "unix"
	Target  string // host:port, or an absolute path
}

// String shows an address as [ParseAddress] reads it.
func (a Address) String() string {
	if a.Network == "unix" {
		return "unix:" + a.Target
	}
	return a.Target
}

// ParseAddress reads "host:port", "tcp://host:port", "unix:/path" or
// "unix:///path". Errors: ErrInvalid, with the value and what is allowed.
func ParseAddress(s string) (Address, error) {
	const allowed = `allowed: host:port, tcp://host:port, unix:/absolute/path`
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		path = strings.TrimPrefix(path, "//")
		if !filepath.IsAbs(path) {
			return Address{}, fmt.Errorf("%w: address %q has no absolute path; %s", base.ErrInvalid, s, allowed)
		}
		if err := checkUnixPath(path); err != nil {
			return Address{}, err
		}
		return Address{Network: "unix", Target: filepath.Clean(path)}, nil
	}
	rest := strings.TrimPrefix(s, "tcp://")
	if strings.Contains(rest, "/") {
		return Address{}, fmt.Errorf("%w: address %q; %s", base.ErrInvalid, s, allowed)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return Address{}, fmt.Errorf("%w: address %q: %w; %s", base.ErrInvalid, s, err, allowed)
	}
	if host == "" || strings.ContainsAny(host, " \t\r\n") {
		return Address{}, fmt.Errorf("%w: address %q has no valid host; %s", base.ErrInvalid, s, allowed)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return Address{}, fmt.Errorf("%w: address %q: port %q is not between 1 and 65535", base.ErrInvalid, s, port)
	}
	return Address{Network: "tcp", Target: net.JoinHostPort(host, strconv.FormatUint(n, 10))}, nil
}

func checkUnixPath(path string) error {
	if len(path) > maxUnixPathBytes {
		return fmt.Errorf("%w: socket path %q has %d bytes, at most %d are possible; choose a shorter directory",
			base.ErrInvalid, path, len(path), maxUnixPathBytes)
	}
	if strings.IndexByte(path, 0) >= 0 {
		return fmt.Errorf("%w: socket path %q contains a zero byte", base.ErrInvalid, path)
	}
	return nil
}

// DialNet opens a plain connection to an address, for the hot plane. Errors:
// ErrUnavailable, ErrTimeout.
func DialNet(ctx context.Context, a Address) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, a.Network, a.Target)
	if err != nil {
		return nil, dialError(a, err)
	}
	return conn, nil
}

func dialError(a Address, err error) error {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: connecting to %s: %w", base.ErrTimeout, a, err)
	}
	return fmt.Errorf("%w: connecting to %s: %w; is it running there?", base.ErrUnavailable, a, err)
}

// Retry says how a client comes back to a peer that went away. Zero fields mean
// their default.
type Retry struct {
	// BaseDelay is the first wait. Default 50 ms.
	BaseDelay time.Duration
	// MaxDelay is the longest wait, with jitter on top of it. Default 800 ms, so
	// that a client is back within one heartbeat (1 s).
	MaxDelay time.Duration
	// ConnectTimeout bounds one attempt. Default 2 s.
	ConnectTimeout time.Duration
}

// NewClient gives a connection that connects at its first call and again whenever
// it is lost. The errors of its calls are those of [FromStatus]. Ownership: the
// caller closes it. Errors: ErrInvalid.
func NewClient(address string, r Retry, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	conn, _, err := newClient(address, r, opts...)
	return conn, err
}

func newClient(address string, r Retry, opts ...grpc.DialOption) (*grpc.ClientConn, *atomic.Value, error) {
	a, err := ParseAddress(address)
	if err != nil {
		return nil, nil, err
	}
	last := new(atomic.Value)
	all := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("maru"),
		// Our own dialer also keeps proxies of the environment out of a cluster's own traffic.
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			conn, err := DialNet(ctx, a)
			if err != nil {
				last.Store(err)
			}
			return conn, err
		}),
		// An idle connection stays: on a Unix socket it is what binds a session to its process.
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay:  orDefault(r.BaseDelay, 50*time.Millisecond),
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   orDefault(r.MaxDelay, 800*time.Millisecond),
			},
			MinConnectTimeout: orDefault(r.ConnectTimeout, 2*time.Second),
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 15 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(4<<20)),
		grpc.WithDisableServiceConfig(),
		grpc.WithChainUnaryInterceptor(unaryErrors),
		grpc.WithChainStreamInterceptor(streamErrors),
	}, opts...)
	conn, err := grpc.NewClient("passthrough:///"+a.String(), all...)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: address %q: %w", base.ErrInvalid, address, err)
	}
	return conn, last, nil
}

// Dial is NewClient that connects now: it comes back with a connection that was
// established, or with the error of the first attempt. Errors: ErrInvalid,
// ErrUnavailable, ErrTimeout.
func Dial(ctx context.Context, address string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	conn, last, err := newClient(address, Retry{}, opts...)
	if err != nil {
		return nil, err
	}
	conn.Connect()
	for {
		state := conn.GetState()
		if state == connectivity.Ready {
			return conn, nil
		}
		if state == connectivity.TransientFailure {
			_ = conn.Close()
			if err, ok := last.Load().(error); ok {
				return nil, err
			}
			return nil, fmt.Errorf("%w: %s accepts connections but does not speak gRPC", base.ErrUnavailable, address)
		}
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close()
			return nil, fmt.Errorf("%w: connecting to %s: %w", base.ErrTimeout, address, ctx.Err())
		}
	}
}

func unaryErrors(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	return FromStatus(call(ctx, method, req, reply, cc, opts...))
}

func streamErrors(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, FromStatus(err)
	}
	return &clientStream{ClientStream: s}, nil
}

// clientStream maps the errors of a stream; io.EOF is its regular end and stays.
type clientStream struct{ grpc.ClientStream }

func (s *clientStream) SendMsg(m any) error { return streamError(s.ClientStream.SendMsg(m)) }
func (s *clientStream) RecvMsg(m any) error { return streamError(s.ClientStream.RecvMsg(m)) }
func (s *clientStream) CloseSend() error    { return streamError(s.ClientStream.CloseSend()) }

func streamError(err error) error {
	if errors.Is(err, io.EOF) {
		return err
	}
	return FromStatus(err)
}
