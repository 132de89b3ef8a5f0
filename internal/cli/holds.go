package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/settings"
)

var defaultServer = fmt.Sprintf("%s:%d", server.DefaultHost, server.DefaultPort)

// statesTimeout bounds the question to a server that may not be there: the list of
// holds does not need it.
const statesTimeout = 2 * time.Second

// whole prints a message with every field.
func whole(w io.Writer, msg proto.Message) error {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(msg)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", b)
	return err
}

// holds lists who holds what. address is the server that knows its sessions' states.
func (m *manager) holds(ctx context.Context, address string) error {
	all := &maruv1.ListHoldsResponse{}
	req := &maruv1.ListHoldsRequest{Limit: 1000}
	for {
		r, err := m.ListHolds(ctx, req)
		if err != nil {
			return err
		}
		all.Holds = append(all.Holds, r.GetHolds()...)
		if !r.GetMore() || len(r.GetHolds()) == 0 {
			break
		}
		last := r.GetHolds()[len(r.GetHolds())-1]
		req.AfterSessionId, req.AfterRegionId = last.GetSessionId(), last.GetRegionId()
	}
	note := ""
	if address != "" && len(all.GetHolds()) > 0 {
		states, err := sessionStates(ctx, address)
		if err != nil {
			note = fmt.Sprintf("no server at %s tells which sessions are suspect (--server): %v", address, err)
		}
		for _, h := range all.GetHolds() {
			h.SessionState = states[string(h.GetSessionId())]
		}
	}
	if m.json {
		return whole(m.cmd.OutOrStdout(), all)
	}
	return showHolds(m.cmd.OutOrStdout(), all.GetHolds(), note, time.Now())
}

// sessionStates asks a server for its sessions.
func sessionStates(ctx context.Context, address string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, statesTimeout)
	defer cancel()
	conn, err := rpc.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	r, err := maruv1.NewMetadataServerClient(conn).Usage(ctx, &maruv1.UsageRequest{})
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, s := range r.GetSessions() {
		out[string(s.GetSessionId())] = s.GetState()
	}
	return out, nil
}

// suspectCure is for a session that its server hides: the resource manager only sees its
// process, which lives or is not provable.
const suspectCure = "its server has had no heartbeat from it: its keys are hidden and its bytes charged until it comes back, or its end is proved"

// showHolds prints a summary, a table of every hold, and below it what needs somebody.
func showHolds(out io.Writer, holds []*maruv1.HoldInfo, note string, now time.Time) error {
	w := &strings.Builder{}
	summary(w, holds)
	if len(holds) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		_, _ = fmt.Fprintln(t, "\nREGION\tPOOL\tBYTES\tIS\tSESSION\tSTATE\tPROCESS\tNODE\tVIEWS\tHELD FOR\tEND SEEN BY")
		for _, h := range holds {
			_, _ = fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", h.GetRegionId(), poolText(h), settings.AboutSize(h.GetExtentLength()), regionText(h),
				shortID(h.GetSessionId()), cmp.Or(h.GetSessionState(), "-"), processText(h), shortID(h.GetNodeId()), yes(h.GetViews()), age(h, now), seenBy(h))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	needs(w, holds)
	if note != "" {
		_, _ = fmt.Fprintf(w, "\n%s\n", note)
	}
	_, err := io.WriteString(out, w.String())
	return err
}

func summary(w io.Writer, holds []*maruv1.HoldInfo) {
	sessions, regions, draining := map[string]bool{}, map[uint32]uint64{}, map[uint32]uint64{}
	unprovable, suspect := map[string]bool{}, map[string]bool{}
	for _, h := range holds {
		id := string(h.GetSessionId())
		sessions[id] = true
		regions[h.GetRegionId()] = h.GetExtentLength()
		if h.GetDraining() {
			draining[h.GetRegionId()] = h.GetExtentLength()
		}
		if !h.GetProvable() {
			unprovable[id] = true
		}
		if h.GetSessionState() == "suspect" {
			suspect[id] = true
		}
	}
	_, _ = fmt.Fprintf(w, "%s of %s on %s (%s)", count(len(holds), "hold"), count(len(sessions), "session"), count(len(regions), "region"), settings.AboutSize(total(regions)))
	if len(draining) > 0 {
		_, _ = fmt.Fprintf(w, "; %d draining (%s)", len(draining), settings.AboutSize(total(draining)))
	}
	if len(suspect) > 0 {
		_, _ = fmt.Fprintf(w, "; %s suspect", count(len(suspect), "session"))
	}
	if len(unprovable) > 0 {
		_, _ = fmt.Fprintf(w, "; the end of %s cannot be proved", count(len(unprovable), "session"))
	}
	_, _ = fmt.Fprintln(w)
}

// trouble is what several holds of a session have in common.
type trouble struct {
	session             *maruv1.HoldInfo
	regions             []uint32
	why, state, by, how string
}

// needs says for each session that keeps something from coming back why, and the cure.
func needs(w io.Writer, holds []*maruv1.HoldInfo) {
	var list []*trouble
	for _, h := range holds {
		suspect := h.GetSessionState() == "suspect"
		if h.GetCure() == "" && !suspect {
			continue
		}
		x := trouble{session: h, why: h.GetReason(), by: h.GetProof(), how: h.GetCure()}
		if suspect {
			x.state = suspectCure
			x.how = cmp.Or(x.how, "comes back by itself; to end it, end its process")
		}
		i := slices.IndexFunc(list, func(y *trouble) bool {
			return string(y.session.GetSessionId()) == string(h.GetSessionId()) && y.why == x.why && y.state == x.state && y.how == x.how
		})
		if i < 0 {
			list, i = append(list, &x), len(list)
		}
		list[i].regions = append(list[i].regions, h.GetRegionId())
	}
	for _, x := range list {
		h := x.session
		_, _ = fmt.Fprintf(w, "\nsession %s, %s on node %s: %s\n", idText(h.GetSessionId()), processText(h), idText(h.GetNodeId()), regionsText(x.regions))
		_, _ = fmt.Fprintf(w, "  why:  %s\n", x.why)
		if x.state != "" {
			_, _ = fmt.Fprintf(w, "        suspect: %s\n", x.state)
		}
		_, _ = fmt.Fprintf(w, "  end:  seen by %s\n  cure: %s\n", x.by, x.how)
	}
}

