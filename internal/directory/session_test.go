package directory

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// engineReq is a worker of an engine.
func engineReq(n byte, engine string, rank, world uint32) *OpenRequest {
	r := openReq(n)
	r.Opaque, r.Namespace, r.ValueBytes, r.PieceBytes = false, base.NamespaceID{0xe}, 1000, 512
	r.EngineID, r.Rank, r.WorldSize = engine, rank, world
	return r
}

func TestOpenRefusals(t *testing.T) {
	cases := []struct {
		name   string
		change func(*OpenRequest)
		want   error
		text   string
	}{
		{"no session", func(r *OpenRequest) { r.Session = base.SessionID{} }, base.ErrInvalid, "session_id"},
		{"no secret", func(r *OpenRequest) { r.Secret = Secret{} }, base.ErrInvalid, "secret"},
		{"no role", func(r *OpenRequest) { r.Role = 0 }, base.ErrInvalid, "role"},
		{"no namespace", func(r *OpenRequest) { r.Namespace = base.NamespaceID{} }, base.ErrInvalid, "namespace"},
		{"long engine", func(r *OpenRequest) { r.EngineID = strings.Repeat("x", 300) }, base.ErrLimit, "max-text-bytes"},
		{"rank", func(r *OpenRequest) { r.Rank = 5; r.WorldSize = 2 }, base.ErrInvalid, "rank"},
		{"world", func(r *OpenRequest) { r.WorldSize = 1 << 20 }, base.ErrLimit, "max-shards"},
		{"piece", func(r *OpenRequest) { r.PieceBytes = 0 }, base.ErrInvalid, "piece_size"},
		{"opaque value", func(r *OpenRequest) { r.ValueBytes = 7 }, base.ErrInvalid, "value_bytes"},
		{"scheduler with memory", func(r *OpenRequest) { r.Role = base.RoleScheduler; r.CPUBytes = 1 }, base.ErrInvalid, "scheduler"},
		{"order twice", func(r *OpenRequest) { r.WriteOrder = []base.Medium{base.MediumCPU, base.MediumCPU} }, base.ErrInvalid, "write_order"},
		{"order unknown", func(r *OpenRequest) { r.ReadOrder = []base.Medium{9} }, base.ErrInvalid, "read_order"},
		{"over budget", func(r *OpenRequest) { r.CPUBytes = 2 << 30 }, base.ErrPermanent, "cpu-budget"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, nil)
			req := openReq(1)
			c.change(req)
			_, err := r.d.Open(r.now, req)
			wantErr(t, err, c.want)
			if !strings.Contains(err.Error(), c.text) {
				t.Fatalf("%q does not name %q", err, c.text)
			}
			if len(r.d.sessions) != 0 || len(r.d.hosts) != 0 {
				t.Fatal("a refused open left something")
			}
			r.check()
		})
	}
}

func TestReopen(t *testing.T) {
	r := newRig(t, nil)
	w := r.worker(1)
	req := openReq(1)
	req.Secret = Secret{7}
	_, err := r.d.Open(r.now, req)
	wantErr(t, err, base.ErrDenied)
	req.PreviousSecret = Secret{9}
	_, err = r.d.Open(r.now, req)
	wantErr(t, err, base.ErrDenied)
	req.PreviousSecret = Secret{1, 1}
	other := *req
	other.Namespace = base.NamespaceID{0x77}
	_, err = r.d.Open(r.now, &other)
	wantErr(t, err, base.ErrMismatch)
	who, res := r.open(req)
	if res.Epoch != w.Epoch+1 {
		t.Fatalf("epoch %d after %d", res.Epoch, w.Epoch)
	}
	closed := false
	for _, e := range r.effects() {
		closed = closed || (e.Kind == EffectCloseConnections && e.Epoch == w.Epoch)
	}
	if !closed {
		t.Fatal("the connections of the old epoch stay open")
	}
	_, err = r.commitSeq(w, r.next())
	wantErr(t, err, base.ErrStale)
	if _, _, err := r.d.Secret(r.now, w); !errors.Is(err, base.ErrStale) {
		t.Fatal(err)
	}
	if s, _, err := r.d.Secret(r.now, who); err != nil || s != (Secret{7}) {
		t.Fatal(s, err)
	}
	// The process behind the Unix socket needs no secret.
	req.PreviousSecret, req.Proof = Secret{}, ProofProcess
	if _, res = r.open(req); res.Epoch != w.Epoch+2 {
		t.Fatalf("epoch %d", res.Epoch)
	}
	// A session that another server knew goes on from its epoch.
	fresh := openReq(2)
	fresh.PreviousEpoch, fresh.PreviousServerEpoch = 41, 5
	if _, res = r.open(fresh); res.Epoch != 42 || !res.Relist {
		t.Fatalf("%+v", res)
	}
	fresh = openReq(3)
	fresh.PreviousEpoch = ^base.Epoch(0)
	_, err = r.d.Open(r.now, fresh)
	wantErr(t, err, base.ErrExhausted)
	r.check()
}

