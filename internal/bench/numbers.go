package bench

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm"
)

// middle is the median; of an even count the lower of the two.
func middle(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return s[(len(s)-1)/2]
}

// each shows single figures: the spread where noise is large.
func each(v []float64) string {
	var out []string
	for _, x := range v {
		out = append(out, number(x))
	}
	return strings.Join(out, ", ")
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// filePool is an emulated pool with at least dataBytes for regions.
func filePool(path string, dataBytes uint64) rm.PoolSpec {
	return rm.PoolSpec{
		Kind: dax.KindFile, Path: path, Name: "bench", Coherence: base.CoherenceHardware,
		SizeBytes: poolfmt.DataOffset + (dataBytes+poolfmt.Alignment-1)/poolfmt.Alignment*poolfmt.Alignment,
	}
}

// sizeName is how sizes are written in row names.
func sizeName(bytes int) string {
	switch {
	case bytes >= 1<<20 && bytes%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", bytes>>20)
	case bytes >= 1<<10 && bytes%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", bytes>>10)
	}
	return fmt.Sprintf("%d B", bytes)
}
