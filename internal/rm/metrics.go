package rm

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/xcena-dev/maru/internal/rm/core"
)

// glance is a picture of the state for lists, metrics and readiness. It may show
// what is not durable yet, so it never carries a capability.
type glance struct {
	pools                            []core.Pool
	regions, sessions, holds, owners int
}

func (s *Server) takeGlance() *glance {
	return &glance{pools: s.core.Pools(), regions: s.core.RegionCount(), sessions: s.core.SessionCount(), holds: s.core.HoldCount(), owners: s.core.OwnerCount()}
}

type metrics struct{ s *Server }

func newMetrics(s *Server) *metrics { return &metrics{s: s} }

func (m *metrics) serve() error                { return nil }
func (m *metrics) close() error                { return nil }
func (m *metrics) address() string             { return "" }
func (m *metrics) commit(time.Duration, error) {}
func (m *metrics) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
	return h(ctx, req)
}
