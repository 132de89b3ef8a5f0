package cli

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/bench"
)

func (t *tool) benchCommand() *cobra.Command {
	var (
		opt    bench.Options
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:       "bench " + strings.Join(bench.Names(), "|"),
		Short:     "Measure, each figure beside a reference of the same run",
		ValidArgs: bench.Names(),
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			opt.Progress = func(format string, args ...any) { _, _ = fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...) }
			r, err := bench.Run(cmd.Context(), args[0], opt)
			if err != nil {
				return err
			}
			if asJSON {
				return r.WriteJSON(cmd.OutOrStdout())
			}
			return r.WriteTable(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&opt.Quick, "quick", false, "smaller and shorter: under 30 s, figures less exact")
	cmd.Flags().StringVar(&opt.ProfileDir, "profile", "", "write a CPU profile of each process into this directory")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.AddCommand(t.benchProcessCommand())
	return cmd
}

// benchProcessCommand is the body of a process of a benchmark: servers and clients
// that are not to share a runtime with what measures them.
func (t *tool) benchProcessCommand() *cobra.Command {
	return &cobra.Command{
		Use: bench.Command + " KIND OPTIONS", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			log, err := t.quiet()
			if err != nil {
				return err
			}
			slog.SetDefault(log)
			return bench.RunProcess(cmd.Context(), args[0], args[1], cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}
