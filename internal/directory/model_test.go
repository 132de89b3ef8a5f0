package directory

import (
	"errors"
	"fmt"
	"slices"
	"testing"
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
	if len(m.replicas) != m.countReplicas() {
		t.Fatalf("directory has %d replicas, model %d", m.countReplicas(), len(m.replicas))
	}
}

func (m *model) countReplicas() int {
	n := 0
	for _, g := range m.rig.d.regions {
		if g != nil {
			n += g.used
		}
	}
	return n
}

func (m *model) open(t *rapid.T) {
	i := rapid.IntRange(0, mSessions-1).Draw(t, "who")
	s := m.sessions[i]
	if s.gone || s.left {
		// A new process takes its place in the list when it left no region behind.
		for _, g := range m.regions {
			if g.writer == i {
				t.Skip("its regions are still here")
			}
		}
		m.ids++
		*s = mSession{who: Caller{Session: base.SessionID{m.ids, 0xee}}}
	}
	req := openReq(0)
	req.Session, req.CPUBytes = s.who.Session, 16*testPage
	req.Secret = Secret{byte(i), byte(s.who.Epoch) + 1, 9}
	if s.opened {
		req.PreviousSecret = Secret{byte(i), byte(s.who.Epoch), 9}
	}
	wasHidden := s.opened && !s.live
	res, err := m.rig.d.Open(m.rig.now, req)
	if err != nil {
		t.Fatal(err)
	}
	if res.Epoch != s.who.Epoch+1 {
		t.Fatalf("epoch %d after %d", res.Epoch, s.who.Epoch)
	}
	s.who.Epoch, s.opened, s.live, s.deadline = res.Epoch, true, true, m.rig.now+m.rig.d.cfg.TTL
	if err := m.rig.d.ProveDomains(m.rig.now, s.who, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	m.events[i] = nil
	if wasHidden {
		m.claims()
	}
}

func (m *model) expand(t *rapid.T) {
	i := m.live(t)
	if len(m.regions) > 8 {
		t.Skip("enough regions")
	}
	s := m.sessions[i]
	private := rapid.Bool().Draw(t, "private")
	req := &ExpandRequest{Operation: m.rig.next(), Medium: base.MediumCXL, Bytes: 4 * testPage, PageBytes: testPage, PieceBytes: testPiece}
	if private {
		req.Medium = base.MediumCPU
	}
	grant, ticket, err := m.rig.d.ExpandBegin(m.rig.now, s.who, req)
	if private && errors.Is(err, base.ErrFull) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if ticket != nil {
		nextRegion++
		answer := &RegionGrant{
			Region: nextRegion, Incarnation: base.Incarnation(nextRegion),
			Place: Place{ExtentBytes: extentBytes(testPage, 4), PageBytes: testPage, PageCount: 4, PieceBytes: testPiece},
		}
		switch rapid.SampledFrom([]string{"ok", "ok", "lost", "full"}).Draw(t, "rm") {
		case "full":
			if _, err := m.rig.d.ExpandFinish(m.rig.now, ticket, nil, base.ErrFull); !errors.Is(err, base.ErrFull) {
				t.Fatal(err)
			}
			return
		case "lost":
			if _, err := m.rig.d.ExpandFinish(m.rig.now, ticket, nil, base.ErrTimeout); !errors.Is(err, base.ErrTimeout) {
				t.Fatal(err)
			}
			_, again, err := m.rig.d.ExpandBegin(m.rig.now, s.who, req)
			if err != nil || again == nil || again.RMOperation != ticket.RMOperation {
				t.Fatalf("retry gave %+v, %v", again, err)
			}
		}
		g, err := m.rig.d.ExpandFinish(m.rig.now, ticket, answer, nil)
		if err != nil {
			t.Fatal(err)
		}
		grant = &g
	}
	if again, _, err := m.rig.d.ExpandBegin(m.rig.now, s.who, req); err != nil || again == nil || again.Region != grant.Region {
		t.Fatalf("repeated expand %+v, %v", again, err)
	}
	m.regions = append(m.regions, &mRegion{
		grant: *grant, writer: i, private: private, counter: make([]uint32, 4), busy: make([]bool, 4), lastRead: m.rig.now,
	})
}

func (m *model) commit(t *rapid.T) {
	i := m.live(t)
	s := m.sessions[i]
	var rows []hot.CommitRow
	var want []base.Code
	var fresh []*mReplica
	for _, g := range m.regions {
		if g.writer != i || g.going || g.kept {
			continue
		}
		for p := range uint64(4) {
			if g.busy[p] || !rapid.Bool().Draw(t, "use") {
				continue
			}
			key := rapid.IntRange(0, mKeys-1).Draw(t, "key")
			g.counter[p]++
			row := rowOf(g.grant, p, g.counter[p], testKey(uint64(key)))
			if g.private {
				row.Generation = base.MakeGeneration(uint32(s.who.Epoch), g.counter[p])
			}
			code := base.CodeOK
			for _, r := range m.replicas {
				if r.key == key && r.pool == g.grant.Pool && m.visible(r) {
					code = base.CodeAlreadyStored
				}
			}
			switch rapid.IntRange(0, 15).Draw(t, "fault") {
			case 0:
				row.Offset++
				code = base.CodeInvalid
			case 1:
				row.Generation = base.MakeGeneration(row.Generation.High()+1, 1)
				code = base.CodeStale
			case 2:
				row.Region += 1 << 20
				code = base.CodeNotFound
			}
			rows = append(rows, row)
			want = append(want, code)
			if code == base.CodeOK {
				r := &mReplica{key: key, pool: g.grant.Pool, region: g.grant.Region, page: p, generation: row.Generation, writer: i}
				m.replicas = append(m.replicas, r)
				fresh = append(fresh, r)
				g.busy[p] = true
			} else {
				fresh = append(fresh, nil)
			}
		}
	}
	if len(rows) == 0 {
		t.Skip("no free page")
	}
	seq := m.rig.next()
	res, err := m.rig.commitSeq(s.who, seq, rows...)
	if err != nil {
		t.Fatal(err)
	}
	for j := range rows {
		if res[j].Code != want[j] {
			t.Fatalf("row %d: %v, model %v", j, res[j].Code, want[j])
		}
		if fresh[j] != nil {
			fresh[j].order = res[j].Order
		}
	}
	s.lastSeq, s.lastRows, s.lastRes = seq, rows, res
}

// repeatCommit asks again what was asked before: nothing changes, and the results
// say what was retired since.
func (m *model) repeatCommit(t *rapid.T) {
	i := m.live(t)
	s := m.sessions[i]
	if s.lastSeq == 0 {
		t.Skip("no commit")
	}
	want := slices.Clone(s.lastRes)
	for j := range want {
		if want[j].Code != base.CodeOK {
			continue
		}
		alive := slices.ContainsFunc(m.replicas, func(r *mReplica) bool {
			g := m.regionOf(r)
			return r.order == want[j].Order && !r.retiring && !g.going
		})
		if !alive {
			want[j].Code = base.CodeRetired
		}
	}
	var res []hot.CommitResult
	if rapid.Bool().Draw(t, "resolve") {
		outcome, out, err := m.rig.d.Resolve(m.rig.now, s.who, &hot.ResolveRequest{
			TargetServerEpoch: 77, TargetEpoch: s.who.Epoch, Target: s.lastSeq,
		}, nil)
		if err != nil || outcome != hot.OutcomeCommitted {
			t.Fatal(outcome, err)
		}
		list := hot.CommitResults(out)
		for j := range list.Len() {
			res = append(res, list.At(j))
		}
	} else {
		var err error
		if res, err = m.rig.commitSeq(s.who, s.lastSeq, s.lastRows...); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(res, want) {
		t.Fatalf("repeated commit %+v, model %+v", res, want)
	}
}

// resolveUnseen closes an operation that arrives only later.
func (m *model) resolveUnseen(t *rapid.T) {
	s := m.sessions[m.live(t)]
	seq := m.rig.next()
	outcome, _, err := m.rig.d.Resolve(m.rig.now, s.who, &hot.ResolveRequest{TargetServerEpoch: 77, TargetEpoch: s.who.Epoch, Target: seq}, nil)
	if err != nil || outcome != hot.OutcomeAborted {
		t.Fatal(outcome, err)
	}
	if _, err := m.rig.commitSeq(s.who, seq); !errors.Is(err, base.ErrAborted) {
		t.Fatal(err)
	}
	if outcome, _, err := m.rig.d.Resolve(m.rig.now, s.who, &hot.ResolveRequest{TargetServerEpoch: 78, TargetEpoch: 1, Target: 1}, nil); err != nil || outcome != hot.OutcomeUnknown {
		t.Fatal(outcome, err)
	}
}

func (m *model) acquire(t *rapid.T) {
	i := m.live(t)
	s := m.sessions[i]
	view := rapid.Bool().Draw(t, "view")
	kind, mode := base.LeaseCopy, rapid.SampledFrom([]hot.Mode{hot.ModeEach, hot.ModePrefix}).Draw(t, "mode")
	if view {
		kind = base.LeaseView
	}
	a := &mAcquire{seq: m.rig.next()}
	var want []*mReplica
	stop := false
	for range rapid.IntRange(1, 4).Draw(t, "manifests") {
		n := rapid.IntRange(1, 3).Draw(t, "size")
		a.sizes = append(a.sizes, n)
		var part []*mReplica
		whole := true
		for range n {
			k := rapid.IntRange(0, mKeys-1).Draw(t, "key")
			a.keys = append(a.keys, testKey(uint64(k)))
			r := m.readable(i, k)
			whole = whole && r != nil
			part = append(part, r)
		}
		if stop {
			continue
		}
		if !whole {
			for j := range part {
				part[j] = nil
			}
			stop = mode == hot.ModePrefix
		}
		want = append(want, part...)
	}
	rows, _, err := m.rig.acquireSeq(s.who, a.seq, kind, mode, a.sizes, a.keys...)
	if n := countReplicas(want); len(m.leasesOfSession(i))+n > m.rig.d.cfg.Limits.MaxLeases {
		if !errors.Is(err, base.ErrLimit) || len(rows) != 0 {
			t.Fatalf("past the limit: %d rows, %v", len(rows), err)
		}
		return
	}
	if err != nil || len(rows) != len(want) {
		t.Fatalf("%d rows, model %d: %v", len(rows), len(want), err)
	}
	for j, row := range rows {
		r := want[j]
		if (r == nil) != (row.Verdict.Status() != hot.Hit) {
			t.Fatalf("row %d: %+v, model %+v", j, row, r)
		}
		if r == nil {
			continue
		}
		if row.Order != r.order || row.Region != r.region || row.Generation != r.generation || row.Pool != r.pool {
			t.Fatalf("row %d: %+v, model %+v", j, row, r)
		}
		m.leases = append(m.leases, &mLease{session: i, seq: a.seq, row: uint32(j), view: view, replica: r})
		a.left++
	}
	a.rows = rows
	s.lastAcq = a
	again, _, err := m.rig.acquireSeq(s.who, a.seq, kind, mode, a.sizes, a.keys...)
	if err != nil || !slices.Equal(again, rows) {
		t.Fatalf("repeated acquire %+v, was %+v: %v", again, rows, err)
	}
}

func countReplicas(list []*mReplica) int {
	n := 0
	for _, r := range list {
		if r != nil {
			n++
		}
	}
	return n
}

func (m *model) leasesOfSession(i int) []*mLease {
	var out []*mLease
	for _, l := range m.leases {
		if l.session == i {
			out = append(out, l)
		}
	}
	return out
}

func (m *model) release(t *rapid.T) {
	i := m.live(t)
	s := m.sessions[i]
	list := m.leasesOfSession(i)
	if len(list) == 0 {
		t.Skip("no leases")
	}
	l := rapid.SampledFrom(list).Draw(t, "lease")
	row := hot.ReleaseRow{Acquire: l.seq, First: l.row, Count: 1}
	if rapid.Bool().Draw(t, "all") {
		row = hot.ReleaseRow{Acquire: l.seq, Count: hot.ReleaseAll}
	}
	whole := true
	if row.Count == hot.ReleaseAll && s.lastAcq != nil && s.lastAcq.seq == l.seq {
		n := 0
		for _, o := range list {
			if o.seq == l.seq {
				n++
			}
		}
		whole = n == s.lastAcq.left
	} else if row.Count == hot.ReleaseAll {
		whole = false // the model has forgotten how many there were
	}
	m.leases = slices.DeleteFunc(m.leases, func(o *mLease) bool {
		return o.session == i && o.seq == l.seq && (row.Count == hot.ReleaseAll || o.row == l.row)
	})
	held := m.rig.release(s.who, row)
	if whole && held[0] != 1 {
		t.Fatalf("release of %+v says %v", row, held)
	}
	if again := m.rig.release(s.who, row); again[0] != 0 {
		t.Fatalf("a second release of %+v says %v", row, again)
	}
	// A late Acquire that was released first leases nothing.
	seq := m.rig.next()
	m.rig.release(s.who, hot.ReleaseRow{Acquire: seq, Count: hot.ReleaseAll})
	if _, _, err := m.rig.acquireSeq(s.who, seq, base.LeaseCopy, hot.ModeEach, []int{1}, testKey(1)); !errors.Is(err, base.ErrAborted) {
		t.Fatal(err)
	}
	m.settle()
}

func (m *model) delete(t *rapid.T) {
	i := m.live(t)
	k := rapid.IntRange(0, mKeys-1).Draw(t, "key")
	id, err := m.rig.d.Delete(m.rig.now, m.sessions[i].who, m.rig.next(), []base.Key{testKey(uint64(k))})
	if err != nil {
		t.Fatal(err)
	}
	pinned, known, marks := false, false, 0
	for _, r := range m.replicas {
		if r.key != k {
			continue
		}
		for _, l := range m.leases {
			pinned = pinned || (l.replica == r && l.view && !r.retiring && !m.regionOf(r).going)
		}
	}
	if !pinned {
		for _, r := range m.replicas {
			if r.key != k {
				continue
			}
			if !r.retiring && !m.regionOf(r).going {
				m.retire(r)
				known = true
			}
			if !r.cleared {
				marks++
				known = true
			}
		}
	}
	want := base.CodeOK
	switch {
	case pinned:
		want = base.CodePinned
	case !known:
		want = base.CodeNotFound
	case marks > 0:
		want = base.CodeUnknown // for now
	}
	codes, _, done := m.rig.d.DeleteStatus(id, nil)
	if codes[0] != want || done != (marks == 0) {
		t.Fatalf("delete of key %d: %v done %v, model %v with %d marks", k, codes[0], done, want, marks)
	}
	m.settle()
}

// acknowledge does what the oldest event of a session asks for.
func (m *model) acknowledge(t *rapid.T) {
	i := m.live(t)
	if len(m.events[i]) == 0 {
		t.Skip("no events")
	}
	e := m.events[i][0]
	m.events[i] = m.events[i][1:]
	ref := PageRef{Pool: e.Pool, Region: e.Region, Offset: e.Offset, Generation: e.Generation}
	var r *mReplica
	for _, o := range m.replicas {
		if o.pool == e.Pool && o.region == e.Region && o.page*testPage == e.Offset && o.generation == e.Generation {
			r = o
		}
	}
	if r != nil && (m.regionOf(r).going || m.regionOf(r).kept) {
		r = nil // the page comes back with its region, or the resource manager clears it
	}
	var err error
	switch e.Kind {
	case EventRetire:
		if r != nil && !r.retiring && !m.regionOf(r).going {
			t.Fatalf("%+v of a replica that is not retired", e)
		}
		err = m.rig.d.Acknowledge(m.rig.now, m.sessions[i].who, []PageRef{ref}, nil)
		if r != nil {
			r.cleared = true
		}
	case EventReclaim:
		if r != nil {
			if m.leasesOf(r) != 0 || !r.cleared {
				t.Fatalf("reclaim of a page with %d leases, cleared %v (R3)", m.leasesOf(r), r.cleared)
			}
			m.regionOf(r).busy[r.page] = false
			m.dropReplica(r)
		}
		err = m.rig.d.Acknowledge(m.rig.now, m.sessions[i].who, nil, []PageRef{ref})
		if err == nil {
			err = m.rig.d.Acknowledge(m.rig.now, m.sessions[i].who, []PageRef{ref}, []PageRef{ref}) // repeated
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.rig.d.Heartbeat(m.rig.now, m.sessions[i].who, &HeartbeatRequest{
		Sequence: m.rig.d.sessions[m.sessions[i].who.Session].beat + 1, LastEvent: e.Number,
	}); err != nil {
		t.Fatal(err)
	}
	m.sessions[i].deadline = m.rig.now + m.rig.d.cfg.TTL
	m.settle()
}

// manager answers for the resource manager.
func (m *model) manager(t *rapid.T) {
	fail := error(nil)
	if rapid.IntRange(0, 3).Draw(t, "fail") == 0 {
		fail = base.ErrUnavailable
	}
	if len(m.clearing) > 0 && rapid.Bool().Draw(t, "clear first") {
		e := m.clearing[0]
		m.clearing = m.clearing[1:]
		if fail == nil {
			for _, r := range m.replicas {
				if r.pool == e.Pool && r.region == e.Region && r.retiring && slices.Contains(e.Pages, base.PageIndex(r.page)) {
					r.cleared = true
				}
			}
		}
		m.rig.d.RecordsCleared(m.rig.now, e.Pool, e.Region, e.Pages, fail)
	} else if len(m.freeing) > 0 {
		e := m.freeing[0]
		m.freeing = m.freeing[1:]
		if fail == nil {
			for _, g := range slices.Clone(m.regions) {
				if g.grant.Pool == e.Pool && g.grant.Region == e.Region {
					m.dropRegion(g)
				}
			}
		}
		m.rig.d.RegionFreed(m.rig.now, e.Pool, e.Region, fail)
	} else {
		t.Skip("nothing asked")
	}
	m.settle()
}

func (m *model) end(t *rapid.T) {
	i := rapid.IntRange(0, mSessions-1).Draw(t, "who")
	s := m.sessions[i]
	if !s.opened || s.gone {
		t.Skip("not open")
	}
	how := rapid.SampledFrom([]string{"killed", "drained", "left"}).Draw(t, "how")
	if how == "killed" {
		if !m.rig.d.SessionGone(m.rig.now, s.who.Session, GonePidfd) {
			// Known only while it holds something; an expired record may stay.
			t.Fatal("the session was not known")
		}
		m.gone(i)
		return
	}
	if !s.live || s.deadline <= m.rig.now {
		t.Skip("not live")
	}
	if how == "drained" {
		err := m.rig.d.Close(m.rig.now, s.who, CloseDrained)
		if n := len(m.leasesOfSession(i)); n > 0 {
			if !errors.Is(err, base.ErrPinned) && !errors.Is(err, base.ErrBusy) {
				t.Fatalf("drained close with %d leases: %v", n, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		m.gone(i)
		return
	}
	if err := m.rig.d.Close(m.rig.now, s.who, CloseLeft); err != nil {
		t.Fatal(err)
	}
	s.live, s.left = false, true
	m.endLeases(i, false)
	for _, g := range m.regions {
		if g.writer == i && !g.private && !g.going {
			g.kept = true
		}
	}
	m.settle()
}

func (m *model) giveBack(t *rapid.T) {
	i := m.live(t)
	var mine []*mRegion
	for _, g := range m.regions {
		if g.writer == i && !g.going {
			mine = append(mine, g)
		}
	}
	if len(mine) == 0 {
		t.Skip("no region")
	}
	g := rapid.SampledFrom(mine).Draw(t, "region")
	err := m.rig.d.Return(m.rig.now, m.sessions[i].who, m.rig.next(), g.grant.Pool, g.grant.Region)
	if g.private && m.leasesIn(g) > 0 {
		if !errors.Is(err, base.ErrPinned) {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	g.going = true
	m.settle()
}

func (m *model) victim(t *rapid.T) {
	for _, g := range m.regions {
		if g.going && g.kept {
			t.Skip("one is on its way")
		}
	}
	ref, ok := m.rig.d.GiveBackVictim(m.rig.now, 0)
	if !ok {
		for _, g := range m.regions {
			views := false
			for _, l := range m.leases {
				views = views || (l.view && m.regionOf(l.replica) == g)
			}
			if g.kept && !g.going && !views && m.sessions[g.writer].gone {
				t.Fatalf("kept region %d was no victim", g.grant.Region)
			}
		}
		t.Skip("no victim")
	}
	for _, g := range m.regions {
		if g.grant.Region == ref.Region && g.grant.Pool == ref.Pool {
			if !g.kept || !m.sessions[g.writer].gone {
				t.Fatalf("victim %d is not kept", ref.Region)
			}
			g.going = true
		}
	}
	m.settle()
}

func (m *model) stale(t *rapid.T) {
	i := rapid.IntRange(0, mSessions-1).Draw(t, "who")
	s := m.sessions[i]
	who := s.who
	if s.live && s.deadline > m.rig.now {
		who.Epoch--
	}
	if _, err := m.rig.commitSeq(who, m.rig.next()); !errors.Is(err, base.ErrStale) {
		t.Fatalf("commit of epoch %d: %v (S1)", who.Epoch, err)
	}
	if _, _, err := m.rig.acquireSeq(who, m.rig.next(), base.LeaseCopy, hot.ModeEach, []int{1}, testKey(1)); !errors.Is(err, base.ErrStale) {
		t.Fatal(err)
	}
	if _, err := m.rig.d.Heartbeat(m.rig.now, who, &HeartbeatRequest{Sequence: 1 << 40}); !errors.Is(err, base.ErrStale) {
		t.Fatal(err)
	}
}

func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{rig: newRig(&panicTB{}, func(c *Config) {
			c.Limits = Limits{MaxLeases: 12, MaxEvents: 6}
			c.EventTimeout = time.Hour
		}), events: map[int][]Event{}}
		for range mSessions {
			m.ids++
			m.sessions = append(m.sessions, &mSession{who: Caller{Session: base.SessionID{m.ids, 0xee}}})
		}
		step := func(f func(*rapid.T)) func(*rapid.T) {
			return func(t *rapid.T) {
				f(t)
				m.after(t)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"open": step(m.open), "expand": step(m.expand), "commit": step(m.commit), "repeat": step(m.repeatCommit),
			"resolve": step(m.resolveUnseen), "acquire": step(m.acquire), "release": step(m.release), "delete": step(m.delete),
			"acknowledge": step(m.acknowledge), "acknowledge2": step(m.acknowledge), "manager": step(m.manager),
			"end": step(m.end), "return": step(m.giveBack), "victim": step(m.victim), "stale": step(m.stale),
			"commit2": step(m.commit), "acquire2": step(m.acquire),
			"beat": step(func(t *rapid.T) {
				i := m.live(t)
				m.rig.beat(m.sessions[i].who)
				m.sessions[i].deadline = m.rig.now + m.rig.d.cfg.TTL
			}),
			"time": step(func(t *rapid.T) {
				m.rig.now += time.Duration(rapid.IntRange(1, 6).Draw(t, "seconds")) * time.Second
				m.expire()
			}),
		})
	})
}

// panicTB lets a rig fail inside rapid, which reports the panic with its seed.
type panicTB struct{ testing.TB }

func (*panicTB) Helper() {}

func (*panicTB) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

func (*panicTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