func TestEngineRanks(t *testing.T) {
	r := newRig(t, nil)
	r.open(engineReq(1, "e", 0, 2))
	r.open(engineReq(2, "e", 1, 2))
	_, err := r.d.Open(r.now, engineReq(3, "e", 1, 2))
	wantErr(t, err, base.ErrBusy)
	if !strings.Contains(err.Error(), "10s from now") || !strings.Contains(err.Error(), "proved gone") {
		t.Fatalf("%q does not say when a retry can succeed (SES-02)", err)
	}
	_, err = r.d.Open(r.now, engineReq(3, "e", 2, 3))
	wantErr(t, err, base.ErrMismatch)
	sched := engineReq(4, "e", 0, 2)
	sched.Role, sched.Views, sched.ValueBytes, sched.PieceBytes = base.RoleScheduler, false, 0, 0
	r.open(sched)
	r.open(engineReq(5, "other", 1, 2))
	r.now += 11 * time.Second
	r.open(engineReq(3, "e", 1, 2))
	// The one that expired cannot come back while another has its rank.
	again := engineReq(2, "e", 1, 2)
	again.PreviousSecret = Secret{2, 1}
	_, err = r.d.Open(r.now, again)
	wantErr(t, err, base.ErrBusy)
	r.check()
}

func TestGeometry(t *testing.T) {
	r := newRig(t, nil)
	r.open(engineReq(1, "a", 0, 2))
	for field, change := range map[string]func(*OpenRequest){
		"value_bytes": func(r *OpenRequest) { r.ValueBytes++ },
		"piece_size":  func(r *OpenRequest) { r.PieceBytes *= 2 },
		"opaque":      func(r *OpenRequest) { r.Opaque, r.ValueBytes = true, 0 },
	} {
		req := engineReq(2, "b", 0, 2)
		change(req)
		_, err := r.d.Open(r.now, req)
		wantErr(t, err, base.ErrMismatch)
		if !strings.Contains(err.Error(), field) {
			t.Fatalf("%q does not name %s (ID-08)", err, field)
		}
	}
	// Another rank may hold another part of each object.
	req := engineReq(2, "b", 1, 2)
	req.ValueBytes = 1500
	_, one := r.open(req)
	_, two := r.open(engineReq(3, "c", 0, 2))
	if one.Namespace != two.Namespace {
		t.Fatal("one namespace has two numbers (ID-07)")
	}
	_, three := r.open(openReq(4))
	if three.Namespace == one.Namespace {
		t.Fatal("two namespaces have one number")
	}
}

func TestNamespaceLimit(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxNamespaces = 2 })
	open := func(n byte) (Caller, error) {
		req := openReq(n)
		req.Namespace = base.NamespaceID{n}
		res, err := r.d.Open(r.now, req)
		return Caller{sid(n), res.Epoch}, err
	}
	a, err := open(1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := open(2); err != nil {
		t.Fatal(err)
	}
	_, err = open(3)
	wantErr(t, err, base.ErrLimit)
	if !strings.Contains(err.Error(), "max-namespaces") {
		t.Fatal(err)
	}
	if err := r.d.Close(r.now, a, CloseDrained); err != nil {
		t.Fatal(err)
	}
	if _, err := open(3); err != nil {
		t.Fatalf("an unused namespace was not forgotten: %v", err)
	}
	r.check()
}

