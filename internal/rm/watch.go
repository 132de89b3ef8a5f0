package rm

import (
	"context"
	"fmt"

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

// caller says who makes a call. Over TCP node and boot are what the caller claims; the
// session's secret, where there is one, shows that it may act for the session.
func (s *Server) caller(ctx context.Context, node base.NodeID, boot base.BootID, secret []byte) core.Peer {
	p := peer.FromContext(ctx)
	switch {
	case p == nil:
		return core.Peer{
			Node: node, Boot: boot, Secret: secret,
			Reason: "it called over TCP and no agent of its node vouches for it: run maru-remote-cxl-agent --watch-only there",
		}
	case !p.Provable():
		return core.Peer{Node: s.identity.Node, Boot: s.identity.Boot, Secret: secret, Reason: p.Unprovable}
	}
	return core.Peer{Node: s.identity.Node, Boot: s.identity.Boot, Secret: secret, Process: processID(p.Process)}
}

// newEnds starts the watcher of this node.
func (s *Server) newEnds() (*peer.Ends, error) {
	return peer.NewEnds(peer.EndsOptions{
		Ended: func(p peer.Process, proof peer.Proof) { s.ended(processID(p), core.Proof(proof.String())) },
		Lost:  s.lost,
	})
}

// watch watches a process from now on; one that has ended meanwhile is reported
// at once. The committer calls it after the process is on record in the core, so
// that no end is missed: word of it is taken by a later batch.
func (s *Server) watch(ctx context.Context, p core.ProcessID) {
	if p.IsZero() {
		return
	}
	live := peer.FromContext(ctx)
	if live == nil || processID(live.Process) != p {
		return // an agent's word, which it watches
	}
	if err := s.watcher.Watch(live); err != nil {
		s.lost(live.Process, err)
		return
	}
	s.core.Watched(p)
}

// lost says that the end of a process on record cannot be proved here from now on.
// It is called by the committer, or before there is one.
func (s *Server) lost(p peer.Process, why error) {
	s.core.Unwatched(processID(p), why.Error())
	s.log.Warn("a mapper cannot be watched; its holds end when it says so, by a reboot, or by maru rm drop-holds", "process", p, "error", why)
}

// watchKnown watches what the store knows, at start.
func (s *Server) watchKnown() {
	if p, err := peer.Self(); err != nil || !p.HostNamespace() {
		s.log.Warn("this resource manager does not run in the host's pid namespace: after its restart in another one the end of mappers that are "+
			"there now cannot be proved", "cure", "run it in the host's pid namespace (--pid=host, hostPID: true)", "error", err)
	}
	for _, p := range s.core.Processes() {
		_ = s.watcher.Reopen(peerProcess(p)) // Ended or Lost has been told
	}
}

// checkSecret refuses what cannot be a session's secret. None is of a client before it.
func checkSecret(field string, b []byte) error {
	if len(b) != 0 && len(b) != core.SessionSecretBytes {
		return fmt.Errorf("%w: %s has %d bytes, must have %d", base.ErrInvalid, field, len(b), core.SessionSecretBytes)
	}
	return nil
}
