// Package cabitest is a store inside one process behind the interface of
// internal/cabi, for tests of the C ABI and of the Python package: no server, no
// device, faults on demand. It is deliberately simple: one lock, no eviction, no
// epochs, and it is no model of the protocol.
//
// A client whose InstanceID is
//
//   - "panic:OP" panics in OP ("probe", "alloc", "close", ...),
//   - "away" finds no server at Open,
//   - "slow" waits in Ping until its context ends.
package cabitest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
)

// Store is what all clients of a test share.
type Store struct {
	mu struct {
		sync.Mutex
		objects    map[objectKey]*object
		regions    map[base.RegionID]*region
		lastRegion base.RegionID
	}
}

type objectKey struct {
	ns  base.NamespaceID
	key base.Key
}

type object struct {
	region *region
	index  base.PageIndex
	length uint64
	views  int
}

type pageState uint8

const (
	pageFree pageState = iota
	pageWriting
	pageReady
)

type region struct {
	id    base.RegionID
	owner *Client
	page  uint64
	mem   []byte
	pages []pageState
}

func (r *region) bytes(i base.PageIndex) []byte {
	start := uint64(i) * r.page
	return r.mem[start : start+r.page : start+r.page]
}

// NewStore returns an empty store.
func NewStore() *Store {
	s := &Store{}
	s.mu.objects = make(map[objectKey]*object)
	s.mu.regions = make(map[base.RegionID]*region)
	return s
}

// Client is one client of a Store.
type Client struct {
	store   *Store
	cfg     client.Config
	ns      base.NamespaceID
	page    uint64
	session base.SessionID
	eventFD int
	mu      struct { // guarded by Store.mu
		owned    []*region
		closed   bool
		exported map[base.RegionID]int
		views    map[uint64]*object
		pins     map[base.Key][]uint64
		last     uint64
		layouts  map[client.LayoutID]client.Layout
		device   map[client.LayoutID]bool
		jobs     map[client.JobID][]base.Code
		done     []client.JobID
		bytes    uint64
	}
}

