package cli

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/rpc"
	"github.com/xcena-dev/maru/internal/settings"
)

const callTimeout = 10 * time.Second

// manager is a connection of `maru rm`.
type manager struct {
	maruv1.ResourceManagerClient
	cmd  *cobra.Command
	json bool
}

func (t *tool) rmCommand() *cobra.Command {
	var (
		address, server, session string
		asJSON, confirm          bool
	)
	cmd := &cobra.Command{
		Use: "rm", Short: "Look at a resource manager, and act as its operator",
		Long: "Lists what a resource manager has on record. When memory does not come back, begin with `maru rm holds`: it names who holds\n" +
			"it and who must act. The drop commands take an operator's word for what nobody can prove: say it only when it is true.",
	}
	cmd.PersistentFlags().StringVar(&address, "address", fmt.Sprintf("%s:%d", rm.DefaultHost, rm.DefaultPort),
		"HOST:PORT or unix:/path of the resource manager; drop commands need its Unix socket")
	cmd.PersistentFlags().BoolVar(&asJSON, "json", false, "print one JSON object")
	sub := func(use, short string, args cobra.PositionalArgs, run func(context.Context, *manager, []string) error) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Args: args,
			RunE: func(cmd *cobra.Command, args []string) error {
				ctx, cancel := context.WithTimeout(cmd.Context(), callTimeout)
				defer cancel()
				conn, err := rpc.Dial(ctx, address)
				if err != nil {
					return fmt.Errorf("resource manager: %w", err)
				}
				defer func() { _ = conn.Close() }()
				return run(ctx, &manager{maruv1.NewResourceManagerClient(conn), cmd, asJSON}, args)
			},
		}
	}
	dropHolds := sub("drop-holds [NODE]", "The operator's word that a node's mappers, or one session, are gone", cobra.MaximumNArgs(1),
		func(ctx context.Context, m *manager, args []string) error {
			return m.dropHolds(ctx, append(args, "")[0], session, confirm)
		})
	dropHolds.Flags().StringVar(&session, "session", "", "id of one session, in place of a node")
	dropOwner := sub("drop-owner ID", "End an owner: its regions are freed, or drain", takes("ID"),
		func(ctx context.Context, m *manager, args []string) error { return m.dropOwner(ctx, args[0], confirm) })
	dropAgent := sub("drop-agent ID", "End an agent whose state is lost: what it vouched for stays held, and is not provable", takes("ID"),
		func(ctx context.Context, m *manager, args []string) error { return m.dropAgent(ctx, args[0], confirm) })
	holds := sub("holds", "Who holds what since when, why it is not free, and who must act", cobra.NoArgs,
		func(ctx context.Context, m *manager, _ []string) error { return m.holds(ctx, server) })
	holds.Flags().StringVar(&server, "server", defaultServer, "HOST:PORT or unix:/path of the server that tells which sessions are suspect; empty asks none")
	for _, c := range []*cobra.Command{dropHolds, dropOwner, dropAgent} {
		c.Flags().BoolVar(&confirm, "confirm", false, "it is true: nothing of it maps or writes the pool any more")
	}
	cmd.AddCommand(
		sub("pools", "List the pools", cobra.NoArgs, func(ctx context.Context, m *manager, _ []string) error { return m.pools(ctx) }),
		sub("regions", "List the regions", cobra.NoArgs, func(ctx context.Context, m *manager, _ []string) error { return m.regions(ctx) }),
		holds,
		sub("agents", "List the agents, which vouch for mappers on other nodes", cobra.NoArgs, func(ctx context.Context, m *manager, _ []string) error { return m.agents(ctx) }),
		sub("owners", "List the owners", cobra.NoArgs, func(ctx context.Context, m *manager, _ []string) error { return m.owners(ctx) }),
		dropHolds, dropOwner, dropAgent)
	return cmd
}

// table prints rows, or the message as JSON.
func (m *manager) table(msg any, head string, rows func(w *tabwriter.Writer)) error {
	if m.json {
		return printJSON(m.cmd.OutOrStdout(), msg)
	}
	w := tabwriter.NewWriter(m.cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, head)
	rows(w)
	return w.Flush()
}

