package cli

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/torture"
)

func (t *tool) tortureCommand() *cobra.Command {
	var (
		cfg     torture.Config
		minutes float64
		asJSON  bool
	)
	cmd := &cobra.Command{
		Use:   "torture",
		Short: "Kill, stop and restart everything on a shared pool while workers check every byte",
		Long: "torture starts a resource manager, a server and workers as processes on one pool. The workers store, load, hold views,\n" +
			"delete, reopen and fork; a seeded script kills them with SIGKILL, stops them past the session's TTL, restarts the daemons\n" +
			"in any order, and makes the resource manager's disk fail. Every byte that is read is checked. At the end every byte of the\n" +
			"pool must be free again, and memory, open files and mappings flat. A run that fails keeps its directory.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if minutes <= 0 {
				return fmt.Errorf("%w: --minutes %v must be positive", base.ErrInvalid, minutes)
			}
			cfg.Duration = time.Duration(minutes * float64(time.Minute))
			cfg.Progress = func(format string, args ...any) {
				_, _ = fmt.Fprintf(cmd.ErrOrStderr(), time.Now().Format("15:04:05 ")+format+"\n", args...)
			}
			result, err := torture.Run(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), result)
			} else {
				err = result.Print(cmd.OutOrStdout())
			}
			if err == nil && !result.OK {
				err = errFailed
			}
			return err
		},
	}
	f := cmd.Flags()
	f.Float64Var(&minutes, "minutes", 1, "how long there are faults")
	f.Uint64Var(&cfg.Seed, "seed", 0, "of the script (default: drawn); an even one turns checksums off")
	f.IntVar(&cfg.Workers, "workers", 0, "worker processes, at least 2 (default 4); a quarter of them is never killed")
	f.StringVar(&cfg.Pool, "pool", "", "SIZE of a pool file that is made, or the PATH of an empty device or file (default 64M)")
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

// torturePartCommands are the bodies of the processes of `maru torture`.
func (t *tool) torturePartCommands() []*cobra.Command {
	part := func(use string, run func(cmd *cobra.Command, options string) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Hidden: true, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				log, err := t.logger()
				if err != nil {
					return err
				}
				slog.SetDefault(log)
				return run(cmd, args[0])
			},
		}
	}
	return []*cobra.Command{
		part(torture.WorkerCommand, func(cmd *cobra.Command, options string) error {
			return torture.RunWorker(cmd.Context(), options, cmd.InOrStdin(), cmd.OutOrStdout())
		}),
		part(torture.DaemonCommand, func(cmd *cobra.Command, options string) error {
			return torture.RunDaemon(cmd.Context(), options, cmd.InOrStdin(), cmd.OutOrStdout())
		}),
	}
}
