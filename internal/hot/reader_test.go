package hot

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// dribble gives few bytes a read.
type dribble struct {
	b []byte
	n int
}

func (d *dribble) Read(p []byte) (int, error) {
	if len(d.b) == 0 {
		return 0, io.EOF
	}
	d.n = d.n%7 + 1
	n := copy(p[:min(len(p), d.n)], d.b)
	d.b = d.b[n:]
	return n, nil
}

func frameOf(n int) []byte {
	f := appendHeader(nil, OpProbe, 0, uint64(n))
	return finish(append(f, make([]byte, n)...), 0)
}

func TestReaderEnds(t *testing.T) {
	whole := frameOf(40)
	for n := range whole {
		_, _, err := NewReader(bytes.NewReader(whole[:n])).Next()
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) {
			t.Fatalf("%d of %d bytes: %v, want %v", n, len(whole), err, want)
		}
	}
}

func TestHeaderRefusals(t *testing.T) {
	for name, change := range map[string]func([]byte){
		"version 0":      func(b []byte) { b[4] = 0 },
		"version 2":      func(b []byte) { b[4] = 2 },
		"operation 0":    func(b []byte) { b[5] = 0 },
		"operation 10":   func(b []byte) { b[5] = 10 },
		"flag":           func(b []byte) { b[6] = 2 },
		"flag high byte": func(b []byte) { b[7] = 1 },
		"length":         func(b []byte) { le.PutUint32(b, MaxPayloadBytes+1) },
		"huge length":    func(b []byte) { le.PutUint32(b, ^uint32(0)) },
	} {
		b := frameOf(0)
		change(b)
		if _, _, err := NewReader(bytes.NewReader(b)).Next(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A header from a stranger must not make the reader allocate what it claims.
func TestReaderBoundBeforeProof(t *testing.T) {
	r := NewReader(bytes.NewReader(frameOf(1 << 20)))
	r.SetMaxPayload(256)
	if _, _, err := r.Next(); !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("a megabyte before the proof: %v", err)
	}
	if len(r.buf) > smallBufferBytes {
		t.Fatalf("the buffer grew to %d bytes", len(r.buf))
	}
}

func TestReaderGrowsAndShrinks(t *testing.T) {
	stream := frameOf(1 << 20)
	for range 10 * shrinkAfterFrames {
		stream = append(stream, frameOf(100)...)
	}
	r := NewReader(bytes.NewReader(stream))
	for i := 0; ; i++ {
		h, payload, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || len(payload) != int(h.RequestID) {
			t.Fatalf("frame %d: %v, %d bytes of %d", i, err, len(payload), h.RequestID)
		}
		if i == 0 && len(r.buf) < 1<<20 {
			t.Fatal("the buffer did not grow")
		}
	}
	// bytes.Reader fills the whole buffer at once, which looks busy; a connection with
	// one call in flight gives one frame a read.
	r = NewReader(&oneFrame{first: frameOf(1 << 20), rest: frameOf(100), count: 10 * shrinkAfterFrames})
	for {
		if _, _, err := r.Next(); err != nil {
			break
		}
	}
	if len(r.buf) > 8*smallBufferBytes {
		t.Fatalf("the buffer still has %d bytes", len(r.buf))
	}
}

// oneFrame gives at most one frame a read, as a peer with one call in flight does.
type oneFrame struct {
	first, rest, now []byte
	count            int
}

func (o *oneFrame) Read(p []byte) (int, error) {
	if len(o.now) == 0 {
		switch {
		case o.first != nil:
			o.now, o.first = o.first, nil
		case o.count == 0:
			return 0, io.EOF
		default:
			o.count--
			o.now = o.rest
		}
	}
	n := copy(p, o.now)
	o.now = o.now[n:]
	return n, nil
}

func FuzzReader(f *testing.F) {
	for _, v := range vectors() {
		f.Add(v.frame)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(&dribble{b: b})
		var used int
		for {
			h, payload, err := r.Next()
			if err != nil {
				break
			}
			used += HeaderBytes + len(payload)
			if len(payload) != int(h.PayloadBytes) {
				t.Fatalf("payload of %d bytes, header says %d", len(payload), h.PayloadBytes)
			}
		}
		if used > len(b) {
			t.Fatalf("%d bytes out of %d", used, len(b))
		}
	})
}

// fuzzDecoder checks one decoder: no panic, and what it accepts is encoded to the
// same bytes again, so that no two frames mean the same message.
func fuzzDecoder(f *testing.F, name string) {
	f.Helper()
	for _, v := range vectors() {
		if v.name != name {
			continue
		}
		f.Add(v.frame[HeaderBytes:])
		f.Fuzz(func(t *testing.T, payload []byte) {
			if again, err := v.again(payload); err == nil && !bytes.Equal(again[HeaderBytes:], payload) {
				t.Fatalf("decoded and encoded again:\n got %x\nwant %x", again[HeaderBytes:], payload)
			}
		})
		return
	}
	f.Fatalf("no vector %s", name)
}

func FuzzChallenge(f *testing.F)      { fuzzDecoder(f, "challenge") }
func FuzzHello(f *testing.F)          { fuzzDecoder(f, "hello") }
func FuzzWelcome(f *testing.F)        { fuzzDecoder(f, "welcome") }
func FuzzProbe(f *testing.F)          { fuzzDecoder(f, "probe") }
func FuzzProbeAnswer(f *testing.F)    { fuzzDecoder(f, "probe-answer") }
func FuzzAcquire(f *testing.F)        { fuzzDecoder(f, "acquire") }
func FuzzAcquireAnswer(f *testing.F)  { fuzzDecoder(f, "acquire-answer") }
func FuzzRelease(f *testing.F)        { fuzzDecoder(f, "release") }
func FuzzReleaseAnswer(f *testing.F)  { fuzzDecoder(f, "release-answer") }
func FuzzCommit(f *testing.F)         { fuzzDecoder(f, "commit") }
func FuzzCommitAnswer(f *testing.F)   { fuzzDecoder(f, "commit-answer") }
func FuzzResolve(f *testing.F)        { fuzzDecoder(f, "resolve") }
func FuzzResolveAnswer(f *testing.F)  { fuzzDecoder(f, "resolve-answer") }
func FuzzRelist(f *testing.F)         { fuzzDecoder(f, "relist") }
func FuzzRelistAnswer(f *testing.F)   { fuzzDecoder(f, "relist-answer") }
func FuzzRequests(f *testing.F)       { fuzzDecoder(f, "requests") }
func FuzzRequestsAnswer(f *testing.F) { fuzzDecoder(f, "requests-answer") }
