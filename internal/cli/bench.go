package cli

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/bench"
)

const benchLong = `Each starts what it needs and removes it; a missed target is a NO in the table and no error. docs/reference/bench.md
explains every row.

  copy   copies between a GPU and the host (needs an NVIDIA GPU)
  data   stores and loads of engines beside memcpy (needs Python and libmaru.so)
  meta   lookups and leases of the server beside a bare echo, memory of an object
  rm     allocations of the resource manager, its start
  share  reading what another process stored, reclaim after a kill, restart of the server
  start  start of everything, and what idle programs cost
  vllm   what the vLLM connector adds to an engine's step (needs Python and libmaru.so)`

func (t *tool) benchCommand() *cobra.Command {
	var (
		opt    bench.Options
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:       "bench " + strings.Join(bench.Names(), "|"),
		Short:     "Measure, each figure beside a reference of the same run",
		Long:      benchLong,
		ValidArgs: bench.Names(),
		Args: func(c *cobra.Command, given []string) error {
			if err := takes("what to measure")(c, given); err != nil {
				return err
			}
			if !slices.Contains(bench.Names(), given[0]) {
				return fmt.Errorf("%q is none of %s", given[0], strings.Join(bench.Names(), ", "))
			}
			return nil
		},
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
