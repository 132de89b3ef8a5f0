package peer

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		childMain(role)
		return
	}
	os.Exit(m.Run())
}
