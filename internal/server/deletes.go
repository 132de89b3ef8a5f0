package server

import (
	"context"
	"fmt"
	"time"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/directory"
	"github.com/xcena-dev/maru/internal/hot"
)

// deleteTimeout bounds a delete whose caller gave no deadline; what is not proved by
// then is answered UNKNOWN, and stays hidden.
const deleteTimeout = 30 * time.Second

// answerReserve is taken off the caller's deadline, so that UNKNOWN still reaches it.
const answerReserve = 50 * time.Millisecond

// waitDelete waits until every mark of a delete is cleared, or the time is up.
func (s *Server) waitDelete(ctx context.Context, id directory.DeleteID) (codes []base.Code, objects uint64, done bool) {
	wait := deleteTimeout
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, max(time.Until(deadline)-answerReserve, 0))
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	status := func() bool {
		_ = s.look(func(d *directory.Directory, _ time.Duration) error {
			codes, objects, done = d.DeleteStatus(id, codes[:0])
			return nil
		})
		return done
	}
	// The waiter is there before the status is read: no end can fall between the two.
	waiter := s.deletes.wait(id)
	defer s.deletes.forget(id, waiter)
	if status() {
		return codes, objects, true
	}
	select {
	case <-waiter.end:
	case <-timer.C:
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
	status()
	return codes, objects, done
}

// Delete hides keys at once and answers when no mark is left.
func (c *control) Delete(ctx context.Context, m *maruv1.DeleteRequest) (*maruv1.DeleteResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	if len(m.GetKeys()) > hot.MaxKeys {
		return nil, fmt.Errorf("%w: delete: %d keys, at most %d a call", base.ErrLimit, len(m.GetKeys()), hot.MaxKeys)
	}
	keys := make([]base.Key, len(m.GetKeys()))
	for i, k := range m.GetKeys() {
		if len(k) != base.KeyBytes {
			return nil, fmt.Errorf("%w: delete: key %d has %d bytes, must have %d", base.ErrInvalid, i, len(k), base.KeyBytes)
		}
		keys[i] = base.Key(k)
	}
	var id directory.DeleteID
	err := s.step(func(d *directory.Directory, now time.Duration) error {
		var err error
		id, err = d.Delete(now, sess.caller(), base.Sequence(m.GetOperation()), keys)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("delete: %w", err)
	}
	codes, _, _ := s.waitDelete(ctx, id)
	if len(codes) != len(keys) {
		// Its record left with the operation's: the caller's watermark passed it while it waited.
		return nil, fmt.Errorf("%w: delete: operation %d was resolved by its session meanwhile", base.ErrUnknown, m.GetOperation())
	}
	answer := &maruv1.DeleteResponse{Results: make([]*maruv1.Problem, len(codes))}
	for i, code := range codes {
		p := &maruv1.Problem{Code: uint32(code)}
		if code != base.CodeOK {
			p.Text = deleteText(keys[i], code)
		}
		answer.Results[i] = p
	}
	return answer, nil
}

func deleteText(k base.Key, code base.Code) string {
	switch code {
	case base.CodeUnknown:
		return fmt.Sprintf("%v: key %v is hidden, but not every holder of its bytes has confirmed yet", base.ErrorOf(code), k)
	case base.CodePinned:
		return fmt.Sprintf("%v: a view of key %v is out; release it first", base.ErrorOf(code), k)
	}
	return fmt.Sprintf("%v: key %v", base.ErrorOf(code), k)
}

// DeleteNamespace hides a whole namespace: the caller's own, or for an operator any.
func (c *control) DeleteNamespace(ctx context.Context, m *maruv1.DeleteNamespaceRequest) (*maruv1.DeleteNamespaceResponse, error) {
	s, sess := c.server, sessionOf(ctx)
	if len(m.GetNamespaceId()) != base.NamespaceBytes {
		return nil, fmt.Errorf("%w: delete namespace: namespace_id has %d bytes, must have %d", base.ErrInvalid, len(m.GetNamespaceId()), base.NamespaceBytes)
	}
	namespace := base.NamespaceID(m.GetNamespaceId())
	if sess == nil {
		if err := operatorOnly(ctx, "deleting a namespace"); err != nil {
			return nil, err
		}
	}
	var id directory.DeleteID
	err := s.step(func(d *directory.Directory, now time.Duration) error {
		var err error
		if sess == nil {
			id, err = d.OperatorDeleteNamespace(now, namespace)
		} else {
			id, err = d.DeleteNamespace(now, sess.caller(), base.Sequence(m.GetOperation()), namespace)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("delete namespace: %w", err)
	}
	s.log.Info("a namespace is being deleted", "namespace", namespace.String(), "by_operator", sess == nil)
	var before uint64
	_ = s.look(func(d *directory.Directory, _ time.Duration) error {
		_, before, _ = d.DeleteStatus(id, nil)
		return nil
	})
	_, objects, done := s.waitDelete(ctx, id)
	objects = max(objects, before)
	if !done {
		return nil, fmt.Errorf("%w: delete namespace: %d objects are hidden, but not every holder of their bytes has confirmed yet",
			base.ErrUnknown, objects)
	}
	return &maruv1.DeleteNamespaceResponse{Objects: objects}, nil
}
