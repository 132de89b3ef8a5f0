package keys

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/fxamacker/cbor/v2"

	"github.com/xcena-dev/maru/internal/base"
)

// FormatVersion is the version of the object format: how bytes lie in an object
// and how its key is made. It is part of every namespace, so that a change makes
// other keys and never a wrong hit. The storage backend is deliberately no part
// of a namespace: one object format serves all of them (ID-12 is superseded).
const FormatVersion = 1

// Limits of a namespace.
const (
	MaxNamespaceBytes = 64 << 10
	MaxTextBytes      = 4096
	MaxListCount      = 4096
	MaxExtraCount     = 256
	maxDepth          = 8
)

// Namespace says which objects can stand for one another: the same weights, read
// by the same geometry (ID-01..14). Model paths, node-local fields, ranks, ports
// and the backend are no part of it (ID-07, ID-11).
//
// Two values with equal fields have equal encodings and one identity; a
// difference in any field makes another identity.
type Namespace struct {
	// Format is FormatVersion.
	Format uint32 `cbor:"format" json:"format"`
	// Weights is what the operator says about the weights: an immutable revision,
	// never a path or a branch (ID-09). Required.
	Weights string `cbor:"weights" json:"weights"`
	// Tenant separates applications that must not see each other's content.
	Tenant string `cbor:"tenant" json:"tenant"`
	// Adapter is the digest of an adapter that all requests use; "" is none.
	Adapter string `cbor:"adapter" json:"adapter"`
	// Engine is the engine's family ("vllm") and EngineFormat counts the releases
	// that changed the content of its KV blocks.
	Engine       string `cbor:"engine" json:"engine"`
	EngineFormat uint32 `cbor:"engine_format" json:"engine_format"`
	// Config is the fingerprint of the model's configuration without node-local
	// fields (FingerprintConfig), in hexadecimal; "" when the weights say it all.
	Config string `cbor:"config" json:"config"`
	// Overrides are configuration overrides of the engine that change values
	// (rope, maximum position), in a canonical spelling of the adapter.
	Overrides    string `cbor:"overrides" json:"overrides"`
	Quantization string `cbor:"quantization" json:"quantization"`
	ModelDType   string `cbor:"model_dtype" json:"model_dtype"`
	KVDType      string `cbor:"kv_dtype" json:"kv_dtype"`
	// KVScales says where the scales of a quantised KV cache come from.
	KVScales    string `cbor:"kv_scales" json:"kv_scales"`
	Speculative string `cbor:"speculative" json:"speculative"`
	// Layout is the order of axes in the engine's KV tensors ("LBHNC"); ISA is the
	// instruction set whose packing a CPU engine uses, "" on other devices.
	Layout string `cbor:"layout" json:"layout"`
	ISA    string `cbor:"isa" json:"isa"`
	// Tokens of a block, of a block of the attention kernel, of a chunk.
	BlockTokens       uint32 `cbor:"block_tokens" json:"block_tokens"`
	KernelBlockTokens uint32 `cbor:"kernel_block_tokens" json:"kernel_block_tokens"`
	ChunkTokens       uint32 `cbor:"chunk_tokens" json:"chunk_tokens"`
	// KVHeads a rank, and HeadSize in elements.
	KVHeads  uint32 `cbor:"kv_heads" json:"kv_heads"`
	HeadSize uint32 `cbor:"head_size" json:"head_size"`
	// Layers are the layer counts, stage by stage and in it group by group.
	Layers []uint32 `cbor:"layers" json:"layers"`
	// RunBytes are the lengths of contiguous runs of a block, one for all or one a
	// layer; PieceBytes is the length of a checksum piece.
	RunBytes   []uint64 `cbor:"run_bytes" json:"run_bytes"`
	PieceBytes uint32   `cbor:"piece_bytes" json:"piece_bytes"`
	// Sizes of the parallel dimensions.
	TensorParallel         uint32 `cbor:"tensor_parallel" json:"tensor_parallel"`
	PipelineParallel       uint32 `cbor:"pipeline_parallel" json:"pipeline_parallel"`
	DecodeContextParallel  uint32 `cbor:"decode_context_parallel" json:"decode_context_parallel"`
	PrefillContextParallel uint32 `cbor:"prefill_context_parallel" json:"prefill_context_parallel"`
	// Extra holds what an adapter has to add without a new format version.
	Extra map[string]string `cbor:"extra" json:"extra"`
}

// reserved is the namespace of opaque values: callers choose its keys.
type reserved struct {
	Format   uint32 `cbor:"format"`
	Reserved string `cbor:"reserved"`
}

