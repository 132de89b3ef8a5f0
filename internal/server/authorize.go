package server

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
)

// Metadata of a call that belongs to a session.
const (
	sessionKey = "maru-session-bin"
	epochKey   = "maru-epoch"
	secretKey  = "maru-secret-bin" // the name of a header, no secret
)

type sessionContextKey struct{}

// sessionOf returns the session that the interceptor has proved; nil for calls that
// need none.
func sessionOf(ctx context.Context) *session {
	sess, _ := ctx.Value(sessionContextKey{}).(*session)
	return sess
}

// needsSession says which calls must come from a session. Deleting a namespace may
// also come from an operator on the Unix socket.
func needsSession(method string) (must, may bool) {
	switch method {
	case maruv1.MetadataServer_Open_FullMethodName, maruv1.MetadataServer_Usage_FullMethodName,
		maruv1.MetadataServer_DescribeServer_FullMethodName:
		return false, false
	case maruv1.MetadataServer_DeleteNamespace_FullMethodName:
		return false, true
	}
	return true, true
}

func (s *Server) authorize(ctx context.Context, method string) (context.Context, error) {
	if !strings.HasPrefix(method, "/"+maruv1.MetadataServer_ServiceDesc.ServiceName+"/") {
		return ctx, nil // reflection or health services check for themselves
	}
	if err := s.serving(); err != nil && method != maruv1.MetadataServer_DescribeServer_FullMethodName {
		return nil, err
	}
	must, may := needsSession(method)
	if !may {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	id, epoch, secret := md.Get(sessionKey), md.Get(epochKey), md.Get(secretKey)
	if len(id) == 0 && len(epoch) == 0 && len(secret) == 0 && !must {
		return ctx, nil
	}
	if len(id) != 1 || len(epoch) != 1 || len(secret) != 1 {
		return nil, fmt.Errorf("%w: this call needs the metadata %s, %s and %s, each once", base.ErrDenied, sessionKey, epochKey, secretKey)
	}
	sessionID, err := base.IDFromBytes(sessionKey, []byte(id[0]))
	if err != nil {
		return nil, err
	}
	number, err := strconv.ParseUint(epoch[0], 10, 32)
	if err != nil {
		return nil, fmt.Errorf("%w: %s %.40q is no epoch", base.ErrInvalid, epochKey, epoch[0])
	}
	sess := s.sessions.get(sessionID)
	if sess == nil || uint64(sess.epoch) != number {
		return nil, fmt.Errorf("%w: epoch %d of session %s is not current; open again", base.ErrStale, number, base.SessionID(sessionID))
	}
	if !sess.proves([]byte(secret[0])) {
		return nil, fmt.Errorf("%w: the secret of session %s does not match", base.ErrDenied, sess.id)
	}
	if err := sess.alive(); err != nil && method != maruv1.MetadataServer_Events_FullMethodName {
		return nil, err
	}
	return context.WithValue(ctx, sessionContextKey{}, sess), nil
}

func (s *Server) authorizeUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	ctx, err := s.authorize(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

type sessionStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *sessionStream) Context() context.Context { return s.ctx }

func (s *Server) authorizeStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, err := s.authorize(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handler(srv, &sessionStream{ServerStream: ss, ctx: ctx})
}

// operatorOnly accepts who runs this daemon, or root, over the Unix socket.
func operatorOnly(ctx context.Context, what string) error {
	p := peer.FromContext(ctx)
	if p == nil {
		return fmt.Errorf("%w: %s needs a session, or the server's Unix socket", base.ErrDenied, what)
	}
	if p.UID != 0 && int64(p.UID) != int64(os.Getuid()) {
		return fmt.Errorf("%w: %s needs the user of this daemon or root, not user %d", base.ErrDenied, what, p.UID)
	}
	return nil
}
