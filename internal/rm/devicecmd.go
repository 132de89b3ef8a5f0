package rm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// DeviceOptions are what `maru device` gives. The state directory must not be in
// use: these commands change it and the device together.
type DeviceOptions struct {
	StateDir string // default DefaultStateDir()
	Path     string
	Kind     dax.Kind // default: found out
	// SizeBytes makes a plain file of that size where none is (InitDevice).
	SizeBytes uint64
	// Coherence of a new pool (InitDevice). Unknown is refused, except on a plain file.
	Coherence base.Coherence
	// Confirm is the operator's word that what is there may be lost and that nobody
	// maps it.
	Confirm     bool
	SysfsRoot   string // default /sys
	LockTimeout time.Duration
	Overcommit  bool
}

func (o DeviceOptions) withDefaults() DeviceOptions {
	o.StateDir = cmp.Or(o.StateDir, DefaultStateDir())
	o.SysfsRoot = cmp.Or(o.SysfsRoot, "/sys")
	o.LockTimeout = cmp.Or(o.LockTimeout, 500*time.Millisecond)
	return o
}

// DeviceInfo is what is known of a device.
type DeviceInfo struct {
	Path        string
	Kind        dax.Kind
	SizeBytes   uint64
	UsableBytes uint64
	Header      poolfmt.Header // zero without a valid one
	// DroppedRegions counts the regions that a command dropped.
	DroppedRegions int
}

// ShowDevice reads a device's header without a lock and without writing. The
// info is filled also when there is no valid header; then the error says what is
// there: ErrNotFound (blank), ErrForeign, ErrUnsupported, ErrCorrupt.
func ShowDevice(ctx context.Context, o DeviceOptions) (DeviceInfo, error) {
	if err := ctx.Err(); err != nil {
		return DeviceInfo{}, err
	}
	o = o.withDefaults()
	f, err := dax.Open(o.Path, o.Kind, dax.OpenOptions{ReadOnly: true, SysfsRoot: o.SysfsRoot})
	if err != nil {
		return DeviceInfo{}, err
	}
	info := infoOf(f)
	if info.UsableBytes == 0 {
		return info, errors.Join(fmt.Errorf("%w: %s has %d bytes, a pool needs at least %d", base.ErrInvalid, o.Path, f.SizeBytes(), poolfmt.DataOffset+poolfmt.Alignment), f.Close())
	}
	info.Header, err = readHeader(f)
	return info, errors.Join(headerProblem(o.Path, err), f.Close())
}

// headerProblem names the device and what makes it a pool.
func headerProblem(path string, err error) error {
	switch {
	case errors.Is(err, base.ErrNotFound):
		return fmt.Errorf("device %s: %w: it is no pool yet, or was cleared; maru device init makes it one", path, err)
	case err != nil:
		return fmt.Errorf("device %s: %w", path, err)
	}
	return nil
}

func infoOf(f *dax.File) DeviceInfo {
	return DeviceInfo{Path: f.Path(), Kind: f.Kind(), SizeBytes: f.SizeBytes(), UsableBytes: poolfmt.UsableBytes(f.SizeBytes())}
}

// offlineState is a state directory whose resource manager does not run.
type offlineState struct {
	state *state
	core  *core.Core
	batch core.Batch
}

// withState opens the state directory, runs f, and closes it.
func withState(ctx context.Context, o DeviceOptions, f func(*offlineState) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	st, err := openState(o.StateDir, o.LockTimeout)
	if err != nil {
		return err
	}
	c, err := st.loadCore(core.Config{})
	if err == nil {
		err = f(&offlineState{state: st, core: c})
	}
	return errors.Join(err, st.close())
}

func (s *offlineState) commit() error {
	if s.batch.IsEmpty() {
		return nil
	}
	s.core.Seal(&s.batch) // all pools are offline: no sequence rises
	return s.state.store.Commit(s.batch.Changes())
}

func (s *offlineState) byPath(path string) (core.Pool, bool) {
	for _, p := range s.core.Pools() {
		if p.Path == path {
			return p, true
		}
	}
	return core.Pool{}, false
}

func withDevice(o DeviceOptions, f func(*device) error) error {
	d, err := openDevice(PoolSpec{Kind: o.Kind, Path: o.Path, SizeBytes: o.SizeBytes}, o.SysfsRoot, o.Overcommit)
	if err != nil {
		return err
	}
	return errors.Join(f(d), d.close())
}

