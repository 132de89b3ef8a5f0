package base

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Sizes of identifiers in bytes, fixed by the formats.
const (
	KeyBytes       = 32 // object key
	DigestBytes    = 28 // first bytes of the SHA-256 prefix digest
	NamespaceBytes = 32 // namespace digest
	IDBytes        = 16 // pool, owner, session and node ids
)

// PartAllLayers is the part of an object that holds all local layers of a shard.
const PartAllLayers uint16 = 65535

// Key identifies an object inside a namespace: 28 bytes of prefix digest, shard
// u16, part u16, little-endian (ID-01, ID-05, ID-06).
type Key [KeyBytes]byte

// Digest is the first 28 bytes of the SHA-256 prefix digest of a chunk; it
// covers the whole prefix through that chunk (ID-03).
type Digest [DigestBytes]byte

// MakeKey puts a key together.
func MakeKey(d Digest, shard, part uint16) Key {
	var k Key
	copy(k[:DigestBytes], d[:])
	binary.LittleEndian.PutUint16(k[28:], shard)
	binary.LittleEndian.PutUint16(k[30:], part)
	return k
}

// Digest returns the prefix digest in the key.
func (k Key) Digest() Digest { return Digest(k[:DigestBytes]) }

// Shard returns the shard number in the key.
func (k Key) Shard() uint16 { return binary.LittleEndian.Uint16(k[28:]) }

// Part returns the object part in the key.
func (k Key) Part() uint16 { return binary.LittleEndian.Uint16(k[30:]) }

// WithShard returns the key of another shard of the same chunk.
func (k Key) WithShard(shard uint16) Key {
	binary.LittleEndian.PutUint16(k[28:], shard)
	return k
}

// IsZero reports whether the key is the zero value, which is never a valid key.
func (k Key) IsZero() bool { return k == Key{} }

// String shows enough of a key for a log line, never the whole of it.
func (k Key) String() string {
	return fmt.Sprintf("%s/%d/%d", hex.EncodeToString(k[:8]), k.Shard(), k.Part())
}

// NamespaceID is the SHA-256 of a namespace's canonical CBOR: its identity and
// the root of its key chains.
type NamespaceID [NamespaceBytes]byte

// String shows the first eight bytes.
func (n NamespaceID) String() string { return hex.EncodeToString(n[:8]) }

// NamespaceNumber stands for a namespace during one server epoch. It is never
// on disk and never in a checksum. 0 is no namespace.
type NamespaceNumber uint32

type (
	// PoolID is a pool's UUID.
	PoolID [IDBytes]byte
	// OwnerID is a server id: the owner of regions at the resource manager.
	OwnerID [IDBytes]byte
	// SessionID is 128 random bits made by a client process, kept over re-opens.
	// It is no secret.
	SessionID [IDBytes]byte
	// NodeID is made once per machine.
	NodeID [IDBytes]byte
	// BootID is the kernel's boot id.
	BootID [IDBytes]byte
	// AgentID is made once in the state directory of a node's agent.
	AgentID [IDBytes]byte
	// StoreID identifies a resource manager's durable store.
	StoreID [IDBytes]byte
)

