package hot

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

var update = flag.Bool("update", false, "write testdata/golden.txt anew")

func testKey(i int) base.Key {
	var d base.Digest
	for j := range d {
		d[j] = byte(i*31 + j)
	}
	return base.MakeKey(d, uint16(i), base.PartAllLayers)
}

func testKeys(n int) Keys {
	var b []byte
	for i := range n {
		b = AppendKeys(b, []base.Key{testKey(i)})
	}
	return b
}

func testCommitRow(i int) CommitRow {
	return CommitRow{
		Key: testKey(i), Parent: testKey(i + 1).Digest(), Pool: 3, Region: base.RegionID(40 + i),
		Offset: uint64(i) * 8192, Length: 5000 + uint64(i), Generation: base.MakeGeneration(7, uint32(i+1)),
		Checksum: 0x1122334455667788 + uint64(i),
	}
}

func bytesOf(from byte, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

// vector is one frame of the format: how it is made, and how a decoder makes the
// same bytes of its payload again.
type vector struct {
	name  string
	frame []byte
	again func(payload []byte) ([]byte, error)
}

func vectors() []vector {
	order, _ := base.MakeCommitOrder(5, 99)
	session := base.SessionID(bytesOf(0x10, 16))
	op := Operation{Sequence: 41, Watermark: 40}
	var commitRows, results, pages, leases, acquireRows, releases []byte
	for i := range 3 {
		row := testCommitRow(i)
		commitRows = AppendCommitRow(commitRows, &row)
		results = AppendCommitResult(results, CommitResult{Code: base.Code(i), Order: order + base.CommitOrder(i)})
		pages = AppendRelistPage(pages, &RelistPage{CommitRow: row, Order: order, State: RelistState(i + 1)})
		acquireRows = AppendAcquireRow(acquireRows, &AcquireRow{
			Verdict: MakeHit(base.MediumCXL), Pool: 3, Region: 40, Offset: 8192, Length: 5000,
			Generation: row.Generation, Checksum: row.Checksum, Order: order,
		})
		releases = AppendReleaseRow(releases, ReleaseRow{Acquire: base.Sequence(i + 1), First: uint32(i), Count: ReleaseAll})
	}
	for i := range 2 {
		leases = AppendRelistLease(leases, &RelistLease{
			Pool: 1, Region: 40, Offset: 4096, Generation: 9, Kind: base.LeaseKind(i + 1), Acquire: 12, Index: uint32(i),
		})
	}
	ch := Challenge{Nonce: [NonceBytes]byte(bytesOf(0, 32)), ServerEpoch: 0xA1A2A3A4A5A6A7A8}
	hello := Hello{Session: session, Epoch: 6, ServerEpoch: ch.ServerEpoch, Nonce: [NonceBytes]byte(bytesOf(64, 32))}
	secret := bytesOf(0x80, SecretBytes)
	hello.MAC = HelloMAC(secret, &ch, &hello)
	ids := le.AppendUint64(le.AppendUint64(nil, 77), 78)
	sizes := AppendManifestSize(AppendManifestSize(AppendManifestSize(nil, 1), 1), 3)

	return []vector{
		{"challenge", AppendChallenge(nil, &ch), func(p []byte) ([]byte, error) {
			var m Challenge
			err := DecodeChallenge(p, &m)
			return AppendChallenge(nil, &m), err
		}},
		{"hello", AppendHello(nil, 1, &hello), func(p []byte) ([]byte, error) {
			var m Hello
			err := DecodeHello(p, &m)
			return AppendHello(nil, 1, &m), err
		}},
		{
			"welcome", AppendWelcome(nil, 1, &Welcome{Namespace: 2, Provable: true, MAC: WelcomeMAC(secret, &ch, &hello)}),
			func(p []byte) ([]byte, error) {
				var m Welcome
				err := DecodeWelcome(p, &m)
				return AppendWelcome(nil, 1, &m), err
			},
		},
		{"probe", AppendProbe(nil, 2, &ProbeRequest{
			Operation: op, RequestID: 77, Namespace: 2, Mode: ModePrefix, Targets: bytesOf(0x20, 32), Keys: testKeys(3),
		}), func(p []byte) ([]byte, error) {
			var m ProbeRequest
			err := DecodeProbe(p, &m)
			return AppendProbe(nil, 2, &m), err
		}},
		{
			"probe-answer",
			AppendProbeAnswer(nil, 2, &ProbeAnswer{LeadingHits: 1, Verdicts: []byte{byte(MakeHit(base.MediumCPU)), byte(Pending), byte(NotTried)}}),
			func(p []byte) ([]byte, error) {
				var m ProbeAnswer
				err := DecodeProbeAnswer(p, &m)
				return AppendProbeAnswer(nil, 2, &m), err
			},
		},
		{"acquire", AppendAcquire(nil, 3, &AcquireRequest{
			Operation: op, Namespace: 2, Kind: base.LeaseView, Mode: ModePrefix, ManifestSizes: sizes, Keys: testKeys(5),
		}), func(p []byte) ([]byte, error) {
			var m AcquireRequest
			err := DecodeAcquire(p, &m)
			return AppendAcquire(nil, 3, &m), err
		}},
		{"acquire-answer", AppendAcquireAnswer(nil, 3, &AcquireAnswer{Manifests: 3, Rows: acquireRows}), func(p []byte) ([]byte, error) {
			var m AcquireAnswer
			err := DecodeAcquireAnswer(p, &m)
			return AppendAcquireAnswer(nil, 3, &m), err
		}},
		{"release", AppendRelease(nil, 4, &ReleaseRequest{Operation: op, Rows: releases}), func(p []byte) ([]byte, error) {
			var m ReleaseRequest
			err := DecodeRelease(p, &m)
			return AppendRelease(nil, 4, &m), err
		}},
		{"release-answer", AppendReleaseAnswer(nil, 4, &ReleaseAnswer{Held: []byte{1, 0, 1}}), func(p []byte) ([]byte, error) {
			var m ReleaseAnswer
			err := DecodeReleaseAnswer(p, &m)
			return AppendReleaseAnswer(nil, 4, &m), err
		}},
		{"commit", AppendCommit(nil, 5, &CommitRequest{Operation: op, Namespace: 2, Rows: commitRows}), func(p []byte) ([]byte, error) {
			var m CommitRequest
			err := DecodeCommit(p, &m)
			return AppendCommit(nil, 5, &m), err
		}},
		{"commit-answer", AppendCommitAnswer(nil, 5, results), func(p []byte) ([]byte, error) {
			m, err := DecodeCommitAnswer(p)
			return AppendCommitAnswer(nil, 5, m), err
		}},
		{
			"resolve", AppendResolve(nil, 6, &ResolveRequest{Operation: op, TargetServerEpoch: 8, TargetEpoch: 9, Target: 39}),
			func(p []byte) ([]byte, error) {
				var m ResolveRequest
				err := DecodeResolve(p, &m)
				return AppendResolve(nil, 6, &m), err
			},
		},
		{
			"resolve-answer", AppendResolveAnswer(nil, 6, &ResolveAnswer{Outcome: OutcomeCommitted, Results: results}),
			func(p []byte) ([]byte, error) {
				var m ResolveAnswer
				err := DecodeResolveAnswer(p, &m)
				return AppendResolveAnswer(nil, 6, &m), err
			},
		},
		{
			"relist", AppendRelist(nil, 7, &RelistRequest{Operation: op, Last: true, Pages: pages, Leases: leases}),
			func(p []byte) ([]byte, error) {
				var m RelistRequest
				err := DecodeRelist(p, &m)
				return AppendRelist(nil, 7, &m), err
			},
		},
		{
			"relist-answer", AppendRelistAnswer(nil, 7, &RelistAnswer{Results: []byte{byte(RelistKept), byte(RelistRetire), byte(RelistQuarantined)}}),
			func(p []byte) ([]byte, error) {
				var m RelistAnswer
				err := DecodeRelistAnswer(p, &m)
				return AppendRelistAnswer(nil, 7, &m), err
			},
		},
		{"requests", AppendRequests(nil, 8, &RequestsRequest{Operation: op, Action: RequestsEnd, IDs: ids}), func(p []byte) ([]byte, error) {
			var m RequestsRequest
			err := DecodeRequests(p, &m)
			return AppendRequests(nil, 8, &m), err
		}},
		{"requests-answer", AppendRequestsAnswer(nil, 8, &RequestsAnswer{Known: 2}), func(p []byte) ([]byte, error) {
			var m RequestsAnswer
			err := DecodeRequestsAnswer(p, &m)
			return AppendRequestsAnswer(nil, 8, &m), err
		}},
		{"error", AppendError(nil, OpAcquire, 9, fmt.Errorf("acquire: %w: 4097 leases", base.ErrLimit)), nil},
	}
}

// The bytes of every frame are part of the protocol: a change of one of them is a
// change of the version (docs/rfcs/0003-hot-plane.md).
func TestGoldenVectors(t *testing.T) {
	const path = "testdata/golden.txt"
	var got strings.Builder
	for _, v := range vectors() {
		fmt.Fprintf(&got, "%s %s\n", v.name, hex.EncodeToString(v.frame))
	}
	if *update {
		if err := os.WriteFile(path, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	wantLines, gotLines := strings.Split(string(want), "\n"), strings.Split(got.String(), "\n")
	if len(wantLines) != len(gotLines) {
		t.Fatalf("%d vectors, want %d", len(gotLines), len(wantLines))
	}
	for i := range wantLines {
		if wantLines[i] != gotLines[i] {
			t.Errorf("vector %d differs:\n got %s\nwant %s", i, gotLines[i], wantLines[i])
		}
	}
}

func TestRoundTrips(t *testing.T) {
	var stream []byte
	for _, v := range vectors() {
		stream = append(stream, v.frame...)
		if v.again == nil {
			continue
		}
		if again, err := v.again(v.frame[HeaderBytes:]); err != nil || !bytes.Equal(again, v.frame) {
			t.Errorf("%s: decoded and encoded again: %v\n got %x\nwant %x", v.name, err, again, v.frame)
		}
	}
	r := NewReader(&dribble{b: stream})
	for _, v := range vectors() {
		h, payload, err := r.Next()
		if err != nil {
			t.Fatalf("%s: %v", v.name, err)
		}
		if !bytes.Equal(payload, v.frame[HeaderBytes:]) || h.RequestID != le.Uint64(v.frame[8:]) {
			t.Fatalf("%s: the reader gave another frame", v.name)
		}
	}
}

// Every payload that is shorter, longer or has a reserved byte set is refused by
// base.ErrInvalid, never by a panic.
func TestMutilatedPayloads(t *testing.T) {
	for _, v := range vectors() {
		if v.again == nil {
			continue
		}
		payload := v.frame[HeaderBytes:]
		for n := range len(payload) {
			if _, err := v.again(payload[:n:n]); !errors.Is(err, base.ErrInvalid) {
				t.Fatalf("%s cut to %d of %d bytes: %v", v.name, n, len(payload), err)
			}
		}
		for _, more := range []int{1, 8, 32, 56, 104} {
			if _, err := v.again(append(bytes.Clone(payload), make([]byte, more)...)); !errors.Is(err, base.ErrInvalid) {
				t.Fatalf("%s with %d bytes more: %v", v.name, more, err)
			}
		}
		// A flipped bit gives a refusal, an error answer, or another message that
		// has exactly these bytes.
		for i := range payload {
			bad := bytes.Clone(payload)
			bad[i] ^= 0x80
			if again, err := v.again(bad); err == nil && !bytes.Equal(again[HeaderBytes:], bad) {
				t.Fatalf("%s: byte %d flipped decodes to a message of other bytes", v.name, i)
			}
		}
	}
}

func TestErrorAnswers(t *testing.T) {
	long := fmt.Errorf("%w: %s", base.ErrFull, strings.Repeat("ä", 400))
	for _, err := range []error{base.ErrStale, fmt.Errorf("x: %w: y", base.ErrMismatch), long, errors.New("plain")} {
		frame := AppendError(nil, OpCommit, 3, err)
		h, herr := DecodeHeader(frame)
		if herr != nil || h.Op != OpCommit || h.Flags != FlagAnswer {
			t.Fatalf("%v: header %+v %v", err, h, herr)
		}
		_, got := DecodeCommitAnswer(frame[HeaderBytes:])
		if base.CodeOf(got) != base.CodeOf(err) {
			t.Errorf("%v came back as %v", err, got)
		}
		if text := got.Error(); len(text) > 520 || strings.ContainsRune(text, '\uFFFD') {
			t.Errorf("text of %d bytes: %q", len(text), text)
		}
	}
}

func TestHandshakeProofs(t *testing.T) {
	secret := bytesOf(1, SecretBytes)
	ch := Challenge{Nonce: [NonceBytes]byte(bytesOf(3, 32)), ServerEpoch: 4}
	m := Hello{Session: base.SessionID(bytesOf(5, 16)), Epoch: 2, ServerEpoch: 4, Nonce: [NonceBytes]byte(bytesOf(9, 32))}
	good := HelloMAC(secret, &ch, &m)
	for name, change := range map[string]func(*Challenge, *Hello, []byte){
		"server nonce": func(c *Challenge, _ *Hello, _ []byte) { c.Nonce[31]++ },
		"client nonce": func(_ *Challenge, h *Hello, _ []byte) { h.Nonce[0]++ },
		"session":      func(_ *Challenge, h *Hello, _ []byte) { h.Session[7]++ },
		"epoch":        func(_ *Challenge, h *Hello, _ []byte) { h.Epoch++ },
		"server epoch": func(_ *Challenge, h *Hello, _ []byte) { h.ServerEpoch++ },
		"secret":       func(_ *Challenge, _ *Hello, s []byte) { s[0]++ },
	} {
		c2, m2, s2 := ch, m, bytes.Clone(secret)
		change(&c2, &m2, s2)
		if EqualMAC(good, HelloMAC(s2, &c2, &m2)) {
			t.Errorf("the proof does not cover the %s", name)
		}
	}
	if EqualMAC(good, WelcomeMAC(secret, &ch, &m)) {
		t.Error("a server's proof serves as a client's")
	}
}
