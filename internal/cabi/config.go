package cabi

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/media/cpu"
)

// MaxConfigBytes bounds the configuration text.
const MaxConfigBytes = 1 << 20

// config is the JSON of maru_open. Pointers tell an absent switch from false.
type config struct {
	ServerAddress string `json:"server_address"`
	InstanceID    string `json:"instance_id"`
	EngineID      string `json:"engine_id"`
	Role          string `json:"role"`
	Rank          uint32 `json:"rank"`
	WorldSize     uint32 `json:"world_size"`

	NamespaceHex string `json:"namespace_hex"`
	Opaque       bool   `json:"opaque"`
	PageBytes    uint64 `json:"page_bytes"`
	ValueBytes   uint64 `json:"value_bytes"`
	PieceBytes   uint32 `json:"piece_bytes"`

	CPUBytes     uint64   `json:"cpu_bytes"`
	CPUNUMANode  *int     `json:"cpu_numa_node"`
	CPUHugePages string   `json:"cpu_hugepages"`
	SegmentBytes uint64   `json:"segment_bytes"`
	CXLBytes     uint64   `json:"cxl_bytes"`
	RegionBytes  uint64   `json:"region_bytes"`
	ExpandBytes  uint64   `json:"expand_bytes"`
	AutoExpand   *bool    `json:"auto_expand"`
	WriteOrder   []string `json:"write_order"`
	ReadOrder    []string `json:"read_order"`

	Checksums     *bool `json:"checksums"`
	ViewChecksums *bool `json:"view_checksums"`
	CopyThreads   int   `json:"copy_threads"`
	QueueJobs     int   `json:"queue_jobs"`
	EagerMap      *bool `json:"eager_map"`
	IdleMappings  int   `json:"idle_mappings"`
	Views         *bool `json:"views"`
	Overcommit    *bool `json:"overcommit"`
	Prefault      *bool `json:"prefault"`

	DeviceCopy         string `json:"device_copy"`
	DeviceStagingBytes uint64 `json:"device_staging_bytes"`

	AgentSocket string `json:"agent_socket"`

	ConnectLater     *bool `json:"connect_later"`
	HotConnections   int   `json:"hot_connections"`
	RPCTimeoutMS     int64 `json:"rpc_timeout_ms"`
	ConnectTimeoutMS int64 `json:"connect_timeout_ms"`

	// GoMaxProcs raises the count of threads that run Go code at once. It is one
	// number of the process: the highest that a client asked for counts.
	GoMaxProcs int `json:"go_max_procs"`
}

// Config is a parsed configuration.
type Config struct {
	Client     client.Config
	GoMaxProcs int
}

