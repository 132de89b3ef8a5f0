package core

import (
	"errors"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// The rules of `views` and of readers' holds (docs/PROTOCOL.md, "Leases of two kinds" and
// "Holds"): a hold without it is raised by a later one, never lowered but by an unhold; a
// read capability holds for reading only; a draining region takes no new hold and no
// raise, and a repeated one succeeds; a lower sequence changes nothing.
func TestViewsOfHolds(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a := w.allocate(t, 1, inc, 1)
	read := must(w.core.MintRead(a.Handle))(t)
	me := Peer{Node: testConfig().Node, Boot: testConfig().Boot, Process: ProcessID{PID: 1, Namespace: 2, StartTicks: 3, Boot: testConfig().Boot}}
	hold := func(s byte, seq uint64, views bool, h Handle) error {
		_, err := w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{s}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: seq, Views: views, Handles: []Handle{h}, Peer: me})
		return err
	}
	unhold := func(s byte, seq uint64) error {
		_, err := w.core.Unhold(w.batch, 1, Unhold{Session: base.SessionID{s}, Sequence: seq, Handles: []Handle{read}, Peer: me})
		return err
	}
	state := func(s byte) (views, readOnly, held bool) {
		holds, _ := w.core.ListHolds(base.SessionID{s}, base.SessionID{}, 0, 0)
		if len(holds) == 0 {
			return false, false, false
		}
		return holds[0].Views, holds[0].ReadOnly, true
	}
	for i, c := range []struct {
		what                  string
		do                    func() error
		want                  error
		views, readOnly, held bool
	}{
		{"a reader without views", func() error { return hold(1, 5, false, read) }, nil, false, true, true},
		{"a lower sequence raises nothing", func() error { return hold(1, 4, true, read) }, base.ErrStale, false, true, true},
		{"nor does the same one", func() error { return hold(1, 5, true, read) }, nil, false, true, true},
		{"a higher one raises", func() error { return hold(1, 6, true, read) }, nil, true, true, true},
		{"a later one does not lower", func() error { return hold(1, 7, false, read) }, nil, true, true, true},
		{"a write capability makes it a writer's", func() error { return hold(1, 8, false, a.Handle) }, nil, true, false, true},
		{"which a reader's hold does not take back", func() error { return hold(1, 9, false, read) }, nil, true, false, true},
		{"an unhold ends all of it", func() error { return unhold(1, 10) }, nil, false, false, false},
		{"and the next hold begins anew", func() error { return hold(1, 11, false, read) }, nil, false, true, true},
		{"the region goes back", func() error { _, err := w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), a.Handle); return err }, nil, false, true, true},
		{"a raise while it drains", func() error { return hold(1, 12, true, read) }, base.ErrDraining, false, true, true},
		{"the recorded hold again while it drains", func() error { return hold(1, 11, false, read) }, nil, false, true, true},
		{"the last unhold", func() error { return unhold(1, 13) }, nil, false, false, false},
		{"a hold of what is gone", func() error { return hold(1, 14, false, read) }, base.ErrNotFound, false, false, false},
	} {
		if err := c.do(); !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Fatalf("%d, %s: %v, want %v", i, c.what, err, c.want)
		}
		if views, readOnly, held := state(1); views != c.views || readOnly != c.readOnly || held != c.held {
			t.Fatalf("%d, %s: views %t, read-only %t, held %t", i, c.what, views, readOnly, held)
		}
	}
	if w.core.RegionCount() != 0 {
		t.Error("the region is there")
	}
}

// A dead or fenced server loses nothing: its regions and its sessions' holds stay over its
// end and the resource manager's restart, and its next start finds all of them.
func TestDeadServerLosesNothing(t *testing.T) {
	w := newWorld(t)
	me := ProcessID{PID: 5, Namespace: 2, StartTicks: 3, Boot: testConfig().Boot}
	start := StartOwner{Owner: base.OwnerID{1}, Node: testConfig().Node, Boot: testConfig().Boot, Process: me, Secret: secretOf(base.OwnerID{1})}
	inc := must(w.core.StartOwner(w.batch, 1, start))(t).Incarnation
	a, b := w.allocate(t, 1, inc, 1), w.allocate(t, 1, inc, 2)
	engine := Peer{Node: testConfig().Node, Boot: testConfig().Boot, Process: ProcessID{PID: 6, Namespace: 2, StartTicks: 3, Boot: testConfig().Boot}}
	hold := Hold{Session: base.SessionID{1}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: 1, Handles: []Handle{a.Handle}, Peer: engine}
	must(w.core.Hold(w.batch, 1, hold))(t)
	check := func(when string) {
		t.Helper()
		if w.core.RegionCount() != 2 || w.core.HoldCount() != 1 {
			t.Fatalf("%s: %d regions, %d holds", when, w.core.RegionCount(), w.core.HoldCount())
		}
	}
	w.core.ProcessGone(w.batch, me, ProofPidfd)
	check("the server is dead")
	if h, _ := w.core.ListHolds(base.SessionID{}, base.SessionID{}, 0, 0); len(h) != 1 || !strings.Contains(h[0].Reason, "has ended and keeps it") {
		t.Errorf("%+v", h)
	}
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	if err := w.load(); err != nil {
		t.Fatal(err)
	}
	check("the resource manager was started again")
	start.Process.PID = 7
	next := must(w.core.StartOwner(w.batch, 2, start))(t)
	check("the server was started again")
	if !next.PredecessorsEnded {
		t.Error(next.Reason)
	}
	list, _, err := w.core.ListRegions(ListRegions{Claim: w.claim(base.OwnerID{1}, next.Incarnation)})
	if err != nil || len(list) != 2 || list[0].Handle == nil || list[1].Handle == nil || list[0].ID != a.Region.ID || list[1].ID != b.Region.ID || len(list[0].Holders) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	hold.Sequence, hold.Handles = 2, []Handle{b.Handle}
	if _, err := w.core.Hold(w.batch, 1, hold); !errors.Is(err, base.ErrFenced) {
		t.Errorf("a hold for the dead incarnation: %v", err)
	}
	hold.Incarnation = next.Incarnation
	must(w.core.Hold(w.batch, 1, hold))(t)
}
