package directory

import (
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// After a restart of the server live sessions keep their hits: what a writer lists as
// READY, committed by an older incarnation, is READY here from that frame on, unless a
// delete or a higher order says otherwise. Pages whose outcome was uncertain, and those
// that a lease of another generation names, are QUARANTINED, charged and never found,
// until rule "Server restart" holds for their region; then they are retired and come
// back page by page. No listed page is free before that rule, whatever its state. Leases
// and views that are listed are recorded and protect from the first moment.
//
// A writer that ends in the middle of its list leaves a region of which not every mark is
// known: it goes back whole, with the keys that were listed.

// relistProgress is where a session is with its list.
type relistProgress uint8

const (
	relistNone    relistProgress = iota
	relistWaiting                // opened; its list has not ended
	relistDone
)

// restartState is what rule "Server restart" needs.
type restartState struct {
	regions           int  // recovered regions that are not accounted for
	predecessorsEnded bool // the processes of all older incarnations are proved ended ...
	endedAt           time.Duration
}

// recovery is what a region of an older incarnation waits for.
type recovery struct {
	holders   []Holder
	writer    base.SessionID // also of a region that its writer does not hold
	listed    bool           // its writer has listed it: every mark in it is known here
	done      bool           // the rule holds
	accounted bool           // done, and listed or back at the resource manager
}

// unlisted reports whether marks that nobody here knows of may be in the region, for good.
func (g *region) unlisted() bool {
	return g.recovered != nil && g.writer == nil && !g.recovered.listed
}

func (r *recovery) holds(id base.SessionID) bool {
	return slices.ContainsFunc(r.holders, func(h Holder) bool { return h.Session == id })
}

// Holder is a mapper of a region on the resource manager's list.
type Holder struct {
	Session base.SessionID
	Views   bool // it may export views: only its open here, or its proved end, counts
}

// RecoveredRegion is a region of this owner that an older incarnation was granted.
type RecoveredRegion struct {
	Pool        base.PoolID
	Region      base.RegionID
	Incarnation base.Incarnation
	Place       Place
	Namespace   base.NamespaceID
	Writer      base.SessionID
	Write       []byte
	Holders     []Holder
}

// writerMaps reports whether the writer may have it mapped: a mapper has its hold first,
// and after a fence there are no new ones.
func (r *RecoveredRegion) writerMaps() bool {
	return slices.ContainsFunc(r.Holders, func(h Holder) bool { return h.Session == r.Writer })
}

// RecoverRegions takes over the regions of the resource manager's list after a start.
// Their bytes are charged and none is reused before rule "Server restart" holds. It is
// called before the first Open; a writer or holder that has opened already is fenced
// and must open and list again. Regions that are known are passed over.
// Errors, with nothing taken over: base.ErrInvalid, base.ErrNotFound for a pool that
// SetPools did not name, base.ErrLimit.
func (d *Directory) RecoverRegions(now time.Duration, regions []RecoveredRegion) error {
	d.expireDue(now)
	lim := &d.cfg.Limits
	var pages uint64
	fresh := 0
	for i := range regions {
		r := &regions[i]
		p := d.sharedPool(r.Pool)
		pl := &r.Place
		switch {
		case p == nil:
			return fmt.Errorf("%w: recover region %d: pool %v", base.ErrNotFound, r.Region, r.Pool)
		case r.Region == 0 || r.Region >= base.FirstPrivateRegion || r.Incarnation == 0 || r.Incarnation > base.MaxIncarnation ||
			r.Writer == base.SessionID{} || r.Namespace == base.NamespaceID{}:
			return fmt.Errorf("%w: recover region %d of pool %v: incomplete", base.ErrInvalid, r.Region, r.Pool)
		case pl.PageBytes == 0 || pl.PageBytes > base.MaxObjectBytes || pl.PageCount == 0 ||
			pl.ExtentBytes/pl.PageBytes < pl.PageCount:
			return fmt.Errorf("%w: recover region %d of pool %v: %d pages of %d bytes in %d", base.ErrInvalid, r.Region, r.Pool, pl.PageCount, pl.PageBytes, pl.ExtentBytes)
		case pl.PageCount > lim.MaxRegionPages:
			return limitErr("max-region-pages", lim.MaxRegionPages, fmt.Sprintf("recover region %d: %d pages", r.Region, pl.PageCount))
		case len(r.Holders) > lim.MaxRecoveredHolders:
			return limitErr("max-recovered-holders", lim.MaxRecoveredHolders, fmt.Sprintf("recover region %d: %d holders", r.Region, len(r.Holders)))
		}
		if p.regions[r.Region] == 0 {
			fresh++
			pages += pl.PageCount
		}
	}
	if d.regionCount+fresh > lim.MaxRegions {
		return limitErr("max-regions", lim.MaxRegions, fmt.Sprintf("recover: %d regions", d.regionCount+fresh))
	}
	if d.pageCount+pages > lim.MaxPages {
		return limitErr("max-pages", lim.MaxPages, fmt.Sprintf("recover: %d pages", d.pageCount+pages))
	}
	for i := range regions {
		if _, err := d.namespaceFor(regions[i].Namespace); err != nil {
			return err
		}
		d.namespaces[regions[i].Namespace].regions++ // kept while the list is taken over
	}
	for i := range regions {
		d.recoverRegion(now, &regions[i])
		d.namespaces[regions[i].Namespace].regions--
	}
	d.checkRestart(now)
	return nil
}

func (d *Directory) recoverRegion(now time.Duration, r *RecoveredRegion) {
	p := d.sharedPool(r.Pool)
	if p.regions[r.Region] != 0 {
		return
	}
	writerID := r.Writer
	var owner *session
	if !r.writerMaps() {
		writerID = base.SessionID{} // its writer never got it, or gave it up: nobody lists it
	} else if owner = d.await(now, r.Writer); owner.state == StateKept {
		owner.keptRegions++
		owner = nil
	}
	for _, h := range r.Holders {
		d.await(now, h.Session)
	}
	p.reserved += r.Place.ExtentBytes
	g := d.addRegion(p, d.namespaces[r.Namespace], r.Region, r.Incarnation, r.Place, owner, writerID, r.Write)
	g.recovered = &recovery{holders: append([]Holder(nil), r.Holders...), writer: r.Writer}
	d.restart.regions++
	if owner == nil {
		p.keptBytes += g.capacityBytes()
		d.keep(now, g, false)
	}
}

// await makes or finds the record of a session on the resource manager's list.
func (d *Directory) await(now time.Duration, id base.SessionID) *session {
	s := d.sessions[id]
	if s == nil {
		s = &session{id: id, state: StateAwaited}
		d.sessions[id] = s
		d.sessionList = append(d.sessionList, s)
	}
	if !s.listed {
		s.listed = true
		s.relist = relistWaiting
		if s.state == StateLive {
			d.fence(now, s, "the server has recovered regions that this session maps")
		}
	}
	return s
}

// PredecessorsEnded says that the processes of all older incarnations of this server
// are proved ended; a fence alone is no such proof. From then on a full TTL satisfies
// holds without views.
func (d *Directory) PredecessorsEnded(now time.Duration) {
	if !d.restart.predecessorsEnded {
		d.restart.predecessorsEnded, d.restart.endedAt = true, now
	}
	d.checkRestart(now)
}

// RelistIncomplete reports whether something of older incarnations is not accounted for:
// the resource manager has not listed it yet, or a recovered region waits for rule "Server
// restart" or, listed by nobody, for the resource manager to have it back. Until it is
// false, the shell frees no region of an older incarnation but those of EffectFreeRegion,
// and no delete is acknowledged.
// Concurrency: read lock.
func (d *Directory) RelistIncomplete() bool { return d.unrecovered() || d.restart.regions > 0 }

// unrecovered reports whether it is not known yet what older incarnations left.
func (d *Directory) unrecovered() bool {
	return d.cfg.Manager == ManagerExpected && d.cfg.Owner == 0
}

// judgeAgain asks a session for its list again that listed too early.
func (d *Directory) judgeAgain(now time.Duration, s *session) {
	if !s.unjudged {
		return
	}
	s.unjudged = false
	s.relist = relistWaiting
	if s.state == StateLive {
		d.fence(now, s, "the server knows now which regions it has, and wants this session's list again")
	}
}

// accountedFor counts a recovered region off: no mark in it is unknown here.
func (d *Directory) accountedFor(g *region) {
	if g.recovered == nil || g.recovered.accounted {
		return
	}
	g.recovered.accounted = true
	d.restart.regions--
	d.relistEnded()
}

// relistEnded ends what waits for the relisting, once it is complete.
func (d *Directory) relistEnded() {
	if d.RelistIncomplete() {
		return
	}
	clear(d.tombstones)
	clear(d.nsTombs)
	for _, id := range slices.Clone(d.deleteList) {
		if pd := d.deletes[id]; pd != nil {
			d.settleDelete(pd)
		}
	}
}

// settled reports whether a session has opened here and listed, or is proved gone.
func (d *Directory) settled(id base.SessionID) bool {
	s := d.sessions[id]
	return s == nil || s.state == StateKept || (s.state != StateAwaited && s.relist != relistWaiting)
}

// restartRule is rule "Server restart" for one region: every holder and the writer
// that the resource manager lists has opened here or is proved gone. A hold without
// views is also satisfied by a full TTL after the older processes were proved ended.
// It returns when time alone could change the answer.
func (d *Directory) restartRule(now time.Duration, g *region) (bool, time.Duration) {
	if !d.settled(g.recovered.writer) {
		return false, never
	}
	next := time.Duration(0)
	for _, h := range g.recovered.holders {
		if d.settled(h.Session) {
			continue
		}
		if h.Views || !d.restart.predecessorsEnded {
			return false, never
		}
		next = max(next, d.restart.endedAt+d.cfg.TTL)
	}
	return next <= now, next
}

// checkRestart applies the rule to every region that waits for it.
func (d *Directory) checkRestart(now time.Duration) time.Duration {
	next := never
	if d.restart.regions == 0 {
		return next
	}
	for _, g := range d.regions {
		if g == nil || g.recovered == nil || g.recovered.done {
			continue
		}
		ok, due := d.restartRule(now, g)
		if !ok {
			next = min(next, due)
			continue
		}
		d.restartSettled(now, g)
	}
	return next
}

// restartSettled lets the pages of a recovered region go on.
func (d *Directory) restartSettled(now time.Duration, g *region) {
	g.recovered.done = true
	if !g.unlisted() {
		d.accountedFor(g)
	}
	for page := range g.pages {
		ref := g.pages[page]
		if ref == 0 {
			continue
		}
		switch r := d.store.replica(ref); r.state() {
		case replicaQuarantined:
			d.releaseQuarantine(now, g, ref)
		case replicaRetiring:
			d.advance(now, g, ref)
		}
		if d.regions[g.slot] != g {
			return
		}
	}
	d.settleKept(now, g)
	d.settleGoing(now, g)
}

// releaseQuarantine ends the quarantine of a page when nothing protects it any more.
// A page that its writer listed is retired, so that the writer clears its mark and
// takes it back; one that only leases named is free at its writer.
func (d *Directory) releaseQuarantine(now time.Duration, g *region, ref replicaRef) {
	r := d.store.replica(ref)
	if r.state() != replicaQuarantined || r.leases() != 0 {
		return
	}
	if !r.has(flagRestartHeld) {
		d.freeReplica(g, r.page, ref)
		return
	}
	if g.recovered.done {
		d.retire(now, g, ref)
	}
}

// Relist takes a frame of a session's list after a restart and appends a
// hot.RelistResult a page to dst. It is idempotent; the frame with Last ends the list,
// and only then the session's commits are taken. Pages of regions that are not the
// session's, and of private cpu pools (the writer knows its own), are refused. While it
// is not known what older incarnations left, pages are kept as they are: SetOwner asks
// for the list again. A scheduler, which holds nothing, sends an empty list.
// Errors, with nothing taken: base.ErrStale; base.ErrLimit when the leases would pass
// the session's limit or the table is full; base.ErrInvalid. base.ErrFull without memory:
// the frame may be sent again.
func (d *Directory) Relist(now time.Duration, who Caller, req *hot.RelistRequest, dst []byte) ([]byte, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return dst, err
	}
	d.raiseWatermark(s, req.Watermark)
	if s.role != base.RoleWorker && req.Pages.Len()+req.Leases.Len() > 0 {
		return dst, fmt.Errorf("%w: relist: a scheduler holds nothing", base.ErrDenied)
	}
	open := s.relist == relistWaiting
	if open {
		if err := d.checkRelist(s, req); err != nil {
			return dst, err
		}
	}
	for i := range req.Pages.Len() {
		page := req.Pages.At(i)
		res, err := d.relistPage(now, s, &page, open)
		if err != nil {
			return dst, fmt.Errorf("relist: %w", err)
		}
		if res == hot.RelistRefused {
			d.counters.RelistRefused++
		}
		dst = append(dst, byte(res))
	}
	if !open {
		return dst, nil
	}
	for i := range req.Leases.Len() {
		l := req.Leases.At(i)
		if err := d.relistLease(s, &l); err != nil {
			return dst, err
		}
	}
	if req.Last {
		s.relist = relistDone
		for _, slot := range s.regions {
			if g := d.regions[slot]; g.recovered != nil {
				g.recovered.listed = true
			}
		}
		d.checkRestart(now)
	}
	return dst, nil
}

