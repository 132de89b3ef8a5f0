package bench

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/xcena-dev/maru/internal/leak"
)

// TestMain makes the test binary a process of a benchmark when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 5 && os.Args[1] == "bench" && os.Args[2] == Command {
		if err := RunProcess(context.Background(), os.Args[3], os.Args[4], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leak.Check(m)
}
