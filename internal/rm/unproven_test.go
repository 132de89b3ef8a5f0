package rm

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/obs/obstest"
	"github.com/xcena-dev/maru/internal/rm/core"
	"github.com/xcena-dev/maru/internal/store"
	"github.com/xcena-dev/maru/internal/store/bolt"
)

// forms is how bytes could show in a text.
func forms(b []byte) []string {
	numbers := make([]string, len(b))
	for i, x := range b {
		numbers[i] = fmt.Sprint(x)
	}
	return []string{
		string(b), hex.EncodeToString(b), strings.ToUpper(hex.EncodeToString(b)), base64.StdEncoding.EncodeToString(b),
		base64.RawURLEncoding.EncodeToString(b), strings.Join(numbers, " "), strings.Join(numbers, ","), fmt.Sprintf("%q", b)[1:20],
	}
}

func mustNotShow(t *testing.T, where, text string, secrets ...[]byte) {
	t.Helper()
	for _, s := range secrets {
		for _, f := range forms(s) {
			if strings.Contains(text, f) {
				t.Errorf("%s shows a secret as %q", where, f)
			}
		}
	}
}

// calls is every call of an owner, about one of its regions, by method.
func (o owner) calls(t *testing.T, c maruv1.ResourceManagerClient, h *maruv1.RegionHandle) map[string]func() error {
	pool, region := h.GetPoolId(), h.GetRegionId()
	word := &maruv1.RegionHandle{PoolId: pool, RegionId: region, Incarnation: h.GetIncarnation()} // no capability
	return map[string]func() error{
		"Allocate": func() error { _, err := c.Allocate(ctxOf(t), o.request(99)); return err },
		"Free": func() error {
			_, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: word})
			return err
		},
		"ListRegions": func() error {
			_, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
			return err
		},
		"ReadRecords": func() error {
			_, err := c.ReadRecords(ctxOf(t), &maruv1.ReadRecordsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, PoolId: pool, RegionId: region, PageCount: 1, WriterLeft: true})
			return err
		},
		"ClearRecords": func() error {
			_, err := c.ClearRecords(ctxOf(t), &maruv1.ClearRecordsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, PoolId: pool, RegionId: region, Pages: []uint64{0}, WriterLeft: true})
			return err
		},
		"WatchOwner": func() error {
			stream, err := c.WatchOwner(ctxOf(t), &maruv1.WatchOwnerRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	}
}

// Every call that names an owner is one of those that the tests below try as a thief,
// or has a proof of another kind. A new one fails here until somebody has decided.
func TestOwnerCallsAreKnown(t *testing.T) {
	other := []string{"StartOwner", "DropOwner"} // the secret itself; the operator
	known := slices.Sorted(maps.Keys(owner{}.calls(t, nil, nil)))
	methods := maruv1.File_maru_v1_rm_proto.Services().ByName("ResourceManager").Methods()
	var named, tokened []string
	for i := range methods.Len() {
		m := methods.Get(i)
		if m.Input().Fields().ByName("owner_token") != nil {
			tokened = append(tokened, string(m.Name()))
		}
		if m.Input().Fields().ByName("owner_id") != nil && !slices.Contains(other, string(m.Name())) {
			named = append(named, string(m.Name()))
		}
	}
	slices.Sort(named)
	slices.Sort(tokened)
	if !slices.Equal(named, known) || !slices.Equal(tokened, known) {
		t.Errorf("calls that name an owner: %v; that carry its token: %v; that are tried: %v", named, tokened, known)
	}
}

