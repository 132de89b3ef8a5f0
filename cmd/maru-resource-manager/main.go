// Command maru-resource-manager gives out regions of CXL memory pools and keeps
// who maps them. See internal/rm.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/settings"
)

var version = "dev" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	s := rm.DefaultSettings()
	cmd := &cobra.Command{
		Use: "maru-resource-manager", Short: "Allocates regions of CXL memory pools and keeps who maps them", Version: version,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	set, err := settings.Bind(cmd.Flags(), &s, settings.Options{EnvPrefix: rm.EnvPrefix})
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var cfg rm.Config
		err := set.Load(func() (err error) { cfg, err = s.Config(os.Stderr, version); return err })
		if err != nil {
			return err
		}
		for variable, meant := range set.Suspects() {
			cfg.Logger.Warn("variable is no setting", "variable", variable, "meant", meant)
		}
		server, err := rm.Start(ctx, cfg)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case err = <-server.Failed():
		}
		if closeErr := server.Close(); err == nil {
			err = closeErr
		}
		return err
	}
	if err == nil {
		err = cmd.ExecuteContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "maru-resource-manager:", err)
		os.Exit(1)
	}
}
