package directory

import (
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// The model is the server as simply as it can be said: lists of replicas, sessions
// and leases, walked whole for every question. It plays faithful clients too: a
// client allocates a page only when it is free, clears marks and reclaims when it is
// told to, and may lose an answer and repeat the call.

type mReplica struct {
	key        int
	pool       uint32
	region     base.RegionID
	page       uint64
	generation base.Generation
	order      base.CommitOrder
	writer     int
	retiring   bool
	cleared    bool
}

type mLease struct {
	session int
	seq     base.Sequence
	row     uint32
	view    bool
	replica *mReplica
}

type mRegion struct {
	grant   RegionGrant
	writer  int
	private bool
	kept    bool
	going   bool
	freeing bool
	counter []uint32
	// pages: what the client knows of its pages
	busy     []bool
	lastRead time.Duration
}

type mSession struct {
	who      Caller
	opened   bool
	live     bool
	gone     bool
	left     bool
	deadline time.Duration
	lastSeq  base.Sequence
	lastRows []hot.CommitRow
	lastRes  []hot.CommitResult
	lastAcq  *mAcquire
}

type mAcquire struct {
	seq   base.Sequence
	sizes []int
	keys  []base.Key
	rows  []hot.AcquireRow
	left  int
}

type model struct {
	rig      *rig
	sessions []*mSession
	replicas []*mReplica
	leases   []*mLease
	regions  []*mRegion
	clearing []Effect
	freeing  []Effect
	events   map[int][]Event
	ids      byte
}

const (
	mKeys     = 10
	mSessions = 4
)

func (m *model) visible(r *mReplica) bool {
	if r.retiring {
		return false
	}
	g := m.regionOf(r)
	if g == nil || g.going {
		return false
	}
	if g.kept {
		return true
	}
	s := m.sessions[r.writer]
	return s.live && m.rig.now < s.deadline
}

func (m *model) regionOf(r *mReplica) *mRegion {
	for _, g := range m.regions {
		if g.grant.Pool == r.pool && g.grant.Region == r.region {
			return g
		}
	}
	return nil
}

// readable finds the replica that a session must get.
func (m *model) readable(session, key int) *mReplica {
	var best *mReplica
	for _, r := range m.replicas {
		if r.key != key || !m.visible(r) {
			continue
		}
		g := m.regionOf(r)
		if g.private && r.writer != session {
			continue
		}
		if best == nil || (g.private && !m.regionOf(best).private) { // the default order reads cpu first
			best = r
		}
	}
	return best
}

func (m *model) leasesOf(r *mReplica) int {
	n := 0
	for _, l := range m.leases {
		if l.replica == r {
			n++
		}
	}
	return n
}

func (m *model) leasesIn(g *mRegion) int {
	n := 0
	for _, l := range m.leases {
		if m.regionOf(l.replica) == g {
			n++
		}
	}
	return n
}

func (m *model) dropReplica(r *mReplica) {
	m.replicas = slices.DeleteFunc(m.replicas, func(o *mReplica) bool { return o == r })
}

func (m *model) dropRegion(g *mRegion) {
	m.replicas = slices.DeleteFunc(m.replicas, func(r *mReplica) bool { return m.regionOf(r) == g })
	m.regions = slices.DeleteFunc(m.regions, func(o *mRegion) bool { return o == g })
}

func (m *model) retire(r *mReplica) {
	r.retiring = true
	if m.regionOf(r).private {
		r.cleared = true
	}
}

// claims: after replicas became visible, only the highest order of a key stays in a
// shared pool.
func (m *model) claims() {
	for k := range mKeys {
		var best *mReplica
		for _, r := range m.replicas {
			if r.key == k && m.visible(r) && !m.regionOf(r).private && (best == nil || r.order > best.order) {
				best = r
			}
		}
		for _, r := range m.replicas {
			if r.key == k && m.visible(r) && !m.regionOf(r).private && r != best {
				m.retire(r)
			}
		}
	}
}

// settle drops what waits for nothing, as the server must.
func (m *model) settle() {
	for _, r := range slices.Clone(m.replicas) {
		if g := m.regionOf(r); g.kept && !g.going && r.retiring && r.cleared && m.leasesOf(r) == 0 {
			m.dropReplica(r)
		}
	}
	for _, g := range slices.Clone(m.regions) {
		if g.kept && !g.going && m.sessions[g.writer].gone {
			ready := 0
			for _, r := range m.replicas {
				if m.regionOf(r) == g && !r.retiring {
					ready++
				}
			}
			if ready == 0 {
				g.going = true
			}
		}
		left := m.sessions[g.writer].left && !m.sessions[g.writer].gone
		if g.going && !g.freeing && m.leasesIn(g) == 0 && !left {
			g.freeing = true
			if g.private {
				m.dropRegion(g)
			}
		}
	}
}

func (m *model) endLeases(session int, views bool) {
	m.leases = slices.DeleteFunc(m.leases, func(l *mLease) bool { return l.session == session && (views || !l.view) })
	if a := m.sessions[session].lastAcq; a != nil && views {
		m.sessions[session].lastAcq = nil
	}
}

// expire does what the clock does.
func (m *model) expire() {
	for i, s := range m.sessions {
		if s.live && s.deadline <= m.rig.now {
			s.live = false
			m.endLeases(i, false)
			s.lastAcq = nil
		}
	}
	m.settle()
}

func (m *model) gone(i int) {
	s := m.sessions[i]
	s.live, s.gone = false, true
	m.endLeases(i, true)
	for _, g := range slices.Clone(m.regions) {
		if g.writer != i {
			continue
		}
		if g.private {
			m.dropRegion(g)
			continue
		}
		g.kept = true
	}
	m.claims()
	m.settle()
}

func (m *model) live(t *rapid.T) int {
	var list []int
	for i, s := range m.sessions {
		if s.live && s.deadline > m.rig.now {
			list = append(list, i)
		}
	}
	if len(list) == 0 {
		t.Skip("no live session")
	}
	return rapid.SampledFrom(list).Draw(t, "session")
}

// after checks everything after each step.
func (m *model) after(t *rapid.T) {
	r := m.rig
	r.d.Tick(r.now)
	m.expire()
	for _, e := range r.effects() {
		switch e.Kind {
		case EffectClearRecords:
			m.clearing = append(m.clearing, e)
		case EffectFreeRegion:
			m.freeing = append(m.freeing, e)
			for _, g := range m.regions {
				if g.grant.Region == e.Region && g.grant.Pool == e.Pool && !g.freeing {
					t.Fatalf("region %d is freed too early", e.Region)
				}
			}
		case EffectSendEvent:
			for i, s := range m.sessions {
				if s.who == (Caller{e.Session, e.Epoch}) && s.live {
					m.events[i] = append(m.events[i], e.Event)
				}
			}
		}
	}
	if err := r.d.CheckInvariants(r.now); err != nil {
		t.Fatal(err)
	}
	for i, s := range m.sessions {
		if !s.live {
			continue
		}
		for k := range mKeys {
			want := hot.Miss
			if x := m.readable(i, k); x != nil {
				want = hot.MakeHit(base.MediumCXL)
				if m.regionOf(x).private {
					want = hot.MakeHit(base.MediumCPU)
				}
			}
			out, _, err := r.d.Probe(r.now, s.who, &hot.ProbeRequest{Namespace: 1, Keys: hot.AppendKeys(nil, []base.Key{testKey(uint64(k))})}, nil)
			if err != nil || hot.Verdict(out[0]) != want {
				t.Fatalf("session %d key %d: verdict %v, model %v, %v", i, k, out, want, err)
			}
		}
	}
	// Regions on their way back are left out: what is in them goes with them.
	have, want := 0, 0
	for _, g := range r.d.regions {
		if g != nil && (g.state == regionGranted || g.state == regionKept) {
			have += g.used
		}
	}
	for _, x := range m.replicas {
		if !m.regionOf(x).going {
			want++
		}
	}
	if have != want {
		t.Fatalf("directory has %d replicas, model %d", have, want)
	}
}
