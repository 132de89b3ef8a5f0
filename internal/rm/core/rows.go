package core

import (
	"encoding/binary"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// Buckets of the store.
const (
	bucketCounters   = "counters"
	bucketPools      = "pools"
	bucketRegions    = "regions"
	bucketOwners     = "owners"
	bucketOperations = "operations"
	bucketSessions   = "sessions"
	bucketHolds      = "holds"
	bucketNodes      = "nodes"
	bucketFormat     = "format"
	bucketAgents     = "agents"
)

// Versions of the rows (docs/rfcs/0007-resource-manager.md). A store without the
// format row has the first one. Its bucket comes before that of the owners, and a
// program which does not know it refuses it by name, as a newer version's; one that
// knows it and not the agents meets their bucket first, which it refuses by name too.
const (
	formatFirst   uint32 = 1
	formatDigests uint32 = 2 // owners' rows may hold a digest
	formatAgents  uint32 = 3 // agents, and sessions that one vouches for
	formatKey            = "rows"
)

type formatRow struct {
	Version uint32 `cbor:"1,keyasint"`
}

// ProcessID names one process for ever. The zero value is no process.
type ProcessID struct {
	PID        int64       `cbor:"1,keyasint"`
	Namespace  uint64      `cbor:"2,keyasint"` // inode of the pid namespace
	StartTicks uint64      `cbor:"3,keyasint"`
	Boot       base.BootID `cbor:"4,keyasint"`
}

// IsZero reports whether no process is named.
func (p ProcessID) IsZero() bool { return p == ProcessID{} }

// String shows a process for a log line.
func (p ProcessID) String() string {
	if p.IsZero() {
		return "no process"
	}
	return fmt.Sprintf("pid %d (started at tick %d)", p.PID, p.StartTicks)
}

// DeviceKind is how a pool's path is opened; the numbers are those of the wire.
type DeviceKind uint8

// Kinds of device.
const (
	KindNone DeviceKind = iota
	KindDevdax
	KindFsdax
	KindFile
)

func (k DeviceKind) String() string {
	switch k {
	case KindDevdax:
		return "devdax"
	case KindFsdax:
		return "fsdax"
	case KindFile:
		return "file"
	}
	return "unknown"
}

type countersRow struct {
	NextRegion base.RegionID    `cbor:"1,keyasint"`
	NextOwner  base.Incarnation `cbor:"2,keyasint"`
}

type poolRow struct {
	ID              base.PoolID      `cbor:"1,keyasint"`
	Name            string           `cbor:"2,keyasint"`
	Path            string           `cbor:"3,keyasint"`
	Kind            DeviceKind       `cbor:"4,keyasint"`
	DeviceBytes     uint64           `cbor:"5,keyasint"`
	Coherence       base.Coherence   `cbor:"6,keyasint"`
	Sequence        uint64           `cbor:"7,keyasint"`
	NextRegion      base.RegionID    `cbor:"8,keyasint"` // above all ids given in this pool
	NextIncarnation base.Incarnation `cbor:"9,keyasint"`
	NextOwner       base.Incarnation `cbor:"10,keyasint"` // as of the last sequence
}

// slot is what the device must say when it is level with the row.
func (r poolRow) slot() poolfmt.Slot {
	return poolfmt.Slot{Sequence: r.Sequence, NextRegion: r.NextRegion, NextIncarnation: r.NextIncarnation, NextOwner: r.NextOwner}
}

type regionRow struct {
	Pool             base.PoolID      `cbor:"1,keyasint"`
	ID               base.RegionID    `cbor:"2,keyasint"`
	Incarnation      base.Incarnation `cbor:"3,keyasint"`
	Owner            base.OwnerID     `cbor:"4,keyasint"`
	OwnerIncarnation base.Incarnation `cbor:"5,keyasint"`
	Operation        uint64           `cbor:"6,keyasint"`
	PageBytes        uint64           `cbor:"7,keyasint"`
	AskedPageBytes   uint64           `cbor:"8,keyasint"` // before rounding on software-coherent pools
	PageCount        uint64           `cbor:"9,keyasint"`
	PieceBytes       uint32           `cbor:"10,keyasint"`
	Namespace        base.NamespaceID `cbor:"11,keyasint"`
	Writer           base.SessionID   `cbor:"12,keyasint"`
	Offset           uint64           `cbor:"13,keyasint"`
	Length           uint64           `cbor:"14,keyasint"`
	Draining         bool             `cbor:"15,keyasint"`
	Mapped           bool             `cbor:"16,keyasint"` // was held once: its table is the mappers' from then on
	AllocatedMS      int64            `cbor:"17,keyasint"`
}

func (r regionRow) extent() base.Extent { return base.Extent{Offset: r.Offset, Length: r.Length} }

// start is one start of an owner's program, and what can prove its end.
type start struct {
	Incarnation base.Incarnation   `cbor:"1,keyasint"`
	Node        base.NodeID        `cbor:"2,keyasint"`
	Boot        base.BootID        `cbor:"3,keyasint"`
	Directory   [base.IDBytes]byte `cbor:"4,keyasint"`
	Locked      bool               `cbor:"5,keyasint"` // it held the directory's lock
	Process     ProcessID          `cbor:"6,keyasint"`
	Ended       bool               `cbor:"7,keyasint"` // seen by the watcher
}

type ownerRow struct {
	ID        base.OwnerID `cbor:"1,keyasint"`
	Name      string       `cbor:"2,keyasint"`
	Current   start        `cbor:"3,keyasint"`
	Unproved  []start      `cbor:"4,keyasint"` // older starts not proved ended
	StartedMS int64        `cbor:"5,keyasint"`
	Digest    []byte       `cbor:"6,keyasint,omitempty"` // of its secret; none: started before format 2
}

// span is a run of closed operations; its first number is in the key.
type spanRow struct {
	Last uint64 `cbor:"1,keyasint"`
}

type sessionRow struct {
	ID         base.SessionID     `cbor:"1,keyasint"`
	Server     base.OwnerID       `cbor:"2,keyasint"`
	Node       base.NodeID        `cbor:"3,keyasint"`
	Boot       base.BootID        `cbor:"4,keyasint"`
	Process    ProcessID          `cbor:"5,keyasint"`
	AgentEpoch []byte             `cbor:"6,keyasint"`
	Nonce      [base.IDBytes]byte `cbor:"7,keyasint"`          // makes the hold token this binding's own
	Reason     string             `cbor:"8,keyasint"`          // why its end cannot be proved here
	Agent      base.AgentID       `cbor:"9,keyasint,omitzero"` // who watches its process; zero: this program
}

type holdRow struct {
	Session          base.SessionID   `cbor:"1,keyasint"`
	Region           base.RegionID    `cbor:"2,keyasint"`
	Sequence         uint64           `cbor:"3,keyasint"`
	Held             bool             `cbor:"4,keyasint"` // what that sequence did
	Views            bool             `cbor:"5,keyasint"`
	ReadOnly         bool             `cbor:"6,keyasint"`
	Server           base.OwnerID     `cbor:"7,keyasint"`
	OwnerIncarnation base.Incarnation `cbor:"8,keyasint"`
	SinceMS          int64            `cbor:"9,keyasint"`
}

// agentRow lies under its node: there is one a node.
type agentRow struct {
	ID        base.AgentID `cbor:"1,keyasint"`
	Node      base.NodeID  `cbor:"2,keyasint"`
	Boot      base.BootID  `cbor:"3,keyasint"`
	Epoch     uint32       `cbor:"4,keyasint"` // counts its starts
	Digest    []byte       `cbor:"5,keyasint"` // of its secret
	Name      string       `cbor:"6,keyasint"`
	StartedMS int64        `cbor:"7,keyasint"`
}

type nodeRow struct {
	ID    base.NodeID   `cbor:"1,keyasint"`
	Boot  base.BootID   `cbor:"2,keyasint"`
	Ended []base.BootID `cbor:"3,keyasint"` // older boots; a late message of one changes nothing
}

// maxEndedBootCount bounds what a node's row remembers. A message that waited
// through as many reboots does not exist: its connection ended with the first.
const maxEndedBootCount = 64

var encoder, decoder = func() (cbor.EncMode, cbor.DecMode) {
	e, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		panic(err)
	}
	d, err := cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
		MaxArrayElements:  1 << 17,
	}.DecMode()
	if err != nil {
		panic(err)
	}
	return e, d
}()

func encode(row any) []byte {
	b, err := encoder.Marshal(row)
	if err != nil { // rows hold nothing that cannot be encoded
		panic(fmt.Sprintf("maru: encode %T: %v", row, err))
	}
	return b
}

func regionKey(id base.RegionID) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(id)))
}

func holdKey(s base.SessionID, r base.RegionID) string { return string(s[:]) + regionKey(r) }

func spanKey(o base.OwnerID, first uint64) string {
	return string(binary.BigEndian.AppendUint64(append([]byte(nil), o[:]...), first))
}
