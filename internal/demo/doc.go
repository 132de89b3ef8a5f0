// Package demo shows the whole store on one machine without an engine: worker
// processes with the KV geometry of a real model store and load prefix chains,
// one of them is killed in the middle of storing, and the others read what it
// had stored. Every byte that is loaded is checked.
//
// It is no benchmark (that is internal/bench): its rates are what the copy calls
// took, on a machine that also makes and checks the content.
//
// A worker is this program again, with Command as its first argument; it takes
// one JSON order a line on standard input and answers each with one JSON line.
package demo
