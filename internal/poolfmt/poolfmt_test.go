package poolfmt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
)

var update = flag.Bool("update", false, "write the golden files anew")

func id(seed byte) (b [16]byte) {
	for i := range b {
		b[i] = seed + byte(i)
	}
	return b
}

func sampleHeader() Header {
	return Header{
		Static: Static{Pool: base.PoolID(id(0x10)), Store: base.StoreID(id(0x40)), Coherence: base.CoherenceSoftware},
		Slot:   Slot{Sequence: 0x0102030405, NextRegion: 77, NextIncarnation: 99, NextOwner: 11},
	}
}

func sampleRegion() Region {
	r := Region{
		Region: 5, Incarnation: 7, PieceBytes: 65536, PageBytes: 1 << 20, PageCount: 100,
		Owner: base.OwnerID(id(0x20)), Writer: base.SessionID(id(0x30)),
	}
	for i := range r.Namespace {
		r.Namespace[i] = byte(200 + i)
	}
	return r
}

func sampleRecord() (Place, Record) {
	at := Place{Pool: base.PoolID(id(0x10)), Region: 5, Page: 42}
	r := Record{Order: 3<<40 | 12345, Checksum: 0x1122334455667788, Incarnation: 7, Counter: 9, Length: 0x0a0b0c0d0e}
	for i := range r.Key {
		r.Key[i] = byte(i + 1)
	}
	return at, r
}

// The golden files are the format: a change here is a change of format, which
// takes a new version and a page in docs/rfcs.
func TestGolden(t *testing.T) {
	h := EncodeHeader(sampleHeader())
	region := EncodeRegion(base.PoolID(id(0x10)), sampleRegion())
	at, rec := sampleRecord()
	record := make([]byte, RecordBytes)
	if err := EncodeRecord(record, at, rec); err != nil {
		t.Fatal(err)
	}
	nonce := EncodeNonce(base.PoolID(id(0x10)), Nonce{Value: [32]byte{1, 2, 3}, Session: base.SessionID(id(0x50))})
	for name, b := range map[string][]byte{"header": h[:], "region": region[:], "record": record, "nonce": nonce[:]} {
		path := filepath.Join("testdata", name+".hex")
		got := hex.Dump(b)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s changed:\n%s\nwant\n%s", name, got, want)
		}
	}
}

func TestRoundTrips(t *testing.T) {
	h := sampleHeader()
	b := EncodeHeader(h)
	if got, err := DecodeHeader(b[:]); err != nil || got != h {
		t.Fatalf("header: %+v, %v", got, err)
	}
	r := sampleRegion()
	line := EncodeRegion(h.Pool, r)
	if got, err := DecodeRegion(line[:], h.Pool); err != nil || got != r {
		t.Fatalf("region: %+v, %v", got, err)
	}
	at, rec := sampleRecord()
	buf := make([]byte, RecordBytes)
	if err := EncodeRecord(buf, at, rec); err != nil {
		t.Fatal(err)
	}
	if got, found, err := DecodeRecord(buf, at); err != nil || !found || got != rec {
		t.Fatalf("record: %+v, %v, %v", got, found, err)
	}
}

// Every single flipped bit of a line is noticed; reserved bytes count.
func TestEveryBitCounts(t *testing.T) {
	pool := base.PoolID(id(0x10))
	flip := func(t *testing.T, b []byte, decode func([]byte) error) {
		t.Helper()
		for i := range len(b) * 8 {
			c := bytes.Clone(b)
			c[i/8] ^= 1 << (i % 8)
			if decode(c) == nil {
				t.Errorf("bit %d of byte %d flipped and believed", i%8, i/8)
			}
		}
	}
	static := EncodeStatic(sampleHeader().Static)
	flip(t, static[:], func(b []byte) error { _, err := DecodeStatic(b); return err })
	// One valid slot only, so a bad one leaves none.
	slot := EncodeSlot(pool, sampleHeader().Slot)
	flip(t, slot[:], func(b []byte) error {
		h := make([]byte, HeaderBytes)
		copy(h, static[:])
		copy(h[SlotOffset(sampleHeader().Sequence):], b)
		_, err := DecodeHeader(h)
		return err
	})
	region := EncodeRegion(pool, sampleRegion())
	flip(t, region[:], func(b []byte) error { _, err := DecodeRegion(b, pool); return err })
	at, rec := sampleRecord()
	record := make([]byte, RecordBytes)
	_ = EncodeRecord(record, at, rec)
	flip(t, record[BodyOffset:], func(b []byte) error {
		_, _, err := DecodeRecord(append(bytes.Clone(record[:BodyOffset]), b...), at)
		return err
	})
	nonce := EncodeNonce(pool, Nonce{Session: base.SessionID(id(1))})
	flip(t, nonce[:], func(b []byte) error { _, err := DecodeNonce(b, pool); return err })
}

