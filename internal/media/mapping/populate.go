package mapping

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/media/memlimit"
)

// populateStepBytes is what one call touches: large enough that the call itself does
// not count, small enough that Unmap and a cancelled context wait some milliseconds.
const populateStepBytes = 8 << 20

const (
	// maxReserveBytes is what pre-touching leaves to others. Touching ahead is a convenience:
	// it must not be what makes the kernel kill an engine.
	maxReserveBytes = 512 << 20
	// reservePart keeps the reserve small in small containers.
	reservePart = 16
	// memoryCheckSteps is how often memory is looked at: each 64 MiB of a worker.
	memoryCheckSteps = 8
	// maxRetryCount bounds the retries of a step that the kernel asks to try again.
	maxRetryCount = 1000
)

// Populate touches the whole range ahead of its use, with at most workers goroutines
// (0: one). It changes no byte and may run beside readers and writers. It returns when
// all is touched, when ctx is done, or at the first error. Errors: ErrClosed (unmapped
// meanwhile), ErrFault, ErrFull (also when memory of the machine or of a control group is
// about to run out; what was not touched then is touched by its use), and the context's.
func (m *Mapping) Populate(ctx context.Context, workers int) error {
	reserve, err := m.reserve()
	if err != nil {
		return err
	}
	workers = min(max(workers, 1), runtime.GOMAXPROCS(0), int(m.size/populateStepBytes)+1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var next atomic.Uint64
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for n := 0; ; n++ {
				if errs[i] = ctx.Err(); errs[i] != nil {
					return
				}
				if n%memoryCheckSteps == 0 {
					if errs[i] = m.checkMemory(reserve); errs[i] != nil {
						cancel()
						return
					}
				}
				offset := next.Add(populateStepBytes) - populateStepBytes
				if offset >= m.size {
					return
				}
				if errs[i] = m.populateStep(offset); errs[i] != nil {
					cancel()
					return
				}
			}
		})
	}
	wg.Wait()
	// The cause comes before the cancellations that it led to.
	var first error
	for _, err := range errs {
		if err != nil && (first == nil || errors.Is(first, context.Canceled)) {
			first = err
		}
	}
	return first
}

// reserve is how much must stay available while this mapping is touched.
func (m *Mapping) reserve() (uint64, error) {
	if m.backing != BackingMemory {
		return 0, nil
	}
	have, err := memlimit.ReadOn(m.root, m.node)
	if err != nil {
		return 0, fmt.Errorf("touching %s ahead: %w", m.name, err)
	}
	return min(maxReserveBytes, have.Bytes/reservePart), nil
}

func (m *Mapping) checkMemory(reserve uint64) error {
	if m.backing != BackingMemory {
		return nil
	}
	have, err := memlimit.ReadOn(m.root, m.node)
	if err != nil {
		return fmt.Errorf("touching %s ahead: %w", m.name, err)
	}
	if left := min(m.size, populateStepBytes*memoryCheckSteps); have.Bytes < reserve+left {
		return fmt.Errorf("%w: touching %s ahead stops: %d bytes are available (%s), the next %d would leave less than %d",
			base.ErrFull, m.name, have.Bytes, have.Source, left, reserve)
	}
	return nil
}

func (m *Mapping) populateStep(offset uint64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.mu.data == nil {
		return fmt.Errorf("%w: %s was unmapped while it was being touched", base.ErrClosed, m.name)
	}
	step := m.mu.data[offset:min(offset+populateStepBytes, m.size)]
	advice := unix.MADV_POPULATE_WRITE
	if m.access == ReadOnly {
		advice = unix.MADV_POPULATE_READ
	}
	for try := 0; ; try++ {
		err := unix.Madvise(step, advice)
		switch {
		case err == nil:
			return nil
		case try < maxRetryCount && (errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN)):
			continue
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
			// Linux before 5.14. Reading is enough: shared memory allocates a page then too.
			return m.Guard(func() { touch(step) })
		case errors.Is(err, unix.EFAULT), errors.Is(err, unix.EHWPOISON):
			return fmt.Errorf("%w: touching %s at %d: %w", base.ErrFault, m.name, offset, err)
		case errors.Is(err, unix.ENOMEM):
			return fmt.Errorf("%w: touching %s at %d: %w", base.ErrFull, m.name, offset, err)
		}
		return fmt.Errorf("%w: touching %s at %d: %w", base.ErrUnsupported, m.name, offset, err)
	}
}

// touched keeps the reads of touch from being dropped by the compiler.
var touched atomic.Uint32

func touch(b []byte) {
	var sum uint32
	for i := 0; i < len(b); i += os.Getpagesize() {
		sum += uint32(b[i])
	}
	touched.Store(sum)
}
