// Package torture runs everything at once on one shared pool and breaks it, for as long
// as it is told: a resource manager, a server and workers as processes of their own,
// which a seeded script kills, stops past the session's TTL, continues, restarts and
// gives disk errors, while the workers store, load, hold views, delete, reopen and fork.
//
// Every value says in its bytes which key and which store of it (a generation, unique
// in a run) it is, so any byte that is wrong, torn or stale is seen by whoever reads it.
// What every process was told is judged in one place (judge.go): nothing that was
// deleted with an acknowledgement is read again. At the end, with the faults over, the
// programs must come to rest and give every byte back.
//
// It is no simulator (internal/sim): timing is the machine's, a seed repeats the
// script and not the interleaving. It is no benchmark.
//
// Source: docs/PROTOCOL.md sections 3 and 4 (R1 to R7, D1, L1).
package torture
