package core

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/store/storetest"
)

func testConfig() Config {
	return Config{Store: base.StoreID{1}, Node: base.NodeID{2}, Boot: base.BootID{3}, Secret: [SecretBytes]byte{4}}
}

const testUnits = 8

// world is the core with a shell that does everything right, a store and a
// device that can fail, and crashes.
type world struct {
	store *storetest.Store
	slot  poolfmt.Slot // on the device
	core  *Core
	batch *Batch
	pool  base.PoolID
}

func (w *world) header() poolfmt.Header {
	return poolfmt.Header{Static: poolfmt.Static{Pool: w.pool, Store: testConfig().Store, Coherence: base.CoherenceHardware}, Slot: w.slot}
}

func (w *world) load() error {
	l := NewLoader(testConfig())
	if err := w.store.Load(l.Row); err != nil {
		return err
	}
	c, err := l.Finish()
	if err != nil {
		return err
	}
	w.core, w.batch = c, &Batch{}
	_, write, err := c.Attach(w.batch, Device{Header: w.header(), Path: "/p", Kind: KindFile, Bytes: (1 + testUnits) * poolfmt.Alignment})
	if err != nil {
		return err
	}
	if write != nil {
		w.slot = write.Slot
		c.SlotWritten(*write)
	}
	c.NoteOwnBoot(w.batch)
	return w.commit()
}

// commit is the shell's order. Errors: the store's.
func (w *world) commit() error {
	if w.batch.IsEmpty() {
		return nil
	}
	slots := w.core.Seal(w.batch)
	if err := w.store.Commit(w.batch.Changes()); err != nil {
		return err
	}
	for _, s := range slots {
		w.slot = s.Slot
		w.core.SlotWritten(s)
	}
	w.batch = &Batch{}
	return nil
}

func newWorld(t fataler) *world {
	w := &world{store: &storetest.Store{}, slot: poolfmt.FirstSlot(), pool: base.PoolID{9}}
	if err := w.load(); err != nil {
		t.Fatalf("%v", err)
	}
	return w
}

func secretOf(o base.OwnerID) base.OwnerSecret {
	b := [base.OwnerSecretBytes]byte{31: 1}
	copy(b[:], o[:])
	s, err := base.MakeOwnerSecret(b[:])
	if err != nil {
		panic(err)
	}
	return s
}

// claim is that of the program which started an incarnation.
func (w *world) claim(o base.OwnerID, inc base.Incarnation) Claim {
	who := Claim{Owner: o, Incarnation: inc}
	if x, ok := w.core.owners[o]; ok {
		t := w.core.ownerToken(&x.row)
		who.Token = t[:]
	}
	return who
}

type fataler interface {
	Fatalf(format string, args ...any)
}

func pagesOf(units int) uint64 { // 64 KiB pages that fill units but for the table
	return uint64(units)*32 - 1
}

