package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/demo"
	"github.com/xcena-dev/maru/internal/up"
)

func (t *tool) demoCommand() *cobra.Command {
	var (
		cfg    demo.Config
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Worker processes store and load prefix chains; one is killed; every byte is checked",
		Long: "demo starts an embedded maru and worker processes with the KV geometry of Llama-3.1-8B. They store prefix chains,\n" +
			"read those of the others, and check every byte. One worker is killed with SIGKILL while it stores; the others read\n" +
			"what it had stored. It needs neither Python nor an engine.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			pool, err := cfg.PoolBytes()
			if err != nil {
				return err
			}
			log, err := t.quiet()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			cfg.Progress = func(format string, args ...any) {
				_, _ = fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...)
			}
			u, err := up.Start(ctx, up.Options{Listen: "127.0.0.1:0", CXLBytes: pool, HTTP: up.HTTPOff, Log: log, Version: t.version})
			if err != nil {
				return err
			}
			cfg.Server = u.Addresses().Server
			result, err := demo.Run(ctx, cfg)
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
			defer cancel()
			if err := errors.Join(err, u.Close(closing)); err != nil {
				return err
			}
			return t.printDemo(cmd, result, asJSON)
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Workers, "workers", 3, "worker processes, at least 2")
	f.IntVar(&cfg.Scale, "scale", 16, "objects have 1/scale of the model's 32 layers: 1 is 32 MiB, 16 is 2 MiB an object")
	f.IntVar(&cfg.Chains, "chains", 3, "chains of each worker")
	f.IntVar(&cfg.Shared, "shared-chunks", 2, "leading chunks that all chains have")
	f.IntVar(&cfg.Own, "own-chunks", 4, "further chunks of each chain")
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func (t *tool) printDemo(cmd *cobra.Command, result *demo.Result, asJSON bool) error {
	var err error
	if asJSON {
		err = printJSON(cmd.OutOrStdout(), result)
	} else {
		err = result.Print(cmd.OutOrStdout())
	}
	if err == nil && !result.OK {
		err = errFailed
	}
	return err
}
