package rm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/store"
)

// refused starts a resource manager that must not start, and whose error must be
// of this kind and name all of texts.
func (f *fixture) refused(t *testing.T, want error, texts ...string) {
	t.Helper()
	s, err := Start(t.Context(), f.cfg)
	if err == nil {
		_ = s.Close()
		t.Errorf("it started; want %v", want)
		return
	}
	if !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not name %q", err, text)
		}
	}
}

func TestStartRefuses(t *testing.T) {
	first := newFixture(t)
	s := first.start()
	other := func(change func(*Config)) *fixture {
		f := newFixture(t)
		change(&f.cfg)
		return f
	}
	pool := first.cfg.Pools[0].Path
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	if err := os.WriteFile(data, append([]byte("somebody's data"), make([]byte, 8<<20-15)...), 0o600); err != nil {
		t.Fatal(err)
	}
	late := filepath.Join(dir, "late") // its data begins behind the header
	b := make([]byte, 8<<20)
	b[5<<20] = 1
	copy(b[4<<20:], "x")
	if err := os.WriteFile(late, b, 0o600); err != nil {
		t.Fatal(err)
	}
	blank := filepath.Join(dir, "blank")
	if err := os.WriteFile(blank, make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(dir, "small")
	if err := os.WriteFile(small, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	port := s.tcp.Addr().(*net.TCPAddr).Port
	for name, c := range map[string]struct {
		f     *fixture
		want  error
		texts []string
	}{
		"state directory in use": {other(func(c *Config) { c.StateDir = first.cfg.StateDir }), base.ErrBusy, []string{first.cfg.StateDir}},
		"device in use":          {other(func(c *Config) { c.Pools = first.cfg.Pools }), base.ErrBusy, []string{pool}},
		"port in use":            {other(func(c *Config) { c.Port = port }), base.ErrBusy, []string{fmt.Sprint(port)}},
		"socket in use":          {other(func(c *Config) { c.UnixPath = s.UnixPath() }), base.ErrBusy, []string{s.UnixPath()}},
		"not loopback":           {other(func(c *Config) { c.Host = "0.0.0.0" }), base.ErrInvalid, []string{"0.0.0.0", "insecure"}},
		"missing device":         {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindDevdax, Path: "/dev/dax99.9"}} }), base.ErrNotFound, []string{"/dev/dax99.9"}},
		"missing file":           {other(func(c *Config) { c.Pools[0].SizeBytes = 0 }), base.ErrNotFound, []string{"pool"}},
		"too small":              {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindFile, Path: small}} }), base.ErrInvalid, []string{small, "1048576"}},
		"no header":              {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindFile, Path: blank}} }), base.ErrNotFound, []string{blank, "maru device init"}},
		"data":                   {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindFile, Path: data, SizeBytes: 8 << 20}} }), base.ErrForeign, []string{data}},
		"data behind":            {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindFile, Path: late, SizeBytes: 8 << 20}} }), base.ErrForeign, []string{late}},
		"another size":           {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindFile, Path: blank, SizeBytes: 16 << 20}} }), base.ErrMismatch, []string{blank}},
		"not a device":           {other(func(c *Config) { c.Pools = []PoolSpec{{Kind: dax.KindDevdax, Path: blank}} }), base.ErrMismatch, []string{blank}},
		"bad settings": {other(func(c *Config) {
			c.Port, c.StateDir, c.Limits.MaxHoldCount = 70000, "rel", -1
			c.Pools = append(c.Pools, PoolSpec{Kind: dax.KindFile, Path: "x", SizeBytes: 3})
		}), base.ErrInvalid, []string{"70000", `"rel"`, "max_hold_count", `"x"`}},
		"state directory cannot be made": {other(func(c *Config) { c.StateDir = "/proc/maru" }), base.ErrUnavailable, []string{"/proc/maru"}},
		"state directory is a file":      {other(func(c *Config) { c.StateDir = filepath.Join(data, "x") }), base.ErrUnavailable, []string{data}},
	} {
		t.Run(name, func(t *testing.T) { c.f.refused(t, c.want, c.texts...) })
	}
	if got := readFile(t, data); string(got[:15]) != "somebody's data" {
		t.Error("somebody's data was written")
	}
	if got := readFile(t, late); string(got) != string(b) {
		t.Error("somebody's data was written")
	}
	// The first one serves on.
	startOwner(t, client(t, over(s)), newID())
}