// checkRelist makes sure that a frame fits whole.
func (d *Directory) checkRelist(s *session, req *hot.RelistRequest) error {
	lim := &d.cfg.Limits
	leases, pages := d.unlistedRows(s, req)
	if s.leases+leases > lim.MaxLeases {
		return limitErr("max-leases", lim.MaxLeases, fmt.Sprintf("relist: the session has %d leases and lists %d more", s.leases, leases))
	}
	need := u64(pages + leases)
	if d.store.objectCount+need > lim.MaxObjects {
		return limitErr("max-objects", lim.MaxObjects, "relist: the directory is full of objects")
	}
	if d.store.extraCount+need > lim.MaxExtraReplicas {
		return limitErr("max-extra-replicas", lim.MaxExtraReplicas, "relist: the directory is full of further replicas")
	}
	for i := range req.Leases.Len() {
		l := req.Leases.At(i)
		if l.Acquire == 0 || l.Index >= hot.MaxKeys || (l.Kind != base.LeaseCopy && l.Kind != base.LeaseView) || (l.Kind == base.LeaseView && !s.views) {
			return fmt.Errorf("%w: relist: lease %d of operation %d, kind %v", base.ErrInvalid, l.Index, l.Acquire, l.Kind)
		}
		if rec := s.record(l.Acquire); rec != nil && rec.kind != l.Kind {
			return fmt.Errorf("%w: relist: leases of operation %d are of two kinds", base.ErrInvalid, l.Acquire)
		}
	}
	return nil
}

