package core

import (
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
	"github.com/xcena-dev/maru/internal/store/storetest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// rows is a whole store with its device's slot as text, one row a line.
func (w *world) rows(t *testing.T) string {
	t.Helper()
	var s strings.Builder
	if err := w.store.Load(func(b, k string, v []byte) error { _, err := fmt.Fprintf(&s, "%s %x %x\n", b, k, v); return err }); err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Fprintf(&s, "slot %d %d %d %d\n", w.slot.Sequence, w.slot.NextRegion, w.slot.NextIncarnation, w.slot.NextOwner)
	return s.String()
}

func golden(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// worldOf is a store of rows, not loaded yet.
func worldOf(t *testing.T, rows string) *world {
	t.Helper()
	w := &world{store: &storetest.Store{}, pool: base.PoolID{9}}
	var batch []store.Change
	for line := range strings.Lines(rows) {
		f := strings.Fields(line)
		if f[0] == "slot" {
			if _, err := fmt.Sscan(strings.Join(f[1:], " "), &w.slot.Sequence, &w.slot.NextRegion, &w.slot.NextIncarnation, &w.slot.NextOwner); err != nil {
				t.Fatal(err)
			}
			continue
		}
		key, err := hex.DecodeString(f[1])
		value, err2 := hex.DecodeString(f[2])
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		batch = append(batch, store.Change{Bucket: f[0], Key: string(key), Value: value})
	}
	if err := w.store.Commit(batch); err != nil {
		t.Fatal(err)
	}
	return w
}

// The golden files are the format of the rows: a change here is a change of format,
// which takes a new version and a page (docs/rfcs/0007-resource-manager.md).
func TestRowsGolden(t *testing.T) {
	w := newWorld(t)
	p := Peer{Process: ProcessID{PID: 1, Boot: base.BootID{3}}, Node: base.NodeID{2}, Boot: base.BootID{3}}
	start := StartOwner{Owner: base.OwnerID{1}, Name: "first", Node: p.Node, Boot: p.Boot, Secret: secretOf(base.OwnerID{1})}
	must(w.core.StartOwner(w.batch, 1, start))(t)
	start.Directory, start.Locked, start.Process = [base.IDBytes]byte{8}, true, ProcessID{PID: 5, Namespace: 6, StartTicks: 7, Boot: base.BootID{3}}
	inc := must(w.core.StartOwner(w.batch, 2, start))(t).Incarnation
	a := w.allocate(t, 1, inc, 1)
	w.allocate(t, 1, inc, 2)
	gone := w.allocate(t, 1, inc, 3)
	must(w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), gone.Handle))(t)
	must(w.core.Hold(w.batch, 3, Hold{Session: base.SessionID{1}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: 1, Views: true, Handles: []Handle{a.Handle}, Peer: p}))(t)
	must(w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), a.Handle))(t)
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	const name = "rows-v2.golden"
	if *update {
		if err := os.WriteFile(filepath.Join("testdata", name), []byte(w.rows(t)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := w.rows(t), golden(t, name); got != want {
		t.Errorf("rows are\n%s\nthe golden file has\n%s", got, want)
	}
	secret := secretOf(base.OwnerID{1})
	if strings.Contains(w.rows(t), secret.EncodeHex()) {
		t.Error("the secret is in the store")
	}
	// What is read is what was written.
	again := worldOf(t, w.rows(t))
	if err := again.load(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(corePicture(again.core), corePicture(w.core)) || !slices.EqualFunc(again.core.ListOwners(), w.core.ListOwners(), func(x, y OwnerInfo) bool { return x == y }) {
		t.Errorf("loaded:\n%v\nwas:\n%v", corePicture(again.core), corePicture(w.core))
	}
}

// A store of the first version is read: its owner goes on as it is, and its next
// start, which must show a secret, sets it for good.
func TestUpgrade(t *testing.T) {
	o := base.OwnerID{1}
	load := func() *world {
		w := worldOf(t, golden(t, "rows-v1.golden"))
		if err := w.load(); err != nil {
			t.Fatal(err)
		}
		return w
	}
	w := load()
	if got := w.core.Unproved(); !slices.Equal(got, []base.OwnerID{o}) {
		t.Fatalf("unproved: %v", got)
	}
	if w.rows(t) != golden(t, "rows-v1.golden") {
		t.Error("reading changed the store")
	}
	before := w.claim(o, 2)
	if len(before.Token) != TokenBytes {
		t.Fatal("no token")
	}
	for what := range w.ownerCalls(Claim{}, 0) {
		if err := load().ownerCalls(Claim{Owner: o, Incarnation: 2}, 2)[what](); err != nil {
			t.Errorf("%s of a server that was started before: %v", what, err)
		}
	}
	if _, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: o}); !errors.Is(err, base.ErrUnproven) || !w.batch.IsEmpty() {
		t.Errorf("a start without a secret: %v", err)
	}
	started := must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: o, Secret: secretOf(o)}))(t)
	w.store.Plan(storetest.FailBefore)
	if err := w.commit(); err == nil {
		t.Fatal("the commit did not fail")
	}
	if clone := (&world{store: w.store.Clone(), slot: w.slot, pool: w.pool}); clone.load() != nil || len(clone.core.Unproved()) != 1 || clone.core.format != formatFirst {
		t.Error("a commit that failed upgraded the store")
	}
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	if err := w.load(); err != nil {
		t.Fatal(err)
	}
	if len(w.core.Unproved()) != 0 || w.core.format != formatDigests {
		t.Errorf("after a proven start: unproved %v, format %d", w.core.Unproved(), w.core.format)
	}
	if err := w.core.Claim(Claim{o, started.Incarnation, started.Token[:]}); err != nil {
		t.Errorf("the token after a restart: %v", err)
	}
	for _, token := range [][]byte{nil, before.Token, started.Token[:31], make([]byte, TokenBytes)} {
		for what, call := range w.ownerCalls(Claim{o, started.Incarnation, token}, 2) {
			if err := call(); !errors.Is(err, base.ErrUnproven) {
				t.Errorf("%s with token %x: %v", what, token, err)
			}
		}
	}
	if _, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: o, Secret: secretOf(base.OwnerID{2})}); !errors.Is(err, base.ErrUnproven) ||
		!strings.Contains(err.Error(), "maru rm drop-owner "+o.String()+" --confirm") || !strings.Contains(err.Error(), "owner-secret") {
		t.Errorf("a start with another secret: %v", err)
	}
}