func TestLostState(t *testing.T) {
	prepare := func(t *testing.T) *fixture {
		f := newFixture(t)
		s := f.start()
		c := client(t, over(s))
		o := startOwner(t, c, newID())
		o.allocate(t, c, 1)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return f
	}
	file := func(f *fixture, name string) string { return filepath.Join(f.cfg.StateDir, name) }
	do := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		change func(t *testing.T, f *fixture)
		want   error
		texts  []string
	}{
		"store missing":   {func(t *testing.T, f *fixture) { do(t, os.Remove(file(f, storeFile))) }, base.ErrNotFound, []string{storeFile, "takeover"}},
		"store truncated": {func(t *testing.T, f *fixture) { do(t, os.Truncate(file(f, storeFile), 9000)) }, base.ErrCorrupt, []string{storeFile, "takeover"}},
		"store empty":     {func(t *testing.T, f *fixture) { do(t, os.Truncate(file(f, storeFile), 0)) }, base.ErrCorrupt, []string{storeFile, "takeover"}},
		"store of noise": {func(t *testing.T, f *fixture) {
			do(t, os.WriteFile(file(f, storeFile), []byte(strings.Repeat("noise", 5000)), 0o600))
		}, base.ErrCorrupt, []string{storeFile}},
		"store of another": {func(t *testing.T, f *fixture) {
			g := prepare(t)
			do(t, os.WriteFile(file(f, storeFile), readFile(t, file(g, storeFile)), 0o600))
		}, base.ErrForeign, []string{storeFile}},
		"store of another with its mark": {func(t *testing.T, f *fixture) {
			g := prepare(t)
			for _, n := range []string{storeFile, markFile, secretFile} {
				do(t, os.WriteFile(file(f, n), readFile(t, file(g, n)), 0o600))
			}
			do(t, os.Remove(g.cfg.Pools[0].Path)) // else that pool would come along
		}, base.ErrForeign, []string{"takeover"}},
		"secret missing":  {func(t *testing.T, f *fixture) { do(t, os.Remove(file(f, secretFile))) }, base.ErrNotFound, []string{secretFile}},
		"secret readable": {func(t *testing.T, f *fixture) { do(t, os.Chmod(file(f, secretFile), 0o644)) }, base.ErrDenied, []string{secretFile, "0600"}},
		"secret changed": {func(t *testing.T, f *fixture) {
			do(t, os.WriteFile(file(f, secretFile), []byte(strings.Repeat("ab", 32)), 0o600))
		}, base.ErrForeign, []string{secretFile}},
		"all but the device missing": {func(t *testing.T, f *fixture) { do(t, os.RemoveAll(f.cfg.StateDir)) }, base.ErrForeign, []string{"takeover"}},
		"device truncated": {func(t *testing.T, f *fixture) {
			do(t, os.Truncate(f.cfg.Pools[0].Path, 32<<20))
			f.cfg.Pools[0].SizeBytes = 0
		}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := prepare(t)
			c.change(t, f)
			if c.want != nil {
				f.refused(t, c.want, c.texts...)
				return
			}
			s := f.start() // others keep serving; this pool is offline and says why
			if p := s.glance.Load().pools; len(p) != 1 || !strings.Contains(p[0].OfflineReason, "truncated") {
				t.Errorf("%+v", p)
			}
		})
	}
}

