package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
	"github.com/xcena-dev/maru/internal/settings"
)

func (t *tool) deviceCommand() *cobra.Command {
	var (
		o               rm.DeviceOptions
		size, coherence string
	)
	cmd := &cobra.Command{
		Use:   "device",
		Short: "Make, show and clear the header of a pool's device",
		Long: "A devdax device becomes a pool by `maru device init` only; nothing initialises one by itself. The commands that write\n" +
			"change the device and the resource manager's state together, so its resource manager must not run, and they take its\n" +
			"--state-dir where it has one.\n\n" +
			"  maru device init /dev/dax0.0 --coherence hardware    # once; the resource manager finds it at its next start\n" +
			"  maru device show /dev/dax0.0\n" +
			"  maru device clear /dev/dax0.0 --confirm              # the device is free for something else",
	}
	cmd.PersistentFlags().StringVar(&o.StateDir, "state-dir", "", "state directory of the resource manager (default: its own default)")
	sub := func(use, short, did string, run func(context.Context, rm.DeviceOptions) (rm.DeviceInfo, error)) *cobra.Command {
		c := &cobra.Command{
			Use: use + " PATH", Short: short, Args: takes("PATH"),
			RunE: func(cmd *cobra.Command, args []string) error {
				opt := o
				opt.Path = args[0]
				var err error
				if opt.SizeBytes, err = sizeFlag("size", size); err != nil {
					return err
				}
				if coherence != "" {
					if opt.Coherence, err = base.ParseCoherence(coherence); err != nil {
						return fmt.Errorf("--coherence: %w", err)
					}
				}
				info, err := run(cmd.Context(), opt)
				if err != nil {
					return err
				}
				if did != "" {
					if _, err := fmt.Fprintln(cmd.OutOrStdout(), info.Path, did); err != nil {
						return err
					}
				}
				return printDevice(cmd.OutOrStdout(), info)
			},
		}
		if did != "" { // it writes
			c.Flags().BoolVar(&o.Confirm, "confirm", false, "what is on the device may be lost, and nobody maps it")
		}
		return c
	}
	create := sub("init", "Make a device a pool", "is a pool now:", rm.InitDevice)
	create.Flags().StringVar(&coherence, "coherence", "", "hardware (one host, or CXL 3 back-invalidate) or software (flushes); must be given for a device")
	create.Flags().StringVar(&size, "size", "", "make a plain file of this size where none is")
	cmd.AddCommand(create,
		sub("show", "Show a device's header", "", rm.ShowDevice),
		sub("clear", "Remove a device from its pool and wipe its header", "is no pool any more; it was:", rm.ClearDevice),
		sub("takeover", "Go on with a device whose store was lost or restored: drops every region of the pool", "is this resource manager's pool now:", rm.TakeoverDevice))
	return cmd
}

func printDevice(w io.Writer, i rm.DeviceInfo) error {
	_, err := fmt.Fprintf(w, "device     %s (%s)\nsize       %s, usable %s\npool       %s\nstore      %s\ncoherence  %s\n",
		i.Path, i.Kind, settings.AboutSize(i.SizeBytes), settings.AboutSize(i.UsableBytes), i.Header.Pool, i.Header.Store, i.Header.Coherence)
	if err == nil && i.DroppedRegions > 0 {
		_, err = fmt.Fprintf(w, "dropped    %d regions\n", i.DroppedRegions)
	}
	return err
}
