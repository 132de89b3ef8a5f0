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

// quiesce stops all faults: every process is proved gone, the resource manager
// answers, and room is needed. Then every byte must come back (L1).
func (m *model) quiesce(t *rapid.T) {
	d := m.rig.d
	for _, s := range slices.Clone(d.sessionList) {
		d.SessionGone(m.rig.now, s.id, GoneReboot)
	}
	for range 100 {
		m.rig.now += time.Second
		d.Tick(m.rig.now)
		m.clearing = append(m.clearing, m.freeing...)
		m.freeing = nil
		m.clearing = d.AppendEffects(m.clearing)
		for _, e := range m.clearing {
			switch e.Kind {
			case EffectClearRecords:
				d.RecordsCleared(m.rig.now, e.Pool, e.Region, e.Pages, nil)
			case EffectFreeRegion:
				d.RegionFreed(m.rig.now, e.Pool, e.Region, nil)
			}
		}
		m.clearing = nil
		if err := d.CheckInvariants(m.rig.now); err != nil {
			t.Fatal(err)
		}
		d.GiveBackVictim(m.rig.now, 0)
	}
	u := d.Usage(m.rig.now)
	if u.Objects != 0 || u.Regions != 0 || len(u.Sessions) != 0 || len(d.hosts) != 0 || d.shared[0].reserved != 0 || len(d.pools) != 1 {
		t.Fatalf("something stays (L1): %+v", u)
	}
	for id, pd := range d.deletes {
		t.Fatalf("delete %d waits for %d marks (L1)", id, pd.remaining)
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
		m.quiesce(t)
	})
}

// panicTB lets a rig fail inside rapid, which reports the panic with its seed.
type panicTB struct{ testing.TB }

func (*panicTB) Helper() {}

func (*panicTB) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

func (*panicTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