func TestRecordIsBoundToItsPlace(t *testing.T) {
	at, rec := sampleRecord()
	b := make([]byte, RecordBytes)
	_ = EncodeRecord(b, at, rec)
	for _, other := range []Place{
		{Pool: base.PoolID(id(0x11)), Region: at.Region, Page: at.Page},
		{Pool: at.Pool, Region: at.Region + 1, Page: at.Page},
		{Pool: at.Pool, Region: at.Region, Page: at.Page + 1},
	} {
		if _, _, err := DecodeRecord(b, other); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%+v: %v", other, err)
		}
	}
	clear(b[:BodyOffset])
	if _, found, err := DecodeRecord(b, Place{}); found || err != nil {
		t.Errorf("unmarked: %v, %v", found, err)
	}
}

func TestHeaderErrors(t *testing.T) {
	good := EncodeHeader(sampleHeader())
	for name, c := range map[string]struct {
		change func(b []byte) []byte
		want   error
		text   string
	}{
		"blank":    {func([]byte) []byte { return make([]byte, HeaderBytes) }, base.ErrNotFound, "no pool header"},
		"foreign":  {func(b []byte) []byte { copy(b, "hello, file"); return b }, base.ErrForeign, "hello, f"},
		"original": {func(b []byte) []byte { le.PutUint16(b[8:], 1); return b }, base.ErrUnsupported, "version 1"},
		"corrupt":  {func(b []byte) []byte { b[20] ^= 1; return b }, base.ErrCorrupt, "check"},
		"no slot":  {func(b []byte) []byte { clear(b[64:]); return b }, base.ErrCorrupt, "neither slot"},
		"short":    {func(b []byte) []byte { return b[:100] }, base.ErrInvalid, "has 100"},
	} {
		b := c.change(bytes.Clone(good[:]))
		if _, err := DecodeHeader(b); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A slot write that is torn at any byte leaves the newest whole one readable.
func TestTornSlot(t *testing.T) {
	h := sampleHeader()
	b := EncodeHeader(h)
	next := h.Slot
	next.Sequence++
	next.NextRegion++
	line := EncodeSlot(h.Pool, next)
	for n := range LineBytes + 1 {
		c := bytes.Clone(b[:])
		copy(c[SlotOffset(next.Sequence):], line[:n])
		got, err := DecodeHeader(c)
		if err != nil || got.Slot != h.Slot && got.Slot != next {
			t.Fatalf("torn at %d: %+v, %v", n, got, err)
		}
		if n == LineBytes && got.Slot != next {
			t.Fatalf("whole slot not taken: %+v", got)
		}
	}
}

func TestPlanRegion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := rapid.Uint64Range(1, 1<<26).Draw(t, "page")
		count := rapid.Uint64Range(1, 1<<20).Draw(t, "count")
		p, err := PlanRegion(page, count, 65536)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case p.DataBytes != page*count,
			p.TableOffset < p.DataBytes, p.TableOffset%TableAlignment != 0, p.TableOffset-p.DataBytes >= TableAlignment,
			p.Record(base.PageIndex(count-1))+RecordBytes != p.TableOffset+p.TableBytes,
			p.ExtentBytes%Alignment != 0, p.ExtentBytes < p.TableOffset+p.TableBytes,
			p.ExtentBytes-(p.TableOffset+p.TableBytes) >= Alignment,
			p.Page(base.PageIndex(count-1))+page != p.DataBytes:
			t.Fatalf("%+v", p)
		}
	})
	for _, c := range [][3]uint64{
		{0, 1, 256}, {1, 0, 256}, {1, 1, 0}, {1, 1, 255}, {1, 1, 300}, {1, MaxPageCount + 1, 256},
		{base.MaxObjectBytes + 1, 1, 256}, {base.MaxObjectBytes, MaxPageCount, 256}, {1 << 20, 1<<28 + 1, 256}, {^uint64(0), ^uint64(0), 256},
		{1 << 20, 1 << 28, 256}, // the data fits, its table does not
	} {
		if _, err := PlanRegion(c[0], c[1], uint32(c[2])); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%v: %v", c, err)
		}
	}
}

