package directory

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/policy"
)

// expansion is the state of an Expand operation.
type expansion struct {
	ticket   ExpandTicket
	charged  uint64 // bytes reserved in pool and session until it is finished
	inFlight bool   // the shell has the ticket
	done     bool
	// abandoned: the operation left the ledger; what it makes goes back at once.
	abandoned bool
	grant     RegionGrant
}

// ExpandBegin asks for one more region. For a private cpu pool it answers with the
// grant. For a shared pool it reserves the bytes and answers with a ticket: the
// shell has the resource manager allocate and calls ExpandFinish. An operation that
// was finished answers with its grant again.
// Errors: base.ErrInvalid and base.ErrMismatch name the field; base.ErrPermanent
// for a region larger than the largest pool or the session's bound (RPC-21);
// base.ErrFull when the cpu grant or every pool has no room (for a shared pool the
// shell may GiveBackVictim and ask again); base.ErrLimit when the session's cxl bound
// is used up, which no victim helps; base.ErrPending
// while the ticket is out; base.ErrDenied for a scheduler or without a proved pool;
// base.ErrUnavailable without an owner incarnation; base.ErrStale.
func (d *Directory) ExpandBegin(now time.Duration, who Caller, req *ExpandRequest) (*RegionGrant, *ExpandTicket, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return nil, nil, err
	}
	if op := s.operation(req.Operation); op != nil {
		switch {
		case op.kind == opTombstone:
			return nil, nil, fmt.Errorf("%w: expand: operation %d was refused", base.ErrAborted, req.Operation)
		case op.kind != opExpand:
			return nil, nil, fmt.Errorf("%w: operation %d was used for another call", base.ErrInvalid, req.Operation)
		case op.expand.done:
			grant := op.expand.grant
			return &grant, nil, nil
		case op.expand.inFlight:
			return nil, nil, fmt.Errorf("%w: expand, operation %d is at the resource manager", base.ErrPending, req.Operation)
		}
		op.expand.inFlight = true
		ticket := op.expand.ticket
		ticket.Caller = who
		return nil, &ticket, nil
	}
	if err := d.admitOperation(s, req.Operation, 0); err != nil {
		return nil, nil, err
	}
	pageCount, err := d.checkExpand(s, req)
	if err != nil {
		return nil, nil, err
	}
	if req.Medium == base.MediumCPU {
		grant, err := d.expandPrivate(s, req, pageCount)
		if err != nil {
			return nil, nil, err
		}
		s.addOperation(&operation{seq: req.Operation, kind: opExpand, epoch: s.epoch, session: s, expand: &expansion{done: true, grant: *grant}})
		return grant, nil, nil
	}
	return d.expandShared(now, s, who, req, pageCount)
}

// RefuseExpand is called by the shell before it answers an Expand with the error why, and
// returns what it may answer. The client takes a refusal for the end of the operation, so
// that another delivery of the same request, which waits for room or comes late, must not
// make a region that nobody would use. Where one is at the resource manager already, the
// answer is base.ErrPending, and the client asks again.
func (d *Directory) RefuseExpand(now time.Duration, who Caller, seq base.Sequence, why error) error {
	s, err := d.begin(now, who)
	if err != nil {
		return why // neither does a delivery of an epoch that is over
	}
	switch op := s.operation(seq); {
	case op == nil:
		d.refused(s, seq)
	case op.kind == opExpand:
		return fmt.Errorf("%w: expand: operation %d was refused, and is carried out for another delivery (%w)", base.ErrPending, seq, why)
	}
	return why
}

