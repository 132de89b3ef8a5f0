package core

import (
	"bytes"
	"crypto/hmac"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// Peer is what the shell knows of the caller.
type Peer struct {
	Process ProcessID // zero: not proved by the socket
	Node    base.NodeID
	Boot    base.BootID
	Reason  string // why the process is not known
	Secret  []byte // the session's, SessionSecretBytes; none: a client without
}

// Hold asks for holds on a list of regions, all or nothing.
type Hold struct {
	Session     base.SessionID
	Server      base.OwnerID
	Incarnation base.Incarnation
	Views       bool
	Sequence    uint64
	Handles     []Handle
	AgentEpoch  []byte
	Nonce       [base.IDBytes]byte // 128 fresh random bits from the shell
	Peer        Peer
	Vouched     bool // an agent vouched for the session: if it is not known, it has ended
}

// Held is the answer. The shell prepares the regions in Prepare (as for
// Allocate) after the commit and before the answer.
type Held struct {
	Places []Place
	// Token may unhold in place of the process. It is given to who has shown that it is
	// the session's process; there is none for others.
	Token    []byte
	Provable bool
	Reason   string
	Prepare  []Region
}

// maxAgentEpochBytes bounds an agent's epoch.
const maxAgentEpochBytes = 64

// Hold records that a mapper maps regions. A lower sequence than the recorded
// one changes nothing and is refused; the recorded one again succeeds without a
// change, also when the region drains since. A higher one may raise views, never
// lower it: what was exported under views stays exported until the unhold.
// Errors: ErrInvalid, ErrFenced, ErrStale, ErrDraining, ErrDenied, ErrNotFound,
// ErrLimit, ErrOffline. A refusal says which of the regions this session holds.
func (c *Core) Hold(b *Batch, now int64, req Hold) (Held, error) {
	held, err := c.hold(b, now, req)
	if err != nil {
		return Held{}, fmt.Errorf("%w (%s)", err, c.onRecord(req.Session, req.Handles))
	}
	return held, nil
}

func (c *Core) hold(b *Batch, now int64, req Hold) (Held, error) {
	if err := c.checkHoldList(req.Session, req.Sequence, req.Handles); err != nil {
		return Held{}, err
	}
	if len(req.AgentEpoch) > maxAgentEpochBytes {
		return Held{}, fmt.Errorf("%w: agent_epoch has %d bytes, allowed: up to %d", base.ErrInvalid, len(req.AgentEpoch), maxAgentEpochBytes)
	}
	if _, err := c.current(req.Server, req.Incarnation); err != nil {
		return Held{}, err
	}
	if err := c.checkBoot(req.Peer.Node, req.Peer.Boot); err != nil {
		return Held{}, err
	}
	s, known := c.sessions[req.Session]
	if req.Vouched && !known {
		// The call was under way when its process ended: nobody would ever end it again.
		return Held{}, fmt.Errorf("%w: session %s, for which an agent vouched, has ended", base.ErrStale, req.Session)
	}
	if known {
		if err := c.checkPeer(s, req.Peer); err != nil {
			return Held{}, err
		}
		if s.row.Node == req.Peer.Node && s.row.Boot != req.Peer.Boot {
			// Whoever calls is not the process that bound the session.
			return Held{}, fmt.Errorf("%w: session %s was bound under boot id %s of node %s", base.ErrStale, req.Session, s.row.Boot, s.row.Node)
		}
	} else if len(c.sessions) >= c.limits.MaxSessionCount {
		return Held{}, fmt.Errorf("%w: %d sessions are known, the setting max_session_count allows no more", base.ErrLimit, len(c.sessions))
	}
	regions := make([]*region, len(req.Handles))
	fresh := 0
	for i, h := range req.Handles {
		r, err := c.resolve(h, accessRead)
		if err != nil {
			return Held{}, err
		}
		if err := r.pool.usable(); err != nil {
			return Held{}, err
		}
		if r.row.Owner != req.Server {
			return Held{}, fmt.Errorf("%w: region %d belongs to owner %s, not to %s", base.ErrDenied, h.Region, r.row.Owner, req.Server)
		}
		row, ok := r.rows[req.Session]
		switch {
		case ok && req.Sequence < row.Sequence, ok && req.Sequence == row.Sequence && !row.Held:
			return Held{}, fmt.Errorf("%w: sequence %d for region %d, recorded is %d", base.ErrStale, req.Sequence, h.Region, row.Sequence)
		case ok && req.Sequence == row.Sequence:
		case r.row.Draining:
			return Held{}, fmt.Errorf("%w: region %d goes back", base.ErrDraining, h.Region)
		}
		if !ok {
			fresh++
		}
		regions[i] = r
	}
	if c.holdCount+fresh > c.limits.MaxHoldCount {
		return Held{}, fmt.Errorf("%w: %d holds are recorded, the setting max_hold_count allows no more", base.ErrLimit, c.holdCount)
	}

	// The node is believed only now: who calls has capabilities.
	c.noteBoot(b, req.Peer.Node, req.Peer.Boot)
	if !known {
		s = newSession(req.Session, req.Peer, nonceOf(req.Session, req.Peer, req.Nonce))
		c.sessions[req.Session] = s
	}
	renamed := known && c.rename(s, req.Peer)
	if !known || renamed || s.row.Server != req.Server || len(req.AgentEpoch) > 0 && !bytes.Equal(s.row.AgentEpoch, req.AgentEpoch) {
		s.row.Server = req.Server
		if len(req.AgentEpoch) > 0 {
			s.row.AgentEpoch = req.AgentEpoch
		}
		c.putSession(b, s)
	}

	var out Held
	out.Provable, out.Reason = c.provable(s)
	if !known || s.knows(req.Peer.Secret) || s.row.Agent == (base.AgentID{}) && !s.row.Process.IsZero() {
		t := c.holdToken(&s.row)
		out.Token = t[:]
	}
	for i, r := range regions {
		row, ok := r.rows[req.Session]
		if !ok || req.Sequence > row.Sequence {
			c.setRow(b, s, r, holdRow{
				Session: req.Session, Region: r.row.ID, Sequence: req.Sequence, Held: true,
				Views:    req.Views || ok && row.Held && row.Views,
				ReadOnly: req.Handles[i].ReadOnly && (!ok || !row.Held || row.ReadOnly),
				Server:   req.Server, OwnerIncarnation: req.Incarnation, SinceMS: now,
			})
		}
		if !r.ready && !r.row.Mapped {
			out.Prepare = append(out.Prepare, r.view())
		}
		if !r.row.Mapped {
			r.row.Mapped = true
			c.putRegion(b, r)
			b.touch(r.pool)
		}
		out.Places = append(out.Places, r.place(req.Handles[i]))
	}
	return out, nil
}

func (c *Core) checkHoldList(s base.SessionID, sequence uint64, handles []Handle) error {
	switch {
	case s == (base.SessionID{}):
		return fmt.Errorf("%w: session_id is zero", base.ErrInvalid)
	case sequence == 0:
		return fmt.Errorf("%w: sequence is 0", base.ErrInvalid)
	case len(handles) == 0:
		return fmt.Errorf("%w: handles is empty", base.ErrInvalid)
	case len(handles) > c.limits.MaxListCount:
		return fmt.Errorf("%w: %d handles in one call, the setting max_list_count allows %d", base.ErrLimit, len(handles), c.limits.MaxListCount)
	}
	seen := make(map[base.RegionID]bool, len(handles))
	for _, h := range handles {
		if seen[h.Region] {
			return fmt.Errorf("%w: region %d is in the list twice", base.ErrInvalid, h.Region)
		}
		seen[h.Region] = true
	}
	return nil
}

// checkPeer keeps a session to the process that bound it. A session that was
// bound without a process stays without: who came later may be somebody else. What an
// agent vouches for is beyond the socket here: its secret shows that a call is its own.
func (c *Core) checkPeer(s *session, p Peer) error {
	switch {
	case s.row.Agent != (base.AgentID{}):
		if !s.knows(p.Secret) {
			return fmt.Errorf("%w: session %s is bound to %s of node %s, and the call does not carry its secret", base.ErrDenied, s.row.ID, s.row.Process, s.row.Node)
		}
	case s.row.Process.IsZero():
		if len(p.Secret) > 0 && !s.knows(p.Secret) {
			return fmt.Errorf("%w: session %s was made by who has another secret", base.ErrDenied, s.row.ID)
		}
	case s.row.Process != p.Process && !(s.knows(p.Secret) && c.unwatched[s.row.Process] != ""):
		return fmt.Errorf("%w: session %s is bound to %s, the caller is %s", base.ErrDenied, s.row.ID, s.row.Process, p.Process)
	}
	return nil
}

// nonceOf is what the row of a new session keeps of its secret, or random bits.
func nonceOf(id base.SessionID, p Peer, random [base.IDBytes]byte) [base.IDBytes]byte {
	if len(p.Secret) == SessionSecretBytes {
		return secretNonce(id, p.Secret)
	}
	return random
}

// rename takes a process over that is named anew since the watcher was started in
// another pid namespace: the secret shows that it is the same one.
func (c *Core) rename(s *session, p Peer) bool {
	if s.row.Agent != (base.AgentID{}) || p.Process.IsZero() || s.row.Process == p.Process || c.unwatched[s.row.Process] == "" || !s.knows(p.Secret) {
		return false
	}
	s.row.Process, s.row.Reason = p.Process, ""
	return true
}

// onRecord says which of the asked regions the session holds, for refusals.
func (c *Core) onRecord(id base.SessionID, handles []Handle) string {
	var held []string
	if s, ok := c.sessions[id]; ok {
		for _, h := range handles {
			if row, ok := s.rows[h.Region]; ok && row.Held {
				held = append(held, strconv.FormatUint(uint64(h.Region), 10))
			}
		}
	}
	if len(held) == 0 {
		return "no hold of this session on these regions is on record"
	}
	return "holds of this session are on record for regions " + strings.Join(held, ", ")
}

// OnRecord returns the asked regions that the session holds.
func (c *Core) OnRecord(id base.SessionID, handles []Handle) []base.RegionID {
	var held []base.RegionID
	if s, ok := c.sessions[id]; ok {
		for _, h := range handles {
			if row, ok := s.rows[h.Region]; ok && row.Held {
				held = append(held, h.Region)
			}
		}
	}
	return held
}

// Unhold takes holds back, all or nothing.
type Unhold struct {
	Session  base.SessionID
	Sequence uint64
	Handles  []Handle           // tokens may be empty
	Token    []byte             // hold token, in place of the process
	Nonce    [base.IDBytes]byte // 128 fresh random bits from the shell
	Peer     Peer
}

// Unhold ends holds and returns the draining regions whose last hold it was.
// The recorded sequence again succeeds. A region that is gone, or that this
// session never held, is success: the sequence is remembered, so that a hold
// that was sent before and arrives later changes nothing. A session that is not
// known yet is bound for that only by valid capabilities: its id is no secret.
// Errors: ErrInvalid, ErrDenied, ErrStale, ErrLimit.
func (c *Core) Unhold(b *Batch, now int64, req Unhold) ([]base.RegionID, error) {
	if err := c.checkHoldList(req.Session, req.Sequence, req.Handles); err != nil {
		return nil, err
	}
	s, ok := c.sessions[req.Session]
	if !ok {
		if !c.allResolve(req.Handles) {
			return nil, nil
		}
		if len(c.sessions) >= c.limits.MaxSessionCount || c.holdCount+len(req.Handles) > c.limits.MaxHoldCount {
			return nil, fmt.Errorf("%w: %d sessions and %d holds are recorded, the settings max_session_count and max_hold_count allow no more", base.ErrLimit, len(c.sessions), c.holdCount)
		}
		s = newSession(req.Session, req.Peer, nonceOf(req.Session, req.Peer, req.Nonce))
		c.sessions[req.Session] = s
		c.putSession(b, s)
	} else if token := c.holdToken(&s.row); !hmac.Equal(req.Token, token[:]) && !s.knows(req.Peer.Secret) {
		if len(req.Token) > 0 {
			return nil, fmt.Errorf("%w: session %s: the hold token is not this session's", base.ErrDenied, req.Session)
		}
		if s.row.Process.IsZero() {
			return nil, fmt.Errorf("%w: session %s was bound without a process: its hold token or its secret is needed", base.ErrDenied, req.Session)
		}
		if err := c.checkPeer(s, req.Peer); err != nil {
			return nil, err
		}
	}
	fresh := 0
	for _, h := range req.Handles {
		row, ok := s.rows[h.Region]
		if !ok {
			fresh++
			continue
		}
		if req.Sequence < row.Sequence || req.Sequence == row.Sequence && row.Held {
			return nil, fmt.Errorf("%w: sequence %d for region %d, recorded is %d", base.ErrStale, req.Sequence, h.Region, row.Sequence)
		}
	}
	if c.holdCount+fresh > c.limits.MaxHoldCount {
		return nil, fmt.Errorf("%w: %d holds are recorded, the setting max_hold_count allows no more", base.ErrLimit, c.holdCount)
	}
	var freed []base.RegionID
	for _, h := range req.Handles {
		r, ok := c.regions[h.Region]
		if !ok {
			continue
		}
		row, ok := s.rows[h.Region]
		if ok && req.Sequence == row.Sequence {
			continue
		}
		next := holdRow{Session: req.Session, Region: h.Region, Sequence: req.Sequence, SinceMS: now}
		if ok {
			next.Server, next.OwnerIncarnation = row.Server, row.OwnerIncarnation
		}
		c.setRow(b, s, r, next)
		if r.row.Draining && r.held == 0 {
			freed = append(freed, h.Region)
		}
	}
	for _, id := range freed { // only now: it may be the end of the session's record
		c.freeExtent(b, c.regions[id])
	}
	return freed, nil
}

// allResolve reports whether there are regions in a list and every one that
// exists comes with a valid capability.
func (c *Core) allResolve(handles []Handle) bool {
	any := false
	for _, h := range handles {
		if _, ok := c.regions[h.Region]; !ok {
			continue
		}
		if _, err := c.resolve(h, accessRead); err != nil {
			return false
		}
		any = true
	}
	return any
}

func newSession(id base.SessionID, p Peer, nonce [base.IDBytes]byte) *session {
	return &session{
		row:  sessionRow{ID: id, Node: p.Node, Boot: p.Boot, Process: p.Process, Nonce: nonce, Reason: p.Reason},
		rows: map[base.RegionID]*holdRow{},
	}
}

// setRow records what a session's newest sequence for a region did.
func (c *Core) setRow(b *Batch, s *session, r *region, row holdRow) {
	old, ok := s.rows[r.row.ID]
	if !ok {
		c.holdCount++
	}
	was := ok && old.Held
	switch {
	case row.Held && !was:
		r.held++
		s.held++
	case !row.Held && was:
		r.held--
		s.held--
	}
	kept := row
	s.rows[r.row.ID], r.rows[s.row.ID] = &kept, &kept
	b.put(bucketHolds, holdKey(s.row.ID, r.row.ID), kept)
	b.touch(r.pool)
}

func (c *Core) putSession(b *Batch, s *session) { b.put(bucketSessions, string(s.row.ID[:]), s.row) }

// forgetIfIdle ends the record of a session without a process once no row is
// left: nothing that is still under way could find a region of it.
func (c *Core) forgetIfIdle(b *Batch, s *session) {
	if s.row.Process.IsZero() && len(s.rows) == 0 {
		delete(c.sessions, s.row.ID)
		b.drop(bucketSessions, string(s.row.ID[:]))
	}
}

// Gone ends sessions on a proof: all rows go, draining regions that nobody else
// holds become free, and the owners hear of it.
func (c *Core) gone(b *Batch, s *session, proof Proof) {
	owners := map[base.OwnerID]bool{}
	if s.row.Server != (base.OwnerID{}) {
		owners[s.row.Server] = true
	}
	var drained []*region
	for id, row := range s.rows {
		r := c.regions[id]
		if row.Held {
			r.held--
			owners[r.row.Owner] = true
		}
		delete(r.rows, s.row.ID)
		c.holdCount--
		b.drop(bucketHolds, holdKey(s.row.ID, id))
		b.touch(r.pool)
		if r.row.Draining && r.held == 0 {
			drained = append(drained, r)
		}
	}
	s.rows, s.held = nil, 0
	delete(c.sessions, s.row.ID)
	b.drop(bucketSessions, string(s.row.ID[:]))
	delete(c.unwatched, s.row.Process)
	list := make([]base.OwnerID, 0, len(owners))
	for o := range owners {
		list = append(list, o)
	}
	slices.SortFunc(list, func(x, y base.OwnerID) int { return strings.Compare(string(x[:]), string(y[:])) })
	b.event(Event{Kind: EventSessionGone, Owners: list, Session: s.row.ID, Proof: proof})
	slices.SortFunc(drained, func(x, y *region) int { return int(x.row.ID) - int(y.row.ID) })
	for _, r := range drained {
		c.freeExtent(b, r)
	}
}

// endSessions ends all sessions that match, in order, and returns how many
// regions were held by them.
func (c *Core) endSessions(b *Batch, proof Proof, match func(*session) bool) (holds int) {
	var list []*session
	for _, s := range c.sessions {
		if match(s) {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(x, y *session) int { return compareSessions(x.row.ID, y.row.ID) })
	for _, s := range list {
		holds += s.held
		c.gone(b, s, proof)
	}
	return holds
}

// ProcessGone says that a watched process is proved gone.
func (c *Core) ProcessGone(b *Batch, p ProcessID, proof Proof) {
	if p.IsZero() {
		return
	}
	// What an agent vouches for is its own to end.
	c.endSessions(b, proof, func(s *session) bool { return s.row.Agent == (base.AgentID{}) && s.row.Process == p })
	delete(c.unwatched, p)
	for _, o := range c.owners {
		changed := false
		if o.row.Current.Process == p && !o.row.Current.Ended {
			o.row.Current.Ended, changed = true, true
		}
		n := len(o.row.Unproved)
		o.row.Unproved = slices.DeleteFunc(slices.Clone(o.row.Unproved), func(s start) bool { return s.Process == p })
		if changed || len(o.row.Unproved) != n {
			c.putOwner(b, o)
		}
	}
}

// noteBoot learns a node's boot id. Another one than before proves that all
// processes of the older boot are gone. It is whoever's word that names the node, so it
// counts only for a node without an agent.
func (c *Core) noteBoot(b *Batch, node base.NodeID, boot base.BootID) {
	if node == (base.NodeID{}) || boot == (base.BootID{}) {
		return
	}
	if c.agents[node] != nil {
		return // that node's boot is its agent's to say
	}
	c.rebooted(b, node, boot)
}

// setBoot records a node's boot id. It reports whether it was another one.
func (c *Core) setBoot(b *Batch, node base.NodeID, boot base.BootID) (changed bool) {
	n, ok := c.nodes[node]
	if ok && n.Boot == boot {
		return false
	}
	next := nodeRow{ID: node, Boot: boot}
	if ok {
		next.Ended = append(slices.Clone(n.Ended), n.Boot)
		next.Ended = next.Ended[max(0, len(next.Ended)-maxEndedBootCount):]
	}
	c.nodes[node] = &next
	b.put(bucketNodes, string(node[:]), next)
	return ok
}

func (c *Core) rebooted(b *Batch, node base.NodeID, boot base.BootID) {
	if !c.setBoot(b, node, boot) {
		return
	}
	c.endSessions(b, ProofReboot, func(s *session) bool {
		return s.row.Node == node && s.row.Boot != (base.BootID{}) && s.row.Boot != boot
	})
	for _, o := range c.owners {
		ended := func(s start) bool { return s.Node == node && s.Boot != (base.BootID{}) && s.Boot != boot }
		n := len(o.row.Unproved)
		o.row.Unproved = slices.DeleteFunc(slices.Clone(o.row.Unproved), ended)
		changed := n != len(o.row.Unproved)
		if ended(o.row.Current) && !o.row.Current.Ended {
			o.row.Current.Ended, changed = true, true
		}
		if changed {
			c.putOwner(b, o)
		}
	}
}

// NoteOwnBoot is noteBoot for the node that this program runs on, at start.
func (c *Core) NoteOwnBoot(b *Batch) { c.noteBoot(b, c.cfg.Node, c.cfg.Boot) }

// ResetHolds ends the sessions of a node's agents of older epochs: the NIC
// registrations of those are destroyed. Errors: ErrInvalid.
func (c *Core) ResetHolds(b *Batch, node base.NodeID, epoch []byte) (int, error) {
	if node == (base.NodeID{}) || len(epoch) == 0 || len(epoch) > maxAgentEpochBytes {
		return 0, fmt.Errorf("%w: reset-holds needs node_id and an agent_epoch of 1 to %d bytes", base.ErrInvalid, maxAgentEpochBytes)
	}
	return c.endSessions(b, ProofDeregistered, func(s *session) bool {
		return s.row.Node == node && len(s.row.AgentEpoch) > 0 && string(s.row.AgentEpoch) != string(epoch)
	}), nil
}

// DropHolds is the operator's word that a node's mappers, or one session, are
// gone. Errors: ErrInvalid.
func (c *Core) DropHolds(b *Batch, node base.NodeID, id base.SessionID) (int, error) {
	if (node == base.NodeID{}) == (id == base.SessionID{}) {
		return 0, fmt.Errorf("%w: drop-holds takes either a node or a session", base.ErrInvalid)
	}
	return c.endSessions(b, ProofOperator, func(s *session) bool {
		return s.row.ID == id || node != (base.NodeID{}) && s.row.Node == node
	}), nil
}
