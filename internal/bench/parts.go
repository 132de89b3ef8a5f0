package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/up"
)

// closeTimeout bounds the end of a server or client that a benchmark started.
const closeTimeout = 30 * time.Second

func closing() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), closeTimeout)
}

// serverOptions of a process that is an embedded maru with the echoes beside it.
type serverOptions struct {
	CPUBytes uint64 `json:"cpu_bytes"`
	CXLBytes uint64 `json:"cxl_bytes"`
}

// serverReady says where everything is.
type serverReady struct {
	Server    string  `json:"server"` // control plane, TCP
	HotTCP    address `json:"hot_tcp"`
	EchoTCP   address `json:"echo_tcp"`
	EchoUnix  address `json:"echo_unix"`
	GRPCTCP   address `json:"grpc_tcp"`
	GRPCUnix  address `json:"grpc_unix"`
	Dir       string  `json:"dir"`
	UpSeconds float64 `json:"up_seconds"` // from nothing to ready
}

type serverPart struct {
	up       *up.Up
	dir      string
	echo     *frameEcho
	stopGRPC func() error
	at       serverReady
}

func startServerPart(ctx context.Context, raw json.RawMessage) (part, error) {
	var o serverOptions
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	p := &serverPart{}
	if err := p.start(ctx, o); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *serverPart) start(ctx context.Context, o serverOptions) (err error) {
	began := time.Now()
	p.up, err = up.Start(ctx, up.Options{Listen: "127.0.0.1:0", CPUBytes: o.CPUBytes, CXLBytes: o.CXLBytes, HTTP: up.HTTPOff})
	if err != nil {
		return err
	}
	p.at.UpSeconds = time.Since(began).Seconds()
	a := p.up.Addresses()
	p.at.Server, p.at.Dir = a.Server, a.Dir
	p.at.HotTCP = address{"tcp", a.Hot[len("tcp://"):]}
	if p.dir, err = os.MkdirTemp("", "maru-bench-"); err != nil {
		return err
	}
	var listeners []net.Listener
	listen := func(network, where string) address {
		if err != nil {
			return address{}
		}
		var l net.Listener
		if l, err = (&net.ListenConfig{}).Listen(ctx, network, where); err != nil {
			return address{}
		}
		listeners = append(listeners, l)
		return address{network, l.Addr().String()}
	}
	p.at.EchoTCP, p.at.EchoUnix = listen("tcp", "127.0.0.1:0"), listen("unix", filepath.Join(p.dir, "echo.sock"))
	p.at.GRPCTCP, p.at.GRPCUnix = listen("tcp", "127.0.0.1:0"), listen("unix", filepath.Join(p.dir, "grpc.sock"))
	if err != nil {
		for _, l := range listeners {
			_ = l.Close()
		}
		return err
	}
	p.echo = newFrameEcho(listeners[:2]...)
	p.stopGRPC = newGRPCEcho(listeners[2:]...)
	return nil
}

func (p *serverPart) ready() any { return p.at }

// do answers any order with what the process has used.
func (p *serverPart) do(context.Context, json.RawMessage) (any, error) { return used() }

func (p *serverPart) close() error {
	ctx, cancel := closing()
	defer cancel()
	var errs []error
	if p.echo != nil {
		p.echo.close()
	}
	if p.stopGRPC != nil {
		errs = append(errs, p.stopGRPC())
	}
	if p.up != nil {
		errs = append(errs, p.up.Close(ctx))
	}
	if p.dir != "" {
		errs = append(errs, os.RemoveAll(p.dir))
	}
	return errors.Join(errs...)
}

// proberOptions of a process that probes: a client process of the throughput row.
type proberOptions struct {
	Server  string  `json:"server"`
	Echo    address `json:"echo"`
	Objects int     `json:"objects"`
	Batch   int     `json:"batch"`
	Seed    uint64  `json:"seed"`
}

// probeOrder says how and how long.
type probeOrder struct {
	Through  string        `json:"through"` // client, frames, echo
	Duration time.Duration `json:"duration"`
}

type probeCount struct {
	Keys     int           `json:"keys"`
	Duration time.Duration `json:"duration"`
}

type proberPart struct {
	opt     proberOptions
	client  *client.Client
	conn    *rawConn
	echo    *echoConn
	batches []hot.Keys
	request []byte
}

// smallPageBytes is the page where only metadata counts: the smallest that the
// directory and the record table do not care about.
const smallPageBytes = 64

// openSmall opens a client of opaque values on the cxl pool.
func openSmall(ctx context.Context, server, name string, regionBytes uint64) (*client.Client, error) {
	return client.Open(ctx, client.Config{
		ServerAddress: server, InstanceID: name, Namespace: keys.OpaqueNamespace(), Opaque: true,
		PageBytes: smallPageBytes, RegionBytes: regionBytes, Prefault: client.Off, RPCTimeout: time.Minute,
	})
}

func startProberPart(ctx context.Context, raw json.RawMessage) (part, error) {
	p := &proberPart{}
	if err := json.Unmarshal(raw, &p.opt); err != nil {
		return nil, err
	}
	if err := p.start(ctx); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *proberPart) start(ctx context.Context) (err error) {
	if p.client, err = openSmall(ctx, p.opt.Server, "bench-prober", 64<<10); err != nil {
		return err
	}
	open := p.client.ServerOpen()
	if p.conn, err = dialRaw(ctx, address{"unix", open.GetHotUnixPath()}, p.client.Session(), open); err != nil {
		return err
	}
	if p.echo, err = dialEcho(ctx, p.opt.Echo); err != nil {
		return err
	}
	p.batches = randomBatches(p.opt.Seed, p.opt.Objects, p.opt.Batch)
	p.request = echoRequest(len(hot.AppendProbe(nil, 1, &hot.ProbeRequest{Keys: p.batches[0]})),
		len(hot.AppendProbeAnswer(nil, 1, &hot.ProbeAnswer{Verdicts: make([]byte, p.opt.Batch)})))
	return nil
}

