package server

import (
	"errors"
	"io"
	"time"

	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/obs"
)

// EnvPrefix begins the program's variables: MARU_SERVER_PORT is --port.
const EnvPrefix = "MARU_SERVER_"

// Settings are the flags, YAML keys and variables of maru-server.
type Settings struct {
	Host          string `yaml:"host" help:"address to listen on; one that others can reach needs --insecure"`
	Port          int    `yaml:"port" help:"TCP port of the control plane; -1 takes a free one"`
	HotPort       int    `yaml:"hot_port" help:"TCP port of the hot plane (default port + 1; -1 takes a free one)"`
	HTTPPort      int    `yaml:"http_port" help:"port of /metrics, /healthz, /readyz and the status page (default port + 10000; -2 opens none)"`
	Insecure      bool   `yaml:"insecure" help:"allow a host that others can reach, without transport security"`
	UnixSocket    string `yaml:"unix_socket" help:"Unix socket of the control plane (default server-PORT.sock in /run/maru or $XDG_RUNTIME_DIR/maru)"`
	HotUnixSocket string `yaml:"hot_unix_socket" help:"Unix socket of the hot plane (default server-PORT-hot.sock beside the other)"`
	RMAddress     string `yaml:"rm_address" help:"the resource manager, host:port or unix:/path; its Unix socket is found by itself on this machine"`
	CPUOnly       bool   `yaml:"cpu_only" help:"serve cpu pools only, without a resource manager"`
	ServerID      string `yaml:"server_id" help:"name of this server for people; names its default state directory too"`
	StateDir      string `yaml:"state_dir" help:"directory of the durable identity (default /var/lib/maru/SERVER_ID, else under $XDG_STATE_HOME)"`
	LogLevel      string `yaml:"log_level" help:"debug, info, warn or error"`
	LogFormat     string `yaml:"log_format" help:"text or json"`

	CPUBudgetBytes uint64 `yaml:"cpu_budget" help:"private cpu pools of all sessions of one host together (default half of this machine's memory)"`
	CXLBudgetBytes uint64 `yaml:"cxl_bytes" help:"cxl regions of a session that asks for no bound of its own (default: what the pools have)"`

	TTL           time.Duration `yaml:"session_ttl" help:"how long a session is valid after its last heartbeat"`
	Heartbeat     time.Duration `yaml:"heartbeat_interval" help:"how often clients are told to send one"`
	Margin        time.Duration `yaml:"session_margin" help:"what clients take off the TTL for clocks and delay"`
	HelloTimeout  time.Duration `yaml:"hello_timeout" help:"bound of a hot connection's handshake"`
	FrameTimeout  time.Duration `yaml:"frame_timeout" help:"bound of the rest of a frame whose first byte has come"`
	RMCallTimeout time.Duration `yaml:"rm_call_timeout" help:"bound of one call to the resource manager"`
	SweepInterval time.Duration `yaml:"sweep_interval" help:"how often regions that nobody needs go back to the resource manager"`

	MaxSessions            int    `yaml:"max_sessions" help:"sessions that are live or hold something"`
	MaxNamespaces          int    `yaml:"max_namespaces" help:"namespaces in use"`
	MaxObjects             uint64 `yaml:"max_objects" help:"objects in the directory"`
	MaxExtraReplicas       uint64 `yaml:"max_extra_replicas" help:"replicas beyond the first of each object"`
	MaxRegions             int    `yaml:"max_regions" help:"regions of all sessions"`
	MaxRegionPages         uint64 `yaml:"max_region_pages" help:"pages of one region"`
	MaxPages               uint64 `yaml:"max_pages" help:"pages of all regions"`
	MaxLeases              int    `yaml:"max_leases" help:"copy and view leases of a session"`
	MaxRequestLeases       int    `yaml:"max_request_leases" help:"replicas kept by a session's request leases"`
	MaxRequests            int    `yaml:"max_requests" help:"engine requests with request leases, a session"`
	MaxOperations          int    `yaml:"max_operations" help:"unresolved operations of a session"`
	MaxOperationRows       int    `yaml:"max_operation_rows" help:"commit rows in those operations"`
	MaxEvents              int    `yaml:"max_events" help:"events sent to a session and not acknowledged"`
	MaxUnreachable         int    `yaml:"max_unreachable" help:"regions that a session reported as unreachable"`
	MaxDeletes             int    `yaml:"max_deletes" help:"deletes that wait for marks"`
	MaxTombstones          int    `yaml:"max_tombstones" help:"keys deleted before relisting is complete"`
	MaxHotConnections      int    `yaml:"max_hot_connections" help:"hot connections of all sessions"`
	MaxSessionConnections  int    `yaml:"max_session_connections" help:"hot connections of one session"`
	MaxControlConnections  int    `yaml:"max_control_connections" help:"connections of the control plane"`
	MaxControlMessageBytes int    `yaml:"max_control_message" help:"one message of the control plane"`

	// DAXPath is the original's flag. It is known so that it gets an answer.
	DAXPath string `yaml:"dax_path" help:"replaced: devices belong to maru-resource-manager --pool; maru-server finds it with --rm-address"`
}

