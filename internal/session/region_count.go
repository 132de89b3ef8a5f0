package session

import "github.com/xcena-dev/maru/internal/base"

// CountRegion counts the pages of one own region; Regions is 0 when it is none.
func (c *Core) CountRegion(id base.RegionID) Counts {
	return c.countIf(func(r *region) bool { return r.ID == id })
}
