package directory

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// rig is a directory with the shell's chores done by hand.
type rig struct {
	t   testing.TB
	d   *Directory
	now time.Duration
	seq base.Sequence
	out []Effect
}

const (
	testPage  = 4096
	testPiece = 65536
)

var (
	poolA = base.PoolID{0xa}
	nsA   = base.NamespaceID{0x1}
	nodeA = base.NodeID{0x9}
)

func newRig(t testing.TB, change func(*Config)) *rig {
	t.Helper()
	cfg := Config{ServerEpoch: 77, Owner: 3, CPUBudgetBytes: 1 << 30, HashSeed: 5}
	if change != nil {
		change(&cfg)
	}
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, d: d, now: time.Second}
	if err := d.SetPools(r.now, []Pool{{
		ID: poolA, Medium: base.MediumCXL, Tier: base.TierL1, Scope: base.ScopeDomain, Coherence: base.CoherenceHardware,
		CapacityBytes: 256 << 20, LargestFreeBytes: 256 << 20, Online: true,
	}}); err != nil {
		t.Fatal(err)
	}
	return r
}

func sid(n byte) base.SessionID { return base.SessionID{n, 0xee} }

func openReq(n byte) *OpenRequest {
	return &OpenRequest{
		Session: sid(n), Secret: Secret{n, 1}, Role: base.RoleWorker, Namespace: nsA, Opaque: true, PieceBytes: testPiece,
		Node: nodeA, Views: true,
	}
}

// open opens a session and has it make a call.
func (r *rig) open(req *OpenRequest) (Caller, OpenResult) {
	r.t.Helper()
	res, err := r.d.Open(r.now, req)
	if err != nil {
		r.t.Fatal(err)
	}
	who := Caller{req.Session, res.Epoch}
	r.use(who)
	return who, res
}

// use is a call that changes nothing: the session has its secret.
func (r *rig) use(who Caller) {
	r.t.Helper()
	if err := r.d.Acknowledge(r.now, who, nil, nil); err != nil {
		r.t.Fatal(err)
	}
}

// worker opens a worker with a proved pool.
func (r *rig) worker(n byte) Caller {
	r.t.Helper()
	who, _ := r.open(openReq(n))
	if err := r.d.ProveDomains(r.now, who, []base.PoolID{poolA}); err != nil {
		r.t.Fatal(err)
	}
	return who
}

func (r *rig) next() base.Sequence { r.seq++; return r.seq }

var nextRegion base.RegionID = 100