// InitDevice makes a device a pool of the state directory's resource manager,
// which takes it in at its next start (devdax by itself, others by --pool). A
// device with a valid header is refused, and so is a file with data in it. A
// device that the store knows and that lost its header, and a devdax device with
// unknown content, need Confirm; the former's regions and holds are dropped.
// Errors: ErrExists (it is a pool already), ErrForeign, ErrDenied (confirm is
// missing), ErrInvalid (coherence), ErrBusy (in use).
func InitDevice(ctx context.Context, o DeviceOptions) (info DeviceInfo, err error) {
	o = o.withDefaults()
	err = withState(ctx, o, func(s *offlineState) error {
		return withDevice(o, func(d *device) error {
			info, err = s.init(d, o)
			return err
		})
	})
	return info, err
}

func (s *offlineState) init(d *device, o DeviceOptions) (DeviceInfo, error) {
	info := infoOf(d.file)
	coherence := o.Coherence
	if coherence == base.CoherenceUnknown {
		if d.file.Kind() != dax.KindFile {
			return info, fmt.Errorf("%w: say the coherence of %s: hardware (one host, or CXL 3 back-invalidate) or software (hosts do not snoop each other's caches)", base.ErrInvalid, o.Path)
		}
		coherence = base.CoherenceHardware
	}
	known, isKnown := s.byPath(o.Path)
	header, headerErr := d.header()
	if headerErr == nil {
		if header.Store == s.state.id {
			return info, fmt.Errorf("%w: %s is pool %s of this resource manager already; maru device clear --confirm takes it away", base.ErrExists, o.Path, header.Pool)
		}
		return info, fmt.Errorf("%w: %s is pool %s of the resource manager with store %s; its --state-dir is another one than %s, or %s", base.ErrForeign, o.Path, header.Pool, header.Store, o.StateDir, takeoverHint)
	}
	if errors.Is(headerErr, base.ErrFault) {
		return info, headerErr
	}
	blank, err := d.isBlank()
	if err != nil {
		return info, err
	}
	switch {
	case isKnown && !o.Confirm:
		return info, fmt.Errorf("%w: %s was pool %s and has no valid header now (%w); --confirm drops its %d regions and their holds", base.ErrDenied, o.Path, known.ID, headerErr, known.RegionCount)
	case !isKnown && !blank && (d.file.Kind() != dax.KindDevdax || !errors.Is(headerErr, base.ErrForeign) && !errors.Is(headerErr, base.ErrNotFound)):
		return info, fmt.Errorf("%w: %s holds data that is not this resource manager's (%w); it is left alone", base.ErrForeign, o.Path, headerErr)
	case !isKnown && !blank && !o.Confirm:
		return info, fmt.Errorf("%w: %s holds data (%w); --confirm overwrites it", base.ErrDenied, o.Path, headerErr)
	}
	if isKnown {
		if at, err := findPool(known.ID, o); err != nil || at != "" {
			return info, errors.Join(err, moved(known.ID, at))
		}
		if info.DroppedRegions, err = s.core.DropPool(&s.batch, known.ID); err != nil {
			return info, err
		}
	}
	// The store first: a device that was made and is not in the store yet is taken
	// in at the next start, while a pool that has lost its device would stay.
	if err := s.commit(); err != nil {
		return info, err
	}
	info.Header = poolfmt.Header{Static: poolfmt.Static{Pool: base.NewID(), Store: s.state.id, Coherence: coherence}, Slot: poolfmt.FirstSlot()}
	return info, d.format(info.Header)
}

const takeoverHint = "maru device takeover --confirm drops all of its regions and makes it this one's"

func moved(pool base.PoolID, at string) error {
	if at == "" {
		return nil
	}
	return fmt.Errorf("%w: pool %s is on %s now: the devices changed their names", base.ErrExists, pool, at)
}

// findPool looks for a pool among the dax devices of this machine.
func findPool(pool base.PoolID, o DeviceOptions) (string, error) {
	devices, err := dax.Discover(o.SysfsRoot)
	if err != nil {
		return "", err
	}
	for _, d := range devices {
		if d.Path == o.Path || d.Driver != dax.DriverDevice {
			continue
		}
		info, err := ShowDevice(context.Background(), DeviceOptions{Path: d.Path, Kind: dax.KindDevdax, SysfsRoot: o.SysfsRoot})
		if err == nil && info.Header.Pool == pool {
			return d.Path, nil
		}
	}
	return "", nil
}

