package bench

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// use is what a process has used so far.
type use struct {
	CPU           time.Duration `json:"cpu"`
	ResidentBytes uint64        `json:"resident_bytes"`
}

// used reads the own process's use. Memory of pools (files of tmpfs) is no part of it.
func used() (use, error) {
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		return use{}, fmt.Errorf("getrusage: %w", err)
	}
	u := use{CPU: time.Duration(r.Utime.Nano() + r.Stime.Nano())}
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return u, err
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		name, value, _ := strings.Cut(s.Text(), ":")
		if name != "RssAnon" && name != "RssFile" {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 53)
		if err != nil {
			return u, fmt.Errorf("/proc/self/status: %s: %w", name, err)
		}
		u.ResidentBytes += kib << 10
	}
	return u, nil
}
