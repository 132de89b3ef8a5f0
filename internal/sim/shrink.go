package sim

import (
	"slices"
	"time"
)

// Shrink makes a failing script shorter as long as it breaks the same invariant: it drops
// what comes after the failure, then actions by delta debugging (Zeller, Hildebrandt:
// Simplifying and isolating failure-inducing input), then troubles, workers, keys and
// waiting time, until nothing more can go or most runs were played. It returns the
// shortest one and its failure, nil when the script does not fail.
func Shrink(s *Script, most int) (*Script, *Failure) {
	first := broken(s)
	if first == nil {
		return s, nil
	}
	r := &shrinker{best: s.clone(), invariant: first.Invariant, left: most}
	if first.Step < len(s.Actions) {
		r.try(func(s *Script) { s.Actions = s.Actions[:first.Step] })
	}
	for r.left > 0 {
		before := r.best.String()
		r.simplify()
		r.drop()
		r.shorten()
		if r.best.String() == before {
			break
		}
	}
	_, err := Play(r.best, nil)
	f, _ := err.(*Failure) //nolint:errorlint // Play gives no other
	return r.best, f
}

// broken plays a script without words.
func broken(s *Script) *Failure {
	w := newWorld(s)
	w.play()
	return w.failure
}

func (s *Script) clone() *Script {
	c := *s
	c.Actions = slices.Clone(s.Actions)
	return &c
}

type shrinker struct {
	best      *Script
	invariant string
	left      int // runs
}

// try keeps a change if the script still fails in the same way.
func (r *shrinker) try(change func(s *Script)) bool {
	if r.left <= 0 {
		return false
	}
	r.left--
	s := r.best.clone()
	change(s)
	if f := broken(s); f == nil || f.Invariant != r.invariant {
		return false
	}
	r.best = s
	return true
}

// drop takes actions out, in ever smaller pieces. The others stay at their times.
func (r *shrinker) drop() {
	for size := max(1, len(r.best.Actions)/2); size >= 1 && r.left > 0; size /= 2 {
		for end := len(r.best.Actions); end > 0; {
			from := max(0, end-size)
			r.try(func(s *Script) {
				var gap time.Duration
				for _, a := range s.Actions[from:end] {
					gap += a.Gap
				}
				s.Actions = slices.Delete(s.Actions, from, end)
				if from < len(s.Actions) {
					s.Actions[from].Gap += gap
				}
			})
			end = from
		}
	}
}

// simplify takes away troubles and workers.
func (r *shrinker) simplify() {
	if !r.best.Calm {
		r.try(func(s *Script) { s.Calm = true })
	}
	if !r.best.Mild {
		r.try(func(s *Script) { s.Mild = true })
	}
	if r.best.Rough > 0 {
		r.try(func(s *Script) { s.Rough = 0 })
	}
	for r.best.Workers > 1 {
		used := 0
		for _, a := range r.best.Actions {
			used = max(used, a.Rank+1)
		}
		if used >= r.best.Workers || !r.try(func(s *Script) { s.Workers-- }) {
			break
		}
	}
	if !r.try(func(s *Script) {
		for i := range s.Actions {
			s.Actions[i].Calm = true
		}
	}) {
		for i := range r.best.Actions {
			if !r.best.Actions[i].Calm {
				r.try(func(s *Script) { s.Actions[i].Calm = true })
			}
		}
	}
}

// shorten takes away keys and time.
func (r *shrinker) shorten() {
	for i := range r.best.Actions {
		for len(r.best.Actions[i].Keys) > 1 {
			if !r.try(func(s *Script) { s.Actions[i].Keys = s.Actions[i].Keys[:1] }) &&
				!r.try(func(s *Script) { s.Actions[i].Keys = s.Actions[i].Keys[1:] }) {
				break
			}
		}
		r.shortenTime(i, func(a *Action) *time.Duration { return &a.Gap })
		r.shortenTime(i, func(a *Action) *time.Duration { return &a.For })
	}
}

// shortenTime rounds a time, or takes ever smaller parts of it away.
func (r *shrinker) shortenTime(i int, of func(a *Action) *time.Duration) {
	for _, d := range []time.Duration{0, time.Millisecond, 100 * time.Millisecond, time.Second} {
		if now := *of(&r.best.Actions[i]); now <= d || r.try(func(s *Script) { *of(&s.Actions[i]) = d }) {
			return
		}
	}
	for _, unit := range []time.Duration{time.Second, 100 * time.Millisecond, time.Millisecond} {
		if now := *of(&r.best.Actions[i]); now%unit != 0 && r.try(func(s *Script) { *of(&s.Actions[i]) = now.Truncate(unit) }) {
			return
		}
	}
}
