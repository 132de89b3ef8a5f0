package bench

import (
	"strings"
	"sync"
)

// tail keeps the end of a child's log.
type tail struct {
	mu struct {
		sync.Mutex
		b []byte
	}
}

const tailBytes = 8 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.b = append(t.mu.b, b...)
	if extra := len(t.mu.b) - tailBytes; extra > 0 {
		t.mu.b = append(t.mu.b[:0], t.mu.b[extra:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.mu.b))
}
