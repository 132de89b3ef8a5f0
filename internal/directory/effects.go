package directory

import (
	"github.com/xcena-dev/maru/internal/base"
)

// EffectKind says what the shell has to do.
type EffectKind uint8

// Kinds of effect.
const (
	// EffectSendEvent: send Event to the session's stream, if one is open. What is
	// lost is in PendingEvents until the session acknowledges it.
	EffectSendEvent EffectKind = iota + 1
	// EffectCloseConnections: close the hot connections and streams of (Session,
	// Epoch): that epoch is over. Event.Reason says why.
	EffectCloseConnections
	// EffectFreeRegion: RM Free of (PoolID, Region, Incarnation); answer with
	// RegionFreed, also when it failed.
	EffectFreeRegion
	// EffectClearRecords: RM ClearRecords of (PoolID, Region, Pages); answer with
	// RecordsCleared, also when it failed.
	EffectClearRecords
	// EffectDeleteDone: the delete Delete is complete; whoever waits can answer.
	EffectDeleteDone
	// EffectSessionExpired: for the log: Session passed its TTL in Epoch.
	EffectSessionExpired
	// EffectCapacityReturned: Bytes came back to the cpu budget of Node.
	EffectCapacityReturned
)

func (k EffectKind) String() string {
	names := [...]string{"none", "send event", "close connections", "free region", "clear records", "delete done", "session expired", "capacity returned"}
	if int(k) < len(names) {
		return names[k]
	}
	return "effect(?)"
}

// Effect is one thing for the shell to do after it has unlocked.
// Ownership: Pages belongs to the effect and is not touched again here.
type Effect struct {
	Kind        EffectKind
	Session     base.SessionID
	Epoch       base.Epoch
	Event       Event
	Pool        uint32
	PoolID      base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation
	Pages       []base.PageIndex
	WriterLeft  bool // of EffectClearRecords: the writer still holds the region, but has said that it writes no more
	Delete      DeleteID
	Node        base.NodeID
	Bytes       uint64
}

// EventKind is the kind of an event for a session.
type EventKind uint8

// Kinds of event.
const (
	EventRetire  EventKind = iota + 1 // hide the page, clear its mark at once, acknowledge
	EventReclaim                      // no reader is left: free the page, acknowledge
	EventDrain                        // unmap the region when idle
	EventFence                        // this epoch is over; open again
	EventPools                        // pools or the owner incarnation changed
)

func (k EventKind) String() string {
	names := [...]string{"none", "retire", "reclaim", "drain", "fence", "pools"}
	if int(k) < len(names) {
		return names[k]
	}
	return "event(?)"
}

// Event is one event of a session's stream. Numbers rise by one in a session
// epoch, from 1. Which fields are set follows from the kind.
type Event struct {
	Number     uint64
	Kind       EventKind
	Pool       uint32
	PoolID     base.PoolID
	Region     base.RegionID
	Offset     uint64
	Generation base.Generation
	Order      base.CommitOrder
	Reason     string
}

// PageRef names one use of a page in an acknowledgement.
type PageRef struct {
	Pool       uint32
	Region     base.RegionID
	Offset     uint64
	Generation base.Generation
}

// AppendEffects appends what there is to do and forgets it. It needs the write
// lock.
func (d *Directory) AppendEffects(dst []Effect) []Effect {
	d.flushClears()
	dst = append(dst, d.effects...)
	clear(d.effects)
	d.effects = d.effects[:0]
	return dst
}

func (d *Directory) effect(e Effect) { d.effects = append(d.effects, e) }