// An older store under a newer device would give ranges twice.
func TestRestoredStore(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	o.allocate(t, c, 1)
	_ = s.Close()
	path := filepath.Join(f.cfg.StateDir, storeFile)
	old := readFile(t, path)
	s = f.start()
	c = client(t, over(s))
	o.allocate(t, c, 2)
	o.allocate(t, c, 3)
	_ = s.Close()
	if err := os.WriteFile(path, old, 0o600); err != nil {
		t.Fatal(err)
	}
	f.refused(t, base.ErrForeign, "sequence", "takeover")
	info, err := TakeoverDevice(t.Context(), DeviceOptions{StateDir: f.cfg.StateDir, Path: f.cfg.Pools[0].Path, Confirm: true})
	if err != nil || info.DroppedRegions != 1 {
		t.Fatalf("%+v, %v", info, err)
	}
	s = f.start()
	c = client(t, over(s))
	if _, err := c.Allocate(ctxOf(t), o.request(1)); err != nil {
		t.Errorf("after the takeover: %v", err)
	}
	o2 := startOwner(t, c, newID())
	if a := o2.allocate(t, c, 1); o2.inc <= o.inc || a.GetHandle().GetRegionId() <= 3 {
		t.Errorf("numbers are given again: incarnation %d, region %d", o2.inc, a.GetHandle().GetRegionId())
	}
}

