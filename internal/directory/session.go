package directory

import (
	"crypto/subtle"
	"fmt"
	"slices"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/policy"
)

// session is one client process's registration.
type session struct {
	id       base.SessionID
	epoch    base.Epoch
	secret   Secret
	shown    bool   // a call of this epoch came: its secret is with the client
	spare    Secret // the last one that was shown, until the newest is; zero: none
	state    State
	deadline time.Duration
	role     base.Role
	engine   string
	instance string
	rank     uint32
	world    uint32
	ns       *namespace
	provable bool
	views    bool

	valueBytes uint64
	pieceBytes uint32
	writeOrder policy.Order
	readOrder  policy.Order

	cpu      *pool
	cpuBytes uint64
	cpuNode  base.NodeID // whose budget the grant is charged to
	cxlLimit uint64      // ^0: bounded by the pools only
	cxlUsed  uint64      // extents of its regions and allocations in flight

	proved      uint64 // bits of shared pools
	unreachable map[regionKey]struct{}
	lostPools   uint64 // bits of shared pools reported as unreachable

	regions     []uint32 // slots
	keptRegions int      // once it is gone: regions that it wrote and that are still here

	leases   int
	records  []*leaseRecord // by sequence
	requests requestTable

	ops       []*operation // by sequence
	opRows    int
	watermark base.Sequence

	nextEvent   uint64
	window      []sentEvent
	backlog     []pageTask
	backlogHead int
	// backlogLimit is the length at which the backlog is compacted.
	backlogLimit int
	poolsDue     bool // an EventPools waits for room in the window
	beat         uint64
	uses         []PoolUse

	relist relistProgress
	// listed: the RM's list named it as a writer or holder of a recovered region.
	listed bool
	// unjudged: it listed before the RM's list was known, and must list again then.
	unjudged bool
}

type regionKey struct {
	pool   uint32
	region base.RegionID
}

// holds reports whether the session's record must stay.
func (s *session) holds() bool {
	return s.cpu != nil || len(s.regions) > 0 || s.leases > 0 || (s.listed && s.relist == relistWaiting)
}

// unused reports whether no call of the session ever came: its secret may be with nobody,
// and it has written and mapped nothing. Its expiry is its end, and it keeps nobody out.
func (s *session) unused() bool {
	return !s.shown && s.spare == Secret{} && s.state != StateAwaited && !s.listed && len(s.regions) == 0 && s.leases == 0
}

// dropUnused ends sessions that hold an engine's rank and were never used.
func (d *Directory) dropUnused(now time.Duration, req *OpenRequest) {
	if req.EngineID == "" || req.Role != base.RoleWorker {
		return
	}
	for _, o := range slices.Clone(d.sessionList) {
		if o.id != req.Session && o.engine == req.EngineID && o.rank == req.Rank && o.role == base.RoleWorker && o.state == StateLive && o.unused() {
			d.gone(now, o, "it was never used, and another session has its rank")
		}
	}
}

