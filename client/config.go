package client

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/checksum"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/media/cpu"
	"github.com/xcena-dev/maru/internal/media/numa"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Switch is a setting that is on, off or left to its default.
type Switch uint8

// Values of a Switch. The zero value is the default that each field names.
const (
	Default Switch = iota
	Off
	On
)

func (s Switch) String() string {
	switch s {
	case Default:
		return "default"
	case Off:
		return "off"
	case On:
		return "on"
	}
	return fmt.Sprintf("switch(%d)", uint8(s))
}

// HugePages says what pages the cpu pool is made of.
type HugePages = cpu.HugePages

// Kinds of pages. Those with a size are reserved by the operator (hugetlb).
const (
	HugePagesAuto = cpu.HugePagesAdvise
	HugePagesOff  = cpu.HugePagesNone
	HugePages2M   = cpu.HugePages2M
	HugePages1G   = cpu.HugePages1G
)

// Config says what a client is and what it may use. The zero value of a field means
// its default.
type Config struct {
	// ServerAddress is "host:port", "tcp://host:port" or "unix:/path".
	ServerAddress string
	// InstanceID is for people: logs and usage. Default: the session id.
	InstanceID string
	// EngineID binds the sessions of one engine: one worker a rank (SES-02). Empty: no
	// engine (MaruHandler).
	EngineID string
	// Role: a worker holds memory, a scheduler only asks. Default: worker.
	Role            base.Role
	Rank, WorldSize uint32 // WorldSize default 1

	// Namespace is the canonical CBOR of the namespace (internal/keys). Of opaque values
	// it is the reserved one and may be left out.
	Namespace []byte
	// Opaque is the reserved namespace of MaruHandler: values of any length up to a page.
	Opaque bool
	// PageBytes is the page size. Opaque: the chunk size. Engine objects: 0, it follows
	// from ValueBytes and PieceBytes.
	PageBytes uint64
	// ValueBytes is the size of one whole engine object; 0 for opaque values.
	ValueBytes uint64
	// PieceBytes is the piece of the checksum. Default: 64 KiB.
	PieceBytes uint32

	// CPUBytes is the private cpu pool; 0: none.
	CPUBytes uint64
	// CPUNUMANode is the NUMA node that the cpu pool's memory comes from, all of it; nil:
	// as the kernel likes.
	CPUNUMANode *int
	// CPUHugePages says what pages the cpu pool is made of. Default: transparent ones,
	// where the kernel gives them. Of reserved ones the pool takes whole pages.
	CPUHugePages HugePages
	// SegmentBytes bounds one piece of the cpu pool; no object lies across two.
	// Default 1 GiB.
	SegmentBytes uint64
	// CXLBytes bounds what this client asks for of the cxl pool. 0: none, unless
	// RegionBytes is set; then the server's bound alone holds.
	CXLBytes uint64
	// RegionBytes is the size of the first cxl region. Default: 64 MiB or CXLBytes,
	// the smaller.
	RegionBytes uint64
	// ExpandBytes is the size of each further cxl region. Default: RegionBytes.
	ExpandBytes uint64
	// AutoExpand asks for another cxl region when all are full. Default on.
	AutoExpand Switch
	// WriteOrder is tried from the left; the first medium with a free page takes the
	// object. Default: cpu, cxl, of those that are configured.
	WriteOrder []base.Medium
	// ReadOrder is the server's preference when several replicas can be read. Default:
	// WriteOrder's default.
	ReadOrder []base.Medium

	// Checksums of copies. Default on. On software-coherent pools they are always on.
	Checksums Switch
	// ViewChecksums verifies zero-copy views when they are handed out. Default off.
	ViewChecksums Switch
	// CopyThreads copy in parallel. Default: half of GOMAXPROCS, 1 to 8.
	CopyThreads int
	// QueueJobs bounds submitted jobs that have not been handed out yet. Default 1024.
	QueueJobs int
	// EagerMap maps the regions of other writers at Open. Default off.
	EagerMap Switch
	// IdleMappings bounds the regions of other writers that stay mapped, and held, while
	// nothing of them is read. Default session.DefaultMaxIdleMappings.
	IdleMappings int
	// Views: this client may export views (Retrieve, Pin). Fixed at the resource manager
	// when a region is held. Default: Opaque.
	Views Switch
	// Overcommit lets CPUBytes pass what the machine has free. Default off.
	Overcommit Switch
	// Prefault touches own memory in the background. Default on.
	Prefault Switch

	// Farewell goes on in the background, after a Close that server or resource manager has
	// not heard, to tell them that the session has ended. Default on.
	Farewell Switch

	// AgentSocket is the Unix socket of this node's agent (maru-remote-cxl-agent), which
	// vouches for this process where the resource manager runs on another node. Default:
	// agent.sock in /run/maru, else in $XDG_RUNTIME_DIR/maru, of root or of this user;
	// "none": no agent is looked for.
	AgentSocket string

	// ConnectLater: Open succeeds although the server is away; everything misses until
	// it comes. Default off.
	ConnectLater Switch
	// HotConnections to the server, one call in flight each. Default 4.
	HotConnections int
	// RPCTimeout bounds a call whose context has no nearer deadline. Default 2 s.
	RPCTimeout time.Duration
	// ConnectTimeout bounds one attempt to connect. Default 2 s.
	ConnectTimeout time.Duration
	// Devices opens the GPU that layouts of RegisterDeviceLayout lie on; nil: there is none.
	Devices engine.Driver
	// DeviceCopy decides how bytes move between its memory and pages. Default: the way that
	// was the faster when the layout was registered; before, and where it could not be
	// measured, staged, and run by run from 2 MiB on.
	DeviceCopy engine.Rule
	// DeviceStagingBytes is the device memory of one direction's stage. Default 64 MiB.
	DeviceStagingBytes uint64

	// Logger takes the client's few lines. Default: slog.Default.
	Logger *slog.Logger
	// OnRegion is told of each new own region, from the call that made it, with no lock
	// held.
	OnRegion func(region base.RegionID, pageCount uint64)
}