// Open is an Opener.
func (s *Store) Open(_ context.Context, cfg client.Config) (cabi.Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.InstanceID == "away" {
		return nil, fmt.Errorf("%w: no server at %s", base.ErrUnavailable, cfg.ServerAddress)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	c := &Client{store: s, cfg: cfg, ns: base.NamespaceOf(cfg.Namespace), session: base.NewID(), eventFD: fd, page: cfg.PageBytes}
	if !cfg.Opaque && cfg.ValueBytes > 0 {
		if c.page, err = keys.EnginePageBytes(cfg.ValueBytes, max(cfg.PieceBytes, keys.MinPieceBytes)); err != nil {
			return nil, err
		}
	}
	c.mu.views = make(map[uint64]*object)
	c.mu.exported = make(map[base.RegionID]int)
	c.mu.pins = make(map[base.Key][]uint64)
	c.mu.layouts = make(map[client.LayoutID]client.Layout)
	c.mu.device = map[client.LayoutID]bool{}
	c.mu.jobs = make(map[client.JobID][]base.Code)
	if cfg.Role == base.RoleWorker && cfg.RegionBytes+cfg.CXLBytes+cfg.CPUBytes > 0 {
		if err := c.expand(max(cfg.RegionBytes, cfg.CPUBytes)); err != nil {
			return nil, err
		}
	}
	cfg.Logger.Info("fake client is open", "session", c.session)
	return c, nil
}

func (c *Client) fault(op string) {
	if strings.TrimPrefix(c.cfg.InstanceID, "panic:") == op {
		panic("told to panic in " + op)
	}
}

func (c *Client) expand(size uint64) error {
	if size == 0 {
		size = 64 << 20
	}
	count := size / c.page
	mem, err := unix.Mmap(-1, 0, int(count*c.page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) //nolint:gosec // a test's size
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	c.store.mu.Lock()
	c.store.mu.lastRegion++
	r := &region{id: c.store.mu.lastRegion, owner: c, page: c.page, mem: mem, pages: make([]pageState, count)}
	c.store.mu.regions[r.id] = r
	c.mu.owned = append(c.mu.owned, r)
	c.mu.bytes += count * c.page
	c.store.mu.Unlock()
	if c.cfg.OnRegion != nil {
		c.cfg.OnRegion(r.id, count)
	}
	return nil
}

var errClosed = fmt.Errorf("%w: client", base.ErrClosed)

// ReleaseRegionView takes a RegionView back.
func (c *Client) ReleaseRegionView(id base.RegionID) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if c.mu.exported[id] == 0 {
		return fmt.Errorf("%w: no view of region %d is out", base.ErrNotFound, id)
	}
	c.mu.exported[id]--
	return nil
}

// Close returns regions without objects.
func (c *Client) Close(context.Context) error {
	c.fault("close")
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	if c.mu.closed {
		return nil
	}
	c.mu.closed = true
	for k := range c.mu.pins {
		for _, id := range c.mu.pins[k] {
			c.releaseLocked(id)
		}
	}
	c.cfg.Logger.Warn("fake client is closed", "views", len(c.mu.views))
	for _, r := range c.mu.owned {
		if c.mu.exported[r.id] == 0 && len(c.mu.views) == 0 && !slices.Contains(r.pages, pageReady) {
			delete(c.store.mu.regions, r.id)
			_ = unix.Munmap(r.mem)
		}
	}
	return unix.Close(c.eventFD)
}

// Connected reports whether the client is open.
func (c *Client) Connected() bool {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	return !c.mu.closed
}

// Session returns the id.
func (c *Client) Session() base.SessionID { return c.session }

// Epoch is always 1.
func (c *Client) Epoch() base.Epoch { return 1 }

// Targets is the client itself.
func (c *Client) Targets(context.Context) ([]base.SessionID, error) {
	return []base.SessionID{c.session}, nil
}

// Stats counts pages.
func (c *Client) Stats() client.Stats {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	s := client.Stats{Views: uint64(len(c.mu.views)), Pins: uint64(len(c.mu.pins)), Regions: uint64(len(c.mu.owned))}
	for _, r := range c.mu.owned {
		for _, p := range r.pages {
			switch p {
			case pageFree:
				s.PagesFree++
			case pageWriting:
				s.PagesWriting++
			case pageReady:
				s.PagesReady++
			}
		}
	}
	return s
}

// Usage is empty but for the answer.
func (c *Client) Usage(context.Context) (*maruv1.UsageResponse, error) {
	return &maruv1.UsageResponse{}, nil
}

// Ping answers at once, or never.
func (c *Client) Ping(ctx context.Context) error {
	c.fault("ping")
	if c.cfg.InstanceID == "slow" {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

// Probe looks keys up.
func (c *Client) Probe(_ context.Context, q client.ProbeQuery, verdicts []byte) (int, error) {
	c.fault("probe")
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	leading, miss := 0, false
	for i := range q.Keys.Len() {
		switch {
		case miss && q.Mode == hot.ModePrefix:
			verdicts[i] = byte(hot.NotTried)
		case c.store.mu.objects[objectKey{c.ns, q.Keys.At(i)}] != nil:
			verdicts[i] = byte(hot.MakeHit(base.MediumCXL))
			if !miss {
				leading++
			}
		default:
			verdicts[i], miss = byte(hot.Miss), true
		}
	}
	return leading, nil
}

// RefreshRequests has nothing to do.
func (c *Client) RefreshRequests(context.Context, []uint64) error { return nil }

// EndRequests has nothing to do.
func (c *Client) EndRequests(context.Context, []uint64) error { return nil }

// SubmitLookup answers at once, and took a microsecond. Of five workers none has a session.
func (c *Client) SubmitLookup(q client.Lookup) (client.JobID, error) {
	if q.Workers < 1 || q.Replicas < 1 {
		return 0, fmt.Errorf("%w: %d workers, %d replicas", base.ErrInvalid, q.Workers, q.Replicas)
	}
	verdicts := make([]byte, q.Keys.Len())
	if _, err := c.Probe(context.Background(), client.ProbeQuery{Keys: q.Keys, Mode: hot.ModePrefix}, verdicts); err != nil {
		return 0, err
	}
	codes := make([]base.Code, len(verdicts)+1)
	for i, v := range verdicts {
		codes[i] = base.Code(v)
		if q.Workers == 5 {
			codes[i] = client.LookupAway
		}
	}
	codes[len(verdicts)] = 1
	return c.finished(codes)
}

// SubmitRequests has nothing to do.
func (c *Client) SubmitRequests(hot.RequestsAction, []uint64) error { return nil }

// Delete frees pages of objects that nobody views.
func (c *Client) Delete(_ context.Context, ks hot.Keys, codes []base.Code) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	for i := range ks.Len() {
		k := objectKey{c.ns, ks.At(i)}
		switch o := c.store.mu.objects[k]; {
		case o == nil:
			codes[i] = base.CodeNotFound
		case o.views > 0:
			codes[i] = base.CodePinned
		default:
			delete(c.store.mu.objects, k)
			o.region.pages[o.index] = pageFree
			codes[i] = base.CodeOK
		}
	}
	return nil
}

// Alloc gives out free pages.
func (c *Client) Alloc(_ context.Context, n int, dst []client.Page) (int, error) {
	c.fault("alloc")
	got := 0
	for {
		c.store.mu.Lock()
		if c.mu.closed {
			c.store.mu.Unlock()
			return got, errClosed
		}
		for _, r := range c.mu.owned {
			for i := range r.pages {
				if got == n {
					break
				}
				if r.pages[i] == pageFree {
					r.pages[i] = pageWriting
					p := base.PageIndex(i) //nolint:gosec // a test's count
					dst[got] = client.Page{Region: r.id, Index: p, Bytes: r.bytes(p)}
					got++
				}
			}
		}
		full := c.cfg.AutoExpand == client.Off || (c.cfg.CXLBytes != 0 && c.mu.bytes >= c.cfg.CXLBytes)
		c.store.mu.Unlock()
		if got == n {
			return got, nil
		}
		if full {
			return got, fmt.Errorf("%w: no free page", base.ErrFull)
		}
		if err := c.expand(max(c.cfg.ExpandBytes, c.cfg.RegionBytes)); err != nil {
			return got, err
		}
	}
}

func (c *Client) pageLocked(id base.RegionID, i base.PageIndex) (*region, error) {
	r := c.store.mu.regions[id]
	if r == nil || r.owner != c {
		return nil, fmt.Errorf("%w: region %d is not ours", base.ErrNotFound, id)
	}
	if int(i) >= len(r.pages) || r.pages[i] != pageWriting {
		return nil, fmt.Errorf("%w: page %d of region %d is not being written", base.ErrInvalid, i, id)
	}
	return r, nil
}

// FreePage gives a page back.
func (c *Client) FreePage(id base.RegionID, i base.PageIndex) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	r, err := c.pageLocked(id, i)
	if err != nil {
		return err
	}
	r.pages[i] = pageFree
	return nil
}

// CommitPages publishes pages.
func (c *Client) CommitPages(_ context.Context, items []client.CommitItem, codes []base.Code) error {
	c.fault("commit")
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	for i, it := range items {
		r, err := c.pageLocked(it.Region, it.Index)
		switch k := (objectKey{c.ns, it.Key}); {
		case err != nil:
			codes[i] = base.CodeOf(err)
		case it.Length > r.page:
			codes[i] = base.CodeInvalid
		case c.store.mu.objects[k] != nil:
			r.pages[it.Index] = pageFree
			codes[i] = base.CodeAlreadyStored
		default:
			r.pages[it.Index] = pageReady
			c.store.mu.objects[k] = &object{region: r, index: it.Index, length: it.Length}
			codes[i] = base.CodeOK
		}
	}
	return nil
}

// RegionView returns bytes of any region.
func (c *Client) RegionView(id base.RegionID, offset, size uint64) ([]byte, bool, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	r := c.store.mu.regions[id]
	if r == nil {
		return nil, false, fmt.Errorf("%w: region %d", base.ErrNotFound, id)
	}
	if offset > uint64(len(r.mem)) || size > uint64(len(r.mem))-offset {
		return nil, false, fmt.Errorf("%w: [%d,+%d) of region %d", base.ErrInvalid, offset, size, id)
	}
	c.mu.exported[id]++
	return r.mem[offset : offset+size], r.owner == c, nil
}

// RegionPageCount returns the count of a region's pages.
func (c *Client) RegionPageCount(id base.RegionID) (uint64, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	r := c.store.mu.regions[id]
	if r == nil {
		return 0, fmt.Errorf("%w: region %d", base.ErrNotFound, id)
	}
	return uint64(len(r.pages)), nil
}

// RegionPageBytes returns a region's page size.
func (c *Client) RegionPageBytes(id base.RegionID) (uint64, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	r := c.store.mu.regions[id]
	if r == nil {
		return 0, fmt.Errorf("%w: region %d", base.ErrNotFound, id)
	}
	return r.page, nil
}

// RegionFreeCount counts the free pages of an own region.
func (c *Client) RegionFreeCount(id base.RegionID) (uint64, error) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	r := c.store.mu.regions[id]
	if r == nil || r.owner != c {
		return 0, fmt.Errorf("%w: region %d is not ours", base.ErrNotFound, id)
	}
	n := uint64(0)
	for _, p := range r.pages {
		if p == pageFree {
			n++
		}
	}
	return n, nil
}

