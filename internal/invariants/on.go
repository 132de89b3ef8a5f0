//go:build invariants

package invariants

// Enabled reports whether assertions run in this build.
const Enabled = true