// The core does what the dumb model does, also over failed commits, and after a
// crash at any point nothing acknowledged is lost and nothing is given twice.
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		m := newModel(testUnits)
		durable := m.copy()
		w.checkPicture(t, m)
		seenIDs := map[base.RegionID]string{}
		owners := []base.OwnerID{{1}, {2}}
		sessions := []base.SessionID{{1}, {2}, {3}}
		processes := []ProcessID{{PID: 1, Boot: testConfig().Boot}, {PID: 2, Boot: testConfig().Boot}, {}}
		incs := map[base.OwnerID][]base.Incarnation{}
		seq := uint64(0)

		owner := func(t *rapid.T) (base.OwnerID, base.Incarnation) {
			o := rapid.SampledFrom(owners).Draw(t, "owner")
			known := append([]base.Incarnation{1}, incs[o]...)
			if rapid.IntRange(0, 9).Draw(t, "old") > 0 {
				return o, known[len(known)-1]
			}
			return o, rapid.SampledFrom(known).Draw(t, "incarnation")
		}
		regionIDs := func(t *rapid.T) []base.RegionID {
			n := rapid.IntRange(1, 2).Draw(t, "count")
			live := slices.Sorted(maps.Keys(m.regions))
			var out []base.RegionID
			for range n {
				var id base.RegionID
				if len(live) > 0 && rapid.IntRange(0, 9).Draw(t, "live") > 0 {
					id = rapid.SampledFrom(live).Draw(t, "region")
				} else {
					id = base.RegionID(rapid.IntRange(max(1, int(m.nextID)-6), int(m.nextID)).Draw(t, "region"))
				}
				if !slices.Contains(out, id) {
					out = append(out, id)
				}
			}
			return out
		}
		handles := func(ids []base.RegionID) []Handle {
			var out []Handle
			for _, id := range ids {
				if r, ok := w.core.regions[id]; ok {
					out = append(out, w.core.readHandle(r))
				} else {
					out = append(out, Handle{Pool: w.pool, Region: id, Incarnation: 1, ReadOnly: true, Token: make([]byte, TokenBytes)})
				}
			}
			return out
		}
		process := func(t *rapid.T, s base.SessionID) ProcessID {
			if rapid.IntRange(0, 9).Draw(t, "other process") > 0 {
				return processes[s[0]-1]
			}
			return rapid.SampledFrom(processes).Draw(t, "process")
		}
		ownerOf := func(t *rapid.T, id base.RegionID) (base.OwnerID, base.Incarnation) {
			if r, ok := m.regions[id]; ok && rapid.IntRange(0, 9).Draw(t, "its owner") > 0 {
				return r.owner, m.owners[r.owner].inc
			}
			return owner(t)
		}
		sequence := func(t *rapid.T) uint64 {
			if rapid.IntRange(0, 3).Draw(t, "repeat") == 0 && seq > 0 {
				return rapid.Uint64Range(max(1, seq-min(seq-1, 3)), seq).Draw(t, "sequence")
			}
			seq++
			return seq
		}
		// finish commits, perhaps with a failure, and compares.
		finish := func(t *rapid.T, err error, want base.Code) {
			if base.CodeOf(err) != want {
				t.Fatalf("got %v, the model says %s", err, want)
			}
			outcome := storetest.Succeed
			if rapid.IntRange(0, 5).Draw(t, "fail") == 0 {
				outcome = rapid.SampledFrom([]storetest.Outcome{storetest.FailBefore, storetest.FailAfter}).Draw(t, "outcome")
			}
			dirty := !w.batch.IsEmpty()
			if dirty {
				w.store.Plan(outcome)
			}
			commitErr := w.commit()
			if (commitErr != nil) != (dirty && outcome != storetest.Succeed) {
				t.Fatalf("commit: %v", commitErr)
			}
			if outcome != storetest.FailBefore || !dirty {
				durable = m.copy()
			}
			w.checkPicture(t, m)
		}

		for i, o := range owners {
			inc := m.startOwner(o)
			if got, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: o, Secret: secretOf(o)}); err != nil || got.Incarnation != inc {
				t.Fatalf("%+v, %v", got, err)
			}
			incs[o] = append(incs[o], inc)
			m.allocate(o, inc, 20, pagesOf(1+i), 1+i)
			if _, err := w.core.Allocate(w.batch, 1, Allocate{Claim: w.claim(o, inc), Operation: 20, PageCount: pagesOf(1 + i), PageBytes: 65536, PieceBytes: 65536}); err != nil {
				t.Fatalf("%v", err)
			}
		}
		finish(t, nil, base.CodeOK)
		t.Repeat(map[string]func(*rapid.T){
			"start owner": func(t *rapid.T) {
				if len(m.owners) == len(owners) && rapid.IntRange(0, 3).Draw(t, "rare") > 0 {
					t.Skip()
				}
				o := rapid.SampledFrom(owners).Draw(t, "owner")
				got, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: o, Secret: secretOf(o)})
				want := m.startOwner(o)
				if err != nil || got.Incarnation != want {
					t.Fatalf("%+v, %v, want %d", got, err, want)
				}
				incs[o] = append(incs[o], want)
				finish(t, nil, base.CodeOK)
			},
			"allocate": func(t *rapid.T) {
				o, inc := owner(t)
				op, n := rapid.Uint64Range(1, 8).Draw(t, "op"), rapid.IntRange(1, 4).Draw(t, "units")
				if rapid.IntRange(0, 30).Draw(t, "huge") == 0 {
					n = testUnits + 1
				}
				got, err := w.core.Allocate(w.batch, 1, Allocate{Claim: w.claim(o, inc), Operation: op, PageCount: pagesOf(n), PageBytes: 65536, PieceBytes: 65536})
				want, code := m.allocate(o, inc, op, pagesOf(n), n)
				if err == nil {
					name := fmt.Sprintf("%x.%d op %d", o[:1], inc, op)
					if old, ok := seenIDs[want]; ok && old != name && durable.nextID > want {
						t.Fatalf("region %d was given for %s and for %s", want, old, name)
					}
					seenIDs[want] = name
					if got.Region.ID != want {
						t.Fatalf("region %d, want %d", got.Region.ID, want)
					}
				}
				finish(t, err, code)
			},
			"free": func(t *rapid.T) {
				rid := regionIDs(t)[0]
				o, inc := ownerOf(t, rid)
				h := Handle{Pool: w.pool, Region: rid}
				if r, ok := w.core.regions[rid]; ok {
					h.Incarnation = r.row.Incarnation
				}
				_, err := w.core.Free(w.batch, w.claim(o, inc), h)
				finish(t, err, m.free(o, inc, rid))
			},
			// Who knows ids and incarnations, and no secret, changes nothing and sees no capability.
			"thief": func(t *rapid.T) {
				if rapid.Bool().Draw(t, "rare") {
					t.Skip()
				}
				rid := regionIDs(t)[0]
				who := w.claim(ownerOf(t, rid))
				want := base.CodeUnproven
				if o, ok := m.owners[who.Owner]; !ok || o.inc != who.Incarnation {
					want = base.CodeFenced
				}
				switch n := rapid.IntRange(-1, 255).Draw(t, "bit"); {
				case n < 0, who.Token == nil:
					who.Token = nil
				default:
					who.Token[n/8] ^= 1 << (n % 8)
				}
				for what, call := range w.ownerCalls(who, rid) {
					if err := call(); base.CodeOf(err) != want {
						t.Fatalf("%s: %v, want %s", what, err, want)
					}
				}
				wrong := secretOf(base.OwnerID{77})
				if _, ok := m.owners[who.Owner]; ok {
					for _, secret := range []base.OwnerSecret{{}, wrong} {
						if _, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: who.Owner, Secret: secret}); base.CodeOf(err) != base.CodeUnproven {
							t.Fatalf("start without the secret: %v", err)
						}
					}
				}
				finish(t, nil, base.CodeOK)
			},
			"hold": func(t *rapid.T) {
				s := rapid.SampledFrom(sessions).Draw(t, "session")
				p, ids, n, views := process(t, s), regionIDs(t), sequence(t), rapid.Bool().Draw(t, "views")
				o, inc := ownerOf(t, ids[0])
				_, err := w.core.Hold(w.batch, 1, Hold{Session: s, Server: o, Incarnation: inc, Views: views, Sequence: n, Handles: handles(ids), Peer: Peer{Process: p}})
				finish(t, err, m.hold(s, p, o, inc, n, views, ids))
			},
			"unhold": func(t *rapid.T) {
				s := rapid.SampledFrom(sessions).Draw(t, "session")
				p, ids, n := process(t, s), regionIDs(t), sequence(t)
				u := Unhold{Session: s, Sequence: n, Handles: handles(ids), Peer: Peer{Process: p}}
				withToken := rapid.IntRange(0, 3).Draw(t, "token") > 0
				if x, ok := w.core.sessions[s]; ok && withToken && x.row.Process.IsZero() {
					token := w.core.holdToken(&x.row)
					u.Token = token[:]
				}
				_, err := w.core.Unhold(w.batch, 1, u)
				finish(t, err, m.unhold(s, p, len(u.Token) > 0, n, ids))
			},
			"process gone": func(t *rapid.T) {
				if rapid.IntRange(0, 2).Draw(t, "rare") > 0 {
					t.Skip()
				}
				p := rapid.SampledFrom(processes).Draw(t, "process")
				w.core.ProcessGone(w.batch, p, ProofPidfd)
				m.gone(func(_ base.SessionID, q ProcessID) bool { return !p.IsZero() && p == q })
				finish(t, nil, base.CodeOK)
			},
			"drop holds": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "rare") > 0 {
					t.Skip()
				}
				s := rapid.SampledFrom(sessions).Draw(t, "session")
				_, err := w.core.DropHolds(w.batch, base.NodeID{}, s)
				m.gone(func(q base.SessionID, _ ProcessID) bool { return q == s })
				finish(t, err, base.CodeOK)
			},
			"drop owner": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "rare") > 0 {
					t.Skip()
				}
				o := rapid.SampledFrom(owners).Draw(t, "owner")
				_, _, err := w.core.DropOwner(w.batch, o)
				finish(t, err, m.dropOwner(o))
			},
			// A crash loses what is not durable; a crash between commit and slot leaves
			// the store one ahead.
			"crash": func(t *rapid.T) {
				if rapid.Bool().Draw(t, "rare") {
					t.Skip()
				}
				if !w.batch.IsEmpty() && rapid.Bool().Draw(t, "after commit") {
					w.core.Seal(w.batch)
					if err := w.store.Commit(w.batch.Changes()); err != nil {
						t.Fatalf("%v", err)
					}
					durable = m.copy()
				}
				if err := w.load(); err != nil {
					t.Fatalf("start after a crash: %v", err)
				}
				m = durable.copy()
				w.checkPicture(t, m)
			},
		})
	})
}

