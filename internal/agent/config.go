package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Defaults of the program.
const (
	DefaultHost     = "127.0.0.1"
	DefaultHTTPPort = 19860
	// AnyPort takes a free port; NoPort opens none.
	AnyPort = -1
	NoPort  = -2
	// SocketName is the socket's file name; clients look for it in the places that
	// rpc.SocketPath gives.
	SocketName = "agent.sock"
	// EnvPrefix begins the program's variables: MARU_AGENT_RM is --rm.
	EnvPrefix = "MARU_AGENT_"
)

// Config of an agent. Zero fields mean their default.
type Config struct {
	RMAddress  string      // host:port of the resource manager, on another node
	UnixPath   string      // default SocketName in the place that rpc.SocketPath gives
	SocketMode fs.FileMode // default 0600
	StateDir   string      // default DefaultStateDir()
	Host       string      // of HTTP; default 127.0.0.1
	HTTPPort   int         // default 19860; NoPort opens none
	Insecure   bool        // allows a host that others can reach
	Node       node.Options
	Name       string // for people; default the host name
	// ReportInterval is how often the agent says that it lives. Default 5 s.
	ReportInterval time.Duration
	// CallTimeout bounds a call to the resource manager. Default 5 s.
	CallTimeout time.Duration
	// MaxSessionCount bounds the sessions on record. Default 65 536.
	MaxSessionCount int
	// LockTimeout is how long a state directory in use is waited for. Default 500 ms.
	LockTimeout time.Duration
	Logger      *slog.Logger
	Version     string
}

func (c Config) withDefaults() Config {
	c.Host = cmp.Or(c.Host, DefaultHost)
	c.HTTPPort = cmp.Or(c.HTTPPort, DefaultHTTPPort)
	c.SocketMode = cmp.Or(c.SocketMode, 0o600)
	c.StateDir = cmp.Or(c.StateDir, DefaultStateDir())
	c.ReportInterval = cmp.Or(c.ReportInterval, 5*time.Second)
	c.CallTimeout = cmp.Or(c.CallTimeout, 5*time.Second)
	c.MaxSessionCount = cmp.Or(c.MaxSessionCount, 65536)
	c.LockTimeout = cmp.Or(c.LockTimeout, 500*time.Millisecond)
	if c.Name == "" {
		c.Name, _ = os.Hostname()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports every problem at once. Errors: ErrInvalid.
func (c Config) Validate() error {
	var all []error
	bad := func(format string, args ...any) {
		all = append(all, fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, args...)...))
	}
	if c.RMAddress == "" {
		bad("rm is empty; it is HOST:PORT of the resource manager that this node's mappers hold at")
	} else if _, err := rpc.ParseAddress(c.RMAddress); err != nil {
		all = append(all, fmt.Errorf("rm: %w", err))
	}
	if c.HTTPPort < NoPort || c.HTTPPort > 65535 {
		bad("http_port %d, allowed: 1 to 65535, -1 (a free one), -2 (none)", c.HTTPPort)
	}
	if c.SocketMode&^0o777 != 0 {
		bad("socket_mode %#o, allowed: 0600 to 0777", c.SocketMode)
	}
	for name, path := range map[string]string{"state_dir": c.StateDir, "socket": c.UnixPath} {
		if path != "" && !filepath.IsAbs(path) {
			bad("%s %q is not absolute", name, path)
		}
	}
	if c.ReportInterval < 0 || c.CallTimeout < 0 || c.LockTimeout < 0 {
		bad("a duration is negative: report_interval %v, rm_call_timeout %v", c.ReportInterval, c.CallTimeout)
	}
	if c.ReportInterval > 10*time.Second {
		bad("report_interval %v, allowed: up to 10s; the resource manager takes an agent that is silent for 30 s for away", c.ReportInterval)
	}
	if c.MaxSessionCount < 0 {
		bad("max_session_count %d is negative", c.MaxSessionCount)
	}
	return errors.Join(all...)
}

