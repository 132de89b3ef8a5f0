package rm

import (
	"errors"
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/poolfmt"
	"github.com/xcena-dev/maru/internal/rm/core"
)

const initCure = "maru device init"

// attachAll brings pools online at start: those that the operator names, those
// that the store knows, and devdax devices that carry our store id. A problem
// with a named one is an error, except that a pool which the store knows and
// whose device lost its header stays offline; problems with others are a reason.
func (s *Server) attachAll() error {
	for _, spec := range s.cfg.Pools {
		if err := s.attachNamed(spec); err != nil {
			return fmt.Errorf("pool %s: %w", spec.Path, err)
		}
	}
	for _, p := range s.core.Pools() {
		if p.OfflineReason == "" || s.isOpen(p.Path) || s.isNamed(p.Path) {
			continue
		}
		if err := s.attach(PoolSpec{Kind: dax.Kind(p.Kind), Path: p.Path}); err != nil {
			s.offline(p.ID, p.Path, err)
		}
	}
	if s.cfg.Discovery == DiscoverNone {
		return nil
	}
	devices, err := dax.Discover(s.cfg.SysfsRoot)
	if err != nil {
		s.log.Warn("looking for dax devices failed", "error", err)
		return nil
	}
	for _, d := range devices {
		if d.Driver != dax.DriverDevice || s.isOpen(d.Path) || s.isNamed(d.Path) {
			continue
		}
		if err := s.attachFound(d); err != nil {
			s.log.Warn("dax device is not used", "path", d.Path, "error", err)
		}
	}
	return nil
}

func (s *Server) isOpen(path string) bool {
	for _, d := range s.devices {
		if d.file.Path() == path {
			return true
		}
	}
	return false
}

func (s *Server) isNamed(path string) bool {
	for _, p := range s.cfg.Pools {
		if p.Path == path {
			return true
		}
	}
	return false
}

// known returns the pool that the store knows under a path and that is not online.
func (s *Server) known(path string) (core.Pool, bool) {
	for _, p := range s.core.Pools() {
		if p.Path == path && p.OfflineReason != "" {
			return p, true
		}
	}
	return core.Pool{}, false
}

func (s *Server) offline(id base.PoolID, path string, err error) {
	s.log.Warn("pool is offline", "pool", id, "path", path, "error", err)
	s.core.SetOffline(id, err.Error())
}

func (s *Server) attachNamed(spec PoolSpec) error {
	known, ok := s.known(spec.Path)
	create := spec
	if ok && spec.SizeBytes != 0 && spec.SizeBytes != known.DeviceBytes {
		return fmt.Errorf("%w: it was made with size %d, asked is %d; a pool keeps its size (maru device clear takes it away)", base.ErrMismatch, known.DeviceBytes, spec.SizeBytes)
	}
	if ok {
		// A pool that is known is never made anew by a flag: its regions would be
		// dropped without anybody's word.
		create.SizeBytes = 0
	}
	err := s.attach(create)
	if ok && (errors.Is(err, base.ErrNotFound) || errors.Is(err, base.ErrCorrupt)) {
		s.offline(known.ID, spec.Path, fmt.Errorf("%w; if the memory lost its content, %s --confirm drops its %d regions and makes it new", err, initCure, known.RegionCount))
		return nil
	}
	return err
}

// attach opens a device and gives it to the core.
func (s *Server) attach(spec PoolSpec) error {
	d, err := openDevice(spec, s.cfg.SysfsRoot, s.cfg.Overcommit)
	if err != nil {
		return err
	}
	if err := s.adopt(d, spec); err != nil {
		return errors.Join(err, d.close())
	}
	return nil
}

func (s *Server) adopt(d *device, spec PoolSpec) error {
	h, err := d.header()
	if errors.Is(err, base.ErrNotFound) && d.file.Kind() != dax.KindDevdax && spec.SizeBytes != 0 {
		h, err = s.formatBlank(d, spec)
	}
	if err != nil {
		if errors.Is(err, base.ErrNotFound) {
			return fmt.Errorf("%w on %s: make it a pool with %s %s", err, d.file.Path(), initCure, d.file.Path())
		}
		return fmt.Errorf("%s: %w", d.file.Path(), err)
	}
	if spec.Coherence != base.CoherenceUnknown && spec.Coherence != h.Coherence {
		return fmt.Errorf("%w: %s was made with coherence %s, asked is %s", base.ErrMismatch, d.file.Path(), h.Coherence, spec.Coherence)
	}
	id, write, err := s.core.Attach(s.pending, core.Device{
		Header: h, Name: spec.Name, Path: d.file.Path(), Kind: core.DeviceKind(d.file.Kind()), Bytes: d.file.SizeBytes(),
	})
	if err != nil {
		return err
	}
	if write != nil {
		if err := d.writeSlot(*write); err != nil {
			s.core.SetOffline(id, err.Error())
			return err
		}
		s.core.SlotWritten(*write)
	}
	d.pool = id
	s.devices[id] = d
	s.log.Info("pool is online", "pool", id, "path", d.file.Path(), "kind", d.file.Kind().String(), "coherence", h.Coherence.String())
	return nil
}

// formatBlank makes a pool of a file that was made for it. A file with anything
// in it is somebody's.
func (s *Server) formatBlank(d *device, spec PoolSpec) (poolfmt.Header, error) {
	blank, err := d.isBlank()
	if err != nil {
		return poolfmt.Header{}, err
	}
	if !blank {
		return poolfmt.Header{}, fmt.Errorf("%w: the file holds data and no pool header; it is left alone", base.ErrForeign)
	}
	coherence := spec.Coherence
	if coherence == base.CoherenceUnknown {
		if d.file.Kind() != dax.KindFile {
			return poolfmt.Header{}, fmt.Errorf("%w: a new pool on %s needs coherence=hardware or coherence=software", base.ErrInvalid, d.file.Kind())
		}
		coherence = base.CoherenceHardware // a plain file is shared by one host
	}
	h := poolfmt.Header{Static: poolfmt.Static{Pool: base.NewID(), Store: s.state.id, Coherence: coherence}, Slot: poolfmt.FirstSlot()}
	return h, d.format(h)
}

// attachFound looks at a device that nobody named: it is opened for reading
// until its header shows that it is ours.
func (s *Server) attachFound(found dax.Device) error {
	f, err := dax.Open(found.Path, dax.KindDevdax, dax.OpenOptions{ReadOnly: true, SysfsRoot: s.cfg.SysfsRoot})
	if err != nil {
		return err
	}
	h, err := readHeader(f)
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	if h.Store != s.state.id {
		return fmt.Errorf("%w: it belongs to the resource manager with store %s", base.ErrForeign, h.Store)
	}
	return s.attach(PoolSpec{Kind: dax.KindDevdax, Path: found.Path})
}
