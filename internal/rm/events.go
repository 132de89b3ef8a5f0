package rm

import (
	"fmt"
	"sync"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// watcherBufferCount is how far a watcher may fall behind before its stream is
// cut; it comes back and gets a snapshot.
const watcherBufferCount = 1024

// watch is one event stream. Closed by the hub: err says why.
type watch[E any] struct {
	events chan E
	err    error // set before events is closed
}

// hub gives events to streams. All methods are safe for concurrent use; none waits.
type hub struct {
	mu struct {
		sync.Mutex
		owners   map[base.OwnerID]map[*watch[*maruv1.OwnerEvent]]base.Incarnation
		sessions map[base.SessionID]map[*watch[*maruv1.SessionRegionEvent]]struct{}
		count    int
		closed   bool
	}
	maxCount int
}

func newHub(maxCount int) *hub {
	h := &hub{maxCount: maxCount}
	h.mu.owners = map[base.OwnerID]map[*watch[*maruv1.OwnerEvent]]base.Incarnation{}
	h.mu.sessions = map[base.SessionID]map[*watch[*maruv1.SessionRegionEvent]]struct{}{}
	return h
}

func (h *hub) admitLocked() error {
	if h.mu.closed {
		return errClosing()
	}
	if h.mu.count >= h.maxCount {
		return fmt.Errorf("%w: %d event streams are open, the setting max_watch_stream_count allows no more", base.ErrLimit, h.mu.count)
	}
	h.mu.count++
	return nil
}

func (h *hub) watchOwner(id base.OwnerID, incarnation base.Incarnation) (*watch[*maruv1.OwnerEvent], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.admitLocked(); err != nil {
		return nil, err
	}
	w := &watch[*maruv1.OwnerEvent]{events: make(chan *maruv1.OwnerEvent, watcherBufferCount)}
	if h.mu.owners[id] == nil {
		h.mu.owners[id] = map[*watch[*maruv1.OwnerEvent]]base.Incarnation{}
	}
	h.mu.owners[id][w] = incarnation
	return w, nil
}

func (h *hub) watchSession(id base.SessionID) (*watch[*maruv1.SessionRegionEvent], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.admitLocked(); err != nil {
		return nil, err
	}
	w := &watch[*maruv1.SessionRegionEvent]{events: make(chan *maruv1.SessionRegionEvent, watcherBufferCount)}
	if h.mu.sessions[id] == nil {
		h.mu.sessions[id] = map[*watch[*maruv1.SessionRegionEvent]]struct{}{}
	}
	h.mu.sessions[id][w] = struct{}{}
	return w, nil
}

func (h *hub) endOwnerLocked(id base.OwnerID, w *watch[*maruv1.OwnerEvent], err error) {
	if _, ok := h.mu.owners[id][w]; !ok {
		return
	}
	delete(h.mu.owners[id], w)
	if len(h.mu.owners[id]) == 0 {
		delete(h.mu.owners, id)
	}
	h.mu.count--
	w.err = err
	close(w.events)
}

func (h *hub) endSessionLocked(id base.SessionID, w *watch[*maruv1.SessionRegionEvent], err error) {
	if _, ok := h.mu.sessions[id][w]; !ok {
		return
	}
	delete(h.mu.sessions[id], w)
	if len(h.mu.sessions[id]) == 0 {
		delete(h.mu.sessions, id)
	}
	h.mu.count--
	w.err = err
	close(w.events)
}

func (h *hub) unwatchOwner(id base.OwnerID, w *watch[*maruv1.OwnerEvent]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endOwnerLocked(id, w, nil)
}

func (h *hub) unwatchSession(id base.SessionID, w *watch[*maruv1.SessionRegionEvent]) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endSessionLocked(id, w, nil)
}

func errSlow() error {
	return fmt.Errorf("%w: the watcher fell %d events behind; watch again and take the snapshot", base.ErrUnavailable, watcherBufferCount)
}

// publish hands events out. A fenced owner's older streams end with the event.
func (h *hub) publish(events []core.Event) {
	if len(events) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, e := range events {
		for _, id := range e.Owners {
			m := ownerEvent(e)
			for w, incarnation := range h.mu.owners[id] {
				fenced := e.Kind == core.EventFenced
				if fenced && e.Incarnation != 0 && incarnation >= e.Incarnation {
					continue
				}
				select {
				case w.events <- m:
				default:
					h.endOwnerLocked(id, w, errSlow())
					continue
				}
				if fenced {
					h.endOwnerLocked(id, w, fmt.Errorf("%w: owner %s was started again or dropped", base.ErrFenced, id))
				}
			}
		}
		for _, id := range e.Sessions {
			m := &maruv1.SessionRegionEvent{PoolId: e.Pool[:], RegionId: uint32(e.Region), Draining: true}
			for w := range h.mu.sessions[id] {
				select {
				case w.events <- m:
				default:
					h.endSessionLocked(id, w, errSlow())
				}
			}
		}
	}
}

func ownerEvent(e core.Event) *maruv1.OwnerEvent {
	switch e.Kind {
	case core.EventSessionGone:
		return &maruv1.OwnerEvent{Event: &maruv1.OwnerEvent_SessionGone{SessionGone: &maruv1.SessionGone{SessionId: e.Session[:], Proof: string(e.Proof)}}}
	case core.EventRegionFreed:
		return &maruv1.OwnerEvent{Event: &maruv1.OwnerEvent_RegionFreed{RegionFreed: &maruv1.RegionFreed{PoolId: e.Pool[:], RegionId: uint32(e.Region)}}}
	default:
		return &maruv1.OwnerEvent{Event: &maruv1.OwnerEvent_Fenced{Fenced: &maruv1.OwnerFenced{Incarnation: uint32(e.Incarnation)}}}
	}
}

// close ends all streams.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.mu.closed = true
	for id, ws := range h.mu.owners {
		for w := range ws {
			h.endOwnerLocked(id, w, errClosing())
		}
	}
	for id, ws := range h.mu.sessions {
		for w := range ws {
			h.endSessionLocked(id, w, errClosing())
		}
	}
}

func (h *hub) streamCount() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.count
}
