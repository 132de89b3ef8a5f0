package base

import "fmt"

// Extent is a byte range inside a pool.
type Extent struct{ Offset, Length uint64 }

// End returns the first byte behind the extent.
func (e Extent) End() uint64 { return e.Offset + e.Length }

// Overlaps reports whether two extents share a byte.
func (e Extent) Overlaps(o Extent) bool { return e.Offset < o.End() && o.Offset < e.End() }

// Contains reports whether o lies inside e.
func (e Extent) Contains(o Extent) bool { return o.Offset >= e.Offset && o.End() <= e.End() }

// String shows [offset, end).
func (e Extent) String() string { return fmt.Sprintf("[%#x,%#x)", e.Offset, e.End()) }

// Location is where a replica lies. Offset is relative to the region's data.
type Location struct {
	Region     RegionID
	Offset     uint64
	Length     uint64
	Generation Generation
}

// String shows a location for a log line.
func (l Location) String() string {
	return fmt.Sprintf("region %d [%#x,+%d) generation %s", l.Region, l.Offset, l.Length, l.Generation)
}

// Medium is what a pool is made of. Medium, tier and scope are three attributes,
// never one (DM-08). Values are stable on the wire.
type Medium uint8

// Media.
const (
	MediumNone Medium = iota
	MediumCPU
	MediumCXL
	MediumSSD
)

func (m Medium) String() string { return enumString("medium", uint8(m), "none", "cpu", "cxl", "ssd") }

// ParseMedium reads "cpu", "cxl" or "ssd".
func ParseMedium(s string) (Medium, error) {
	for _, m := range []Medium{MediumCPU, MediumCXL, MediumSSD} {
		if m.String() == s {
			return m, nil
		}
	}
	return MediumNone, fmt.Errorf("%w: medium %q is unknown, allowed: cpu, cxl, ssd", ErrInvalid, s)
}

// Tier is the level of a pool in the hierarchy.
type Tier uint8

// Tiers.
const (
	TierNone Tier = iota
	TierL1
	TierL2
)

func (t Tier) String() string { return enumString("tier", uint8(t), "none", "l1", "l2") }

// Scope is who a pool serves (DM-09).
type Scope uint8

// Scopes.
const (
	ScopeNone    Scope = iota
	ScopeProcess       // private to its session
	ScopeHost          // processes of one host (a later issue)
	ScopeDomain        // every session that has proved the access domain
)

func (s Scope) String() string {
	return enumString("scope", uint8(s), "none", "process", "host", "domain")
}

// Coherence says who makes written bytes visible to another reader (D6).
type Coherence uint8

// Coherence of a pool. Unknown is refused, never guessed.
const (
	CoherenceUnknown  Coherence = iota
	CoherenceHardware           // one host, or CXL 3 back-invalidate
	CoherenceSoftware           // flush on publish, invalidate on acquire
)

func (c Coherence) String() string {
	return enumString("coherence", uint8(c), "unknown", "hardware", "software")
}

// ParseCoherence reads "hardware" or "software".
func ParseCoherence(s string) (Coherence, error) {
	for _, c := range []Coherence{CoherenceHardware, CoherenceSoftware} {
		if c.String() == s {
			return c, nil
		}
	}
	return CoherenceUnknown, fmt.Errorf("%w: coherence %q is unknown, allowed: hardware, software", ErrInvalid, s)
}

// Role of a session in its engine (SES-01).
type Role uint8

// Roles.
const (
	RoleNone Role = iota
	RoleWorker
	RoleScheduler // metadata only: no domains, grants, holds or leases
)

func (r Role) String() string { return enumString("role", uint8(r), "none", "worker", "scheduler") }

// LeaseKind tells the two leases apart (docs/PROTOCOL.md, section 3).
type LeaseKind uint8

// Kinds of lease.
const (
	LeaseNone LeaseKind = iota
	LeaseCopy           // ends at release or when its session expires
	LeaseView           // ends at release or at the proof that the mapper is gone
)

func (k LeaseKind) String() string { return enumString("lease", uint8(k), "none", "copy", "view") }

func enumString(kind string, v uint8, names ...string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, v)
}
