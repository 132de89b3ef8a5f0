package client

import (
	"fmt"

	"github.com/xcena-dev/maru/internal/base"
)

// RegionFreeCount returns how many pages of an own region are free now. Errors:
// ErrNotFound.
func (c *Client) RegionFreeCount(region base.RegionID) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.mu.core.CountRegion(region)
	if n.Regions == 0 {
		return 0, fmt.Errorf("%w: region %d is not ours", base.ErrNotFound, region)
	}
	return n.Free, nil
}
