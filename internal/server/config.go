package server

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Defaults of the settings.
const (
	DefaultHost      = "127.0.0.1"
	DefaultPort      = 5555
	DefaultRMAddress = "127.0.0.1:9850"
	// AnyPort takes a free port; NoPort opens none (HTTP only).
	AnyPort = -1
	NoPort  = -2
)

// Config is everything a server can be told. The zero value of a field means its default.
type Config struct {
	Host     string // default 127.0.0.1
	Port     int    // control plane, TCP; default 5555; AnyPort
	HotPort  int    // hot plane, TCP; default Port + 1; AnyPort
	HTTPPort int    // default Port + 10000; AnyPort; NoPort: none
	// Insecure allows a host that other machines can reach, without encryption.
	Insecure bool
	// UnixPath and HotUnixPath are the sockets; default server-PORT.sock and
	// server-PORT-hot.sock in the runtime directory.
	UnixPath    string
	HotUnixPath string

	// RMAddress is the resource manager's; default 127.0.0.1:9850.
	RMAddress string
	// CPUOnly serves cpu pools only and needs no resource manager (MS-02).
	CPUOnly bool
	// ServerID names this server for people; the identity itself is 16 bytes in StateDir.
	ServerID string
	StateDir string

	// CPUBudgetBytes bounds the private cpu pools of all sessions together (CAP-06).
	// Default: half of this machine's memory.
	CPUBudgetBytes uint64
	// CXLBudgetBytes bounds the cxl regions granted to all sessions together; default: what the pools hold.
	CXLBudgetBytes uint64

	// TTL is how long a session is valid after its last heartbeat; Margin is what a
	// client takes off for clocks and delay.
	TTL       time.Duration
	Heartbeat time.Duration
	Margin    time.Duration

	// Bounds. A full one stops admission with an error that names the setting (RPC-13).
	Limits                    directory.Limits
	MaxHotConnectionCount     int
	MaxSessionConnectionCount int
	MaxControlConnectionCount int
	MaxControlMessageBytes    int

	// HelloTimeout bounds a hot connection's handshake, FrameTimeout the rest of a frame
	// whose first byte has come.
	HelloTimeout time.Duration
	FrameTimeout time.Duration
	// RMCallTimeout bounds one call to the resource manager.
	RMCallTimeout time.Duration
	// SweepInterval is how often regions that nobody needs go back (docs/PROTOCOL.md, "Owners").
	SweepInterval time.Duration

	// Node says where the machine's identity is; the zero value is the machine itself.
	Node node.Options
	// Log receives the server's lines; default slog's.
	Log *slog.Logger
	// Version is the program's, for people.
	Version string

	// rmOptions are for tests that lose calls to the resource manager or their answers.
	rmOptions []grpc.DialOption
}

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// WithDefaults fills in what was left out.
func (c Config) WithDefaults() Config {
	c.Host = orDefault(c.Host, DefaultHost)
	if !c.CPUOnly {
		c.RMAddress = orDefault(c.RMAddress, DefaultRMAddress)
	}
	c.Port = orDefault(c.Port, DefaultPort)
	if c.HotPort == 0 {
		c.HotPort = c.Port + 1
		if c.Port == AnyPort {
			c.HotPort = AnyPort
		}
	}
	if c.HTTPPort == 0 {
		c.HTTPPort = c.Port + 10000
		if c.Port < 0 || c.HTTPPort > 65535 {
			c.HTTPPort = NoPort
		}
	}
	c.StateDir = orDefault(c.StateDir, defaultStateDir(c.ServerID))
	c.CPUBudgetBytes = orDefault(c.CPUBudgetBytes, memoryBytes()/2)
	c.TTL = orDefault(c.TTL, 10*time.Second)
	c.Heartbeat = orDefault(c.Heartbeat, time.Second)
	c.Margin = orDefault(c.Margin, time.Second)
	c.MaxHotConnectionCount = orDefault(c.MaxHotConnectionCount, 4096)
	c.MaxSessionConnectionCount = orDefault(c.MaxSessionConnectionCount, 16)
	c.MaxControlConnectionCount = orDefault(c.MaxControlConnectionCount, 4096)
	c.MaxControlMessageBytes = orDefault(c.MaxControlMessageBytes, 4<<20)
	c.HelloTimeout = orDefault(c.HelloTimeout, 5*time.Second)
	c.FrameTimeout = orDefault(c.FrameTimeout, 30*time.Second)
	c.RMCallTimeout = orDefault(c.RMCallTimeout, 10*time.Second)
	c.SweepInterval = orDefault(c.SweepInterval, time.Minute)
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// Validate reports every problem at once. Errors: ErrInvalid.
func (c Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, args...)...))
	}
	for _, p := range []struct {
		name      string
		value, lo int
	}{{"port", c.Port, AnyPort}, {"hot-port", c.HotPort, AnyPort}, {"http-port", c.HTTPPort, NoPort}} {
		if p.value < p.lo || p.value > 65535 {
			bad("%s %d is not between 1 and 65535", p.name, p.value)
		}
	}
	if c.Port > 0 && (c.Port == c.HotPort || c.Port == c.HTTPPort) || c.HotPort > 0 && c.HotPort == c.HTTPPort {
		bad("port %d, hot-port %d and http-port %d must differ", c.Port, c.HotPort, c.HTTPPort)
	}
	if !c.CPUOnly {
		if _, err := rpc.ParseAddress(c.RMAddress); err != nil {
			problems = append(problems, fmt.Errorf("rm-address: %w", err))
		}
	}
	if c.CPUOnly && c.RMAddress != "" && c.RMAddress != DefaultRMAddress {
		bad("rm-address %s and cpu-only contradict each other: without a resource manager there are cpu pools only", c.RMAddress)
	}
	if !validName(c.ServerID) {
		bad("server-id %q must have 1 to 64 of the characters a-z A-Z 0-9 . _ - and must not begin with a dot", c.ServerID)
	}
	if c.TTL < 100*time.Millisecond || c.TTL > time.Hour {
		bad("session-ttl %s is not between 100ms and 1h", c.TTL)
	}
	if c.Heartbeat <= 0 || c.Margin <= 0 || c.Heartbeat+c.Margin >= c.TTL {
		bad("heartbeat-interval %s and session-margin %s must be positive and together below session-ttl %s",
			c.Heartbeat, c.Margin, c.TTL)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"hello-timeout", c.HelloTimeout}, {"frame-timeout", c.FrameTimeout}, {"rm-call-timeout", c.RMCallTimeout},
		{"sweep-interval", c.SweepInterval},
	} {
		if d.value <= 0 {
			bad("%s %s must be positive", d.name, d.value)
		}
	}
	for _, n := range []struct {
		name       string
		value, max int
	}{
		{"max-hot-connections", c.MaxHotConnectionCount, 1 << 20},
		{"max-session-connections", c.MaxSessionConnectionCount, 1 << 10},
		{"max-control-connections", c.MaxControlConnectionCount, 1 << 20},
		{"max-control-message", c.MaxControlMessageBytes, 1 << 30},
	} {
		if n.value < 1 || n.value > n.max {
			bad("%s %d is not between 1 and %d", n.name, n.value, n.max)
		}
	}
	return errors.Join(problems...)
}

// errDAXPath answers the original's flag.
func errDAXPath(path string) error {
	return fmt.Errorf("%w: --dax-path %s: devices belong to the resource manager now: start maru-resource-manager "+
		"--pool devdax:%s and name it here with --rm-address", base.ErrInvalid, path, path)
}

// validName accepts what can be a directory's name; empty is the default.
func validName(s string) bool {
	if s == "" {
		return true
	}
	if len(s) > 64 || s[0] == '.' {
		return false
	}
	return strings.IndexFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '.' && r != '_' && r != '-'
	}) < 0
}

// memoryBytes is this machine's memory; 8 GiB where it cannot be read.
func memoryBytes() uint64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 8 << 30
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		fields := strings.Fields(s.Text())
		if len(fields) >= 2 && fields[0] == "MemTotal:" {
			if kib, err := strconv.ParseUint(fields[1], 10, 53); err == nil {
				return kib << 10
			}
		}
	}
	return 8 << 30
}
