// Package cli is the `maru` tool: one file a command. Commands parse, call a
// package that does the work, and print; nothing is decided here.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/demo"
	"github.com/xcena-dev/maru/internal/obs"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

// errFailed ends a command whose output already says what is wrong.
var errFailed = errors.New("failed")

// tool is what commands share.
type tool struct {
	version string
	log     obs.LogOptions
}

// Main runs the tool and returns the exit status.
func Main(version string, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	t := &tool{version: version}
	root := t.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFailed):
		return exitFailed
	case errors.Is(err, base.ErrInvalid):
		_, _ = fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	_, _ = fmt.Fprintln(os.Stderr, err)
	return exitFailed
}

func (t *tool) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "maru",
		Short: "KV cache store for LLM inference",
		Long: "maru keeps the KV cache of prompt prefixes, so that engines read it back instead of computing it again.\n" +
			"`maru up` starts everything on this machine; `maru demo` shows it.",
		Version:       t.version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&t.log.Level, "log-level", "info", "debug, info, warn or error")
	root.PersistentFlags().StringVar(&t.log.Format, "log-format", "text", "text or json")
	root.AddCommand(t.upCommand(), t.demoCommand(), t.workerCommand(), t.usageCommand(), t.deviceCommand(), t.rmCommand(),
		t.benchCommand(), t.doctorCommand(), t.simCommand(), t.explainCommand(), t.tortureCommand())
	root.AddCommand(t.torturePartCommands()...)
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		_, err := t.logger() // a level that is none is refused also where nothing is logged
		return err
	}
	explainMisuse(root)
	return root
}

// explainMisuse makes every wrong flag, argument and command of c and below an
// ErrInvalid that names where the right ones are written.
func explainMisuse(c *cobra.Command) {
	misuse := func(c *cobra.Command, err error) error {
		return fmt.Errorf("%w: %w; `%s --help` says what it takes", base.ErrInvalid, err, c.CommandPath())
	}
	c.SetFlagErrorFunc(misuse)
	args := c.Args
	if c.HasSubCommands() && !c.Runnable() {
		// Without Run a command prints its help whatever is asked of it.
		c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
		args = cobra.NoArgs
	}
	if args != nil {
		c.Args = func(c *cobra.Command, given []string) error {
			if err := args(c, given); err != nil {
				return misuse(c, err)
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		explainMisuse(sub)
	}
}

// takes is the check of a command's arguments: one for each name, in that order.
func takes(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, given []string) error {
		if len(given) < len(names) {
			return fmt.Errorf("%s is missing", names[len(given)])
		}
		if len(given) > len(names) {
			return fmt.Errorf("%q is one argument too many", given[len(names)])
		}
		return nil
	}
}

// logger writes to standard error, so that output can be piped.
func (t *tool) logger() (*slog.Logger, error) { return obs.NewLogger(os.Stderr, t.log) }

// quiet is a logger for embedded daemons whose lines would hide a command's own.
func (t *tool) quiet() (*slog.Logger, error) {
	o := t.log
	if o.Level == "info" {
		o.Level = "error"
	}
	return obs.NewLogger(os.Stderr, o)
}

func printJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }

// workerCommand is the body of a process of `maru demo`.
func (t *tool) workerCommand() *cobra.Command {
	return &cobra.Command{
		Use: demo.Command, Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			log, err := t.quiet()
			if err != nil {
				return err
			}
			slog.SetDefault(log)
			return demo.RunWorker(cmd.Context(), args[0], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}