// regionsText lists regions with runs as FIRST-LAST.
func regionsText(ids []uint32) string {
	var parts []string
	for i := 0; i < len(ids); {
		j := i
		for j+1 < len(ids) && ids[j+1] == ids[j]+1 {
			j++
		}
		if j > i {
			parts = append(parts, fmt.Sprintf("%d-%d", ids[i], ids[j]))
		} else {
			parts = append(parts, strconv.FormatUint(uint64(ids[i]), 10))
		}
		i = j + 1
	}
	name := "region "
	if len(ids) > 1 {
		name = "regions "
	}
	return name + strings.Join(parts, ", ")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func total(m map[uint32]uint64) (n uint64) {
	for _, v := range m {
		n += v
	}
	return n
}

func poolText(h *maruv1.HoldInfo) string { return cmp.Or(h.GetPoolName(), shortID(h.GetPoolId())) }

func regionText(h *maruv1.HoldInfo) string {
	if h.GetDraining() {
		return "draining"
	}
	return "held"
}

func processText(h *maruv1.HoldInfo) string {
	if h.GetProcess() == nil {
		return "unknown process"
	}
	return fmt.Sprintf("pid %d", h.GetProcess().GetPid())
}

func seenBy(h *maruv1.HoldInfo) string {
	by, _, _ := strings.Cut(h.GetProof(), ":")
	by, _, _ = strings.Cut(by, ",")
	if strings.Contains(h.GetProof(), "is away") {
		by += " (away)"
	}
	return by
}

// shortID shows the first digits of an id, enough to tell it from its neighbours; the
// notes below the table have it whole.
func shortID(b []byte) string {
	text := idText(b)
	return cmp.Or(text[:min(len(text), 8)], "-")
}

func yes(v bool) string {
	if v {
		return "yes"
	}
	return "no"
}

func age(h *maruv1.HoldInfo, now time.Time) string {
	d := now.Sub(time.UnixMilli(h.GetSinceUnixMs())).Truncate(time.Second)
	switch {
	case d < 0:
		return "0s"
	case d >= 48*time.Hour:
		return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
	case d >= time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return d.String()
}

func (m *manager) agents(ctx context.Context) error {
	r, err := m.ListAgents(ctx, &maruv1.ListAgentsRequest{})
	if err != nil {
		return err
	}
	if m.json {
		return whole(m.cmd.OutOrStdout(), r)
	}
	return m.table(r, "AGENT\tNAME\tNODE\tSESSIONS\tSTARTS\tSTARTED\tHEARD\tIS", func(w *tabwriter.Writer) {
		for _, a := range r.GetAgents() {
			heard, is := "not since the resource manager started", "there"
			if a.GetHeardUnixMs() != 0 {
				heard = since(a.GetHeardUnixMs())
			}
			if a.GetAway() {
				is = "away: start maru-remote-cxl-agent --watch-only there again; what it vouched for stays held meanwhile"
			}
			_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\n", idText(a.GetAgentId()), a.GetName(), idText(a.GetNodeId()), a.GetSessionCount(), a.GetEpoch(),
				since(a.GetStartedUnixMs()), heard, is)
		}
	})
}

func (m *manager) dropHolds(ctx context.Context, node, session string, confirm bool) error {
	req, what := &maruv1.DropHoldsRequest{Confirm: true}, ""
	switch {
	case (node == "") == (session == ""):
		return fmt.Errorf("%w: drop-holds takes either a NODE or --session ID", base.ErrInvalid)
	case node != "":
		id, err := base.ParseID(node)
		if err != nil {
			return fmt.Errorf("NODE: %w; `maru rm holds` names the nodes", err)
		}
		req.NodeId, what = id[:], "a mapper of node "+node
	default:
		id, err := base.ParseID(session)
		if err != nil {
			return fmt.Errorf("--session: %w; `maru rm holds` names the sessions", err)
		}
		req.SessionId, what = id[:], "the process of session "+session
	}
	if !confirm {
		return fmt.Errorf("%w: drop-holds needs --confirm: %s that still runs would go on reading and writing memory that others get", base.ErrDenied, what)
	}
	r, err := m.DropHolds(ctx, req)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(m.cmd.OutOrStdout(), "%d holds dropped\n", r.GetDropped())
	return err
}

func (m *manager) dropAgent(ctx context.Context, agent string, confirm bool) error {
	id, err := base.ParseID(agent)
	if err != nil {
		return fmt.Errorf("ID: %w; `maru rm agents` lists them", err)
	}
	if !confirm {
		return fmt.Errorf("%w: drop-agent needs --confirm: the end of what agent %s vouched for cannot be proved any more", base.ErrDenied, agent)
	}
	r, err := m.DropAgent(ctx, &maruv1.DropAgentRequest{AgentId: id[:], Confirm: true})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(m.cmd.OutOrStdout(), "the agent is dropped; %d sessions are not provable any more (maru rm holds)\n", r.GetSessions())
	return err
}
