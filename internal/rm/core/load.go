package core

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// Loader builds a core from the rows of a store. It checks every row and how
// rows fit together: a store that lost a part of itself must not pass for a
// smaller one.
type Loader struct {
	c       *Core
	pools   []poolRow
	regions []regionRow
	owners  []ownerRow
	holds   []holdRow
	spans   map[base.OwnerID]spans
	count   int
	seen    bool // counters
}

// NewLoader starts a load.
func NewLoader(cfg Config) *Loader { return &Loader{c: New(cfg), spans: map[base.OwnerID]spans{}} }

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{base.ErrCorrupt}, args...)...)
}

// Row takes one row; it has the form of store.Store's visit. Errors: ErrCorrupt,
// ErrUnsupported for a bucket of a newer version.
func (l *Loader) Row(bucket, key string, value []byte) error {
	bad := func(err error) error { return corrupt("row %x in bucket %s: %w", key, bucket, err) }
	l.count++
	switch bucket {
	case bucketCounters:
		if err := decoder.Unmarshal(value, &l.c.counters); err != nil {
			return bad(err)
		}
		n := l.c.counters
		if key != "counters" || n.NextRegion == 0 || n.NextRegion > base.FirstPrivateRegion || n.NextOwner == 0 || n.NextOwner > base.MaxIncarnation+1 {
			return corrupt("counters %q: %+v", key, n)
		}
		l.seen = true
	case bucketPools:
		return loadRow(key, value, &l.pools, func(r poolRow) string { return string(r.ID[:]) }, bad)
	case bucketRegions:
		return loadRow(key, value, &l.regions, func(r regionRow) string { return regionKey(r.ID) }, bad)
	case bucketOwners:
		if err := loadRow(key, value, &l.owners, func(r ownerRow) string { return string(r.ID[:]) }, bad); err != nil {
			return err
		}
		if n := len(l.owners[len(l.owners)-1].Digest); n != 0 && n != OwnerDigestBytes {
			return corrupt("owner %x: a digest of %d bytes", key, n)
		}
	case bucketFormat:
		var row formatRow
		if err := decoder.Unmarshal(value, &row); err != nil {
			return bad(err)
		}
		if key != formatKey || row.Version <= formatFirst {
			return corrupt("format %q: version %d", key, row.Version)
		}
		if row.Version > formatAgents {
			return fmt.Errorf("%w: the rows of the store have version %d, this program reads %d to %d", base.ErrUnsupported, row.Version, formatFirst, formatAgents)
		}
		l.c.format = row.Version
	case bucketHolds:
		return loadRow(key, value, &l.holds, func(r holdRow) string { return holdKey(r.Session, r.Region) }, bad)
	case bucketSessions:
		var rows []sessionRow
		if err := loadRow(key, value, &rows, func(r sessionRow) string { return string(r.ID[:]) }, bad); err != nil {
			return err
		}
		l.c.sessions[rows[0].ID] = &session{row: rows[0], rows: map[base.RegionID]*holdRow{}}
	case bucketAgents:
		var rows []agentRow
		if err := loadRow(key, value, &rows, func(r agentRow) string { return string(r.Node[:]) }, bad); err != nil {
			return err
		}
		if r := rows[0]; len(r.Digest) != AgentDigestBytes || r.Epoch == 0 || r.ID == (base.AgentID{}) || l.c.agentByID(r.ID) != nil {
			return corrupt("agent of node %s: id, epoch or digest", r.Node)
		}
		l.c.agents[rows[0].Node] = &agent{row: rows[0]}
	case bucketNodes:
		var rows []nodeRow
		if err := loadRow(key, value, &rows, func(r nodeRow) string { return string(r.ID[:]) }, bad); err != nil {
			return err
		}
		l.c.nodes[rows[0].ID] = &rows[0]
	case bucketOperations:
		var row spanRow
		if err := decoder.Unmarshal(value, &row); err != nil {
			return bad(err)
		}
		if len(key) != base.IDBytes+8 {
			return corrupt("operation key of %d bytes", len(key))
		}
		id := base.OwnerID([]byte(key[:base.IDBytes]))
		s := l.spans[id]
		if !s.load(binary.BigEndian.Uint64([]byte(key[base.IDBytes:])), row.Last) {
			return corrupt("closed operations of owner %s overlap", id)
		}
		l.spans[id] = s
	default:
		return fmt.Errorf("%w: bucket %q: the store is of a newer version", base.ErrUnsupported, bucket)
	}
	return nil
}

func loadRow[T any](key string, value []byte, into *[]T, keyOf func(T) string, bad func(error) error) error {
	var row T
	if err := decoder.Unmarshal(value, &row); err != nil {
		return bad(err)
	}
	if k := keyOf(row); k != key {
		return corrupt("row %x lies under key %x", k, key)
	}
	*into = append(*into, row)
	return nil
}