func idText(b []byte) string {
	id, err := base.IDFromBytes("id", b)
	if err != nil {
		return fmt.Sprintf("%x", b)
	}
	return base.SessionID(id).String()
}

func since(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

func (m *manager) pools(ctx context.Context) error {
	r, err := m.ListPools(ctx, &maruv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	return m.table(r, "POOL\tNAME\tKIND\tSTATE\tCAPACITY\tALLOCATED\tDRAINING\tLARGEST FREE\tREGIONS\tREASON", func(w *tabwriter.Writer) {
		for _, p := range r.GetPools() {
			_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", idText(p.GetPoolId()), p.GetName(), short(p.GetDeviceKind(), "DEVICE_KIND_"),
				short(p.GetState(), "POOL_STATE_"), settings.AboutSize(p.GetCapacityBytes()), settings.AboutSize(p.GetAllocatedBytes()),
				settings.AboutSize(p.GetDrainingBytes()), settings.AboutSize(p.GetLargestFreeBytes()), p.GetRegionCount(), p.GetReason())
		}
	})
}

func (m *manager) regions(ctx context.Context) error {
	all := &maruv1.ListRegionsResponse{}
	pools, err := m.ListPools(ctx, &maruv1.ListPoolsRequest{})
	if err != nil {
		return err
	}
	for _, p := range pools.GetPools() {
		var after uint32
		for {
			r, err := m.ListRegions(ctx, &maruv1.ListRegionsRequest{PoolId: p.GetPoolId(), AfterRegionId: after, Limit: 1000})
			if err != nil {
				return err
			}
			all.Regions = append(all.Regions, r.GetRegions()...)
			if !r.GetMore() || len(r.GetRegions()) == 0 {
				break
			}
			after = r.GetRegions()[len(r.GetRegions())-1].GetRegionId()
		}
	}
	return m.table(all, "POOL\tREGION\tSTATE\tBYTES\tPAGE\tOWNER\tWRITER\tHOLDERS\tSINCE", func(w *tabwriter.Writer) {
		for _, r := range all.GetRegions() {
			_, _ = fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", idText(r.GetPoolId()), r.GetRegionId(), short(r.GetState(), "REGION_STATE_"),
				settings.AboutSize(r.GetPlace().GetExtentLength()), settings.AboutSize(r.GetPlace().GetPageSize()), idText(r.GetOwnerId()),
				idText(r.GetWriterSession()), len(r.GetHolders()), since(r.GetAllocatedUnixMs()))
		}
	})
}

func (m *manager) owners(ctx context.Context) error {
	r, err := m.ListOwners(ctx, &maruv1.ListOwnersRequest{})
	if err != nil {
		return err
	}
	return m.table(r, "OWNER\tNAME\tINCARNATION\tPROVED\tNODE\tREGIONS\tBYTES\tSTARTED", func(w *tabwriter.Writer) {
		for _, o := range r.GetOwners() {
			_, _ = fmt.Fprintf(w, "%s\t%s\t%d\t%t\t%s\t%d\t%s\t%s\n", idText(o.GetOwnerId()), o.GetName(), o.GetIncarnation(), o.GetProved(), idText(o.GetNodeId()),
				o.GetRegionCount(), settings.AboutSize(o.GetAllocatedBytes()), since(o.GetStartedUnixMs()))
		}
	})
}

func (m *manager) dropOwner(ctx context.Context, owner string, confirm bool) error {
	id, err := base.ParseID(owner)
	if err != nil {
		return fmt.Errorf("ID: %w; `maru rm owners` lists them", err)
	}
	if !confirm {
		return fmt.Errorf("%w: drop-owner needs --confirm: everything that server %s keeps in the pools is lost", base.ErrDenied, owner)
	}
	r, err := m.DropOwner(ctx, &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(m.cmd.OutOrStdout(), "%d regions freed, %d drain until their mappers are gone (maru rm holds)\n", r.GetFreed(), r.GetDraining())
	return err
}
