package core

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
)

// What is dropped from a store makes it corrupt or changes nothing that it says:
// it never becomes a smaller one without a word.
func TestLoadRefusesHalves(t *testing.T) {
	w := newWorld(t)
	inc := w.owner(t, 1)
	a := w.allocate(t, 1, inc, 1)
	w.allocate(t, 1, inc, 3)
	must(w.core.Hold(w.batch, 1, Hold{Session: base.SessionID{1}, Server: base.OwnerID{1}, Incarnation: inc, Sequence: 1, Handles: []Handle{a.Handle}, Peer: Peer{Process: ProcessID{PID: 1}}}))(t)
	must(w.core.Free(w.batch, w.claim(base.OwnerID{1}, inc), a.Handle))(t)
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	for _, bucket := range []string{bucketCounters, bucketPools, bucketOwners, bucketSessions} {
		l := NewLoader(testConfig())
		err := w.store.Load(func(b, k string, v []byte) error {
			if b == bucket {
				return nil
			}
			return l.Row(b, k, v)
		})
		if err == nil {
			_, err = l.Finish()
		}
		if !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("without %s: %v", bucket, err)
		}
	}
	l := NewLoader(testConfig())
	if err := l.Row("later", "k", []byte{1}); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a newer bucket: %v", err)
	}
}

func FuzzLoadRow(f *testing.F) {
	f.Add(uint8(0), "k", []byte{0xa0})
	f.Add(uint8(2), "\x00\x00\x00\x01", encode(regionRow{ID: 1}))
	buckets := []string{bucketCounters, bucketPools, bucketRegions, bucketOwners, bucketOperations, bucketSessions, bucketHolds, bucketNodes, bucketFormat}
	f.Fuzz(func(_ *testing.T, b uint8, key string, value []byte) {
		l := NewLoader(testConfig())
		if l.Row(buckets[int(b)%len(buckets)], key, value) == nil {
			_, _ = l.Finish()
		}
	})
}

// No handle but the ones that were given passes, whatever a peer sends.
func FuzzResolve(f *testing.F) {
	w := newWorld(f)
	if _, err := w.core.StartOwner(w.batch, 1, StartOwner{Owner: base.OwnerID{1}, Secret: secretOf(base.OwnerID{1})}); err != nil {
		f.Fatal(err)
	}
	a, err := w.core.Allocate(w.batch, 1, Allocate{Claim: w.claim(base.OwnerID{1}, 1), Operation: 1, PageCount: 1, PageBytes: 4096, PieceBytes: 256})
	if err != nil {
		f.Fatal(err)
	}
	read, err := w.core.MintRead(a.Handle)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(1), uint32(1), a.Handle.Token, false)
	f.Add(uint32(1), uint32(1), read.Token, true)
	f.Fuzz(func(t *testing.T, region, incarnation uint32, token []byte, readOnly bool) {
		h := Handle{Pool: w.pool, Region: base.RegionID(region), Incarnation: base.Incarnation(incarnation), Token: token, ReadOnly: readOnly}
		for _, need := range []access{accessRead, accessWrite} {
			_, err := w.core.resolve(h, need)
			right := region == 1 && incarnation == 1 && (!readOnly && slices.Equal(token, a.Handle.Token) || readOnly && need == accessRead && slices.Equal(token, read.Token))
			if (err == nil) != right {
				t.Fatalf("%+v for %d: %v", h, need, err)
			}
		}
	})
}

func TestSpans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := &owner{}
		b := &Batch{}
		want := map[uint64]bool{}
		for _, n := range rapid.SliceOf(rapid.Uint64Range(1, 40)).Draw(t, "closed") {
			o.addSpan(b, n)
			want[n] = true
		}
		for n := range uint64(42) {
			if o.closed.contains(n) != want[n] {
				t.Fatalf("%d: %v", n, o.closed)
			}
		}
		var again spans
		for _, c := range b.Changes() {
			if c.Value == nil {
				continue
			}
			var row spanRow
			if err := decoder.Unmarshal(c.Value, &row); err != nil {
				t.Fatal(err)
			}
			key := []byte(c.Key)
			if !again.load(uint64(key[23])|uint64(key[22])<<8, row.Last) {
				t.Fatalf("stored spans overlap: %v", o.closed)
			}
		}
		if !slices.Equal(again, o.closed) {
			t.Fatalf("stored %v, in memory %v", again, o.closed)
		}
	})
}