func TestBadRequests(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c, tcp := client(t, over(s)), client(t, s.Address())
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	req := func(change func(*maruv1.AllocateRequest)) error {
		r := o.request(77)
		change(r)
		_, err := c.Allocate(ctxOf(t), r)
		return err
	}
	hold := func(change func(*maruv1.HoldRequest)) error {
		r := o.hold(newID(), 1, a.GetHandle())
		change(r)
		_, err := c.Hold(ctxOf(t), r)
		return err
	}
	forged := &maruv1.RegionHandle{PoolId: a.GetHandle().GetPoolId(), RegionId: a.GetHandle().GetRegionId(), Incarnation: a.GetHandle().GetIncarnation(), Token: make([]byte, 32)}
	drop := func(c maruv1.ResourceManagerClient, confirm bool) error {
		_, err := c.DropOwner(ctxOf(t), &maruv1.DropOwnerRequest{OwnerId: o.id, Confirm: confirm})
		return err
	}
	many := make([]*maruv1.RegionHandle, 4097)
	for i := range many {
		many[i] = &maruv1.RegionHandle{PoolId: newID(), RegionId: uint32(i), Token: make([]byte, 32)}
	}
	for name, x := range map[string]struct {
		err  error
		want error
		text string
	}{
		"no pages":          {req(func(r *maruv1.AllocateRequest) { r.PageCount = 0 }), base.ErrInvalid, "page_count 0"},
		"no page size":      {req(func(r *maruv1.AllocateRequest) { r.PageSize = 0 }), base.ErrInvalid, "page_size 0"},
		"piece size":        {req(func(r *maruv1.AllocateRequest) { r.PieceSize = 100 }), base.ErrInvalid, "piece_size 100"},
		"overflow":          {req(func(r *maruv1.AllocateRequest) { r.PageCount = 1 << 31; r.PageSize = 1 << 39 }), base.ErrInvalid, ""},
		"negative":          {req(func(r *maruv1.AllocateRequest) { r.PageCount = ^uint64(0) }), base.ErrInvalid, "page_count"},
		"larger than pools": {req(func(r *maruv1.AllocateRequest) { r.PageCount = 1 << 20 }), base.ErrPermanent, "largest eligible pool"},
		"no operation":      {req(func(r *maruv1.AllocateRequest) { r.Operation = 0 }), base.ErrInvalid, "operation"},
		"other values":      {req(func(r *maruv1.AllocateRequest) { r.Operation = 1; r.PageCount = 2 }), base.ErrMismatch, "operation 1"},
		"owner id":          {req(func(r *maruv1.AllocateRequest) { r.OwnerId = []byte{1} }), base.ErrInvalid, "owner_id"},
		"namespace":         {req(func(r *maruv1.AllocateRequest) { r.NamespaceDigest = nil }), base.ErrInvalid, "namespace_digest"},
		"unknown pool":      {req(func(r *maruv1.AllocateRequest) { r.PoolId = newID() }), base.ErrNotFound, "pool"},
		"incarnation 0":     {req(func(r *maruv1.AllocateRequest) { r.Incarnation = 0 }), base.ErrInvalid, "incarnation"},
		"not current":       {req(func(r *maruv1.AllocateRequest) { r.Incarnation = o.inc + 1 }), base.ErrFenced, ""},
		"forged token":      {hold(func(r *maruv1.HoldRequest) { r.Handles[0] = forged }), base.ErrDenied, "on record"},
		"no handles":        {hold(func(r *maruv1.HoldRequest) { r.Handles = nil }), base.ErrInvalid, "handles"},
		"nil handle":        {hold(func(r *maruv1.HoldRequest) { r.Handles = []*maruv1.RegionHandle{{}} }), base.ErrInvalid, "pool_id"},
		"too many handles":  {hold(func(r *maruv1.HoldRequest) { r.Handles = many }), base.ErrLimit, "max_list_count"},
		"twice":             {hold(func(r *maruv1.HoldRequest) { r.Handles = append(r.Handles, r.Handles[0]) }), base.ErrInvalid, "twice"},
		"sequence 0":        {hold(func(r *maruv1.HoldRequest) { r.Sequence = 0 }), base.ErrInvalid, "sequence"},
		"session":           {hold(func(r *maruv1.HoldRequest) { r.SessionId = make([]byte, 16) }), base.ErrInvalid, "session_id"},
		"drop over TCP":     {drop(tcp, true), base.ErrDenied, "Unix socket"},
		"drop unconfirmed":  {drop(c, false), base.ErrInvalid, "confirm"},
	} {
		if !errors.Is(x.err, x.want) || x.err == nil || !strings.Contains(x.err.Error(), x.text) {
			t.Errorf("%s: %v, want %v with %q", name, x.err, x.want, x.text)
		}
	}
	if _, err := c.Describe(ctxOf(t), &maruv1.DescribeRequest{Version: &maruv1.ProtocolVersion{Min: 2, Max: 3}}); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("a newer peer: %v", err)
	}
	access, err := c.GetAccess(ctxOf(t), &maruv1.GetAccessRequest{Handles: []*maruv1.RegionHandle{forged, a.GetHandle()}})
	if err != nil || base.Code(access.GetRegions()[0].GetProblem().GetCode()) != base.CodeDenied || access.GetRegions()[1].GetPath() != f.cfg.Pools[0].Path {
		t.Errorf("%v, %v", access, err)
	}
	// Noise on both listeners.
	for _, network := range [][2]string{{"tcp", s.Address()}, {"unix", s.UnixPath()}} {
		conn, err := net.Dial(network[0], network[1])
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(strings.Repeat("GET / HTTP/1.1\r\n\x00\xff", 1000)))
		_ = conn.Close()
	}
	// A session over TCP is not provable and is told so; its token unholds.
	session := newID()
	h, err := tcp.Hold(ctxOf(t), o.hold(session, 1, a.GetHandle()))
	if err != nil || h.GetProvable() || h.GetReason() == "" {
		t.Fatalf("%v, %v", h, err)
	}
	u := &maruv1.UnholdRequest{SessionId: session, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}}
	if _, err := tcp.Unhold(ctxOf(t), u); !errors.Is(err, base.ErrDenied) {
		t.Errorf("unhold without token: %v", err)
	}
	u.HoldToken = h.GetHoldToken()
	if _, err := tcp.Unhold(ctxOf(t), u); err != nil {
		t.Error(err)
	}
	if err := drop(c, true); err != nil {
		t.Error(err)
	}
}

// failing fails commits on demand, before or after they took effect.
type failing struct {
	store.Store
	before, after *int // commits until the failure; 0 is now, negative never
}

func (f failing) Commit(changes []store.Change) error {
	*f.before--
	*f.after--
	if *f.before == -1 {
		return fmt.Errorf("%w: no space left on device", base.ErrUnavailable)
	}
	err := f.Store.Commit(changes)
	if *f.after == -1 {
		return fmt.Errorf("%w: sync failed", base.ErrUnavailable)
	}
	return err
}

