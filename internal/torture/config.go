package torture

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/settings"
)

// Config of a run. Zero means default.
type Config struct {
	Duration time.Duration // of the faults; default 1 minute
	Seed     uint64        // of the script; default: drawn
	Workers  int           // default 4
	// Pool is the size of a pool file that the run makes (default 64M), or the absolute
	// path of a device or file that it may use and gives back.
	Pool string
	// Program is this program, whose hidden commands are the processes. Default: the running one.
	Program string
	// Parent is where the run's directory is made; default: the directory of temporary files.
	Parent string
	// Progress is told what happens, for people.
	Progress func(format string, args ...any)
}

const (
	defaultPool = "64M"
	pageBytes   = 64 << 10
	// regionBytes with its table takes 4 MiB of the pool.
	regionBytes = 63 * pageBytes
	// keyCount is chosen so that all keys are more than the default pool holds.
	keyCount = 2400
	// checkKeys are of the check at the end only; no worker stores them before.
	checkKeys = 64

	// Short times, in the same relations as the defaults, so that sessions expire in a
	// run of a minute.
	ttl       = 2 * time.Second
	heartbeat = 200 * time.Millisecond
	margin    = 300 * time.Millisecond
	sweep     = 2 * time.Second
	rmTimeout = 3 * time.Second
)

// poolName is in the name of every pool file that a run makes.
const poolName = "maru-torture-pool"

func (c Config) withDefaults() (Config, error) {
	if c.Duration == 0 {
		c.Duration = time.Minute
	}
	if c.Seed == 0 {
		c.Seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number
	}
	if c.Workers == 0 {
		c.Workers = 4
	}
	if c.Pool == "" {
		c.Pool = defaultPool
	}
	if c.Progress == nil {
		c.Progress = func(string, ...any) {}
	}
	switch {
	case c.Duration < time.Second || c.Duration > 30*24*time.Hour:
		return c, fmt.Errorf("%w: minutes %v must be at least a second's part and below 30 days", base.ErrInvalid, c.Duration.Minutes())
	case c.Workers < 2 || c.Workers > 64:
		return c, fmt.Errorf("%w: workers %d must be 2 to 64", base.ErrInvalid, c.Workers)
	}
	if c.Program == "" {
		p, err := os.Executable()
		if err != nil {
			return c, fmt.Errorf("torture: find this program: %w", err)
		}
		c.Program = p
	}
	return c, nil
}

// pool turns Config.Pool into what the resource manager is told. made is the file that
// the run removes.
func (c Config) pool() (spec rm.PoolSpec, made string, err error) {
	if filepath.IsAbs(c.Pool) {
		kind := dax.KindFile
		info, err := os.Stat(c.Pool)
		switch {
		case err != nil:
			return spec, "", fmt.Errorf("%w: --pool %s: %w", base.ErrNotFound, c.Pool, err)
		case info.Mode()&os.ModeCharDevice != 0:
			kind = dax.KindDevdax
		}
		return rm.PoolSpec{Kind: kind, Path: c.Pool}, "", nil
	}
	size, err := settings.ParseSize(c.Pool)
	if err != nil {
		return spec, "", fmt.Errorf("--pool: %w", err)
	}
	size = size/poolfmt.Alignment*poolfmt.Alignment + poolfmt.DataOffset
	if size < poolfmt.DataOffset+4*regionBytes {
		return spec, "", fmt.Errorf("%w: --pool %s must be at least %d bytes", base.ErrInvalid, c.Pool, 4*regionBytes)
	}
	parent := "/dev/shm"
	if _, err := os.Stat(parent); err != nil {
		parent = os.TempDir()
	}
	made = filepath.Join(parent, fmt.Sprintf("%s-%d-%x", poolName, os.Getpid(), c.Seed))
	return rm.PoolSpec{Kind: dax.KindFile, Path: made, SizeBytes: size, Coherence: base.CoherenceHardware}, made, nil
}

// rmConfig is the resource manager's.
func (d *driver) rmConfig() rm.Config {
	return rm.Config{
		Port: rm.AnyPort, HTTPPort: rm.NoPort, UnixPath: d.path("rm.sock"), StateDir: d.path("rm"), Discovery: rm.DiscoverNone,
		Pools: []rm.PoolSpec{d.pool}, LockTimeout: 2 * time.Second,
	}
}

// serverConfig is the server's.
func (d *driver) serverConfig() server.Config {
	return server.Config{
		Port: server.AnyPort, HTTPPort: server.NoPort, UnixPath: d.path("server.sock"), HotUnixPath: d.path("hot.sock"),
		StateDir: d.path("server"), RMAddress: "unix:" + d.path("rm.sock"), CPUBudgetBytes: 1 << 20,
		TTL: ttl, Heartbeat: heartbeat, Margin: margin, SweepInterval: sweep, RMCallTimeout: rmTimeout,
	}
}
