package directory

import (
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Caller names the session and epoch that a call came from; the transport has
// proved it.
type Caller struct {
	Session base.SessionID
	Epoch   base.Epoch
}

// State of a session.
type State uint8

// States of a session (docs/PROTOCOL.md, section 3).
const (
	StateNone    State = iota
	StateLive          // heartbeats arrive
	StateSuspect       // expired or fenced: hidden, charged, nothing reused
	StateLeft          // closed with exports out: visible, nothing reused
	StateKept          // its process is proved gone; regions with keys stay readable
	StateAwaited       // writer or holder of a region from before a server restart, not opened here yet
)

func (s State) String() string {
	names := [...]string{"none", "live", "suspect", "left", "kept", "awaited"}
	if int(s) < len(names) {
		return names[s]
	}
	return "state(?)"
}

// Proof of who opens a session again.
type Proof uint8

// Proofs of an opener.
const (
	ProofNone    Proof = iota
	ProofProcess       // the peer of the Unix socket is the process of the session
)

// GoneProof says how the end of a session's process was proved.
type GoneProof uint8

// Proofs of an end (docs/PROTOCOL.md, section 3).
const (
	GoneSaidSo GoneProof = iota + 1
	GonePidfd
	GoneReboot
	GoneDeregistered
	GoneOperator
)

func (p GoneProof) String() string {
	names := [...]string{"none", "said_so", "pidfd", "reboot", "deregistered", "operator"}
	if int(p) < len(names) {
		return names[p]
	}
	return "proof(?)"
}

// Secret authenticates an epoch of a session.
type Secret [16]byte

// OpenRequest registers a session.
type OpenRequest struct {
	Session             base.SessionID
	Secret              Secret // of the new epoch: fresh random bits
	PreviousSecret      Secret // as the client sent it; zero: none
	Proof               Proof
	Provable            bool // the shell, or the RM, watches the process
	Role                base.Role
	EngineID            string // empty: no engine (MaruHandler)
	Rank                uint32
	WorldSize           uint32
	Namespace           base.NamespaceID
	Opaque              bool
	ValueBytes          uint64 // 0 for opaque values and schedulers
	PieceBytes          uint32
	Node                base.NodeID
	CPUBytes            uint64 // private cpu pool wanted; 0: none
	CXLBytes            uint64 // bound of cxl extents, tables included; 0: the server's
	WriteOrder          []base.Medium
	ReadOrder           []base.Medium
	InstanceID          string
	PreviousServerEpoch base.ServerEpoch
	PreviousEpoch       base.Epoch
	Views               bool
}

// OpenResult is what a session gets.
type OpenResult struct {
	Epoch     base.Epoch
	Namespace base.NamespaceNumber
	Pools     []PoolGrant
	Relist    bool // the session was opened at another server epoch: list what it holds
	Deadline  time.Duration
}

// Pool describes a shared pool of the resource manager.
type Pool struct {
	ID               base.PoolID
	Medium           base.Medium
	Tier             base.Tier
	Scope            base.Scope
	Coherence        base.Coherence
	CapacityBytes    uint64
	LargestFreeBytes uint64
	Online           bool
}

// PoolGrant is a pool as a session sees it. Number stands for the pool during
// this server epoch.
type PoolGrant struct {
	Number     uint32
	Pool       Pool
	Private    bool
	GrantBytes uint64
	Proved     bool // the session has proved the pool's access domain
}

// Place is where a region lies and how it is cut. Offset and ExtentBytes are
// zero for private cpu regions.
type Place struct {
	Offset      uint64
	ExtentBytes uint64
	PageBytes   uint64
	PageCount   uint64
	PieceBytes  uint32
	TableOffset uint64
}

// ExpandRequest asks for one more region.
type ExpandRequest struct {
	Operation  base.Sequence
	Medium     base.Medium
	Bytes      uint64 // usable; rounded up to whole pages
	PageBytes  uint64
	PieceBytes uint32
}

// RegionGrant is a granted region. Write is the RM's capability as the shell gave
// it to ExpandFinish; nil for private cpu regions.
type RegionGrant struct {
	Pool        uint32
	PoolID      base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation
	Place       Place
	Write       []byte
}

// ExpandTicket is an Expand that the resource manager has to carry out. The same
// ticket comes back when the operation is asked again before it is finished, so
// that a retry repeats the same RM operation.
type ExpandTicket struct {
	Caller      Caller
	Operation   base.Sequence
	Pool        uint32
	PoolID      base.PoolID
	RMOperation uint64 // unique for the owner incarnation
	Namespace   base.NamespaceID
	PageCount   uint64
	PageBytes   uint64
	PieceBytes  uint32
}

// RegionInfo describes a region to a reader or to the shell.
type RegionInfo struct {
	Pool        uint32
	PoolID      base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation
	Place       Place
	Writer      base.SessionID
	Write       []byte // the RM's write capability; the shell mints a read capability from it
	Err         error  // set when the region is refused
}

// PoolUse is a client's own count of one pool, from its heartbeat.
type PoolUse struct {
	Pool             uint32
	WritingBytes     uint64
	QuarantinedBytes uint64
	FreeBytes        uint64
	PinnedBytes      uint64
}

// HeartbeatRequest keeps a session valid.
type HeartbeatRequest struct {
	Sequence  uint64
	Uses      []PoolUse
	LastEvent uint64
	Watermark base.Sequence
}

// CloseKind says how a session ends.
type CloseKind uint8

// Kinds of close.
const (
	CloseDrained CloseKind = iota + 1 // every mapping is gone and every lease released
	CloseLeft                         // exports are out: replicas stay, nothing is reused
)

// DeleteID names a delete that waits for its marks. 0 is none.
type DeleteID uint64
