package keys

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
)

func TestNamespaceRoundTrip(t *testing.T) {
	for i, n := range testNamespaces() {
		b, err := n.Encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParseNamespace(b)
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		if d := Diff(&n, back); d != nil {
			// A nil list and an empty one are one value on the wire.
			for _, x := range d {
				if x.A != "[]" || x.B != "[]" {
					t.Errorf("%d: %v", i, x)
				}
			}
		}
	}
}

func TestEveryFieldIsIdentity(t *testing.T) {
	n := testNamespaces()[0]
	id, err := n.ID()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[base.NamespaceID]string{id: "unchanged"}
	for _, change := range []struct {
		field string
		apply func(*Namespace)
	}{
		{"weights", func(n *Namespace) { n.Weights += "x" }},
		{"tenant", func(n *Namespace) { n.Tenant = "x" }},
		{"adapter", func(n *Namespace) { n.Adapter = "x" }},
		{"engine", func(n *Namespace) { n.Engine = "x" }},
		{"engine_format", func(n *Namespace) { n.EngineFormat++ }},
		{"config", func(n *Namespace) { n.Config = "x" }},
		{"overrides", func(n *Namespace) { n.Overrides = "x" }},
		{"quantization", func(n *Namespace) { n.Quantization = "x" }},
		{"model_dtype", func(n *Namespace) { n.ModelDType = "x" }},
		{"kv_dtype", func(n *Namespace) { n.KVDType = "x" }},
		{"kv_scales", func(n *Namespace) { n.KVScales = "x" }},
		{"speculative", func(n *Namespace) { n.Speculative = "x" }},
		{"layout", func(n *Namespace) { n.Layout = "x" }},
		{"isa", func(n *Namespace) { n.ISA = "x" }},
		{"block_tokens", func(n *Namespace) { n.BlockTokens++ }},
		{"kernel_block_tokens", func(n *Namespace) { n.KernelBlockTokens++ }},
		{"chunk_tokens", func(n *Namespace) { n.ChunkTokens++ }},
		{"kv_heads", func(n *Namespace) { n.KVHeads++ }},
		{"head_size", func(n *Namespace) { n.HeadSize++ }},
		{"layers", func(n *Namespace) { n.Layers = []uint32{33} }},
		{"run_bytes", func(n *Namespace) { n.RunBytes = []uint64{1} }},
		{"piece_bytes", func(n *Namespace) { n.PieceBytes++ }},
		{"tensor_parallel", func(n *Namespace) { n.TensorParallel++ }},
		{"pipeline_parallel", func(n *Namespace) { n.PipelineParallel++ }},
		{"decode_context_parallel", func(n *Namespace) { n.DecodeContextParallel++ }},
		{"prefill_context_parallel", func(n *Namespace) { n.PrefillContextParallel++ }},
		{"extra.k", func(n *Namespace) { n.Extra = map[string]string{"k": "v"} }},
	} {
		m := n
		change.apply(&m)
		other, err := m.ID()
		if err != nil {
			t.Fatal(err)
		}
		if was, dup := seen[other]; dup {
			t.Errorf("%s: same identity as %s", change.field, was)
		}
		seen[other] = change.field
		d := Diff(&n, &m)
		if len(d) != 1 || d[0].Field != change.field {
			t.Errorf("%s: differences %v", change.field, d)
		}
	}
	if len(seen) != 1+len(n.fields())-1+1 { // every field but format, and extra
		t.Errorf("%d fields tried, namespace has %d", len(seen)-1, len(n.fields()))
	}
}

