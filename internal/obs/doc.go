// Package obs is how a process is seen from outside: log lines, Prometheus metrics, and
// the HTTP server with /metrics, /healthz, /readyz and /debug/pprof. It knows no metric
// of a service; each makes its own in the [Registry] that it is given.
//
// Nothing here is global: two servers in one process have two registries and two HTTP
// servers. Log lines of hot paths go through [Limited]; label values that come from
// users or peers go through [Values], so that neither can grow without bound.
//
// Locks: LimitedLogger.mu and Values.mu; neither is held while a line is written.
package obs
