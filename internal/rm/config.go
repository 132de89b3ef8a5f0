package rm

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/settings"
	"github.com/xcena-dev/maru/internal/store"
)

// Defaults of the program.
const (
	DefaultHost = "127.0.0.1"
	DefaultPort = 9850
	// AnyPort takes a free port; NoPort opens none.
	AnyPort = -1
	NoPort  = -2
)

// Config of a resource manager. Zero fields mean their default.
type Config struct {
	Host     string // default 127.0.0.1
	Port     int    // default 9850; AnyPort; NoPort serves the Unix socket only
	Insecure bool   // allows a host that others can reach
	// UnixPath is the socket; default rm-PORT.sock in the place that rpc.SocketPath gives.
	UnixPath   string
	SocketMode fs.FileMode // default 0600
	HTTPPort   int         // default port + 10000; NoPort (and AnyPort with it) opens none
	StateDir   string      // default DefaultStateDir()
	Pools      []PoolSpec
	Discovery  Discovery
	SysfsRoot  string // default /sys
	Node       node.Options
	Limits     core.Limits
	// MaxBatchCount bounds the requests that share one commit. Default 512.
	MaxBatchCount int
	// MaxWatchStreamCount bounds event streams. Default 4096.
	MaxWatchStreamCount int
	// DomainProofTimeout is how long a nonce slot is kept for one mapper. Default 30 s.
	DomainProofTimeout time.Duration
	// Overcommit lets pool files on tmpfs be larger than the memory that is available.
	Overcommit bool
	// LockTimeout is how long a state directory or store in use is waited for. Default 500 ms.
	LockTimeout time.Duration
	Logger      *slog.Logger
	Version     string // of the program, for Describe

	// WrapStore, when set, stands between the committer and its store: for tests and the
	// torture, whose stores fail.
	WrapStore func(store.Store) store.Store `json:"-"`
}

// Discovery says whether devices are looked for in sysfs.
type Discovery uint8

// Kinds of discovery. DiscoverAuto looks for devdax devices that carry a header
// with our store id.
const (
	DiscoverAuto Discovery = iota
	DiscoverNone
)

