package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
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
	Step      int      `json:"step"`
	Invariant string   `json:"invariant"`
	Text      string   `json:"text"`
	Last      []string `json:"last_events"`
	Script    string   `json:"script,omitempty"` // the shrunk one
}

// simFaults is the outcome of `maru sim --faults --json`.
type simFaults struct {
	Steps  int             `json:"steps"`
	Faults []sim.FaultHunt `json:"faults"`
}

// simFlags is what the command is told.
type simFlags struct {
	seeds, steps                  int
	first                         uint64
	fault, script                 string
	faults, shrink, trace, asJSON bool
}

// simCommand runs the simulator: the cores of resource manager, server and clients under
// a virtual clock and network.
func (t *tool) simCommand() *cobra.Command {
	var f simFlags
	cmd := &cobra.Command{
		Use: "sim", Short: "Simulate resource manager, server and clients with faults, and check the invariants", Args: cobra.NoArgs,
		Long: "Each seed is one run of the shipped cores under a virtual clock and network, with late, lost and repeated messages,\n" +
			"partitions, stopped and killed programs, rolling updates and torn writes. A seed replays its run. With --shrink a\n" +
			"failing run is made short and printed as a script, which --script plays. With --fault an error is planted, which\n" +
			"must be found; --faults plants each in turn and says how many seeds it took.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			switch {
			case f.seeds < 1:
				return fmt.Errorf("%w: --seeds is %d, allowed: 1 and more", base.ErrInvalid, f.seeds)
			case f.steps < 1:
				return fmt.Errorf("%w: --steps is %d, allowed: 1 and more", base.ErrInvalid, f.steps)
			case f.trace && f.asJSON:
				return fmt.Errorf("%w: --trace and --json contradict each other", base.ErrInvalid)
			case f.faults:
				return f.hunt(cmd.Context(), out)
			case f.script != "":
				return f.play(out)
			}
			return f.sweep(cmd.Context(), out)
		},
	}
	cmd.Flags().IntVar(&f.seeds, "seeds", 500, "how many seeds to play, with --faults at most for each")
	cmd.Flags().IntVar(&f.steps, "steps", 500, "actions of clients and faults in each")
	cmd.Flags().Uint64Var(&f.first, "seed", 1, "the first seed")
	cmd.Flags().StringVar(&f.fault, "fault", "none", "plant an error: "+sim.FaultNames())
	cmd.Flags().BoolVar(&f.faults, "faults", false, "plant each error in turn, and fail if one is not found")
	cmd.Flags().StringVar(&f.script, "script", "", "play this file instead of seeds")
	cmd.Flags().BoolVar(&f.shrink, "shrink", false, "make the first failing run short and print its script")
	cmd.Flags().BoolVar(&f.trace, "trace", false, "print every event")
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON object")
	return cmd
}

// shrinkRuns bounds how many runs are played to make a failing one short.
const shrinkRuns = 4000

func (f *simFlags) tracer(out io.Writer) func(string) {
	if !f.trace {
		return nil
	}
	return func(line string) { _, _ = fmt.Fprintln(out, line) }
}

// sweep plays seeds. Ctrl-C ends it with what there is.
func (f *simFlags) sweep(ctx context.Context, out io.Writer) error {
	planted, err := sim.ParseFault(f.fault)
	if err != nil {
		return err
	}
	report := simReport{Fault: planted.String(), Steps: f.steps, Failures: []simFailure{}}
	begin := time.Now()
	take := func(result sim.Result, err error) bool {
		report.Seeds++
		report.Sum.Add(result)
		var failure *sim.Failure
		if errors.As(err, &failure) {
			entry := simFailure{failure.Seed, failure.At.Seconds(), failure.Step, failure.Invariant, failure.Text, failure.Last, ""}
			if f.shrink && len(report.Failures) == 0 {
				short, shorter := sim.Shrink(sim.Generate(failure.Seed, f.steps, planted), shrinkRuns)
				if entry.Script = short.String(); shorter != nil {
					failure = shorter
				}
			}
			report.Failures = append(report.Failures, entry)
			if !f.asJSON {
				_, _ = fmt.Fprintln(out, failure)
				_, _ = fmt.Fprint(out, entry.Script)
			}
		}
		return ctx.Err() == nil
	}
	options := sim.Options{Seed: f.first, Steps: f.steps, Fault: planted, Trace: f.tracer(out)}
	if f.trace {
		for range f.seeds {
			if !take(sim.Run(options)) {
				break
			}
			options.Seed++
		}
	} else {
		sim.Sweep(options, f.seeds, take)
	}
	if err := ctx.Err(); err != nil && report.Seeds < f.seeds && !f.asJSON {
		_, _ = fmt.Fprintf(out, "stopped after %d seeds\n", report.Seeds)
	}
	report.Seconds = time.Since(begin).Seconds()
	if f.asJSON {
		if err := printJSON(out, report); err != nil {
			return err
		}
	} else {
		printSum(out, &report)
	}
	if len(report.Failures) > 0 {
		return errFailed
	}
	return nil
}

