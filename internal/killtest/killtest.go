// Package killtest says how many rounds the tests play that kill a program with SIGKILL
// in the middle of its work: the resource manager, the server, a worker. CI plays a few,
// `make soak` a hundred. Nothing imports it but tests.
package killtest

import (
	"os"
	"strconv"
)

// Variable sets the number of rounds of every such test.
const Variable = "MARU_KILL_ROUNDS"

// Rounds is the number of rounds of a test that plays byDefault in CI.
func Rounds(byDefault int) int {
	if n, err := strconv.Atoi(os.Getenv(Variable)); err == nil && n > 0 {
		return n
	}
	return byDefault
}
