package cli

import (
	"fmt"
	"runtime/debug"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/doctor"
)

func (t *tool) doctorCommand() *cobra.Command {
	var (
		pool   string
		asJSON bool
	)
	cmd := &cobra.Command{
		Use: "doctor", Short: "Look at this machine as a place for Maru, and say the cure for what is wrong", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			size, err := sizeFlag("pool-size", pool)
			if err != nil {
				return err
			}
			findings := doctor.Examine(cmd.Context(), doctor.Options{PoolBytes: size})
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