// Finish checks how the rows fit and gives the core; all pools are offline until
// Attach. Errors: ErrCorrupt.
func (l *Loader) Finish() (*Core, error) {
	c := l.c
	if l.count > 0 && !l.seen && (len(l.regions) > 0 || len(l.owners) > 0) {
		return nil, corrupt("the counters are missing")
	}
	if len(c.agents) > 0 && c.format < formatAgents {
		return nil, corrupt("there are agents, which rows of version %d do not have", c.format)
	}
	for id, s := range c.sessions {
		if s.row.Agent == (base.AgentID{}) {
			continue
		}
		if a := c.agentByID(s.row.Agent); a == nil || a.row.Node != s.row.Node || s.row.Process.IsZero() {
			return nil, corrupt("session %s: agent %s that vouches for it, its node or its process is missing", id, s.row.Agent)
		}
	}
	for _, row := range l.pools {
		if poolfmt.UsableBytes(row.DeviceBytes) == 0 || row.DeviceBytes > 1<<62 || row.NextRegion > c.counters.NextRegion || row.NextRegion == 0 ||
			row.NextIncarnation == 0 || row.NextIncarnation > base.MaxIncarnation+1 || row.NextOwner == 0 || row.NextOwner > c.counters.NextOwner {
			return nil, corrupt("pool %s (%s): sizes or numbers", row.ID, row.Path)
		}
		p, err := c.newPool(row)
		if err != nil {
			return nil, corrupt("pool %s: %w", row.ID, err)
		}
		c.pools[row.ID] = p
	}
	for _, row := range l.owners {
		if row.Current.Incarnation == 0 || row.Current.Incarnation >= c.counters.NextOwner {
			return nil, corrupt("owner %s: incarnation %d was never given", row.ID, row.Current.Incarnation)
		}
		if len(row.Digest) > 0 && c.format < formatDigests {
			return nil, corrupt("owner %s has a digest, which rows of version %d do not have", row.ID, c.format)
		}
		c.owners[row.ID] = &owner{row: row, closed: l.spans[row.ID]}
		delete(l.spans, row.ID)
	}
	for id := range l.spans {
		return nil, corrupt("closed operations of unknown owner %s", id)
	}
	for _, row := range l.regions {
		if err := l.region(row); err != nil {
			return nil, err
		}
	}
	for _, row := range l.holds {
		s, r := c.sessions[row.Session], c.regions[row.Region]
		if s == nil || r == nil || row.Sequence == 0 {
			return nil, corrupt("hold of session %s on region %d: session, region or sequence is missing", row.Session, row.Region)
		}
		kept := row
		s.rows[row.Region], r.rows[row.Session] = &kept, &kept
		c.holdCount++
		if row.Held {
			s.held++
			r.held++
		}
	}
	for _, r := range c.regions {
		if r.row.Draining && r.held == 0 {
			return nil, corrupt("region %d drains and nobody holds it", r.row.ID)
		}
		if r.held > 0 && !r.row.Mapped {
			return nil, corrupt("region %d is held and was never mapped", r.row.ID)
		}
	}
	return c, nil
}

func (l *Loader) region(row regionRow) error {
	c := l.c
	p, ok := c.pools[row.Pool]
	if !ok {
		return corrupt("region %d lies in unknown pool %s", row.ID, row.Pool)
	}
	plan, err := poolfmt.PlanRegion(row.PageBytes, row.PageCount, row.PieceBytes)
	if err != nil || plan.ExtentBytes != row.Length || row.ID == 0 || row.ID >= p.row.NextRegion || row.Incarnation == 0 || row.Incarnation >= p.row.NextIncarnation {
		return corrupt("region %d: geometry or numbers: %v", row.ID, err)
	}
	if err := p.extents.Reserve(row.extent()); err != nil {
		return corrupt("region %d: %w", row.ID, err)
	}
	o, ok := c.owners[row.Owner]
	if !ok && !row.Draining {
		return corrupt("region %d belongs to unknown owner %s", row.ID, row.Owner)
	}
	if ok && o.row.Current.Incarnation == row.OwnerIncarnation {
		if _, twice := c.byOp[operationKey{row.Owner, row.OwnerIncarnation, row.Operation}]; twice {
			return corrupt("operation %d of owner %s has two regions", row.Operation, row.Owner)
		}
	}
	c.insert(&region{row: row, plan: plan, pool: p, rows: map[base.SessionID]*holdRow{}})
	return nil
}

// Describe is one line about a load, for the log.
func (c *Core) Describe() string {
	return strings.Join([]string{
		fmt.Sprintf("%d pools", len(c.pools)), fmt.Sprintf("%d regions", len(c.regions)), fmt.Sprintf("%d owners", len(c.owners)),
		fmt.Sprintf("%d sessions", len(c.sessions)), fmt.Sprintf("%d holds", c.holdCount),
	}, ", ")
}