// ownerCalls is every call that an owner's rights are needed for.
func (w *world) ownerCalls(who Claim, rid base.RegionID) map[string]func() error {
	h := Handle{Pool: w.pool, Region: rid}
	if r, ok := w.core.regions[rid]; ok {
		h.Incarnation = r.row.Incarnation
	}
	return map[string]func() error{
		"allocate": func() error {
			_, err := w.core.Allocate(w.batch, 1, Allocate{Claim: who, Operation: 9, PageCount: 1, PageBytes: 65536, PieceBytes: 65536})
			return err
		},
		"free":    func() error { _, err := w.core.Free(w.batch, who, h); return err },
		"list":    func() error { _, _, err := w.core.ListRegions(ListRegions{Claim: who}); return err },
		"records": func() error { _, _, err := w.core.Records(who, w.pool, rid, true); return err },
		"claim":   func() error { return w.core.Claim(who) },
	}
}

func (w *world) checkPicture(t fataler, m *model) {
	if got, want := corePicture(w.core), m.picture(); !slices.Equal(got, want) {
		t.Fatalf("core:\n%s\nmodel:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	p := w.core.Pools()[0]
	used := uint64(0)
	for _, r := range m.regions {
		used += uint64(r.n) * poolfmt.Alignment
	}
	if p.AllocatedBytes != used || p.CapacityBytes != testUnits*poolfmt.Alignment {
		t.Fatalf("pool has %d bytes allocated, the model %d", p.AllocatedBytes, used)
	}
}

// must for short tests.
func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func (w *world) owner(t *testing.T, id byte) base.Incarnation {
	t.Helper()
	return must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: base.OwnerID{id}, Secret: secretOf(base.OwnerID{id})}))(t).Incarnation
}

