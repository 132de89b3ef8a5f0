package peer

import (
	"context"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcpeer "google.golang.org/grpc/peer"
)

// AuthInfo is what [ServerCredentials] knows of a connection. Peer is nil on TCP.
type AuthInfo struct {
	credentials.CommonAuthInfo
	Peer *Peer
}

// AuthType implements credentials.AuthInfo.
func (AuthInfo) AuthType() string { return "maru-peer" }

// FromContext returns the process that made the call, nil when it came over TCP.
// Ownership: the connection's; it is closed with it. A [Watcher] takes a pidfd of its own.
func FromContext(ctx context.Context) *Peer {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, _ := p.AuthInfo.(AuthInfo)
	return info.Peer
}

// ServerCredentials finds the process behind each connection to a Unix socket. A
// connection whose process cannot be found (it has ended) is closed. TCP connections
// pass without Peer. Neither is encrypted: listeners of other machines need more.
func ServerCredentials() credentials.TransportCredentials {
	return serverCredentials{insecure.NewCredentials()}
}

type serverCredentials struct {
	credentials.TransportCredentials
}

func (c serverCredentials) Clone() credentials.TransportCredentials {
	return serverCredentials{c.TransportCredentials.Clone()}
}

func (serverCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	info := AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return conn, info, nil
	}
	p, err := FromConn(u)
	if err != nil {
		return nil, nil, err
	}
	info.Peer = p
	// The kernel carries the bytes of a Unix socket from process to process.
	info.SecurityLevel = credentials.PrivacyAndIntegrity
	return &connWithPeer{UnixConn: u, peer: p}, info, nil
}

// connWithPeer closes the pidfd with the connection.
type connWithPeer struct {
	*net.UnixConn
	peer *Peer
	once sync.Once
	err  error
}

func (c *connWithPeer) Close() error {
	c.once.Do(func() {
		c.err = c.UnixConn.Close()
		c.peer.Close()
	})
	return c.err
}