const reservedOpaque = "opaque"

// The two modes never fail to build: the options are constants.
var encMode, decMode = func() (cbor.EncMode, cbor.DecMode) {
	eo := cbor.CoreDetEncOptions()
	eo.NilContainers = cbor.NilContainerAsEmpty
	eo.TagsMd = cbor.TagsForbidden
	em, err := eo.EncMode()
	if err != nil {
		panic(err)
	}
	dm, err := cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		MaxNestedLevels:   maxDepth,
		MaxArrayElements:  MaxListCount,
		MaxMapPairs:       MaxListCount,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
		UTF8:              cbor.UTF8RejectInvalid,
	}.DecMode()
	if err != nil {
		panic(err)
	}
	return em, dm
}()

// OpaqueNamespace returns the encoding of the reserved namespace, in which
// MaruHandler's keys live. The caller owns the bytes.
func OpaqueNamespace() []byte {
	b, err := encMode.Marshal(reserved{Format: FormatVersion, Reserved: reservedOpaque})
	if err != nil {
		panic(err) // two constants
	}
	return b
}

// IsOpaque reports whether b is the reserved namespace.
func IsOpaque(b []byte) bool { return bytes.Equal(b, OpaqueNamespace()) }

// Validate reports every field that is outside what is allowed, at once.
//
// Errors: base.ErrInvalid.
func (n *Namespace) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: namespace field %s: %s", base.ErrInvalid, field, fmt.Sprintf(format, args...)))
	}
	if n.Format != FormatVersion {
		bad("format", "version %d, this build writes and reads %d", n.Format, FormatVersion)
	}
	if n.Weights == "" {
		bad("weights", `is empty; name an immutable revision of the weights, for example "llama-3.1-8b@0e9e39f"`)
	}
	if n.Engine == "" {
		bad("engine", `is empty; name the engine's family, for example "vllm"`)
	}
	for _, f := range n.fields() {
		switch v := f.value.(type) {
		case string:
			if len(v) > MaxTextBytes {
				bad(f.name, "has %d bytes, at most %d are allowed", len(v), MaxTextBytes)
			}
			if !utf8.ValidString(v) {
				bad(f.name, "is not UTF-8")
			}
		case []uint32:
			if len(v) > MaxListCount {
				bad(f.name, "has %d items, at most %d are allowed", len(v), MaxListCount)
			}
		case []uint64:
			if len(v) > MaxListCount {
				bad(f.name, "has %d items, at most %d are allowed", len(v), MaxListCount)
			}
		}
	}
	if len(n.Extra) > MaxExtraCount {
		bad("extra", "has %d entries, at most %d are allowed", len(n.Extra), MaxExtraCount)
	}
	for k, v := range n.Extra {
		if k == "" || len(k) > MaxTextBytes || len(v) > MaxTextBytes || !utf8.ValidString(k) || !utf8.ValidString(v) {
			bad("extra", "entry %.40q: names and values are UTF-8 of 1 to %d bytes", k, MaxTextBytes)
		}
	}
	return errors.Join(errs...)
}

// Encode returns the canonical CBOR. The caller owns the bytes.
//
// Errors: base.ErrInvalid for what Validate refuses.
func (n *Namespace) Encode() ([]byte, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	b, err := encMode.Marshal(n)
	if err != nil {
		return nil, fmt.Errorf("%w: encode namespace: %w", base.ErrInternal, err)
	}
	if len(b) > MaxNamespaceBytes {
		return nil, fmt.Errorf("%w: namespace has %d bytes encoded, at most %d are allowed", base.ErrInvalid, len(b), MaxNamespaceBytes)
	}
	return b, nil
}

// ID returns the namespace's identity: the SHA-256 of its encoding.
func (n *Namespace) ID() (base.NamespaceID, error) {
	b, err := n.Encode()
	if err != nil {
		return base.NamespaceID{}, err
	}
	return base.NamespaceOf(b), nil
}

