package torture

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Print writes the result for people.
func (r *Result) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { _, _ = fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	sums := "off"
	if r.Checksums {
		sums = "on"
	}
	c, f := r.Counts, r.Faults
	row("seed", "%d (checksums %s)", r.Seed, sums)
	row("time", "%.0f s, %d workers in %d processes, pool of %d MiB", r.Seconds, r.Workers, r.Processes, r.PoolBytes>>20)
	row("operations", "%d: %d loads, %d views, %d stores, %d deletes, %d pins; %d misses, %d there already, %d full, %d stores and %d deletes not acknowledged",
		r.Operations, c.Loads, c.Views, c.Stores, c.Deletes, c.Pins, c.Misses, c.AlreadyStored, c.Full, c.StoresFailed, c.DeletesFailed)
	row("held views read again", "%d", c.ViewChecks)
	row("sessions", "%d reopened, %d of them with views out; %d forks", c.Reopens, c.Left, c.Forks)
	row("workers", "%d killed, %d ended, %d stopped past the TTL, %d for less", f.WorkerKills, f.WorkersEnded, f.WorkerPauses, f.WorkerStumbles)
	row("server", "%d killed, %d ended, %d stopped", f.ServerKills, f.ServerStops, f.ServerPauses)
	row("resource manager", "%d killed, %d ended, %d stopped, %d commits told to fail", f.RMKills, f.RMStops, f.RMPauses, f.StoreFaults)
	row("both", "%d times killed", f.BothKilled)
	row("wrong bytes", "%d", r.WrongBytes)
	row("at rest after", "%.1f s; every byte free after %.1f s", r.RestSeconds, r.FreeSeconds)
	if err := t.Flush(); err != nil {
		return err
	}
	_, _ = fmt.Fprintln(w)
	_, _ = fmt.Fprintln(t, "PROCESS\tWHAT\tFIRST THIRD\tLAST THIRD\tALLOWED\tMOST\tSAMPLES\t")
	for _, s := range r.Series {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t\n", s.Role, s.What, s.First, s.Last, s.Allowed, s.Most, s.Count)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range r.Problems {
		_, _ = fmt.Fprintf(w, "FAILED: %s\n", p)
	}
	var err error
	if !r.OK {
		_, err = fmt.Fprintf(w, "FAILED: %d problems; seed %d, logs in %s\n", r.ProblemSum, r.Seed, r.Dir)
	}
	return err
}