func (w *world) allocate(t *testing.T, id byte, inc base.Incarnation, op uint64) Allocated {
	t.Helper()
	return must(w.core.Allocate(w.batch, 1, Allocate{Claim: w.claim(base.OwnerID{id}, inc), Operation: op, PageCount: 1, PageBytes: 4096, PieceBytes: 256}))(t)
}

func TestTokens(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a, b := w.allocate(t, 1, inc, 1), w.allocate(t, 1, inc, 2)
	read := must(w.core.MintRead(a.Handle))(t)
	if !read.ReadOnly || slices.Equal(read.Token, a.Handle.Token) {
		t.Fatal("the read token is the write token")
	}
	must(w.core.GetAccess(read))(t)
	must(w.core.GetAccess(a.Handle))(t)
	change := func(h Handle, f func(*Handle)) Handle {
		h.Token = slices.Clone(h.Token)
		f(&h)
		return h
	}
	for name, c := range map[string]struct {
		h    Handle
		want error
	}{
		"forged":           {change(a.Handle, func(h *Handle) { h.Token[0] ^= 1 }), base.ErrDenied},
		"last byte":        {change(a.Handle, func(h *Handle) { h.Token[31] ^= 1 }), base.ErrDenied},
		"short":            {change(a.Handle, func(h *Handle) { h.Token = h.Token[:16] }), base.ErrDenied},
		"empty":            {change(a.Handle, func(h *Handle) { h.Token = nil }), base.ErrDenied},
		"of another":       {change(a.Handle, func(h *Handle) { h.Token = b.Handle.Token }), base.ErrDenied},
		"read as write":    {change(read, func(h *Handle) { h.ReadOnly = false }), base.ErrDenied},
		"write as read":    {change(a.Handle, func(h *Handle) { h.ReadOnly = true }), base.ErrDenied},
		"old incarnation":  {change(a.Handle, func(h *Handle) { h.Incarnation++ }), base.ErrStale},
		"other pool":       {change(a.Handle, func(h *Handle) { h.Pool[0]++ }), base.ErrMismatch},
		"region not given": {change(a.Handle, func(h *Handle) { h.Region = 99 }), base.ErrNotFound},
	} {
		if _, err := w.core.GetAccess(c.h); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := w.core.MintRead(read); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a read token mints: %v", err)
	}
	if _, err := w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), read); !errors.Is(err, base.ErrDenied) {
		t.Errorf("a read token frees: %v", err)
	}
}

