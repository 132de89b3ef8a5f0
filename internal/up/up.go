// Package up runs a resource manager and a metadata server in one process on an
// emulated pool: the embedded default, with nothing else to install. It is what
// `maru up`, the demonstration, the benchmarks and tests start.
//
// State and pool lie in one directory, by default on /dev/shm, so that both are
// gone together after a reboot (docs/PROTOCOL.md, "Faults of memory"). Clients
// and the server reach the resource manager through its real Unix socket: the
// server is recorded there by its own pid and start time like any other.
package up

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/hugetlb"
	"github.com/xcena-dev/maru/internal/media/numa"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
)

// Options of an embedded deployment. The zero value of a field means its default.
type Options struct {
	Listen   string // host:port of the server; default 127.0.0.1:5555; port 0: any, for all ports
	Dir      string // default: a new directory on /dev/shm
	CPUBytes uint64 // budget of private cpu pools; default: the server's
	CXLBytes uint64 // bytes of the emulated cxl pool; 0: none, then no resource manager either
	NUMANode *int   // where the pool's memory comes from; nil: as the kernel likes
	Pages    Pages  // what the pool is made of
	HTTP     HTTP
	Insecure bool
	// Overcommit lets the pool be larger than the memory that is available.
	Overcommit bool
	Version    string
	Log        *slog.Logger
}

// HTTP says whether the ports for metrics and health are opened.
type HTTP uint8

// Values of HTTP.
const (
	HTTPOn HTTP = iota
	HTTPOff
)

// Pages says what memory the emulated pool is made of.
type Pages uint8

// Kinds of pages.
const (
	PagesSmall  Pages = iota // a file in Dir
	PagesHuge2M              // reserved huge pages: a file on a mounted hugetlbfs
)

// ParsePages reads a setting. Pages of 1 GiB are none: regions begin at multiples of
// 2 MiB, and a mapping of such pages at multiples of theirs. Errors: ErrInvalid.
func ParsePages(s string) (Pages, error) {
	switch s {
	case "", "off":
		return PagesSmall, nil
	case "2M":
		return PagesHuge2M, nil
	}
	return PagesSmall, fmt.Errorf("%w: huge pages %q of the emulated pool, allowed: off, 2M (private cpu pools also: auto, 1G)", base.ErrInvalid, s)
}

// DefaultListen is the server's address.
const DefaultListen = "127.0.0.1:5555"

// Up is a running deployment.
type Up struct {
	opt    Options
	made   []string // what Close removes, in this order
	pool   string   // path of the emulated pool, if any
	rm     *rm.Server
	server *server.Server
}

// Start starts both programs and returns when they can be used. Close ends them and
// removes what was made. ctx bounds the start only.
//
// Errors: ErrInvalid (also a host that others reach, without Insecure), ErrBusy
// (port or directory in use), ErrFull (not enough memory or room).
func Start(ctx context.Context, opt Options) (_ *Up, err error) {
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	if opt.Listen == "" {
		opt.Listen = DefaultListen
	}
	host, port, err := splitListen(opt.Listen)
	if err != nil {
		return nil, err
	}
	opt.CXLBytes = poolBytes(opt.CXLBytes)
	if err := opt.checkMemory(); err != nil {
		return nil, err
	}
	u := &Up{opt: opt}
	defer func() {
		if err != nil {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			err = errors.Join(err, u.Close(closing))
		}
	}()
	if err := u.makeDir(); err != nil {
		return nil, err
	}
	if opt.CXLBytes > 0 {
		if err := u.startRM(ctx, host, port); err != nil {
			return nil, err
		}
	}
	if err := u.startServer(ctx, host, port); err != nil {
		return nil, err
	}
	return u, u.waitReady(ctx)
}

// checkMemory refuses what the pool cannot be made of.
func (o Options) checkMemory() error {
	if o.CXLBytes == 0 {
		if o.NUMANode != nil || o.Pages != PagesSmall {
			return fmt.Errorf("%w: NUMA node and huge pages are of the emulated pool, and there is none; engines set theirs for cpu pools", base.ErrInvalid)
		}
		return nil
	}
	if o.NUMANode != nil {
		if err := numa.Check("", *o.NUMANode); err != nil {
			return fmt.Errorf("up: %w", err)
		}
	}
	if o.Pages == PagesHuge2M {
		if err := hugetlb.Check("", hugetlb.Size2M, o.NUMANode, o.CXLBytes+poolfmt.DataOffset); err != nil {
			return fmt.Errorf("up: pool of %d bytes: %w", o.CXLBytes+poolfmt.DataOffset, err)
		}
	}
	return nil
}

