package obs

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/xcena-dev/maru/internal/base"
)

// RPC counts and times the calls that a gRPC server answers. Labels are bounded: only
// registered methods reach an interceptor, and codes are base codes.
type RPC struct {
	seconds *prometheus.HistogramVec
	total   *prometheus.CounterVec
	panics  *prometheus.CounterVec
}

// NewRPC makes the metrics maru_rpc_seconds, maru_rpc_total and maru_rpc_panics_total.
func NewRPC(r *Registry) *RPC {
	return &RPC{
		seconds: r.Histogram("maru_rpc_seconds", "Time to answer a unary control-plane call.", "method"),
		total: r.Make.NewCounterVec(prometheus.CounterOpts{
			Name: "maru_rpc_total", Help: "Control-plane calls answered, by result; streams count at their end.",
		}, []string{"method", "code"}),
		panics: r.Make.NewCounterVec(prometheus.CounterOpts{
			Name: "maru_rpc_panics_total", Help: "Handlers that panicked; each is a bug.",
		}, []string{"method"}),
	}
}

// Panic counts a recovered panic.
func (m *RPC) Panic(method string) {
	m.panics.WithLabelValues(method).Inc()
	m.total.WithLabelValues(method, base.CodeInternal.String()).Inc()
}

// Unary is the interceptor of unary calls.
func (m *RPC) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	begin := time.Now()
	resp, err := handler(ctx, req)
	m.seconds.WithLabelValues(info.FullMethod).Observe(time.Since(begin).Seconds())
	m.total.WithLabelValues(info.FullMethod, base.CodeOf(err).String()).Inc()
	return resp, err
}

// Stream is the interceptor of streams.
func (m *RPC) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	err := handler(srv, ss)
	m.total.WithLabelValues(info.FullMethod, base.CodeOf(err).String()).Inc()
	return err
}
