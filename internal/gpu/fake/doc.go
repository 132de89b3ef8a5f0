// Package fake is a GPU of host memory for tests: the interface of internal/gpu/engine,
// the kernels' work in plain Go, and faults on demand. It checks what a real device
// punishes late or never: copies over the border of two registrations, addresses that
// are nobody's, lists that are touched in flight.
//
// It says nothing about speed. Locks: Device.mu; a stream's gate outside of it.
package fake