// poolPath is where the emulated pool lies.
func (u *Up) poolPath() (string, error) {
	if u.opt.Pages == PagesSmall {
		return u.path("pool"), nil
	}
	mount, err := hugetlb.Mount("", hugetlb.Size2M)
	if err != nil {
		return "", fmt.Errorf("up: %w", err)
	}
	dir, err := os.MkdirTemp(mount, "maru-up-")
	if err != nil {
		return "", fmt.Errorf("up: make a directory in %s: %w", mount, err)
	}
	u.made = append(u.made, dir)
	return filepath.Join(dir, "pool"), nil
}

// poolBytes is the size of a pool that has room for one region of usable bytes:
// sizes that users give are usable bytes, and records (64 bytes a page of at least
// 4096) and the region line come on top.
func poolBytes(usable uint64) uint64 {
	if usable == 0 {
		return 0
	}
	whole := usable + usable/64 + poolfmt.Alignment
	return whole / poolfmt.Alignment * poolfmt.Alignment
}

func splitListen(listen string) (string, int, error) {
	host, text, err := net.SplitHostPort(listen)
	if err != nil {
		return "", 0, fmt.Errorf("%w: listen %q must be HOST:PORT: %w", base.ErrInvalid, listen, err)
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 0 || port > 65535-10000 {
		return "", 0, fmt.Errorf("%w: listen %q: port must be 0 (any) to %d", base.ErrInvalid, listen, 65535-10000)
	}
	return host, port, nil
}

// makeDir makes the directory and notes what is ours in it.
func (u *Up) makeDir() error {
	if u.opt.Dir == "" {
		parent := "/dev/shm"
		if _, err := os.Stat(parent); err != nil {
			parent = os.TempDir()
		}
		dir, err := os.MkdirTemp(parent, "maru-up-")
		if err != nil {
			return fmt.Errorf("up: make a directory in %s: %w", parent, err)
		}
		u.opt.Dir = dir
		u.made = append(u.made, dir)
		return nil
	}
	dir, err := filepath.Abs(u.opt.Dir)
	if err != nil {
		return fmt.Errorf("up: directory %q: %w", u.opt.Dir, err)
	}
	u.opt.Dir = dir
	info, err := os.Stat(dir)
	switch {
	case err == nil && !info.IsDir():
		return fmt.Errorf("%w: --dir %s is no directory; name one, or a path where nothing is yet", base.ErrInvalid, dir)
	case err == nil:
		for _, name := range []string{"rm", "server", "pool"} {
			if _, err := os.Lstat(u.path(name)); err == nil {
				return fmt.Errorf("%w: directory %s has %s in it already: another `maru up` uses it, or one was killed; "+
					"give another --dir, or remove it when no maru runs there", base.ErrBusy, dir, name)
			}
		}
		for _, name := range []string{"pool", "rm", "server"} {
			u.made = append(u.made, u.path(name))
		}
		return nil
	case errors.Is(err, os.ErrNotExist):
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("up: make directory %s: %w", dir, err)
		}
		u.made = append(u.made, dir)
		return nil
	}
	return fmt.Errorf("up: directory %s: %w", dir, err)
}

func (u *Up) path(name string) string { return filepath.Join(u.opt.Dir, name) }

// socket puts a socket beside the state, where a path of that length fits.
func (u *Up) socket(name string) string {
	const most = 107 // sun_path without its zero byte
	if p := u.path(name); len(p) <= most {
		u.made = append(u.made, p, p+".lock")
		return p
	}
	return ""
}