func (c Config) withDefaults() Config {
	c.Host = cmp.Or(c.Host, DefaultHost)
	c.Port = cmp.Or(c.Port, DefaultPort)
	c.SysfsRoot = cmp.Or(c.SysfsRoot, "/sys")
	c.SocketMode = cmp.Or(c.SocketMode, 0o600)
	c.MaxBatchCount = cmp.Or(c.MaxBatchCount, 512)
	c.MaxWatchStreamCount = cmp.Or(c.MaxWatchStreamCount, 4096)
	c.DomainProofTimeout = cmp.Or(c.DomainProofTimeout, 30*time.Second)
	c.LockTimeout = cmp.Or(c.LockTimeout, 500*time.Millisecond)
	if c.HTTPPort == 0 {
		c.HTTPPort = c.Port + 10000
		if c.Port < 0 {
			c.HTTPPort = NoPort
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// Validate reports every problem at once. Errors: ErrInvalid.
func (c Config) Validate() error {
	c = c.withDefaults()
	var all []error
	bad := func(format string, args ...any) {
		all = append(all, fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, args...)...))
	}
	if c.Port < NoPort || c.Port > 65535 {
		bad("port %d, allowed: 1 to 65535", c.Port)
	}
	if c.HTTPPort < NoPort || c.HTTPPort > 65535 {
		bad("http_port %d, allowed: 1 to 65535; the default is port + 10000", c.HTTPPort)
	}
	if c.HTTPPort > 0 && c.HTTPPort == c.Port {
		bad("http_port %d is the port itself", c.HTTPPort)
	}
	if c.StateDir != "" && !filepath.IsAbs(c.StateDir) {
		bad("state_dir %q is not absolute", c.StateDir)
	}
	for name, v := range map[string]int{
		"max_batch_count": c.MaxBatchCount, "max_watch_stream_count": c.MaxWatchStreamCount,
		"max_owner_count": c.Limits.MaxOwnerCount, "max_region_count": c.Limits.MaxRegionCount, "max_session_count": c.Limits.MaxSessionCount,
		"max_hold_count": c.Limits.MaxHoldCount, "max_span_count": c.Limits.MaxSpanCount, "max_list_count": c.Limits.MaxListCount,
	} {
		if v < 0 {
			bad("%s %d is negative", name, v)
		}
	}
	if c.DomainProofTimeout < 0 || c.LockTimeout < 0 {
		bad("a timeout is negative")
	}
	paths, names := map[string]bool{}, map[string]bool{}
	for _, p := range c.Pools {
		if err := p.validate(); err != nil {
			all = append(all, err)
		}
		if paths[p.Path] {
			bad("pool path %s is given twice", p.Path)
		}
		if p.Name != "" && names[p.Name] {
			bad("pool name %q is given twice", p.Name)
		}
		paths[p.Path], names[p.Name] = true, true
	}
	return errors.Join(all...)
}

// PoolSpec names one pool.
type PoolSpec struct {
	Kind      dax.Kind
	Path      string
	SizeBytes uint64 // of the whole file; makes it when it is missing. 0: what is there
	Name      string // default: the path
	Coherence base.Coherence
	// NUMANode is where the memory of a file that is made comes from; nil: any.
	NUMANode *int
}

// ParsePools reads a list of pools that was cut at commas, as settings do: a part
// that is an option belongs to the pool before it. Errors: ErrInvalid, all of them.
func ParsePools(parts []string) ([]PoolSpec, error) {
	var whole []string
	for _, p := range parts {
		key, _, isOption := strings.Cut(p, "=")
		if isOption && !strings.Contains(key, ":") && len(whole) > 0 {
			whole[len(whole)-1] += "," + p
			continue
		}
		whole = append(whole, p)
	}
	var out []PoolSpec
	var all []error
	for _, w := range whole {
		p, err := ParsePool(w)
		out, all = append(out, p), append(all, err)
	}
	return out, errors.Join(all...)
}

// ParsePool reads kind:path[,size=8G][,name=cxl0][,coherence=hardware|software].
// Errors: ErrInvalid, with the value and what is allowed.
func ParsePool(s string) (PoolSpec, error) {
	const form = "devdax:/dev/dax0.0, fsdax:PATH or file:PATH, then ,size=BYTES ,name=NAME ,coherence=hardware|software"
	kind, rest, ok := strings.Cut(s, ":")
	if !ok {
		return PoolSpec{}, fmt.Errorf("%w: pool %q has no kind, allowed: %s", base.ErrInvalid, s, form)
	}
	var p PoolSpec
	switch kind {
	case "devdax":
		p.Kind = dax.KindDevdax
	case "fsdax":
		p.Kind = dax.KindFsdax
	case "file":
		p.Kind = dax.KindFile
	default:
		return PoolSpec{}, fmt.Errorf("%w: pool %q has kind %q, allowed: %s", base.ErrInvalid, s, kind, form)
	}
	parts := strings.Split(rest, ",")
	p.Path = parts[0]
	seen := map[string]bool{}
	for _, part := range parts[1:] {
		key, value, ok := strings.Cut(part, "=")
		if !ok || seen[key] {
			return PoolSpec{}, fmt.Errorf("%w: pool %q: option %q is given twice or has no value, allowed: %s", base.ErrInvalid, s, part, form)
		}
		seen[key] = true
		var err error
		switch key {
		case "size":
			if p.SizeBytes, err = settings.ParseSize(value); err == nil && p.SizeBytes == 0 {
				err = fmt.Errorf("%w: size %q, allowed: multiples of %d from %d", base.ErrInvalid, value, poolfmt.Alignment, poolfmt.DataOffset+poolfmt.Alignment)
			}
		case "name":
			p.Name = value
		case "coherence":
			p.Coherence, err = base.ParseCoherence(value)
		default:
			err = fmt.Errorf("%w: option %q, allowed: %s", base.ErrInvalid, key, form)
		}
		if err != nil {
			return PoolSpec{}, fmt.Errorf("pool %q: %w", s, err)
		}
	}
	return p, p.validate()
}

func (p PoolSpec) validate() error {
	switch {
	case !filepath.IsAbs(p.Path) || filepath.Clean(p.Path) != p.Path:
		return fmt.Errorf("%w: pool path %q, allowed: an absolute path without . and parent steps", base.ErrInvalid, p.Path)
	case len(p.Name) > 64 || strings.ContainsAny(p.Name, ", \n\t\"="):
		return fmt.Errorf("%w: pool name %q, allowed: up to 64 characters without blanks, commas and quotes", base.ErrInvalid, p.Name)
	case p.Kind != dax.KindDevdax && p.Kind != dax.KindFsdax && p.Kind != dax.KindFile:
		return fmt.Errorf("%w: pool %s has kind %s, allowed: devdax, fsdax, file", base.ErrInvalid, p.Path, p.Kind)
	case p.SizeBytes != 0 && (p.SizeBytes < poolfmt.DataOffset+poolfmt.Alignment || p.SizeBytes%poolfmt.Alignment != 0):
		return fmt.Errorf("%w: pool %s: size %d, allowed: multiples of %d from %d", base.ErrInvalid, p.Path, p.SizeBytes, poolfmt.Alignment, poolfmt.DataOffset+poolfmt.Alignment)
	case p.SizeBytes != 0 && p.Kind == dax.KindDevdax:
		return fmt.Errorf("%w: pool %s: a devdax device has the size that it has; leave size out", base.ErrInvalid, p.Path)
	}
	return nil
}
