package client

import (
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Page is a page that Alloc gave out: it stays the caller's until CommitPages,
// FreePage or Close.
type Page struct {
	Region base.RegionID
	Index  base.PageIndex
	Bytes  []byte // the whole page, writable
}

// CommitItem publishes a page that was written in place.
type CommitItem struct {
	Key    base.Key
	Parent base.Digest // zero: the object has no parent in a chain
	Region base.RegionID
	Index  base.PageIndex
	Length uint64 // logical bytes of the object, from the page's start
}

// View is a replica under a view lease.
// Ownership: Bytes is valid until ID is given to ReleaseViews; it is read-only,
// whatever the mapping allows.
type View struct {
	ID     uint64 // 0: a miss
	Bytes  []byte
	Region base.RegionID
	Index  base.PageIndex
}

// ProbeQuery asks which keys could be read.
type ProbeQuery struct {
	Keys hot.Keys
	Mode hot.Mode
	// Targets are the sessions of the workers that would read shard 0, 1, ...; none:
	// the keys are taken as they are, for this session.
	Targets []base.SessionID
	// RequestID, when not 0, puts request leases on the hits (schedulers).
	RequestID uint64
}

// LayoutID names a registered Layout. It is never 0 and never used again.
type LayoutID uint64

// LayerLayout is one tensor of an engine's KV cache: block b's runs begin at
// Base + b x BlockStrideBytes + RunOffsets[i], each RunBytes long.
type LayerLayout struct {
	Base             uintptr
	BlockStrideBytes int64
	RunOffsets       []int64
	RunBytes         uint64
}

// Layout describes the KV tensors of an engine, so that transfers name blocks, not
// addresses. An object of m blocks is block-major: [block][layer][runs].
//
// Ownership: the memory stays the caller's and must stay mapped until UnregisterLayout
// or Close has returned.
type Layout struct {
	Layers     []LayerLayout
	BlockCount uint32
}

// StoreItem is one object to store: from runs of memory, or from blocks of a layout.
type StoreItem struct {
	Key    base.Key
	Parent base.Digest
	Runs   [][]byte // or:
	Layout LayoutID
	Blocks []uint32
}

// LoadItem is one object, or a part of one, to load into runs of memory or into blocks
// of a layout.
type LoadItem struct {
	Key    base.Key
	Runs   [][]byte // or:
	Layout LayoutID
	Blocks []uint32
	// OffsetBytes is where in the object the first run begins.
	OffsetBytes uint64
}

// JobID names a submitted transfer. It is never 0 and never used again.
type JobID uint64

// Stats are counters since Open, and what is held now.
type Stats struct {
	Stores, StoreBytes uint64 // published objects and their bytes
	StoreSeconds       float64
	StoresAlready      uint64 // skipped: the key was there
	StoresFull         uint64 // skipped: no page in any medium
	StoresFailed       uint64 // refused, or of unknown outcome

	Loads, LoadBytes uint64
	LoadSeconds      float64
	Misses           uint64 // the server knew no replica
	MissesAway       uint64 // the server was away
	MissesRefused    uint64 // leases were refused: the session has as many as it may (max_leases)
	MissesExpired    uint64 // the session was not valid when the last byte was read
	MissesUnmapped   uint64 // the region could not be held or mapped
	Corrupt          uint64 // a checksum did not hold
	Faults           uint64 // bus errors

	Views, Pins uint64 // out now
	Reconnects  uint64 // sessions opened again
	Outages     uint64
	Unknown     uint64 // commits without an answer
	Resolved    uint64 // of those, resolved since

	Regions          uint64 // own regions, private ones included
	RegionsMapped    uint64 // foreign regions mapped now
	PagesFree        uint64
	PagesWriting     uint64
	PagesReady       uint64
	PagesRetiring    uint64
	PagesQuarantined uint64
	BytesGranted     uint64 // usable bytes of own regions
	Leases           uint64
	Jobs             uint64 // queued or running
}