func TestNamespaceRefusals(t *testing.T) {
	good := testNamespaces()[0]
	enc, err := good.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Namespace){
		"weights": func(n *Namespace) { n.Weights = "" },
		"engine":  func(n *Namespace) { n.Engine = "" },
		"format":  func(n *Namespace) { n.Format = 2 },
		"tenant":  func(n *Namespace) { n.Tenant = "\xff" },
		"layout":  func(n *Namespace) { n.Layout = strings.Repeat("x", MaxTextBytes+1) },
		"layers":  func(n *Namespace) { n.Layers = make([]uint32, MaxListCount+1) },
		"extra":   func(n *Namespace) { n.Extra = map[string]string{"": "v"} },
	} {
		n := good
		change(&n)
		_, err := n.Encode()
		if !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "field "+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	two := good
	two.Weights, two.Engine = "", ""
	if err := two.Validate(); !strings.Contains(err.Error(), "field weights") || !strings.Contains(err.Error(), "field engine") {
		t.Errorf("not every problem is reported: %v", err)
	}

	longInt := bytes.Replace(enc, []byte("\x68kv_heads\x08"), []byte("\x68kv_heads\x18\x08"), 1)
	unknown, err := encMode.Marshal(map[string]any{"format": 1, "weights": "w", "color": "red"})
	if err != nil {
		t.Fatal(err)
	}
	partial, err := encMode.Marshal(map[string]any{"format": 1, "weights": "w", "engine": "e"})
	if err != nil {
		t.Fatal(err)
	}
	newer, err := encMode.Marshal(map[string]any{"format": 2, "weights": "w", "other": 1})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		b    []byte
		want error
	}{
		"empty":        {nil, base.ErrInvalid},
		"huge":         {make([]byte, MaxNamespaceBytes+1), base.ErrInvalid},
		"list":         {[]byte{0x80}, base.ErrInvalid},
		"truncated":    {enc[:len(enc)-1], base.ErrInvalid},
		"trailing":     {append(bytes.Clone(enc), 0), base.ErrInvalid},
		"long integer": {longInt, base.ErrInvalid},
		"unsorted":     {[]byte{0xa2, 0x61, 'b', 1, 0x61, 'a', 1}, base.ErrInvalid},
		"duplicate":    {[]byte{0xa2, 0x61, 'a', 1, 0x61, 'a', 1}, base.ErrInvalid},
		"indefinite":   {[]byte{0xbf, 0x61, 'a', 1, 0xff}, base.ErrInvalid},
		"tag":          {[]byte{0xa1, 0x61, 'a', 0xc1, 1}, base.ErrInvalid},
		"deep":         {append([]byte{0xa1, 0x61, 'a'}, bytes.Repeat([]byte{0x81}, 100)...), base.ErrInvalid},
		"unknown":      {unknown, base.ErrInvalid},
		"partial":      {partial, base.ErrMismatch},
		"newer":        {newer, base.ErrMismatch},
		"reserved":     {OpaqueNamespace(), base.ErrMismatch},
	} {
		if _, err := ParseNamespace(c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if bytes.Equal(longInt, enc) {
		t.Fatal("the case 'long integer' changes nothing")
	}
	if err := CheckCanonical(OpaqueNamespace()); err != nil || !IsOpaque(OpaqueNamespace()) || IsOpaque(enc) {
		t.Errorf("reserved namespace: %v", err)
	}
}

func TestChainIsIncremental(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		root, err := Root(base.NamespaceOf([]byte("n")), rapid.SliceOfN(rapid.Byte(), 0, 20).Draw(rt, "salt"))
		if err != nil {
			rt.Fatal(err)
		}
		chunks := rapid.SliceOfN(rapid.SliceOfN(rapid.Uint32(), 1, 9), 1, 9).Draw(rt, "chunks")
		cut := rapid.IntRange(0, len(chunks)-1).Draw(rt, "cut")
		whole := NewChain(root)
		var links []Link
		for _, c := range chunks {
			l, err := whole.Next(c, nil)
			if err != nil {
				rt.Fatal(err)
			}
			links = append(links, l)
		}
		from := root
		if cut > 0 {
			from = links[cut-1]
		}
		resumed := Resume(from, uint64(cut))
		for i := cut; i < len(chunks); i++ {
			var packed []byte
			for _, tok := range chunks[i] {
				packed = append(packed, byte(tok), byte(tok>>8), byte(tok>>16), byte(tok>>24))
			}
			l, err := resumed.NextPacked(packed, nil)
			if err != nil || l != links[i] {
				rt.Fatalf("chunk %d differs after a resume: %v", i, err)
			}
			want := base.Digest{}
			if i > 0 {
				want = links[i-1].Digest()
			}
			if resumed.Parent() != want {
				rt.Fatalf("chunk %d: parent %x, want %x", i, resumed.Parent(), want)
			}
		}
		// One changed token changes this chunk and all behind it, none before it.
		at := rapid.IntRange(0, len(chunks)-1).Draw(rt, "at")
		chunks[at][0] ^= 1
		other := NewChain(root)
		for i, c := range chunks {
			l, err := other.Next(c, nil)
			if err != nil {
				rt.Fatal(err)
			}
			if (l == links[i]) != (i < at) {
				rt.Fatalf("token changed in chunk %d: chunk %d equal is %v", at, i, l == links[i])
			}
		}
	})
}