// unlistedRows counts what a frame would add: a list that is sent again, whole, adds
// nothing, however full the session's books are.
func (d *Directory) unlistedRows(s *session, req *hot.RelistRequest) (leases, pages int) {
	for i := range req.Leases.Len() {
		l := req.Leases.At(i)
		rec := s.record(l.Acquire)
		if rec == nil || uint64(len(rec.rows)) <= uint64(l.Index) || rec.rows[l.Index] < firstObject {
			leases++
		}
	}
	for i := range req.Pages.Len() {
		p := req.Pages.At(i)
		g := d.regionOf(p.Pool, p.Region)
		if g != nil && !g.private() && g.writer == s {
			if page, ok := g.pageAt(p.Offset); ok && g.pages[page] != 0 && d.store.replica(g.pages[page]).has(flagRestartHeld) {
				continue
			}
		}
		pages++
	}
	return leases, pages
}

func (d *Directory) relistPage(now time.Duration, s *session, p *hot.RelistPage, open bool) (hot.RelistResult, error) {
	g := d.regionOf(p.Pool, p.Region)
	if g == nil && d.unrecovered() && p.Region < base.FirstPrivateRegion {
		s.unjudged = true
		return hot.RelistKept, nil
	}
	if g == nil || g.private() || g.writer != s || g.state != regionGranted || g.recovered == nil {
		return hot.RelistRefused, nil
	}
	page, ok := g.pageAt(p.Offset)
	if !ok || p.Length == 0 || p.Length > g.place.PageBytes || p.Generation.High() != uint32(g.incarnation) ||
		p.Generation.Counter() == 0 || p.Key.IsZero() {
		return hot.RelistRefused, nil
	}
	if ref := g.pages[page]; ref != 0 {
		r := d.store.replica(ref)
		if r.has(flagRestartHeld) {
			if r.generation != p.Generation {
				if !open {
					return hot.RelistKept, nil
				}
				return hot.RelistRefused, nil
			}
			if r.state() == replicaReady && p.State != hot.RelistReady {
				d.retire(now, g, ref) // the writer knows more of it than in its last list
			}
			return relistResultOf(r), nil
		}
		if !open {
			return hot.RelistKept, nil // it came back since, and is another use of the page
		}
		// Leases named the page first: it stays theirs, and is the writer's too, under its
		// key, so that a delete finds it. Of two generations the writer's is the current one.
		if err := d.store.adopt(ref, uint32(g.ns.number), &p.Key, &p.Parent); err != nil {
			return 0, err
		}
		r = d.store.replica(ref)
		same := r.generation == p.Generation
		r.generation = p.Generation
		r.checksum, r.order = p.Checksum, p.Order
		d.account(g, r, -1)
		r.lengthState = r.lengthState&0xff | p.Length<<8
		r.setFlag(flagRestartHeld)
		g.held++
		g.last[page] = r.generation
		d.account(g, r, +1)
		return d.relistState(now, g, ref, p, same), nil
	}
	if !open {
		// Judged when its list was open, and free since: the writer is about to hear it.
		return hot.RelistKept, nil
	}
	// An uncertain page is never published here, but what is known of it may be deleted.
	w := keyWords(p.Key[:])
	ns := uint32(g.ns.number)
	ref, err := d.store.insert(ns, &w, d.store.find(ns, &w), &p.Parent, replica{
		generation: p.Generation, order: p.Order, checksum: p.Checksum, region: g.slot, page: page,
		lengthState: p.Length<<8 | uint64(replicaQuarantined|flagRestartHeld),
	})
	if err != nil {
		return 0, err
	}
	g.pages[page] = ref
	g.last[page] = p.Generation
	g.used++
	g.held++
	r := d.store.replica(ref)
	d.account(g, r, +1)
	return d.relistState(now, g, ref, p, true), nil
}

