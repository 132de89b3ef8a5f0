// Package storetest is a store in memory for tests. It fails at the commit that
// a test names, either before the batch took effect or after it: the two
// outcomes that a real store leaves its caller unsure about.
package storetest

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/store"
)

// Outcome says what a commit does.
type Outcome uint8

// Outcomes.
const (
	Succeed    Outcome = iota
	FailBefore         // an error, and nothing is durable
	FailAfter          // an error, and everything is durable
)

// Store is the store. The zero value is empty and ready.
type Store struct {
	mu struct {
		sync.Mutex
		data    map[string]map[string][]byte
		next    []Outcome
		commits int
	}
}

// Plan says what the next commits do, one after another; after them all succeed.
func (s *Store) Plan(outcomes ...Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.next = append(s.mu.next, outcomes...)
}

// CommitCount returns how many commits were asked for.
func (s *Store) CommitCount() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.commits
}

// Clone returns a store with the same content, as a crash would leave it.
func (s *Store) Clone() *Store {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &Store{}
	c.mu.data = map[string]map[string][]byte{}
	for b, keys := range s.mu.data {
		c.mu.data[b] = maps.Clone(keys)
	}
	return c
}

// Load is store.Store's.
func (s *Store) Load(visit func(bucket, key string, value []byte) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range slices.Sorted(maps.Keys(s.mu.data)) {
		for _, k := range slices.Sorted(maps.Keys(s.mu.data[b])) {
			if err := visit(b, k, slices.Clone(s.mu.data[b][k])); err != nil {
				return err
			}
		}
	}
	return nil
}

// Commit is store.Store's.
func (s *Store) Commit(changes []store.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.commits++
	outcome := Succeed
	if len(s.mu.next) > 0 {
		outcome, s.mu.next = s.mu.next[0], s.mu.next[1:]
	}
	if outcome != FailBefore {
		if s.mu.data == nil {
			s.mu.data = map[string]map[string][]byte{}
		}
		for _, c := range changes {
			if len(c.Value) == 0 {
				delete(s.mu.data[c.Bucket], c.Key)
				continue
			}
			if s.mu.data[c.Bucket] == nil {
				s.mu.data[c.Bucket] = map[string][]byte{}
			}
			s.mu.data[c.Bucket][c.Key] = slices.Clone(c.Value)
		}
	}
	if outcome != Succeed {
		return fmt.Errorf("%w: commit failed on demand", base.ErrUnavailable)
	}
	return nil
}

// Close is store.Store's.
func (s *Store) Close() error { return nil }
