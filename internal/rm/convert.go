package rm

import (
	"fmt"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm/core"
)

// ids reads the ids of a message and keeps the first problem, so that a handler
// asks once.
type ids struct{ err error }

func (x *ids) must(field string, b []byte) [base.IDBytes]byte {
	id, err := base.IDFromBytes(field, b)
	if err == nil && id == ([base.IDBytes]byte{}) {
		err = fmt.Errorf("%w: %s is zero", base.ErrInvalid, field)
	}
	if err != nil && x.err == nil {
		x.err = err
	}
	return id
}

// may takes an absent id as zero.
func (x *ids) may(field string, b []byte) [base.IDBytes]byte {
	if len(b) == 0 {
		return [base.IDBytes]byte{}
	}
	id, err := base.IDFromBytes(field, b)
	if err != nil && x.err == nil {
		x.err = err
	}
	return id
}

func (x *ids) incarnation(field string, v uint32) base.Incarnation {
	if (v == 0 || v > uint32(base.MaxIncarnation)) && x.err == nil {
		x.err = fmt.Errorf("%w: %s is %d, allowed: 1 to %d", base.ErrInvalid, field, v, base.MaxIncarnation)
	}
	return base.Incarnation(v)
}

// claim reads who an owner's call comes from.
func (x *ids) claim(owner []byte, incarnation uint32, token []byte) core.Claim {
	return core.Claim{Owner: x.must("owner_id", owner), Incarnation: x.incarnation("incarnation", incarnation), Token: token}
}

// session reads a session's secret; none is of a client that has none.
func (x *ids) session(b []byte) []byte {
	if err := checkSecret("session_secret", b); err != nil && x.err == nil {
		x.err = err
	}
	return b
}

// secret reads an owner's secret; none is for the core to refuse.
func (x *ids) secret(b []byte) base.OwnerSecret {
	if len(b) == 0 {
		return base.OwnerSecret{}
	}
	s, err := base.MakeOwnerSecret(b)
	if err != nil && x.err == nil {
		x.err = fmt.Errorf("owner_secret: %w", err)
	}
	return s
}

func (x *ids) handle(h *maruv1.RegionHandle) core.Handle {
	if h == nil {
		if x.err == nil {
			x.err = fmt.Errorf("%w: handle is missing", base.ErrInvalid)
		}
		return core.Handle{}
	}
	return core.Handle{
		Pool: x.must("handle.pool_id", h.GetPoolId()), Region: base.RegionID(h.GetRegionId()), Incarnation: base.Incarnation(h.GetIncarnation()),
		Token: h.GetToken(), ReadOnly: h.GetReadOnly(),
	}
}

func (x *ids) handles(hs []*maruv1.RegionHandle) []core.Handle {
	out := make([]core.Handle, len(hs))
	for i, h := range hs {
		out[i] = x.handle(h)
	}
	return out
}

func handleOut(h core.Handle) *maruv1.RegionHandle {
	return &maruv1.RegionHandle{PoolId: h.Pool[:], RegionId: uint32(h.Region), Incarnation: uint32(h.Incarnation), Token: h.Token, ReadOnly: h.ReadOnly}
}

func placeOut(r core.Region) *maruv1.RegionPlace {
	return &maruv1.RegionPlace{
		Offset: r.Extent.Offset, ExtentLength: r.Extent.Length, Length: r.Plan.DataBytes, PageSize: r.Plan.PageBytes,
		PageCount: r.Plan.PageCount, PieceSize: r.Plan.PieceBytes, TableOffset: r.Plan.TableOffset,
	}
}

func accessOut(p core.Place) *maruv1.RegionAccess {
	return &maruv1.RegionAccess{
		Handle: handleOut(p.Handle), Place: placeOut(p.Region), Path: p.Path, DeviceKind: maruv1.DeviceKind(p.Kind), Coherence: maruv1.Coherence(p.Coherence),
	}
}

func problemOut(err error) *maruv1.Problem {
	return &maruv1.Problem{Code: uint32(base.CodeOf(err)), Text: err.Error()}
}

func poolOut(p core.Pool, align uint64) *maruv1.PoolInfo {
	out := &maruv1.PoolInfo{
		PoolId: p.ID[:], Name: p.Name, Medium: maruv1.Medium_MEDIUM_CXL, Tier: maruv1.Tier_TIER_L1, Scope: maruv1.Scope_SCOPE_DOMAIN,
		Coherence: maruv1.Coherence(p.Coherence), DeviceKind: maruv1.DeviceKind(p.Kind), Path: p.Path,
		CapacityBytes: p.CapacityBytes, AllocatedBytes: p.AllocatedBytes, DrainingBytes: p.DrainingBytes, LargestFreeBytes: p.LargestFreeBytes,
		AlignBytes: align, State: maruv1.PoolState_POOL_STATE_ONLINE, RegionCount: uint64(p.RegionCount), Sequence: p.Sequence,
	}
	if p.OfflineReason != "" {
		out.State, out.Reason = maruv1.PoolState_POOL_STATE_OFFLINE, p.OfflineReason
	}
	return out
}

func processOut(p core.ProcessID) *maruv1.ProcessID {
	if p.IsZero() {
		return nil
	}
	return &maruv1.ProcessID{Pid: p.PID, PidNamespace: p.Namespace, StartTicks: p.StartTicks, BootId: p.Boot[:]}
}

func sessionsOut(in []base.SessionID) [][]byte {
	out := make([][]byte, len(in))
	for i := range in {
		out[i] = in[i][:]
	}
	return out
}
