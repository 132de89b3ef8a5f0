package torture

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
)

// sampleEvery is how often the processes are looked at.
const sampleEvery = 500 * time.Millisecond

// warmUp is how old a process is before it counts.
const warmUp = 3 * time.Second

// What a series may grow between the medians of the run's first and last third.
const (
	allowMemoryShare   = 0.25
	allowMemoryBytes   = 16 << 20
	allowDescriptors   = 16
	allowMappings      = 48
	leastSamples       = 12 // in each third: fewer say nothing
	kib                = 1024
	anonymousMemoryRow = "RssAnon:"
)

// sample is one look at a process.
type sample struct {
	at                            time.Duration // since the faults began
	memory, descriptors, mappings uint64
}

// samples are what the processes of each role used.
type samples struct {
	mu     sync.Mutex
	byRole map[string][]sample
}

// Series compares the first and the last third of a run.
type Series struct {
	Role    string `json:"role"`
	What    string `json:"what"` // memory_bytes, open_files, mappings
	First   uint64 `json:"first_median"`
	Last    uint64 `json:"last_median"`
	Most    uint64 `json:"most"`
	Allowed uint64 `json:"allowed"` // of the last median
	Count   int    `json:"samples"`
}

// grew reports whether it grew past what is allowed.
func (s Series) grew() bool { return s.Last > s.Allowed }

func look(pid int) (s sample, err error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(dir + "status")
	if err != nil {
		return s, err
	}
	for l := range bytes.Lines(status) {
		// The pool's pages are nobody's memory: what is anonymous is the process's own.
		if f := bytes.Fields(l); len(f) >= 2 && string(f[0]) == anonymousMemoryRow {
			n, err := strconv.ParseUint(string(f[1]), 10, 64)
			if err != nil {
				return s, err
			}
			s.memory = n * kib
		}
	}
	fds, err := os.ReadDir(dir + "fd")
	if err != nil {
		return s, err
	}
	maps, err := os.ReadFile(dir + "maps")
	s.descriptors, s.mappings = uint64(len(fds)), uint64(bytes.Count(maps, []byte("\n"))) //nolint:gosec // counts
	return s, err
}

// take looks at a program's process, if it is old enough.
func (x *samples) take(p *program, began time.Time) {
	if !p.mu.TryLock() { // it is being changed
		return
	}
	r := p.proc
	p.mu.Unlock()
	if time.Since(r.started) < warmUp {
		return
	}
	s, err := look(r.PID())
	if err != nil || s.memory == 0 { // it has ended meanwhile
		return
	}
	s.at = time.Since(began)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.byRole == nil {
		x.byRole = map[string][]sample{}
	}
	x.byRole[p.name] = append(x.byRole[p.name], s)
}

// watch samples daemons and tidy workers, and finds workers that say nothing any more.
func (d *driver) watch(ctx context.Context, began time.Time) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		d.samples.take(d.rm, began)
		d.samples.take(d.server, began)
		for _, p := range d.workers {
			if p.tidy {
				d.samples.take(p, began)
			}
			d.listenFor(p)
		}
	}
}

func (d *driver) listenFor(p *program) {
	if !p.mu.TryLock() {
		return
	}
	defer p.mu.Unlock()
	r := p.proc
	quiet := time.Since(r.started) - time.Duration(r.heard.Load())
	if !r.stopped.Load() && !r.meant.Load() && quiet > silence {
		d.judge.find("%s (process %d) has said nothing for %v", p.name, r.PID(), quiet.Round(time.Second))
		r.heard.Store(int64(time.Since(r.started))) // once in a while
	}
}

// compare makes the series of a run of that length.
func (x *samples) compare(length time.Duration) []Series {
	x.mu.Lock()
	defer x.mu.Unlock()
	var out []Series
	roles := make([]string, 0, len(x.byRole))
	for r := range x.byRole {
		roles = append(roles, r)
	}
	slices.Sort(roles)
	for _, role := range roles {
		for _, what := range []struct {
			name  string
			of    func(sample) uint64
			allow func(first uint64) uint64
		}{
			{"memory_bytes", func(s sample) uint64 { return s.memory }, func(f uint64) uint64 { return f + uint64(float64(f)*allowMemoryShare) + allowMemoryBytes }},
			{"open_files", func(s sample) uint64 { return s.descriptors }, func(f uint64) uint64 { return f + allowDescriptors }},
			{"mappings", func(s sample) uint64 { return s.mappings }, func(f uint64) uint64 { return f + allowMappings }},
		} {
			var first, last []uint64
			s := Series{Role: role, What: what.name, Count: len(x.byRole[role])}
			for _, v := range x.byRole[role] {
				s.Most = max(s.Most, what.of(v))
				switch {
				case v.at < length/3:
					first = append(first, what.of(v))
				case v.at > length*2/3:
					last = append(last, what.of(v))
				}
			}
			if len(first) < leastSamples || len(last) < leastSamples {
				continue
			}
			s.First, s.Last = median(first), median(last)
			s.Allowed = what.allow(s.First)
			out = append(out, s)
		}
	}
	return out
}

func median(v []uint64) uint64 {
	slices.Sort(v)
	return v[len(v)/2]
}