func (u *Up) startRM(ctx context.Context, host string, port int) error {
	var err error
	if u.pool, err = u.poolPath(); err != nil {
		return err
	}
	cfg := rm.Config{
		Host: host, Port: rm.DefaultPort, Insecure: u.opt.Insecure, UnixPath: u.socket("rm.sock"),
		StateDir: u.path("rm"), Discovery: rm.DiscoverNone, Overcommit: u.opt.Overcommit,
		Pools: []rm.PoolSpec{{
			Kind: dax.KindFile, Path: u.pool, SizeBytes: u.opt.CXLBytes + poolfmt.DataOffset, Name: "emulated",
			Coherence: base.CoherenceHardware, NUMANode: u.opt.NUMANode,
		}},
		Logger: u.opt.Log.With("program", "maru-resource-manager"), Version: u.opt.Version,
	}
	if port != server.DefaultPort {
		cfg.Port = rm.AnyPort
	}
	if u.opt.HTTP == HTTPOff || cfg.Port == rm.AnyPort {
		cfg.HTTPPort = rm.NoPort
	}
	if u.rm, err = rm.Start(ctx, cfg); err != nil {
		return fmt.Errorf("up: resource manager: %w", err)
	}
	return nil
}

func (u *Up) startServer(ctx context.Context, host string, port int) error {
	cfg := server.Config{
		Host: host, Port: port, Insecure: u.opt.Insecure, StateDir: u.path("server"),
		UnixPath: u.socket("server.sock"), HotUnixPath: u.socket("server-hot.sock"),
		CPUOnly: u.rm == nil, CPUBudgetBytes: u.opt.CPUBytes,
		Log: u.opt.Log, Version: u.opt.Version,
	}
	if port == 0 {
		cfg.Port, cfg.HTTPPort = server.AnyPort, server.AnyPort
	}
	if u.opt.HTTP == HTTPOff {
		cfg.HTTPPort = server.NoPort
	}
	if u.rm != nil {
		cfg.RMAddress = "unix:" + u.rm.UnixPath()
	}
	var err error
	if u.server, err = server.Start(ctx, cfg); err != nil {
		return fmt.Errorf("up: metadata server: %w", err)
	}
	return nil
}

// waitReady waits until the server has its pools: a client that comes now finds them.
func (u *Up) waitReady(ctx context.Context) error {
	for {
		reason, err := u.server.Ready()
		if err != nil {
			return fmt.Errorf("up: metadata server: %w", err)
		}
		if reason == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("up: metadata server is not ready: %s: %w", reason, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Addresses of a deployment, as `maru up` prints them.
type Addresses struct {
	Server     string `json:"server"` // tcp://host:port
	Hot        string `json:"hot"`
	ServerUnix string `json:"server_unix"`
	RM         string `json:"rm,omitempty"`
	RMUnix     string `json:"rm_unix,omitempty"`
	Pool       string `json:"pool,omitempty"` // path of the emulated pool
	PoolBytes  uint64 `json:"pool_bytes,omitempty"`
	HTTP       string `json:"http,omitempty"`
	Dir        string `json:"dir"`
	PID        int    `json:"pid"`
}

// Addresses returns where it can be reached.
func (u *Up) Addresses() Addresses {
	a := Addresses{
		Server: "tcp://" + u.server.ControlAddress(), Hot: "tcp://" + u.server.HotAddress(), ServerUnix: u.server.UnixPath(),
		Dir: u.opt.Dir, PID: os.Getpid(),
	}
	if h := u.server.HTTPAddress(); h != "" {
		a.HTTP = "http://" + h
	}
	if u.rm != nil {
		a.RM, a.RMUnix = u.rm.Address(), u.rm.UnixPath()
		a.Pool, a.PoolBytes = u.pool, u.opt.CXLBytes
	}
	return a
}

// Wait returns nil when ctx ends, or the error of a program that cannot go on.
func (u *Up) Wait(ctx context.Context) error {
	var manager <-chan error // without a resource manager: never ready
	if u.rm != nil {
		manager = u.rm.Failed()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-manager:
		return fmt.Errorf("up: resource manager: %w", err)
	case err := <-u.server.Failed():
		return fmt.Errorf("up: metadata server: %w", err)
	}
}

// Close ends both programs, the server first, and removes everything that Start made.
func (u *Up) Close(ctx context.Context) error {
	var errs []error
	if u.server != nil {
		errs = append(errs, u.server.Close(ctx))
	}
	if u.rm != nil {
		errs = append(errs, u.rm.Close())
	}
	for i := len(u.made) - 1; i >= 0; i-- {
		errs = append(errs, os.RemoveAll(u.made[i]))
	}
	return errors.Join(errs...)
}
