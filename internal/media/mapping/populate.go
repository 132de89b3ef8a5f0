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
)

// populateStepBytes is what one call touches: large enough that the call itself does
// not count, small enough that Unmap and a cancelled context wait some milliseconds.
const populateStepBytes = 8 << 20

// Populate touches the whole range ahead of its use, with at most workers goroutines
// (0: one). It changes no byte and may run beside readers and writers. It returns when
// all is touched, when ctx is done, or at the first error. Errors: ErrClosed (unmapped
// meanwhile), ErrFault, ErrFull, and the context's.
func (m *Mapping) Populate(ctx context.Context, workers int) error {
	workers = min(max(workers, 1), runtime.GOMAXPROCS(0), int(m.size/populateStepBytes)+1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var next atomic.Uint64
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for {
				if errs[i] = ctx.Err(); errs[i] != nil {
					return
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
	for {
		err := unix.Madvise(step, advice)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
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