// checkExpand validates what does not depend on room.
func (d *Directory) checkExpand(s *session, req *ExpandRequest) (uint64, error) {
	lim := &d.cfg.Limits
	bad := func(field string, value any, allowed string) error {
		return fmt.Errorf("%w: expand: %s is %v, allowed: %s", base.ErrInvalid, field, value, allowed)
	}
	switch {
	case s.role != base.RoleWorker:
		return 0, fmt.Errorf("%w: expand: a scheduler has no grants", base.ErrDenied)
	case req.Medium != base.MediumCPU && req.Medium != base.MediumCXL:
		return 0, bad("medium", req.Medium, "cpu, cxl")
	case req.Medium == base.MediumCPU && s.cpu == nil:
		return 0, fmt.Errorf("%w: expand: the session was opened without cpu_bytes", base.ErrDenied)
	case req.Bytes == 0:
		return 0, bad("bytes", 0, "1 and more")
	case req.PageBytes == 0 || req.PageBytes > base.MaxObjectBytes:
		return 0, bad("page_size", req.PageBytes, fmt.Sprintf("1 to %d", base.MaxObjectBytes))
	case req.PieceBytes != s.pieceBytes:
		return 0, fmt.Errorf("%w: expand: piece_size is %d, the session's namespace has %d", base.ErrMismatch, req.PieceBytes, s.pieceBytes)
	}
	if s.valueBytes > 0 {
		// Engine objects carry their leaf hashes behind the data (docs/PROTOCOL.md, Checksum).
		pieces := (s.valueBytes + uint64(s.pieceBytes) - 1) / uint64(s.pieceBytes)
		if least := s.valueBytes + 8*pieces; req.PageBytes < least || req.PageBytes%4096 != 0 {
			return 0, bad("page_size", req.PageBytes, fmt.Sprintf("a multiple of 4096 of at least %d (value_bytes and 8 bytes a piece)", least))
		}
	}
	largest := d.largestPoolBytes(s, req.Medium)
	if req.Bytes > largest {
		return 0, fmt.Errorf("%w: expand: bytes is %d, the largest %v pool has %d", base.ErrPermanent, req.Bytes, req.Medium, largest)
	}
	pageCount := (req.Bytes-1)/req.PageBytes + 1
	if hi, whole := bits.Mul64(pageCount, req.PageBytes); hi != 0 || whole > largest {
		return 0, fmt.Errorf("%w: expand: %d pages of %d bytes are more than the largest %v pool has, %d", base.ErrPermanent, pageCount, req.PageBytes, req.Medium, largest)
	}
	switch {
	case pageCount > lim.MaxRegionPages:
		return 0, limitErr("max-region-pages", lim.MaxRegionPages, fmt.Sprintf("expand: the region has %d pages", pageCount))
	case d.pageCount+pageCount > lim.MaxPages:
		return 0, limitErr("max-pages", lim.MaxPages, fmt.Sprintf("expand: %d pages and %d more", d.pageCount, pageCount))
	case d.regionCount+len(d.flights) >= lim.MaxRegions:
		return 0, limitErr("max-regions", lim.MaxRegions, "expand: there are as many regions")
	}
	return pageCount, nil
}

func (d *Directory) expandPrivate(s *session, req *ExpandRequest, pageCount uint64) (*RegionGrant, error) {
	p := s.cpu
	size := pageCount * req.PageBytes
	if size > p.grantBytes-p.reserved {
		return nil, fmt.Errorf("%w: expand: %d bytes wanted, of the session's cpu grant %d are free of %d", base.ErrFull, size, p.grantBytes-p.reserved, p.grantBytes)
	}
	if p.nextID > base.MaxRegionID {
		return nil, fmt.Errorf("%w: private region ids of session %v", base.ErrExhausted, s.id)
	}
	id := p.nextID
	p.nextID++
	p.reserved += size
	place := Place{PageBytes: req.PageBytes, PageCount: pageCount, PieceBytes: req.PieceBytes}
	d.addRegion(p, s.ns, id, 0, place, s, s.id, nil)
	return &RegionGrant{Pool: p.number, Region: id, Place: place}, nil
}

