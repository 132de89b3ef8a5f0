package directory

import (
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/offheap"
)

// Limits bounds everything that a peer could make grow. Each field has a setting
// of the name in its comment; the text of a base.ErrLimit names that setting.
// Zero means the default.
type Limits struct {
	MaxSessions         int    // max-sessions: sessions that are live or hold something
	MaxExpiredSessions  int    // max-expired-sessions: records of expired sessions that hold nothing (RPC-22)
	MaxNamespaces       int    // max-namespaces: namespaces with a session, a region or an object
	MaxShards           int    // max-shards: ranks of one engine, and geometries of one namespace
	MaxObjects          uint64 // max-objects: objects in the table
	MaxExtraReplicas    uint64 // max-extra-replicas: replicas beyond the first of each object
	MaxRegions          int    // max-regions: regions of all sessions
	MaxRegionPages      uint64 // max-region-pages: pages of one region
	MaxPages            uint64 // max-pages: pages of all regions
	MaxLeases           int    // max-leases: copy and view leases of a session (RPC-23)
	MaxRequestLeases    int    // max-request-leases: replicas kept by a session's request leases
	MaxRequests         int    // max-requests: engine requests with request leases, a session
	MaxOperations       int    // max-operations: operations of a session above its watermark
	MaxOperationRows    int    // max-operation-rows: rows of commits and acquires in those operations
	MaxEvents           int    // max-events: events sent to a session and not acknowledged
	MaxUnreachable      int    // max-unreachable: regions that a session reported as unreachable
	MaxDeletes          int    // max-deletes: deletes that wait for marks
	MaxTombstones       int    // max-tombstones: keys deleted before relisting is complete
	MaxTextBytes        int    // max-text-bytes: engine id and instance id
	MaxRecoveredHolders int    // max-recovered-holders: holders of one recovered region
}

func (l *Limits) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def64 := func(v *uint64, d uint64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&l.MaxSessions, 1024)
	def(&l.MaxExpiredSessions, 4096)
	def(&l.MaxNamespaces, 1024)
	def(&l.MaxShards, hot.MaxShards)
	def64(&l.MaxObjects, 64<<20)
	def64(&l.MaxExtraReplicas, 64<<20)
	def(&l.MaxRegions, 65536)
	def64(&l.MaxRegionPages, 16<<20)
	def64(&l.MaxPages, 128<<20)
	def(&l.MaxLeases, 4096)
	def(&l.MaxRequestLeases, 262144)
	def(&l.MaxRequests, 16384)
	def(&l.MaxOperations, 4096)
	def(&l.MaxOperationRows, 262144)
	def(&l.MaxEvents, 8192)
	def(&l.MaxUnreachable, 1024)
	def(&l.MaxDeletes, 1024)
	def(&l.MaxTombstones, 65536)
	def(&l.MaxTextBytes, 256)
	def(&l.MaxRecoveredHolders, 4096)
}

// validate reports the first bound that cannot work.
func (l *Limits) validate() error {
	for _, f := range []struct {
		name     string
		v        uint64
		min, max uint64
	}{
		{"max-sessions", u64(l.MaxSessions), 1, 1 << 20}, {"max-expired-sessions", u64(l.MaxExpiredSessions), 1, 1 << 20},
		{"max-namespaces", u64(l.MaxNamespaces), 1, 1 << 20}, {"max-shards", u64(l.MaxShards), 1, 65536},
		{"max-objects", l.MaxObjects, 1, 1<<31 - firstObject - 1}, {"max-extra-replicas", l.MaxExtraReplicas, 1, 1<<31 - 2},
		{"max-regions", u64(l.MaxRegions), 1, 1 << 24}, {"max-region-pages", l.MaxRegionPages, 1, 1 << 31},
		{"max-pages", l.MaxPages, 1, 1 << 40}, {"max-leases", u64(l.MaxLeases), 1, 1 << 24},
		{"max-request-leases", u64(l.MaxRequestLeases), 1, 1 << 24}, {"max-requests", u64(l.MaxRequests), 1, 1 << 24},
		{"max-operations", u64(l.MaxOperations), 1, 1 << 20}, {"max-operation-rows", u64(l.MaxOperationRows), hot.MaxKeys, 1 << 24},
		{"max-events", u64(l.MaxEvents), 1, 1 << 20}, {"max-unreachable", u64(l.MaxUnreachable), 1, 1 << 20},
		{"max-deletes", u64(l.MaxDeletes), 1, 1 << 20}, {"max-tombstones", u64(l.MaxTombstones), 1, 1 << 24},
		{"max-text-bytes", u64(l.MaxTextBytes), 1, 1 << 16}, {"max-recovered-holders", u64(l.MaxRecoveredHolders), 1, 1 << 20},
	} {
		if f.v < f.min || f.v > f.max {
			return fmt.Errorf("%w: %s is %d, allowed: %d to %d", base.ErrInvalid, f.name, f.v, f.min, f.max)
		}
	}
	return nil
}

// u64 keeps a negative setting out of range instead of wrapping it.
func u64(n int) uint64 {
	if n < 0 {
		return ^uint64(0)
	}
	return uint64(n)
}

func limitErr(setting string, bound any, what string) error {
	return fmt.Errorf("%w: %s; at most %v (setting %s)", base.ErrLimit, what, bound, setting)
}

// Manager says whether a resource manager may have what older incarnations of this
// server left.
type Manager uint8

// Kinds of [Config.Manager].
const (
	ManagerNone     Manager = iota // private cpu pools only: nothing can be left
	ManagerExpected                // nothing is known of what is left before SetOwner
)

// Config is what a Directory is made from. Zero durations and limits mean the
// defaults.
type Config struct {
	ServerEpoch base.ServerEpoch // not 0
	Owner       base.Incarnation // 0: no resource manager yet; private cpu pools only
	Manager     Manager
	Limits      Limits
	// TTL is how long a session lives without a heartbeat (default 10 s).
	TTL time.Duration
	// RequestLeaseTTL is how long a request lease lives without a refresh (default 60 s).
	RequestLeaseTTL time.Duration
	// EventTimeout is how long a session may leave an event unacknowledged while
	// its window is full, before it is fenced (default 60 s).
	EventTimeout time.Duration
	// RetryInterval is the pause before a failed effect is asked for again (default 1 s).
	RetryInterval time.Duration
	// CPUBudgetBytes bounds the private cpu pools of all sessions of one host
	// (CAP-06, setting cpu-budget). 0 refuses private cpu pools.
	CPUBudgetBytes uint64
	// CXLBytes is the bound of a session's cxl extents, tables included, when it asks
	// for none (setting cxl-bytes). 0: the pools' capacity.
	CXLBytes uint64
	// HashSeed makes collisions of the table unpredictable for peers.
	HashSeed uint64
	// Memory holds the table. nil: the Go heap.
	Memory offheap.Allocator
}

func (c *Config) setDefaults() {
	def := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.TTL, 10*time.Second)
	def(&c.RequestLeaseTTL, time.Minute)
	def(&c.EventTimeout, time.Minute)
	def(&c.RetryInterval, time.Second)
	c.Limits.setDefaults()
	if c.Memory == nil {
		c.Memory = offheap.Heap{}
	}
}
