package rm

import (
	"context"
	"crypto/sha256"
	"encoding/binary"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/peer"
	"github.com/xcena-dev/maru/internal/rm/core"
)

func processID(p peer.Process) core.ProcessID {
	return core.ProcessID{PID: int64(p.PID), Namespace: p.PIDNamespace, StartTicks: p.StartTicks, Boot: p.BootID}
}

func peerProcess(p core.ProcessID) peer.Process {
	return peer.Process{PID: int(p.PID), PIDNamespace: p.Namespace, StartTicks: p.StartTicks, BootID: p.Boot}
}

// watchKey names a process in the watcher: sessions of one process share a watch.
func watchKey(p core.ProcessID) peer.Key {
	var b [40]byte
	binary.LittleEndian.PutUint64(b[0:], uint64(p.PID))
	binary.LittleEndian.PutUint64(b[8:], p.Namespace)
	binary.LittleEndian.PutUint64(b[16:], p.StartTicks)
	copy(b[24:], p.Boot[:])
	sum := sha256.Sum256(b[:])
	return peer.Key(sum[:16])
}

// caller says who makes a call. Over TCP it is what the caller claims.
func (s *Server) caller(ctx context.Context, node base.NodeID, boot base.BootID) core.Peer {
	p := peer.FromContext(ctx)
	switch {
	case p == nil:
		return core.Peer{Node: node, Boot: boot, Reason: "it called over TCP; the end of a local process can be proved over the Unix socket"}
	case !p.Provable():
		return core.Peer{Node: s.identity.Node, Boot: s.identity.Boot, Reason: p.Unprovable}
	}
	return core.Peer{Node: s.identity.Node, Boot: s.identity.Boot, Process: processID(p.Process)}
}

// watch watches a process from now on; one that has ended meanwhile is reported
// at once. The committer calls it after the process is on record in the core, so
// that no end is missed: word of it is taken by a later batch.
func (s *Server) watch(ctx context.Context, p core.ProcessID) {
	if p.IsZero() {
		return
	}
	report := func(string) { s.ended(p, core.ProofPidfd) }
	if live := peer.FromContext(ctx); live != nil {
		if err := s.watcher.Watch(watchKey(p), live, report); err == nil {
			return
		}
	}
	// The connection has gone already, and its pidfd with it.
	s.watchAgain(p)
}

func (s *Server) watchAgain(p core.ProcessID) {
	gone, err := s.watcher.WatchProcess(watchKey(p), peerProcess(p), func(string) { s.ended(p, core.ProofPidfd) })
	switch {
	case gone:
		proof := core.ProofPidfd
		if p.Boot != s.identity.Boot {
			proof = core.ProofReboot
		}
		s.ended(p, proof)
	case err != nil:
		s.log.Warn("a mapper cannot be watched; its holds end when it says so, by a reboot, or by maru rm drop-holds", "process", p, "error", err)
	}
}

// watchKnown watches what the store knows, at start.
func (s *Server) watchKnown() {
	for _, p := range s.core.Processes() {
		s.watchAgain(p)
	}
}