// relistState decides what a page that is listed for the first time is. What was retiring,
// or was deleted since, is retired (R7): it waits for its mark and for the rule. What was
// READY is READY again when its generation is the one that readers know (same), and of
// two claims to its key in the domain the higher order stays.
func (d *Directory) relistState(now time.Duration, g *region, ref replicaRef, p *hot.RelistPage, same bool) hot.RelistResult {
	r := d.store.replica(ref)
	_, deleted := d.tombstones[tombstoneKey{g.ns.number, p.Key}]
	deleted = deleted || d.nsTombs[g.ns.number]
	// A session lists what it committed to older incarnations; a delete at this one means
	// all of that.
	become := func(to replicaState) {
		d.account(g, r, -1)
		r.setState(to)
		d.account(g, r, +1)
	}
	switch {
	case p.State == hot.RelistRetiring || deleted:
		become(replicaRetiring)
		d.deleteListed(g, ref, &p.Key)
	case p.State == hot.RelistReady && same && p.Order != 0 && p.Order.Owner() < d.cfg.Owner:
		become(replicaReady)
		d.counters.RelistKept++
		d.resolveClaim(now, g, ref)
	}
	return relistResultOf(d.store.replica(ref))
}

func relistResultOf(r *replica) hot.RelistResult {
	switch r.state() {
	case replicaReady:
		return hot.RelistKept
	case replicaRetiring:
		return hot.RelistRetire
	}
	return hot.RelistQuarantined
}