func (d *Directory) expandShared(_ time.Duration, s *session, who Caller, req *ExpandRequest, pageCount uint64) (*RegionGrant, *ExpandTicket, error) {
	if d.cfg.Owner == 0 {
		return nil, nil, fmt.Errorf("%w: expand: the server has no resource manager now; cpu pools only", base.ErrUnavailable)
	}
	var candidates []policy.Candidate
	proved, rounded, largest := false, false, uint64(0)
	for _, p := range d.shared {
		if p.info.Medium != req.Medium || !p.info.Online {
			continue
		}
		mine := s.proved&^s.lostPools&p.bit != 0
		proved = proved || mine
		if mine {
			largest = max(largest, p.info.CapacityBytes)
		}
		if p.info.Coherence == base.CoherenceSoftware && req.PageBytes%4096 != 0 {
			rounded = true // software-coherent pools have whole pages only
			continue
		}
		room := p.info.CapacityBytes - min(p.reserved, p.info.CapacityBytes)
		candidates = append(candidates, policy.Candidate{Pool: p.number, Medium: p.info.Medium, Eligible: mine, FreeBytes: room})
	}
	extent := extentBytes(req.PageBytes, pageCount)
	switch {
	case !proved:
		return nil, nil, fmt.Errorf("%w: expand: the session has proved no online %v pool; prove its access domain first", base.ErrDenied, req.Medium)
	case extent > s.cxlLimit:
		return nil, nil, fmt.Errorf("%w: expand: the region takes %d bytes with its tables, the session's cxl bound is %d (cxl_bytes of its open, or setting cxl-bytes)",
			base.ErrPermanent, extent, s.cxlLimit)
	case extent > s.cxlLimit-min(s.cxlUsed, s.cxlLimit):
		// Not base.ErrFull: giving back what others left would make no room here.
		return nil, nil, limitErr("cxl-bytes, or cxl_bytes of the session's open", s.cxlLimit,
			fmt.Sprintf("expand: the region takes %d bytes with its tables and the session has %d", extent, s.cxlUsed))
	}
	targets := policy.Place(nil, policy.Order{}, extent, candidates)
	if len(targets) == 0 {
		if len(candidates) == 0 && rounded {
			return nil, nil, fmt.Errorf("%w: expand: page_size is %d, allowed on software-coherent pools: multiples of 4096", base.ErrInvalid, req.PageBytes)
		}
		if extent > largest {
			return nil, nil, fmt.Errorf("%w: expand: the region takes %d bytes with its tables, the largest %v pool that the session has proved has %d",
				base.ErrPermanent, extent, req.Medium, largest)
		}
		return nil, nil, fmt.Errorf("%w: expand: no %v pool has %d bytes free for this session", base.ErrFull, req.Medium, extent)
	}
	p := d.pools[targets[0]]
	d.rmOperation++
	e := &expansion{charged: extent, inFlight: true, ticket: ExpandTicket{
		Caller: who, Operation: req.Operation, Pool: p.number, PoolID: p.info.ID, RMOperation: d.rmOperation,
		Namespace: s.ns.id, PageCount: pageCount, PageBytes: req.PageBytes, PieceBytes: req.PieceBytes,
	}}
	p.reserved += extent
	s.cxlUsed += extent
	op := &operation{seq: req.Operation, kind: opExpand, epoch: s.epoch, session: s, expand: e}
	s.addOperation(op)
	d.flights[e.ticket.RMOperation] = op
	ticket := e.ticket
	return nil, &ticket, nil
}

