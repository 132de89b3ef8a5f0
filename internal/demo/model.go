package demo

import (
	"encoding/binary"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

// Shape is the KV geometry of a model in one engine: an object is one chunk of
// tokens over all layers, block-major [block][layer][kv head][K and V][token][head dim].
type Shape struct {
	Layers      int
	KVHeads     int
	HeadDim     int // elements
	DTypeBytes  int
	BlockTokens int
	ChunkTokens int
}

// Llama31 is Llama-3.1-8B in bf16 with chunks of 256 tokens (32 MiB an object)
// and only its first layers, so that an object has 1/scale of its bytes.
func Llama31(scale int) (Shape, error) {
	const layers = 32
	if scale < 1 || scale > layers || layers%scale != 0 {
		return Shape{}, fmt.Errorf("%w: scale %d must be a divisor of the model's %d layers", base.ErrInvalid, scale, layers)
	}
	return Shape{Layers: layers / scale, KVHeads: 8, HeadDim: 128, DTypeBytes: 2, BlockTokens: 16, ChunkTokens: 256}, nil
}

// RunBytes is one block of one layer, contiguous.
func (s Shape) RunBytes() int { return s.KVHeads * 2 * s.BlockTokens * s.HeadDim * s.DTypeBytes }

// ChunkBlocks is the count of blocks of an object.
func (s Shape) ChunkBlocks() int { return s.ChunkTokens / s.BlockTokens }

// ChunkBytes is the size of an object.
func (s Shape) ChunkBytes() int { return s.ChunkBlocks() * s.Layers * s.RunBytes() }

// namespace is what all workers share.
func (s Shape) namespace(piece uint32) keys.Namespace {
	return keys.Namespace{
		Format: keys.FormatVersion, Weights: "demo/llama-3.1-8b", Engine: "maru-demo",
		ModelDType: "bfloat16", KVDType: "bfloat16", BlockTokens: uint32(s.BlockTokens), //nolint:gosec // small constants
		ChunkTokens: uint32(s.ChunkTokens), KVHeads: uint32(s.KVHeads), HeadSize: uint32(s.HeadDim), //nolint:gosec // small constants
		Layers: []uint32{uint32(s.Layers)}, RunBytes: []uint64{uint64(s.RunBytes())}, PieceBytes: piece, //nolint:gosec // small constants
		TensorParallel: 1, PipelineParallel: 1,
	}
}

// Chain is a prompt: Shared leading chunks that every chain begins with (a system
// prompt), then Own chunks of its own.
type Chain struct {
	ID     int `json:"id"`
	Shared int `json:"shared"`
	Own    int `json:"own"`
}

// link is one chunk of a chain: its key, its parent's digest.
type link struct {
	key    base.Key
	parent base.Digest
}

// links computes a chain's keys from made-up tokens.
func (s Shape) links(ns base.NamespaceID, c Chain) ([]link, error) {
	root, err := keys.Root(ns, nil)
	if err != nil {
		return nil, err
	}
	chain := keys.NewChain(root)
	tokens := make([]uint32, s.ChunkTokens)
	out := make([]link, 0, c.Shared+c.Own)
	for i := range c.Shared + c.Own {
		stream := uint64(1 + c.ID)
		if i < c.Shared {
			stream = 0
		}
		x := splitmix(stream<<32 | uint64(i)) //nolint:gosec // a count
		for t := range tokens {
			tokens[t] = uint32(x.next() % 128256) //nolint:gosec // the vocabulary of the model
		}
		l, err := chain.Next(tokens, nil)
		if err != nil {
			return nil, err
		}
		out = append(out, link{key: l.Key(0, base.PartAllLayers), parent: chain.Parent()})
	}
	return out, nil
}

// splitmix is a small generator of well mixed 64-bit numbers.
type splitmix uint64

func (s *splitmix) next() uint64 {
	*s += 0x9e3779b97f4a7c15
	z := uint64(*s)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// fill writes the content of one run: a function of key and place alone, so that
// any worker can say what another one must have stored.
func fill(dst []byte, key base.Key, block, layer int) {
	x := contentSeed(key, block, layer)
	for i := 0; i+8 <= len(dst); i += 8 {
		binary.LittleEndian.PutUint64(dst[i:], x.next())
	}
}

// wrong counts the bytes that differ from what fill writes.
func wrong(got []byte, key base.Key, block, layer int) int {
	x := contentSeed(key, block, layer)
	bad := 0
	var want [8]byte
	for i := 0; i+8 <= len(got); i += 8 {
		v := x.next()
		if binary.LittleEndian.Uint64(got[i:]) == v {
			continue
		}
		binary.LittleEndian.PutUint64(want[:], v)
		for j := range want {
			if got[i+j] != want[j] {
				bad++
			}
		}
	}
	return bad
}

func contentSeed(key base.Key, block, layer int) splitmix {
	return splitmix(binary.LittleEndian.Uint64(key[:8]) ^ uint64(block)<<40 ^ uint64(layer)<<52) //nolint:gosec // small counts
}
