package client

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Lookup asks for a scheduler which leading keys all workers of its engine could read.
type Lookup struct {
	Keys hot.Keys
	// Workers is how many the engine has. Shard s is read by the ranks s x Replicas and on,
	// Replicas of them: a hit is one for each.
	Workers, Replicas int
	// RequestID puts request leases on the hits; 0: none.
	RequestID uint64
	// Timeout of the call, not of the time in the queue; 0: RPCTimeout.
	Timeout time.Duration
}

// LookupAway is every code of a lookup that had no answer: the server is away, or not all
// workers have a session there.
const LookupAway base.Code = math.MaxUint32

// awayPause is how long lookups are answered at once after one that the server did not
// answer: a server that hangs costs each call its timeout, and an engine asks often.
const awayPause = time.Second

// mostLate bounds the ends that wait for a server that is away. The leases of others, and
// of all of them in a long outage, end by themselves.
const mostLate = 4096

// lookups are the calls of a scheduler that do not wait: lookups, which are jobs, and what
// becomes of request leases. Tasks of one request run one after another, in their order:
// its leases are ended behind the answer to the lookup that takes them. Of a lookup that
// timed out the server may hear later than of the end; then its leases end by themselves.
// Locks: mu, held for moments only; transfers.mu inside it.
type lookups struct {
	c  *Client
	mu struct {
		sync.Mutex
		ready   []lookupTask
		behind  map[uint64][]lookupTask // by request with a task in ready or under way: what comes after it
		workers int                     // at most HotConnections, each of which carries one call
		away    time.Time               // until then nobody asks
		late    map[uint64]struct{}     // requests whose end waits for the next answer to a lookup
	}
}

// lookupTask is a lookup, or (without a job) an action on the leases of requests.
type lookupTask struct {
	requests []uint64 // that it is of, as far as the order matters
	job      *job
	lookup   Lookup
	asked    time.Time
	action   hot.RequestsAction
	ids      []uint64
}

func (k *lookups) init(c *Client) {
	k.c = c
	k.mu.behind, k.mu.late = map[uint64][]lookupTask{}, map[uint64]struct{}{}
}

// SubmitLookup queues a lookup, which is a job: Completed hands it out and JobResult has
// its codes. These are one hot.Verdict a key, as of a prefix, or LookupAway for each; and
// behind them one more, the microseconds until the answer was there. The keys are copied.
// Errors: ErrInvalid, ErrClosed.
func (c *Client) SubmitLookup(q Lookup) (JobID, error) {
	if err := c.enter(context.Background()); err != nil {
		return 0, err
	}
	defer c.leave()
	switch {
	case len(q.Keys) == 0 || len(q.Keys)%base.KeyBytes != 0:
		return 0, fmt.Errorf("%w: %d bytes of keys; a key has %d", base.ErrInvalid, len(q.Keys), base.KeyBytes)
	case q.Replicas < 1 || q.Workers < q.Replicas || q.Workers%q.Replicas != 0 || q.Workers > hot.MaxShards:
		return 0, fmt.Errorf("%w: %d workers with %d replicas of a shard; a whole number of shards is needed, of at most %d workers",
			base.ErrInvalid, q.Workers, q.Replicas, hot.MaxShards)
	case q.Timeout < 0:
		return 0, fmt.Errorf("%w: a timeout of %v", base.ErrInvalid, q.Timeout)
	}
	q.Keys = slices.Clone(q.Keys)
	if q.Timeout == 0 {
		q.Timeout = c.cfg.RPCTimeout
	}
	j, id := c.transfers.newLookup(q.Keys.Len())
	t := lookupTask{job: j, lookup: q, asked: time.Now()}
	if q.RequestID != 0 {
		t.requests = []uint64{q.RequestID}
	}
	k := &c.lookups
	k.mu.Lock()
	defer k.mu.Unlock()
	if t.asked.Before(k.mu.away) { // calls that hang may have all workers
		c.transfers.finishLookup(j, nil, t.asked)
		return id, nil
	}
	delete(k.mu.late, q.RequestID) // its leases take the place of the old ones
	k.putLocked(t)
	return id, nil
}

// SubmitRequests queues RefreshRequests or EndRequests; an end comes behind the lookups of
// its request that were submitted before. Nobody hears whether it succeeded: leases end by
// themselves, too. While the server does not answer, ends wait for its next answer and
// refreshes are left out. Errors: ErrClosed, ErrInvalid.
func (c *Client) SubmitRequests(action hot.RequestsAction, ids []uint64) error {
	if err := c.enter(context.Background()); err != nil {
		return err
	}
	defer c.leave()
	k := &c.lookups
	k.mu.Lock()
	defer k.mu.Unlock()
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	switch action {
	case hot.RequestsRefresh:
		k.putLocked(lookupTask{action: action, ids: ids})
	case hot.RequestsEnd:
		k.endLocked(ids)
	default:
		return fmt.Errorf("%w: action %d on request leases", base.ErrInvalid, action)
	}
	return nil
}

// endLocked queues the ends of requests: one task for those that have none, and one behind
// the tasks of each that has.
func (k *lookups) endLocked(ids []uint64) {
	free := make([]uint64, 0, len(ids))
	for _, id := range ids {
		if _, busy := k.mu.behind[id]; busy {
			k.putLocked(lookupTask{action: hot.RequestsEnd, ids: []uint64{id}, requests: []uint64{id}})
		} else {
			free = append(free, id)
		}
	}
	if len(free) > 0 {
		k.putLocked(lookupTask{action: hot.RequestsEnd, ids: free, requests: free})
	}
}