// DefaultStateDir is /var/lib/maru/agent where it can be written, else agent under the
// user's state directory.
func DefaultStateDir() string {
	const system = "/var/lib/maru"
	if unix.Access(system, unix.W_OK) == nil || os.Geteuid() == 0 {
		return filepath.Join(system, "agent")
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "maru", "agent")
	}
	if home, err := os.UserHomeDir(); err == nil {
		return filepath.Join(home, ".local", "state", "maru", "agent")
	}
	return filepath.Join(system, "agent")
}

// Settings are the flags, YAML keys and variables of maru-remote-cxl-agent.
type Settings struct {
	WatchOnly      bool          `yaml:"watch_only" help:"vouch for the mappers of this node, and map no memory; the only mode that exists yet"`
	RM             string        `yaml:"rm" help:"HOST:PORT of the resource manager, on another node"`
	Socket         string        `yaml:"socket" help:"path of the Unix socket (default agent.sock in /run/maru or $XDG_RUNTIME_DIR/maru)"`
	SocketMode     string        `yaml:"socket_mode" help:"octal mode of the socket; 0666 lets processes of every user be vouched for"`
	StateDir       string        `yaml:"state_dir" help:"directory of the durable state (default /var/lib/maru/agent, else under $XDG_STATE_HOME)"`
	Host           string        `yaml:"host" help:"address of the HTTP port; one that others can reach needs --insecure"`
	HTTPPort       int           `yaml:"http_port" help:"port of /metrics, /healthz, /readyz (-1 takes a free one, -2 opens none)"`
	Insecure       bool          `yaml:"insecure" help:"allow a host that others can reach, without transport security"`
	Name           string        `yaml:"name" help:"name of this node for people (default its host name)"`
	ReportInterval time.Duration `yaml:"report_interval" help:"how often the resource manager hears that this agent lives"`
	RMCallTimeout  time.Duration `yaml:"rm_call_timeout" help:"bound of one call to the resource manager"`
	MaxSessions    int           `yaml:"max_session_count" help:"sessions on record"`
	LogLevel       string        `yaml:"log_level" help:"debug, info, warn or error"`
	LogFormat      string        `yaml:"log_format" help:"text or json"`
}

// DefaultSettings are the defaults that --help shows.
func DefaultSettings() Settings {
	return Settings{
		Host: DefaultHost, HTTPPort: DefaultHTTPPort, SocketMode: "0600", LogLevel: "info", LogFormat: "text",
		ReportInterval: 5 * time.Second, RMCallTimeout: 5 * time.Second, MaxSessions: 65536,
	}
}

// Config turns settings into what Start takes, with a logger that writes to w.
// Errors: ErrUnsupported (a mode that does not exist), ErrInvalid, every problem at once.
func (s Settings) Config(w io.Writer, version string) (Config, error) {
	if !s.WatchOnly {
		return Config{}, fmt.Errorf("%w: the agent that maps pool memory and registers it with the NIC for other nodes (RDMA) does not exist yet; "+
			"--watch-only, which vouches for this node's mappers, does", base.ErrUnsupported)
	}
	log, logErr := obs.NewLogger(w, obs.LogOptions{Format: s.LogFormat, Level: s.LogLevel})
	mode, modeErr := strconv.ParseUint(s.SocketMode, 8, 32)
	if modeErr != nil {
		modeErr = fmt.Errorf("%w: socket_mode %q is no octal number", base.ErrInvalid, s.SocketMode)
	}
	// Relative paths are meant from where the command was given.
	abs := func(path string) (string, error) {
		if path == "" {
			return "", nil
		}
		return filepath.Abs(path)
	}
	stateDir, dirErr := abs(s.StateDir)
	socket, socketErr := abs(s.Socket)
	c := Config{
		RMAddress: s.RM, UnixPath: socket, SocketMode: fs.FileMode(mode), StateDir: stateDir, Host: s.Host, HTTPPort: s.HTTPPort, //nolint:gosec // 32 bits were parsed
		Insecure: s.Insecure, Name: s.Name, ReportInterval: s.ReportInterval, CallTimeout: s.RMCallTimeout, MaxSessionCount: s.MaxSessions,
		Logger: log, Version: version,
	}
	return c, errors.Join(logErr, modeErr, dirErr, socketErr, c.Validate())
}
