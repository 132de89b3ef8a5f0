package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"maru-remote-cxl-agent": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			// Socket paths are bounded, and a work directory of a test is long.
			dir, err := os.MkdirTemp("", "maru-cmd-")
			if err != nil {
				return err
			}
			env.Defer(func() { _ = os.RemoveAll(dir) })
			env.Setenv("D", dir)
			env.Setenv("XDG_RUNTIME_DIR", dir)
			env.Setenv("XDG_STATE_HOME", dir)
			return nil
		},
	})
}
