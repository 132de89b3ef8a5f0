package core

import (
	"crypto/hmac"
	"crypto/sha256"
	"testing"

	"pgregory.net/rapid"
)

// A token is the HMAC that the standard library makes, whatever the message's length.
func TestMac(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var key [SecretBytes]byte
		copy(key[:], rapid.SliceOfN(rapid.Byte(), SecretBytes, SecretBytes).Draw(t, "key"))
		label := rapid.StringN(0, 40, 60).Draw(t, "label")
		parts := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 80), 0, 4).Draw(t, "parts")
		m := hmac.New(sha256.New, key[:])
		m.Write([]byte(label))
		for _, p := range parts {
			m.Write(p)
		}
		if got := mac(&key, label, parts...); !hmac.Equal(got[:], m.Sum(nil)) {
			t.Errorf("key %x, label %q, parts %x: %x", key, label, parts, got)
		}
	})
}