// ParseNamespace reads an encoding that somebody else made and refuses every one
// that Encode would not have made, byte for byte.
//
// Errors: base.ErrInvalid (not CBOR, too large, a field out of range),
// base.ErrMismatch (well formed, but of another format version or spelled
// otherwise).
func ParseNamespace(b []byte) (*Namespace, error) {
	if err := CheckCanonical(b); err != nil {
		return nil, err
	}
	if IsOpaque(b) {
		return nil, fmt.Errorf("%w: the reserved namespace of opaque values has no geometry", base.ErrMismatch)
	}
	var version struct {
		Format uint32 `cbor:"format"`
	}
	if err := lenient.Unmarshal(b, &version); err == nil && version.Format != FormatVersion {
		return nil, fmt.Errorf("%w: namespace of format version %d, this build reads %d", base.ErrMismatch, version.Format, FormatVersion)
	}
	n := new(Namespace)
	if err := decMode.Unmarshal(b, n); err != nil {
		return nil, fmt.Errorf("%w: namespace: %w", base.ErrInvalid, err)
	}
	again, err := n.Encode()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, b) {
		return nil, fmt.Errorf("%w: namespace is not spelled as this format version spells it (a field is missing?)", base.ErrMismatch)
	}
	return n, nil
}

// lenient reads the version of a namespace whose other fields are unknown here.
var lenient = func() cbor.DecMode {
	dm, err := cbor.DecOptions{MaxNestedLevels: maxDepth, MaxArrayElements: MaxListCount, MaxMapPairs: MaxListCount}.DecMode()
	if err != nil {
		panic(err)
	}
	return dm
}()

// CheckCanonical refuses bytes that are not one deterministic CBOR map within the
// limits. A server needs no more than this of a namespace of an engine that it
// does not know: equal bytes, equal identity.
//
// Errors: base.ErrInvalid.
func CheckCanonical(b []byte) error {
	if len(b) == 0 || len(b) > MaxNamespaceBytes {
		return fmt.Errorf("%w: namespace has %d bytes, 1 to %d are allowed", base.ErrInvalid, len(b), MaxNamespaceBytes)
	}
	if b[0]>>5 != 5 {
		return fmt.Errorf("%w: namespace is no CBOR map", base.ErrInvalid)
	}
	return checkDeterministic("namespace", b)
}

// checkDeterministic decodes and encodes again: only the shortest, sorted, tagless
// spelling comes back as it was.
func checkDeterministic(what string, b []byte) error {
	var v any
	if err := decMode.Unmarshal(b, &v); err != nil {
		return fmt.Errorf("%w: %s: %w", base.ErrInvalid, what, err)
	}
	again, err := encMode.Marshal(v)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", base.ErrInvalid, what, err)
	}
	if !bytes.Equal(again, b) {
		return fmt.Errorf("%w: %s is not deterministic CBOR (RFC 8949, 4.2.1)", base.ErrInvalid, what)
	}
	return nil
}

// field is one field of a namespace for people.
type field struct {
	name  string
	value any
}

func (n *Namespace) fields() []field {
	return []field{
		{"format", n.Format}, {"weights", n.Weights}, {"tenant", n.Tenant}, {"adapter", n.Adapter},
		{"engine", n.Engine}, {"engine_format", n.EngineFormat}, {"config", n.Config},
		{"overrides", n.Overrides}, {"quantization", n.Quantization}, {"model_dtype", n.ModelDType},
		{"kv_dtype", n.KVDType}, {"kv_scales", n.KVScales}, {"speculative", n.Speculative},
		{"layout", n.Layout}, {"isa", n.ISA}, {"block_tokens", n.BlockTokens},
		{"kernel_block_tokens", n.KernelBlockTokens}, {"chunk_tokens", n.ChunkTokens},
		{"kv_heads", n.KVHeads}, {"head_size", n.HeadSize}, {"layers", n.Layers}, {"run_bytes", n.RunBytes},
		{"piece_bytes", n.PieceBytes}, {"tensor_parallel", n.TensorParallel},
		{"pipeline_parallel", n.PipelineParallel}, {"decode_context_parallel", n.DecodeContextParallel},
		{"prefill_context_parallel", n.PrefillContextParallel},
	}
}

// Difference is one field in which two namespaces differ.
type Difference struct{ Field, A, B string }

// String shows field: a / b.
func (d Difference) String() string { return fmt.Sprintf("%s: %s / %s", d.Field, d.A, d.B) }

// Diff names every field in which two namespaces differ, in the order of the
// struct, Extra last and sorted. Equal namespaces give nil.
func Diff(a, b *Namespace) []Difference {
	var out []Difference
	fa, fb := a.fields(), b.fields()
	for i := range fa {
		if x, y := fmt.Sprintf("%#v", fa[i].value), fmt.Sprintf("%#v", fb[i].value); x != y {
			out = append(out, Difference{fa[i].name, show(fa[i].value), show(fb[i].value)})
		}
	}
	return append(out, diffExtra(a.Extra, b.Extra)...)
}

func show(v any) string {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprint(v)
}