// A program of the first version meets a bucket that it does not know, and says that
// the store is of a newer version, before it reads an owner's row that it would take
// for a damaged one.
func TestFormatComesFirst(t *testing.T) {
	known := map[string]bool{}
	for line := range strings.Lines(golden(t, "rows-v1.golden")) {
		known[strings.Fields(line)[0]] = true
	}
	for line := range strings.Lines(golden(t, "rows-v2.golden")) {
		switch bucket := strings.Fields(line)[0]; {
		case !known[bucket]:
			return
		case bucket == bucketOwners:
			t.Fatal("an owner comes before the format")
		}
	}
	t.Fatal("there is no format")
}

func TestLoadRefusesFormats(t *testing.T) {
	w := worldOf(t, golden(t, "rows-v2.golden"))
	if err := w.load(); err != nil {
		t.Fatal(err)
	}
	row := w.core.owners[base.OwnerID{1}].row
	half := row
	half.Digest = row.Digest[:31]
	for name, c := range map[string]struct {
		change store.Change
		want   error
	}{
		"no format":        {store.Change{Bucket: bucketFormat, Key: formatKey}, base.ErrCorrupt},
		"version 0":        {store.Change{Bucket: bucketFormat, Key: formatKey, Value: encode(formatRow{})}, base.ErrCorrupt},
		"version 1":        {store.Change{Bucket: bucketFormat, Key: formatKey, Value: encode(formatRow{Version: 1})}, base.ErrCorrupt},
		"version 4":        {store.Change{Bucket: bucketFormat, Key: formatKey, Value: encode(formatRow{Version: 4})}, base.ErrUnsupported},
		"another key":      {store.Change{Bucket: bucketFormat, Key: "k", Value: encode(formatRow{Version: 2})}, base.ErrCorrupt},
		"no version":       {store.Change{Bucket: bucketFormat, Key: formatKey, Value: []byte{0xff}}, base.ErrCorrupt},
		"digest of 31":     {store.Change{Bucket: bucketOwners, Key: string(row.ID[:]), Value: encode(half)}, base.ErrCorrupt},
		"nothing is wrong": {store.Change{Bucket: bucketOwners, Key: string(row.ID[:]), Value: encode(row)}, nil},
	} {
		w := worldOf(t, golden(t, "rows-v2.golden"))
		if err := w.store.Commit([]store.Change{c.change}); err != nil {
			t.Fatal(err)
		}
		if err := w.load(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// A token is of one start of one owner, and comes back over a restart; an owner that
// was dropped begins anew, and who takes its id sees no capability of what drains.
func TestOwnerTokens(t *testing.T) {
	w := newWorld(t)
	one, two := base.OwnerID{1}, base.OwnerID{2}
	first := must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: one, Secret: secretOf(one)}))(t)
	other := must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: two, Secret: secretOf(two)}))(t)
	second := must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: one, Secret: secretOf(one)}))(t)
	if first.Token == second.Token || second.Token == other.Token {
		t.Error("two starts have one token")
	}
	for name, c := range map[string]struct {
		who  Claim
		want error
	}{
		"its own":               {Claim{one, second.Incarnation, second.Token[:]}, nil},
		"of the older start":    {Claim{one, second.Incarnation, first.Token[:]}, base.ErrUnproven},
		"the older start":       {Claim{one, first.Incarnation, first.Token[:]}, base.ErrFenced},
		"of another owner":      {Claim{one, second.Incarnation, other.Token[:]}, base.ErrUnproven},
		"of an unknown owner":   {Claim{base.OwnerID{3}, second.Incarnation, second.Token[:]}, base.ErrFenced},
		"the other one's":       {Claim{two, other.Incarnation, other.Token[:]}, nil},
		"one byte more":         {Claim{two, other.Incarnation, append(slices.Clone(other.Token[:]), 0)}, base.ErrUnproven},
		"the secret as a token": {Claim{two, other.Incarnation, secretOf(two).Bytes()}, base.ErrUnproven},
		"the digest as a token": {Claim{two, other.Incarnation, w.core.owners[two].row.Digest}, base.ErrUnproven},
	} {
		if err := w.core.Claim(c.who); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	a := w.allocate(t, 1, second.Incarnation, 1)
	must(w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{1}, Server: one, Incarnation: second.Incarnation, Sequence: 1, Handles: []Handle{a.Handle}, Peer: Peer{Process: ProcessID{PID: 1}}}))(t)
	if _, draining, err := w.core.DropOwner(w.batch, one); err != nil || draining != 1 {
		t.Fatalf("%d, %v", draining, err)
	}
	anew := must(w.core.StartOwner(w.batch, 1, StartOwner{Owner: one, Secret: secretOf(two)}))(t)
	list, _, err := w.core.ListRegions(ListRegions{Claim: Claim{one, anew.Incarnation, anew.Token[:]}})
	if err != nil || len(list) != 1 || list[0].Handle != nil {
		t.Errorf("regions of the dropped owner: %+v, %v", list, err)
	}
	if err := w.core.Claim(Claim{one, anew.Incarnation, second.Token[:]}); !errors.Is(err, base.ErrUnproven) {
		t.Errorf("the dropped owner's token: %v", err)
	}
}
