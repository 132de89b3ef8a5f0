package server

import (
	"cmp"
	"slices"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
)

// workersLocked lists the live workers of a scheduler's engine by rank: the targets
// that its probes name (RPC-25). A worker gets none. The directory's lock is held.
func (s *Server) workersLocked(sess *session, now time.Duration) []*maruv1.EngineWorker {
	if sess.role != base.RoleScheduler || sess.engine == "" {
		return nil
	}
	var out []*maruv1.EngineWorker
	for _, w := range s.sessions.all() {
		if w.role != base.RoleWorker || w.engine != sess.engine {
			continue
		}
		if _, _, err := s.dir.Secret(now, w.caller()); err != nil {
			continue // expired or over: a miss, not a target
		}
		out = append(out, &maruv1.EngineWorker{Rank: w.rank, WorldSize: w.world, SessionId: w.id[:], NamespaceId: w.namespaceID[:]})
	}
	slices.SortFunc(out, func(a, b *maruv1.EngineWorker) int { return cmp.Compare(a.GetRank(), b.GetRank()) })
	return out
}
