package sim

import (
	"fmt"
	"strings"
	"time"
)

// Options of a run.
type Options struct {
	Seed  uint64
	Steps int   // actions of clients and faults; 0: 500
	Fault Fault // a planted error; NoFault in a real run
	// Trace, if set, is called with each event of the run.
	Trace func(line string)
}

// Result counts what happened in a run. Digest covers its events and draws: two runs of
// one seed have the same.
type Result struct {
	Seed            uint64        `json:"seed"`
	Steps           int           `json:"steps"`
	Events          int           `json:"events"`
	Virtual         time.Duration `json:"virtual_ns"`
	Digest          uint64        `json:"digest"`
	Stores          int           `json:"stores"`
	Unknown         int           `json:"unknown_commits"`
	Reads           int           `json:"reads"`
	ReadsDiscarded  int           `json:"reads_discarded"`
	Views           int           `json:"views"`
	Deletes         int           `json:"deletes"`
	Regions         int           `json:"regions"`
	ManagerRestarts int           `json:"rm_restarts"`
	ServerRestarts  int           `json:"server_restarts"`
	Kills           int           `json:"kills"`
	Pauses          int           `json:"pauses"`
	Closes          int           `json:"closes"`
	Left            int           `json:"left_with_views"`
	Listed          int           `json:"listed_pages"`
	Kept            int           `json:"kept_regions_given_back"`
	Returned        int           `json:"suspects_back_with_keys"`
	Cuts            int           `json:"partitions"`
	Rolls           int           `json:"rolling_updates"`
	Fenced          int           `json:"servers_fenced"`
	Forks           int           `json:"forks"`
	Machines        int           `json:"machine_pauses"`
	LostWrites      int           `json:"store_writes_lost_whole"`
	SlotsMissed     int           `json:"slots_not_flushed"`
	SlotsTorn       int           `json:"slots_torn"`
	FailedCommits   int           `json:"store_commits_failed"`
	AgentRestarts   int           `json:"agent_restarts"`
	AgentsDropped   int           `json:"agents_dropped"`
	Reboots         int           `json:"reboots"`
	Vouched         int           `json:"ends_proved_by_agents"`
	Remote          int           `json:"remote_mappers_ended_by_operator"`
}

// Add sums the counts of another run; seed and digest stay.
func (r *Result) Add(o Result) {
	for _, p := range [...]struct{ to, from *int }{
		{&r.Steps, &o.Steps}, {&r.Events, &o.Events}, {&r.Stores, &o.Stores}, {&r.Unknown, &o.Unknown}, {&r.Reads, &o.Reads},
		{&r.ReadsDiscarded, &o.ReadsDiscarded}, {&r.Views, &o.Views}, {&r.Deletes, &o.Deletes}, {&r.Regions, &o.Regions},
		{&r.ManagerRestarts, &o.ManagerRestarts}, {&r.ServerRestarts, &o.ServerRestarts}, {&r.Kills, &o.Kills}, {&r.Pauses, &o.Pauses},
		{&r.Closes, &o.Closes}, {&r.Left, &o.Left}, {&r.Listed, &o.Listed}, {&r.Kept, &o.Kept}, {&r.Returned, &o.Returned},
		{&r.Cuts, &o.Cuts}, {&r.Rolls, &o.Rolls}, {&r.Fenced, &o.Fenced}, {&r.Forks, &o.Forks}, {&r.Machines, &o.Machines},
		{&r.LostWrites, &o.LostWrites}, {&r.SlotsMissed, &o.SlotsMissed}, {&r.SlotsTorn, &o.SlotsTorn}, {&r.FailedCommits, &o.FailedCommits},
		{&r.Remote, &o.Remote}, {&r.AgentRestarts, &o.AgentRestarts}, {&r.AgentsDropped, &o.AgentsDropped}, {&r.Reboots, &o.Reboots},
		{&r.Vouched, &o.Vouched},
	} {
		*p.to += *p.from
	}
	r.Virtual += o.Virtual
}

// Failure is a broken invariant.
type Failure struct {
	Seed      uint64 // 0: of a script
	At        time.Duration
	Step      int // the action that it came after, from 1
	Invariant string
	Text      string
	Last      []string // the last events before it
}

// Error tells the seed, what broke, and the last events.
func (f *Failure) Error() string {
	what := "script"
	if f.Seed != 0 {
		what = fmt.Sprintf("seed %d", f.Seed)
	}
	return fmt.Sprintf("%s: %s broken at %v, step %d: %s\nlast events:\n  %s", what, f.Invariant, f.At, f.Step, f.Text, strings.Join(f.Last, "\n  "))
}

// Run plays the script of one seed. Errors: *Failure.
func Run(o Options) (Result, error) {
	s := Generate(o.Seed, o.Steps, o.Fault)
	r, err := Play(s, o.Trace)
	r.Seed = o.Seed
	if f, ok := err.(*Failure); ok { //nolint:errorlint // Play gives no other
		f.Seed = o.Seed
	}
	return r, err
}

// lastEvents is how many lines a failure shows.
const lastEvents = 50

// Play plays a script. Events are put into words only when somebody reads them: a run
// that breaks something is played once more for its last ones. Errors: *Failure.
func Play(s *Script, trace func(line string)) (Result, error) {
	w := newWorld(s)
	w.trace = trace
	w.play()
	if w.failure == nil {
		return w.result, nil
	}
	if trace == nil {
		again := newWorld(s)
		again.trace = func(line string) {
			if len(again.ring) == lastEvents {
				again.ring = append(again.ring[:0], again.ring[1:]...)
			}
			again.ring = append(again.ring, line)
		}
		again.play()
		w.failure.Last = again.ring
		if again.failure == nil || again.failure.Text != w.failure.Text {
			w.failure.Text += " (and it does not replay)"
		}
	}
	return w.result, w.failure
}
