//go:build race

package sim

// A run has one goroutine, so the race detector finds nothing in it and costs a
// factor of six: with it fewer seeds are played.
const raceDetector = true
