package server

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
)

// A reader that asks for a region costs the resource manager nothing: its read capability
// came with the allocation. One of an older version does not send it, and is asked.
func TestReadCapabilityCameWithTheRegion(t *testing.T) {
	for name, old := range map[string]bool{"this resource manager": false, "an older one": true} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, 64<<20)
			l.startRM()
			var minted atomic.Int32
			l.cfg.rmOptions = []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(
				ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, call grpc.UnaryInvoker, opts ...grpc.CallOption,
			) error {
				if strings.HasSuffix(method, "/MintRead") {
					minted.Add(1)
				}
				err := call(ctx, method, req, reply, cc, opts...)
				if a, ok := reply.(*maruv1.AllocateResponse); ok && old {
					a.ReadHandle = nil
				}
				return err
			})}
			s := startServer(t, l.cfg)
			waitReady(t, s)
			writer := newClient(t, s.ControlAddress(), cxlRequest)
			writer.connect(s.HotUnixPath())
			l.prove(writer)
			var ids []uint32
			for i := range 3 {
				r := writer.expand(maruv1.Medium_MEDIUM_CXL, 2, 65536)
				writer.commitKeys(r, r.GetHandle().GetIncarnation(), testKeyRange(2*i, 2*i+2))
				ids = append(ids, r.GetHandle().GetRegionId())
			}
			reader := newClient(t, s.ControlAddress(), cxlRequest)
			l.prove(reader)
			beat, err := reader.api.Heartbeat(reader.ctx(), &maruv1.HeartbeatRequest{Sequence: 1})
			if err != nil || beat.GetNewestRegionId() != slices.Max(ids) {
				t.Fatalf("the newest region is %d, want %d: %v", beat.GetNewestRegionId(), slices.Max(ids), err)
			}
			ask := func(after, most uint32) (got []uint32) {
				t.Helper()
				d, err := reader.api.DescribeRegions(reader.ctx(), &maruv1.DescribeRegionsRequest{AllOfNamespace: true, AfterRegionId: after, MaxCount: most})
				if err != nil {
					t.Fatal(err)
				}
				for _, r := range d.GetRegions() {
					if r.GetProblem().GetCode() != 0 || len(r.GetHandle().GetToken()) == 0 || !r.GetHandle().GetReadOnly() {
						t.Fatalf("described: %v", r)
					}
					got = append(got, r.GetHandle().GetRegionId())
				}
				slices.Sort(got)
				return got
			}
			if got := ask(0, 0); !slices.Equal(got, ids) {
				t.Errorf("all regions: %v, want %v", got, ids)
			}
			if got := ask(ids[0], 0); !slices.Equal(got, ids[1:]) {
				t.Errorf("behind the first: %v, want %v", got, ids[1:])
			}
			if got := ask(0, 2); !slices.Equal(got, ids[1:]) {
				t.Errorf("the newest two: %v, want %v", got, ids[1:])
			}
			if n := minted.Load(); (n != 0) != old {
				t.Errorf("the resource manager was asked for read capabilities %d times", n)
			}
			// The regions go; nothing of them is kept.
			if _, err := writer.api.Close(writer.ctx(), &maruv1.CloseRequest{Drained: true}); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestNewestRegionsOf(t *testing.T) {
	infos := func(ids ...base.RegionID) (out []directory.RegionInfo) {
		for _, id := range ids {
			out = append(out, directory.RegionInfo{Region: id})
		}
		return out
	}
	for _, c := range []struct {
		after base.RegionID
		most  int
		want  []base.RegionID
	}{
		{0, 0, []base.RegionID{2, 3, 5, 9}}, {3, 0, []base.RegionID{5, 9}}, {0, 3, []base.RegionID{3, 5, 9}},
		{2, 1, []base.RegionID{9}}, {9, 5, nil}, {0, 9, []base.RegionID{2, 3, 5, 9}},
	} {
		var got []base.RegionID
		for _, i := range newestRegions(infos(5, 2, 9, 3), c.after, c.most) {
			got = append(got, i.Region)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("after %d, at most %d: %v, want %v", c.after, c.most, got, c.want)
		}
	}
}
