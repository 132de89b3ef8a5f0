package rm

import (
	"errors"

	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// readHeader looks at a device without a lock and without writing.
func readHeader(f *dax.File) (h poolfmt.Header, err error) {
	m, err := f.Map(0, poolfmt.DataOffset, mapping.ReadOnly)
	if err != nil {
		return h, err
	}
	var b [poolfmt.HeaderBytes]byte
	err = m.Guard(func() { copy(b[:], m.Bytes()) })
	if err = errors.Join(err, m.Unmap()); err != nil {
		return h, err
	}
	return poolfmt.DecodeHeader(b[:])
}