// ExpandFinish is the resource manager's answer to a ticket. With an error whose
// outcome is unknown (base.ErrUnknown, ErrTimeout, ErrUnavailable) the bytes stay
// reserved and the same operation gives the same ticket again; any other error
// gives them back and forgets the operation. When the session has ended meanwhile,
// the region goes back at once.
// Errors: the given error, or why the answer cannot be used.
func (d *Directory) ExpandFinish(now time.Duration, ticket *ExpandTicket, answer *RegionGrant, failure error) (RegionGrant, error) {
	d.expireDue(now)
	op := d.flights[ticket.RMOperation]
	if op == nil {
		return RegionGrant{}, fmt.Errorf("%w: expand: no allocation %d is in flight", base.ErrStale, ticket.RMOperation)
	}
	e, s := op.expand, op.session
	e.inFlight = false
	p := d.pools[e.ticket.Pool]
	if failure == nil {
		failure = checkAnswer(e, answer)
	}
	if failure != nil {
		switch base.CodeOf(failure) {
		case base.CodeUnknown, base.CodeTimeout, base.CodeUnavailable, base.CodeAborted:
			if e.abandoned {
				d.endFlight(op)
			}
			return RegionGrant{}, failure
		}
		d.endFlight(op)
		s.dropOperation(op)
		return RegionGrant{}, failure
	}
	d.endFlight(op)
	if p.regions[answer.Region] != 0 {
		s.dropOperation(op)
		return RegionGrant{}, fmt.Errorf("%w: expand: the resource manager gave region %d of pool %v twice", base.ErrInternal, answer.Region, p.info.ID)
	}
	if d.sessions[s.id] != s || s.state == StateKept {
		d.effect(Effect{Kind: EffectFreeRegion, Pool: p.number, PoolID: p.info.ID, Region: answer.Region, Incarnation: answer.Incarnation})
		return RegionGrant{}, fmt.Errorf("%w: expand: session %v has ended", base.ErrStale, s.id)
	}
	p.reserved += answer.Place.ExtentBytes
	g := d.addRegion(p, s.ns, answer.Region, answer.Incarnation, answer.Place, s, s.id, answer.Write)
	if e.abandoned {
		d.sendBack(now, g)
		return RegionGrant{}, fmt.Errorf("%w: expand: operation %d is below the watermark", base.ErrStale, op.seq)
	}
	if s.state == StateLeft {
		g.state = regionKept
		return RegionGrant{}, fmt.Errorf("%w: expand: session %v has closed", base.ErrClosed, s.id)
	}
	e.done = true
	e.grant = *answer
	e.grant.Pool, e.grant.PoolID = p.number, p.info.ID
	return e.grant, nil
}

// endFlight gives the reserved bytes of an allocation back.
func (d *Directory) endFlight(op *operation) {
	e := op.expand
	delete(d.flights, e.ticket.RMOperation)
	p := d.pools[e.ticket.Pool]
	p.reserved -= e.charged
	op.session.cxlUsed -= min(op.session.cxlUsed, e.charged)
	e.charged = 0
}

// checkAnswer refuses an RM answer that is not what the ticket asked for.
func checkAnswer(e *expansion, a *RegionGrant) error {
	t := &e.ticket
	switch {
	case a == nil:
		return fmt.Errorf("%w: expand: no answer and no error", base.ErrInternal)
	case a.Region == 0 || a.Region >= base.FirstPrivateRegion:
		return fmt.Errorf("%w: expand: the resource manager gave region id %d", base.ErrInternal, a.Region)
	case a.Incarnation == 0 || a.Incarnation > base.MaxIncarnation:
		return fmt.Errorf("%w: expand: the resource manager gave region incarnation %d", base.ErrInternal, a.Incarnation)
	case a.Place.PageBytes != t.PageBytes || a.Place.PageCount != t.PageCount || a.Place.PieceBytes != t.PieceBytes:
		return fmt.Errorf("%w: expand: asked for %d pages of %d bytes, the resource manager gave %d of %d", base.ErrInternal,
			t.PageCount, t.PageBytes, a.Place.PageCount, a.Place.PageBytes)
	case a.Place.ExtentBytes < a.Place.PageBytes*a.Place.PageCount:
		return fmt.Errorf("%w: expand: the resource manager gave an extent of %d bytes", base.ErrInternal, a.Place.ExtentBytes)
	}
	return nil
}

