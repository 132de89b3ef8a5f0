//go:build !cabifake

package main

import (
	"context"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/cabi"
	"github.com/xcena-dev/maru/internal/gpu"
)

// opener makes clients whose layouts may lie on a GPU; the driver is looked for when the
// first one does.
var opener cabi.Opener = func(ctx context.Context, cfg client.Config) (cabi.Client, error) {
	cfg.Devices = gpu.Driver{}
	return cabi.OpenClient(ctx, cfg)
}
