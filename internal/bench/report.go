// Package bench is `maru bench`: every figure that the project publishes, each
// with a reference measured in the same run and a target that is met or not
// (D12). It measures through the same public pieces that users call.
//
// A benchmark never fails because a target is missed: it says so.
package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is one figure.
type Row struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	// Reference is what Value is compared with, in the same unit; Ratio is Value by
	// Reference. Both are 0 when there is none.
	Reference float64 `json:"reference"`
	Ratio     float64 `json:"ratio"`
	// Target says what is wanted, in words; Met is nil when nothing is.
	Target string `json:"target"`
	Met    *bool  `json:"met"`
}

// Report is the outcome of one benchmark.
type Report struct {
	Bench string `json:"bench"`
	Host  string `json:"host"`
	Rows  []Row  `json:"rows"`
}

// NewReport starts a report of this machine.
func NewReport(name string) *Report { return &Report{Bench: name, Host: host(), Rows: []Row{}} }

// Add appends a figure without a target.
func (r *Report) Add(name string, value float64, unit string, reference float64) *Row {
	row := Row{Name: name, Value: value, Unit: unit, Reference: reference}
	if reference != 0 {
		row.Ratio = value / reference
	}
	r.Rows = append(r.Rows, row)
	return &r.Rows[len(r.Rows)-1]
}

// Want says what the figure should be and whether it is.
func (row *Row) Want(target string, met bool) {
	row.Target, row.Met = target, &met
}

// WriteJSON writes one object.
func (r *Report) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(r)
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "%s (%s)\n", r.Bench, r.Host); err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "name\tvalue\tunit\treference\tratio\ttarget\tmet")
	for _, row := range r.Rows {
		reference, ratio, met := "-", "-", "-"
		if row.Reference != 0 {
			reference, ratio = number(row.Reference), fmt.Sprintf("%.2f", row.Ratio)
		}
		if row.Met != nil {
			met = map[bool]string{true: "yes", false: "NO"}[*row.Met]
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", row.Name, number(row.Value), row.Unit, reference, ratio, row.Target, met)
	}
	return t.Flush()
}

func number(v float64) string {
	switch a := math.Abs(v); {
	case a == math.Trunc(a) && a < 1e9, a >= 1e6:
		return fmt.Sprintf("%.0f", v)
	case a >= 100:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.3g", v)
	}
}

// host names the machine by what matters for a figure.
func host() string {
	model := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.SplitSeq(string(b), "\n") {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d CPUs, %s/%s", model, runtime.NumCPU(), runtime.GOOS, runtime.GOARCH)
}

// median of durations; it sorts a copy.
func median(d []time.Duration) time.Duration { return quantile(d, 0.5) }

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	return s[min(len(s)-1, int(q*float64(len(s))))]
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// interleave runs functions in turn, so that a machine that grows slower slows all
// of them, and returns each one's durations.
func interleave(rounds int, fns ...func() time.Duration) [][]time.Duration {
	out := make([][]time.Duration, len(fns))
	for range rounds {
		for i, fn := range fns {
			out[i] = append(out[i], fn())
		}
	}
	return out
}
