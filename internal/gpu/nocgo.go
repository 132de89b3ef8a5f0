//go:build !cgo || !linux

package gpu

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
)

// Driver is what a build without cgo has: none.
type Driver struct{}

// Load refuses. Errors: ErrUnsupported.
func Load() error {
	return fmt.Errorf("%w: this program was built without cgo, which the CUDA driver needs", base.ErrUnsupported)
}

// Open refuses. Errors: ErrUnsupported.
func (Driver) Open(int) (engine.Device, error) { return nil, Load() }
