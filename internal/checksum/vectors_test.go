package checksum

import (
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
)

// The golden vectors are the contract with other implementations (GPU kernels, the
// Python package). -update writes them from the definition; the C library of xxHash
// 0.8.4 gave the same values when they were made.

var update = flag.Bool("update", false, "write the golden vectors")

type vectorFile struct {
	FormatVersion int      `json:"format_version"`
	Data          string   `json:"data"`
	Vectors       []vector `json:"vectors"`
}

type vector struct {
	Name       string   `json:"name"`
	Namespace  string   `json:"namespace_digest"`
	Key        string   `json:"object_key"`
	Seed       string   `json:"seed"`
	PieceBytes int      `json:"piece_bytes"`
	Length     int      `json:"length"`
	Leaves     []string `json:"leaves"`
	Root       string   `json:"root"`
}

const vectorData = "byte i = top byte of x(i), x(0) = length, x(i+1) = x(i) * 6364136223846793005 + 1442695040888963407 mod 2^64"

func vectorBytes(n int) []byte {
	b := make([]byte, n)
	x := uint64(n)
	for i := range b {
		b[i] = byte(x >> 56)
		x = x*6364136223846793005 + 1442695040888963407
	}
	return b
}

func u64hex(v uint64) string { return fmt.Sprintf("%016x", v) }

func vectorCases() (list []vector) {
	add := func(kind string, shard, part uint16, piece int, lengths ...int) {
		for i, n := range lengths {
			var ns base.NamespaceID
			var d base.Digest
			for j := range ns {
				ns[j] = byte(17*j + piece)
			}
			for j := range d {
				d[j] = byte(29*j + i)
			}
			key := base.MakeKey(d, shard, part)
			seed := Seed(ns, key)
			leaves := modelLeaves(vectorBytes(n), piece, seed)
			v := vector{
				Name:      fmt.Sprintf("%s piece %d length %d", kind, piece, n),
				Namespace: hex.EncodeToString(ns[:]), Key: hex.EncodeToString(key[:]), Seed: u64hex(seed),
				PieceBytes: piece, Length: n, Leaves: []string{}, Root: u64hex(modelRoot(leaves, uint64(n), seed)),
			}
			for _, l := range leaves {
				v.Leaves = append(v.Leaves, u64hex(l))
			}
			list = append(list, v)
		}
	}
	add("opaque", 0, base.PartAllLayers, OpaquePieceBytes, 0, 1, 3, 8, 16, 17, 128, 129, 240, 241, 1024, 1025, 65535, 65536, 65537, 131072, 200003, 2<<20)
	add("engine", 3, base.PartAllLayers, 256, 256, 1024, 8192)
	add("engine", 1, 7, 4096, 4096, 40960, 262144)
	add("engine", 0, base.PartAllLayers, 16384, 16384, 524288)
	add("engine", 2, 0, 24576, 98304)
	return list
}

func TestVectors(t *testing.T) {
	path := filepath.Join("testdata", "checksum_vectors.json")
	if *update {
		b, err := json.MarshalIndent(vectorFile{FormatVersion, vectorData, vectorCases()}, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f vectorFile
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	if f.FormatVersion != FormatVersion || f.Data != vectorData || len(f.Vectors) < 20 {
		t.Fatalf("version %d, %d vectors, data %q", f.FormatVersion, len(f.Vectors), f.Data)
	}
	with(t, func(t *testing.T) {
		for _, v := range f.Vectors {
			t.Run(v.Name, func(t *testing.T) { checkVector(t, v) })
		}
	})
}

func checkVector(t *testing.T, v vector) {
	ns, err := hex.DecodeString(v.Namespace)
	if err != nil || len(ns) != base.NamespaceBytes {
		t.Fatalf("namespace %q", v.Namespace)
	}
	key, err := hex.DecodeString(v.Key)
	if err != nil || len(key) != base.KeyBytes {
		t.Fatalf("key %q", v.Key)
	}
	seed := Seed(base.NamespaceID(ns), base.Key(key))
	data := vectorBytes(v.Length)
	leaves := CopySum(newBuffer(v.Length, 0).b, data, v.PieceBytes, seed, nil)
	var names []string
	for _, l := range leaves {
		names = append(names, u64hex(l))
	}
	if u64hex(seed) != v.Seed || !slices.Equal(names, v.Leaves) {
		t.Errorf("seed %s leaves %v, want %s %v", u64hex(seed), names, v.Seed, v.Leaves)
	}
	if got := u64hex(Root(leaves, uint64(v.Length), seed)); got != v.Root {
		t.Errorf("root %s, want %s", got, v.Root)
	}
	if got := u64hex(Sum(data, v.PieceBytes, seed)); got != v.Root {
		t.Errorf("Sum %s, want %s", got, v.Root)
	}
}