// Return gives a granted region back: its keys stop being found now, its leases
// drain, then the resource manager frees it (MS-06). The writer says with it that
// nothing writes there any more. A repeated Return succeeds.
// Errors: base.ErrNotFound; base.ErrDenied for another session's region;
// base.ErrPinned when views or copy leases are out in a private cpu region;
// base.ErrStale, base.ErrLimit.
func (d *Directory) Return(now time.Duration, who Caller, seq base.Sequence, poolNumber uint32, id base.RegionID) error {
	s, err := d.begin(now, who)
	if err != nil {
		return err
	}
	if op := s.operation(seq); op != nil {
		if op.kind != opReturn {
			return fmt.Errorf("%w: operation %d was used for another call", base.ErrInvalid, seq)
		}
		return nil
	}
	if err := d.admitOperation(s, seq, 0); err != nil {
		return err
	}
	g := d.regionOf(poolNumber, id)
	switch {
	case g == nil:
		return fmt.Errorf("%w: return: region %d of pool number %d", base.ErrNotFound, id, poolNumber)
	case g.writer != s:
		return fmt.Errorf("%w: return: region %d is written by session %v", base.ErrDenied, id, g.writerID)
	case g.private() && g.leases > 0:
		return fmt.Errorf("%w: return: %d leases are out in region %d", base.ErrPinned, g.leases, id)
	case g.state >= regionGoing:
		return nil
	case s.relist == relistWaiting:
		return fmt.Errorf("%w: return: list what the session holds first", base.ErrBusy)
	}
	s.addOperation(&operation{seq: seq, kind: opReturn, epoch: s.epoch, session: s})
	d.sendBack(now, g)
	return nil
}

// AllocationInFlight reports whether an RM operation of this incarnation may still
// make a region. With [Directory.KnowsRegion] it says which regions on the RM's
// list are nobody's.
// Concurrency: read lock.
func (d *Directory) AllocationInFlight() bool { return len(d.flights) > 0 }

// KnowsRegion reports whether a region of the resource manager's list is granted,
// kept or on its way back here.
// Concurrency: read lock.
func (d *Directory) KnowsRegion(pool base.PoolID, id base.RegionID) bool {
	p := d.sharedPool(pool)
	return p != nil && p.regions[id] != 0
}

// DescribeRegions appends what a reader may know of regions: of the given ids in
// every pool that the session has proved, or with all of every readable region of
// its namespace. A region that it may not read is reported with base.ErrNotFound.
// Concurrency: read lock. Errors: base.ErrStale; base.ErrDenied for a scheduler.
func (d *Directory) DescribeRegions(now time.Duration, who Caller, ids []base.RegionID, all bool, dst []RegionInfo) ([]RegionInfo, error) {
	s, err := d.current(now, who)
	if err != nil {
		return dst, err
	}
	if s.role != base.RoleWorker {
		return dst, fmt.Errorf("%w: a scheduler maps nothing", base.ErrDenied)
	}
	describe := func(g *region) {
		dst = append(dst, RegionInfo{
			Pool: g.pool.number, PoolID: g.pool.info.ID, Region: g.id, Incarnation: g.incarnation, Place: g.place, Writer: g.writerID, Write: g.write,
		})
	}
	may := func(g *region) bool {
		return !g.private() && g.ns == s.ns && s.proved&g.pool.bit != 0 && (g.state == regionGranted || g.state == regionKept)
	}
	if all {
		for _, g := range d.regions {
			if g != nil && may(g) {
				describe(g)
			}
		}
		return dst, nil
	}
	for _, id := range ids {
		found := false
		for _, p := range d.shared {
			if slot := p.regions[id]; slot != 0 && may(d.regions[slot]) {
				describe(d.regions[slot])
				found = true
			}
		}
		if !found {
			dst = append(dst, RegionInfo{Region: id, Err: fmt.Errorf("%w: region %d", base.ErrNotFound, id)})
		}
	}
	return dst, nil
}
