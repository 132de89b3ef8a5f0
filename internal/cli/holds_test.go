package cli

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// The text of `maru rm holds`, for every kind of hold that there is: in one look who holds
// what since when; below it, for each that keeps something from coming back, why and who
// must act.
func TestHoldsText(t *testing.T) {
	now := time.UnixMilli(1_700_000_000_000)
	id := func(b byte) []byte { return bytes.Repeat([]byte{b}, 16) }
	hold := func(session, node byte, region uint32, since time.Duration, change func(*maruv1.HoldInfo)) *maruv1.HoldInfo {
		h := &maruv1.HoldInfo{
			SessionId: id(session), NodeId: id(node), RegionId: region, PoolId: id(9), PoolName: "cxl0", ExtentLength: 64 << 20, Views: session == 1,
			Process: &maruv1.ProcessID{Pid: 4000 + int64(session)}, Provable: true, SinceUnixMs: now.Add(-since).UnixMilli(),
			Reason: "in use by server engine", Proof: "this resource manager", SessionState: "live",
		}
		if change != nil {
			change(h)
		}
		return h
	}
	drains := func(h *maruv1.HoldInfo) {
		h.Draining, h.Reason = true, "server engine gave it back; it drains until its last mapper is gone"
		h.Cure = "comes back when pid 4001 (started at tick 7) of session 01010101-0101-0101-0101-010101010101 releases its views, or ends"
	}
	holds := []*maruv1.HoldInfo{
		hold(1, 0xa, 1, 90*time.Second, nil),
		hold(1, 0xa, 2, 3*time.Hour+5*time.Minute, drains),
		hold(1, 0xa, 3, 3*time.Hour+5*time.Minute, drains),
		hold(1, 0xa, 5, 3*time.Hour+5*time.Minute, drains),
		hold(2, 0xa, 3, 50*time.Hour, func(h *maruv1.HoldInfo) { h.SessionState = "suspect" }),
		hold(3, 0xb, 7, time.Second, func(h *maruv1.HoldInfo) { h.Proof = "agent far" }),
		hold(4, 0xb, 8, time.Minute, func(h *maruv1.HoldInfo) {
			h.Proof = "agent far, which is away (heard 10m0s ago)"
			h.Cure = "start maru-remote-cxl-agent --watch-only on node NODE again, with its state directory: it says then whether PROCESS has ended; or when it is gone for certain, maru rm drop-holds --session S --confirm"
		}),
		hold(5, 0xc, 9, time.Minute, func(h *maruv1.HoldInfo) {
			h.Process, h.Provable, h.SessionState, h.PoolName = nil, false, "", ""
			h.Proof = "nobody: it called over TCP and no agent of its node vouches for it"
			h.Cure = "session S unmaps it, or its node reboots; its end cannot be proved here (it called over TCP): when it is gone for certain, maru rm drop-holds --session S --confirm"
		}),
	}
	var out strings.Builder
	if err := showHolds(&out, holds, "no server at 127.0.0.1:5555 tells which sessions are suspect (--server): away", now); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "holds.golden")
	if *update {
		if err := os.WriteFile(path, []byte(out.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("the text is\n%s\nthe golden file has\n%s", out.String(), want)
	}
	// The golden file cannot be made to say less.
	for _, part := range []string{
		"8 holds of 5 sessions on 7 regions (448MiB); 3 draining (192MiB); 1 session suspect; the end of 1 session cannot be proved",
		"regions 2-3, 5\n", "3h5m", "2d2h", "agent far (away)", "  cure: ", "  why:  ", "suspect: its server has had no heartbeat", "unknown process",
	} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("%q is not said", part)
		}
	}
	out.Reset()
	if err := showHolds(&out, nil, "", now); err != nil || out.String() != "0 holds of 0 sessions on 0 regions (0)\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if err := showHolds(&out, []*maruv1.HoldInfo{{}}, "", now); err != nil { // of a peer that says nothing
		t.Error(err)
	}
}
