package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/xcena-dev/maru/internal/base"
)

func diffExtra(a, b map[string]string) []Difference {
	names := slices.Sorted(maps.Keys(a))
	for n := range b {
		if _, both := a[n]; !both {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	var out []Difference
	for _, n := range names {
		x, inA := a[n]
		y, inB := b[n]
		if inA && inB && x == y {
			continue
		}
		d := Difference{Field: "extra." + n, A: "absent", B: "absent"}
		if inA {
			d.A = show(x)
		}
		if inB {
			d.B = show(y)
		}
		out = append(out, d)
	}
	return out
}

// Extra is content of a chunk that is no token: a multimodal input, an adapter
// chosen by the request (ID-04).
type Extra struct {
	// Kind says what it is: "mm", "lora", "embeds". 1 to 64 bytes of UTF-8.
	Kind string
	// ID identifies the content: a digest, or an identifier that the operator
	// trusts. 1 to 4096 bytes.
	ID []byte
	// Offset is its place relative to the chunk's first token; it can begin before.
	Offset int64
}

// MaxExtrasBytes bounds the encoded extra keys of one chunk.
const MaxExtrasBytes = 64 << 10

type extraRow struct {
	_      struct{} `cbor:",toarray"`
	Kind   string
	ID     []byte
	Offset int64
}

// EncodeExtras returns the canonical CBOR of a chunk's extra keys, in the order
// given, which the adapter keeps stable; nil for none.
//
// Errors: base.ErrInvalid.
func EncodeExtras(extras []Extra) ([]byte, error) {
	if len(extras) == 0 {
		return nil, nil
	}
	rows := make([]extraRow, len(extras))
	for i, e := range extras {
		if e.Kind == "" || len(e.Kind) > 64 || !utf8.ValidString(e.Kind) {
			return nil, fmt.Errorf("%w: extra key %d: kind %.80q must be UTF-8 of 1 to 64 bytes", base.ErrInvalid, i, e.Kind)
		}
		if len(e.ID) == 0 || len(e.ID) > MaxTextBytes {
			return nil, fmt.Errorf("%w: extra key %d (%s): id has %d bytes, 1 to %d are allowed", base.ErrInvalid, i, e.Kind, len(e.ID), MaxTextBytes)
		}
		rows[i] = extraRow{Kind: e.Kind, ID: e.ID, Offset: e.Offset}
	}
	b, err := encMode.Marshal(rows)
	if err != nil {
		return nil, fmt.Errorf("%w: encode extra keys: %w", base.ErrInternal, err)
	}
	if len(b) > MaxExtrasBytes {
		return nil, fmt.Errorf("%w: extra keys of a chunk have %d bytes encoded, at most %d are allowed", base.ErrInvalid, len(b), MaxExtrasBytes)
	}
	return b, nil
}

// nodeLocal are the fields of a model's configuration that say where it lies or
// who wrote it, and nothing about its content (ID-11).
var nodeLocal = []string{"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}

// FingerprintConfig returns the SHA-256, in hexadecimal, of a model's
// configuration (nested maps, lists, strings, integers, floats, booleans, null)
// without node-local fields at any depth.
//
// Errors: base.ErrInvalid when a value has no canonical encoding.
func FingerprintConfig(config map[string]any) (string, error) {
	b, err := encMode.Marshal(portable(config, 0))
	if err != nil {
		return "", fmt.Errorf("%w: model configuration: %w", base.ErrInvalid, err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

func portable(v any, depth int) any {
	if depth > 64 {
		return v
	}
	switch t := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(t))
		for k, e := range t {
			if !slices.Contains(nodeLocal, k) {
				out[k] = portable(e, depth+1)
			}
		}
		return out
	case []any:
		out := make([]any, len(t))
		for i := range t {
			out[i] = portable(t[i], depth+1)
		}
		return out
	}
	return v
}
