package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/poolfmt"
)

// The fake's resource manager.

func (f *fake) Describe(context.Context, *maruv1.DescribeRequest) (*maruv1.DescribeResponse, error) {
	return &maruv1.DescribeResponse{Version: 1, BootId: f.boot}, nil
}

func (f *fake) StartDomainProof(_ context.Context, r *maruv1.StartDomainProofRequest) (*maruv1.StartDomainProofResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	slot := uint32(len(f.mu.nonces) % poolfmt.NonceSlotCount)
	n := poolfmt.Nonce{Session: base.SessionID(r.GetSessionId())}
	_, _ = rand.Read(n.Value[:])
	f.mu.nonces[slot] = n
	line := poolfmt.EncodeNonce(f.pool, n)
	x, err := os.OpenFile(f.path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer x.Close()
	if _, err := x.WriteAt(line[:], int64(poolfmt.NonceOffset(slot))); err != nil {
		return nil, err
	}
	return &maruv1.StartDomainProofResponse{
		Slot: slot, Path: f.path, DeviceKind: maruv1.DeviceKind_DEVICE_KIND_FILE, MapBytes: poolfmt.DataOffset, Coherence: f.coherence,
	}, nil
}

func (f *fake) FinishDomainProof(_ context.Context, r *maruv1.FinishDomainProofRequest) (*maruv1.FinishDomainProofResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.mu.nonces[r.GetSlot()]
	if !bytes.Equal(n.Value[:], r.GetNonce()) {
		return nil, fmt.Errorf("%w: nonce", base.ErrDenied)
	}
	f.mu.proved[base.SessionID(r.GetSessionId())] = true
	return &maruv1.FinishDomainProofResponse{}, nil
}

func holdKey(s []byte, region uint32) string { return fmt.Sprintf("%x/%d", s, region) }

func (f *fake) Hold(_ context.Context, r *maruv1.HoldRequest) (*maruv1.HoldResponse, error) {
	f.called("hold")
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuseHolds.Load() {
		return nil, fmt.Errorf("%w: hold", base.ErrOffline)
	}
	if f.holdEnds.CompareAndSwap(true, false) {
		var id base.SessionID
		copy(id[:], r.GetSessionId())
		f.mu.sessions[id].ended = true
	}
	resp := &maruv1.HoldResponse{HoldToken: []byte("hold"), Provable: true}
	for _, h := range r.GetHandles() {
		g := f.mu.regions[base.RegionID(h.GetRegionId())]
		if g == nil {
			return nil, fmt.Errorf("%w: region %d", base.ErrDraining, h.GetRegionId())
		}
		f.mu.holds[holdKey(r.GetSessionId(), h.GetRegionId())] = true
		if f.wrongRegion.Load() {
			h = f.handle(h.GetRegionId() + 1000)
		}
		resp.Regions = append(resp.Regions, &maruv1.RegionAccess{
			Handle: h, Place: g.place, Path: f.path, DeviceKind: maruv1.DeviceKind_DEVICE_KIND_FILE, Coherence: f.coherence,
		})
	}
	if f.loseHolds.Add(-1) >= 0 {
		return nil, fmt.Errorf("%w: the answer is lost", base.ErrUnknown)
	}
	return resp, nil
}

func (f *fake) Unhold(_ context.Context, r *maruv1.UnholdRequest) (*maruv1.UnholdResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if most := int(f.unholdCount.Load()); most > 0 && len(r.GetHandles()) > most {
		return nil, fmt.Errorf("%w: %d handles", base.ErrLimit, len(r.GetHandles()))
	}
	seen := map[uint32]bool{}
	for _, h := range r.GetHandles() {
		if seen[h.GetRegionId()] {
			return nil, fmt.Errorf("%w: region %d twice", base.ErrInvalid, h.GetRegionId())
		}
		seen[h.GetRegionId()] = true
	}
	for _, h := range r.GetHandles() {
		delete(f.mu.holds, holdKey(r.GetSessionId(), h.GetRegionId()))
	}
	return &maruv1.UnholdResponse{}, nil
}

func (f *fake) WatchSession(_ *maruv1.WatchSessionRequest, s maruv1.ResourceManager_WatchSessionServer) error {
	<-s.Context().Done()
	return s.Context().Err()
}

func (f *fake) holdCount() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.mu.holds)
}
