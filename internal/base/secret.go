package base

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
)

// OwnerSecretBytes is the size of an owner's secret.
const OwnerSecretBytes = 32

// OwnerSecret is what a server proves its server id with at the resource manager:
// 256 random bits in its state directory (SEC-01). No way of formatting it shows it,
// so that it is in no log line, error or picture by accident: it has its own Format,
// and where fmt does not call that (unexported fields, wrong verbs) it finds a
// function, which it cannot look into; pointers it would follow. The zero value is no
// secret.
type OwnerSecret struct{ bits func() [OwnerSecretBytes]byte }

func ownerSecret(b [OwnerSecretBytes]byte) OwnerSecret {
	return OwnerSecret{func() [OwnerSecretBytes]byte { return b }}
}

// NewOwnerSecret returns 256 random bits.
func NewOwnerSecret() OwnerSecret {
	var b [OwnerSecretBytes]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails since Go 1.24
	return ownerSecret(b)
}

// MakeOwnerSecret takes a copy of bytes that came from a peer. Errors: ErrInvalid.
func MakeOwnerSecret(b []byte) (OwnerSecret, error) {
	if len(b) != OwnerSecretBytes {
		return OwnerSecret{}, fmt.Errorf("%w: an owner secret of %d bytes, must have %d", ErrInvalid, len(b), OwnerSecretBytes)
	}
	return ownerSecret([OwnerSecretBytes]byte(b)), nil
}

// IsZero reports whether there is no secret.
func (s OwnerSecret) IsZero() bool { return s.bits == nil }

// Equal compares in constant time. No secret equals nothing.
func (s OwnerSecret) Equal(o OwnerSecret) bool {
	return s.bits != nil && o.bits != nil && subtle.ConstantTimeCompare(s.Bytes(), o.Bytes()) == 1
}

// Bytes returns a copy for a message or a hash; nil when there is no secret.
func (s OwnerSecret) Bytes() []byte {
	if s.bits == nil {
		return nil
	}
	b := s.bits()
	return b[:]
}

const hiddenSecret = "(owner secret)"

// Format is fmt.Formatter's, for every verb.
func (OwnerSecret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, hiddenSecret) }

// MarshalText is for encoders of text, such as JSON's.
func (OwnerSecret) MarshalText() ([]byte, error) { return []byte(hiddenSecret), nil }

// EncodeHex is the one way to write it down: for its file.
func (s OwnerSecret) EncodeHex() string { return hex.EncodeToString(s.Bytes()) }

// DecodeOwnerSecret reads what EncodeHex wrote. Errors: ErrInvalid, which says
// nothing of the content.
func DecodeOwnerSecret(text string) (OwnerSecret, error) {
	if len(text) != 2*OwnerSecretBytes {
		return OwnerSecret{}, fmt.Errorf("%w: an owner secret has %d characters, must have %d hexadecimal digits", ErrInvalid, len(text), 2*OwnerSecretBytes)
	}
	b, err := hex.DecodeString(text)
	if err != nil {
		return OwnerSecret{}, fmt.Errorf("%w: an owner secret has %d hexadecimal digits; there is something else among them", ErrInvalid, 2*OwnerSecretBytes)
	}
	return MakeOwnerSecret(b)
}