func (p *proberPart) ready() any { return nil }

func (p *proberPart) do(ctx context.Context, raw json.RawMessage) (any, error) {
	var o probeOrder
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	verdicts := make([]byte, p.opt.Batch)
	var once func(packed hot.Keys) error
	switch o.Through {
	case "client":
		once = func(packed hot.Keys) error {
			hits, err := p.client.Probe(ctx, client.ProbeQuery{Keys: packed}, verdicts)
			if err == nil && hits != packed.Len() {
				err = fmt.Errorf("%w: %d of %d probed keys hit", base.ErrInternal, hits, packed.Len())
			}
			return err
		}
	case "frames":
		once = p.conn.probe
	case "echo":
		once = func(hot.Keys) error { return p.echo.call(p.request) }
	default:
		return nil, fmt.Errorf("%w: probe through %q", base.ErrInvalid, o.Through)
	}
	var c probeCount
	began := time.Now()
	for i := 0; c.Duration < o.Duration; i++ {
		if err := once(p.batches[i%len(p.batches)]); err != nil {
			return nil, err
		}
		c.Keys += p.opt.Batch
		c.Duration = time.Since(began)
	}
	return c, nil
}

func (p *proberPart) close() error {
	ctx, cancel := closing()
	defer cancel()
	if p.echo != nil {
		_ = p.echo.conn.Close()
	}
	if p.conn != nil {
		p.conn.close()
	}
	if p.client != nil {
		return p.client.Close(ctx)
	}
	return nil
}

// daemonOptions of a process whose idle use is measured.
type daemonOptions struct {
	Kind      string `json:"kind"` // rm, server, client, echo
	Dir       string `json:"dir"`
	RM        string `json:"rm"`       // server: where the resource manager is
	Server    string `json:"server"`   // client
	PoolDir   string `json:"pool_dir"` // rm: where the pool file lies; empty: Dir
	PoolBytes uint64 `json:"pool_bytes"`
}

type daemonReady struct {
	Address string `json:"address"`
}

type daemonPart struct {
	address string
	stop    func(context.Context) error
}

func startDaemonPart(ctx context.Context, raw json.RawMessage) (part, error) {
	var o daemonOptions
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	switch o.Kind {
	case "rm":
		if o.PoolDir == "" {
			o.PoolDir = o.Dir
		}
		s, err := rm.Start(ctx, rm.Config{
			Port: rm.AnyPort, UnixPath: filepath.Join(o.Dir, "rm.sock"), StateDir: filepath.Join(o.Dir, "rm"), Discovery: rm.DiscoverNone,
			Pools: []rm.PoolSpec{filePool(filepath.Join(o.PoolDir, "pool"), o.PoolBytes)},
		})
		if err != nil {
			return nil, err
		}
		return &daemonPart{"unix:" + s.UnixPath(), func(context.Context) error { return s.Close() }}, nil
	case "server":
		s, err := server.Start(ctx, server.Config{
			Port: server.AnyPort, HTTPPort: server.AnyPort, StateDir: filepath.Join(o.Dir, "server"), RMAddress: o.RM,
			UnixPath: filepath.Join(o.Dir, "server.sock"), HotUnixPath: filepath.Join(o.Dir, "hot.sock"), Log: discard(),
		})
		if err != nil {
			return nil, err
		}
		return &daemonPart{s.ControlAddress(), s.Close}, nil
	case "client":
		return startIdleClient(ctx, o)
	case "echo":
		return startEchoPart(ctx, o.Dir)
	}
	return nil, fmt.Errorf("%w: no daemon %q", base.ErrInvalid, o.Kind)
}

// startIdleClient has memory in both media and objects in it, and then does nothing.
func startIdleClient(ctx context.Context, o daemonOptions) (part, error) {
	const value = 64 << 10
	c, err := client.Open(ctx, client.Config{
		ServerAddress: o.Server, InstanceID: "bench-idle", Namespace: keys.OpaqueNamespace(), Opaque: true,
		PageBytes: value, CPUBytes: 16 << 20, RegionBytes: 16 << 20, Logger: discard(),
	})
	if err != nil {
		return nil, err
	}
	items := make([]client.StoreItem, 32)
	for i := range items {
		items[i] = client.StoreItem{Key: keyOf(uint64(i)), Runs: [][]byte{make([]byte, value)}} //nolint:gosec // positive
	}
	codes := make([]base.Code, len(items))
	if err := c.Store(ctx, items, codes); err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	if err := allOK("store", codes); err != nil {
		return nil, errors.Join(err, c.Close(ctx))
	}
	return &daemonPart{"", c.Close}, nil
}

func (p *daemonPart) ready() any { return daemonReady{p.address} }

func (p *daemonPart) do(context.Context, json.RawMessage) (any, error) { return used() }

func (p *daemonPart) close() error {
	ctx, cancel := closing()
	defer cancel()
	return p.stop(ctx)
}

// allOK returns the first code that is not.
func allOK(what string, codes []base.Code) error {
	for i, code := range codes {
		if code != base.CodeOK {
			return fmt.Errorf("bench: %s of object %d: %w", what, i, base.ErrorOf(code))
		}
	}
	return nil
}
