package keys

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

var update = flag.Bool("update", false, "write testdata/identity_vectors.json anew")

const vectorsPath = "testdata/identity_vectors.json"

// vectors are read by python/tests/test_keys.py as well, whose code shares
// nothing with this package.
type vectors struct {
	Format          int               `json:"format"`
	OpaqueNamespace string            `json:"opaque_namespace_hex"`
	Namespaces      []namespaceVector `json:"namespaces"`
	Chains          []chainVector     `json:"chains"`
	Opaque          []opaqueVector    `json:"opaque"`
	Configs         []configVector    `json:"configs"`
	Pieces          []pieceVector     `json:"pieces"`
}

type namespaceVector struct {
	Name   string          `json:"name"`
	Fields json.RawMessage `json:"fields"`
	CBOR   string          `json:"cbor_hex"`
	ID     string          `json:"id_hex"`
}

type chainVector struct {
	Name      string        `json:"name"`
	Namespace string        `json:"namespace_id_hex"`
	Salt      string        `json:"salt_hex"`
	Root      string        `json:"root_hex"`
	Shard     uint16        `json:"shard"`
	Part      uint16        `json:"part"`
	Chunks    []chunkVector `json:"chunks"`
}

type chunkVector struct {
	Tokens []uint32      `json:"tokens"`
	Extras []extraVector `json:"extras"`
	CBOR   string        `json:"extras_cbor_hex"`
	Link   string        `json:"link_hex"`
	Key    string        `json:"key_hex"`
	Parent string        `json:"parent_hex"`
}

type extraVector struct {
	Kind   string `json:"kind"`
	ID     string `json:"id_hex"`
	Offset int64  `json:"offset"`
}

type opaqueVector struct {
	Tag string `json:"tag"`
	Key string `json:"key_base64"`
	Hex string `json:"object_key_hex"`
}

type configVector struct {
	JSON        json.RawMessage `json:"config"`
	Fingerprint string          `json:"fingerprint"`
}

type pieceVector struct {
	Runs       []uint64 `json:"runs"`
	Piece      uint32   `json:"piece_bytes"` // 0: refused
	ValueBytes uint64   `json:"value_bytes"`
	PageBytes  uint64   `json:"page_bytes"`
}

func testNamespaces() []Namespace {
	llama := Namespace{
		Format: FormatVersion, Weights: "llama-3.1-8b@0e9e39f", Engine: "vllm", EngineFormat: 1,
		ModelDType: "bfloat16", KVDType: "bfloat16", Layout: "LBNHC", BlockTokens: 16, KernelBlockTokens: 16,
		ChunkTokens: 256, KVHeads: 8, HeadSize: 128, Layers: []uint32{32}, RunBytes: []uint64{65536},
		PieceBytes: 16384, TensorParallel: 1, PipelineParallel: 1, DecodeContextParallel: 1, PrefillContextParallel: 1,
	}
	cpu := llama
	cpu.Tenant, cpu.ISA, cpu.Layout, cpu.ModelDType = "müller", "avx512", "LBHNC", "float32"
	cpu.Extra = map[string]string{"zz": "last", "a": "first in length order", "kv_group": ""}
	big := llama
	big.Layers, big.RunBytes = []uint32{24, 8, 24, 8}, []uint64{1 << 33, 65535, 65536, 23, 24, 255, 256}
	big.Adapter, big.Overrides, big.Speculative = "sha256:77", `{"rope_theta":1000000.0}`, "eagle@1"
	return []Namespace{llama, cpu, big, {Format: FormatVersion, Weights: "w", Engine: "e"}}
}

