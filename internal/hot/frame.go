// Package hot is the hot plane's wire format (D2, docs/rfcs/0003-hot-plane.md):
// length-prefixed little-endian frames that carry batches of packed rows between
// a client and maru-server. It encodes, decodes and frames; it knows no session
// and keeps no state but a read buffer.
//
// A connection carries one call at a time. The server speaks first (Challenge),
// the client proves its session (Hello), and every later frame is a request of
// that session or the answer to it. Whatever does not decode closes the
// connection: a decoder returns base.ErrInvalid and never panics, whatever the
// bytes are.
//
// Decoded requests and answers are views of the frame's bytes: they are valid
// until the next frame is read. Rows are copied out one by one.
package hot

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/xcena-dev/maru/internal/base"
)

// Bounds of the format. A peer that passes one is cut off.
const (
	Version         = 1
	HeaderBytes     = 16
	MaxPayloadBytes = 1 << 20 // docs/PROTOCOL.md section 1, hot plane
	MaxKeys         = 4096    // rows of one request
	MaxExpandedKeys = 65536   // keys x shards of one probe
	MaxShards       = 1024    // target workers of one probe
)

// Op is the operation of a frame.
type Op uint8

// Operations. Values are on the wire and are never used again for another.
const (
	OpChallenge Op = 1
	OpHello     Op = 2
	OpProbe     Op = 3
	OpAcquire   Op = 4
	OpRelease   Op = 5
	OpCommit    Op = 6
	OpResolve   Op = 7
	OpRelist    Op = 8
	OpRequests  Op = 9
)

func (o Op) String() string {
	names := [...]string{"", "challenge", "hello", "probe", "acquire", "release", "commit", "resolve", "relist", "requests"}
	if int(o) < len(names) && o != 0 {
		return names[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Flags of a frame's header.
type Flags uint16

// FlagAnswer marks an answer; the other bits must be zero.
const FlagAnswer Flags = 1

// Header is the first 16 bytes of a frame: payload length u32, version u8, op u8,
// flags u16, request id u64.
type Header struct {
	PayloadBytes uint32
	Op           Op
	Flags        Flags
	RequestID    uint64
}

var le = binary.LittleEndian

// AppendHeader starts a frame; the length is filled in by finish.
func appendHeader(dst []byte, op Op, flags Flags, id uint64) []byte {
	dst = append(dst, 0, 0, 0, 0, Version, byte(op))
	dst = le.AppendUint16(dst, uint16(flags))
	return le.AppendUint64(dst, id)
}

// finish writes the payload's length into the header that starts at start.
func finish(dst []byte, start int) []byte {
	le.PutUint32(dst[start:], uint32(len(dst)-start-HeaderBytes)) //nolint:gosec // bounded by the encoders
	return dst
}

// DecodeHeader checks and decodes a header.
func DecodeHeader(b []byte) (Header, error) {
	if len(b) < HeaderBytes {
		return Header{}, fmt.Errorf("%w: hot frame header of %d bytes", base.ErrInvalid, len(b))
	}
	h := Header{PayloadBytes: le.Uint32(b), Op: Op(b[5]), Flags: Flags(le.Uint16(b[6:])), RequestID: le.Uint64(b[8:])}
	switch {
	case b[4] != Version:
		return h, fmt.Errorf("%w: hot frame version %d, this side speaks %d", base.ErrUnsupported, b[4], Version)
	case h.PayloadBytes > MaxPayloadBytes:
		return h, fmt.Errorf("%w: hot frame payload of %d bytes, at most %d", base.ErrInvalid, h.PayloadBytes, MaxPayloadBytes)
	case h.Flags&^FlagAnswer != 0:
		return h, fmt.Errorf("%w: hot frame flags %#x", base.ErrInvalid, h.Flags)
	case h.Op == 0 || h.Op > OpRequests:
		return h, fmt.Errorf("%w: hot frame operation %d", base.ErrInvalid, h.Op)
	}
	return h, nil
}

// Reader reads frames from a connection through one buffer, so that a whole
// frame normally costs one read.
// Concurrency: one goroutine. Ownership: a payload is valid until the next Next.
type Reader struct {
	src        io.Reader
	buf        []byte
	start, end int
	maxPayload uint32
	idle       int // frames in a row that left most of the buffer unused
}

// smallBufferBytes is where a reader starts and what it never shrinks below;
// shrinkAfterFrames small frames in a row halve a larger buffer, so that one large
// frame does not cost a connection its memory for ever.
const (
	smallBufferBytes  = 4096
	shrinkAfterFrames = 1024
)

// NewReader reads frames from src. The buffer starts small, grows to the largest
// frame seen, at most MaxPayloadBytes + HeaderBytes, and shrinks again.
func NewReader(src io.Reader) *Reader {
	return &Reader{src: src, buf: make([]byte, smallBufferBytes), maxPayload: MaxPayloadBytes}
}

// SetMaxPayload bounds the payload of later frames, at most MaxPayloadBytes. A
// server keeps it small until the peer has proved its session: otherwise a header
// alone would make it allocate a megabyte for a stranger.
func (r *Reader) SetMaxPayload(bytes int) {
	r.maxPayload = uint32(min(max(bytes, 0), MaxPayloadBytes)) //nolint:gosec // bounded
}

// Next returns the next frame. io.EOF means a clean end between two frames.
func (r *Reader) Next() (Header, []byte, error) {
	r.shrink()
	if err := r.fill(HeaderBytes); err != nil {
		return Header{}, nil, err
	}
	h, err := DecodeHeader(r.buf[r.start:])
	if err != nil {
		return h, nil, err
	}
	if h.PayloadBytes > r.maxPayload {
		return h, nil, fmt.Errorf("%w: hot frame payload of %d bytes, at most %d here", base.ErrInvalid, h.PayloadBytes, r.maxPayload)
	}
	whole := HeaderBytes + int(h.PayloadBytes)
	if err := r.fill(whole); err != nil {
		if err == io.EOF { //nolint:errorlint // fill returns io.EOF itself
			err = io.ErrUnexpectedEOF
		}
		return h, nil, err
	}
	payload := r.buf[r.start+HeaderBytes : r.start+whole : r.start+whole]
	r.start += whole
	return h, payload, nil
}

// shrink gives a buffer back that has been too large for a while.
func (r *Reader) shrink() {
	if r.end > len(r.buf)/4 {
		r.idle = 0
	} else if r.idle++; r.idle > shrinkAfterFrames && len(r.buf) > smallBufferBytes && r.start == r.end {
		r.buf, r.start, r.end, r.idle = make([]byte, len(r.buf)/2), 0, 0, 0
	}
}

// fill makes need bytes available from r.start on.
func (r *Reader) fill(need int) error {
	if r.end-r.start >= need {
		return nil
	}
	if r.start > 0 {
		r.end = copy(r.buf, r.buf[r.start:r.end])
		r.start = 0
	}
	if need > len(r.buf) {
		grown := make([]byte, max(need, min(2*len(r.buf), MaxPayloadBytes+HeaderBytes)))
		copy(grown, r.buf[:r.end])
		r.buf = grown
	}
	for r.end < need {
		n, err := r.src.Read(r.buf[r.end:])
		r.end += n
		if err != nil && r.end < need {
			if err == io.EOF && r.end > 0 { //nolint:errorlint // readers return io.EOF itself
				return io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}
