package core

import (
	"fmt"
	"slices"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// maxNameBytes bounds what peers give for people to read.
const maxNameBytes = 256

// maxUnprovedCount bounds the starts of one owner that nobody proved ended. It
// is a bound on an operator's patience: each takes one start elsewhere.
const maxUnprovedCount = 1024

// StartOwner asks for a new incarnation.
type StartOwner struct {
	Owner     base.OwnerID
	Name      string
	Node      base.NodeID
	Boot      base.BootID
	Directory [base.IDBytes]byte
	Locked    bool      // the process holds the directory's exclusive lock
	Process   ProcessID // of the caller, when the socket proves it
	Secret    base.OwnerSecret
}

// Started is the answer.
type Started struct {
	Incarnation       base.Incarnation
	Token             Token // in every call of this incarnation
	PredecessorsEnded bool
	Reason            string
}

// StartOwner issues an incarnation, which fences all older ones of this owner,
// and says which of their processes are proved ended: by the directory's lock
// (same node and directory, and the older one held the lock), by another boot of
// the same node, or because this resource manager watched the process end. The
// first start of an id sets the secret that all later ones must show.
// Errors: ErrInvalid, ErrUnproven, ErrLimit, ErrExhausted.
func (c *Core) StartOwner(b *Batch, now int64, req StartOwner) (Started, error) {
	if req.Owner == (base.OwnerID{}) {
		return Started{}, fmt.Errorf("%w: owner_id is zero", base.ErrInvalid)
	}
	if len(req.Name) > maxNameBytes {
		return Started{}, fmt.Errorf("%w: name has %d bytes, allowed: up to %d", base.ErrInvalid, len(req.Name), maxNameBytes)
	}
	o, known := c.owners[req.Owner]
	if !known {
		o = &owner{row: ownerRow{ID: req.Owner}}
	}
	digest, err := o.prove(req.Secret) // before anything is said of the owner
	if err != nil {
		return Started{}, err
	}
	if c.counters.NextOwner > base.MaxIncarnation {
		return Started{}, fmt.Errorf("%w: all %d owner incarnations were given", base.ErrExhausted, base.MaxIncarnation)
	}
	if err := c.checkBoot(req.Node, req.Boot); err != nil {
		return Started{}, err
	}
	if !known && len(c.owners) >= c.limits.MaxOwnerCount {
		return Started{}, fmt.Errorf("%w: %d owners are known, the setting max_owner_count allows no more; end one with maru rm drop-owner", base.ErrLimit, len(c.owners))
	}
	me := start{
		Incarnation: c.counters.NextOwner, Node: req.Node, Boot: req.Boot,
		Directory: req.Directory, Locked: req.Locked, Process: req.Process,
	}
	older := o.row.Unproved
	if known && !o.row.Current.Ended {
		older = append(slices.Clone(older), o.row.Current)
	}
	var unproved []start
	for _, s := range older {
		if !provedBy(s, me) {
			unproved = append(unproved, s)
		}
	}
	if len(unproved) > maxUnprovedCount {
		return Started{}, fmt.Errorf("%w: %d older starts of owner %s are not proved ended, more are not kept; end it with maru rm drop-owner", base.ErrLimit, len(unproved), req.Owner)
	}

	if !known { // it may have been dropped while regions of it were held
		for _, r := range c.regions {
			if r.row.Owner == req.Owner {
				o.count++
				o.bytes += r.row.Length
			}
		}
	}
	c.owners[req.Owner] = o
	c.counters.NextOwner++
	o.row.Name, o.row.Current, o.row.Unproved, o.row.StartedMS, o.row.Digest = req.Name, me, unproved, now, digest
	o.dropSpans(b)
	c.putOwner(b, o)
	c.putCounters(b)
	for _, p := range c.pools {
		b.touch(p)
	}
	b.event(Event{Kind: EventFenced, Owners: []base.OwnerID{req.Owner}, Incarnation: me.Incarnation})
	return Started{Incarnation: me.Incarnation, Token: c.ownerToken(&o.row), PredecessorsEnded: len(unproved) == 0, Reason: unprovedReason(unproved)}, nil
}

// provedBy reports whether the start of a program proves that an older one of
// the same owner has ended.
func provedBy(older, newer start) bool {
	if older.Ended {
		return true
	}
	if older.Node == (base.NodeID{}) || older.Node != newer.Node {
		return false
	}
	if older.Boot != (base.BootID{}) && newer.Boot != (base.BootID{}) && older.Boot != newer.Boot {
		return true
	}
	return older.Locked && newer.Locked && older.Directory == newer.Directory && older.Directory != ([base.IDBytes]byte{})
}

func unprovedReason(unproved []start) string {
	if len(unproved) == 0 {
		return ""
	}
	var text []string
	for _, s := range unproved[max(0, len(unproved)-3):] {
		text = append(text, fmt.Sprintf("incarnation %d on node %s (%s)", s.Incarnation, s.Node, s.Process))
	}
	return fmt.Sprintf("%d older start(s) of this server are not proved ended, among them %s: stop them and start this server in their state directory on their node, or, when they are gone, maru rm drop-owner",
		len(unproved), strings.Join(text, ", "))
}

func (c *Core) putOwner(b *Batch, o *owner) {
	if len(o.row.Digest) > 0 {
		c.raiseFormat(b, formatDigests)
	}
	b.put(bucketOwners, string(o.row.ID[:]), o.row)
}

// raiseFormat says, in the batch that writes the first row of it, that the store's rows
// are of a newer version.
func (c *Core) raiseFormat(b *Batch, to uint32) {
	if c.format < to {
		c.format = to
		b.put(bucketFormat, formatKey, formatRow{Version: to})
	}
}

// DropOwner is the operator's word that an owner ended: its regions go back, held
// ones when their holds end. Errors: ErrNotFound.
func (c *Core) DropOwner(b *Batch, id base.OwnerID) (freed, draining int, err error) {
	o, ok := c.owners[id]
	if !ok {
		return 0, 0, fmt.Errorf("%w: owner %s", base.ErrNotFound, id)
	}
	for _, r := range c.regionsInOrder() {
		if r.row.Owner != id {
			continue
		}
		if c.release(b, r) {
			draining++
		} else {
			freed++
		}
	}
	o.dropSpans(b)
	delete(c.owners, id)
	b.drop(bucketOwners, string(id[:]))
	b.event(Event{Kind: EventFenced, Owners: []base.OwnerID{id}})
	return freed, draining, nil
}

// checkBoot refuses what a node cannot be: this node under another boot, or an
// older boot of any node.
func (c *Core) checkBoot(node base.NodeID, boot base.BootID) error {
	if node == (base.NodeID{}) || boot == (base.BootID{}) {
		return nil
	}
	if node == c.cfg.Node && boot != c.cfg.Boot {
		return fmt.Errorf("%w: node %s is this one and has boot id %s, not %s", base.ErrInvalid, node, c.cfg.Boot, boot)
	}
	if n, ok := c.nodes[node]; ok && slices.Contains(n.Ended, boot) {
		return fmt.Errorf("%w: node %s was booted again since boot id %s", base.ErrStale, node, boot)
	}
	return nil
}