// Open registers a session, or gives a known one a new epoch. An error changes
// nothing.
// Errors: base.ErrInvalid names the field; base.ErrDenied when a known session is
// opened without proof; base.ErrBusy when another worker has the engine's rank,
// with the time from which a retry can succeed (SES-02); base.ErrMismatch names
// the field that differs (ID-08, ID-13); base.ErrFull when the cpu budget has no
// room (CAP-06); base.ErrLimit names its setting.
func (d *Directory) Open(now time.Duration, req *OpenRequest) (OpenResult, error) {
	d.expireDue(now)
	if err := d.validateOpen(req); err != nil {
		return OpenResult{}, err
	}
	writeOrder, err := policy.NewOrder("write_order", req.WriteOrder)
	if err != nil {
		return OpenResult{}, err
	}
	readOrder, err := policy.NewOrder("read_order", req.ReadOrder)
	if err != nil {
		return OpenResult{}, err
	}
	s := d.sessions[req.Session]
	if s != nil {
		if err := d.checkReopen(s, req); err != nil {
			return OpenResult{}, err
		}
	}
	if err := d.checkEngine(now, req); err != nil {
		return OpenResult{}, err
	}
	last := req.PreviousEpoch
	if s != nil {
		last = max(last, s.epoch)
	}
	if last == ^base.Epoch(0) {
		return OpenResult{}, fmt.Errorf("%w: epochs of session %v", base.ErrExhausted, req.Session)
	}
	if s == nil || s.state == StateAwaited || (s.state == StateSuspect && !s.holds()) {
		if err := d.checkSessionLimit(); err != nil {
			return OpenResult{}, err
		}
	}
	if err := d.checkBudget(s, req); err != nil {
		return OpenResult{}, err
	}
	ns, err := d.joinNamespace(req)
	if err != nil {
		return OpenResult{}, err
	}
	d.dropUnused(now, req)
	awaited := s != nil && s.state == StateAwaited
	if s == nil {
		s = &session{id: req.Session}
		d.sessions[req.Session] = s
	} else if i := slices.Index(d.sessionList, s); i >= 0 {
		d.sessionList = slices.Delete(d.sessionList, i, i+1)
	}
	d.sessionList = append(d.sessionList, s)
	if s.ns == nil {
		s.ns = ns
		ns.sessions++
	}
	if s.epoch != 0 {
		d.closeConnections(s, "the session was opened again")
	}
	wasHidden := s.state == StateSuspect
	if s.shown {
		s.spare = s.secret
	}
	s.epoch, s.secret, s.shown, s.state = last+1, req.Secret, false, StateLive
	s.deadline = now + d.cfg.TTL
	s.role, s.engine, s.instance, s.rank, s.world = req.Role, req.EngineID, req.InstanceID, req.Rank, max(req.WorldSize, 1)
	s.provable, s.views = req.Provable, req.Views
	s.valueBytes, s.pieceBytes = req.ValueBytes, req.PieceBytes
	s.writeOrder, s.readOrder = writeOrder, readOrder
	s.lostPools, s.unreachable, s.uses, s.beat = 0, nil, nil, 0
	s.cxlLimit = ^uint64(0)
	if limit := max(req.CXLBytes, d.cfg.CXLBytes*b2u(req.CXLBytes == 0)); limit != 0 {
		s.cxlLimit = limit
	}
	d.openCPU(s, req)
	d.nextExpiry = min(d.nextExpiry, s.deadline)
	if awaited || (req.PreviousServerEpoch != 0 && req.PreviousServerEpoch != d.cfg.ServerEpoch && s.relist == relistNone) {
		s.relist = relistWaiting
	}
	d.reopenRegions(now, s, wasHidden)
	return OpenResult{
		Epoch: s.epoch, Namespace: s.ns.number, Pools: d.poolGrants(s), Relist: s.relist == relistWaiting, Deadline: s.deadline,
	}, nil
}

