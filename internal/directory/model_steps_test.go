package directory

import (
	"errors"
	"slices"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

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
		if len(m.leasesOfSession(i)) > 0 {
			t.Skip("its views are still out")
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
