package cli

import (
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/server"
	"github.com/xcena-dev/maru/internal/settings"
)

// short shows an enum without the prefix of its type.
func short(v fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.TrimPrefix(v.String(), prefix))
}

func (t *tool) usageCommand() *cobra.Command {
	var (
		address string
		asJSON  bool
	)
	cmd := &cobra.Command{
		Use: "usage", Short: "Capacity, sessions and counts of a server", Args: cobra.NoArgs,
		Long: `Asks a server what it keeps. Columns of a pool:

  CAPACITY     what the pool has
  GRANTED      regions that sessions have
  ALLOCATED    pages of them in use; WRITING, READY (readable now) and RETIRING (deleted, still being read) are parts of it
  QUARANTINED  pages whose writer's fate is not known yet
  KEPT         regions of sessions that have ended, still readable until the room is needed

A session is live, suspect (no heartbeat, its pages are neither read nor reused), left (closed, its process lives), kept (ended, its
regions are readable) or awaited (after a restart). Hits and misses: /metrics, and ` + "`maru explain`" + ` for vLLM's requests.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), callTimeout)
			defer cancel()
			conn, err := rpc.Dial(ctx, address)
			if err != nil {
				return fmt.Errorf("maru-server: %w", err)
			}
			defer func() { _ = conn.Close() }()
			r, err := maruv1.NewMetadataServerClient(conn).Usage(ctx, &maruv1.UsageRequest{})
			if err != nil {
				return err
			}
			if asJSON {
				b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(r)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", b)
				return err
			}
			return printUsage(cmd, r)
		},
	}
	cmd.Flags().StringVar(&address, "address", fmt.Sprintf("%s:%d", server.DefaultHost, server.DefaultPort), "HOST:PORT or unix:/path of the server")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func printUsage(cmd *cobra.Command, r *maruv1.UsageResponse) error {
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintf(w, "objects %d, namespaces %d, sessions %d\n\n", r.GetObjects(), r.GetNamespaces(), len(r.GetSessions()))
	if r.GetDegraded() {
		_, _ = fmt.Fprintf(w, "DEGRADED: %s\n\n", r.GetReason())
	}
	_, _ = fmt.Fprintln(w, "POOL\tMEDIUM\tCAPACITY\tGRANTED\tALLOCATED\tWRITING\tREADY\tRETIRING\tQUARANTINED\tKEPT\tOBJECTS\tLEASES")
	pools := r.GetL1Storage().GetPools()
	if len(pools) == 0 {
		pools = r.GetCpuStorage().GetPools()
	}
	for _, p := range pools {
		name := p.GetPool().GetName()
		if len(p.GetSessionId()) > 0 {
			name = "cpu of " + idText(p.GetSessionId())
		}
		_, _ = fmt.Fprintf(w, "%s\t%s", name, short(p.GetPool().GetMedium(), "MEDIUM_"))
		for _, n := range []uint64{p.GetCapacityBytes(), p.GetGrantedBytes(), p.GetAllocatedBytes(), p.GetWritingBytes(), p.GetReadyBytes(), p.GetRetiringBytes(), p.GetQuarantinedBytes(), p.GetKeptBytes()} {
			_, _ = fmt.Fprintf(w, "\t%s", settings.AboutSize(n))
		}
		_, _ = fmt.Fprintf(w, "\t%d\t%d\n", p.GetObjects(), p.GetLeases())
	}
	_, _ = fmt.Fprintln(w, "\nSESSION\tROLE\tSTATE\tENGINE\tINSTANCE\tREGIONS\tLEASES")
	for _, s := range r.GetSessions() {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%d\t%d\n", idText(s.GetSessionId()), short(s.GetRole(), "ROLE_"), s.GetState(), s.GetEngineId(), s.GetInstanceId(), s.GetRegions(), s.GetLeases())
	}
	return w.Flush()
}
