package directory

import (
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Events of a session have a window: at most max-events are sent and not
// acknowledged. What does not fit stays in the backlog, whose entries are bounded
// by the session's pages. The window's events are given again with each heartbeat
// until they are acknowledged; a session that leaves a full window unacknowledged
// is fenced. A new epoch starts with an empty window, and its events are made from
// the state of the session's pages: nothing is lost with an epoch.

// sentEvent is an event that was sent and not acknowledged.
type sentEvent struct {
	Event
	at time.Duration
}

// pageTask is an event of a page that is not sent yet. It is dropped when the page
// has moved on meanwhile.
type pageTask struct {
	kind       EventKind
	slot, page uint32
	generation base.Generation
}

// queueEvent tells the writer of a page. A writer that is not live learns it when it
// opens again.
func (d *Directory) queueEvent(now time.Duration, g *region, r *replica, kind EventKind) {
	s := g.writer
	if s == nil || s.state != StateLive {
		return
	}
	if len(s.backlog) >= max(4096, s.backlogLimit) {
		d.compactBacklog(s)
	}
	s.backlog = append(s.backlog, pageTask{kind: kind, slot: g.slot, page: r.page, generation: r.generation})
	d.pump(now, s)
}

// pump fills the window.
func (d *Directory) pump(now time.Duration, s *session) {
	if s.state != StateLive {
		return
	}
	limit := d.cfg.Limits.MaxEvents
	if s.poolsDue && len(s.window) < limit {
		s.poolsDue = false
		d.sendEvent(now, s, Event{Kind: EventPools})
	}
	for s.backlogHead < len(s.backlog) && len(s.window) < limit {
		t := s.backlog[s.backlogHead]
		s.backlogHead++
		g, r := d.taskPage(s, t)
		if g == nil {
			continue
		}
		d.sendEvent(now, s, Event{
			Kind: t.kind, Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id, Offset: g.offsetOf(t.page),
			Generation: r.generation, Order: r.order,
		})
	}
	if s.backlogHead == len(s.backlog) {
		s.backlog, s.backlogHead = s.backlog[:0], 0
	}
}

// taskPage returns the page of a task, nil when it has moved on.
func (d *Directory) taskPage(s *session, t pageTask) (*region, *replica) {
	g := d.regions[t.slot]
	if g == nil || g.writer != s || g.state != regionGranted || uint64(t.page) >= uint64(len(g.pages)) || g.pages[t.page] == 0 {
		return nil, nil
	}
	r := d.store.replica(g.pages[t.page])
	if r.generation != t.generation || r.state() != replicaRetiring {
		return nil, nil
	}
	return g, r
}

// compactBacklog drops tasks that were sent or whose page has moved on. What stays is
// at most two tasks a page; the next compaction comes when it has doubled.
func (d *Directory) compactBacklog(s *session) {
	kept := s.backlog[:0]
	for _, t := range s.backlog[s.backlogHead:] {
		if g, _ := d.taskPage(s, t); g != nil {
			kept = append(kept, t)
		}
	}
	s.backlog, s.backlogHead = kept, 0
	s.backlogLimit = 2 * len(kept)
}

// sendEvent numbers an event. With a full window it is dropped: only advice comes
// here unqueued (a drain, which the resource manager tells mappers too).
func (d *Directory) sendEvent(now time.Duration, s *session, e Event) {
	if len(s.window) >= d.cfg.Limits.MaxEvents {
		d.counters.EventsDropped++
		return
	}
	s.nextEvent++
	e.Number = s.nextEvent
	s.window = append(s.window, sentEvent{Event: e, at: now})
	d.effect(Effect{Kind: EffectSendEvent, Session: s.id, Epoch: s.epoch, Event: e})
}

// acknowledgeEvents drops what the client has received.
func (d *Directory) acknowledgeEvents(now time.Duration, s *session, last uint64) {
	n := 0
	for n < len(s.window) && s.window[n].Number <= last {
		n++
	}
	s.window = append(s.window[:0], s.window[n:]...)
	d.pump(now, s)
}

// PendingEvents appends the events that the session has not acknowledged, with
// numbers above after.
// Concurrency: read lock. Errors: base.ErrStale.
func (d *Directory) PendingEvents(now time.Duration, who Caller, after uint64, dst []Event) ([]Event, error) {
	s, err := d.current(now, who)
	if err != nil {
		return dst, err
	}
	for i := range s.window {
		if s.window[i].Number > after {
			dst = append(dst, s.window[i].Event)
		}
	}
	return dst, nil
}

// Acknowledge says which marks the writer has cleared and flushed, and which pages it
// has freed. A page whose generation is not current, or that does not wait for this,
// is passed over (S1): repeats are harmless.
// Errors: base.ErrStale.
func (d *Directory) Acknowledge(now time.Duration, who Caller, marksCleared, reclaimed []PageRef) error {
	s, err := d.begin(now, who)
	if err != nil {
		return err
	}
	for i := range marksCleared {
		if g, ref := d.retiring(s, &marksCleared[i]); g != nil && !d.store.replica(ref).has(flagMarkCleared) {
			d.markCleared(now, g, ref)
		}
	}
	for i := range reclaimed {
		g, ref := d.retiring(s, &reclaimed[i])
		if g == nil {
			continue
		}
		if r := d.store.replica(ref); r.has(flagReclaimAsked) && r.leases() == 0 {
			d.counters.PagesReclaimed++
			d.freeReplica(g, r.page, ref)
		}
	}
	return nil
}

// retiring finds a RETIRING replica of the writer by its page and generation.
func (d *Directory) retiring(s *session, p *PageRef) (*region, replicaRef) {
	g := d.regionOf(p.Pool, p.Region)
	if g == nil || g.writer != s || g.state != regionGranted {
		return nil, 0
	}
	page, ok := g.pageAt(p.Offset)
	if !ok || g.pages[page] == 0 {
		return nil, 0
	}
	ref := g.pages[page]
	if r := d.store.replica(ref); r.generation != p.Generation || r.state() != replicaRetiring {
		return nil, 0
	}
	return g, ref
}

// reopenRegions makes a new epoch's events from the state of the session's pages, and
// settles the claims of replicas that were hidden.
func (d *Directory) reopenRegions(now time.Duration, s *session, wasHidden bool) {
	s.nextEvent, s.window, s.backlog, s.backlogHead = 0, nil, nil, 0
	for _, slot := range s.regions {
		g := d.regions[slot]
		if g.state != regionGranted {
			continue
		}
		for _, ref := range g.pages {
			if ref == 0 {
				continue
			}
			r := d.store.replica(ref)
			if r.state() != replicaRetiring {
				continue
			}
			if !r.has(flagMarkCleared) || g.private() {
				d.queueEvent(now, g, r, EventRetire)
			}
			if r.has(flagReclaimAsked) {
				d.queueEvent(now, g, r, EventReclaim)
			}
		}
		if wasHidden {
			d.resolveClaims(now, g)
		}
	}
}
