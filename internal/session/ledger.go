package session

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// ledger numbers operations and knows the lowest that is not resolved. Sequences are
// consecutive, so that the open ones are a window with a bit each.
type ledger struct {
	base   base.Sequence // the watermark: every lower operation is resolved
	window []bool        // [i]: operation base+i is resolved
	head   int           // window[head] is base
	max    int
	open   int
}

func newLedger(maxOperations int) ledger { return ledger{base: 1, max: maxOperations} }

// begin numbers one more operation.
func (l *ledger) begin() (base.Sequence, error) {
	if n := len(l.window) - l.head; n >= l.max {
		return 0, fmt.Errorf("%w: operation %d has no answer and %d came after it (max_operations)", base.ErrLimit, l.base, n-1)
	}
	if l.head > 64 && l.head*2 > len(l.window) {
		l.window = l.window[:copy(l.window, l.window[l.head:])]
		l.head = 0
	}
	l.window = append(l.window, false)
	l.open++
	return l.base + base.Sequence(len(l.window)-l.head-1), nil
}

// end resolves an operation; a second time changes nothing.
func (l *ledger) end(s base.Sequence) {
	i := l.head + int(s-l.base) //nolint:gosec // bounded by the window
	if s < l.base || i >= len(l.window) || l.window[i] {
		return
	}
	l.window[i] = true
	l.open--
	for l.head < len(l.window) && l.window[l.head] {
		l.head++
		l.base++
	}
	if l.head == len(l.window) {
		l.window, l.head = l.window[:0], 0
	}
}
