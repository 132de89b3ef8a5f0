package server

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootTime is CLOCK_BOOTTIME: monotonic, and it goes on while the machine sleeps,
// so that a session that slept past its TTL is found expired. Directory times are
// of this clock.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The clock has been there since Linux 2.6.39; without it nothing here is right.
		panic("maru: CLOCK_BOOTTIME cannot be read: " + err.Error())
	}
	return time.Duration(ts.Nano())
}
