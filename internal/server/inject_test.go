package server

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/inject"
	"github.com/xcena-dev/maru/internal/rpc"
)

// serverSubject is a server whose file calls fail.
func serverSubject(ctx context.Context, options json.RawMessage, in io.Reader, say func(any)) error {
	var cfg Config
	if err := json.Unmarshal(options, &cfg); err != nil {
		return err
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	return inject.Run(in, say, func() (func() error, error) {
		s, err := Start(ctx, cfg)
		if err != nil {
			return nil, err
		}
		return func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			return s.Close(ctx)
		}, nil
	})
}

// Each file call of a server's first start fails once: it is told, nothing is left open,
// and a start without faults works, as the server that it had said to be.
func TestEachFileCallFails(t *testing.T) {
	if testing.Short() {
		t.Skip("some dozens of processes")
	}
	inject.Walk(t, mayFail, func(t *testing.T, r *inject.Round) {
		cfg := testConfig(t)
		cfg.HTTPPort = NoPort
		job := cfg
		job.Log = nil
		dir := filepath.Dir(cfg.StateDir)
		p := inject.StartOrSkip(t, inject.Options{Subject: "server", Options: job, Under: []string{dir, "/proc/sys/kernel/random"}, Fault: r.Fault})
		r.Process = p
		ready, err := p.Await()
		if err != nil {
			t.Fatal(err)
		}
		end := ready.End
		var id []byte
		if ready.Ready {
			id = askWho(t, r, cfg.UnixPath)
			p.CloseInput()
			e, err := p.Await()
			if err != nil {
				t.Fatal(err)
			}
			end = e.End
		}
		r.Surfaced = r.Surfaced || end.Start != "" || end.Close != ""
		if len(end.Left) > 0 {
			what, _ := p.Hit()
			t.Errorf("%s: left open: %v", what, end.Left)
		}
		p.Release()
		again, err := Start(t.Context(), cfg)
		if err != nil {
			t.Fatalf("a start without faults: %v", err)
		}
		now := again.ServerID()
		if id != nil && string(now[:]) != string(id) {
			t.Errorf("server %v was %x", now, id)
		}
		stopServer(t, again)
	})
}

// askWho asks a server for its id; a connection that it could not judge is made again.
func askWho(t *testing.T, r *inject.Round, path string) []byte {
	t.Helper()
	var last error
	for range 3 {
		conn, err := rpc.NewClient("unix:"+path, rpc.Retry{})
		if err != nil {
			t.Fatal(err)
		}
		d, err := maruv1.NewMetadataServerClient(conn).DescribeServer(testContext(t), &maruv1.DescribeServerRequest{Version: &maruv1.ProtocolVersion{Min: 1, Max: 1}})
		_ = conn.Close()
		if last = r.See(err); last == nil {
			return d.GetServerId()
		}
	}
	t.Errorf("the server does not answer although one call failed only: %v", last)
	return nil
}

// mayFail says which calls a server goes on without, and why.
func mayFail(what string) string {
	for _, x := range []struct{ call, path, why string }{
		{"fstat ", "", "the size is a hint to the reader"},
		{"fstatat ", "", "names are looked at before they are made or replaced, which then fails by itself"},
		{"unlinkat ", ".node-id-", "a file that was linked under its name keeps a second one"},
		{"fstat ", ".sock.lock", "what is in a socket's lock file is for people"},
		{"ftruncate ", ".sock.lock", "as above"},
		{"pwrite ", ".sock.lock", "as above"},
		{"unlinkat ", ".sock", "the next start takes a socket over that nobody serves"},
	} {
		if strings.Contains(what, ", "+x.call) && strings.Contains(what, x.path) {
			return x.why
		}
	}
	return ""
}