// A thief has what lists show to everybody: ids and incarnations. It is refused
// everywhere, changes nothing, is counted and logged, and sees no secret.
func TestThief(t *testing.T) {
	f := newFixture(t)
	var logged obstest.Text
	f.cfg.Logger, f.cfg.HTTPPort = logged.Logger(), AnyPort
	s := f.start()
	c, tcp := client(t, over(s)), client(t, s.Address())
	o := startOwner(t, c, newID())
	other := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, a.GetHandle())); err != nil {
		t.Fatal(err)
	}
	var list *maruv1.ListOwnersResponse
	var err error
	seen := func() string {
		t.Helper()
		if list, err = tcp.ListOwners(ctxOf(t), &maruv1.ListOwnersRequest{}); err != nil {
			t.Fatal(err)
		}
		regions, err := tcp.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range regions.GetRegions() {
			if r.GetHandle() != nil {
				t.Error("the list for everybody has capabilities")
			}
		}
		holds, err := tcp.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var all strings.Builder
		for _, m := range []proto.Message{list, regions, holds} {
			b, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = fmt.Fprintf(&all, "%s\n%s\n%s\n", b, protojson.Format(m), m)
		}
		return all.String()
	}
	before := seen()
	regions := func() string {
		r, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token})
		if err != nil || len(r.GetRegions()) != 1 || len(r.GetRegions()[0].GetHandle().GetToken()) != core.TokenBytes {
			t.Fatalf("%v, %v", r, err)
		}
		return fmt.Sprint(r)
	}
	was := regions()
	var victim *maruv1.OwnerInfo
	for _, i := range list.GetOwners() {
		if bytes.Equal(i.GetOwnerId(), o.id) {
			victim = i
		}
	}
	if !victim.GetProved() {
		t.Error("the owner is not shown as proved")
	}
	var texts strings.Builder
	refusals := map[string]int{}
	for name, token := range map[string][]byte{
		"none": nil, "zeros": make([]byte, 32), "another owner's": other.token, "a capability": a.GetHandle().GetToken(), "long": make([]byte, 1<<16),
	} {
		thief := owner{victim.GetOwnerId(), victim.GetIncarnation(), token}
		for _, from := range []maruv1.ResourceManagerClient{c, tcp} {
			for method, call := range thief.calls(t, from, a.GetHandle()) {
				err := call()
				refusals[method]++
				if !errors.Is(err, base.ErrUnproven) {
					t.Errorf("%s with token %s: %v", method, name, err)
					continue
				}
				_, _ = fmt.Fprintln(&texts, err)
			}
		}
	}
	for name, secret := range map[string][]byte{"none": nil, "zeros": make([]byte, 32), "the token": o.token, "another owner's": secretOf(other.id)} {
		_, err := tcp.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: o.id, Name: "thief", OwnerSecret: secret})
		refusals["StartOwner"]++
		if !errors.Is(err, base.ErrUnproven) {
			t.Errorf("start with secret %s: %v", name, err)
			continue
		}
		_, _ = fmt.Fprintln(&texts, err)
		if cure := fmt.Sprintf("maru rm drop-owner %s --confirm", base.OwnerID(o.id)); secret != nil && !strings.Contains(err.Error(), cure) {
			t.Errorf("the refusal %v does not name the cure %q", err, cure)
		}
	}
	for _, n := range []int{1, 31, 33} {
		if _, err := tcp.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: newID(), OwnerSecret: make([]byte, n)}); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("a secret of %d bytes: %v", n, err)
		}
	}
	if got := regions(); got != was {
		t.Errorf("the thief changed\n%s\nto\n%s", was, got)
	}
	if after := seen(); after != before {
		t.Errorf("lists were\n%s\nand are\n%s", before, after)
	}

	mustNotShow(t, "a list", before, secretOf(o.id), o.token, a.GetHandle().GetToken())
	mustNotShow(t, "an error", texts.String(), secretOf(o.id), o.token)
	mustNotShow(t, "the log", logged.String(), secretOf(o.id), secretOf(other.id), o.token, other.token)
	for method, n := range refusals {
		if lines := strings.Count(logged.String(), "method="+method+" "); lines != 1 {
			t.Errorf("%s was refused %d times and logged %d times", method, n, lines)
		}
	}
	answer, err := http.Get("http://" + s.HTTPAddress() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	page, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	for method, n := range refusals {
		if want := fmt.Sprintf("maru_rm_owner_refusals_total{method=%q} %d\n", method, n); !strings.Contains(string(page), want) {
			t.Errorf("metrics lack %q", want)
		}
	}
	if !strings.Contains(string(page), "maru_rm_owners_unproved 0\n") {
		t.Error("metrics lack maru_rm_owners_unproved 0")
	}
	mustNotShow(t, "the metrics", string(page), secretOf(o.id), o.token)
}

// The token is good over a restart of the resource manager; a new start has another
// one; who lost the secret is told what to do, and drop-owner is the cure.
func TestProofOverRestarts(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = f.start()
	c = client(t, over(s))
	o.allocate(t, c, 2)
	again := startOwner(t, c, o.id)
	if bytes.Equal(again.token, o.token) {
		t.Error("a new start has the old token")
	}
	for method, call := range o.calls(t, c, a.GetHandle()) {
		if err := call(); !errors.Is(err, base.ErrFenced) {
			t.Errorf("%s of the older incarnation: %v", method, err)
		}
	}
	for method, call := range (owner{again.id, again.inc, o.token}).calls(t, c, a.GetHandle()) {
		if err := call(); !errors.Is(err, base.ErrUnproven) {
			t.Errorf("%s with the older token: %v", method, err)
		}
	}
	for _, method := range []string{"Allocate", "ListRegions", "ReadRecords", "ClearRecords", "WatchOwner", "Free"} {
		if err := again.calls(t, c, a.GetHandle())[method](); err != nil {
			t.Errorf("%s of the owner: %v", method, err)
		}
	}
	anew := &maruv1.StartOwnerRequest{OwnerId: o.id, OwnerSecret: secretOf(newID())}
	if _, err := c.StartOwner(ctxOf(t), anew); !errors.Is(err, base.ErrUnproven) {
		t.Fatalf("a new secret for an old id: %v", err)
	}
	if _, err := c.DropOwner(ctxOf(t), &maruv1.DropOwnerRequest{OwnerId: o.id, Confirm: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.StartOwner(ctxOf(t), anew); err != nil {
		t.Errorf("after drop-owner: %v", err)
	}
	if _, err := c.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: o.id, OwnerSecret: secretOf(o.id)}); !errors.Is(err, base.ErrUnproven) {
		t.Errorf("the secret of before: %v", err)
	}
}

