// Command maru-server keeps the directory of objects, leases and grants of one
// application. Bytes never pass through it. See internal/server.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/settings"
)

var version = "dev" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	s := server.DefaultSettings()
	cmd := &cobra.Command{
		Use: "maru-server", Short: "Keeps the directory of objects, leases and grants", Version: version,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	set, err := settings.Bind(cmd.Flags(), &s, settings.Options{EnvPrefix: server.EnvPrefix})
	cmd.RunE = func(*cobra.Command, []string) error {
		var cfg server.Config
		if err := set.Load(func() (err error) { cfg, err = s.Config(os.Stderr, version); return err }); err != nil {
			return err
		}
		for variable, meant := range set.Suspects() {
			cfg.Log.Warn("variable is no setting", "variable", variable, "meant", meant)
		}
		srv, err := server.Start(ctx, cfg)
		if err != nil {
			return err
		}
		err = srv.Wait(ctx)
		closeCtx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return errors.Join(err, srv.Close(closeCtx))
	}
	if err == nil {
		err = cmd.ExecuteContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "maru-server:", err)
		os.Exit(1)
	}
}
