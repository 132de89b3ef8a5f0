package keys

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// Prefixes of hashed messages. What follows has a fixed length up to the last
// part, so no two messages of one domain are cut differently.
const (
	domainSalt  = "maru-salt-v1"
	domainChunk = "maru-chunk-v1"
)

// Limits of a chain.
const (
	MaxSaltBytes   = 4096
	MaxChunkTokens = 1 << 20
)

// Link is a full 32-byte digest of a chain: its root, or of the prefix through a
// chunk. Keys hold its first 28 bytes; the next chunk hashes all 32.
type Link [sha256.Size]byte

// Digest returns the part of the link that goes into keys and parents.
func (l Link) Digest() base.Digest { return base.Digest(l[:base.DigestBytes]) }

// Key returns the key of this chunk's object.
func (l Link) Key(shard, part uint16) base.Key { return base.MakeKey(l.Digest(), shard, part) }

// Root returns the start of a chain: the namespace's digest, or with a salt of
// the request (engines call it cache_salt) a digest of both, so that requests
// with different salts share nothing from the first chunk on.
//
// Errors: base.ErrInvalid for a salt over MaxSaltBytes.
func Root(ns base.NamespaceID, salt []byte) (Link, error) {
	if len(salt) == 0 {
		return Link(ns), nil
	}
	if len(salt) > MaxSaltBytes {
		return Link{}, fmt.Errorf("%w: salt has %d bytes, at most %d are allowed", base.ErrInvalid, len(salt), MaxSaltBytes)
	}
	m := make([]byte, 0, len(domainSalt)+len(ns)+MaxSaltBytes)
	m = append(m, domainSalt...)
	m = append(m, ns[:]...)
	m = append(m, salt...)
	return sha256.Sum256(m), nil
}

// Chain computes the links of one prompt, chunk by chunk. The zero value is not
// usable; copy it to branch off.
//
// Concurrency: one goroutine at a time.
type Chain struct {
	last   Link
	parent base.Digest
	count  uint64
	buf    []byte
}

// NewChain starts behind root with no chunk.
func NewChain(root Link) *Chain { return &Chain{last: root} }

// Resume goes on behind a chunk whose link is known; count is the number of
// chunks through it.
func Resume(last Link, count uint64) *Chain { return &Chain{last: last, count: count} }

// Last returns the link of the last chunk, or the root.
func (c *Chain) Last() Link { return c.last }

// Parent returns the digest of the chunk before the last one: what a commit of
// the last chunk names as its parent. It is zero for the first chunk.
func (c *Chain) Parent() base.Digest { return c.parent }

// Count returns how many chunks the chain has.
func (c *Chain) Count() uint64 { return c.count }

// Next adds a chunk of tokens and its encoded extra keys (EncodeExtras; nil for
// none).
//
// Errors: base.ErrInvalid for no tokens, for too many, for extra keys that are
// not deterministic CBOR. The chain is unchanged then.
func (c *Chain) Next(tokens []uint32, extras []byte) (Link, error) {
	c.begin(len(tokens))
	for _, t := range tokens {
		c.buf = binary.LittleEndian.AppendUint32(c.buf, t)
	}
	return c.finish(len(tokens), extras)
}

// NextPacked is Next over tokens packed as u32 little-endian.
func (c *Chain) NextPacked(tokens, extras []byte) (Link, error) {
	if len(tokens)%4 != 0 {
		return Link{}, fmt.Errorf("%w: packed tokens have %d bytes, no multiple of 4", base.ErrInvalid, len(tokens))
	}
	c.begin(len(tokens) / 4)
	c.buf = append(c.buf, tokens...)
	return c.finish(len(tokens)/4, extras)
}

func (c *Chain) begin(count int) {
	c.buf = append(c.buf[:0], domainChunk...)
	c.buf = append(c.buf, c.last[:]...)
	// The count keeps tokens from being read as extra keys and the reverse.
	c.buf = binary.LittleEndian.AppendUint32(c.buf, uint32(count)) //nolint:gosec // finish refuses what does not fit
}

func (c *Chain) finish(count int, extras []byte) (Link, error) {
	if count == 0 || count > MaxChunkTokens {
		return Link{}, fmt.Errorf("%w: chunk has %d tokens, 1 to %d are allowed", base.ErrInvalid, count, MaxChunkTokens)
	}
	if len(extras) > 0 {
		if len(extras) > MaxExtrasBytes {
			return Link{}, fmt.Errorf("%w: extra keys have %d bytes, at most %d are allowed", base.ErrInvalid, len(extras), MaxExtrasBytes)
		}
		if err := checkDeterministic("extra keys", extras); err != nil {
			return Link{}, err
		}
		c.buf = append(c.buf, extras...)
	}
	link := Link(sha256.Sum256(c.buf))
	if c.count > 0 {
		c.parent = c.last.Digest()
	}
	c.last = link
	c.count++
	return link, nil
}
