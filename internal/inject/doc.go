// Package inject fails the n-th file, mapping or lock call of a real program, so that a
// test can walk every one of them: n = 1, 2, ... until a run is not hit any more.
//
// The program is the test binary itself, started again as a subject. Before it runs, a
// seccomp filter sends the calls that touch files to the test (SECCOMP_RET_USER_NOTIF),
// which answers "go on" or an errno, or writes a part only. So the calls of the standard
// library and of bbolt are failed as well as our own, no package needs a seam for it, and
// no privilege is needed. What counts are calls on files under the paths that the test
// names; sockets, pipes and the runtime's own files do not.
//
// close is never failed: the kernel closes the descriptor whatever it answers, and a call
// that was answered by somebody else would leave it open.
//
// Only tests import it. Source: seccomp_unotify(2).
package inject
