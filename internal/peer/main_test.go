package peer

import (
	"os"
	"testing"

	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		childMain(role)
		return
	}
	leak.Check(m)
}
