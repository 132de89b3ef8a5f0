//go:build vmguest

package inside

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/dax"
	"github.com/xcena-dev/maru/internal/media/mapping"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
)

// Where the host starts the resource manager, and where the phases of a test leave
// what was acknowledged to them: on the disk, so that it survives a crash.
const (
	rmAddress = "unix:/run/maru/rm-9850.sock"
	notesPath = "/state/regions.json"

	regionPageCount = 16
	regionPageBytes = 64 << 10
)

// notes is what the resource manager has acknowledged.
type notes struct {
	Owner       []byte
	Incarnation uint32
	OwnerToken  []byte
	Regions     []note
}

type note struct {
	Operation      uint64
	Region         uint32
	Token          []byte
	Offset, Extent uint64
}

func readNotes(t *testing.T) notes {
	t.Helper()
	var n notes
	b, err := os.ReadFile(notesPath)
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// save is durable when it returns: what it writes down was acknowledged as durable.
func (n notes) save(t *testing.T) {
	t.Helper()
	b, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(notesPath)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

func resourceManager(t *testing.T) maruv1.ResourceManagerClient {
	t.Helper()
	c, err := rpc.NewClient(rmAddress, rpc.Retry{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return maruv1.NewResourceManagerClient(c)
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestRMInit makes the device a pool: never by guessing its coherence, and never
// twice.
func TestRMInit(t *testing.T) {
	o := rm.DeviceOptions{Path: device}
	if _, err := rm.InitDevice(deadline(t), o); !errors.Is(err, base.ErrInvalid) {
		t.Errorf("init without a coherence: %v, want ErrInvalid", err)
	}
	if _, err := rm.ShowDevice(deadline(t), o); !errors.Is(err, base.ErrNotFound) {
		t.Errorf("show of a blank device: %v, want ErrNotFound", err)
	}
	o.Coherence = base.CoherenceHardware
	info, err := rm.InitDevice(deadline(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if info.Kind != dax.KindDevdax || info.SizeBytes != deviceBytes {
		t.Errorf("made %+v", info)
	}
	if _, err := rm.InitDevice(deadline(t), o); !errors.Is(err, base.ErrExists) {
		t.Errorf("init of a pool: %v, want ErrExists", err)
	}
	shown, err := rm.ShowDevice(deadline(t), o)
	if err != nil || shown.Header.Pool != info.Header.Pool {
		t.Errorf("shown %+v, %v; want pool %s", shown, err, info.Header.Pool)
	}
}

// TestRMBusy: a device has one owner.
func TestRMBusy(t *testing.T) {
	o := rm.DeviceOptions{Path: device, StateDir: "/state/other", Coherence: base.CoherenceHardware}
	if _, err := rm.InitDevice(deadline(t), o); !errors.Is(err, base.ErrBusy) {
		t.Errorf("init of a device in use: %v, want ErrBusy", err)
	}
}

// TestRMFill takes regions, writes into each through its own mapping, and notes
// what was acknowledged.
func TestRMFill(t *testing.T) {
	c := resourceManager(t)
	pools, err := c.ListPools(deadline(t), &maruv1.ListPoolsRequest{})
	if err != nil || len(pools.GetPools()) != 1 {
		t.Fatalf("pools %v, %v; want one", pools, err)
	}
	p := pools.GetPools()[0]
	if p.GetPath() != device || p.GetState() != maruv1.PoolState_POOL_STATE_ONLINE || p.GetDeviceKind() != maruv1.DeviceKind_DEVICE_KIND_DEVDAX {
		t.Fatalf("pool %v", p)
	}
	owner := base.NewID()
	n := notes{Owner: owner[:]}
	secret := base.NewOwnerSecret()
	started, err := c.StartOwner(deadline(t), &maruv1.StartOwnerRequest{OwnerId: n.Owner, Name: "vmlab", OwnerSecret: secret.Bytes()})
	if err != nil {
		t.Fatal(err)
	}
	n.Incarnation, n.OwnerToken = started.GetIncarnation(), started.GetOwnerToken()
	for op := uint64(1); op <= 8; op++ {
		got := allocate(t, c, n, op)
		n.Regions = append(n.Regions, got)
		touchRegion(t, got, mapping.ReadWrite)
		n.save(t)
	}
}

// TestRMKept: everything that was acknowledged is there, at the same place, with
// its bytes; nothing else has got its room; what was not there is not invented.
func TestRMKept(t *testing.T) {
	c := resourceManager(t)
	n := readNotes(t)
	list, err := c.ListRegions(deadline(t), &maruv1.ListRegionsRequest{OwnerId: n.Owner, Incarnation: n.Incarnation, OwnerToken: n.OwnerToken})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.GetRegions()) != len(n.Regions) {
		t.Fatalf("%d regions are listed, %d were acknowledged", len(list.GetRegions()), len(n.Regions))
	}
	for _, want := range n.Regions {
		// The same operation again is the same region.
		got := allocate(t, c, n, want.Operation)
		if got.Region != want.Region || got.Offset != want.Offset || !bytes.Equal(got.Token, want.Token) {
			t.Errorf("operation %d: region %d at %d, acknowledged was %d at %d", want.Operation, got.Region, got.Offset, want.Region, want.Offset)
		}
		touchRegion(t, want, mapping.ReadOnly)
	}
	// One more each time, which must not lie on any of the others.
	next := allocate(t, c, n, uint64(len(n.Regions))+1)
	for _, r := range n.Regions {
		if next.Offset < r.Offset+r.Extent && r.Offset < next.Offset+next.Extent {
			t.Fatalf("region %d at %d lies on region %d at %d", next.Region, next.Offset, r.Region, r.Offset)
		}
	}
	touchRegion(t, next, mapping.ReadWrite)
	n.Regions = append(n.Regions, next)
	n.save(t)
}

func allocate(t *testing.T, c maruv1.ResourceManagerClient, n notes, operation uint64) note {
	t.Helper()
	r, err := c.Allocate(deadline(t), &maruv1.AllocateRequest{
		OwnerId: n.Owner, Incarnation: n.Incarnation, OwnerToken: n.OwnerToken, Operation: operation,
		PageCount: regionPageCount, PageSize: regionPageBytes, PieceSize: regionPageBytes,
		NamespaceDigest: make([]byte, 32), WriterSession: n.Owner,
	})
	if err != nil {
		t.Fatal(err)
	}
	return note{
		Operation: operation, Region: r.GetHandle().GetRegionId(), Token: r.GetHandle().GetToken(),
		Offset: r.GetPlace().GetOffset(), Extent: r.GetPlace().GetExtentLength(),
	}
}

// touchRegion writes or checks the region's number in all of its pages.
func touchRegion(t *testing.T, r note, access mapping.Access) {
	t.Helper()
	f, err := dax.Open(device, dax.KindDevdax, dax.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := f.Map(r.Offset, r.Extent, access)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	want := bytes.Repeat([]byte{byte(r.Region), 0xda}, regionPageCount*regionPageBytes/2)
	if err := m.Guard(func() {
		pages := m.Bytes()[:len(want)]
		if access == mapping.ReadWrite {
			copy(pages, want)
		} else if !bytes.Equal(pages, want) {
			t.Errorf("region %d has other bytes than were written", r.Region)
		}
	}); err != nil {
		t.Fatal(err)
	}
}