func b2u(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (d *Directory) validateOpen(req *OpenRequest) error {
	limit := d.cfg.Limits.MaxTextBytes
	bad := func(field string, value any, allowed string) error {
		return fmt.Errorf("%w: %s is %v, allowed: %s", base.ErrInvalid, field, value, allowed)
	}
	switch {
	case req.Session == base.SessionID{}:
		return bad("session_id", "zero", "16 random bytes")
	case req.Secret == Secret{}:
		return bad("secret", "zero", "16 random bytes")
	case req.Role != base.RoleWorker && req.Role != base.RoleScheduler:
		return bad("role", req.Role, "worker, scheduler")
	case req.Namespace == base.NamespaceID{}:
		return bad("namespace", "zero", "the SHA-256 of its canonical CBOR")
	case len(req.EngineID) > limit:
		return fmt.Errorf("%w: engine_id has %d bytes", limitErr("max-text-bytes", limit, "text too long"), len(req.EngineID))
	case len(req.InstanceID) > limit:
		return fmt.Errorf("%w: instance_id has %d bytes", limitErr("max-text-bytes", limit, "text too long"), len(req.InstanceID))
	case uint64(max(req.WorldSize, 1)) > u64(d.cfg.Limits.MaxShards):
		return limitErr("max-shards", d.cfg.Limits.MaxShards, fmt.Sprintf("world_size is %d", req.WorldSize))
	case req.Rank >= max(req.WorldSize, 1):
		return bad("rank", req.Rank, fmt.Sprintf("below world_size %d", max(req.WorldSize, 1)))
	case req.PieceBytes == 0 && req.Role == base.RoleWorker:
		return bad("piece_size", 0, "bytes of a checksum piece")
	case req.Opaque && req.ValueBytes != 0:
		return bad("value_bytes", req.ValueBytes, "0 for the opaque namespace")
	case req.ValueBytes > base.MaxObjectBytes:
		return bad("value_bytes", req.ValueBytes, fmt.Sprintf("at most %d", base.MaxObjectBytes))
	case req.Role == base.RoleScheduler && (req.CPUBytes != 0 || req.CXLBytes != 0 || req.Views):
		return bad("cpu_bytes, cxl_bytes, views", "set", "nothing: a scheduler has no grants, holds or views")
	case req.CPUBytes != 0 && d.cfg.CPUBudgetBytes == 0:
		return fmt.Errorf("%w: cpu_bytes is %d and this server has no cpu budget (setting cpu-budget)", base.ErrFull, req.CPUBytes)
	}
	return nil
}

func (d *Directory) checkReopen(s *session, req *OpenRequest) error {
	switch s.state {
	case StateKept:
		return fmt.Errorf("%w: the process of session %v is proved gone; open with a new session id", base.ErrDenied, s.id)
	case StateLeft:
		return fmt.Errorf("%w: session %v was closed with exports out; open with a new session id", base.ErrClosed, s.id)
	case StateAwaited:
		if req.Proof != ProofProcess {
			return fmt.Errorf("%w: session %v is from before the server's restart and only its own process may open it: "+
				"use the server's Unix socket, or a new session id", base.ErrDenied, s.id)
		}
		for _, slot := range s.regions {
			if g := d.regions[slot]; g.ns.id != req.Namespace {
				return fmt.Errorf("%w: namespace of session %v is %v, its region %d has %v", base.ErrMismatch, s.id, req.Namespace, g.id, g.ns.id)
			}
		}
		return nil
	}
	// A client that never got the answer to its last Open has the secret before it.
	newest := subtle.ConstantTimeCompare(req.PreviousSecret[:], s.secret[:])
	spare := subtle.ConstantTimeCompare(req.PreviousSecret[:], s.spare[:])
	secretHolds := req.PreviousSecret != Secret{} && newest|spare == 1
	if req.Proof != ProofProcess && !secretHolds {
		return fmt.Errorf("%w: session %v is open; to open it again show the secret of its last epoch or use the Unix socket", base.ErrDenied, s.id)
	}
	mismatch := func(field string, have, got any) error {
		return fmt.Errorf("%w: %s of session %v is %v, was opened with %v", base.ErrMismatch, field, s.id, got, have)
	}
	switch {
	case s.role != req.Role:
		return mismatch("role", s.role, req.Role)
	case s.ns.id != req.Namespace:
		return mismatch("namespace", s.ns.id, req.Namespace)
	case s.engine != req.EngineID:
		return mismatch("engine_id", s.engine, req.EngineID)
	case s.rank != req.Rank:
		return mismatch("rank", s.rank, req.Rank)
	case s.cpuBytes != req.CPUBytes:
		return mismatch("cpu_bytes", s.cpuBytes, req.CPUBytes)
	}
	return nil
}

// checkEngine keeps an engine's ranks unique and its world size one (SES-02).
func (d *Directory) checkEngine(now time.Duration, req *OpenRequest) error {
	if req.EngineID == "" {
		return nil
	}
	for _, o := range d.sessionList {
		if o.id == req.Session || o.engine != req.EngineID || o.state != StateLive || o.unused() {
			continue
		}
		if o.world != max(req.WorldSize, 1) {
			return fmt.Errorf("%w: world_size of engine %q is %d, session %v opened it with %d", base.ErrMismatch, req.EngineID, req.WorldSize, o.id, o.world)
		}
		if req.Role == base.RoleWorker && o.role == base.RoleWorker && o.rank == req.Rank {
			return fmt.Errorf("%w: rank %d of engine %q is session %v; a retry can succeed when that session is closed, "+
				"when its process is proved gone, or %v from now if it sends no heartbeat",
				base.ErrBusy, req.Rank, req.EngineID, o.id, (o.deadline - now).Round(time.Millisecond))
		}
	}
	return nil
}

// checkSessionLimit counts sessions that are live or hold something (RPC-22).
func (d *Directory) checkSessionLimit() error {
	n := 0
	for _, o := range d.sessionList {
		if o.state == StateLive || (o.state != StateAwaited && o.holds()) {
			n++
		}
	}
	if n >= d.cfg.Limits.MaxSessions {
		return limitErr("max-sessions", d.cfg.Limits.MaxSessions, fmt.Sprintf("%d sessions are open or hold memory", n))
	}
	return nil
}

func (d *Directory) checkBudget(s *session, req *OpenRequest) error {
	if req.CPUBytes == 0 || (s != nil && s.cpu != nil) {
		return nil
	}
	used := d.hosts[req.Node]
	if free := d.cfg.CPUBudgetBytes - min(used, d.cfg.CPUBudgetBytes); req.CPUBytes > free {
		if req.CPUBytes > d.cfg.CPUBudgetBytes {
			return fmt.Errorf("%w: cpu_bytes is %d, the cpu budget of a host is %d (setting cpu-budget)", base.ErrPermanent, req.CPUBytes, d.cfg.CPUBudgetBytes)
		}
		return fmt.Errorf("%w: cpu_bytes is %d, of the host's cpu budget %d bytes are free of %d (setting cpu-budget)",
			base.ErrFull, req.CPUBytes, free, d.cfg.CPUBudgetBytes)
	}
	return nil
}

func (d *Directory) openCPU(s *session, req *OpenRequest) {
	s.cpuBytes = req.CPUBytes
	if req.CPUBytes == 0 || s.cpu != nil {
		return
	}
	d.hosts[req.Node] += req.CPUBytes
	s.cpuNode = req.Node
	p := &pool{
		number: d.nextPool, owner: s, grantBytes: req.CPUBytes, regions: map[base.RegionID]uint32{}, nextID: base.FirstPrivateRegion,
		info: Pool{
			Medium: base.MediumCPU, Tier: base.TierL1, Scope: base.ScopeProcess, Coherence: base.CoherenceHardware,
			CapacityBytes: req.CPUBytes, LargestFreeBytes: req.CPUBytes, Online: true,
		},
	}
	d.nextPool++
	d.pools[p.number] = p
	s.cpu = p
}

// joinNamespace returns the namespace of a request and checks or records the
// geometry of its rank. It is the last check of Open: what it records stays.
func (d *Directory) joinNamespace(req *OpenRequest) (*namespace, error) {
	ns := d.namespaces[req.Namespace]
	if ns != nil && ns.opaque != req.Opaque && ns.sessions > 0 {
		return nil, fmt.Errorf("%w: opaque of namespace %v is %v, was opened with %v", base.ErrMismatch, req.Namespace, req.Opaque, ns.opaque)
	}
	stated := req.Role == base.RoleWorker
	if ns != nil && stated {
		if g, ok := ns.geometry[req.Rank]; ok {
			if g.valueBytes != req.ValueBytes {
				return nil, fmt.Errorf("%w: value_bytes of namespace %v rank %d is %d, was opened with %d", base.ErrMismatch, req.Namespace, req.Rank, req.ValueBytes, g.valueBytes)
			}
			if g.pieceBytes != req.PieceBytes {
				return nil, fmt.Errorf("%w: piece_size of namespace %v rank %d is %d, was opened with %d", base.ErrMismatch, req.Namespace, req.Rank, req.PieceBytes, g.pieceBytes)
			}
		} else if len(ns.geometry) >= d.cfg.Limits.MaxShards {
			return nil, limitErr("max-shards", d.cfg.Limits.MaxShards, "the namespace has as many ranks")
		}
	}
	if ns == nil {
		var err error
		if ns, err = d.namespaceFor(req.Namespace); err != nil {
			return nil, err
		}
	}
	if ns.sessions == 0 {
		ns.opaque = req.Opaque
	}
	if stated {
		ns.geometry[req.Rank] = geometry{req.ValueBytes, req.PieceBytes}
	}
	return ns, nil
}

// namespaceFor returns the namespace of a digest and numbers a new one.
func (d *Directory) namespaceFor(id base.NamespaceID) (*namespace, error) {
	if ns := d.namespaces[id]; ns != nil {
		return ns, nil
	}
	if len(d.namespaces) >= d.cfg.Limits.MaxNamespaces && !d.dropNamespace() {
		return nil, limitErr("max-namespaces", d.cfg.Limits.MaxNamespaces, "every namespace is in use")
	}
	if d.nextNS == ^base.NamespaceNumber(0) {
		return nil, fmt.Errorf("%w: namespace numbers of this server epoch", base.ErrExhausted)
	}
	d.nextNS++
	ns := &namespace{id: id, number: d.nextNS, geometry: map[uint32]geometry{}}
	d.namespaces[id] = ns
	d.nsByNumber[ns.number] = ns
	return ns, nil
}

// dropNamespace forgets the oldest namespace that nothing uses. Every object lies
// in a region, so that a namespace without regions has none.
func (d *Directory) dropNamespace() bool {
	var oldest *namespace
	for _, ns := range d.namespaces {
		if ns.sessions == 0 && ns.regions == 0 && !d.nsTombs[ns.number] && (oldest == nil || ns.number < oldest.number) {
			oldest = ns
		}
	}
	if oldest == nil {
		return false
	}
	delete(d.namespaces, oldest.id)
	delete(d.nsByNumber, oldest.number)
	return true
}

// poolGrants lists the pools that a session may use.
func (d *Directory) poolGrants(s *session) []PoolGrant {
	if s.role != base.RoleWorker {
		return nil
	}
	var out []PoolGrant
	if s.cpu != nil {
		out = append(out, PoolGrant{Number: s.cpu.number, Pool: s.cpu.info, Private: true, GrantBytes: s.cpu.grantBytes, Proved: true})
	}
	for _, p := range d.shared {
		out = append(out, PoolGrant{
			Number: p.number, Pool: p.info, GrantBytes: min(p.info.CapacityBytes, s.cxlLimit), Proved: s.proved&p.bit != 0,
		})
	}
	return out
}

// Pools lists the pools that the session may use now.
// Concurrency: read lock. Errors: base.ErrStale.
func (d *Directory) Pools(now time.Duration, who Caller) ([]PoolGrant, error) {
	s, err := d.current(now, who)
	if err != nil {
		return nil, err
	}
	return d.poolGrants(s), nil
}

// Secret returns the secret of a live epoch, for the transport's proof.
// Concurrency: read lock. Errors: base.ErrStale.
func (d *Directory) Secret(now time.Duration, who Caller) (Secret, base.NamespaceNumber, error) {
	s, err := d.current(now, who)
	if err != nil {
		return Secret{}, 0, err
	}
	return s.secret, s.ns.number, nil
}

// SetProvable records that the session's process is watched from now on.
func (d *Directory) SetProvable(now time.Duration, who Caller) error {
	s, err := d.begin(now, who)
	if err == nil {
		s.provable = true
	}
	return err
}

// ProveDomains records which shared pools the session has proved; earlier reports
// of unreachable regions in them are forgotten. Pools that are not in the list
// stay as they were.
// Errors: base.ErrStale; base.ErrDenied for a scheduler.
func (d *Directory) ProveDomains(now time.Duration, who Caller, pools []base.PoolID) error {
	s, err := d.begin(now, who)
	if err != nil {
		return err
	}
	if s.role != base.RoleWorker {
		return fmt.Errorf("%w: a scheduler has no access domains", base.ErrDenied)
	}
	for _, id := range pools {
		if p := d.sharedPool(id); p != nil {
			s.proved |= p.bit
			s.lostPools &^= p.bit
			for k := range s.unreachable {
				if k.pool == p.number {
					delete(s.unreachable, k)
				}
			}
		}
	}
	return nil
}

// ReportUnreachable stops counting hits in a region, or with region 0 in a whole
// pool, for this session until it proves the pool again (FE-08, FE-12).
// Errors: base.ErrStale, base.ErrNotFound. Beyond max-unreachable regions the
// whole pool is taken as lost.
func (d *Directory) ReportUnreachable(now time.Duration, who Caller, poolNumber uint32, id base.RegionID) error {
	s, err := d.begin(now, who)
	if err != nil {
		return err
	}
	p := d.pools[poolNumber]
	if p == nil || p.owner != nil {
		return fmt.Errorf("%w: pool number %d is no shared pool", base.ErrNotFound, poolNumber)
	}
	if id != 0 && len(s.unreachable) < d.cfg.Limits.MaxUnreachable {
		if s.unreachable == nil {
			s.unreachable = map[regionKey]struct{}{}
		}
		s.unreachable[regionKey{p.number, id}] = struct{}{}
		return nil
	}
	s.lostPools |= p.bit
	return nil
}

// Heartbeat extends the session and returns its new deadline. A sequence that is
// not higher than the last one changes nothing.
// Errors: base.ErrStale.
func (d *Directory) Heartbeat(now time.Duration, who Caller, req *HeartbeatRequest) (time.Duration, error) {
	s, err := d.begin(now, who)
	if err != nil {
		return 0, err
	}
	if req.Sequence <= s.beat {
		return s.deadline, nil
	}
	s.beat = req.Sequence
	s.deadline = now + d.cfg.TTL
	d.raiseWatermark(s, req.Watermark)
	d.recordUses(s, req.Uses)
	d.acknowledgeEvents(now, s, req.LastEvent)
	return s.deadline, nil
}

// expireDue ends the sessions whose deadline has come.
func (d *Directory) expireDue(now time.Duration) {
	if now < d.nextExpiry {
		return
	}
	next := never
	var due []*session
	for _, s := range d.sessionList {
		switch {
		case s.state != StateLive:
		case s.deadline <= now:
			due = append(due, s)
		default:
			next = min(next, s.deadline)
		}
	}
	d.nextExpiry = next
	// Not within that loop: with the last lease of a region its writer's record can go.
	for _, s := range due {
		unused := s.unused()
		d.counters.SessionsExpired++
		d.effect(Effect{Kind: EffectSessionExpired, Session: s.id, Epoch: s.epoch})
		d.suspend(now, s, fmt.Sprintf("no heartbeat came for %v", d.cfg.TTL))
		if unused {
			d.gone(now, s, "it was never used")
		}
	}
	d.trimExpired()
}

// fence ends an epoch before its time: the client must open again.
func (d *Directory) fence(now time.Duration, s *session, reason string) {
	d.counters.SessionsFenced++
	s.nextEvent++
	d.effect(Effect{Kind: EffectSendEvent, Session: s.id, Epoch: s.epoch, Event: Event{Number: s.nextEvent, Kind: EventFence, Reason: reason}})
	d.suspend(now, s, reason)
}

// suspend makes a live session SUSPECT: hidden, charged, nothing reused. Copy
// leases end, views stay (R4).
func (d *Directory) suspend(now time.Duration, s *session, reason string) {
	s.state = StateSuspect
	d.closeConnections(s, reason)
	d.endLeases(now, s, leasesCopy)
	d.endRequests(s)
	s.window, s.backlog, s.backlogHead = nil, nil, 0
}

// closeConnections ends an epoch at the transport.
func (d *Directory) closeConnections(s *session, reason string) {
	d.effect(Effect{Kind: EffectCloseConnections, Session: s.id, Epoch: s.epoch, Event: Event{Kind: EventFence, Reason: reason}})
}

// trimExpired forgets the oldest records of expired sessions that hold nothing.
func (d *Directory) trimExpired() {
	n := 0
	for _, s := range d.sessionList {
		if s.state == StateSuspect && !s.holds() {
			n++
		}
	}
	for i := 0; n > d.cfg.Limits.MaxExpiredSessions && i < len(d.sessionList); {
		if s := d.sessionList[i]; s.state == StateSuspect && !s.holds() {
			d.forget(s)
			n--
			continue
		}
		i++
	}
}

// forget drops a record.
func (d *Directory) forget(s *session) {
	d.dropOperations(s)
	if s.ns != nil {
		s.ns.sessions--
	}
	delete(d.sessions, s.id)
	if i := slices.Index(d.sessionList, s); i >= 0 {
		d.sessionList = slices.Delete(d.sessionList, i, i+1)
	}
}
