package cli

import (
	"fmt"
	"runtime/debug"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/doctor"
	"github.com/xcena-dev/maru/internal/media/cpu"
)

func (t *tool) doctorCommand() *cobra.Command {
	var (
		opt         doctor.Options
		pool, pages string
		node        int
		asJSON      bool
	)
	cmd := &cobra.Command{
		Use: "doctor", Short: "Look at this machine as a place for Maru, and say the cure for what is wrong", Args: cobra.NoArgs,
		Long: "Changes nothing. A line is ok, a note (works, and could be better or is not looked for) or bad (must be mended first); the\n" +
			"cure is below it. The exit status is 1 when a line is bad.\n\n" +
			"  maru doctor --pool-size 64G --python $(which python3)",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if opt.PoolBytes, err = sizeFlag("pool-size", pool); err != nil {
				return err
			}
			if opt.Pages, err = cpu.ParseHugePages(pages); err != nil {
				return fmt.Errorf("--hugepages: %w", err)
			}
			if cmd.Flags().Changed("numa-node") {
				opt.Node = &node
			}
			findings := doctor.Examine(cmd.Context(), opt)
			built := "maru " + t.version
			if info, ok := debug.ReadBuildInfo(); ok {
				built += ", built with " + info.GoVersion
			}
			findings = append([]doctor.Finding{{Name: "versions", Status: doctor.OK, Found: built}}, findings...)
			if asJSON {
				err = printJSON(cmd.OutOrStdout(), findings)
			} else {
				err = printFindings(cmd, findings)
			}
			if err != nil {
				return err
			}
			for _, f := range findings {
				if f.Status == doctor.Bad {
					return errFailed
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&pool, "pool-size", "", "size of the pool that this machine should hold, for example 64G")
	cmd.Flags().StringVar(&pages, "hugepages", "", "what that pool is made of: auto, off, 2M or 1G")
	cmd.Flags().IntVar(&node, "numa-node", 0, "NUMA node that its memory comes from (default: any)")
	cmd.Flags().StringVar(&opt.Python, "python", "", "interpreter that runs the engine, to look at its version")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return cmd
}

func printFindings(cmd *cobra.Command, findings []doctor.Finding) error {
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	for _, f := range findings {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\n", f.Status, f.Name, f.Found)
		if f.Cure != "" {
			_, _ = fmt.Fprintf(w, "\t\t-> %s\n", f.Cure)
		}
	}
	return w.Flush()
}
