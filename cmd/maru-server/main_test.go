package main

import (
	"net"
	"os"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"maru-server": main})
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
			port, err := freePort()
			if err != nil {
				return err
			}
			env.Setenv("D", dir)
			env.Setenv("PORT", strconv.Itoa(port))
			env.Setenv("COMMON", "--port="+strconv.Itoa(port))
			env.Setenv("XDG_RUNTIME_DIR", dir)
			env.Setenv("XDG_STATE_HOME", dir)
			return nil
		},
	})
}

// freePort finds a port whose successor is free as well: the hot plane takes it.
func freePort() (int, error) {
	for range 100 {
		a, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 0, err
		}
		port := a.Addr().(*net.TCPAddr).Port
		b, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+1)))
		_ = a.Close()
		if err == nil {
			_ = b.Close()
			return port, nil
		}
	}
	return 0, os.ErrNotExist
}
