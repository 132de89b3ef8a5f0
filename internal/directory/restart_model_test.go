package directory

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// After a restart, sessions come back in any order, some never; frames are repeated,
// processes die, leases end. Whatever the order is, no listed page may be reclaimed and
// no region may go back before rule "Server restart" says so, and in the end all of it
// comes back. The rule is said here a second time, from what the test did. What was told
// to be READY again, and not to be retired since, is a hit while its writer lives or has
// left it whole, and nothing else is.

type rsLease struct {
	session byte
	view    bool
	seq     base.Sequence
	index   uint32
	region  int
	page    uint64
	gen     base.Generation
	active  bool
}

type rsModel struct {
	rig       *rig
	regions   []RecoveredRegion
	pages     map[int][]hot.RelistPage // by region
	leases    []*rsLease
	callers   map[byte]Caller
	deadline  map[byte]time.Duration
	listed    map[byte]bool
	gone      map[byte]bool
	endedAt   time.Duration
	reclaimed map[[2]uint64]bool
	kept      map[[2]uint64]base.Key // by region and page: the server said READY
}

const rsSessions = 4

// allowed is rule "Server restart" for a region.
func (m *rsModel) allowed(region int) bool {
	ok := func(n byte) bool { return m.listed[n] || m.gone[n] }
	g := &m.regions[region]
	// A writer that the list names as nobody's mapper has nothing to say.
	named := slices.ContainsFunc(m.regions, func(x RecoveredRegion) bool {
		return slices.ContainsFunc(x.Holders, func(h Holder) bool { return h.Session == g.Writer })
	})
	if named && !ok(g.Writer[0]) {
		return false
	}
	for _, h := range g.Holders {
		if !ok(h.Session[0]) && (h.Views || m.endedAt == 0 || m.rig.now < m.endedAt+m.rig.d.cfg.TTL) {
			return false
		}
	}
	return true
}

func (m *rsModel) leased(region int, page uint64) bool {
	return slices.ContainsFunc(m.leases, func(l *rsLease) bool {
		return l.active && l.region == region && (page == ^uint64(0) || l.page == page)
	})
}

// expire ends the copy leases of sessions whose time has come.
func (m *rsModel) expire() {
	for n, at := range m.deadline {
		if at <= m.rig.now && m.callers[n] != (Caller{}) {
			delete(m.callers, n)
			for _, l := range m.leases {
				if l.session == n && !l.view {
					l.active = false
				}
			}
		}
	}
}

func (m *rsModel) indexOf(id base.RegionID) int {
	return slices.IndexFunc(m.regions, func(g RecoveredRegion) bool { return g.Region == id })
}

func (m *rsModel) after(t *rapid.T) {
	d := m.rig.d
	d.Tick(m.rig.now)
	m.expire()
	if err := d.CheckInvariants(m.rig.now); err != nil {
		t.Fatal(err)
	}
	for _, e := range m.rig.effects() {
		switch {
		case e.Kind == EffectFreeRegion:
			i := m.indexOf(e.Region)
			// One that nobody can list any more goes under its readers' holds: deletes wait for it.
			w := m.regions[i].Writer[0]
			unlisted := m.gone[w] && !m.listed[w] || !m.regions[i].writerMaps()
			if !m.allowed(i) || (m.leased(i, ^uint64(0)) && !unlisted) {
				t.Fatalf("region %d goes back too early (R6)", e.Region)
			}
			for page := range uint64(8) {
				delete(m.kept, [2]uint64{uint64(e.Region), page})
			}
			d.RegionFreed(m.rig.now, e.Pool, e.Region, nil)
		case e.Kind == EffectClearRecords:
			for _, page := range e.Pages {
				delete(m.kept, [2]uint64{uint64(e.Region), uint64(page)})
			}
			d.RecordsCleared(m.rig.now, e.Pool, e.Region, e.Pages, nil)
		case e.Kind == EffectSendEvent && (e.Event.Kind == EventReclaim || e.Event.Kind == EventRetire):
			i, page := m.indexOf(e.Event.Region), e.Event.Offset/testPage
			ref := []PageRef{{e.Event.Pool, e.Event.Region, e.Event.Offset, e.Event.Generation}}
			if e.Event.Kind == EventRetire {
				delete(m.kept, [2]uint64{uint64(e.Event.Region), page})
				_ = d.Acknowledge(m.rig.now, Caller{e.Session, e.Epoch}, ref, nil)
				continue
			}
			if !m.allowed(i) || m.leased(i, page) {
				t.Fatalf("page %d of region %d is reclaimed too early (R3, R6)", page, e.Event.Region)
			}
			if d.Acknowledge(m.rig.now, Caller{e.Session, e.Epoch}, nil, ref) == nil {
				m.reclaimed[[2]uint64{uint64(e.Event.Region), page}] = true
			}
		}
	}
	if err := d.CheckInvariants(m.rig.now); err != nil {
		t.Fatal(err)
	}
	for n, who := range m.callers {
		if m.deadline[n] <= m.rig.now {
			continue
		}
		for k := range uint64(4) {
			v := m.rig.probe(who, testKey(k))
			if want := m.visible(testKey(k)); (v[0] != hot.Miss) != want {
				t.Fatalf("key %d: verdict %v, should be a hit: %v", k, v[0], want)
			}
		}
	}
}