func TestSessionLimit(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MaxSessions, c.Limits.MaxExpiredSessions = 2, 2 })
	r.worker(1)
	holder := openReq(2)
	holder.CPUBytes = 1 << 20
	r.open(holder)
	_, err := r.d.Open(r.now, openReq(3))
	wantErr(t, err, base.ErrLimit)
	if !strings.Contains(err.Error(), "max-sessions") {
		t.Fatal(err)
	}
	r.now += 11 * time.Second
	// The first expired and holds nothing: it does not count (RPC-22). The second holds
	// memory and does.
	r.worker(3)
	_, err = r.d.Open(r.now, openReq(4))
	wantErr(t, err, base.ErrLimit)
	// Nor may the first come back past the limit.
	again := openReq(1)
	again.PreviousSecret = Secret{1, 1}
	_, err = r.d.Open(r.now, again)
	wantErr(t, err, base.ErrLimit)
	for n := byte(10); n < 20; n++ {
		r.now += 11 * time.Second
		r.worker(n)
	}
	r.now += 11 * time.Second
	r.d.Tick(r.now)
	if n := len(r.d.sessions); n != 3 {
		t.Fatalf("%d records, want the holder and two expired ones", n)
	}
	r.check()
}

func TestCPUBudget(t *testing.T) {
	r := newRig(t, func(c *Config) { c.CPUBudgetBytes = 4 << 20 })
	open := func(n byte) error {
		req := openReq(n)
		req.CPUBytes = 1 << 20
		res, err := r.d.Open(r.now, req)
		if err == nil {
			r.use(Caller{req.Session, res.Epoch})
		}
		return err
	}
	for n := byte(1); n <= 4; n++ {
		if err := open(n); err != nil {
			t.Fatal(err)
		}
	}
	err := open(5)
	wantErr(t, err, base.ErrFull)
	if !strings.Contains(err.Error(), "cpu-budget") {
		t.Fatal(err)
	}
	// Expiry is no proof: the budget stays charged (CAP-10).
	r.now += time.Minute
	wantErr(t, open(5), base.ErrFull)
	if !r.d.SessionGone(r.now, sid(2), GonePidfd) || r.d.SessionGone(r.now, sid(2), GonePidfd) {
		t.Fatal("SessionGone")
	}
	returned := uint64(0)
	for _, e := range r.effects() {
		if e.Kind == EffectCapacityReturned {
			returned += e.Bytes
		}
	}
	if returned != 1<<20 {
		t.Fatalf("%d bytes returned", returned)
	}
	if err := open(5); err != nil {
		t.Fatal(err)
	}
	// Another host has a budget of its own.
	req := openReq(6)
	req.CPUBytes, req.Node = 4<<20, base.NodeID{0x44}
	r.open(req)
	if free := r.d.BudgetFreeBytes(nodeA); free != 0 {
		t.Fatalf("%d free", free)
	}
	for _, n := range []byte{1, 3, 4, 5} {
		if !r.d.SessionGone(r.now, sid(n), GoneReboot) {
			t.Fatalf("session %d is not known", n)
		}
	}
	if free := r.d.BudgetFreeBytes(nodeA); free != 4<<20 {
		t.Fatalf("%d free", free)
	}
	r.check()
}