// putLocked queues a task, behind the one of its request if there is one. A task of
// several requests is for those that have none.
func (k *lookups) putLocked(t lookupTask) {
	if len(t.requests) == 1 {
		if list, busy := k.mu.behind[t.requests[0]]; busy {
			k.mu.behind[t.requests[0]] = append(list, t)
			return
		}
	}
	for _, id := range t.requests {
		k.mu.behind[id] = nil
	}
	k.mu.ready = append(k.mu.ready, t)
	if k.mu.workers < k.c.cfg.HotConnections {
		k.mu.workers++
		k.c.wg.Go(k.work)
	}
}

// takeLocked takes the first task, with the ends behind it when it is one: each is a call.
func (k *lookups) takeLocked() lookupTask {
	take := func() lookupTask {
		t := k.mu.ready[0]
		k.mu.ready[0] = lookupTask{}
		k.mu.ready = k.mu.ready[1:]
		return t
	}
	t := take()
	for t.action == hot.RequestsEnd && len(k.mu.ready) > 0 && k.mu.ready[0].action == hot.RequestsEnd {
		more := take()
		t.ids, t.requests = slices.Concat(t.ids, more.ids), slices.Concat(t.requests, more.requests)
	}
	return t
}

// work runs tasks until none is ready.
func (k *lookups) work() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for len(k.mu.ready) > 0 {
		t := k.takeLocked()
		asks := !time.Now().Before(k.mu.away) && !k.c.isClosing()
		h := heardNothing
		if asks {
			k.mu.Unlock()
			h = k.run(&t)
			k.mu.Lock()
		} else if t.job != nil {
			k.c.transfers.finishLookup(t.job, nil, t.asked)
		}
		for _, id := range t.requests {
			list := k.mu.behind[id]
			delete(k.mu.behind, id)
			for _, next := range list { // the first is ready now, the others wait for it
				k.putLocked(next)
			}
			if !asks && t.action == hot.RequestsEnd && len(list) == 0 && len(k.mu.late) < mostLate {
				k.mu.late[id] = struct{}{}
			}
		}
		switch h {
		case heardSilence:
			k.mu.away = time.Now().Add(awayPause)
		case heardAnswer:
			k.mu.away = time.Time{}
			if late := slices.Collect(maps.Keys(k.mu.late)); len(late) > 0 {
				clear(k.mu.late)
				k.endLocked(late)
			}
		}
	}
	k.mu.workers--
}

// heard is what a task tells of the server.
type heard uint8

const (
	heardNothing heard = iota // nothing: it was not asked, or of something that says nothing
	heardAnswer               // it answered a lookup
	heardSilence              // it did not
)

// run makes the calls of a task, and finishes its job.
func (k *lookups) run(t *lookupTask) heard {
	if t.job == nil {
		if err := k.c.callRequests(k.c.ctx, t.action, t.ids); err != nil {
			k.c.log.Debug("request leases", "action", t.action, "requests", len(t.ids), "error", err)
		}
		return heardNothing
	}
	verdicts, h := k.ask(&t.lookup)
	k.c.transfers.finishLookup(t.job, verdicts, t.asked)
	return h
}

// ask returns one verdict a key; none without an answer, or when a worker is missing.
func (k *lookups) ask(q *Lookup) ([]byte, heard) {
	ctx, cancel := context.WithTimeout(k.c.ctx, q.Timeout)
	defer cancel()
	targets, err := k.c.Targets(ctx)
	if err != nil || len(targets) != q.Workers || slices.Contains(targets, base.SessionID{}) {
		return nil, heardNothing
	}
	n := q.Keys.Len()
	all, one := make([]byte, n), make([]byte, n)
	for r := range q.Replicas {
		probe := ProbeQuery{Keys: q.Keys, Mode: hot.ModePrefix, RequestID: q.RequestID}
		for i := r; i < q.Workers; i += q.Replicas {
			probe.Targets = append(probe.Targets, targets[i])
		}
		if _, err := k.c.probe(ctx, probe, one); err != nil && (away(err) || epochOver(err) || ctx.Err() != nil) {
			return nil, heardSilence
		}
		for i, v := range one {
			if r == 0 || hot.Verdict(all[i]).Status() == hot.Hit {
				all[i] = v
			}
		}
		if hot.Verdict(all[0]).Status() != hot.Hit {
			break
		}
	}
	return all, heardAnswer
}

// isClosing reports whether Close has begun: what is queued then is not asked any more.
func (c *Client) isClosing() bool {
	c.closing.Lock()
	defer c.closing.Unlock()
	return c.closing.state != isOpen
}

// newLookup makes a job of so many verdicts. It does not count as a transfer: nobody waits
// for it when the client closes, and QueueJobs does not bound it.
func (t *transfers) newLookup(n int) (*job, JobID) {
	j := jobs.Get().(*job)
	if cap(j.codes) < n+1 {
		j.codes = make([]base.Code, n+1)
	}
	j.codes, j.lookup = j.codes[:n+1], true
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.last++
	j.id = t.mu.last
	t.mu.jobs[j.id] = j
	return j, j.id
}

// finishLookup ends a lookup's job; without verdicts there was no answer.
func (t *transfers) finishLookup(j *job, verdicts []byte, asked time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(j.codes) - 1
	for i := range n {
		j.codes[i] = LookupAway
		if verdicts != nil {
			j.codes[i] = base.Code(verdicts[i])
		}
	}
	j.codes[n] = base.Code(min(time.Since(asked).Microseconds(), math.MaxInt32)) //nolint:gosec // bounded
	j.done = true
	t.mu.finished = append(t.mu.finished, j.id)
	t.signalLocked()
}
