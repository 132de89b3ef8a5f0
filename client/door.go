package client

import (
	"context"
	"net"
	"sync"

	"github.com/xcena-dev/maru/internal/rpc"
)

// door keeps hold of the connection to the configured address. Behind one address another
// server may come up, in a rolling update: a server that was fenced by it answers on the
// old connection for as long as its process lives, and only a new connection finds the
// other one. Concurrency: safe.
type door struct {
	mu struct {
		sync.Mutex
		conn net.Conn
	}
}

// dial gives the dialer of the connection.
func (d *door) dial(address string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, _ string) (net.Conn, error) {
		a, err := rpc.ParseAddress(address)
		if err != nil {
			return nil, err
		}
		conn, err := rpc.DialNet(ctx, a)
		if err != nil {
			return nil, err
		}
		d.mu.Lock()
		d.mu.conn = conn
		d.mu.Unlock()
		return conn, nil
	}
}

// leave ends the connection, so that the next call makes a new one.
func (d *door) leave() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.conn != nil {
		_ = d.mu.conn.Close()
		d.mu.conn = nil
	}
}