// Every commit of a life fails once, either way: the call answers an error, its
// retry finds its result and is durable, and a restart in between loses nothing
// that was acknowledged (RM-06, RM-07).
func TestFailedCommits(t *testing.T) {
	for _, after := range []bool{false, true} {
		for n := range 5 {
			t.Run(fmt.Sprintf("commit %d durable %v", n, after), func(t *testing.T) {
				f := newFixture(t)
				f.cfg.Logger = nil
				f.start().Close() // the pool is made
				never, at := -1<<30, n
				f.cfg.WrapStore = func(s store.Store) store.Store {
					if after {
						return failing{s, &never, &at}
					}
					return failing{s, &at, &never}
				}
				s := f.start()
				c := client(t, over(s))
				failures := 0
				try := func(f func() error) {
					t.Helper()
					for range 3 {
						err := f()
						if err == nil {
							return
						}
						failures++
						if !errors.Is(err, base.ErrUnknown) || !rpc.OutcomeUnknown(err) { // it is tried again by itself
							t.Fatal(err)
						}
					}
					t.Fatal("it does not come back")
				}
				var o owner
				try(func() error {
					id := newID()
					r, err := c.StartOwner(ctxOf(t), &maruv1.StartOwnerRequest{OwnerId: id, OwnerSecret: secretOf(id)})
					o = owner{id, r.GetIncarnation(), r.GetOwnerToken()}
					return err
				})
				var a *maruv1.AllocateResponse
				try(func() (err error) { a, err = c.Allocate(ctxOf(t), o.request(1)); return err })
				session := newID()
				try(func() error { _, err := c.Hold(ctxOf(t), o.hold(session, 1, a.GetHandle())); return err })
				try(func() error {
					r, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()})
					if err == nil && !r.GetDraining() {
						t.Error("a held region was freed")
					}
					return err
				})
				try(func() error {
					_, err := c.Unhold(ctxOf(t), &maruv1.UnholdRequest{SessionId: session, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}})
					return err
				})
				if failures != 1 {
					t.Errorf("%d calls failed", failures)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				f.cfg.WrapStore = nil
				s = f.start()
				p := s.glance.Load().pools[0]
				if p.OfflineReason != "" || p.AllocatedBytes != 0 {
					t.Errorf("%+v", p)
				}
			})
		}
	}
}