// relistLease records a lease on a page of anybody.
func (d *Directory) relistLease(s *session, l *hot.RelistLease) error {
	g := d.regionOf(l.Pool, l.Region)
	if g == nil || g.private() || g.recovered == nil || g.recovered.done || !g.recovered.holds(s.id) {
		// Not our region any more: the resource manager's hold protects it. Or the session
		// has no hold there, and so maps nothing that a lease could protect. Or the rule
		// holds already: then this is a copy lease that expired by time.
		return nil
	}
	page, ok := g.pageAt(l.Offset)
	if !ok {
		return fmt.Errorf("%w: relist: offset %d of region %d", base.ErrInvalid, l.Offset, l.Region)
	}
	rec := s.record(l.Acquire)
	if rec == nil {
		rec = &leaseRecord{seq: l.Acquire, kind: l.Kind, rows: d.rowBuffer(), listed: true}
		s.addRecord(rec)
	}
	for uint64(len(rec.rows)) <= uint64(l.Index) {
		rec.rows = append(rec.rows, rowReleased)
	}
	if rec.rows[l.Index] >= firstObject || rec.kind != l.Kind {
		return nil // listed already
	}
	ref := g.pages[page]
	if ref == 0 {
		var err error
		// The reader's generation is recorded and raises nothing: what the writer may
		// commit next is not a reader's to say.
		ref, err = d.store.insertOrphan(replica{
			generation: l.Generation, region: g.slot, page: page, lengthState: uint64(replicaQuarantined),
		})
		if err != nil {
			return err
		}
		g.pages[page] = ref
		g.used++
		d.account(g, d.store.replica(ref), +1)
	}
	rec.rows[l.Index] = ref
	rec.left++
	d.store.replica(ref).lease(l.Kind)
	d.countLeases(s, g, l.Kind, 1)
	return nil
}
