// Command maru-remote-cxl-agent vouches for the mappers of a node that has no resource
// manager (--watch-only). See internal/agent.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/agent"
	"github.com/xcena-dev/maru/internal/settings"
)

var version = "dev" // set by the linker

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	s := agent.DefaultSettings()
	cmd := &cobra.Command{
		Use: "maru-remote-cxl-agent", Short: "Vouches for the mappers of a node without a resource manager", Version: version,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
	}
	set, err := settings.Bind(cmd.Flags(), &s, settings.Options{EnvPrefix: agent.EnvPrefix})
	cmd.RunE = func(*cobra.Command, []string) error {
		var cfg agent.Config
		if err := set.Load(func() (err error) { cfg, err = s.Config(os.Stderr, version); return err }); err != nil {
			return err
		}
		for variable, meant := range set.Suspects() {
			cfg.Logger.Warn("variable is no setting", "variable", variable, "meant", meant)
		}
		a, err := agent.Start(ctx, cfg)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case err = <-a.Failed():
		}
		if closeErr := a.Close(); err == nil {
			err = closeErr
		}
		return err
	}
	if err == nil {
		err = cmd.ExecuteContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "maru-remote-cxl-agent:", err)
		os.Exit(1)
	}
}
