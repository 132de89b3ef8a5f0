package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/settings"
	"github.com/xcena-dev/maru/internal/up"
)

const stopTimeout = 20 * time.Second

func (t *tool) upCommand() *cobra.Command {
	var (
		opt      up.Options
		cpu, cxl string
		node     int
		pages    string
		asJSON   bool
	)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run resource manager and server in this process, on an emulated pool",
		Long: "up starts everything on this machine, prints the addresses, serves until SIGTERM or Ctrl-C, and leaves nothing behind.\n" +
			"The pool is a file on /dev/shm: memory of this machine, gone with the process. Memory of engines' own cpu pools is theirs:\n" +
			"they choose its NUMA node and pages (maru_cpu_numa_node, maru_cpu_hugepages).",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if opt.CPUBytes, err = sizeFlag("cpu-size", cpu); err != nil {
				return err
			}
			if opt.CXLBytes, err = sizeFlag("cxl-size", cxl); err != nil {
				return err
			}
			if cmd.Flags().Changed("numa-node") {
				opt.NUMANode = &node
			}
			if opt.Pages, err = up.ParsePages(pages); err != nil {
				return fmt.Errorf("--hugepages: %w", err)
			}
			if opt.Log, err = t.logger(); err != nil {
				return err
			}
			opt.Version = t.version
			return t.serve(cmd, opt, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cpu, "cpu-size", "", "budget of all sessions' private cpu pools, for example 8G (default: half of the memory)")
	f.StringVar(&cxl, "cxl-size", "1G", "size of the emulated cxl pool; 0: none")
	f.IntVar(&node, "numa-node", 0, "NUMA node that all memory of the emulated pool comes from (default: as the kernel likes)")
	f.StringVar(&pages, "hugepages", "off", "what the emulated pool is made of: off, or 2M for reserved huge pages")
	f.StringVar(&opt.Listen, "listen", up.DefaultListen, "HOST:PORT of the server; port 0: any free ports, for a second one beside the first")
	f.StringVar(&opt.Dir, "dir", "", "directory of state and pool (default: a new one on /dev/shm)")
	f.BoolVar(&opt.Insecure, "insecure", false, "allow a host that other machines can reach, without encryption")
	f.BoolVar(&opt.Overcommit, "overcommit", false, "allow a pool larger than the memory that is available")
	f.BoolVar(&asJSON, "json", false, "print the addresses as one JSON object")
	return cmd
}

// sizeFlag parses a size; "" and "0" are 0.
func sizeFlag(name, text string) (uint64, error) {
	if text == "" || text == "0" {
		return 0, nil
	}
	n, err := settings.ParseSize(text)
	if err != nil {
		return 0, fmt.Errorf("--%s: %w", name, err)
	}
	return n, nil
}

func (t *tool) serve(cmd *cobra.Command, opt up.Options, asJSON bool) error {
	ctx := cmd.Context()
	u, err := up.Start(ctx, opt)
	if err != nil {
		return err
	}
	err = t.printAddresses(cmd, u.Addresses(), asJSON)
	if err == nil {
		err = u.Wait(ctx)
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	return errors.Join(err, u.Close(closing))
}

func (t *tool) printAddresses(cmd *cobra.Command, a up.Addresses, asJSON bool) error {
	out := cmd.OutOrStdout()
	if asJSON {
		return printJSON(out, a)
	}
	manager, pool := a.RM, "none: engines keep KV in their own memory (maru_storage_backend=cpu)"
	if manager == "" {
		manager = "none (no cxl pool)"
	} else {
		pool = fmt.Sprintf("%s, %s", settings.FormatSize(a.PoolBytes), a.Pool)
	}
	_, err := fmt.Fprintf(out, "maru is up\n  server            %s\n  resource manager  %s\n  pool              %s\n  metrics           %s/metrics\n"+
		"  directory         %s\n\nGive engines maru_server_url=%s; Ctrl-C stops everything.\n",
		a.Server, manager, pool, a.HTTP, a.Dir, a.Server)
	return err
}