// Sequence rule at start: equal or one ahead, and nothing else.
func TestSequenceRule(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	before, beforeSlot := w.store.Clone(), w.slot
	for op := range uint64(3) {
		w.allocate(t, 1, inc, op+1)
		if err := w.commit(); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		slot poolfmt.Slot
		want error
	}{
		"level":       {w.slot, nil},
		"one ahead":   {poolfmt.Slot{Sequence: w.slot.Sequence - 1, NextRegion: w.slot.NextRegion - 1, NextIncarnation: w.slot.NextIncarnation - 1, NextOwner: w.slot.NextOwner}, nil},
		"two ahead":   {poolfmt.Slot{Sequence: w.slot.Sequence - 2, NextRegion: 2, NextIncarnation: 2, NextOwner: 2}, base.ErrForeign},
		"behind":      {poolfmt.Slot{Sequence: w.slot.Sequence + 1, NextRegion: 9, NextIncarnation: 9, NextOwner: 9}, base.ErrForeign},
		"other world": {poolfmt.Slot{Sequence: w.slot.Sequence, NextRegion: 9, NextIncarnation: 9, NextOwner: 9}, base.ErrForeign},
	} {
		x := &world{store: w.store.Clone(), slot: c.slot, pool: w.pool}
		err := x.load()
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && x.slot != w.slot && x.slot.Sequence != w.slot.Sequence+1 {
			t.Errorf("%s: slot %+v is not level with the store", name, x.slot)
		}
		if err != nil && !strings.Contains(err.Error(), "takeover") {
			t.Errorf("%s: no way out in: %v", name, err)
		}
	}
	// A restored store, and one that never knew the pool.
	for name, s := range map[string]*storetest.Store{"restored": before, "empty": {}} {
		x := &world{store: s, slot: w.slot, pool: w.pool}
		if err := x.load(); !errors.Is(err, base.ErrForeign) {
			t.Errorf("%s: %v", name, err)
		}
	}
	x := &world{store: before, slot: beforeSlot, pool: w.pool}
	if err := x.load(); err != nil {
		t.Errorf("a whole backup: %v", err)
	}

	// Takeover goes on with the device's numbers.
	l := NewLoader(testConfig())
	c := must(l.Finish())(t)
	b := &Batch{}
	if err := c.TakeOver(b, Device{Header: w.header(), Path: "/p", Kind: KindFile, Bytes: (1 + testUnits) * poolfmt.Alignment}); err != nil {
		t.Fatal(err)
	}
	s := &storetest.Store{}
	if err := s.Commit(b.Changes()); err != nil {
		t.Fatal(err)
	}
	x = &world{store: s, slot: w.slot, pool: w.pool}
	if err := x.load(); err != nil {
		t.Fatal(err)
	}
	newInc := x.owner(t, 1)
	a := x.allocate(t, 1, newInc, 1)
	if newInc <= inc || a.Region.ID < w.slot.NextRegion || a.Region.Incarnation < w.slot.NextIncarnation {
		t.Errorf("numbers are given again: owner %d, region %d, incarnation %d after %+v", newInc, a.Region.ID, a.Region.Incarnation, w.slot)
	}
}

