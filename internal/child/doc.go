// Package child runs programs that speak in lines: orders go to a child's standard
// input, one JSON value a line, and what it says comes back from its standard output
// in the same way. Workers of the demonstration, parts of benchmarks and everything
// that the torture runs are such children.
//
// It is no supervisor: a child that ends is the caller's to notice (the lines end)
// and to explain (Failure has the end of its log).
//
// Concurrency: one goroutine sends and one reads; Kill and Signal may come from any.
package child
