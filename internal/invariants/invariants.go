// Package invariants holds the assertions of the numbered invariants of
// docs/PROTOCOL.md, section 4. They run only in builds with the tag
// `invariants`; in other builds Enabled is a false constant and the compiler
// drops what it guards. A failed assertion is a bug here and panics: input and
// peers must never be able to reach one.
package invariants

import "fmt"

// Failf reports a broken invariant by its number ("E1", "R3" ...) and panics in
// invariant builds; in others it does nothing.
func Failf(id, format string, args ...any) {
	if Enabled {
		panic("maru: invariant " + id + " broken: " + fmt.Sprintf(format, args...))
	}
}

// Check fails when cond does not hold. Guard costly conditions by Enabled.
func Check(cond bool, id, format string, args ...any) {
	if Enabled && !cond {
		Failf(id, format, args...)
	}
}