// OwnedRegions lists own regions.
func (c *Client) OwnedRegions() []base.RegionID {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	var out []base.RegionID
	for _, r := range c.mu.owned {
		out = append(out, r.id)
	}
	return out
}

// Retrieve takes views.
func (c *Client) Retrieve(_ context.Context, ks hot.Keys, mode hot.Mode, out []client.View) error {
	c.fault("retrieve")
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	for i := range ks.Len() {
		o := c.store.mu.objects[objectKey{c.ns, ks.At(i)}]
		out[i] = client.View{}
		if o == nil {
			if mode == hot.ModePrefix {
				clear(out[i:])
				return nil
			}
			continue
		}
		id := c.viewLocked(o)
		out[i] = client.View{ID: id, Bytes: o.region.bytes(o.index)[:o.length], Region: o.region.id, Index: o.index}
	}
	return nil
}

func (c *Client) viewLocked(o *object) uint64 {
	c.mu.last++
	c.mu.views[c.mu.last] = o
	o.views++
	return c.mu.last
}

func (c *Client) releaseLocked(id uint64) {
	if o := c.mu.views[id]; o != nil {
		o.views--
		delete(c.mu.views, id)
	}
}

// ReleaseViews ends views.
func (c *Client) ReleaseViews(ids []uint64) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	for _, id := range ids {
		c.releaseLocked(id)
	}
}