func TestPredecessors(t *testing.T) {
	local, other := base.NodeID{7}, base.NodeID{8}
	boot := base.BootID{1}
	dir := [16]byte{5}
	first := StartOwner{Owner: base.OwnerID{1}, Secret: secretOf(base.OwnerID{1}), Node: local, Boot: boot, Directory: dir, Locked: true, Process: ProcessID{PID: 10, Boot: boot}}
	for name, c := range map[string]struct {
		change func(*StartOwner)
		gone   bool
		want   bool
	}{
		"same directory, lock taken":   {func(*StartOwner) {}, false, true},
		"no lock":                      {func(s *StartOwner) { s.Locked = false }, false, false},
		"another directory":            {func(s *StartOwner) { s.Directory[0]++ }, false, false},
		"another directory, seen dead": {func(s *StartOwner) { s.Directory[0]++ }, true, true},
		"another node":                 {func(s *StartOwner) { s.Node = other }, false, false},
		"another node and boot":        {func(s *StartOwner) { s.Node, s.Boot = other, base.BootID{9} }, false, false},
		"same node booted again":       {func(s *StartOwner) { s.Directory[0]++; s.Boot = base.BootID{9} }, false, true},
		"node unknown":                 {func(s *StartOwner) { s.Node = base.NodeID{} }, false, false},
	} {
		w := newWorld(t)
		if got := must(w.core.StartOwner(w.batch, 1, first))(t); !got.PredecessorsEnded {
			t.Errorf("%s: the first start has unproved predecessors", name)
		}
		if c.gone {
			w.core.ProcessGone(w.batch, first.Process, ProofPidfd)
		}
		second := first
		second.Process.PID++
		c.change(&second)
		got := must(w.core.StartOwner(w.batch, 1, second))(t)
		if got.PredecessorsEnded != c.want || (got.Reason == "") != c.want {
			t.Errorf("%s: %+v, want %v", name, got, c.want)
		}
		if err := w.commit(); err != nil {
			t.Fatal(err)
		}
		if err := w.load(); err != nil {
			t.Fatal(err)
		}
		// An unproved one stays unproved for later starts, until it is proved itself.
		third := second
		third.Process.PID++
		got = must(w.core.StartOwner(w.batch, 1, third))(t)
		if name != "no lock" && got.PredecessorsEnded != c.want {
			t.Errorf("%s, third start: %+v", name, got)
		}
		if !c.want {
			w.core.ProcessGone(w.batch, first.Process, ProofPidfd)
			w.core.ProcessGone(w.batch, second.Process, ProofPidfd)
			if !w.core.ListOwners()[0].PredecessorsEnded {
				t.Errorf("%s: proofs are not taken", name)
			}
		}
	}
}

