package torture

import (
	"encoding/binary"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

// generation names one store of one key: the number of the worker process in the
// upper half, its count in the lower. It is never 0 and never used again in a run.
type generation uint64

func makeGeneration(process, count uint32) generation {
	return generation(uint64(process)<<32 | uint64(count))
}

// process is the number of the worker process that stored it.
func (g generation) process() uint32 { return uint32(g >> 32) }

// headerBytes are the key's number and the generation in front of the stream.
const headerBytes = 16

// lengthOf is how long every value of a key is, within a page.
func lengthOf(key uint32, pageBytes int) int {
	x := splitmix(uint64(key)*0x9e3779b97f4a7c15 + 1)
	n := headerBytes + int(x.next()%uint64(pageBytes-headerBytes+1)) //nolint:gosec // below a page
	return n &^ 7
}

// keyOf is the object key of a key's number.
func keyOf(key uint32) (base.Key, error) {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], key)
	return keys.Opaque(keys.TagBytes, b[:])
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

func streamOf(key uint32, g generation) splitmix {
	return splitmix(uint64(g)*0xd1342543de82ef95 ^ uint64(key)<<17)
}

// fill writes the value of a key's store. pause is called between pieces, so that a
// writer can be caught in the middle.
func fill(dst []byte, key uint32, g generation, pause func()) {
	binary.LittleEndian.PutUint64(dst, uint64(key))
	binary.LittleEndian.PutUint64(dst[8:], uint64(g))
	x := streamOf(key, g)
	for i := headerBytes; i+8 <= len(dst); i += 8 {
		if i%8192 == 0 && pause != nil {
			pause()
		}
		binary.LittleEndian.PutUint64(dst[i:], x.next())
	}
}

// inspect says which store of a key a value is, and how many of its bytes are not
// that store's.
func inspect(b []byte, key uint32) (g generation, wrong int) {
	if len(b) < headerBytes {
		return 0, max(len(b), 1)
	}
	if binary.LittleEndian.Uint64(b) != uint64(key) {
		wrong += 8
	}
	g = generation(binary.LittleEndian.Uint64(b[8:]))
	x := streamOf(key, g)
	var want [8]byte
	for i := headerBytes; i+8 <= len(b); i += 8 {
		v := x.next()
		if binary.LittleEndian.Uint64(b[i:]) == v {
			continue
		}
		binary.LittleEndian.PutUint64(want[:], v)
		for j := range want {
			if b[i+j] != want[j] {
				wrong++
			}
		}
	}
	return g, wrong
}
