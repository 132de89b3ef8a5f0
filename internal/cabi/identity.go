package cabi

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

// OpaqueKeys computes the object keys of callers' keys: packed one after another,
// key i ending at ends[i], each with its tag.
//
// Errors: ErrInvalid names the first bad key; out is not to be used then.
func OpaqueKeys(packed []byte, ends []uint64, tags, out []byte) error {
	if err := checkCount(len(ends)); err != nil {
		return err
	}
	start := uint64(0)
	for i, end := range ends {
		if end < start || end > uint64(len(packed)) {
			return fmt.Errorf("%w: key %d ends at %d, between %d and %d is allowed", base.ErrInvalid, i, end, start, len(packed))
		}
		k, err := keys.Opaque(keys.Tag(tags[i]), packed[start:end])
		if err != nil {
			return fmt.Errorf("key %d: %w", i, err)
		}
		copy(out[i*base.KeyBytes:], k[:])
		start = end
	}
	return nil
}

// EncodeNamespace reads a namespace in JSON and writes its canonical CBOR into buf.
func EncodeNamespace(text, buf []byte) (needed int, err error) {
	if len(text) > MaxConfigBytes {
		return 0, fmt.Errorf("%w: namespace text has %d bytes, at most %d are allowed", base.ErrInvalid, len(text), MaxConfigBytes)
	}
	var n keys.Namespace
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&n); err != nil {
		return 0, fmt.Errorf("%w: namespace: %w", base.ErrInvalid, err)
	}
	b, err := n.Encode()
	if err != nil {
		return 0, err
	}
	if len(b) > len(buf) {
		return len(b), fmt.Errorf("%w: the buffer has %d bytes, %d are needed", base.ErrLimit, len(buf), len(b))
	}
	return copy(buf, b), nil
}

// Root computes the start of a chain into link.
func Root(namespaceID, salt, link []byte) error {
	l, err := keys.Root(base.NamespaceID(namespaceID), salt)
	if err != nil {
		return err
	}
	copy(link, l[:])
	return nil
}

// Chunks are the next chunks of a chain, packed.
type Chunks struct {
	Tokens    []byte // u32le
	TokenEnds []uint64
	Extras    []byte
	ExtraEnds []uint64 // nil: no extra keys
	First     uint64   // number of the first chunk in its chain
	Shard     uint16
	Part      uint16
}

// ChainKeys moves link on by the chunks and writes what is asked for of each: keys
// and parents of their objects, links. Those not wanted are nil.
//
// Errors: ErrInvalid names the chunk; link is unchanged then.
func ChainKeys(link []byte, c Chunks, outKeys, parents, links []byte) error {
	if err := checkCount(len(c.TokenEnds)); err != nil {
		return err
	}
	chain := keys.Resume(keys.Link(link), c.First)
	tokenStart, extraStart := uint64(0), uint64(0)
	previous := chain.Last().Digest()
	for i, end := range c.TokenEnds {
		if end < tokenStart || end > uint64(len(c.Tokens)/4) {
			return fmt.Errorf("%w: chunk %d: its tokens end at %d, between %d and %d is allowed", base.ErrInvalid, i, end, tokenStart, len(c.Tokens)/4)
		}
		var extras []byte
		if c.ExtraEnds != nil {
			e := c.ExtraEnds[i]
			if e < extraStart || e > uint64(len(c.Extras)) {
				return fmt.Errorf("%w: chunk %d: its extra keys end at %d, between %d and %d is allowed", base.ErrInvalid, i, e, extraStart, len(c.Extras))
			}
			extras, extraStart = c.Extras[extraStart:e], e
		}
		l, err := chain.NextPacked(c.Tokens[4*tokenStart:4*end], extras)
		if err != nil {
			return fmt.Errorf("chunk %d: %w", i, err)
		}
		tokenStart = end
		if outKeys != nil {
			k := l.Key(c.Shard, c.Part)
			copy(outKeys[i*base.KeyBytes:], k[:])
		}
		if parents != nil {
			row := parents[i*base.DigestBytes : (i+1)*base.DigestBytes]
			if c.First == 0 && i == 0 {
				clear(row) // the first chunk of a chain has no parent
			} else {
				copy(row, previous[:])
			}
		}
		if links != nil {
			copy(links[i*len(l):], l[:])
		}
		previous = l.Digest()
	}
	last := chain.Last()
	copy(link, last[:])
	return nil
}

func checkCount(n int) error {
	if n > MaxBatchCount {
		return fmt.Errorf("%w: %d items in one call, at most %d are allowed", base.ErrLimit, n, MaxBatchCount)
	}
	return nil
}
