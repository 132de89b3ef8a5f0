package server

import (
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"

	"github.com/xcena-dev/maru/internal/base"
)

// boundedCredentials bounds the connections of the control plane. It sits at the
// handshake and not at the listener, since the credentials below have to see a Unix
// connection as what it is.
type boundedCredentials struct {
	credentials.TransportCredentials
	free chan struct{}
}

func newBoundedCredentials(c credentials.TransportCredentials, maxCount int) credentials.TransportCredentials {
	return &boundedCredentials{TransportCredentials: c, free: make(chan struct{}, maxCount)}
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *boundedCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	select {
	case c.free <- struct{}{}:
	default:
		return nil, nil, fmt.Errorf("%w: %d connections of the control plane (setting max-control-connections)", base.ErrLimit, cap(c.free))
	}
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		<-c.free
		return nil, nil, err
	}
	return &boundedConn{Conn: conn, release: sync.OnceFunc(func() { <-c.free })}, info, nil
}

// Clone implements credentials.TransportCredentials; clones share the bound.
func (c *boundedCredentials) Clone() credentials.TransportCredentials {
	return &boundedCredentials{TransportCredentials: c.TransportCredentials.Clone(), free: c.free}
}

type boundedConn struct {
	net.Conn
	release func()
}

func (c *boundedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}