func buildVectors(t *testing.T) vectors {
	t.Helper()
	v := vectors{Format: FormatVersion, OpaqueNamespace: hex.EncodeToString(OpaqueNamespace())}
	var ids []base.NamespaceID
	for i, n := range testNamespaces() {
		b, err := n.Encode()
		if err != nil {
			t.Fatal(err)
		}
		fields, err := json.Marshal(n)
		if err != nil {
			t.Fatal(err)
		}
		id := base.NamespaceOf(b)
		ids = append(ids, id)
		v.Namespaces = append(v.Namespaces, namespaceVector{
			Name: []string{"llama", "cpu", "big", "least"}[i], Fields: fields,
			CBOR: hex.EncodeToString(b), ID: hex.EncodeToString(id[:]),
		})
	}
	long := make([]uint32, 256)
	for i := range long {
		long[i] = uint32(i*2654435761) ^ 7 //nolint:gosec // a spread of values
	}
	image := []Extra{{Kind: "mm", ID: []byte("image-1"), Offset: -12}, {Kind: "lora", ID: []byte{0, 255, 1}, Offset: 0}}
	far := []Extra{{Kind: "mm", ID: bytes.Repeat([]byte{9}, 300), Offset: 1 << 40}}
	type step struct {
		tokens []uint32
		extras []Extra
	}
	for _, c := range []struct {
		name        string
		ns          base.NamespaceID
		salt        string
		shard, part uint16
		steps       []step
	}{
		{"plain", ids[0], "", 0, base.PartAllLayers, []step{{long, nil}, {long, nil}, {[]uint32{0}, nil}}},
		{"salted", ids[0], "tenant-7", 3, base.PartAllLayers, []step{{long, nil}, {[]uint32{1, 2, 3}, nil}}},
		{"extras", ids[1], "", 65535, 17, []step{{[]uint32{5, 6}, image}, {[]uint32{5, 6}, nil}, {[]uint32{7}, far}}},
	} {
		root, err := Root(c.ns, []byte(c.salt))
		if err != nil {
			t.Fatal(err)
		}
		cv := chainVector{
			Name: c.name, Namespace: hex.EncodeToString(c.ns[:]), Salt: hex.EncodeToString([]byte(c.salt)),
			Root: hex.EncodeToString(root[:]), Shard: c.shard, Part: c.part,
		}
		chain := NewChain(root)
		for _, s := range c.steps {
			extras, err := EncodeExtras(s.extras)
			if err != nil {
				t.Fatal(err)
			}
			link, err := chain.Next(s.tokens, extras)
			if err != nil {
				t.Fatal(err)
			}
			key, parent := link.Key(c.shard, c.part), chain.Parent()
			kv := chunkVector{
				Tokens: s.tokens, Extras: []extraVector{}, CBOR: hex.EncodeToString(extras), Link: hex.EncodeToString(link[:]),
				Key: hex.EncodeToString(key[:]), Parent: hex.EncodeToString(parent[:]),
			}
			for _, e := range s.extras {
				kv.Extras = append(kv.Extras, extraVector{e.Kind, hex.EncodeToString(e.ID), e.Offset})
			}
			cv.Chunks = append(cv.Chunks, kv)
		}
		v.Chains = append(v.Chains, cv)
	}
	for _, o := range []struct {
		tag Tag
		key string
	}{
		{TagString, "5"}, {TagInt, "5"}, {TagBytes, "5"}, {TagInt, "-17"}, {TagInt, "0"},
		{TagInt, "340282366920938463463374607431768211456"}, {TagString, "schlüssel/模型@0"},
		{TagBytes, "\x00\xff"}, {TagString, string(bytes.Repeat([]byte("k"), MaxOpaqueKeyBytes))},
		{TagString, "meta-llama/Llama-3.1-8B@1@0@3f9c0a77b1e2@bfloat16"},
	} {
		k, err := Opaque(o.tag, []byte(o.key))
		if err != nil {
			t.Fatal(err)
		}
		v.Opaque = append(v.Opaque, opaqueVector{string(rune(o.tag)), base64.StdEncoding.EncodeToString([]byte(o.key)), hex.EncodeToString(k[:])})
	}
	for _, c := range []string{
		`{}`,
		`{"_name_or_path":"/models/a","hidden_size":4096,"rope_theta":500000.0,"rms_norm_eps":1e-05,"tie_word_embeddings":false,"rope_scaling":null}`,
		`{"architectures":["LlamaForCausalLM"],"text_config":{"transformers_version":"4.57","name_or_path":"x","n":-1},"initializer_range":0.02,"big":9007199254740993,"half":0.5,"single":3.4028234663852886e+38,"tiny":5e-324}`,
	} {
		fp, err := FingerprintConfig(decodeJSON(t, []byte(c)))
		if err != nil {
			t.Fatal(err)
		}
		v.Configs = append(v.Configs, configVector{json.RawMessage(c), fp})
	}
	for _, runs := range [][]uint64{{65536}, {64}, {256}, {96}, {100}, {18432}, {64576}, {131072, 65536}, {1}, {1 << 20}, {64 * 1009 * 1013}, {999983}, {4096, 96}} {
		p, err := PieceBytes(runs...)
		pv := pieceVector{Runs: runs, Piece: p}
		if err == nil {
			pv.ValueBytes = runs[0] * 37
			if pv.PageBytes, err = EnginePageBytes(pv.ValueBytes, p); err != nil {
				t.Fatal(err)
			}
		}
		v.Pieces = append(v.Pieces, pv)
	}
	return v
}

// decodeJSON keeps integers apart from floats, as Python does.
func decodeJSON(t *testing.T, b []byte) map[string]any {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var m map[string]any
	if err := dec.Decode(&m); err != nil {
		t.Fatal(err)
	}
	return numbers(t, m).(map[string]any)
}

func numbers(t *testing.T, v any) any {
	switch x := v.(type) {
	case json.Number:
		if i, err := x.Int64(); err == nil {
			return i
		}
		f, err := x.Float64()
		if err != nil {
			t.Fatal(err)
		}
		return f
	case map[string]any:
		for k := range x {
			x[k] = numbers(t, x[k])
		}
	case []any:
		for i := range x {
			x[i] = numbers(t, x[i])
		}
	}
	return v
}

func TestGoldenVectors(t *testing.T) {
	got, err := json.MarshalIndent(buildVectors(t), "", " ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	if *update {
		if err := os.WriteFile(vectorsPath, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(vectorsPath)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("identities have changed: every stored object would be lost. If that is meant, raise FormatVersion and run with -update")
	}
}