// older takes what format 2 added out of a store, as the version before wrote it.
func older(t *testing.T, f *fixture) {
	t.Helper()
	edit(t, f, func(bucket, key string, value []byte) []store.Change {
		switch bucket {
		case "format":
			return []store.Change{{Bucket: bucket, Key: key}}
		case "owners":
			row := map[int]cbor.RawMessage{}
			if err := cbor.Unmarshal(value, &row); err != nil {
				t.Fatal(err)
			}
			if _, ok := row[6]; !ok {
				t.Fatal("no digest in an owner's row")
			}
			delete(row, 6)
			b, err := cbor.Marshal(row)
			if err != nil {
				t.Fatal(err)
			}
			return []store.Change{{Bucket: bucket, Key: key, Value: b}}
		}
		return nil
	})
}

func edit(t *testing.T, f *fixture, change func(bucket, key string, value []byte) []store.Change) {
	t.Helper()
	b, err := bolt.Open(filepath.Join(f.cfg.StateDir, storeFile), storeKind, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var batch []store.Change
	err = b.Load(func(bucket, key string, value []byte) error {
		batch = append(batch, change(bucket, key, value)...)
		return nil
	})
	if err := errors.Join(err, b.Commit(batch), b.Close()); err != nil {
		t.Fatal(err)
	}
}

// A store of the version before this rule: its servers go on, say so, and are proved
// from their next start on. One of a version after this is refused by name.
func TestStoreOfAnotherVersion(t *testing.T) {
	f := newFixture(t)
	var logged obstest.Text
	f.cfg.Logger, f.cfg.HTTPPort = logged.Logger(), AnyPort
	s := f.start()
	o := startOwner(t, client(t, over(s)), newID())
	a := o.allocate(t, client(t, over(s)), 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	older(t, f)
	s = f.start()
	c := client(t, over(s))
	if text := logged.String(); !strings.Contains(text, "no secret on record") || !strings.Contains(text, base.OwnerID(o.id).String()) {
		t.Errorf("nothing is said of owners without a secret: %s", text)
	}
	if n := s.glance.Load().unproved; n != 1 {
		t.Errorf("%d owners without a secret are shown", n)
	}
	bare := owner{o.id, o.inc, nil}
	for _, method := range []string{"Allocate", "ListRegions", "ReadRecords", "ClearRecords", "WatchOwner"} {
		if err := bare.calls(t, c, a.GetHandle())[method](); err != nil {
			t.Errorf("%s of a server that runs since before: %v", method, err)
		}
	}
	if _, err := c.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: o.id}); !errors.Is(err, base.ErrUnproven) {
		t.Errorf("a start of an older server: %v", err)
	}
	again := startOwner(t, c, o.id)
	if n := s.glance.Load().unproved; n != 0 {
		t.Errorf("%d owners without a secret are shown", n)
	}
	if err := (owner{again.id, again.inc, nil}).calls(t, c, a.GetHandle())["Allocate"](); !errors.Is(err, base.ErrUnproven) {
		t.Errorf("without a token: %v", err)
	}
	again.allocate(t, c, 1)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = f.start()
	again.allocate(t, client(t, over(s)), 2)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	edit(t, f, func(bucket, key string, _ []byte) []store.Change {
		if bucket != "format" {
			return nil
		}
		b, err := cbor.Marshal(map[int]int{1: 4})
		if err != nil {
			t.Fatal(err)
		}
		return []store.Change{{Bucket: bucket, Key: key, Value: b}}
	})
	if _, err := Start(t.Context(), f.cfg); !errors.Is(err, base.ErrUnsupported) || !strings.Contains(err.Error(), "version 4") {
		t.Errorf("a store of a newer version: %v", err)
	}
}

// What drops holds is the operator's: not that of who knows a node's id.
func TestResetHoldsIsTheOperators(t *testing.T) {
	s := newFixture(t).start()
	c, tcp := client(t, over(s)), client(t, s.Address())
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	node := newID()
	hold := o.hold(newID(), 1, a.GetHandle())
	hold.NodeId, hold.BootId, hold.AgentEpoch = node, newID(), []byte("epoch 1")
	if _, err := tcp.Hold(ctxOf(t), hold); err != nil {
		t.Fatal(err)
	}
	reset := &maruv1.ResetHoldsRequest{NodeId: node, AgentEpoch: []byte("epoch 2")}
	if _, err := tcp.ResetHolds(ctxOf(t), reset); !errors.Is(err, base.ErrDenied) {
		t.Errorf("over TCP: %v", err)
	}
	if got, err := c.ResetHolds(ctxOf(t), reset); err != nil || got.GetDropped() != 1 {
		t.Errorf("over the Unix socket: %v, %v", got, err)
	}
}
