package demo

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Print writes the result for people.
func (r *Result) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(t, "worker\tstored\tGB/s\tthere already\tloaded\tGB/s\tof the killed\twrong bytes\t\n")
	for _, row := range r.Rows {
		name := fmt.Sprint(row.Worker)
		if row.Killed {
			name += " (killed)"
		}
		of := fmt.Sprint(row.OfKilled.Objects)
		if row.Killed {
			of = "-"
		}
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%d\t%s\t%s\t%d\t\n", name, row.Stored.Objects, rate(row.Stored), row.Stored.Already,
			row.Loaded.Objects, rate(row.Loaded), of, row.Loaded.WrongBytes+row.OfKilled.WrongBytes)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%s: objects of %d bytes; %d objects of the killed worker were acknowledged and read by every other; %d wrong bytes\n",
		r.Model, r.ObjectBytes, r.KilledAcknowledged, r.WrongBytes)
	for _, p := range r.Problems {
		_, err = fmt.Fprintf(w, "FAILED: %s\n", p)
	}
	return err
}

func rate(t Tally) string {
	if t.Seconds == 0 || t.Bytes == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", float64(t.Bytes)/t.Seconds/1e9)
}