// expand grants a shared region.
func (r *rig) expand(who Caller, pages uint64) RegionGrant {
	r.t.Helper()
	_, ticket, err := r.d.ExpandBegin(r.now, who, &ExpandRequest{
		Operation: r.next(), Medium: base.MediumCXL, Bytes: pages * testPage, PageBytes: testPage, PieceBytes: testPiece,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	nextRegion++
	grant, err := r.d.ExpandFinish(r.now, ticket, &RegionGrant{
		Region: nextRegion, Incarnation: base.Incarnation(nextRegion),
		Place: Place{ExtentBytes: extentBytes(testPage, pages), PageBytes: testPage, PageCount: pages, PieceBytes: testPiece},
	}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return grant
}

func testKey(n uint64) base.Key {
	var d base.Digest
	le.PutUint64(d[:], n*0x9e3779b97f4a7c15+1)
	le.PutUint64(d[8:], n)
	return base.MakeKey(d, 0, base.PartAllLayers)
}

func rowOf(g RegionGrant, page uint64, counter uint32, key base.Key) hot.CommitRow {
	high := uint32(g.Incarnation)
	if g.Incarnation == 0 {
		high = 1
	}
	return hot.CommitRow{
		Key: key, Pool: g.Pool, Region: g.Region, Offset: page * g.Place.PageBytes, Length: 100,
		Generation: base.MakeGeneration(high, counter), Checksum: uint64(counter),
	}
}

func (r *rig) commitSeq(who Caller, seq base.Sequence, rows ...hot.CommitRow) ([]hot.CommitResult, error) {
	r.t.Helper()
	req := hot.CommitRequest{Operation: hot.Operation{Sequence: seq}, Namespace: 1}
	for i := range rows {
		req.Rows = hot.AppendCommitRow(req.Rows, &rows[i])
	}
	out, err := r.d.Commit(r.now, who, &req, nil)
	if err != nil {
		return nil, err
	}
	res := hot.CommitResults(out)
	var list []hot.CommitResult
	for i := range res.Len() {
		list = append(list, res.At(i))
	}
	return list, nil
}

func (r *rig) commit(who Caller, rows ...hot.CommitRow) []hot.CommitResult {
	r.t.Helper()
	res, err := r.commitSeq(who, r.next(), rows...)
	if err != nil {
		r.t.Fatal(err)
	}
	return res
}

func (r *rig) acquireSeq(who Caller, seq base.Sequence, kind base.LeaseKind, mode hot.Mode, sizes []int, keys ...base.Key) ([]hot.AcquireRow, uint32, error) {
	r.t.Helper()
	req := hot.AcquireRequest{Operation: hot.Operation{Sequence: seq}, Namespace: 1, Kind: kind, Mode: mode, Keys: hot.AppendKeys(nil, keys)}
	for _, n := range sizes {
		req.ManifestSizes = hot.AppendManifestSize(req.ManifestSizes, n)
	}
	out, m, err := r.d.Acquire(r.now, who, &req, nil)
	rows := hot.AcquireRows(out)
	var list []hot.AcquireRow
	for i := range rows.Len() {
		list = append(list, rows.At(i))
	}
	return list, m, err
}

func (r *rig) release(who Caller, rows ...hot.ReleaseRow) []byte {
	r.t.Helper()
	req := hot.ReleaseRequest{Operation: hot.Operation{Sequence: r.next()}}
	for _, row := range rows {
		req.Rows = hot.AppendReleaseRow(req.Rows, row)
	}
	out, err := r.d.Release(r.now, who, &req, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *rig) probe(who Caller, keys ...base.Key) []hot.Verdict {
	r.t.Helper()
	out, _, err := r.d.Probe(r.now, who, &hot.ProbeRequest{Namespace: 1, Keys: hot.AppendKeys(nil, keys)}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	v := make([]hot.Verdict, len(out))
	for i := range out {
		v[i] = hot.Verdict(out[i])
	}
	return v
}

func (r *rig) effects() []Effect {
	r.out = r.d.AppendEffects(r.out[:0])
	return r.out
}

func (r *rig) count(kind EffectKind) int {
	n := 0
	for _, e := range r.effects() {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

func (r *rig) check() {
	r.t.Helper()
	if err := r.d.CheckInvariants(r.now); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) beat(who Caller) {
	r.t.Helper()
	s := r.d.sessions[who.Session]
	if _, err := r.d.Heartbeat(r.now, who, &HeartbeatRequest{Sequence: s.beat + 1, LastEvent: s.nextEvent}); err != nil {
		r.t.Fatal(err)
	}
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

func TestStoreAndLoad(t *testing.T) {
	r := newRig(t, nil)
	w, o := r.worker(1), r.worker(2)
	g := r.expand(w, 8)
	k := testKey(1)
	res := r.commit(w, rowOf(g, 0, 1, k), rowOf(g, 1, 1, k), rowOf(g, 2, 1, testKey(2)))
	if res[0].Code != base.CodeOK || res[1].Code != base.CodeAlreadyStored || res[2].Code != base.CodeOK || res[2].Order <= res[0].Order {
		t.Fatalf("results %+v", res)
	}
	if v := r.probe(o, k, testKey(3), testKey(2)); v[0] != hot.MakeHit(base.MediumCXL) || v[1] != hot.Miss || v[2].Status() != hot.Hit {
		t.Fatalf("verdicts %v", v)
	}
	rows, m, err := r.acquireSeq(o, 1000, base.LeaseCopy, hot.ModePrefix, []int{1, 2}, k, testKey(2), testKey(3))
	if err != nil || m != 1 || len(rows) != 3 || rows[0].Checksum != 1 || rows[1].Verdict != hot.NotTried || rows[2].Verdict != hot.Miss {
		t.Fatalf("acquire %+v %d %v", rows, m, err)
	}
	r.check()
	again, _, err := r.acquireSeq(o, 1000, base.LeaseCopy, hot.ModePrefix, []int{1, 2}, k, testKey(2), testKey(3))
	if err != nil || again[0] != rows[0] || r.d.sessions[o.Session].leases != 1 {
		t.Fatalf("repeated acquire %+v %v", again, err)
	}
	if held := r.release(o, hot.ReleaseRow{Acquire: 1000, Count: hot.ReleaseAll}); held[0] != 1 {
		t.Fatalf("held %v", held)
	}
	if held := r.release(o, hot.ReleaseRow{Acquire: 1000, Count: hot.ReleaseAll}); held[0] != 0 {
		t.Fatalf("held again %v", held)
	}
	_, _, err = r.acquireSeq(o, 1000, base.LeaseCopy, hot.ModePrefix, []int{1}, k)
	wantErr(t, err, base.ErrAborted)
	r.check()
}

func TestTableAgainstMap(t *testing.T) {
	count := 1_000_000
	if testing.Short() {
		count = 50_000
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	cfg := Config{}
	cfg.setDefaults()
	st, err := newStore(cfg.Memory, 9, cfg.Limits.MaxObjects, cfg.Limits.MaxExtraReplicas)
	if err != nil {
		t.Fatal(err)
	}
	model := make(map[uint64]uint32, count)
	insert := func(n uint64) {
		k := testKey(n)
		w := keyWords(k[:])
		if st.find(7, &w) != model[n] {
			t.Fatalf("key %d: found %d, model %d", n, st.find(7, &w), model[n])
		}
		if model[n] != 0 {
			return
		}
		ref, err := st.insert(7, &w, 0, &base.Digest{}, replica{generation: base.Generation(n), lengthState: uint64(replicaReady)})
		if err != nil {
			t.Fatal(err)
		}
		model[n] = ref
	}
	for i := range count {
		insert(uint64(i)) //nolint:gosec // positive
	}
	// Churn: as many deletes and inserts again; a table with tombstones would rot.
	for range count {
		n := rng.Uint64N(uint64(2 * count)) //nolint:gosec // positive
		if ref := model[n]; ref != 0 {
			st.remove(ref)
			delete(model, n)
		} else {
			insert(n)
		}
	}
	var b block
	for from := uint64(0); from < uint64(2*count); from += blockKeys { //nolint:gosec // positive
		b.n = blockKeys
		for i := range b.n {
			k := testKey(from + uint64(i)) //nolint:gosec // positive
			b.key[i] = keyWords(k[:])
		}
		st.lookup(7, &b, toProbe)
		for i := range b.n {
			if want := model[from+uint64(i)]; b.object[i] != want { //nolint:gosec // positive
				t.Fatalf("key %d: batch found %d, model %d", from+uint64(i), b.object[i], want) //nolint:gosec // positive
			}
		}
	}
	if uint64(len(model)) != st.objectCount {
		t.Fatalf("%d objects, model %d", st.objectCount, len(model))
	}
	if err := st.check(); err != nil {
		t.Fatal(err)
	}
	if uint64(st.objectHigh) > uint64(2*count)+firstObject { //nolint:gosec // positive
		t.Fatalf("slab grew to %d entries", st.objectHigh)
	}
}
