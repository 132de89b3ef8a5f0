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
			"change the device and the resource manager's state together, so its resource manager must not run.",
	}
	cmd.PersistentFlags().StringVar(&o.StateDir, "state-dir", "", "state directory of the resource manager (default: its own default)")
	sub := func(use, short string, writes bool, run func(context.Context, rm.DeviceOptions) (rm.DeviceInfo, error)) *cobra.Command {
		c := &cobra.Command{
			Use: use + " PATH", Short: short, Args: cobra.ExactArgs(1),
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
				return printDevice(cmd.OutOrStdout(), info)
			},
		}
		if writes {
			c.Flags().BoolVar(&o.Confirm, "confirm", false, "what is on the device may be lost, and nobody maps it")
		}
		return c
	}
	create := sub("init", "Make a device a pool", true, rm.InitDevice)
	create.Flags().StringVar(&coherence, "coherence", "", "hardware (one host, or CXL 3 back-invalidate) or software (flushes); must be given for a device")
	create.Flags().StringVar(&size, "size", "", "make a plain file of this size where none is")
	cmd.AddCommand(create,
		sub("show", "Show a device's header", false, rm.ShowDevice),
		sub("clear", "Remove a device from its pool and wipe its header", true, rm.ClearDevice),
		sub("takeover", "Go on with a device whose store was lost or restored: drops every region of the pool", true, rm.TakeoverDevice))
	return cmd
}

func printDevice(w io.Writer, i rm.DeviceInfo) error {
	_, err := fmt.Fprintf(w, "device     %s (%s)\nsize       %s, usable %s\npool       %s\nstore      %s\ncoherence  %s\n",
		i.Path, i.Kind, settings.FormatSize(i.SizeBytes), settings.FormatSize(i.UsableBytes), i.Header.Pool, i.Header.Store, i.Header.Coherence)
	if err == nil && i.DroppedRegions > 0 {
		_, err = fmt.Fprintf(w, "dropped    %d regions\n", i.DroppedRegions)
	}
	return err
}