// Bounds of settings.
const (
	maxPageBytes       = 1 << 36
	maxHotConnections  = 64
	maxCopyThreads     = 256
	maxQueueJobs       = 1 << 20
	maxIdleMappings    = 1 << 20
	defaultRegionBytes = 64 << 20
	defaultSegment     = 1 << 30
	pageAlignBytes     = keys.PageAlignBytes
)

// Validate reports every problem at once. Errors: ErrInvalid.
func (c *Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) {
		problems = append(problems, fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, args...)...))
	}
	if c.ServerAddress == "" {
		bad("ServerAddress is empty; allowed: host:port, tcp://host:port, unix:/absolute/path")
	} else if _, err := rpc.ParseAddress(c.ServerAddress); err != nil {
		problems = append(problems, fmt.Errorf("ServerAddress: %w", err))
	}
	if c.Role > base.RoleScheduler {
		bad("Role %d; allowed: worker, scheduler", c.Role)
	}
	if world := max(c.WorldSize, 1); c.Rank >= world {
		bad("Rank %d must be below WorldSize %d", c.Rank, world)
	}
	switch {
	case len(c.Namespace) == 0 && !c.Opaque:
		bad("Namespace is empty; it is the canonical CBOR of the model's identity and geometry")
	case len(c.Namespace) != 0 && keys.IsOpaque(c.Namespace) != c.Opaque:
		bad("Opaque is %v and Namespace is the reserved one: %v; both belong together", c.Opaque, !c.Opaque)
	case len(c.Namespace) != 0:
		if err := keys.CheckCanonical(c.Namespace); err != nil {
			bad("Namespace: %v", err)
		}
	}
	c.validateSizes(bad)
	c.validateMedia(bad)
	for _, n := range []struct {
		name        string
		value, most int
	}{
		{"CopyThreads", c.CopyThreads, maxCopyThreads},
		{"QueueJobs", c.QueueJobs, maxQueueJobs},
		{"IdleMappings", c.IdleMappings, maxIdleMappings},
		{"HotConnections", c.HotConnections, maxHotConnections},
	} {
		if n.value < 0 || n.value > n.most {
			bad("%s is %d; allowed: 0 (default) to %d", n.name, n.value, n.most)
		}
	}
	if c.AgentSocket != "" && c.AgentSocket != NoAgent && !filepath.IsAbs(c.AgentSocket) {
		bad("AgentSocket is %q; allowed: an absolute path, none, or empty for the default places", c.AgentSocket)
	}
	if c.DeviceCopy > engine.AlwaysDirect {
		bad("DeviceCopy is %d; allowed: auto, staged, direct", c.DeviceCopy)
	}
	if c.RPCTimeout < 0 || c.ConnectTimeout < 0 {
		bad("RPCTimeout %v and ConnectTimeout %v must not be negative", c.RPCTimeout, c.ConnectTimeout)
	}
	return errors.Join(problems...)
}

