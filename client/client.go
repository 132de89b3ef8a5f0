package client

import (
	"context"
	"fmt"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
)

// Client is one session and what it holds.
// Concurrency: all methods are safe for concurrent use.
type Client struct{ cfg Config }

func notYet(op string) error {
	return fmt.Errorf("%w: %s is not in this build", base.ErrUnsupported, op)
}

// Open registers a session. Errors: ErrInvalid, ErrMismatch, ErrLimit and the like for a
// configuration that the server refuses; ErrUnavailable when it is away.
func Open(ctx context.Context, cfg Config) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return nil, notYet("Open")
}

// Close ends the session: drained, or LEFT while views are out; then the mappings of
// the exported views stay to the end of the process. Idempotent.
func (c *Client) Close(ctx context.Context) error { return notYet("Close") }

// Connected reports whether the session is valid now.
func (c *Client) Connected() bool { return false }

// Session returns the session's id, which is no secret.
func (c *Client) Session() base.SessionID { return base.SessionID{} }

// Epoch returns the session's epoch, 0 before the first Open has succeeded.
func (c *Client) Epoch() base.Epoch { return 0 }

// Targets returns the live worker sessions of this client's engine, for ProbeQuery.
// Errors: ErrUnsupported when the order of several workers cannot be told.
func (c *Client) Targets(ctx context.Context) ([]base.SessionID, error) {
	return nil, notYet("Targets")
}

// Stats returns the counters.
func (c *Client) Stats() Stats { return Stats{} }

// Usage asks the server for capacity and counts.
func (c *Client) Usage(ctx context.Context) (*maruv1.UsageResponse, error) {
	return nil, notYet("Usage")
}

// Ping makes one round trip to the server.
func (c *Client) Ping(ctx context.Context) error { return notYet("Ping") }

// Probe writes one hot.Verdict a key into verdicts, which must be as long as the keys,
// and returns the count of hits before the first that is none. It reserves nothing.
func (c *Client) Probe(ctx context.Context, q ProbeQuery, verdicts []byte) (leading int, err error) {
	return 0, notYet("Probe")
}

// RefreshRequests keeps the request leases of engine requests.
func (c *Client) RefreshRequests(ctx context.Context, ids []uint64) error {
	return notYet("RefreshRequests")
}

// EndRequests ends them.
func (c *Client) EndRequests(ctx context.Context, ids []uint64) error { return notYet("EndRequests") }

// Delete hides keys for good. codes has one a key: OK, NotFound, Pinned, or Unknown
// when the server did not finish in time (the key stays hidden).
func (c *Client) Delete(ctx context.Context, keys hot.Keys, codes []base.Code) error {
	return notYet("Delete")
}

// Alloc fills dst with n pages that are the caller's to write. It is local unless a
// region is missing. It returns how many it got. Errors: ErrFull with fewer than n.
func (c *Client) Alloc(ctx context.Context, n int, dst []Page) (int, error) {
	return 0, notYet("Alloc")
}

// FreePage gives a page back that Alloc gave out. Errors: ErrInvalid for a page that is
// not being written (a double free, or a stored page: Delete its key), ErrNotFound for
// a region that is not ours.
func (c *Client) FreePage(region base.RegionID, index base.PageIndex) error {
	return notYet("FreePage")
}

// CommitPages publishes pages that were written in place. codes has one an item: OK;
// AlreadyStored (the first value stays, the page is free); Unknown (no answer, the page
// is quarantined until there is one); anything else: refused, the page is free. Only
// with Invalid and NotFound, which name a page that Alloc did not give out, nothing changes.
func (c *Client) CommitPages(ctx context.Context, items []CommitItem, codes []base.Code) error {
	return notYet("CommitPages")
}

// RegionView returns bytes of a region that is mapped: own ones are writable, others
// read-only. Ownership: valid until Close. Errors: ErrNotFound, ErrInvalid.
func (c *Client) RegionView(region base.RegionID, offset, size uint64) (b []byte, writable bool, err error) {
	return nil, false, notYet("RegionView")
}

// RegionPageCount returns the page count of a region that is owned or mapped.
func (c *Client) RegionPageCount(region base.RegionID) (uint64, error) {
	return 0, notYet("RegionPageCount")
}

// OwnedRegions returns the regions whose pages this client allocates, oldest first.
func (c *Client) OwnedRegions() []base.RegionID { return nil }

// Retrieve fills out with one view a key; ID 0 is a miss.
func (c *Client) Retrieve(ctx context.Context, keys hot.Keys, mode hot.Mode, out []View) error {
	return notYet("Retrieve")
}

// ReleaseViews ends view leases. It never blocks; unknown ids are ignored.
func (c *Client) ReleaseViews(ids []uint64) {}

// Pin takes a view lease on each key, or counts one up that this client has. codes: OK
// or why not; in hot.ModePrefix everything behind the first miss is a Miss.
func (c *Client) Pin(ctx context.Context, keys hot.Keys, mode hot.Mode, codes []base.Code) error {
	return notYet("Pin")
}

// Unpin counts down; the last one ends the lease. codes: OK, or NotFound for a key that
// this client has not pinned.
func (c *Client) Unpin(ctx context.Context, keys hot.Keys, codes []base.Code) error {
	return notYet("Unpin")
}

// RegisterLayout makes a layout known to transfers. Errors: ErrInvalid.
func (c *Client) RegisterLayout(l Layout) (LayoutID, error) { return 0, notYet("RegisterLayout") }

// UnregisterLayout forgets a layout after the last transfer that uses it. Errors: ErrNotFound.
func (c *Client) UnregisterLayout(id LayoutID) error { return notYet("UnregisterLayout") }

// Store copies objects into pages and publishes them. codes has one an item: OK,
// AlreadyStored, Full (skipped), Unknown, Unavailable, Fault, Invalid.
func (c *Client) Store(ctx context.Context, items []StoreItem, codes []base.Code) error {
	return notYet("Store")
}

// Load copies objects, or parts, out of the store and verifies them. codes has one an
// item: OK, Miss, Corrupt, Fault, Invalid. Except with OK the destination's content is
// undefined; for a Miss that was known before the copy it is untouched.
func (c *Client) Load(ctx context.Context, items []LoadItem, codes []base.Code) error {
	return notYet("Load")
}

// SubmitStore queues a Store. The items are copied; the memory behind them must stay
// until the job is done. Errors: ErrBusy when QueueJobs are out.
func (c *Client) SubmitStore(items []StoreItem) (JobID, error) { return 0, notYet("SubmitStore") }

// SubmitLoad queues a Load, as SubmitStore.
func (c *Client) SubmitLoad(items []LoadItem) (JobID, error) { return 0, notYet("SubmitLoad") }

// EventFD returns a descriptor that is readable while finished jobs wait for Completed.
// Ownership: the client's, until Close.
func (c *Client) EventFD() int { return -1 }

// Completed hands out finished jobs, each once, and clears the descriptor when none is left.
func (c *Client) Completed(dst []JobID) int { return 0 }

// JobResult copies a finished job's codes out and forgets the job. done is false while
// it is not finished; then nothing is copied. Errors: ErrNotFound for a job that is
// unknown or was forgotten, ErrInvalid when codes is too short.
func (c *Client) JobResult(job JobID, codes []base.Code) (done bool, err error) {
	return false, notYet("JobResult")
}
