// Package client is Maru's client: one engine process's way into the store. It opens
// a session at a maru-server, allocates pages of private cpu memory and of shared cxl
// regions, copies objects into them and out of them, and publishes them. It is the
// only public Go package; the C ABI (internal/cabi) and Python stand on it.
//
// It is not a policy: which replica is read and what is evicted is the server's
// decision. It is not durable: what the process held is the server's and the resource
// manager's to remember. Its own state is decided in internal/session, a pure core;
// this package is the shell around it: sockets, mappings, copy threads, clock.
//
// # What a caller sees of a fault
//
// A fault of the store is a miss, one log line and a counter; never a wrong byte. Calls
// answer item by item with a base.Code; the error of a call itself says that the call
// was not made: bad arguments, a closed client, a context that ended first. While the
// server is away every probe, load and retrieve is a miss and every store is refused
// with CodeUnavailable.
//
// # Goroutines
//
// A client owns, from Open to Close: one heartbeat and reconnect loop, one event
// stream, one background worker (releases, resolves, acknowledgements, mappings that
// go), CopyThreads copy threads, one pre-touch thread while memory is pre-touched, up to
// HotConnections workers while lookups are queued, and one watch of the resource manager
// when it holds regions. After a Close that nobody heard one goroutine more goes on
// telling it, until it was heard or the process ends.
//
// # Lock order
//
// Client.events (events in their order) and Client.growMu (one growth at a time) >
// Client.mapMu (one Describe and Hold, or one unmapping and Unhold, at a time) >
// mapped.marks (the page lock of one region: its marks are written and cleared under it)
// > Client.mu (the core). lookups.mu > transfers.mu and closing. mapsMu, closing,
// transfers.mu, manager.mu and hotPool.mu are leaves. Client.mu is never held over I/O and
// never over a copy. OnRegion is called with none of them.
//
// # Invariants
//
//	CL1. Nothing is handed out of a load unless the session was valid when its last byte
//	     was read; bytes of memory that others write, without a root over them, need the
//	     server's confirmation of their Release besides (R3).
//	CL2. A mapping goes only when the core says that no lease, view or page of it is in
//	     use (D1).
//	CL3. A mark is written under region.marks after the core confirmed generation and
//	     epoch; a retire changes the core first and clears under the same lock (R7).
//	CL4. A page whose Commit has no answer is neither freed nor reported as stored (X1).
//
// Source: docs/PROTOCOL.md sections 1 and 3.
package client
