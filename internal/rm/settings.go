package rm

import (
	"errors"
	"io"
	"path/filepath"

	"github.com/xcena-dev/maru/internal/obs"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// EnvPrefix begins the program's variables: MARU_RM_PORT is --port.
const EnvPrefix = "MARU_RM_"

// Settings are the flags, YAML keys and variables of maru-resource-manager.
type Settings struct {
	Host          string   `yaml:"host" help:"address to listen on; one that others can reach needs --insecure"`
	Port          int      `yaml:"port" help:"TCP port; -1 takes a free one, -2 serves the Unix socket only"`
	Insecure      bool     `yaml:"insecure" help:"allow a host that others can reach, without transport security"`
	UnixSocket    string   `yaml:"unix_socket" help:"path of the Unix socket (default rm-PORT.sock in /run/maru or $XDG_RUNTIME_DIR/maru)"`
	HTTPPort      int      `yaml:"http_port" help:"port of /metrics, /healthz, /readyz (default port + 10000; -2 opens none)"`
	LogLevel      string   `yaml:"log_level" help:"debug, info, warn or error"`
	LogFormat     string   `yaml:"log_format" help:"text or json"`
	StateDir      string   `yaml:"state_dir" help:"directory of the durable state (default /var/lib/maru/rm, else under $XDG_STATE_HOME)"`
	Pools         []string `yaml:"pool" help:"kind:path[,size=8G][,name=NAME][,coherence=hardware|software], kind devdax, fsdax or file; repeatable"`
	Overcommit    bool     `yaml:"overcommit" help:"let pool files on tmpfs be larger than the memory that is available"`
	MaxOwners     int      `yaml:"max_owner_count" help:"owners (server ids) on record"`
	MaxRegions    int      `yaml:"max_region_count" help:"regions in all pools"`
	MaxSessions   int      `yaml:"max_session_count" help:"sessions on record"`
	MaxHolds      int      `yaml:"max_hold_count" help:"rows of (session, region) on record"`
	MaxSpans      int      `yaml:"max_span_count" help:"spans of closed operations of an owner"`
	MaxListLength int      `yaml:"max_list_count" help:"regions in one call"`
	MaxStreams    int      `yaml:"max_watch_stream_count" help:"event streams"`
}

// DefaultSettings are the defaults that --help shows; 0 stands for the default
// that the help text names.
func DefaultSettings() Settings {
	return Settings{
		Host: DefaultHost, Port: DefaultPort, LogLevel: "info", LogFormat: "text",
		MaxOwners: 1024, MaxRegions: 1 << 18, MaxSessions: 1 << 16, MaxHolds: 1 << 20, MaxSpans: 1 << 16, MaxListLength: 4096, MaxStreams: 4096,
	}
}

// Config turns settings into what Start takes, with a logger that writes to w.
// Errors: ErrInvalid, every problem at once.
func (s Settings) Config(w io.Writer, version string) (Config, error) {
	pools, poolErr := ParsePools(s.Pools)
	// A relative directory is meant from where the command was given.
	stateDir, dirErr := s.StateDir, error(nil)
	if stateDir != "" {
		stateDir, dirErr = filepath.Abs(stateDir)
	}
	log, logErr := obs.NewLogger(w, obs.LogOptions{Format: s.LogFormat, Level: s.LogLevel})
	c := Config{
		Host: s.Host, Port: s.Port, Insecure: s.Insecure, UnixPath: s.UnixSocket, HTTPPort: s.HTTPPort, StateDir: stateDir,
		Pools: pools, Overcommit: s.Overcommit, Logger: log, Version: version, MaxWatchStreamCount: s.MaxStreams,
		Limits: core.Limits{
			MaxOwnerCount: s.MaxOwners, MaxRegionCount: s.MaxRegions, MaxSessionCount: s.MaxSessions,
			MaxHoldCount: s.MaxHolds, MaxSpanCount: s.MaxSpans, MaxListCount: s.MaxListLength,
		},
	}
	if poolErr != nil { // said already; Validate would say it again
		c.Pools = nil
	}
	return c, errors.Join(poolErr, logErr, dirErr, c.Validate())
}
