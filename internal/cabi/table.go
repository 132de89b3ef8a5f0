package cabi

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// Kind is what a handle names: its top byte.
type Kind uint8

// Kinds of handle. 0 is none.
const (
	KindClient Kind = 1
	KindLayout Kind = 2
	KindJob    Kind = 3
)

func (k Kind) String() string {
	switch k {
	case KindClient:
		return "client"
	case KindLayout:
		return "layout"
	case KindJob:
		return "job"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

const (
	kindShift  = 56
	numberMask = 1<<kindShift - 1
)

// makeHandle puts the kind above a number that is never 0 and never repeated.
func makeHandle(k Kind, number uint64) (uint64, error) {
	if number == 0 || number > numberMask {
		return 0, fmt.Errorf("%w: %s number %#x does not fit a handle", base.ErrExhausted, k, number)
	}
	return uint64(k)<<kindShift | number, nil
}

// numberOf takes a handle apart and refuses one of another kind.
func numberOf(k Kind, h uint64) (uint64, error) {
	if Kind(h>>kindShift) != k || h&numberMask == 0 { //nolint:gosec // one byte is left
		return 0, fmt.Errorf("%w: %#x is no handle of a %s", base.ErrInvalid, h, k)
	}
	return h & numberMask, nil
}
