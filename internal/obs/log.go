package obs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// LogOptions of a process. The zero value is text at level info.
type LogOptions struct {
	Format string // "text" or "json"; empty means text
	Level  string // "debug", "info", "warn" or "error"; empty means info
}

// ParseLevel reads a level. Errors: ErrInvalid.
func ParseLevel(s string) (slog.Level, error) {
	switch strings.ToLower(s) {
	case "debug":
		return slog.LevelDebug, nil
	case "", "info":
		return slog.LevelInfo, nil
	case "warn", "warning":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("%w: log level %q is unknown, allowed: debug, info, warn, error", base.ErrInvalid, s)
}

// NewLogger makes a logger that writes lines to w. Errors: ErrInvalid.
func NewLogger(w io.Writer, o LogOptions) (*slog.Logger, error) {
	level, err := ParseLevel(o.Level)
	if err != nil {
		return nil, err
	}
	h := &slog.HandlerOptions{Level: level}
	switch o.Format {
	case "", "text":
		return slog.New(slog.NewTextHandler(w, h)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, h)), nil
	}
	return nil, fmt.Errorf("%w: log format %q is unknown, allowed: text, json", base.ErrInvalid, o.Format)
}

// maxLimitedKeyCount bounds what a LimitedLogger remembers.
const maxLimitedKeyCount = 1024

// LimitedLogger writes at most one line per key and interval, and says in the next one
// how many it left out. Keys beyond its bound share one. Concurrency: safe for
// concurrent use; a suppressed call costs a lock and a map access.
type LimitedLogger struct {
	log      *slog.Logger
	interval time.Duration
	now      func() time.Time

	mu struct {
		sync.Mutex
		keys     map[string]*limitedKey
		overflow limitedKey
	}
}

type limitedKey struct {
	last       time.Time
	suppressed uint64
}

// Limited makes a rate-limited logger.
func Limited(log *slog.Logger, interval time.Duration) *LimitedLogger {
	l := &LimitedLogger{log: log, interval: interval, now: time.Now}
	l.mu.keys = map[string]*limitedKey{}
	return l
}

// Debug writes a line unless one of this key was written within the interval.
func (l *LimitedLogger) Debug(key, msg string, args ...any) {
	l.write(slog.LevelDebug, key, msg, args)
}

// Info is Debug at level info.
func (l *LimitedLogger) Info(key, msg string, args ...any) { l.write(slog.LevelInfo, key, msg, args) }

// Warn is Debug at level warn.
func (l *LimitedLogger) Warn(key, msg string, args ...any) { l.write(slog.LevelWarn, key, msg, args) }

// Error is Debug at level error.
func (l *LimitedLogger) Error(key, msg string, args ...any) { l.write(slog.LevelError, key, msg, args) }

func (l *LimitedLogger) write(level slog.Level, key, msg string, args []any) {
	ctx := context.Background()
	if !l.log.Enabled(ctx, level) {
		return
	}
	suppressed, ok := l.admit(key)
	if !ok {
		return
	}
	if suppressed > 0 {
		args = append(args[:len(args):len(args)], "suppressed", suppressed)
	}
	l.log.Log(ctx, level, msg, args...)
}

func (l *LimitedLogger) admit(key string) (suppressed uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	k := l.mu.keys[key]
	if k == nil {
		k = l.addLocked(key, now)
	}
	if !k.last.IsZero() && now.Sub(k.last) < l.interval {
		k.suppressed++
		return 0, false
	}
	suppressed = k.suppressed
	k.last, k.suppressed = now, 0
	return suppressed, true
}

func (l *LimitedLogger) addLocked(key string, now time.Time) *limitedKey {
	if len(l.mu.keys) >= maxLimitedKeyCount {
		for s, k := range l.mu.keys {
			if now.Sub(k.last) >= l.interval {
				delete(l.mu.keys, s)
			}
		}
	}
	if len(l.mu.keys) >= maxLimitedKeyCount {
		return &l.mu.overflow
	}
	k := &limitedKey{}
	l.mu.keys[strings.Clone(key)] = k
	return k
}