// ClearDevice takes a pool away: its regions and holds are dropped from the
// store, then its header is blanked. Without regions it needs no Confirm. A path
// that is missing, and that the store knows, is dropped from the store (with
// Confirm). Errors: ErrNotFound, ErrForeign (another store's), ErrDenied.
func ClearDevice(ctx context.Context, o DeviceOptions) (info DeviceInfo, err error) {
	o = o.withDefaults()
	o.SizeBytes = 0
	err = withState(ctx, o, func(s *offlineState) error {
		known, isKnown := s.byPath(o.Path)
		err := withDevice(o, func(d *device) error {
			info, err = s.clear(d, o)
			return err
		})
		if !errors.Is(err, base.ErrNotFound) || !isKnown {
			return err
		}
		// There is no device or no header any more; what remains is the store's row.
		if !o.Confirm {
			return fmt.Errorf("%w: %s was pool %s and is gone (%w); --confirm drops its %d regions and their holds", base.ErrDenied, o.Path, known.ID, err, known.RegionCount)
		}
		if info.DroppedRegions, err = s.core.DropPool(&s.batch, known.ID); err != nil {
			return err
		}
		return s.commit()
	})
	info.Path = o.Path
	return info, err
}

func (s *offlineState) clear(d *device, o DeviceOptions) (DeviceInfo, error) {
	info := infoOf(d.file)
	var err error
	if info.Header, err = d.header(); err != nil {
		return info, headerProblem(o.Path, err)
	}
	if info.Header.Store != s.state.id {
		return info, fmt.Errorf("%w: %s belongs to the resource manager with store %s; clear it with its state directory, or %s first", base.ErrForeign, o.Path, info.Header.Store, takeoverHint)
	}
	regions, isKnown := 0, false
	for _, p := range s.core.Pools() {
		if p.ID == info.Header.Pool {
			regions, isKnown = p.RegionCount, true
		}
	}
	if !o.Confirm && (regions > 0 || !isKnown && info.Header.Sequence > 0) {
		return info, fmt.Errorf("%w: pool %s on %s has %d regions that somebody may map; --confirm drops them", base.ErrDenied, info.Header.Pool, o.Path, regions)
	}
	if isKnown {
		if info.DroppedRegions, err = s.core.DropPool(&s.batch, info.Header.Pool); err != nil {
			return info, err
		}
	}
	if err := s.commit(); err != nil {
		return info, err
	}
	return info, d.change(0, poolfmt.HeaderBytes, func(to []byte) { clear(to) })
}

// TakeoverDevice makes a device with another store's header, or with a sequence
// that does not fit, this resource manager's: all regions of the pool are
// dropped and numbers go on from the device's. Confirm is the operator's word
// that nobody maps it. Errors: ErrDenied, and those of a header that is not valid.
func TakeoverDevice(ctx context.Context, o DeviceOptions) (info DeviceInfo, err error) {
	o = o.withDefaults()
	o.SizeBytes = 0
	if !o.Confirm {
		return info, fmt.Errorf("%w: taking %s over drops all of its regions; say --confirm when nobody maps them", base.ErrDenied, o.Path)
	}
	err = withState(ctx, o, func(s *offlineState) error {
		return withDevice(o, func(d *device) error {
			info = infoOf(d.file)
			if info.Header, err = d.header(); err != nil {
				return headerProblem(o.Path, err)
			}
			for _, p := range s.core.Pools() {
				if p.ID == info.Header.Pool {
					info.DroppedRegions = p.RegionCount
				}
			}
			err := s.core.TakeOver(&s.batch, core.Device{Header: info.Header, Path: o.Path, Kind: core.DeviceKind(d.file.Kind()), Bytes: d.file.SizeBytes()})
			if err != nil {
				return err
			}
			if err := s.commit(); err != nil {
				return err
			}
			// A crash before this line leaves the other store's id: the command is run again.
			info.Header.Store = s.state.id
			line := poolfmt.EncodeStatic(info.Header.Static)
			return d.write(0, line[:])
		})
	})
	return info, err
}
