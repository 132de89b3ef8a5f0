package rm

import (
	"context"
	"errors"
	"path"
	"time"

	"google.golang.org/grpc"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
)

// unprovenInterval is how often refusals of one method are logged: who is refused
// comes again.
const unprovenInterval = 10 * time.Second

// noteUnproven counts and logs what was refused because the caller did not prove
// that it is the owner or agent it named. The error names it and the cure.
func (s *Server) noteUnproven(ctx context.Context, fullMethod string, err error) {
	if !errors.Is(err, base.ErrUnproven) {
		return
	}
	method := path.Base(fullMethod) // one of the service's: its number is bounded
	s.metrics.unproven.WithLabelValues(method).Inc()
	from := "a caller over TCP"
	if p := peer.FromContext(ctx); p != nil {
		from = p.String()
	}
	s.refused.Warn(method, "a call as an owner or agent was refused", "method", method, "from", from, "error", err)
}

func (s *Server) unprovenUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, req)
	s.noteUnproven(ctx, info.FullMethod, err)
	return answer, err
}

func (s *Server) unprovenStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	err := handler(srv, stream)
	s.noteUnproven(stream.Context(), info.FullMethod, err)
	return err
}
