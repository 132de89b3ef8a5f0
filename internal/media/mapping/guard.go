package mapping

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
)

// live holds the ranges in which a fault is a fault of a pool. It is looked at only
// when one happened, so that a plain map does.
var live struct {
	sync.Mutex
	ranges map[uintptr]uintptr // start to end
}

func addLive(start, end uintptr) {
	live.Lock()
	defer live.Unlock()
	if live.ranges == nil {
		live.ranges = map[uintptr]uintptr{}
	}
	live.ranges[start] = end
}

func removeLive(start uintptr) {
	live.Lock()
	defer live.Unlock()
	delete(live.ranges, start)
}

func isLive(a uintptr) bool {
	live.Lock()
	defer live.Unlock()
	for start, end := range live.ranges {
		if a >= start && a < end {
			return true
		}
	}
	return false
}

// LiveCount returns how many mappings this process has; for leak checks.
func LiveCount() int {
	live.Lock()
	defer live.Unlock()
	return len(live.ranges)
}

// Guard runs fn, which may read and write mapped memory, and turns a fault in any
// live mapping into an error. fn must not hold locks that it does not release by
// defer. Other panics go on. Concurrency: it guards the calling goroutine only;
// goroutines that fn starts need a Guard of their own. Errors: ErrFault.
func Guard(fn func()) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		v := recover()
		if v == nil {
			return
		}
		fault, ok := v.(interface {
			runtime.Error
			Addr() uintptr
		})
		if !ok || !isLive(fault.Addr()) {
			panic(v)
		}
		err = fmt.Errorf("%w at address %#x of mapped memory (truncated, poisoned, or written although read-only)",
			base.ErrFault, fault.Addr())
	}()
	fn()
	return nil
}
