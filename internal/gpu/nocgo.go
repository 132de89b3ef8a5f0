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

// Version refuses. Errors: ErrUnsupported.
func Version() (int, error) { return 0, Load() }

// Open refuses. Errors: ErrUnsupported.
func (Driver) Open(int) (engine.Device, error) { return nil, Load() }

// Device is never made.
type Device struct{ engine.Device }

// OpenDevice refuses. Errors: ErrUnsupported.
func OpenDevice(int) (*Device, error) { return nil, Load() }

// Alloc refuses, as the others.
func (*Device) Alloc(uint64) (uint64, error) { return 0, Load() }

// Release refuses.
func (*Device) Release(uint64) error { return Load() }

// CopyNow refuses.
func (*Device) CopyNow(engine.Direction, uint64, []byte) (float64, error) { return 0, Load() }