func (c *Config) validateSizes(bad func(string, ...any)) {
	piece := uint64(c.PieceBytes)
	if piece == 0 {
		piece = checksum.OpaquePieceBytes
	}
	if c.Opaque {
		if c.ValueBytes != 0 {
			bad("ValueBytes is %d; opaque values have none, PageBytes bounds them", c.ValueBytes)
		}
		if piece != checksum.OpaquePieceBytes {
			bad("PieceBytes is %d; opaque values have pieces of %d", c.PieceBytes, checksum.OpaquePieceBytes)
		}
		if c.PageBytes == 0 && c.Role != base.RoleScheduler {
			bad("PageBytes is 0; it is the largest value that can be stored")
		}
	} else {
		if c.ValueBytes == 0 && c.Role != base.RoleScheduler {
			bad("ValueBytes is 0; it is the size of one whole object")
		}
		if piece < checksum.MinEnginePieceBytes || piece%checksum.EnginePieceAlignBytes != 0 || piece > 1<<30 {
			bad("PieceBytes is %d; allowed: a multiple of %d, at least %d", c.PieceBytes,
				checksum.EnginePieceAlignBytes, checksum.MinEnginePieceBytes)
		} else if want := enginePageBytes(c.ValueBytes, piece); c.PageBytes != 0 && c.PageBytes != want {
			bad("PageBytes is %d; %d value bytes with their leaf list take %d (leave it 0)", c.PageBytes, c.ValueBytes, want)
		}
	}
	if c.PageBytes > maxPageBytes || c.ValueBytes > maxPageBytes {
		bad("PageBytes %d, ValueBytes %d; at most %d", c.PageBytes, c.ValueBytes, uint64(maxPageBytes))
		return
	}
	page := c.pageBytes()
	for _, s := range []struct {
		name  string
		bytes uint64
	}{
		{"CPUBytes", c.CPUBytes}, {"SegmentBytes", c.SegmentBytes}, {"CXLBytes", c.CXLBytes},
		{"RegionBytes", c.RegionBytes}, {"ExpandBytes", c.ExpandBytes},
	} {
		if s.bytes != 0 && s.bytes < page {
			bad("%s is %d; one page has %d", s.name, s.bytes, page)
		}
	}
	if c.ExpandBytes != 0 && c.AutoExpand == Off {
		bad("ExpandBytes is %d although AutoExpand is off", c.ExpandBytes)
	}
	if c.CPUBytes == 0 && (c.CPUNUMANode != nil || c.CPUHugePages != HugePagesAuto) {
		bad("CPUNUMANode or CPUHugePages is set, but CPUBytes is 0: there is no cpu pool")
	}
	if c.CPUNUMANode != nil && (*c.CPUNUMANode < 0 || *c.CPUNUMANode > numa.MaxNode) {
		bad("CPUNUMANode is %d; allowed: 0 to %d", *c.CPUNUMANode, numa.MaxNode)
	}
	if c.CPUHugePages > HugePages1G {
		bad("CPUHugePages is %d; allowed: auto, off, 2M, 1G", c.CPUHugePages)
	} else if granule := c.CPUHugePages.GranuleBytes(); c.SegmentBytes%granule != 0 {
		bad("SegmentBytes is %d; with huge pages of %s it must be a multiple of %d", c.SegmentBytes, c.CPUHugePages, granule)
	}
	if c.CXLBytes != 0 && c.RegionBytes > c.CXLBytes {
		bad("RegionBytes %d is over CXLBytes %d", c.RegionBytes, c.CXLBytes)
	}
}

func (c *Config) validateMedia(bad func(string, ...any)) {
	if c.Role == base.RoleScheduler && (c.CPUBytes != 0 || c.CXLBytes != 0 || c.RegionBytes != 0) {
		bad("CPUBytes %d, CXLBytes %d, RegionBytes %d: a scheduler holds no memory", c.CPUBytes, c.CXLBytes, c.RegionBytes)
	}
	for _, o := range []struct {
		name  string
		order []base.Medium
	}{{"WriteOrder", c.WriteOrder}, {"ReadOrder", c.ReadOrder}} {
		var seen [4]bool
		for _, m := range o.order {
			switch {
			case m != base.MediumCPU && m != base.MediumCXL:
				bad("%s has %s; allowed: cpu, cxl", o.name, m)
				continue
			case seen[m]:
				bad("%s has %s twice", o.name, m)
			}
			seen[m] = true
			if o.name == "WriteOrder" && (m == base.MediumCPU && c.CPUBytes == 0 || m == base.MediumCXL && !c.wantsCXL()) {
				bad("WriteOrder has %s, which has no bytes: set CPUBytes, or CXLBytes or RegionBytes", m)
			}
		}
	}
}

func (c *Config) wantsCXL() bool { return c.CXLBytes != 0 || c.RegionBytes != 0 }

// pageBytes is the page size that this configuration asks for.
func (c *Config) pageBytes() uint64 {
	if c.PageBytes != 0 || c.Opaque || c.ValueBytes == 0 {
		return c.PageBytes
	}
	piece := uint64(c.PieceBytes)
	if piece == 0 {
		piece = checksum.OpaquePieceBytes
	}
	return enginePageBytes(c.ValueBytes, piece)
}

// enginePageBytes is the page of an engine object: value, leaf list, rounded up; 0 for
// sizes that Validate refuses.
func enginePageBytes(value, piece uint64) uint64 {
	n, err := keys.EnginePageBytes(value, uint32(min(piece, 1<<31))) //nolint:gosec // bounded
	if err != nil {
		return 0
	}
	return n
}

// leafListAt is where the leaf list of an object of length bytes begins in its page.
func leafListAt(length uint64) uint64 { return (length + 7) &^ 7 }
