// Package inside holds Go tests that run in a machine of the lab, as root and on
// its /dev/dax0.0. It has no other code. The tests of test/vmlab build it as a
// static program and run that (VM.GoTest); the build tag vmguest keeps it from
// running on a developer's machine, whose devices are not ours to write to.
package inside
