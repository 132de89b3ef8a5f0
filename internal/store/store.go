// Package store is the durable key/value state of a daemon: what it can load at
// start, and batches that are on stable storage before Commit comes back. It is
// no cache and no database: there are no reads after Load, since a daemon's core
// holds its whole state in memory.
//
// The implementations are store/bolt (one file, embedded) and, in a later issue,
// etcd. store/storetest has one in memory that fails on demand.
package store

// Change is one step of a batch. Values are never empty: no value means that the
// key is deleted.
type Change struct {
	Bucket string
	Key    string // raw bytes
	Value  []byte
}

// Store keeps the state. Concurrency: one caller at a time.
type Store interface {
	// Load calls visit for everything in the store, in order of bucket and key. The
	// value is the callee's to keep. Errors: ErrCorrupt when the state does not hold
	// together, and what visit returns.
	Load(visit func(bucket, key string, value []byte) error) error

	// Commit makes a batch durable, whole or not at all; the last change of a key
	// counts. After an error nobody knows whether the batch is durable: the caller
	// keeps it and commits it again, with what came after, before it acknowledges
	// anything (W1, X1). Errors: ErrUnavailable (wrapping the cause).
	Commit(changes []Change) error

	// Close gives the store up. It is safe to call twice.
	Close() error
}
