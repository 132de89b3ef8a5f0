package keys

import (
	"crypto/sha256"
	"fmt"
	"unicode/utf8"

	"github.com/xcena-dev/maru/internal/base"
)

// Tag is the type that a caller gave an opaque key.
type Tag byte

// Tags.
const (
	TagString Tag = 's' // UTF-8
	TagInt    Tag = 'i' // decimal: an optional minus, no leading zero, no plus
	TagBytes  Tag = 'b'
)

// MaxOpaqueKeyBytes bounds a key of the caller's making.
const MaxOpaqueKeyBytes = 4096

const domainOpaque = "maru-opaque-v1"

// Opaque returns the object key of a caller's key: shard 0, all layers.
//
// Errors: base.ErrInvalid: empty, too long, not UTF-8, not decimal, an unknown
// tag.
func Opaque(tag Tag, key []byte) (base.Key, error) {
	if len(key) == 0 || len(key) > MaxOpaqueKeyBytes {
		return base.Key{}, fmt.Errorf("%w: key has %d bytes, 1 to %d are allowed", base.ErrInvalid, len(key), MaxOpaqueKeyBytes)
	}
	switch tag {
	case TagString:
		if !utf8.Valid(key) {
			return base.Key{}, fmt.Errorf("%w: key %.40q is not UTF-8; give it as bytes", base.ErrInvalid, key)
		}
	case TagInt:
		if !isDecimal(key) {
			return base.Key{}, fmt.Errorf("%w: key %.40q is no decimal integer", base.ErrInvalid, key)
		}
	case TagBytes:
	default:
		return base.Key{}, fmt.Errorf("%w: key tag %q is unknown, allowed: s, i, b", base.ErrInvalid, byte(tag))
	}
	var room [len(domainOpaque) + 1 + 256]byte
	m := append(room[:0], domainOpaque...)
	m = append(m, byte(tag))
	m = append(m, key...)
	sum := sha256.Sum256(m)
	return base.MakeKey(base.Digest(sum[:base.DigestBytes]), 0, base.PartAllLayers), nil
}

// isDecimal accepts the one spelling of each integer.
func isDecimal(b []byte) bool {
	digits := b
	if b[0] == '-' {
		digits = b[1:]
	}
	if len(digits) == 0 || (digits[0] == '0' && len(b) > 1) {
		return false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
