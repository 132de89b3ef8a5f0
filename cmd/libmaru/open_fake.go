//go:build cabifake

package main

import (
	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/cabi/cabitest"
)

// With the build tag cabifake every client is one of an in-process store, for
// tests of the boundary itself: no daemon, faults on demand. Never shipped.
var opener cabi.Opener = cabitest.NewStore().Open
