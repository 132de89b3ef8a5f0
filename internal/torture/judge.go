package torture

import (
	"fmt"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// judge puts together what every worker was told and finds what cannot be. All times
// are CLOCK_BOOTTIME, which the processes of a machine share.
//
// Every rule gets stricter with what is learned and never takes anything back, so it
// does not matter in which order the workers' lines arrive, or that a killed one's last
// lines never do.
type judge struct {
	mu struct {
		sync.Mutex
		stores   map[generation]*storeFacts
		deletes  map[uint32][]interval // acknowledged, by key
		ofKey    map[uint32][]generation
		last     uint32 // number of the newest worker process
		found    []string
		foundAll int
		sum      Counts
	}
}

// interval is from before a call to after its answer.
type interval struct{ begin, end time.Duration }

// storeFacts is what is known of one store of a key.
type storeFacts struct {
	key uint32
	// committed: it was visible by then, by the word of its writer or of a reader; 0: not known.
	committed time.Duration
	// seen is when the last load that showed it began, and by which worker process.
	seen   time.Duration
	seenBy uint32
}

// Counts are what the workers did.
type Counts struct {
	Stores        uint64 `json:"stores"` // acknowledged
	AlreadyStored uint64 `json:"already_stored"`
	Full          uint64 `json:"full"`
	StoresFailed  uint64 `json:"stores_failed"` // refused, unavailable, of unknown outcome
	Loads         uint64 `json:"loads"`         // every byte checked
	Views         uint64 `json:"views"`
	ViewChecks    uint64 `json:"view_checks"` // a held view read again
	Pins          uint64 `json:"pins"`
	Misses        uint64 `json:"misses"`
	Deletes       uint64 `json:"deletes"` // acknowledged
	DeletesFailed uint64 `json:"deletes_failed"`
	Reopens       uint64 `json:"reopens"`
	Left          uint64 `json:"left"` // closed with views out
	Forks         uint64 `json:"forks"`
	WrongBytes    uint64 `json:"wrong_bytes"`
	Corrupt       uint64 `json:"corrupt"` // checksums that did not hold
	Faults        uint64 `json:"faults"`  // bus errors
}

func (c *Counts) add(o Counts) {
	c.Stores += o.Stores
	c.AlreadyStored += o.AlreadyStored
	c.Full += o.Full
	c.StoresFailed += o.StoresFailed
	c.Loads += o.Loads
	c.Views += o.Views
	c.ViewChecks += o.ViewChecks
	c.Pins += o.Pins
	c.Misses += o.Misses
	c.Deletes += o.Deletes
	c.DeletesFailed += o.DeletesFailed
	c.Reopens += o.Reopens
	c.Left += o.Left
	c.Forks += o.Forks
	c.WrongBytes += o.WrongBytes
	c.Corrupt += o.Corrupt
	c.Faults += o.Faults
}

// operations is how many calls were made.
func (c Counts) operations() uint64 {
	return c.Stores + c.AlreadyStored + c.Full + c.StoresFailed + c.Loads + c.Views + c.Pins + c.Misses + c.Deletes + c.DeletesFailed
}

// maxFound bounds how many findings are kept word by word.
const maxFound = 50

func newJudge() *judge {
	j := &judge{}
	j.mu.stores, j.mu.deletes, j.mu.ofKey = map[generation]*storeFacts{}, map[uint32][]interval{}, map[uint32][]generation{}
	return j
}

func (j *judge) foundLocked(format string, args ...any) {
	j.mu.foundAll++
	if len(j.mu.found) < maxFound {
		j.mu.found = append(j.mu.found, fmt.Sprintf(format, args...))
	}
}

// found adds a finding of somebody else.
func (j *judge) find(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.foundLocked(format, args...)
}

// findings returns the problems, at most maxFound, and how many there are.
func (j *judge) findings() ([]string, int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]string(nil), j.mu.found...), j.mu.foundAll
}

// started: a worker process of that number may store from now on.
func (j *judge) started(process uint32) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.last = max(j.mu.last, process)
}

func (j *judge) factsLocked(key uint32, g generation, who string) *storeFacts {
	f := j.mu.stores[g]
	if f == nil {
		f = &storeFacts{key: key}
		j.mu.stores[g] = f
		j.mu.ofKey[key] = append(j.mu.ofKey[key], g)
	}
	if f.key != key {
		j.foundLocked("%s: generation %x is of key %d and was shown for key %d", who, g, f.key, key)
	}
	return f
}

func (f *storeFacts) visibleBy(t time.Duration) {
	if f.committed == 0 || t < f.committed {
		f.committed = t
	}
}

// stored: a worker was told that its store is visible.
func (j *judge) stored(key uint32, g generation, at interval) {
	j.mu.Lock()
	defer j.mu.Unlock()
	f := j.factsLocked(key, g, "store")
	f.visibleBy(at.end)
	j.judgeLocked(g, f)
}

// loaded: a load or view of a key showed a store, every byte of it right.
func (j *judge) loaded(key uint32, g generation, at interval, reader uint32) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if g.process() == 0 || g.process() > j.mu.last {
		j.foundLocked("worker process %d read generation %x of key %d, which nobody stored", reader, g, key)
		return
	}
	f := j.factsLocked(key, g, "load")
	f.visibleBy(at.end)
	if at.begin > f.seen {
		f.seen, f.seenBy = at.begin, reader
	}
	j.judgeLocked(g, f)
}

// deleted: a delete of a key was acknowledged.
func (j *judge) deleted(key uint32, at interval) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.deletes[key] = append(j.mu.deletes[key], at)
	for _, g := range j.mu.ofKey[key] {
		j.judgeLocked(g, j.mu.stores[g])
	}
}

// judgeLocked: what was visible before a delete began is not read by anybody who began
// after the delete's acknowledgement (R7).
func (j *judge) judgeLocked(g generation, f *storeFacts) {
	if f.committed == 0 || f.seen == 0 {
		return
	}
	for _, d := range j.mu.deletes[f.key] {
		if f.committed < d.begin && f.seen > d.end {
			j.foundLocked("key %d generation %x was visible at %v, deleted with acknowledgement from %v to %v, and worker process %d read it in a call that began at %v",
				f.key, g, f.committed, d.begin, d.end, f.seenBy, f.seen)
			f.seen = 0 // once
			return
		}
	}
}

// count adds what a worker process did since its last word.
func (j *judge) count(c Counts) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.sum.add(c)
	if c.WrongBytes > 0 || c.Corrupt > 0 || c.Faults > 0 {
		j.foundLocked("a worker saw %d wrong bytes, %d checksums that do not hold, %d bus errors", c.WrongBytes, c.Corrupt, c.Faults)
	}
}

func (j *judge) counts() Counts {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.mu.sum
}

// acknowledges says which answers to a delete promise that the key is gone.
func acknowledges(c base.Code) bool { return c == base.CodeOK || c == base.CodeNotFound }