// DefaultSettings are the defaults that --help shows; 0 stands for the default
// that the help text names.
func DefaultSettings() Settings {
	c := Config{}.WithDefaults()
	d := defaultLimits()
	return Settings{
		Host: DefaultHost, Port: DefaultPort, RMAddress: DefaultRMAddress, LogLevel: "info", LogFormat: "text",
		TTL: c.TTL, Heartbeat: c.Heartbeat, Margin: c.Margin, HelloTimeout: c.HelloTimeout, FrameTimeout: c.FrameTimeout,
		RMCallTimeout: c.RMCallTimeout, SweepInterval: c.SweepInterval,
		MaxSessions: d.MaxSessions, MaxNamespaces: d.MaxNamespaces, MaxObjects: d.MaxObjects, MaxExtraReplicas: d.MaxExtraReplicas,
		MaxRegions: d.MaxRegions, MaxRegionPages: d.MaxRegionPages, MaxPages: d.MaxPages, MaxLeases: d.MaxLeases,
		MaxRequestLeases: d.MaxRequestLeases, MaxRequests: d.MaxRequests, MaxOperations: d.MaxOperations, MaxOperationRows: d.MaxOperationRows,
		MaxEvents: d.MaxEvents, MaxUnreachable: d.MaxUnreachable, MaxDeletes: d.MaxDeletes, MaxTombstones: d.MaxTombstones,
		MaxHotConnections: c.MaxHotConnectionCount, MaxSessionConnections: c.MaxSessionConnectionCount,
		MaxControlConnections: c.MaxControlConnectionCount, MaxControlMessageBytes: 4 * hot.MaxPayloadBytes,
	}
}

// defaultLimits asks an empty directory, which is the one place that knows them.
func defaultLimits() directory.Limits {
	d, err := directory.New(directory.Config{ServerEpoch: 1})
	if err != nil {
		return directory.Limits{} // zeroes are the defaults, too
	}
	defer func() { _ = d.Free() }()
	return d.Limits()
}

// Config turns settings into what Start takes, with a logger that writes to w.
// Errors: ErrInvalid, every problem at once.
func (s Settings) Config(w io.Writer, version string) (Config, error) {
	log, logErr := obs.NewLogger(w, obs.LogOptions{Format: s.LogFormat, Level: s.LogLevel})
	c := Config{
		Host: s.Host, Port: s.Port, HotPort: s.HotPort, HTTPPort: s.HTTPPort, Insecure: s.Insecure,
		UnixPath: s.UnixSocket, HotUnixPath: s.HotUnixSocket, RMAddress: s.RMAddress, CPUOnly: s.CPUOnly,
		ServerID: s.ServerID, StateDir: s.StateDir, CPUBudgetBytes: s.CPUBudgetBytes, CXLBudgetBytes: s.CXLBudgetBytes,
		TTL: s.TTL, Heartbeat: s.Heartbeat, Margin: s.Margin, HelloTimeout: s.HelloTimeout, FrameTimeout: s.FrameTimeout,
		RMCallTimeout: s.RMCallTimeout, SweepInterval: s.SweepInterval,
		MaxHotConnectionCount: s.MaxHotConnections, MaxSessionConnectionCount: s.MaxSessionConnections,
		MaxControlConnectionCount: s.MaxControlConnections, MaxControlMessageBytes: s.MaxControlMessageBytes,
		Limits: directory.Limits{
			MaxSessions: s.MaxSessions, MaxNamespaces: s.MaxNamespaces, MaxObjects: s.MaxObjects, MaxExtraReplicas: s.MaxExtraReplicas,
			MaxRegions: s.MaxRegions, MaxRegionPages: s.MaxRegionPages, MaxPages: s.MaxPages, MaxLeases: s.MaxLeases,
			MaxRequestLeases: s.MaxRequestLeases, MaxRequests: s.MaxRequests, MaxOperations: s.MaxOperations,
			MaxOperationRows: s.MaxOperationRows, MaxEvents: s.MaxEvents, MaxUnreachable: s.MaxUnreachable,
			MaxDeletes: s.MaxDeletes, MaxTombstones: s.MaxTombstones,
		},
		Log: log, Version: version,
	}
	var daxErr error
	if s.DAXPath != "" {
		daxErr = errDAXPath(s.DAXPath)
	}
	return c, errors.Join(daxErr, logErr, c.WithDefaults().Validate())
}
