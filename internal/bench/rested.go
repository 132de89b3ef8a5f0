package bench

import (
	"context"
	"errors"
	"net"
	"path/filepath"

	"github.com/xcena-dev/maru/internal/hot"
)

// startEchoPart is a process with nothing but the echoes, on Unix sockets in a directory.
func startEchoPart(ctx context.Context, dir string) (part, error) {
	var listen net.ListenConfig
	frames, err := listen.Listen(ctx, "unix", filepath.Join(dir, echoSocket))
	if err != nil {
		return nil, err
	}
	calls, err := listen.Listen(ctx, "unix", filepath.Join(dir, grpcSocket))
	if err != nil {
		return nil, errors.Join(err, frames.Close())
	}
	echo, stop := newFrameEcho(frames), newGRPCEcho(calls)
	return &daemonPart{"unix:" + frames.Addr().String(), func(context.Context) error {
		echo.close()
		return stop()
	}}, nil
}

const (
	echoSocket = "echo.sock"
	grpcSocket = "grpc.sock"
)

// restedEchoes are the echoes in a process of their own that rests between calls, as the
// daemons of a client that copies do: most of such a call is the time in which both
// processors wake up.
type restedEchoes struct {
	process *process
	frame   *echoConn
	grpc    *grpcClient
}

func startRestedEchoes(ctx context.Context, dir string) (_ *restedEchoes, err error) {
	e := &restedEchoes{}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.process, err = startPart(ctx, "daemon", daemonOptions{Kind: "echo", Dir: dir}, nil); err != nil {
		return nil, err
	}
	if e.frame, err = dialEcho(ctx, address{"unix", filepath.Join(dir, echoSocket)}); err != nil {
		return nil, err
	}
	if e.grpc, err = dialGRPC(address{"unix", filepath.Join(dir, grpcSocket)}); err != nil {
		return nil, err
	}
	return e, e.grpc.call(ctx, echoRequest(hot.HeaderBytes, hot.HeaderBytes)) // connected
}

func (e *restedEchoes) close() (err error) {
	if e.grpc != nil {
		err = e.grpc.conn.Close()
	}
	if e.frame != nil {
		err = errors.Join(err, e.frame.conn.Close())
	}
	return errors.Join(err, closeAll(e.process))
}
