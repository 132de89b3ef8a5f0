package client

import (
	"net"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

func drainEvent(f *fake, region base.RegionID) *maruv1.Event {
	return &maruv1.Event{Event: &maruv1.Event_Drain{Drain: &maruv1.DrainEvent{PoolId: f.pool[:], RegionId: uint32(region)}}}
}

func reclaimEvent(p hot.RelistPage) *maruv1.Event {
	return &maruv1.Event{Event: &maruv1.Event_Reclaim{Reclaim: &maruv1.PageEvent{
		PoolNumber: p.Pool, RegionId: uint32(p.Region), Offset: p.Offset, Generation: uint64(p.Generation),
	}}}
}

// poll waits until a descriptor is readable.
func poll(t *testing.T, fd int) {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 5000)
		if err == unix.EINTR {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("poll: %d, %v", n, err)
		}
		return
	}
}

func splitPort(address string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	port, err = strconv.Atoi(p)
	return host, port, err
}