func TestChainRefusals(t *testing.T) {
	c := NewChain(Link{1})
	for name, f := range map[string]func() error{
		"no tokens":    func() error { _, err := c.Next(nil, nil); return err },
		"too many":     func() error { _, err := c.Next(make([]uint32, MaxChunkTokens+1), nil); return err },
		"odd bytes":    func() error { _, err := c.NextPacked([]byte{1, 2, 3}, nil); return err },
		"extras":       func() error { _, err := c.Next([]uint32{1}, []byte{0x18, 1}); return err },
		"extras large": func() error { _, err := c.Next([]uint32{1}, make([]byte, MaxExtrasBytes+1)); return err },
		"salt":         func() error { _, err := Root(base.NamespaceID{}, make([]byte, MaxSaltBytes+1)); return err },
		"kind":         func() error { _, err := EncodeExtras([]Extra{{ID: []byte("x")}}); return err },
		"id":           func() error { _, err := EncodeExtras([]Extra{{Kind: "mm"}}); return err },
	} {
		if err := f(); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if c.Count() != 0 || c.Last() != (Link{1}) {
		t.Error("a refused chunk changed the chain")
	}
}

func TestTokensAreNotExtras(t *testing.T) {
	// CBOR of an empty list in the place of tokens and of extra keys.
	a, err := NewChain(Link{}).Next([]uint32{0x01, 0x80}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewChain(Link{}).Next([]uint32{0x01}, []byte{0x80})
	if err != nil {
		t.Fatal(err)
	}
	if a == b {
		t.Error("tokens and extra keys are not apart")
	}
}

func TestOpaqueRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		tag Tag
		key string
	}{
		"empty": {TagString, ""}, "long": {TagBytes, strings.Repeat("x", MaxOpaqueKeyBytes+1)}, "utf-8": {TagString, "\xff"},
		"plus": {TagInt, "+5"}, "zero": {TagInt, "05"}, "minus zero": {TagInt, "-0"}, "minus": {TagInt, "-"},
		"letters": {TagInt, "5a"}, "tag": {'x', "5"},
	} {
		if _, err := Opaque(c.tag, []byte(c.key)); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPieceRule(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		runs := rapid.SliceOfN(rapid.Uint64Range(1, 1<<22), 1, 4).Draw(rt, "runs")
		p, err := PieceBytes(runs...)
		if err != nil {
			if !errors.Is(err, base.ErrUnsupported) {
				rt.Fatal(err)
			}
			return
		}
		if p%PieceAlignBytes != 0 || p < MinPieceBytes {
			rt.Fatalf("piece %d of runs %v", p, runs)
		}
		for _, r := range runs {
			if r%uint64(p) != 0 && uint64(p)%r != 0 {
				rt.Fatalf("piece %d is neither a divisor nor a multiple of %d", p, r)
			}
		}
		page, err := EnginePageBytes(runs[0], p)
		if err != nil || page%PageAlignBytes != 0 || page < runs[0]+8*((runs[0]+uint64(p)-1)/uint64(p)) {
			rt.Fatalf("page %d of %d: %v", page, runs[0], err)
		}
	})
	for _, runs := range [][]uint64{nil, {0}, {64, 0}, {1 << 41}} {
		if _, err := PieceBytes(runs...); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%v: %v", runs, err)
		}
	}
	for _, c := range []struct {
		value uint64
		piece uint32
	}{{0, 256}, {1, 0}, {1, 128}, {1, 257}, {1 << 41, 256}} {
		if _, err := EnginePageBytes(c.value, c.piece); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%v: %v", c, err)
		}
	}
}

func FuzzParseNamespace(f *testing.F) {
	for _, n := range testNamespaces() {
		b, err := n.Encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(OpaqueNamespace())
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := ParseNamespace(b)
		if err != nil {
			return
		}
		again, err := n.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("accepted %x, which encodes as %x (%v)", b, again, err)
		}
	})
}

func FuzzCheckCanonical(f *testing.F) {
	f.Add(OpaqueNamespace())
	f.Add([]byte{0xa1, 0x61, 'a', 0xf9, 0x3c, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if CheckCanonical(b) == nil && (len(b) > MaxNamespaceBytes || b[0]>>5 != 5) {
			t.Fatalf("accepted %x", b)
		}
	})
}

func FuzzChainExtras(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0}, []byte{0x80})
	f.Fuzz(func(t *testing.T, tokens, extras []byte) {
		c := NewChain(Link{})
		link, err := c.NextPacked(tokens, extras)
		if (err == nil) != (c.Count() == 1) || (err == nil) != (c.Last() == link && link != Link{}) {
			t.Fatalf("chain of %d chunks after %v", c.Count(), err)
		}
	})
}

func BenchmarkChain(b *testing.B) {
	tokens := make([]uint32, 256)
	c := NewChain(Link{})
	b.SetBytes(1024)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Next(tokens, nil); err != nil {
			b.Fatal(err)
		}
	}
}
