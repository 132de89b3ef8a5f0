package core

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// TokenBytes is the size of every token: a whole HMAC-SHA256.
const TokenBytes = sha256.Size

// SecretBytes is the size of the store's secret.
const SecretBytes = 32

// Token is a capability (SEC-01).
type Token [TokenBytes]byte

// Handle names a region with a capability.
type Handle struct {
	Pool        base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation
	Token       []byte
	ReadOnly    bool
}

func (c *Core) mac(label string, parts ...[]byte) Token {
	return mac(&c.secret, label, parts...)
}

// mac is HMAC-SHA256 (RFC 2104) of a label and of parts that each have a fixed size, so
// that none runs into the next. Messages are short: all of it lies on the stack.
func mac(key *[SecretBytes]byte, label string, parts ...[]byte) Token {
	var inner, outer [macBytes]byte
	for i := range sha256.BlockSize {
		inner[i], outer[i] = 0x36, 0x5c
	}
	for i, k := range key {
		inner[i] ^= k
		outer[i] ^= k
	}
	text := append(inner[:sha256.BlockSize], label...)
	for _, p := range parts {
		text = append(text, p...)
	}
	sum := sha256.Sum256(text)
	return sha256.Sum256(append(outer[:sha256.BlockSize], sum[:]...))
}

// macBytes has room for a block and every message that is made here.
const macBytes = sha256.BlockSize + 96

func (c *Core) writeToken(r *regionRow) Token {
	var b [40]byte
	copy(b[:], r.Pool[:])
	binary.LittleEndian.PutUint32(b[16:], uint32(r.ID))
	binary.LittleEndian.PutUint32(b[20:], uint32(r.Incarnation))
	binary.LittleEndian.PutUint64(b[24:], r.Offset)
	binary.LittleEndian.PutUint64(b[32:], r.Length)
	return c.mac("maru-write-v1", b[:])
}

// readToken is derived from the write token, so that who has the write
// capability can be trusted with it and who has the read token learns nothing.
func readToken(write Token) Token {
	return mac((*[SecretBytes]byte)(&write), "maru-read-v1")
}

func (c *Core) holdToken(s *sessionRow) Token {
	return c.mac("maru-hold-v1", s.ID[:], s.Nonce[:])
}

// access says what a handle must allow.
type access uint8

const (
	accessRead access = iota // read or write capability
	accessWrite
)

// resolve finds the region of a handle and checks its capability. Errors:
// ErrNotFound, ErrStale (another incarnation), ErrDenied (forged, or a read token
// where a write token is due), ErrMismatch (another pool).
func (c *Core) resolve(h Handle, need access) (*region, error) {
	r, ok := c.regions[h.Region]
	if !ok {
		return nil, fmt.Errorf("%w: region %d", base.ErrNotFound, h.Region)
	}
	if r.row.Pool != h.Pool {
		return nil, fmt.Errorf("%w: region %d is in pool %s, not in %s", base.ErrMismatch, h.Region, r.row.Pool, h.Pool)
	}
	write := c.writeToken(&r.row)
	want := write
	if h.ReadOnly {
		want = readToken(write)
	}
	if !hmac.Equal(h.Token, want[:]) {
		if len(h.Token) != TokenBytes {
			return nil, fmt.Errorf("%w: region %d: token has %d bytes, must have %d", base.ErrDenied, h.Region, len(h.Token), TokenBytes)
		}
		if h.Incarnation != r.row.Incarnation {
			return nil, fmt.Errorf("%w: region %d has incarnation %d, not %d", base.ErrStale, h.Region, r.row.Incarnation, h.Incarnation)
		}
		return nil, fmt.Errorf("%w: region %d: the token is not this region's", base.ErrDenied, h.Region)
	}
	if h.Incarnation != r.row.Incarnation {
		return nil, fmt.Errorf("%w: region %d has incarnation %d, not %d", base.ErrStale, h.Region, r.row.Incarnation, h.Incarnation)
	}
	if need == accessWrite && h.ReadOnly {
		return nil, fmt.Errorf("%w: region %d: a read token, a write token is needed", base.ErrDenied, h.Region)
	}
	return r, nil
}
