package obs

import (
	"net"
	"sync"
)

// limit bounds the connections of a listener: those beyond it are closed at once, so that
// an operator's scrape fails visibly instead of waiting in the backlog.
func limit(l net.Listener, maxCount int) net.Listener {
	return &limitedListener{Listener: l, free: make(chan struct{}, maxCount)}
}

type limitedListener struct {
	net.Listener
	free chan struct{}
}

func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.free <- struct{}{}:
			return &limitedConn{Conn: c, free: l.free}, nil
		default:
			_ = c.Close()
		}
	}
}

type limitedConn struct {
	net.Conn
	free chan struct{}
	once sync.Once
}

func (c *limitedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { <-c.free })
	return err
}