// ParseConfig reads the JSON of maru_open and reports every problem at once.
//
// Errors: base.ErrInvalid names each field, its value and what is allowed.
func ParseConfig(text []byte) (Config, error) {
	if len(text) == 0 || len(text) > MaxConfigBytes {
		return Config{}, fmt.Errorf("%w: configuration has %d bytes, 1 to %d are allowed", base.ErrInvalid, len(text), MaxConfigBytes)
	}
	var c config
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Config{}, fmt.Errorf("%w: configuration: %w", base.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Config{}, fmt.Errorf("%w: configuration: text behind the object", base.ErrInvalid)
	}
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{base.ErrInvalid}, args...)...))
	}
	out := client.Config{
		ServerAddress: c.ServerAddress, InstanceID: c.InstanceID, EngineID: c.EngineID,
		Rank: c.Rank, WorldSize: c.WorldSize, Opaque: c.Opaque,
		PageBytes: c.PageBytes, ValueBytes: c.ValueBytes, PieceBytes: c.PieceBytes,
		CPUBytes: c.CPUBytes, CPUNUMANode: c.CPUNUMANode, SegmentBytes: c.SegmentBytes, CXLBytes: c.CXLBytes,
		RegionBytes: c.RegionBytes, ExpandBytes: c.ExpandBytes,
		AutoExpand: toSwitch(c.AutoExpand), Checksums: toSwitch(c.Checksums), ViewChecksums: toSwitch(c.ViewChecksums),
		CopyThreads: c.CopyThreads, QueueJobs: c.QueueJobs, EagerMap: toSwitch(c.EagerMap), IdleMappings: c.IdleMappings, Views: toSwitch(c.Views),
		Overcommit: toSwitch(c.Overcommit), Prefault: toSwitch(c.Prefault),
		DeviceStagingBytes: c.DeviceStagingBytes, AgentSocket: c.AgentSocket,
		ConnectLater: toSwitch(c.ConnectLater), HotConnections: c.HotConnections,
	}
	switch c.Role {
	case "", "worker":
		out.Role = base.RoleWorker
	case "scheduler":
		out.Role = base.RoleScheduler
	default:
		bad("role is %q, allowed: worker, scheduler", c.Role)
	}
	pages, err := cpu.ParseHugePages(c.CPUHugePages)
	if err != nil {
		errs = append(errs, fmt.Errorf("cpu_hugepages: %w", err))
	}
	out.CPUHugePages = pages
	switch c.DeviceCopy {
	case "", "auto":
	case "staged":
		out.DeviceCopy = engine.AlwaysStaged
	case "direct":
		out.DeviceCopy = engine.AlwaysDirect
	default:
		bad("device_copy is %q, allowed: auto, staged, direct", c.DeviceCopy)
	}
	ns, err := hex.DecodeString(c.NamespaceHex)
	switch {
	case err != nil:
		bad("namespace_hex is no hexadecimal text: %v", err)
	case len(ns) == 0 && c.Opaque:
		ns = keys.OpaqueNamespace()
	case len(ns) == 0:
		bad("namespace_hex is empty; it is the canonical CBOR of a namespace (maru_namespace makes it)")
	case c.Opaque != keys.IsOpaque(ns):
		bad("opaque is %v, but namespace_hex is %s", c.Opaque, map[bool]string{true: "the reserved namespace of opaque values", false: "an engine's"}[keys.IsOpaque(ns)])
	default:
		if err := keys.CheckCanonical(ns); err != nil {
			errs = append(errs, fmt.Errorf("namespace_hex: %w", err))
		}
	}
	out.Namespace = ns
	for _, o := range []struct {
		name string
		from []string
		to   *[]base.Medium
	}{{"write_order", c.WriteOrder, &out.WriteOrder}, {"read_order", c.ReadOrder, &out.ReadOrder}} {
		for _, s := range o.from {
			m, err := base.ParseMedium(s)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", o.name, err))
				continue
			}
			*o.to = append(*o.to, m)
		}
	}
	for _, d := range []struct {
		name string
		ms   int64
		to   *time.Duration
	}{{"rpc_timeout_ms", c.RPCTimeoutMS, &out.RPCTimeout}, {"connect_timeout_ms", c.ConnectTimeoutMS, &out.ConnectTimeout}} {
		if d.ms < 0 || d.ms > math.MaxInt64/int64(time.Millisecond) {
			bad("%s is %d, allowed: 0 (default) to %d", d.name, d.ms, math.MaxInt64/int64(time.Millisecond))
			continue
		}
		*d.to = time.Duration(d.ms) * time.Millisecond
	}
	if c.GoMaxProcs < 0 || c.GoMaxProcs > 4096 {
		bad("go_max_procs is %d, allowed: 0 (default) to 4096", c.GoMaxProcs)
	}
	if len(errs) == 0 {
		// What the client itself checks is reported with its own field names.
		return Config{Client: out, GoMaxProcs: c.GoMaxProcs}, nil
	}
	return Config{}, errors.Join(errs...)
}

func toSwitch(b *bool) client.Switch {
	switch {
	case b == nil:
		return client.Default
	case *b:
		return client.On
	}
	return client.Off
}
