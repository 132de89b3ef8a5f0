package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/sim"
)

// simReport is the outcome of `maru sim --json`.
type simReport struct {
	Fault    string       `json:"fault"`
	Seeds    int          `json:"seeds"`
	Steps    int          `json:"steps"`
	Seconds  float64      `json:"seconds"`
	Failures []simFailure `json:"failures"`
	Sum      sim.Result   `json:"sum"`
}

type simFailure struct {
	Seed      uint64   `json:"seed"`
	AtSeconds float64  `json:"at_seconds"`
	Invariant string   `json:"invariant"`
	Text      string   `json:"text"`
	Last      []string `json:"last_events"`
}

// simCommand runs the simulator: the cores of resource manager, server and clients under
// a virtual clock and network.
func (t *tool) simCommand() *cobra.Command {
	var (
		seeds, steps int
		first        uint64
		fault        string
		trace        bool
		asJSON       bool
	)
	cmd := &cobra.Command{
		Use: "sim", Short: "Simulate resource manager, server and clients with faults, and check the invariants", Args: cobra.NoArgs,
		Long: "Each seed is one run of the shipped cores under a virtual clock and network, with late, lost and repeated messages,\n" +
			"stopped and killed programs. A seed replays its run. With --fault an error is planted, which must be found.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case seeds < 1:
				return fmt.Errorf("%w: --seeds is %d, allowed: 1 and more", base.ErrInvalid, seeds)
			case steps < 1:
				return fmt.Errorf("%w: --steps is %d, allowed: 1 and more", base.ErrInvalid, steps)
			case trace && asJSON:
				return fmt.Errorf("%w: --trace and --json contradict each other", base.ErrInvalid)
			}
			planted, err := sim.ParseFault(fault)
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			report := simReport{Fault: planted.String(), Steps: steps, Failures: []simFailure{}}
			begin := time.Now()
			for i := range seeds {
				if err := cmd.Context().Err(); err != nil {
					return fmt.Errorf("sim: %w", err)
				}
				o := sim.Options{Seed: first + uint64(i), Steps: steps, Fault: planted} //nolint:gosec // a count
				if trace {
					o.Trace = func(line string) { _, _ = fmt.Fprintln(out, line) }
				}
				result, err := sim.Run(o)
				report.Seeds++
				report.Sum.Add(result)
				var failure *sim.Failure
				if errors.As(err, &failure) {
					report.Failures = append(report.Failures, simFailure{
						failure.Seed, failure.At.Seconds(), failure.Invariant, failure.Text, failure.Last,
					})
					if !asJSON {
						_, _ = fmt.Fprintln(out, failure)
					}
				}
			}
			report.Seconds = time.Since(begin).Seconds()
			if asJSON {
				if err := printJSON(out, report); err != nil {
					return err
				}
			} else {
				s := report.Sum
				_, _ = fmt.Fprintf(out, "%d seeds of %d steps, %d events, %v of virtual time in %.1f s: %d broken\n"+
					"%d stores (%d without answer), %d reads and %d thrown away, %d views, %d deletes, %d regions\n"+
					"%d restarts of the resource manager, %d of the server, %d processes ended, %d stopped, %d closed\n",
					report.Seeds, steps, s.Events, s.Virtual.Round(time.Second), report.Seconds, len(report.Failures),
					s.Stores, s.Unknown, s.Reads, s.ReadsDiscarded, s.Views, s.Deletes, s.Regions,
					s.ManagerRestarts, s.ServerRestarts, s.Kills, s.Pauses, s.Closes)
			}
			if len(report.Failures) > 0 {
				return errFailed
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&seeds, "seeds", 500, "how many seeds to play")
	cmd.Flags().IntVar(&steps, "steps", 150, "actions of clients and faults in each")
	cmd.Flags().Uint64Var(&first, "seed", 1, "the first seed")
	cmd.Flags().StringVar(&fault, "fault", "none", "plant an error: "+sim.FaultNames())
	cmd.Flags().BoolVar(&trace, "trace", false, "print every event")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}