// visible says whether a key should be found.
func (m *rsModel) visible(key base.Key) bool {
	for at, k := range m.kept {
		w := m.regions[m.indexOf(base.RegionID(at[0]))].Writer[0] //nolint:gosec // a region of this test
		live := m.callers[w] != (Caller{}) && m.deadline[w] > m.rig.now
		if k == key && (live || m.gone[w] && m.listed[w]) {
			return true
		}
	}
	return false
}

func (m *rsModel) list(t *rapid.T, n byte) {
	var l lister
	for i, g := range m.regions {
		if g.Writer[0] == n {
			l.pages = append(l.pages, m.pages[i]...)
		}
	}
	for _, x := range m.leases {
		if x.session != n {
			continue
		}
		kind := base.LeaseCopy
		if x.view {
			kind = base.LeaseView
		}
		g := &m.regions[x.region]
		l.leases = append(l.leases, hot.RelistLease{
			Pool: 1, Region: g.Region, Offset: x.page * testPage, Generation: x.gen, Kind: kind, Acquire: x.seq, Index: x.index,
		})
	}
	who := m.callers[n]
	for range rapid.IntRange(1, 2).Draw(t, "frames") {
		for i, res := range m.rig.relist(who, l) {
			at := [2]uint64{uint64(l.pages[i].Region), l.pages[i].Offset / testPage}
			switch {
			case res != hot.RelistKept:
				delete(m.kept, at)
			case !m.listed[n]: // a repeated frame of a whole list only leaves its pages as they are
				m.kept[at] = l.pages[i].Key
			}
		}
	}
	if !m.listed[n] {
		for _, x := range m.leases {
			if x.session == n && m.rig.d.sessions[who.Session].record(x.seq) != nil {
				x.active = true
			}
		}
	}
	if rapid.Bool().Draw(t, "whole") {
		m.rig.relist(who, lister{last: true})
		m.listed[n] = true
	}
}

func TestRestartAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &rsModel{
			rig: newRig(&panicTB{}, func(c *Config) { c.EventTimeout = time.Hour }), pages: map[int][]hot.RelistPage{}, callers: map[byte]Caller{},
			deadline: map[byte]time.Duration{}, listed: map[byte]bool{}, gone: map[byte]bool{}, reclaimed: map[[2]uint64]bool{}, kept: map[[2]uint64]base.Key{},
		}
		who := rapid.Custom(func(t *rapid.T) byte { return byte(rapid.IntRange(1, rsSessions).Draw(t, "n")) })
		for i := range rapid.IntRange(1, 3).Draw(t, "regions") {
			w := who.Draw(t, "writer")
			holders := []Holder{{sid(w), rapid.Bool().Draw(t, "views")}}
			if rapid.IntRange(0, 3).Draw(t, "unheld") == 0 {
				holders = nil
			}
			for range rapid.IntRange(0, 2).Draw(t, "holders") {
				if h := who.Draw(t, "holder"); !slices.ContainsFunc(holders, func(x Holder) bool { return x.Session == sid(h) }) {
					holders = append(holders, Holder{sid(h), rapid.Bool().Draw(t, "views")})
				}
			}
			id := base.RegionID(50 + i)
			m.regions = append(m.regions, recovered(id, w, holders...))
			for page := range uint64(8) {
				switch state := rapid.IntRange(0, 5).Draw(t, "state"); state {
				case 1, 2, 3:
					if !m.regions[i].writerMaps() {
						break
					}
					m.pages[i] = append(m.pages[i], oldPage(id, page, 4, testKey(uint64(rapid.IntRange(0, 3).Draw(t, "key"))), hot.RelistState(state)))
				}
				if len(holders) > 0 && rapid.IntRange(0, 3).Draw(t, "leased") == 0 {
					h := rapid.SampledFrom(holders).Draw(t, "reader")
					m.leases = append(m.leases, &rsLease{
						session: h.Session[0], view: h.Views, seq: base.Sequence(1+8*i) + base.Sequence(page), index: uint32(page), region: i, page: page,
						gen: base.MakeGeneration(uint32(id), uint32(rapid.IntRange(3, 4).Draw(t, "generation"))),
					})
				}
			}
		}
		if err := m.rig.d.RecoverRegions(m.rig.now, m.regions); err != nil {
			t.Fatal(err)
		}
		m.after(t)
		live := func(t *rapid.T) byte {
			var list []byte
			for n := byte(1); n <= rsSessions; n++ {
				if m.callers[n] != (Caller{}) {
					list = append(list, n)
				}
			}
			if len(list) == 0 {
				t.Skip("nobody is live")
			}
			return rapid.SampledFrom(list).Draw(t, "who")
		}
		step := func(f func(*rapid.T)) func(*rapid.T) {
			return func(t *rapid.T) { f(t); m.after(t) }
		}
		t.Repeat(map[string]func(*rapid.T){
			"open": step(func(t *rapid.T) {
				n := who.Draw(t, "who")
				if m.gone[n] {
					t.Skip("gone")
				}
				req := openReq(n)
				req.Proof, req.PreviousEpoch, req.PreviousServerEpoch = ProofProcess, 4, 5
				m.callers[n], _ = m.rig.open(req)
				m.deadline[n] = m.rig.now + m.rig.d.cfg.TTL
				if err := m.rig.d.ProveDomains(m.rig.now, m.callers[n], []base.PoolID{poolA}); err != nil {
					t.Fatal(err)
				}
				if m.rig.d.sessions[sid(n)].relist == relistDone {
					m.listed[n] = true // one that the list does not name has nothing to list
				}
			}),
			"list":  step(func(t *rapid.T) { m.list(t, live(t)) }),
			"list2": step(func(t *rapid.T) { m.list(t, live(t)) }),
			"beat": step(func(t *rapid.T) {
				n := live(t)
				m.rig.beat(m.callers[n])
				m.deadline[n] = m.rig.now + m.rig.d.cfg.TTL
			}),
			"release": step(func(t *rapid.T) {
				n := live(t)
				for _, l := range m.leases {
					if l.session == n && l.active {
						l.active = false
						if held := m.rig.release(m.callers[n], hot.ReleaseRow{Acquire: l.seq, First: l.index, Count: 1}); held[0] != 1 {
							t.Fatalf("a listed lease was not in force (%+v)", l)
						}
						return
					}
				}
				t.Skip("no lease")
			}),
			"gone": step(func(t *rapid.T) {
				n := who.Draw(t, "who")
				m.rig.d.SessionGone(m.rig.now, sid(n), GonePidfd)
				m.gone[n] = true
				delete(m.callers, n)
				for _, l := range m.leases {
					if l.session == n {
						l.active = false
					}
				}
			}),
			"ended": step(func(*rapid.T) {
				if m.endedAt == 0 {
					m.endedAt = m.rig.now
				}
				m.rig.d.PredecessorsEnded(m.rig.now)
			}),
			"time": step(func(t *rapid.T) {
				m.rig.now += time.Duration(rapid.IntRange(1, 7).Draw(t, "seconds")) * time.Second
				m.rig.d.Tick(m.rig.now)
				m.expire()
			}),
		})
		for n := byte(1); n <= rsSessions; n++ {
			m.rig.d.SessionGone(m.rig.now, sid(n), GoneReboot)
			m.gone[n] = true
			for _, l := range m.leases {
				l.active = l.active && l.session != n
			}
		}
		m.callers = map[byte]Caller{}
		m.after(t)
		if _, err := m.rig.d.OperatorDeleteNamespace(m.rig.now, nsA); err != nil {
			t.Fatal(err)
		}
		m.after(t)
		m.after(t)
		if u := m.rig.d.Usage(m.rig.now); u.Regions != 0 || u.Objects != 0 || len(u.Sessions) != 0 || m.rig.d.RelistIncomplete() {
			t.Fatalf("something stays (L1): %+v", u)
		}
	})
}