func idString(b []byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

func (i PoolID) String() string    { return idString(i[:]) }
func (i OwnerID) String() string   { return idString(i[:]) }
func (i SessionID) String() string { return idString(i[:]) }
func (i NodeID) String() string    { return idString(i[:]) }
func (i BootID) String() string    { return idString(i[:]) }
func (i AgentID) String() string   { return idString(i[:]) }
func (i StoreID) String() string   { return idString(i[:]) }

// NewID returns 128 random bits, for any of the id types.
func NewID() [IDBytes]byte {
	var b [IDBytes]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails since Go 1.24
	return b
}

// ParseID reads an id as String shows it; dashes may be left out.
func ParseID(s string) ([IDBytes]byte, error) {
	var id [IDBytes]byte
	clean := make([]byte, 0, 2*IDBytes)
	for i := 0; i < len(s); i++ {
		if s[i] != '-' {
			clean = append(clean, s[i])
		}
	}
	if len(clean) != 2*IDBytes {
		return id, fmt.Errorf("%w: id %q must have 32 hexadecimal digits", ErrInvalid, s)
	}
	if _, err := hex.Decode(id[:], clean); err != nil {
		return id, fmt.Errorf("%w: id %q: %w", ErrInvalid, s, err)
	}
	return id, nil
}

// IDFromBytes copies a 16-byte id out of a message; any other length is refused.
func IDFromBytes(field string, b []byte) ([IDBytes]byte, error) {
	if len(b) != IDBytes {
		return [IDBytes]byte{}, fmt.Errorf("%w: %s has %d bytes, must have %d", ErrInvalid, field, len(b), IDBytes)
	}
	return [IDBytes]byte(b), nil
}

type (
	// RegionID is an increasing integer below 2^31, never reused. Regions of
	// private cpu pools have ids of 2^30 and above, given by the server and
	// meaningful inside their session only; the resource manager's stay below.
	RegionID uint32
	// Incarnation counts allocations of regions in a pool, or starts of an owner;
	// 24 bits. 0 is none.
	Incarnation uint32
	// PageIndex is a page's place in its region.
	PageIndex uint32
	// Epoch is a session's epoch: a new one for each Open. 0 is none.
	Epoch uint32
	// ServerEpoch is 64 random bits per start of a maru-server.
	ServerEpoch uint64
	// Sequence is an operation's number inside a session; it rises over all epochs.
	Sequence uint64
	// CommitOrder is owner incarnation u24 << 40 | counter u40. It orders all
	// commits for ever. 0 is none.
	CommitOrder uint64
)

// Limits of the id spaces (docs/PROTOCOL.md, sections 1 and 2).
const (
	FirstPrivateRegion RegionID    = 1 << 30
	MaxRegionID        RegionID    = 1<<31 - 1
	MaxIncarnation     Incarnation = 1<<24 - 1
	MaxCommitCounter   uint64      = 1<<40 - 1
	MaxObjectBytes     uint64      = 1<<40 - 1 // length u40 in a record
)

// Generation says which use of a page is meant: (region incarnation, page
// counter) in shared pools, (session epoch, counter) in private cpu pools
// (DM-15). 0 is none.
type Generation uint64

// MakeGeneration puts a generation together.
func MakeGeneration(high, counter uint32) Generation {
	return Generation(uint64(high)<<32 | uint64(counter))
}

// High returns the region incarnation or the session epoch.
func (g Generation) High() uint32 { return uint32(g >> 32) }

// Counter returns the page counter.
func (g Generation) Counter() uint32 { return uint32(g) }

// String shows a generation as high.counter.
func (g Generation) String() string { return fmt.Sprintf("%d.%d", g.High(), g.Counter()) }

// MakeCommitOrder orders a commit. It returns ErrExhausted when a part is at its
// end: such a counter is refused, never wrapped.
func MakeCommitOrder(owner Incarnation, counter uint64) (CommitOrder, error) {
	if owner > MaxIncarnation || counter > MaxCommitCounter {
		return 0, fmt.Errorf("%w: commit order %d:%d", ErrExhausted, owner, counter)
	}
	return CommitOrder(uint64(owner)<<40 | counter), nil
}

// Owner returns the owner incarnation in the order.
func (o CommitOrder) Owner() Incarnation { return Incarnation(o >> 40) }

// Counter returns the counter in the order.
func (o CommitOrder) Counter() uint64 { return uint64(o) & MaxCommitCounter }

// OperationID names one request of one session for ever (INV-09).
type OperationID struct {
	Session  SessionID
	Epoch    Epoch
	Sequence Sequence
}

// NamespaceOf returns the identity of a namespace given as canonical CBOR.
func NamespaceOf(canonical []byte) NamespaceID { return sha256.Sum256(canonical) }