func TestDeviceCommands(t *testing.T) {
	f := newFixture(t)
	o := DeviceOptions{StateDir: f.cfg.StateDir, Path: filepath.Join(t.TempDir(), "dev"), SizeBytes: 16 << 20, Overcommit: true}
	info, err := InitDevice(t.Context(), o)
	if err != nil || info.UsableBytes != 14<<20 {
		t.Fatalf("%+v, %v", info, err)
	}
	o.SizeBytes = 0
	if _, err := InitDevice(t.Context(), o); !errors.Is(err, base.ErrExists) {
		t.Errorf("twice: %v", err)
	}
	if shown, err := ShowDevice(t.Context(), o); err != nil || shown.Header != info.Header {
		t.Errorf("%+v, %v", shown, err)
	}
	f.cfg.Pools = []PoolSpec{{Kind: dax.KindFile, Path: o.Path}}
	s := f.start()
	c := client(t, over(s))
	own := startOwner(t, c, newID())
	own.allocate(t, c, 1)
	if _, err := ClearDevice(t.Context(), o); !errors.Is(err, base.ErrBusy) || !strings.Contains(err.Error(), f.cfg.StateDir) {
		t.Errorf("while it serves: %v", err)
	}
	_ = s.Close()
	foreign := o
	foreign.StateDir = filepath.Join(t.TempDir(), "other")
	foreign.Confirm = true
	for name, f := range map[string]func() error{
		"init":  func() error { _, err := InitDevice(t.Context(), foreign); return err },
		"clear": func() error { _, err := ClearDevice(t.Context(), foreign); return err },
	} {
		if err := f(); !errors.Is(err, base.ErrForeign) {
			t.Errorf("%s by another: %v", name, err)
		}
	}
	if _, err := ClearDevice(t.Context(), o); !errors.Is(err, base.ErrDenied) || !strings.Contains(err.Error(), "1 regions") {
		t.Errorf("clear with regions: %v", err)
	}
	// The memory loses its content: offline, then made anew by the operator's word.
	if err := os.WriteFile(o.Path, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s = f.start()
	c = client(t, over(s))
	if _, err := c.Allocate(ctxOf(t), own.request(2)); !errors.Is(err, base.ErrUnavailable) || !strings.Contains(err.Error(), "device init") {
		t.Errorf("no pool: %v", err)
	}
	_ = s.Close()
	if _, err := InitDevice(t.Context(), o); !errors.Is(err, base.ErrDenied) {
		t.Errorf("init of a known device: %v", err)
	}
	o.Confirm = true
	if info, err = InitDevice(t.Context(), o); err != nil || info.DroppedRegions != 1 {
		t.Fatalf("%+v, %v", info, err)
	}
	s = f.start()
	c = client(t, over(s))
	if a := own.allocate(t, c, 3); a.GetHandle().GetRegionId() != 2 {
		t.Errorf("region id %d after the first was dropped", a.GetHandle().GetRegionId())
	}
	_ = s.Close()
	if info, err = ClearDevice(t.Context(), o); err != nil || info.DroppedRegions != 1 {
		t.Fatalf("%+v, %v", info, err)
	}
	if _, err := ShowDevice(t.Context(), o); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("after clear: %v", err)
	}
	// A path that vanished is dropped from the store.
	if _, err := InitDevice(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	_ = f.start().Close()
	if err := os.Remove(o.Path); err != nil {
		t.Fatal(err)
	}
	if _, err := ClearDevice(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	f.cfg.Pools = nil
	if p := f.start().glance.Load().pools; len(p) != 0 {
		t.Errorf("%+v", p)
	}
}

func TestParsePools(t *testing.T) {
	got, err := ParsePools([]string{"file:/a", "size=8M", "name=x", "devdax:/dev/dax0.0", "coherence=software"})
	if err != nil || len(got) != 2 || got[0].SizeBytes != 8<<20 || got[0].Name != "x" || got[1].Coherence != base.CoherenceSoftware {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "x", "nvme:/a", "file:rel", "file:/a,size=", "file:/a,size=0", "file:/a,size=3M", "file:/a,size=-1", "file:/a,what=1", "file:/a,coherence=none", "devdax:/dev/dax0.0,size=8M", "file:/a,name=a b", "file:/a,size=8M,size=8M"} {
		if _, err := ParsePool(bad); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestRelativeStateDir(t *testing.T) {
	s := DefaultSettings()
	s.StateDir = "state"
	c, err := s.Config(io.Discard, "")
	if err != nil || !filepath.IsAbs(c.StateDir) || filepath.Base(c.StateDir) != "state" {
		t.Fatalf("%q, %v", c.StateDir, err)
	}
}

func FuzzParsePool(f *testing.F) {
	f.Add("file:/a,size=8G,name=b,coherence=hardware")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePool(s)
		if err != nil {
			return
		}
		if err := p.validate(); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
	})
}

// Two in one process, and Close twice.
func TestTwoInOneProcess(t *testing.T) {
	a, b := newFixture(t).start(), newFixture(t).start()
	oa, ob := startOwner(t, client(t, over(a)), newID()), startOwner(t, client(t, over(b)), newID())
	if oa.inc != ob.inc {
		t.Errorf("incarnations %d and %d: do they share a state?", oa.inc, ob.inc)
	}
	done := make(chan error, 1)
	go func() { done <- errors.Join(a.Close(), a.Close()) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close hangs")
	}
}

// slow counts commits and lets requests gather behind each.
type slow struct {
	store.Store
	commits *atomic.Int64
}

func (s slow) Commit(changes []store.Change) error {
	s.commits.Add(1)
	time.Sleep(20 * time.Millisecond)
	return s.Store.Commit(changes)
}

func TestCallersShareACommit(t *testing.T) {
	f := newFixture(t)
	var commits atomic.Int64
	f.cfg.WrapStore = func(s store.Store) store.Store { return slow{s, &commits} }
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	before := commits.Load()
	var wg sync.WaitGroup
	for op := range uint64(20) {
		wg.Go(func() {
			if _, err := c.Allocate(ctxOf(t), o.request(op+1)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := commits.Load() - before; n > 10 {
		t.Errorf("20 concurrent callers took %d commits", n)
	}
	// Reads take none.
	before = commits.Load()
	if _, err := c.ListRegions(ctxOf(t), &maruv1.ListRegionsRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token}); err != nil {
		t.Error(err)
	}
	if commits.Load() != before {
		t.Error("a list was committed")
	}
}

// A hold is in the store when the slot of its pool cannot be written: the answer is no
// refusal, since who believed one would leave the hold on record, and the region with it, to
// the end of its process (X1, L1). It is no success either (W1).
func TestSlotFails(t *testing.T) {
	f := newFixture(t)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	session := newID()
	held := func() int {
		t.Helper()
		list, err := c.ListHolds(ctxOf(t), &maruv1.ListHoldsRequest{SessionId: session})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.GetHolds())
	}
	if err := os.Truncate(f.cfg.Pools[0].Path, 0); err != nil {
		t.Fatal(err)
	}
	_, err := c.Hold(ctxOf(t), o.hold(session, 1, a.GetHandle()))
	if !errors.Is(err, base.ErrUnknown) || !rpc.OutcomeUnknown(err) {
		t.Fatalf("hold with a slot that cannot be written: %v", err)
	}
	if n := held(); n != 1 {
		t.Fatalf("%d holds are on record, want 1", n)
	}
	if _, err := c.Hold(ctxOf(t), o.hold(session, 1, a.GetHandle())); !errors.Is(err, base.ErrOffline) {
		t.Errorf("the same hold again: %v", err)
	}
	if _, err := c.Unhold(ctxOf(t), &maruv1.UnholdRequest{SessionId: session, Sequence: 2, Handles: []*maruv1.RegionHandle{a.GetHandle()}}); err != nil {
		t.Errorf("unhold: %v", err)
	}
	if n := held(); n != 0 {
		t.Errorf("%d holds are left", n)
	}
}

// A pool whose memory fails goes offline; the others and the program go on.
func TestDeviceFails(t *testing.T) {
	f := newFixture(t)
	second := f.cfg.Pools[0]
	second.Path, second.Name = second.Path+"2", "q"
	f.cfg.Pools = append(f.cfg.Pools, second)
	s := f.start()
	c := client(t, over(s))
	o := startOwner(t, c, newID())
	a := o.allocate(t, c, 1)
	if err := os.Truncate(f.cfg.Pools[0].Path, 0); err != nil {
		t.Fatal(err)
	}
	// It is on record before its table is written: whether it was done is not for the caller
	// to know (X1). The same again is refused.
	for _, want := range []error{base.ErrUnknown, base.ErrOffline} {
		if _, err := c.Allocate(ctxOf(t), o.request(2)); !errors.Is(err, want) {
			t.Fatalf("allocation on memory that is gone: %v, want %v", err, want)
		}
	}
	if b := o.allocate(t, c, 3); string(b.GetHandle().GetPoolId()) == string(a.GetHandle().GetPoolId()) {
		t.Error("the failed pool is used")
	}
	if _, err := c.Hold(ctxOf(t), o.hold(newID(), 1, a.GetHandle())); !errors.Is(err, base.ErrOffline) {
		t.Errorf("hold on an offline pool: %v", err)
	}
	if _, err := c.Free(ctxOf(t), &maruv1.FreeRequest{OwnerId: o.id, Incarnation: o.inc, OwnerToken: o.token, Handle: a.GetHandle()}); err != nil {
		t.Errorf("free on an offline pool: %v", err)
	}
	p, err := c.ListPools(ctxOf(t), &maruv1.ListPoolsRequest{})
	if err != nil || p.GetPools()[0].GetState() != maruv1.PoolState_POOL_STATE_OFFLINE || p.GetPools()[0].GetReason() == "" {
		t.Errorf("%v, %v", p, err)
	}
}
