// Package main is libmaru.so: the exports that include/maru.h promises, and
// nothing else. shim.c has the names of the header, refuses calls in a forked child
// before Go is entered, and keeps each thread's last error text; exports_unsafe.go
// turns C pointers into slices for internal/cabi, where everything is decided.
//
// Build: go build -buildmode=c-shared -o bin/libmaru.so ./cmd/libmaru
package main

import "github.com/xcena-dev/maru/internal/cabi"

// library is the one table of this process: there is no other state.
var library = cabi.NewLibrary(opener)

func main() {}