func TestPrivatePool(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	req.CPUBytes = 10 * testPage
	w, res := r.open(req)
	if err := r.d.ProveDomains(r.now, w, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	other := r.worker(2)
	expand := func(pages uint64) (*RegionGrant, error) {
		g, ticket, err := r.d.ExpandBegin(r.now, w, &ExpandRequest{
			Operation: r.next(), Medium: base.MediumCPU, Bytes: pages * testPage, PageBytes: testPage, PieceBytes: testPiece,
		})
		if ticket != nil {
			t.Fatal("a private region needs no resource manager")
		}
		return g, err
	}
	g, err := expand(8)
	if err != nil || g.Region < base.FirstPrivateRegion || g.Pool != res.Pools[0].Number {
		t.Fatalf("%+v %v", g, err)
	}
	_, err = expand(4)
	wantErr(t, err, base.ErrFull)
	_, err = expand(11)
	wantErr(t, err, base.ErrPermanent)
	k := testKey(1)
	if c := r.commit(w, rowOf(*g, 0, 1, k)); c[0].Code != base.CodeOK || c[0].Order.Owner() != 0 {
		t.Fatalf("%+v", c)
	}
	if v := r.probe(w, k); v[0] != hot.MakeHit(base.MediumCPU) {
		t.Fatal(v)
	}
	if v := r.probe(other, k); v[0] != hot.Miss {
		t.Fatal("another session reads private memory")
	}
	// Another session's private copy suppresses nothing (DM-07): own pool, own copy.
	sg := r.expand(w, 2)
	if c := r.commit(w, rowOf(sg, 0, 1, k)); c[0].Code != base.CodeOK {
		t.Fatal(c)
	}
	if v := r.probe(other, k); v[0] != hot.MakeHit(base.MediumCXL) {
		t.Fatal(v)
	}
	// The read order chooses between the two (POL-06).
	acquired := r.next()
	rows, _, err := r.acquireSeq(w, acquired, base.LeaseCopy, hot.ModeEach, []int{1}, k)
	if err != nil || rows[0].Pool != g.Pool {
		t.Fatalf("%+v %v", rows, err)
	}
	err = r.d.Return(r.now, w, r.next(), g.Pool, g.Region)
	wantErr(t, err, base.ErrPinned)
	err = r.d.Close(r.now, w, CloseDrained)
	wantErr(t, err, base.ErrBusy)
	r.release(w, hot.ReleaseRow{Acquire: acquired, Count: hot.ReleaseAll})
	if err := r.d.Return(r.now, w, r.next(), g.Pool, g.Region); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Return(r.now, w, r.seq, g.Pool, g.Region); err != nil {
		t.Fatalf("repeated return: %v", err)
	}
	if _, err := expand(10); err != nil {
		t.Fatalf("the bytes did not come back: %v", err)
	}
	r.check()
}

func TestReadOrder(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	req.CPUBytes = 1 << 20
	req.ReadOrder = []base.Medium{base.MediumCXL, base.MediumCPU}
	w, _ := r.open(req)
	if err := r.d.ProveDomains(r.now, w, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	g, _, err := r.d.ExpandBegin(r.now, w, &ExpandRequest{Operation: r.next(), Medium: base.MediumCPU, Bytes: testPage, PageBytes: testPage, PieceBytes: testPiece})
	if err != nil {
		t.Fatal(err)
	}
	r.commit(w, rowOf(*g, 0, 1, testKey(1)))
	sg := r.expand(w, 1)
	r.commit(w, rowOf(sg, 0, 1, testKey(1)))
	if v := r.probe(w, testKey(1)); v[0] != hot.MakeHit(base.MediumCXL) {
		t.Fatal(v)
	}
	// FE-08: when the preferred pool is out of reach, the other copy is used.
	if err := r.d.ReportUnreachable(r.now, w, sg.Pool, sg.Region); err != nil {
		t.Fatal(err)
	}
	if v := r.probe(w, testKey(1)); v[0] != hot.MakeHit(base.MediumCPU) {
		t.Fatal(v)
	}
	if err := r.d.ProveDomains(r.now, w, []base.PoolID{poolA}); err != nil {
		t.Fatal(err)
	}
	if v := r.probe(w, testKey(1)); v[0] != hot.MakeHit(base.MediumCXL) {
		t.Fatal("a proof does not count again")
	}
	if u := r.d.Usage(r.now); len(u.Sessions[0].ReadOrder) != 2 || u.Sessions[0].ReadOrder[0] != base.MediumCXL {
		t.Fatalf("the server does not record the order (POL-09): %+v", u.Sessions[0])
	}
	// So is what lies in a pool that is offline.
	shared := r.d.shared[0].info
	for _, online := range []bool{false, true} {
		shared.Online = online
		if err := r.d.SetPools(r.now, []Pool{shared}); err != nil {
			t.Fatal(err)
		}
		want := hot.MakeHit(base.MediumCPU)
		if online {
			want = hot.MakeHit(base.MediumCXL)
		}
		if v := r.probe(w, testKey(1)); v[0] != want {
			t.Fatalf("online %v: %v", online, v)
		}
	}
	if err := r.d.ReportUnreachable(r.now, w, sg.Pool, 0); err != nil {
		t.Fatal(err)
	}
	if v := r.probe(w, testKey(1)); v[0] != hot.MakeHit(base.MediumCPU) {
		t.Fatal(v)
	}
}

// TestTwoClaims: a key that is stored again while its first copy is hidden keeps the
// higher order when the hidden one comes back, by its session or as a kept region.
func TestTwoClaims(t *testing.T) {
	for _, how := range []string{"opens again", "is proved gone"} {
		r := newRig(t, nil)
		w := r.worker(1)
		g := r.expand(w, 2)
		first := r.commit(w, rowOf(g, 0, 1, testKey(0)), rowOf(g, 1, 1, testKey(1)))
		r.now += 11 * time.Second
		o := r.worker(2)
		og := r.expand(o, 1)
		second := r.commit(o, rowOf(og, 0, 1, testKey(0)))
		if second[0].Code != base.CodeOK || second[0].Order <= first[0].Order {
			t.Fatalf("%+v: a hidden replica suppressed a store (DM-07)", second)
		}
		if how == "opens again" {
			req := openReq(1)
			req.PreviousSecret = Secret{1, 1}
			w, _ = r.open(req)
			if ev := r.pageEvents(w, EventRetire); len(ev) != 1 || ev[0] != 0 {
				t.Fatalf("retire %v", ev)
			}
		} else {
			r.d.SessionGone(r.now, w.Session, GonePidfd)
			if r.count(EffectClearRecords) != 1 {
				t.Fatal("the loser's mark is not cleared")
			}
		}
		rows, _, err := r.acquireSeq(o, r.next(), base.LeaseCopy, hot.ModeEach, []int{1, 1}, testKey(0), testKey(1))
		if err != nil || rows[0].Order != second[0].Order || rows[1].Order != first[1].Order {
			t.Fatalf("%s: %+v %v", how, rows, err)
		}
		r.check()
	}
}

// An Open whose answer was lost leaves the client with the secret before it: that one
// opens again until a newer one was shown.
func TestLostOpen(t *testing.T) {
	r := newRig(t, nil)
	req := openReq(1)
	who, _ := r.open(req)
	if _, err := r.d.Heartbeat(r.now, who, &HeartbeatRequest{Sequence: 1}); err != nil {
		t.Fatal(err)
	}
	shown := req.Secret
	again := func(secret, previous Secret) error {
		req := openReq(1)
		req.Secret, req.PreviousSecret = secret, previous
		res, err := r.d.Open(r.now, req)
		if err == nil {
			who.Epoch = res.Epoch
		}
		return err
	}
	for i := byte(2); i < 5; i++ { // all their answers are lost
		if err := again(Secret{1, i}, shown); err != nil {
			t.Fatal(err)
		}
	}
	if err := again(Secret{1, 9}, Secret{1, 3}); base.CodeOf(err) != base.CodeDenied {
		t.Fatalf("a secret that nobody showed: %v", err)
	}
	if err := again(Secret{1, 5}, Secret{1, 4}); err != nil {
		t.Fatalf("the newest: %v", err)
	}
	if _, err := r.d.Heartbeat(r.now, who, &HeartbeatRequest{Sequence: 1}); err != nil {
		t.Fatal(err)
	}
	if err := again(Secret{1, 9}, shown); base.CodeOf(err) != base.CodeDenied {
		t.Fatalf("an old secret after a newer one was shown: %v", err)
	}
	if err := again(Secret{1, 9}, Secret{}); base.CodeOf(err) != base.CodeDenied {
		t.Fatalf("no secret: %v", err)
	}
}

// The first Open's answer is lost and the client comes back under another id. What nobody
// ever used keeps no rank, and its budget comes back with its expiry.
func TestOpenNeverUsed(t *testing.T) {
	r := newRig(t, func(c *Config) { c.CPUBudgetBytes = 2 << 20 })
	req := engineReq(1, "e", 0, 1)
	req.CPUBytes = 1 << 20
	res, err := r.d.Open(r.now, req)
	if err != nil {
		t.Fatal(err)
	}
	req = engineReq(2, "e", 0, 1)
	req.CPUBytes = 1 << 20
	r.open(req)
	if free := r.d.BudgetFreeBytes(nodeA); free != 1<<20 {
		t.Fatalf("%d bytes of the budget are free", free)
	}
	_, err = r.d.Heartbeat(r.now, Caller{sid(1), res.Epoch}, &HeartbeatRequest{Sequence: 1})
	wantErr(t, err, base.ErrStale)
	r.check()

	other := openReq(3)
	other.CPUBytes = 1 << 20
	if _, err := r.d.Open(r.now, other); err != nil {
		t.Fatal(err)
	}
	r.now += 11 * time.Second
	r.d.Tick(r.now)
	if free := r.d.BudgetFreeBytes(nodeA); free != 1<<20 {
		t.Fatalf("%d bytes of the budget are free after the expiry", free)
	}
	other.Secret = Secret{3, 2}
	r.open(other) // its secret was with nobody: it is a new session
	r.check()
}