func printSum(out io.Writer, report *simReport) {
	s := report.Sum
	_, _ = fmt.Fprintf(out, "%d seeds of %d steps, %d events, %v of virtual time in %.1f s: %d broken\n"+
		"%d stores (%d without answer), %d reads and %d thrown away, %d views, %d deletes, %d regions\n"+
		"%d restarts of the resource manager (%d writes lost, %d slots behind, %d torn), %d of the server, %d rolling updates, %d partitions\n"+
		"%d processes ended, %d stopped, %d forked, %d closed, %d suspects back, %d machines stopped\n",
		report.Seeds, report.Steps, s.Events, s.Virtual.Round(time.Second), report.Seconds, len(report.Failures),
		s.Stores, s.Unknown, s.Reads, s.ReadsDiscarded, s.Views, s.Deletes, s.Regions,
		s.ManagerRestarts, s.LostWrites, s.SlotsMissed, s.SlotsTorn, s.ServerRestarts, s.Rolls, s.Cuts,
		s.Kills, s.Pauses, s.Forks, s.Closes, s.Returned, s.Machines)
}

// hunt plants every fault in turn.
func (f *simFlags) hunt(ctx context.Context, out io.Writer) error {
	report := simFaults{Steps: f.steps, Faults: []sim.FaultHunt{}}
	missed := 0
	for _, fault := range sim.Faults() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("sim: %w", err)
		}
		h := sim.Hunt(fault, sim.Options{Seed: f.first, Steps: f.steps}, f.seeds)
		report.Faults = append(report.Faults, h)
		if !h.Found {
			missed++
		}
		if !f.asJSON {
			_, _ = fmt.Fprintln(out, h)
		}
	}
	if f.asJSON {
		if err := printJSON(out, report); err != nil {
			return err
		}
	}
	if missed > 0 {
		return errFailed
	}
	return nil
}

// play plays a script from a file.
func (f *simFlags) play(out io.Writer) error {
	file, err := os.Open(f.script)
	if err != nil {
		return fmt.Errorf("%w: --script: %w", base.ErrInvalid, err)
	}
	defer func() { _ = file.Close() }()
	script, err := sim.ParseScript(file)
	if err != nil {
		return err
	}
	if f.shrink {
		short, failure := sim.Shrink(script, shrinkRuns)
		if failure != nil {
			script = short
			_, _ = fmt.Fprint(out, short)
		}
	}
	report := simReport{Fault: script.Fault.String(), Seeds: 1, Steps: len(script.Actions), Failures: []simFailure{}}
	begin := time.Now()
	result, err := sim.Play(script, f.tracer(out))
	report.Seconds, report.Sum = time.Since(begin).Seconds(), result
	var failure *sim.Failure
	if errors.As(err, &failure) {
		report.Failures = append(report.Failures, simFailure{0, failure.At.Seconds(), failure.Step, failure.Invariant, failure.Text, failure.Last, ""})
	}
	if f.asJSON {
		if err := printJSON(out, report); err != nil {
			return err
		}
	} else {
		if failure != nil {
			_, _ = fmt.Fprintln(out, failure)
		}
		printSum(out, &report)
	}
	if failure != nil {
		return errFailed
	}
	return nil
}