// Pin takes a view a key.
func (c *Client) Pin(_ context.Context, ks hot.Keys, mode hot.Mode, codes []base.Code) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	miss := false
	for i := range ks.Len() {
		o := c.store.mu.objects[objectKey{c.ns, ks.At(i)}]
		miss = miss || o == nil
		if o == nil || (miss && mode == hot.ModePrefix) {
			codes[i] = base.CodeMiss
			continue
		}
		c.mu.pins[ks.At(i)] = append(c.mu.pins[ks.At(i)], c.viewLocked(o))
		codes[i] = base.CodeOK
	}
	return nil
}

// Unpin ends one of a key's views.
func (c *Client) Unpin(_ context.Context, ks hot.Keys, codes []base.Code) error {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	for i := range ks.Len() {
		ids := c.mu.pins[ks.At(i)]
		if len(ids) == 0 {
			codes[i] = base.CodeNotFound
			continue
		}
		c.releaseLocked(ids[len(ids)-1])
		if len(ids) == 1 {
			delete(c.mu.pins, ks.At(i))
		} else {
			c.mu.pins[ks.At(i)] = ids[:len(ids)-1]
		}
		codes[i] = base.CodeOK
	}
	return nil
}

// Keys returns every stored key of a client's namespace, for tests.
func (c *Client) Keys() []base.Key {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	var out []base.Key
	for k := range maps.Keys(c.store.mu.objects) {
		if k.ns == c.ns {
			out = append(out, k.key)
		}
	}
	return out
}