func TestUsableBytes(t *testing.T) {
	for in, want := range map[uint64]uint64{0: 0, 1 << 20: 0, 2 << 20: 0, 4<<20 - 1: 0, 4 << 20: 2 << 20, 5 << 20: 2 << 20} {
		if got := UsableBytes(in); got != want {
			t.Errorf("%d: %d, want %d", in, got, want)
		}
	}
}

func FuzzDecodeHeader(f *testing.F) {
	h := EncodeHeader(sampleHeader())
	f.Add(h[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := DecodeHeader(b)
		if err != nil {
			return
		}
		again, err := DecodeHeader(b[:HeaderBytes])
		if err != nil || again != h {
			t.Fatalf("%+v, %v", again, err)
		}
		e := EncodeHeader(h)
		if got, err := DecodeHeader(e[:]); err != nil || got != h {
			t.Fatalf("%+v is not kept: %+v, %v", h, got, err)
		}
	})
}

func FuzzDecodeRegion(f *testing.F) {
	b := EncodeRegion(base.PoolID(id(0x10)), sampleRegion())
	f.Add(b[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRegion(b, base.PoolID(id(0x10)))
		if err != nil {
			return
		}
		e := EncodeRegion(base.PoolID(id(0x10)), r)
		if !bytes.Equal(e[:], b[:RegionLineBytes]) {
			t.Fatal("a region line has two forms")
		}
	})
}

func FuzzDecodeRecord(f *testing.F) {
	at, rec := sampleRecord()
	b := make([]byte, RecordBytes)
	_ = EncodeRecord(b, at, rec)
	f.Add(b, uint32(5), uint32(42))
	f.Fuzz(func(t *testing.T, b []byte, region, page uint32) {
		at := Place{Pool: base.PoolID(id(0x10)), Region: base.RegionID(region), Page: base.PageIndex(page)}
		r, found, err := DecodeRecord(b, at)
		if err != nil || !found {
			return
		}
		e := make([]byte, RecordBytes)
		if err := EncodeRecord(e, at, r); err != nil || !bytes.Equal(e, b[:RecordBytes]) {
			t.Fatalf("a record has two forms: %v", err)
		}
	})
}

// BenchmarkCheck compares what a check of a line could be made of.
func BenchmarkCheck(b *testing.B) {
	line := make([]byte, 88)
	table := crc32.MakeTable(crc32.Castagnoli)
	for name, f := range map[string]func(){
		"xxh3":   func() { check8(seedRecord, line) },
		"crc32c": func() { crc32.Checksum(line, table) },
		"sha256": func() { sha256.Sum256(line) },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				f()
			}
		})
	}
}

// What an initialisation leaves that was cut short is known, and nothing else passes for it.
func TestUnfinishedHeader(t *testing.T) {
	h := EncodeHeader(Header{Static: Static{Pool: base.NewID(), Store: base.NewID(), Coherence: base.CoherenceHardware}, Slot: FirstSlot()})
	if IsUnfinished(h[:]) {
		t.Error("a whole header passes for one that was cut short")
	}
	cut := h
	clear(cut[:LineBytes])
	if !IsUnfinished(cut[:]) || IsUnfinished(cut[:LineBytes]) {
		t.Error("a header without its static line is not known")
	}
	for _, at := range []int{0, LineBytes - 1, LineBytes + 8, LineBytes + 20, LineBytes + 32, 2 * LineBytes, HeaderBytes - 1} {
		other := cut
		other[at] ^= 0x40
		if IsUnfinished(other[:]) {
			t.Errorf("with another byte %d it passes", at)
		}
	}
	if IsUnfinished(make([]byte, HeaderBytes)) {
		t.Error("nothing passes for it")
	}
}
