// Package obstest takes what programs log, for tests that look at it.
package obstest

import (
	"bytes"
	"log/slog"
	"sync"
)

// Text is what was written so far. The zero value is empty. Concurrency: safe for
// concurrent use.
type Text struct {
	mu struct {
		sync.Mutex
		written bytes.Buffer
	}
}

// Write appends; it never fails.
func (t *Text) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.written.Write(b)
}

// String returns all of it.
func (t *Text) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.written.String()
}

// Logger writes here, at every level.
func (t *Text) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(t, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
