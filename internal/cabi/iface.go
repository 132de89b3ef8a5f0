package cabi

import (
	"context"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/gpu/engine"
	"github.com/xcena-dev/maru/internal/hot"
)

// Client is what the C ABI needs of a client. *client.Client satisfies it.
type Client interface {
	Close(ctx context.Context) error
	Connected() bool
	Session() base.SessionID
	Epoch() base.Epoch
	Targets(ctx context.Context) ([]base.SessionID, error)
	Stats() client.Stats
	Usage(ctx context.Context) (*maruv1.UsageResponse, error)
	Ping(ctx context.Context) error

	Probe(ctx context.Context, q client.ProbeQuery, verdicts []byte) (int, error)
	RefreshRequests(ctx context.Context, ids []uint64) error
	EndRequests(ctx context.Context, ids []uint64) error
	SubmitLookup(q client.Lookup) (client.JobID, error)
	SubmitRequests(action hot.RequestsAction, ids []uint64) error
	Delete(ctx context.Context, keys hot.Keys, codes []base.Code) error

	Alloc(ctx context.Context, n int, dst []client.Page) (int, error)
	FreePage(region base.RegionID, index base.PageIndex) error
	CommitPages(ctx context.Context, items []client.CommitItem, codes []base.Code) error
	RegionView(region base.RegionID, offset, size uint64) ([]byte, bool, error)
	ReleaseRegionView(region base.RegionID) error
	RegionPageCount(region base.RegionID) (uint64, error)
	RegionPageBytes(region base.RegionID) (uint64, error)
	RegionFreeCount(region base.RegionID) (uint64, error)
	OwnedRegions() []base.RegionID

	Retrieve(ctx context.Context, keys hot.Keys, mode hot.Mode, out []client.View) error
	ReleaseViews(ids []uint64)
	Pin(ctx context.Context, keys hot.Keys, mode hot.Mode, codes []base.Code) error
	Unpin(ctx context.Context, keys hot.Keys, codes []base.Code) error

	RegisterLayout(l client.Layout) (client.LayoutID, error)
	RegisterDeviceLayout(l client.Layout, ordinal int) (client.LayoutID, error)
	UnregisterLayout(id client.LayoutID) error
	DeviceInfo() (engine.Info, engine.Stats, bool)
	StoreAfter(ctx context.Context, items []client.StoreItem, codes []base.Code, s client.Stream) error
	LoadAfter(ctx context.Context, items []client.LoadItem, codes []base.Code, s client.Stream) error
	SubmitStoreAfter(items []client.StoreItem, s client.Stream) (client.JobID, error)
	SubmitLoadAfter(items []client.LoadItem, s client.Stream) (client.JobID, error)
	EventFD() int
	Completed(dst []client.JobID) int
	JobCopied(job client.JobID) (bool, error)
	JobResult(job client.JobID, codes []base.Code) (bool, error)
}

var _ Client = (*client.Client)(nil)

// Opener makes clients: client.Open, or a test's.
type Opener func(ctx context.Context, cfg client.Config) (Client, error)

// OpenClient opens a real client.
func OpenClient(ctx context.Context, cfg client.Config) (Client, error) {
	c, err := client.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return c, nil
}