func TestRebootOfANode(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a := w.allocate(t, 1, inc, 1)
	remote := Peer{Node: base.NodeID{7}, Boot: base.BootID{1}}
	hold := func(s byte, p Peer, seq uint64) error {
		_, err := w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{s}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: seq, Handles: []Handle{a.Handle}, Peer: p})
		return err
	}
	if err := hold(1, remote, 1); err != nil {
		t.Fatal(err)
	}
	next := remote
	next.Boot = base.BootID{2}
	if err := hold(1, next, 2); !errors.Is(err, base.ErrStale) {
		t.Errorf("a session over a reboot: %v", err)
	}
	if err := hold(2, next, 1); err != nil {
		t.Fatal(err)
	}
	holds, _ := w.core.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
	if len(holds) != 1 || holds[0].Session != (base.SessionID{2}) {
		t.Errorf("holds after the reboot: %+v", holds)
	}
	if err := hold(3, remote, 1); !errors.Is(err, base.ErrStale) {
		t.Errorf("a late message of the older boot: %v", err)
	}
	if err := hold(4, Peer{Node: testConfig().Node, Boot: base.BootID{99}}, 1); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("our own node with another boot: %v", err)
	}
	if err := hold(5, next, 1); err != nil {
		t.Fatal(err)
	}
	// A token is the only way for a session without a process.
	u := Unhold{Session: base.SessionID{5}, Sequence: 2, Handles: []Handle{a.Handle}, Peer: next}
	if _, err := w.core.Unhold(w.batch, 1, u); !errors.Is(err, base.ErrDenied) {
		t.Errorf("unhold without a token: %v", err)
	}
	token := w.core.holdToken(&w.core.sessions[base.SessionID{5}].row)
	u.Token = token[:]
	must(w.core.Unhold(w.batch, 1, u))(t)
}

// The resource manager's own machine was booted again: everything local is gone,
// what is elsewhere is not.
func TestRebootOfOurNode(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a := w.allocate(t, 1, inc, 1)
	for i, p := range []Peer{
		{Node: testConfig().Node, Boot: testConfig().Boot, Process: ProcessID{PID: 1, Boot: testConfig().Boot}},
		{Node: base.NodeID{7}, Boot: base.BootID{1}},
	} {
		must(w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{byte(i + 1)}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: 1, Handles: []Handle{a.Handle}, Peer: p}))(t)
	}
	must(w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), a.Handle))(t)
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	cfg := testConfig()
	cfg.Boot = base.BootID{0xbb}
	l := NewLoader(cfg)
	if err := w.store.Load(l.Row); err != nil {
		t.Fatal(err)
	}
	c := must(l.Finish())(t)
	b := &Batch{}
	c.NoteOwnBoot(b)
	holds, _ := c.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0)
	if len(holds) != 1 || holds[0].Session != (base.SessionID{2}) || !holds[0].Draining || holds[0].Cure == "" {
		t.Errorf("%+v", holds)
	}
	if len(c.Processes()) != 0 {
		t.Errorf("processes of the older boot are watched: %v", c.Processes())
	}
	if e := b.Events(); len(e) != 1 || e[0].Kind != EventSessionGone || e[0].Proof != ProofReboot {
		t.Errorf("%+v", e)
	}
}

func TestRecordsRule(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	writer := base.SessionID{1}
	a := must(w.core.Allocate(w.batch, 1, Allocate{Claim: w.claim(base.OwnerID{1}, inc), Operation: 1, PageCount: 1, PageBytes: 4096, PieceBytes: 256, Writer: writer}))(t)
	p := Peer{Process: ProcessID{PID: 1}}
	must(w.core.Hold(w.batch, 1, Hold{Session: writer, Server: base.OwnerID{1}, Incarnation: inc, Sequence: 1, Handles: []Handle{a.Handle}, Peer: p}))(t)
	ask := func(left bool) error {
		_, _, err := w.core.Records(w.claim(base.OwnerID{1}, inc), w.pool, a.Region.ID, left)
		return err
	}
	if err := ask(false); !errors.Is(err, base.ErrBusy) {
		t.Errorf("the writer lives: %v", err)
	}
	if err := ask(true); err != nil {
		t.Errorf("the writer left: %v", err)
	}
	if _, _, err := w.core.Records(w.claim(base.OwnerID{2}, inc), w.pool, a.Region.ID, true); !errors.Is(err, base.ErrFenced) {
		t.Errorf("another owner: %v", err)
	}
	w.core.ProcessGone(w.batch, p.Process, ProofPidfd)
	if err := ask(false); err != nil {
		t.Errorf("the writer is gone: %v", err)
	}
}
